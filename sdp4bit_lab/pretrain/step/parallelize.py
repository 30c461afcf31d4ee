"""Lay out a model over all ranks: tensor and pipeline parallelism, FSDP2, quantized communication.

Ranks form a mesh [pipeline, data, tensor]: tensor-parallel ranks are adjacent, pipeline stages far apart.
FSDP2 shards every stage over its data ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import sdp4bit
from sdp4bit.collectives.errors import job_timeout, set_timeout
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.config.training import ComputeDtype, Precision
from sdp4bit_lab.pretrain.model.gpt import GPT, Block
from sdp4bit_lab.pretrain.model.tensor_parallel import BLOCK_STYLES, EMBEDDING_STYLE

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the dtype that weights are gathered in."""
    return _DTYPES[precision]


def resolve_compute_dtype(
    chosen: ComputeDtype, *, param_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the dtype of activations."""
    if chosen != "auto":
        return _DTYPES[chosen]
    if device.type == "cpu" and not _cpu_has_bf16():
        return torch.float32
    return param_dtype


def _cpu_has_bf16() -> bool:
    capabilities: Callable[[], dict[str, bool]] | None = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # torch 2.9
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(capabilities().get("avx512_bf16", False))


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """This rank's position in the mesh [pipeline, data, tensor]."""

    mesh: DeviceMesh
    ranks: Ranks

    @property
    def pipeline(self) -> DeviceMesh:
        """Ranks with the other stages of the same replica."""
        return self.mesh["pipeline"]

    @property
    def data(self) -> DeviceMesh:
        """Ranks with the same part of the model and different data; FSDP2's ranks."""
        return self.mesh["data"]

    @property
    def tensor(self) -> DeviceMesh:
        """Ranks with other parts of the same matrices."""
        return self.mesh["tensor"]

    @property
    def random_stream(self) -> int:
        """Random stream of this rank, shared only with its tensor-parallel peers."""
        return self.pipeline.get_local_rank() * self.data.size() + self.data.get_local_rank()

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: one rank per part of the data."""
        is_last = self.pipeline.get_local_rank() == self.pipeline.size() - 1
        return is_last and self.tensor.get_local_rank() == 0


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """This rank's part of a model."""

    chunks: list[GPT]
    """The full model, or its stages on this rank in pipeline order; parameter names are global."""
    stages: list[int]
    """Pipeline indices of the chunks."""
    layout: RankLayout
    communication: sdp4bit.CommHandle

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different data."""
        return self.layout.data.size()

    @property
    def per_rank(self) -> dict[str, Stateful]:
        """Further state of this rank for checkpoints, besides generators and communication."""
        return {}

    def train(self, mode: bool = True) -> None:
        for chunk in self.chunks:
            chunk.train(mode)

    def reshard(self) -> None:
        """Free gathered weights, which a root keeps after a forward without backward."""
        for chunk in self.chunks:
            cast(FSDPModule, chunk).reshard()

    def describe_layout(self) -> str:
        """Describe the layout, which determines each rank's part of the model and random numbers."""
        layout = self.layout
        stages = f" in {len(self.chunks)} stages each" if len(self.chunks) > 1 else ""
        sizes = {"data": layout.data, "pipeline": layout.pipeline, "tensor": layout.tensor}
        text = " x ".join(f"{mesh.size()} {name}" for name, mesh in sizes.items() if mesh.size() > 1)
        return (text or "one rank") + stages

    def describe_ranks(self) -> str:
        """Describe the number and kind of ranks."""
        ranks = self.layout.ranks
        where = ranks.device.type
        if self.layout.pipeline.size() * self.layout.tensor.size() > 1:
            where += f", {self.describe_layout()}"
        return f"{ranks.world_size} ranks ({where})"

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all chunks; call while no weights are gathered."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]


def lay_out(config: PretrainConfig, *, ranks: Ranks) -> RankLayout:
    """Return this rank's position; SettingError if the ranks do not fill the mesh."""
    parallel = config.parallel
    parallel.check_world(ranks.world_size)
    pipeline, tensor = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    mesh = init_device_mesh(
        ranks.device.type,
        (pipeline, ranks.world_size // (pipeline * tensor), tensor),
        mesh_dim_names=("pipeline", "data", "tensor"),
    )
    timeout = job_timeout()
    groups = [mesh[name].get_group() for name in ("pipeline", "data", "tensor")]
    for group in groups:
        # Groups of a mesh otherwise have the back end's default timeout, half an hour for gloo.
        if timeout is not None and group != dist.group.WORLD:
            set_timeout(timeout, group)
    return RankLayout(mesh=mesh, ranks=ranks)


def build_model(config: PretrainConfig, *, layout: RankLayout) -> ShardedModel:
    """Build this rank's shards with initial weights and quantized communication.

    The model is built on meta and split before its shards are allocated.

    Raises:
        SettingError: on all ranks, if the communication cannot be set up.
    """
    stages = config.parallel.stages(config.model_shape.layers)
    local_stages = _stages_here(config, layout=layout)
    chunks = shard_chunks(config, layout=layout)
    for chunk in chunks:
        chunk.to_empty(device=layout.ranks.device)
        chunk.reset_parameters(seed=config.seed)
    return ShardedModel(
        chunks=chunks,
        stages=local_stages,
        layout=layout,
        communication=quantize(_named_roots(chunks, local_stages, stages=len(stages)), config=config),
    )


def shard_chunks(config: PretrainConfig, *, layout: RankLayout, mesh: DeviceMesh | None = None) -> list[GPT]:
    """Build this rank's shards of the model on meta.

    Args:
        mesh: replaces the 1-D mesh of data-parallel ranks for FSDP2, which replicates over the first
        dimension of a 2-D mesh.
    """
    stages = config.parallel.stages(config.model_shape.layers)
    return [
        _shard_chunk(config, layers=stages[stage], layout=layout, mesh=mesh or layout.data)
        for stage in _stages_here(config, layout=layout)
    ]


def _stages_here(config: PretrainConfig, *, layout: RankLayout) -> list[int]:
    stages = len(config.parallel.stages(config.model_shape.layers))
    return list(range(layout.pipeline.get_local_rank(), stages, layout.pipeline.size()))


def _shard_chunk(config: PretrainConfig, *, layers: range, layout: RankLayout, mesh: DeviceMesh) -> GPT:
    training, device = config.training, layout.ranks.device
    param_dtype = dtype_of(training.param_dtype)
    with torch.device("meta"):
        model = GPT(
            config.model_shape,
            layers=layers,
            compute_dtype=resolve_compute_dtype(
                training.compute_dtype, param_dtype=param_dtype, device=device
            ),
            recompute=config.parallel.recompute_granularity,
        )
    if layout.tensor.size() > 1:
        _split_tensors(model, layout.tensor)
    # Do not cast inputs: activations keep the compute dtype, which may differ from the param dtype.
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    apart = layout.tensor.size() > 1
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if apart:
            # A group without split parameters, so that quantization keeps tensor-parallel ranks equal.
            shard([block.attention_norm, block.feed_forward_norm])
        if training.compile:
            block.compile()
        shard(block, reshard_after_forward=training.reshard_after_forward)
    if apart or layout.pipeline.size() > 1:
        # The token embedding is alone in its group on both stages, so that both round identically.
        ends: list[nn.Module] = [m for m in (model.position_embedding, model.final_norm) if m is not None]
        if ends:
            shard(ends)
    shard(model)
    return model


def _split_tensors(model: GPT, mesh: DeviceMesh) -> None:
    if model.token_embedding is not None:
        parallelize_module(model, mesh, {"token_embedding": EMBEDDING_STYLE})
    for block in model.blocks.values():
        assert isinstance(block, Block)
        parallelize_module(block, mesh, BLOCK_STYLES)
        block.attention.tensor_rank = mesh.get_local_rank()


def _named_roots(chunks: list[GPT], numbers: list[int], *, stages: int) -> nn.Module:
    """Return one module with all roots, whose parameter groups have unique names across stages."""
    if stages == 1:
        return chunks[0]
    # The token embedding's group is first on both ranks that hold it: the index selects rounding bits.
    order = sorted(range(len(chunks)), key=lambda index: chunks[index].token_embedding is None)
    return nn.ModuleDict({f"stage{numbers[index]}": chunks[index] for index in order})


def quantize(model: nn.Module, *, config: PretrainConfig) -> sdp4bit.CommHandle:
    """Quantize the model's communication by the configured strategy and return the handle."""
    try:
        return sdp4bit.quantize_communication(
            model, topology=config.parallel.topology, config=config.settings
        )
    except ValueError as error:
        raise SettingError(str(error)) from error

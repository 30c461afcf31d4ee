"""What a run would take of each rank, without memory, processes or training."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor

from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.plan.memory import identifier, memory_per_rank
from sdp4bit_lab.plan.model import GPTSize, gpt_groups
from sdp4bit_lab.plan.traffic import RankGrid, group_traffic
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.parallelize import lay_out, shard_chunks


def dry_run(config: PretrainConfig) -> dict[str, Any]:
    """Return the parameters of the model and of the rank with most of them, and that rank's bytes by use.

    The model is built without memory and sharded as the run would shard it, over a process group that only
    pretends to be one. Activations are not counted: they depend on recomputation and the kernels.

    Raises:
        SettingError: the ranks, the model and the batch do not fit together.
    """
    parallel = config.parallel
    world_size = config.world_size or parallel.nproc_per_node or 1
    config.check_layout(world_size)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(config.model_shape).parameters())
    with _pretended_group(world_size):
        ranks = Ranks(
            rank=0, world_size=world_size, local_rank=0, local_world_size=1, device=torch.device("cpu")
        )
        chunks = shard_chunks(config, layout=lay_out(config, ranks=ranks))
        held = [p.to_local() if isinstance(p, DTensor) else p for chunk in chunks for p in chunk.parameters()]
    used = _bytes_by_use(config, world_size=world_size)
    data_ranks = world_size // parallel.model_parallel_size
    micro_batches = config.micro_batches(data_ranks)
    sequences = data_ranks * micro_batches * config.micro_batch_size
    return {
        "parameters": parameters,
        "parameters_per_rank": sum(part.numel() for part in held),
        "bytes_per_rank": {**used, "total": sum(used.values())},
        "world_size": world_size,
        "data_parallel_size": data_ranks,
        "micro_batches": micro_batches,
        "flops_per_step": sequences * config.model_shape.flops_per_sample(config.sequence_length),
    }


def print_dry_run(config: PretrainConfig) -> None:
    """Print the findings, as a table or as one JSON object; under torchrun, on rank 0 for all its ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if int(os.environ["RANK"]):
            return
        config = replace(config, world_size=config.world_size or int(os.environ["WORLD_SIZE"]))
    found = dry_run(config)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if config.json:
        sizes = {identifier(use): size for use, size in found["bytes_per_rank"].items()}
        console.print(json.dumps({**found, "bytes_per_rank": sizes}))
        return
    console.print(
        f"{found['parameters']:,} parameters, at most {found['parameters_per_rank']:,} on one of "
        f"{found['world_size']} ranks"
    )
    console.print(f"{found['micro_batches']} micro batches a step")
    for use, size in found["bytes_per_rank"].items():
        console.print(f"  {use:<28}{size / 1e9:>10.3f} GB")
    console.print("Activations are not counted.")


def _bytes_by_use(config: PretrainConfig, *, world_size: int) -> dict[str, int]:
    shape, parallel = config.model_shape, config.parallel
    groups = gpt_groups(
        GPTSize.of(shape, name=config.model.model_card, sequence_length=config.sequence_length),
        tensor_parallel=parallel.tensor_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        freed_after_forward=config.training.reshard_after_forward,
    )
    data_ranks = world_size // parallel.model_parallel_size
    per_node = (parallel.ranks_per_node or world_size) // parallel.tensor_model_parallel_size
    per_node = min(data_ranks, max(1, per_node))
    if data_ranks % per_node:
        raise SettingError(
            f"the {data_ranks} ranks of a data-parallel group do not fill nodes of {per_node}: choose other "
            "--ranks-per-node, or tensor and pipeline sizes"
        )
    grid = RankGrid(nodes=data_ranks // per_node, ranks_per_node=per_node)
    traffic = [group_traffic(group, grid=grid, config=config.quantization) for group in groups]
    accumulation = config.micro_batches(data_ranks)
    return memory_per_rank(groups, traffic, grid=grid, config=config.quantization, accumulation=accumulation)


@contextmanager
def _pretended_group(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world whose other ranks do not exist, inside the block."""
    # A private part of PyTorch, used by its own tools to trace large jobs; nothing is ever sent through it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()

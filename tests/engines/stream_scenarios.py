"""Training steps on simulated GPUs: what is attached, prefetched, loaded and audited in them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor

from sdp4bit import (
    AuditConfig,
    Auto,
    DDPCommState,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
    ddp_comm_hook,
    quantize_communication,
)
from sdp4bit.engines.ddp import hook
from tests import toy
from tests.engines import stream_simulator
from tests.engines.fsdp2.toy_moe import HAS_MESH_PER_PARAM
from tests.megatron import runs as megatron_runs
from tests.tables import flat

QUANTIZED = SDP4BitConfig(gradients=GradientConfig(min_numel=0, inside_one_node=True))


class FSDPRun:
    """A training run whose host never waits for the device."""

    def __init__(
        self,
        config: SDP4BitConfig | None = QUANTIZED,
        *,
        topology: int | tuple[int, int] = 2,
        roots: int = 1,
        is_hybrid: bool = False,
        place: Callable[[torch.nn.Parameter], Any] | None = None,
        prepare: Callable[[list[toy.ToyGPT]], None] | None = None,
        params: Callable[[torch.nn.Parameter], bool] = lambda _: True,
        **options: Any,
    ) -> None:
        """Build and attach.

        Args:
            roots: models that are trained on the same batches, each with its own streams.
            is_hybrid: two replicas of two shards each (HSDP).
            place: on which mesh a parameter is sharded.
            prepare: is called with them before anything is attached.
            params: which ones this rank gives to its optimizer.
        """
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if is_hybrid else None
        gpts = [toy.ToyGPT(width=16, hidden=36, layers=3) for _ in range(roots)]
        self.models = [toy.shard(gpt, mesh=mesh, shard_placement_fn=place) for gpt in gpts]
        if prepare is not None:
            prepare(self.models)
        self.comm: Any = None
        if config is not None:
            self.comm = quantize_communication(self.models, topology=topology, config=config, **options)
        parameters = [param for model in self.models for param in model.parameters() if params(param)]
        self.optimizer = torch.optim.AdamW(parameters, lr=2e-3, fused=True)
        self._trained = False
        # The same on all ranks, for a simulated one takes what comes from the others for its own.
        data = toy.batches(rank=0, size=2)
        self._data = iter([next(data) for _ in range(16)])  # whose making waits for the device

    def forward(self) -> list[torch.Tensor]:
        """Return the loss of each model on the next batch."""
        batch = next(self._data)
        return [toy.loss_of(model, batch) for model in self.models]

    def backward(self) -> None:
        """One forward and backward of each model; all forwards come first."""
        torch.autograd.backward(self.forward())

    def step(self) -> None:
        """One optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int, *, accumulate: int = 1) -> FSDPRun:
        """Whole steps; before the first, what building and attaching waited for is forgotten."""
        if not self._trained:
            stream_simulator.running().host_waits.clear()
        self._trained = True
        for _ in range(steps):
            for _ in range(accumulate):
                self.backward()
            self.step()
        return self


def prefetch(models: list[toy.ToyGPT]) -> None:
    """The root asks for the first two blocks, every block for the next."""
    for model in models:
        model.set_modules_to_forward_prefetch(model.blocks[:2])
        for block, following in itertools.pairwise(model.blocks):
            block.set_modules_to_forward_prefetch([following])


def unshard_ahead(models: list[toy.ToyGPT]) -> None:
    """As pipeline schedules do, the compute stream asks for the last block while others are gathered."""
    prefetch(models)
    for model in models:
        model.blocks[0].register_forward_pre_hook(
            lambda *_, last=model.blocks[-1]: last.unshard(async_op=True) and None
        )


def more_buffers(models: list[toy.ToyGPT]) -> None:
    """Computation may be three reductions ahead; torch before 2.13 knows one."""
    for model in models:
        if hasattr(model, "set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(3)


def separate_groups(models: list[toy.ToyGPT]) -> None:
    """FSDP2 reduces in a process group of its own, with torch 2.13 or later, and may be ahead."""
    more_buffers(models)
    for model in models:
        if hasattr(model, "set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group()


def weights(**options: Any) -> SDP4BitConfig:
    """Return the settings with others for the weights."""
    return replace(QUANTIZED, weights=WeightConfig(**options))


def chunked() -> SDP4BitConfig:
    """Return settings by which transfers of one gradient overlap, and slices take turns with buffers."""
    gradients = GradientConfig(min_numel=0, pipeline_chunks=5, intra_group_size=32, inter_group_size=32)
    return replace(QUANTIZED, gradients=gradients)


FULL = weights(replica="full")
MEASURED = replace(QUANTIZED, telemetry=TelemetryConfig(interval=1))


def telemetry() -> None:
    """Measures on their way to the host, which asks for them before they can have arrived."""
    run = FSDPRun(MEASURED)
    for _ in range(4):
        run.train(1)
        run.comm.stats()
    torch.cuda.synchronize()
    assert run.comm.stats()["sampled_step"] == 3


def load(config: SDP4BitConfig = QUANTIZED) -> None:
    """A checkpoint's replicas are taken over at the first forward, which prefetches."""
    run = FSDPRun(config, prepare=prefetch).train(2)
    run.comm.load_state_dict(run.comm.state_dict())
    run.train(2)


def resync() -> None:
    run = FSDPRun(prepare=prefetch).train(2)
    run.comm.resync()
    run.train(2)


def evaluate() -> None:
    """Forwards without gradients between steps; all groups stay gathered for a while."""
    run = FSDPRun().train(2)
    with torch.no_grad():
        run.forward()
    with torch.inference_mode():
        run.forward()
    run.train(2)
    run.comm.measure()
    run.train(1)


def accumulate_unreduced() -> None:
    """Micro-batches whose gradients stay where they are; nobody waits to see whether weights were edited."""
    run = FSDPRun().train(1)
    for _ in range(2):
        for is_last in (False, True):
            run.models[0].set_requires_gradient_sync(is_last)
            run.backward()
        run.step()


def freeze_part() -> None:
    """A frozen part of every group, and a frozen group; edits of them are looked for without waiting."""

    def prepare(models: list[toy.ToyGPT]) -> None:
        models[0].blocks[0].requires_grad_(False)
        for block in models[0].blocks[1:]:
            block.qkv.requires_grad_(False)

    FSDPRun(prepare=prepare).train(4)


def edit() -> None:
    """Weights are edited between evaluations, a little and a lot."""
    run = FSDPRun(prepare=prefetch).train(2)
    run.models[0].eval()
    with torch.no_grad():
        for factor in (1.0, 1.001, 1.5):
            run.forward()
            run.models[0].reshard()
            for param in run.models[0].parameters():
                param.to_local().mul_(factor)
    run.forward()
    run.models[0].train()
    run.train(1)


def accumulate_before_all_reduce() -> None:
    """Micro-batches that are reduced over shards, and over replicas only with the last."""
    run = FSDPRun(is_hybrid=True).train(1)
    for _ in range(2):
        for is_last in (False, True):
            run.models[0].set_requires_all_reduce(is_last)
            run.backward()
        run.step()


def unshard_early(use: Callable[[FSDPRun], object], config: SDP4BitConfig = QUANTIZED) -> None:
    """Between two steps a block is asked for, and something else done before anybody waits for it."""
    run = FSDPRun(config, prepare=unshard_ahead).train(2)
    run.backward()
    run.optimizer.step()
    under_way = run.models[0].blocks[-1].unshard(async_op=True)
    use(run)
    under_way.wait()
    run.models[0].reshard()
    run.optimizer.zero_grad()
    run.train(2)


def mesh_per_parameter() -> None:
    """Feed-forward matrices are sharded across the nodes only, as experts are; two groups in every block."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "other"))["experts"]
    info = _fsdp_common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)
    result = _fsdp_common.ShardPlacementResult(placement=None, mesh_info=info)
    FSDPRun(MEASURED, place=lambda param: result if 36 in param.shape else None).train(3)


def audit() -> None:
    run = FSDPRun(replace(MEASURED, audit=AuditConfig(interval=1)), prepare=prefetch).train(3)
    assert run.comm.audit()
    run.train(1)


class SimulatedFuture:
    """A torch.futures.Future on a GPU: its value is there when the stream that it was set on is."""

    def __init__(self, *, devices: object = None) -> None:
        self._value = torch.empty(0)

    def set_result(self, value: torch.Tensor) -> None:
        self._value, self._event = value, stream_simulator.running().stream.record_event()

    def wait(self) -> torch.Tensor:
        self._event.wait()
        return self._value


class _Bucket:
    """What DDP's reducer, which is no Python, passes to a hook."""

    def __init__(self, index: int, params: list[torch.nn.Parameter], *, is_last: bool) -> None:
        self.params = params
        self._index = index
        self._is_last = is_last
        self._values = torch.zeros(sum(param.numel() for param in params))

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        return self._values

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.params

    def views(self) -> list[torch.Tensor]:
        values = self._values.split([param.numel() for param in self.params])
        return [value.view_as(param) for value, param in zip(values, self.params, strict=True)]


def distributed_data_parallel(*, topology: int | tuple[int, int] = 2) -> None:
    """DDP's order of things: a bucket goes to the hook when it is full, all are waited for at the end."""
    torch.manual_seed(0)
    model = toy.ToyGPT(width=16, hidden=36, layers=2)
    config = replace(chunked(), telemetry=TelemetryConfig(interval=2))
    state = DDPCommState(topology=topology, config=config)
    params = list(model.parameters())
    buckets = [_Bucket(at, params[at::3], is_last=at == 2) for at in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    data = toy.batches(rank=0, size=2)
    batches = [next(data) for _ in range(3)]
    stream_simulator.running().host_waits.clear()
    with mock.patch.object(hook, "Future", SimulatedFuture):
        for batch in batches:
            torch.autograd.backward(toy.loss_of(model, batch))
            futures = []
            for bucket in buckets:
                for view, param in zip(bucket.views(), bucket.params, strict=True):
                    view.copy_(cast(torch.Tensor, param.grad))
                futures.append(ddp_comm_hook(state, bucket))
            for future, bucket in zip(futures, buckets, strict=True):
                assert future.wait() is bucket.buffer()
                for view, param in zip(bucket.views(), bucket.params, strict=True):
                    cast(torch.Tensor, param.grad).copy_(view)
            optimizer.step()
            optimizer.zero_grad()
    assert state.stats()["steps"] == 3


def search() -> None:
    """Settings change at the end of each block; the device has done a step when the host ends the next."""
    lossless = SDP4BitConfig(weights=WeightConfig(bits=None, replica="full"), gradients=None)
    auto = Auto(candidates=("plain", QUANTIZED, lossless), warmup_steps=0, block_steps=4, rounds=1)
    run = FSDPRun(auto, prepare=prefetch)
    waits = stream_simulator.running().host_waits
    for _ in range(14):
        torch.cuda.synchronize()
        waits.clear()
        run.train(1)
        assert not waits, waits
    assert len(run.comm.stats()["auto"]["seconds"]) == 3


SCENARIOS: dict[str, Callable[[], object]] = {
    "plain FSDP2": lambda: FSDPRun(None).train(3),
    "node replica": lambda: FSDPRun().train(3),
    "one node": lambda: FSDPRun(topology=4).train(3),
    "node replica, exact": lambda: FSDPRun(weights(bits=None)).train(3),
    "full replica": lambda: FSDPRun(FULL).train(3),
    "full replica, prefetch": lambda: FSDPRun(FULL, prepare=prefetch).train(3),
    "full replica, exact": lambda: FSDPRun(weights(bits=None, replica="full")).train(3),
    "one rank per node": lambda: FSDPRun(topology=1).train(3),
    "blocks of nodes": lambda: FSDPRun(chunked(), topology=(1, 2)).train(3),
    "gradients only": lambda: FSDPRun(replace(QUANTIZED, weights=None), prepare=unshard_ahead).train(3),
    "weights only": lambda: FSDPRun(replace(QUANTIZED, gradients=None)).train(3),
    "pipeline chunks": lambda: FSDPRun(chunked()).train(3),
    "more input buffers": lambda: FSDPRun(chunked(), prepare=more_buffers).train(3),
    "separate group": lambda: FSDPRun(MEASURED, prepare=separate_groups).train(3),
    "separate group, one skipped": lambda: FSDPRun(prepare=separate_groups, skip="blocks.1").train(3),
    "accumulation": lambda: FSDPRun().train(3, accumulate=2),
    "accumulation, unreduced": accumulate_unreduced,
    "frozen": freeze_part,
    "edits": edit,
    "prefetch": lambda: FSDPRun(prepare=prefetch).train(3),
    "unshard": lambda: FSDPRun(prepare=unshard_ahead).train(3),
    "unshard, full replica": lambda: FSDPRun(FULL, prepare=unshard_ahead).train(3),
    "unshard, measured meanwhile": lambda: unshard_early(lambda run: run.comm.measure()),
    "unshard, saved meanwhile": lambda: unshard_early(lambda run: run.comm.state_dict(), FULL),
    "unshard, stepped meanwhile": lambda: unshard_early(lambda run: run.optimizer.step()),
    "unshard, exact": lambda: FSDPRun(weights(bits=None, replica="full"), prepare=unshard_ahead).train(3),
    "two roots": lambda: FSDPRun(roots=2).train(3),
    "two roots, full replica": lambda: FSDPRun(FULL, roots=2, prepare=prefetch).train(3),
    "HSDP": lambda: FSDPRun(MEASURED, is_hybrid=True).train(3),
    "HSDP, shards between nodes": lambda: FSDPRun(is_hybrid=True, topology=1).train(3),
    "HSDP, pipeline chunks": lambda: FSDPRun(chunked(), is_hybrid=True, prepare=more_buffers).train(3),
    "HSDP, accumulation": accumulate_before_all_reduce,
    "HSDP, two roots": lambda: FSDPRun(is_hybrid=True, roots=2).train(3),
    **({"mesh per parameter": mesh_per_parameter} if HAS_MESH_PER_PARAM else {}),
    "DDP": distributed_data_parallel,
    "DDP, one rank per node": lambda: distributed_data_parallel(topology=1),
    "DDP, blocks of nodes": lambda: distributed_data_parallel(topology=(1, 2)),
    "load": load,
    "load, full replica": lambda: load(FULL),
    "resync": resync,
    "evaluation": evaluate,
    "telemetry": telemetry,
    "audit": audit,
    "search": search,
}


def megatron(
    config: SDP4BitConfig | None = MEASURED, *, steps: int = 3, overlap: bool = True, **options: Any
) -> megatron_runs.MegatronRun:
    """Whole steps of Megatron-Core, in a process that has installed `fake_cuda`."""
    options = {"layers": 1, "ddp": {"bucket_size": 6_000}, **options}
    run = megatron_runs.MegatronRun(config, overlap=overlap, **options)
    stream_simulator.running().host_waits.clear()
    return run.train(steps)


def megatron_resync() -> None:
    """Resync and audit find the weights of the last step still on their way."""
    run = megatron(steps=2)
    for _ in range(2):
        for group in run.chunks[0].bucket_groups:
            group.start_param_sync()
        run.comm.resync()
        run.train(1)
    for group in run.chunks[0].bucket_groups:
        group.start_param_sync()
    assert run.comm.audit()
    run.train(1)


ONE_QUEUE = mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
"""All streams share a hardware queue: reductions go in stages."""


def megatron_staged(config: SDP4BitConfig = MEASURED, **options: Any) -> None:
    with ONE_QUEUE:
        run = megatron(config, **options)
    assert "staged over buckets" in flat(run.comm.explain(full=True))


MEGATRON_SCENARIOS: dict[str, Callable[[], object]] = {
    "plain Megatron-Core": lambda: megatron(None),
    "no overlap": lambda: megatron(overlap=False),
    "overlap": megatron,
    "one rank per node": lambda: megatron(topology=1),
    "one node": lambda: megatron(replace(FULL, telemetry=MEASURED.telemetry), topology=4),
    "pipeline chunks": lambda: megatron(chunked()),
    "one queue": megatron_staged,
    "one queue, one level": lambda: megatron_staged(topology=1),
    "one queue, blocks of nodes": lambda: megatron_staged(topology=(1, 2)),
    "one queue, pipeline chunks": lambda: megatron_staged(chunked()),
    "weights only": lambda: megatron(replace(MEASURED, gradients=None)),
    "audit": lambda: megatron(replace(MEASURED, audit=AuditConfig(interval=1))),
    "resync and audit": megatron_resync,
}


def skipped() -> None:
    """An optimizer step that is left out on all ranks, as a gradient scaler does."""
    run = FSDPRun(MEASURED).train(1)
    run.backward()
    run.optimizer.zero_grad()
    run.train(2)


def without_empty_shards() -> None:
    """Optimizers that get only what their rank holds a part of, and differ from rank to rank."""

    def is_held(param: torch.nn.Parameter) -> bool:
        return bool(cast(DTensor, param).to_local().numel())

    FSDPRun(params=is_held).train(3)


ORDERED_SCENARIOS: dict[str, Callable[[], object]] = {
    **{name: SCENARIOS[name] for name in ("unshard", "two roots", "load", "audit", "blocks of nodes")},
    "skipped step": skipped,
    "empty shards left out": without_empty_shards,
    "separate group": SCENARIOS["separate group, one skipped"],
    "HSDP": SCENARIOS["HSDP"],
    "HSDP, accumulation": accumulate_before_all_reduce,
    "DDP": distributed_data_parallel,
    **({"mesh per parameter": SCENARIOS["mesh per parameter"]} if HAS_MESH_PER_PARAM else {}),
}
"""What all ranks go through, to compare the order of their collectives."""

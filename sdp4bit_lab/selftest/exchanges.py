"""Check that collectives on the real network equal their simulation in one process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Nodes, Topology, create_topology, destroy_topology
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import TrafficCounter
from sdp4bit_lab.selftest.check import ONE_RANK, CheckFailedError, CheckSkippedError, Context
from sdp4bit_lab.simulated.collectives import (
    SimulatedAllReduce,
    SimulatedReduceScatter,
    SimulatedReplica,
    simulated_layout,
)

_NUMELS = (1, 1000, 4096 + 33)
_CALLS = 2
_BUCKET = 3
GRADIENTS = {
    "default": GradientConfig(min_numel=0),
    "no transform, nearest": GradientConfig(
        hadamard=False, intra_rounding="nearest", inter_rounding="nearest", min_numel=0
    ),
    "three chunks": GradientConfig(pipeline_chunks=3, min_numel=0),
    "8 bits, groups of 32": GradientConfig(
        inter_bits=8, inter_group_size=32, intra_group_size=32, min_numel=0
    ),
    "dither": GradientConfig(intra_rounding="dither", inter_rounding="dither", min_numel=0),
    "full precision": GradientConfig(intra_bits=None, inter_bits=None, min_numel=0),
}
WEIGHTS = {
    "default": WeightConfig(),
    "full replica": WeightConfig(replica="full"),
    "weights, not differences": WeightConfig(mode="direct"),
}


def check_exchanges(context: Context) -> dict[str, Any]:
    """Return the number of bit-equal exchanges by layout, nodes x ranks per node."""
    size = context.ranks.world_size
    if size == 1:
        raise CheckSkippedError(ONE_RANK)
    specs: list[int | tuple[int, int]] = [each for each in range(1, size + 1) if size % each == 0]
    specs += [(size // 4, 2)] if size % 4 == 0 else []  # two blocks of two nodes
    if context.is_cuda:
        context.say("      compiling kernels, each rank a part of them")
        _compile_kernels(context, specs)
    layouts = {}
    for spec in specs:
        topology = create_topology(spec)
        name = topology.layout.describe()
        # Finish all exchanges before raising, because other ranks wait for this rank's messages.
        failures = [*_check_gradients(context, topology, name)]
        if topology.layout.blocks == 1:
            failures += _check_weights(context, topology, name)
        context.fail_together(next((failure for failure in failures if failure is not None), None))
        destroy_topology(topology)
        layouts[name] = len(failures)
        context.say(f"      {name} (nodes x ranks): {len(failures)} exchanges are bit-equal")
    return {"layouts": layouts}


def _compile_kernels(context: Context, specs: Sequence[int | tuple[int, int]]) -> None:
    """Simulate this rank's share of the exchanges, so that Triton's cache has their kernels.

    4 ranks need some 180 variants of 1 to 3 s. Exchanges alone would make all ranks compile the same variant
    at the same time, one after another. A rank takes whole settings, whose layouts share variants.
    """
    size = context.ranks.world_size
    configs: list[GradientConfig | WeightConfig] = [*GRADIENTS.values(), *WEIGHTS.values()]
    for config, spec, numel in itertools.product(configs[context.ranks.rank :: size], specs, _NUMELS):
        per_node, per_block = spec if isinstance(spec, tuple) else (spec, None)
        layout = simulated_layout(size, ranks_per_node=per_node, nodes_per_block=per_block)
        rows = _values(context, size, size, numel, seed=0)
        if isinstance(config, GradientConfig):
            _simulate_gradients(layout, config, rows, seed=0, call=0)
        elif layout.blocks == 1:
            deque(_simulate_weights(layout, config, [rows[:, 0].bfloat16()] * 2), maxlen=0)
    context.synchronize()


def _values(context: Context, *shape: int, seed: int) -> Tensor:
    """Return values of several magnitudes, identical on all ranks."""
    generator = torch.Generator().manual_seed(1000 * context.config.seed + seed)
    scales = torch.exp2(torch.randint(-6, 3, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * scales).to(context.device)


def _simulate_gradients(
    layout: Nodes, config: GradientConfig, rows: Tensor, *, seed: int, call: int
) -> tuple[list[Tensor], Tensor]:
    """Return every rank's row of a reduce-scatter, and the all-reduce of all ranks' first rows.

    Args:
        rows: [ranks, rows, numel], the values that each rank contributes.
    """
    shared: dict[str, Any] = {"config": config, "seed": seed, "bucket": _BUCKET, "scratch": Scratch()}
    scatter = SimulatedReduceScatter(layout, traffic=TrafficCounter(layout), **shared)
    for contributed in rows:
        scatter.add(contributed.clone(), call=call)
    rows_of_ranks: list[Tensor] = []
    # The row buffer is reused for the next rank.
    scatter.finish(lambda _, row: rows_of_ranks.append(row.clone()))
    reduced = SimulatedAllReduce(layout, **shared | {"scratch": Scratch()})(list(rows[:, 0]), call=call)
    return rows_of_ranks, reduced


def _simulate_weights(layout: Nodes, config: WeightConfig, mains: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the weights after a refresh in full precision, then after one refresh for each further `main`.

    Args:
        mains: [ranks, numel] each, in bf16.
    """
    replica = SimulatedReplica(layout, scratch=Scratch(), config=config, traffic=TrafficCounter(layout))
    weights = torch.empty_like(mains[0])
    replica.rows = weights
    replica.start_full_refresh(mains[0])
    yield weights
    for main in mains[1:]:
        replica.start_quantized_refresh(main)
        yield weights


def _check_gradients(context: Context, topology: Topology, layout: str) -> Iterator[CheckFailedError | None]:
    size, rank, seed = context.ranks.world_size, context.ranks.rank, context.config.seed
    for (name, config), numel in itertools.product(GRADIENTS.items(), _NUMELS):
        shared: dict[str, Any] = {"config": config, "seed": seed, "bucket": _BUCKET}
        scatter = QuantizedReduceScatter(topology, **shared)
        reduce = QuantizedAllReduce(topology, **shared)
        for call in range(_CALLS):
            case = f"{name}, rows of {numel}, {layout}, call {call}"
            rows = _values(context, size, size, numel, seed=numel + call)
            expected, reduced = _simulate_gradients(topology.layout, config, rows, seed=seed, call=call)
            output = torch.full((numel,), float("nan"), device=context.device)
            scatter(output, rows[rank].reshape(-1).clone(), call=call)
            yield _compare(output, expected[rank], f"gradients, {case}")

            output = rows[rank, 0].clone()
            reduce(output, call=call)
            yield _compare(output, reduced, f"all-reduce, {case}")


def _check_weights(context: Context, topology: Topology, layout: str) -> Iterator[CheckFailedError | None]:
    size, rank = context.ranks.world_size, context.ranks.rank
    for (name, config), numel in itertools.product(WEIGHTS.items(), _NUMELS):
        mains = [_values(context, size, numel, seed=numel).bfloat16()]
        for call in range(_CALLS):
            mains.append(mains[-1] + 0.01 * _values(context, size, numel, seed=numel + 7 + call).bfloat16())
        real = WeightReplica(topology, scratch=Scratch(), config=config, traffic=topology.counter())
        for call, expected in enumerate(_simulate_weights(topology.layout, config, mains)):
            start = real.start_quantized_refresh if call else real.start_full_refresh
            start(mains[call][rank].clone())
            real.wait()
            gathered = torch.full((size * numel,), float("nan"), dtype=expected.dtype, device=context.device)
            real.gather(gathered)
            case = f"weights, {name}, rows of {numel}, {layout}, refresh {call}"
            yield _compare(gathered.view(size, numel), expected, case)


def _compare(output: Tensor, expected: Tensor, case: str) -> CheckFailedError | None:
    if torch.equal(output, expected):
        return None
    different = int((output != expected).sum())
    message = f"{different} of {output.numel()} values differ from the simulated exchange: {case}"
    return CheckFailedError(message, case=case)

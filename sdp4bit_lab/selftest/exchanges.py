"""Check that collectives on the real network equal their simulation in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology, create_topology, destroy_topology
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit_lab.selftest.check import ONE_RANK, CheckFailedError, CheckSkippedError, Context
from sdp4bit_lab.simulated.collectives import (
    SimulatedAllReduce,
    SimulatedReduceScatter,
    SimulatedReplica,
)

_NUMELS = (1, 1000, 4096 + 33)
_CALLS = 2
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
    layouts = {}
    specs: list[int | tuple[int, int]] = [each for each in range(1, size + 1) if size % each == 0]
    specs += [(size // 4, 2)] if size % 4 == 0 else []  # two blocks of two nodes
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


def _values(context: Context, *shape: int, seed: int) -> Tensor:
    """Return values of several magnitudes, identical on all ranks."""
    generator = torch.Generator().manual_seed(1000 * context.config.seed + seed)
    scales = torch.exp2(torch.randint(-6, 3, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * scales).to(context.device)


def _check_gradients(context: Context, topology: Topology, layout: str) -> Iterator[CheckFailedError | None]:
    size, rank = context.ranks.world_size, context.ranks.rank
    for (name, config), numel in itertools.product(GRADIENTS.items(), _NUMELS):
        shared: dict[str, Any] = {"config": config, "seed": context.config.seed, "bucket": 3}
        scatter = QuantizedReduceScatter(topology, **shared)
        simulated_scatter = SimulatedReduceScatter(
            topology.layout, traffic=topology.counter(), scratch=Scratch(), **shared
        )
        reduce = QuantizedAllReduce(topology, **shared)
        simulated_reduce = SimulatedAllReduce(topology.layout, scratch=Scratch(), **shared)
        for call in range(_CALLS):
            case = f"{name}, rows of {numel}, {layout}, call {call}"
            rows = _values(context, size, size, numel, seed=numel + call)
            output = torch.full((numel,), float("nan"), device=context.device)
            scatter(output, rows[rank].reshape(-1).clone(), call=call)
            for peer in range(size):
                simulated_scatter.add(rows[peer].clone(), call=call)
            rows_of_ranks: list[Tensor] = []
            # The row buffer is reused for the next rank.
            simulated_scatter.finish(lambda _, row: rows_of_ranks.append(row.clone()))  # noqa: B023
            yield _compare(output, rows_of_ranks[rank], f"gradients, {case}")

            values = rows[:, 0]
            output = values[rank].clone()
            reduce(output, call=call)
            yield _compare(output, simulated_reduce(list(values), call=call), f"all-reduce, {case}")


def _check_weights(context: Context, topology: Topology, layout: str) -> Iterator[CheckFailedError | None]:
    size, rank = context.ranks.world_size, context.ranks.rank
    for (name, config), numel in itertools.product(WEIGHTS.items(), _NUMELS):
        shared: dict[str, Any] = {"config": config, "traffic": topology.counter()}
        real = WeightReplica(topology, scratch=Scratch(), **shared)
        simulated = SimulatedReplica(topology.layout, scratch=Scratch(), **shared)
        main = _values(context, size, numel, seed=numel).bfloat16()
        expected = torch.empty_like(main)
        real.start_full_refresh(main[rank].clone())
        real.wait()
        simulated.refresh_fully(main, expected)
        for call in range(_CALLS):
            main = main + 0.01 * _values(context, size, numel, seed=numel + 7 + call).bfloat16()
            real.start_quantized_refresh(main[rank].clone())
            real.wait()
            simulated.refresh(main, expected)
            gathered = torch.full((size * numel,), float("nan"), dtype=main.dtype, device=main.device)
            real.gather(gathered)
            case = f"weights, {name}, rows of {numel}, {layout}, call {call}"
            yield _compare(gathered.view(size, numel), expected, case)


def _compare(output: Tensor, expected: Tensor, case: str) -> CheckFailedError | None:
    if torch.equal(output, expected):
        return None
    different = int((output != expected).sum())
    message = f"{different} of {output.numel()} values differ from the simulated exchange: {case}"
    return CheckFailedError(message, case=case)

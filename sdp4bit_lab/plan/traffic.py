"""Count the bytes that one rank sends per step and level, from the plans of its collectives.

:mod:`sdp4bit.traffic` counts the same bytes during training. Quantized messages are exact. Collectives of the
communication library count as rings in rank order, the minimum of any algorithm, spread evenly over the ranks
of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdp4bit.collectives.chunks import group_unit
from sdp4bit.collectives.plan import (
    Launch,
    ReducePlan,
    Step,
    Transfer,
    holds_all_rows,
    is_long_enough,
    plan_all_reduce,
    plan_reduce,
    plan_refresh,
)
from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization.formats import BLOCK
from sdp4bit.traffic import ALONE, Grid
from sdp4bit_lab.plan.devices import Operator, Work
from sdp4bit_lab.plan.latency import Call, Kind
from sdp4bit_lab.plan.model import ShardedGroup

GATHERED_BYTES = 2
"""Weights are gathered in bf16."""
REDUCED_BYTES = 4
"""Gradients are summed in fp32, and by default also reduced in fp32."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes and calls of one rank in one or more collectives."""

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    padding_bytes: float = 0.0
    """Part of both byte counts that pads rows to 32 values and messages to 16 bytes."""
    calls: tuple[Call, ...] = ()
    chunks: int | None = None
    """Chunks whose two hops overlap; None for a ring, which keeps both levels busy at once."""
    work: tuple[Work, ...] = ()
    """Quantization kernels."""
    buffer_bytes: int = 0
    """Message buffers in use at the same time."""

    @property
    def collectives(self) -> int:
        return sum(call.times for call in self.calls)

    @property
    def moved_bytes(self) -> float:
        """Device memory traffic of the quantization kernels."""
        return sum(work.moved_bytes for work in self.work)


def ring(row_bytes: float, *, grid: Grid, kind: Kind = "gather", times: int = 1) -> Exchange:
    """Return `times` collectives over all ranks that gather or reduce rows of `row_bytes`.

    An all-reduce sends each row twice.
    """
    rows = 2 * row_bytes if kind == "all-reduce" else row_bytes
    sent, g = times * rows * (grid.size - 1), grid.ranks_per_node
    calls = (Call(kind=kind, grid=grid, times=times),)
    if grid.nodes == 1:
        return Exchange(intra_bytes=float(sent), calls=calls)
    return Exchange(intra_bytes=sent * (g - 1) / g, inter_bytes=sent / g, calls=calls)


def _exchange(steps: Sequence[Step], *, row_bytes: int, **facts: Any) -> Exchange:
    """Return the exchange of steps of a plan.

    Args:
        row_bytes: bytes of a value of the rows that are read and of the weights that are written.
    """
    transfers = [each for step in steps for each in step.transfers]
    return Exchange(
        intra_bytes=float(sum(each.nbytes for each in transfers if each.level == "intra")),
        inter_bytes=float(sum(each.nbytes for each in transfers if each.level != "intra")),
        padding_bytes=sum(each.padding_bytes for each in transfers),
        calls=tuple(_call(each) for each in transfers),
        work=tuple(_work(step.launch, row_bytes=row_bytes) for step in steps),
        **facts,
    )


def _call(transfer: Transfer) -> Call:
    size, kind = transfer.peers + 1, transfer.kind
    grid = Grid(nodes=size, ranks_per_node=1, blocks=size if transfer.level == "outer" else 1)
    if transfer.level == "intra":
        grid = Grid(nodes=1, ranks_per_node=size)
    return Call(kind="gather" if kind == "all-gather" else kind, grid=grid)


def _work(launch: Launch, *, row_bytes: int) -> Work:
    moved, values = float(launch.message_bytes), launch.values
    if launch.operator == "hadamard_quantize":
        operator: Operator = "quantize to 8 bits" if launch.bits in (None, 8, 16) else "quantize to 4 bits"
        return Work(operator=operator, moved_bytes=moved + row_bytes * values, values=values)
    if launch.operator == "dequantize_reduce_quantize":
        return Work(operator="reduce and requantize", moved_bytes=moved, values=values, messages=launch.terms)
    if launch.operator in ("subtract_quantize", "dequantize_add"):
        # Two rows are read for the difference; each row of the replica is read and written.
        return Work(operator="weights", moved_bytes=moved + 2 * row_bytes * values, values=values)
    moved += REDUCED_BYTES * values
    return Work(operator="reduce", moved_bytes=moved, values=values, messages=launch.terms)


def gradient_exchange(
    row_numel: int,
    *,
    grid: Grid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    sections: Sequence[Section] = (),
) -> Exchange:
    """Return one reduction of rows of `row_numel` values, after the start step of quantization.

    Args:
        config: None for full precision, which also applies to rows below its min_numel.
        dense_bytes: bytes per value of the rows.
        sections: sections of the row; () for one.
    """
    if grid.size == 1 or not (row_numel or sections):
        return Exchange()
    if config is None or config.exempts(numel=row_numel):
        return ring(row_numel * dense_bytes, grid=grid, kind="reduce")
    plan = plan_reduce(tuple(sections) or whole_row(row_numel), grid=grid, config=config)
    return _reduction(plan, dense_bytes=dense_bytes)


def _reduction(plan: ReducePlan, *, dense_bytes: int) -> Exchange:
    chunks, buffer_bytes = max(1, len(plan.chunks)), plan.buffer_bytes
    return _exchange(plan.steps, row_bytes=dense_bytes, chunks=chunks, buffer_bytes=buffer_bytes)


def all_reduce_exchange(
    numel: int,
    *,
    grid: Grid,
    config: GradientConfig | None,
    dense_bytes: int = REDUCED_BYTES,
    sections: Sequence[Section] = (),
) -> Exchange:
    """Return one all-reduce of `numel` values over replicas; arguments as for `gradient_exchange`.

    Uses full precision if a rank's part is below min_numel.
    """
    if grid.size == 1 or numel == 0:
        return Exchange()
    if config is None or not is_long_enough(numel, ranks=grid.size, config=config):
        return ring(numel * dense_bytes / grid.size, grid=grid, kind="all-reduce")
    plan = plan_all_reduce(tuple(sections) or whole_row(numel), grid=grid, config=config)
    reduced = _reduction(plan.reduce, dense_bytes=dense_bytes)
    # Sums of pieces are in fp32.
    gathered = _exchange(plan.steps[len(plan.reduce.steps) :], row_bytes=REDUCED_BYTES)
    return Exchange(
        intra_bytes=reduced.intra_bytes + gathered.intra_bytes,
        inter_bytes=reduced.inter_bytes + gathered.inter_bytes,
        padding_bytes=reduced.padding_bytes + gathered.padding_bytes,
        calls=reduced.calls + gathered.calls,
        chunks=reduced.chunks,
        work=reduced.work + gathered.work,
        buffer_bytes=plan.buffer_bytes,
    )


def weight_refresh(
    row_numel: int, *, grid: Grid, config: WeightConfig | None, sections: Sequence[Section] = ()
) -> Exchange:
    """Return one refresh of the weight replica, once per step; sections () is a single one."""
    if config is None or grid.size == 1 or row_numel == 0:
        return Exchange()
    grid = replace(grid, blocks=1)  # weights cross nodes in one hop
    g, n = grid.ranks_per_node, grid.nodes
    gathers_all = holds_all_rows(config, grid=grid) and g > 1
    intra_copies = n * (g - 1) if gathers_all else 0
    if config.bits is None:
        return Exchange(
            intra_bytes=float(GATHERED_BYTES * row_numel * intra_copies),
            inter_bytes=float(GATHERED_BYTES * row_numel * (n - 1)),
            calls=tuple(
                Call(kind="gather", grid=over)
                for over in (replace(grid, ranks_per_node=1), replace(grid, nodes=1))[: 1 + gathers_all]
                if over.size > 1
            ),
            chunks=1,
        )
    chosen = tuple(sections) or whole_row(row_numel)
    plan = plan_refresh(chosen, grid=grid, config=config, numel=row_numel)
    return _exchange(plan.steps, row_bytes=GATHERED_BYTES, chunks=1, buffer_bytes=plan.buffer_bytes)


def weight_gather(row_numel: int, *, grid: Grid, config: WeightConfig | None, times: int = 1) -> Exchange:
    """Return `times` gathers of the weights; a step has one or two per micro batch."""
    if grid.size == 1:
        return Exchange()
    if config is None:
        return ring(GATHERED_BYTES * row_numel, grid=grid, times=times)
    if holds_all_rows(config, grid=grid):
        return Exchange()
    sent = GATHERED_BYTES * row_numel * grid.nodes * (grid.ranks_per_node - 1)
    calls = (Call(kind="gather", grid=Grid(nodes=1, ranks_per_node=grid.ranks_per_node), times=times),)
    return Exchange(intra_bytes=float(sent * times), calls=calls, chunks=1)


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """Exchanges of one rank and parameter group in a step."""

    group: ShardedGroup
    row_numel: int
    trained_numel: int
    """Trained values among row_numel."""
    weights: WeightConfig | None
    """Settings that apply on these ranks; None for full precision."""
    gradients: Exchange
    all_reduce: Exchange
    """All-reduce of gradients over the replicas of HSDP."""
    refresh: Exchange
    gathers: Exchange
    gathers_in_backward: bool
    """Whether half of the gathers are in backward."""

    @property
    def exchanges(self) -> tuple[Exchange, Exchange, Exchange, Exchange]:
        return self.gradients, self.all_reduce, self.refresh, self.gathers


def group_traffic(
    group: ShardedGroup,
    *,
    grid: Grid,
    config: SDP4BitConfig,
    replicas: Grid = ALONE,
    accumulation: int = 1,
    dense_bytes: int = REDUCED_BYTES,
    least_padding: bool = False,
) -> GroupTraffic:
    """Return a group's traffic in a steady-state step, with one gradient reduction after the last micro
    batch.

    Args:
        grid: ranks that shard the group.
        replicas: ranks with the same shard, which sum its gradients (HSDP).
        accumulation: micro batches per step; FSDP2 gathers the weights again for each.
        dense_bytes: bytes per gradient in the rows that are reduced.
        least_padding: shard parameters along the dimension with the least padding, see `least_padded_dim`.
    """
    row, trained = (
        group.row_numel(ranks=grid.size, least_padding=least_padding, trained_only=only)
        for only in (False, True)
    )
    weights, gradients = config.weights, config.gradients
    if weights is not None and not weights.applies_to(nodes=grid.nodes):
        weights = None
    if gradients is not None and not gradients.applies_to(nodes=max(grid.nodes, replicas.nodes)):
        gradients = None
    if group.is_flat and weights is not None:
        # A flat buffer stays gathered, so its replica is full.
        weights = replace(weights, replica="full")

    def sections(unit: int, *, is_refresh: bool = False) -> tuple[Section, ...]:
        if not config.separate_parameters or group.is_flat:
            return whole_row(trained)
        cut = group.refreshed_sections if is_refresh else group.sections
        return cut(ranks=grid.size, unit=unit, least_padding=least_padding)

    # The sections of a row differ for its reduction, its sum over replicas, and its refresh.
    reduced, summed = (
        sections(group_unit(gradients or GradientConfig(), grid=each)) for each in (grid, replicas)
    )
    refreshed = sections(BLOCK if weights is None else weights.group_size, is_refresh=True)
    is_freed = group.freed_after_forward and not group.is_flat
    gathers = 1 if group.is_flat else accumulation * (2 if is_freed else 1)
    return GroupTraffic(
        group=group,
        row_numel=row,
        trained_numel=trained,
        weights=weights,
        gradients=gradient_exchange(
            trained, grid=grid, config=gradients, dense_bytes=dense_bytes, sections=reduced
        ),
        all_reduce=all_reduce_exchange(
            trained, grid=replicas, config=gradients, dense_bytes=dense_bytes, sections=summed
        ),
        refresh=weight_refresh(trained, grid=grid, config=weights, sections=refreshed),
        gathers=weight_gather(row, grid=grid, config=weights, times=gathers),
        gathers_in_backward=is_freed,
    )

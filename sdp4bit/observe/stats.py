"""The numbers of `stats()` and `group_stats()`: bytes, bits and measures of a step."""

from __future__ import annotations

from collections.abc import Sequence

from sdp4bit.collectives.group import Group
from sdp4bit.observe.measures import Measures, Telemetry, total_measures
from sdp4bit.traffic import Traffic


class Stats(Measures):
    """Statistics of an attached model on this rank; see `CommHandle.stats`."""

    steps: int
    last_step: dict[str, int]
    total: dict[str, int]
    compression_ratio: float | None
    full_refreshes: int
    sampled_step: int | None


class GroupStats(Measures):
    """Statistics of one parameter group on this rank."""

    name: str
    intra_bytes: int
    """Bytes sent inside the node in the last step."""
    inter_bytes: int
    """Bytes sent to other nodes in the last step."""
    compression_ratio: float | None
    """Bytes between nodes without sdp4bit over those with it; None before the first step."""
    weight_bits: float | None
    """Current bits; None for full precision."""
    gradient_bits: float | None
    """Bits on the last hop of the last reduction; None for full precision."""


def step_traffic(group: Group, *, is_pending: bool) -> Traffic:
    """Return a group's traffic in the last step.

    Args:
        is_pending: whether an optimizer has stepped, but the step has not reached its boundary.
    """
    return sum((c.current_step if is_pending else c.last_step for c in group.counters), Traffic())


def model_stats(
    groups: Sequence[Group], *, steps: int, is_pending: bool, telemetry: Telemetry, reporting_ranks: int
) -> Stats:
    """Return the statistics of a model after `steps` steps, and a pending one; other arguments as above.

    Args:
        reporting_ranks: multiplies the bytes.
    """
    last = sum((step_traffic(group, is_pending=is_pending) for group in groups), Traffic())
    total = sum((counter.total for group in groups for counter in group.counters), Traffic())
    sent, sent_in_total = (
        {name: count * reporting_ranks for name, count in each.as_dict().items()} for each in (last, total)
    )
    steps += int(is_pending)
    return {
        "steps": steps,
        "last_step": sent,
        "total": sent_in_total,
        "compression_ratio": last.compression_ratio if steps else None,
        "full_refreshes": sum(group.full_refreshes for group in groups),
        "sampled_step": telemetry.step,
        **total_measures(telemetry.squares),
    }


def group_stats(
    groups: Sequence[Group], *, steps: int, is_pending: bool, telemetry: Telemetry
) -> list[GroupStats]:
    """Return the statistics of each group; arguments as for `model_stats`."""
    measured, found = telemetry.by_group(), list[GroupStats]()
    for group in groups:
        traffic, name = step_traffic(group, is_pending=is_pending), group.group.name
        found.append(
            {
                "name": name,
                "intra_bytes": round(traffic.intra_bytes),
                "inter_bytes": round(traffic.inter_bytes),
                "compression_ratio": traffic.compression_ratio if steps or is_pending else None,
                **measured[name],
                "weight_bits": None if group.replica is None else group.replica.bits,
                "gradient_bits": group.gradient_bits,
            }
        )
    return found

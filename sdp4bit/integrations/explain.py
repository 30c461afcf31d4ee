"""The table that tells what each parameter group sends, and why where it is not quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.integrations.fsdp_comm_state import CommState
from sdp4bit.integrations.fsdp_group_comm import GroupComm
from sdp4bit.telemetry import Traffic

_HEADER = ("group", "values/rank", "ranks", "weights", "gradients", "intra B/step", "inter B/step")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    row_numel: int
    ranks: str
    weights: str
    gradients: str
    sent: Traffic


def explain_groups(state: CommState) -> str:
    """Return the table of an FSDP2 model as text, one line per group and a line of totals."""
    return render(
        [
            Row(
                name=comm.group.name,
                row_numel=comm.group.row_numel,
                ranks=describe_ranks(comm.layout),
                weights=with_reason(
                    comm.weights_dense_because or _fsdp_weights(comm), comm.moved.get("weights")
                ),
                gradients=_fsdp_gradients(comm),
                sent=state.last_traffic(comm),
            )
            for comm in state.groups
        ]
    )


def render(rows: Sequence[Row]) -> str:
    """Return the table as text, with a line of totals."""
    lines = [_HEADER]
    for row in rows:
        values = f"{row.row_numel:,}"
        lines.append((row.name, values, row.ranks, row.weights, row.gradients, *_bytes(row.sent)))
    total = sum((row.sent for row in rows), Traffic())
    lines.append(("total", "", "", "", "", *_bytes(total)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    numeric = {1, 5, 6}
    rendered = [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rendered.insert(1, "-" * max(map(len, rendered)))
    return "\n".join(rendered)


def describe_ranks(layout: NodeLayout) -> str:
    """Return nodes x ranks per node as text."""
    return f"{layout.nodes} x {layout.ranks_per_node}"


def describe_weights(config: WeightConfig | None, *, where: str) -> str:
    """Return how quantized weights travel, and where their replica is, as text."""
    assert config is not None
    if config.bits is None:
        return f"full precision, {where}"
    return f"int{config.bits}/{config.group_size} {config.mode}, {where}"


def describe_gradients(config: GradientConfig | None, layout: NodeLayout, row_numel: int) -> str:
    """Return how rows of quantized gradients travel, as text."""
    assert config is not None
    if row_numel < config.min_numel:
        return f"row below min_numel={config.min_numel}"
    hops = []
    if layout.ranks_per_node > 1:
        hops.append("intra " + _hop(config.intra_bits, config.intra_group_size))
    if layout.nodes > 1:
        hops.append("inter " + _hop(config.inter_bits, config.inter_group_size))
    transform = ", Hadamard with random signs" if config.random_signs else ", Hadamard"
    text = ", ".join(hops) + (transform if config.hadamard else "")
    return text + (f", from step {config.start_step}" if config.start_step else "")


def with_reason(text: str, reason: str | None) -> str:
    """Return how something travels, with why it is not as configured, if it is not."""
    return f"{text}, {reason}" if reason else text


def _bytes(sent: Traffic) -> tuple[str, str]:
    if not sent.collectives:
        return "-", "-"
    return f"{sent.intra_bytes:,.0f}", f"{sent.inter_bytes:,.0f}"


def _fsdp_gradients(comm: GroupComm) -> str:
    if not any(segment.sharded.requires_grad for segment in comm.group.segments):
        return "none, all frozen"
    text = comm.gradients_dense_because
    if not text:
        assert comm.reduce_scatter is not None
        config = comm.reduce_scatter.config
        text = describe_gradients(config, comm.layout, comm.group.row_numel)
        if comm.group.row_numel >= config.min_numel:
            text += _copies(comm, min_numel=config.min_numel)
    return with_reason(text, comm.moved.get("gradients"))


def _fsdp_weights(comm: GroupComm) -> str:
    assert comm.replica is not None
    config = comm.replica.config
    text = describe_weights(config, where=f"{config.replica} replica")
    frozen = sum(not segment.sharded.requires_grad for segment in comm.group.segments)
    text += _copies(comm) if config.bits is not None else ""
    if frozen and config.bits is not None:
        text += f", {frozen} frozen not sent"
    return text + (f", {comm.full_refreshes} times in full precision" if comm.full_refreshes else "")


def _copies(comm: GroupComm, *, min_numel: int = 0) -> str:
    """Return how what tensor-parallel ranks hold alike travels in a group that also holds what they split."""
    parts = comm.group.parts
    if len(parts) == 1:
        return ""
    everywhere = len({ranks for part in parts for ranks in part[0].split_over})
    apart = dense = 0
    for part in parts:
        if len(part[0].split_over) < everywhere:
            short = sum(segment.end - segment.start for segment in part) < min_numel
            dense, apart = dense + len(part) * short, apart + len(part) * (not short)
    text = f", {apart} TP copies apart" if apart else ""
    return text + (f", {dense} TP copies in full precision" if dense else "")


def _hop(bits: int | None, group_size: int) -> str:
    return "fp32" if bits is None else f"int{bits}/{group_size}"

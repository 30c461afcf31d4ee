"""The table that tells what each FSDP group sends, and why where it is not quantized."""

from __future__ import annotations

from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.integrations.fsdp_hooks import CommState, GroupComm
from sdp4bit.telemetry import Traffic

_HEADER = ("group", "values/rank", "ranks", "weights", "gradients", "intra B/step", "inter B/step")


def explain_groups(state: CommState, config: SDP4BitConfig) -> str:
    """Return the table as text, one line per group and a line of totals."""
    lines = [_HEADER]
    total = Traffic()
    for comm in state.groups:
        sent = state.last_traffic(comm)
        total = total + sent
        lines.append(
            (
                comm.group.name,
                f"{comm.group.row_numel:,}",
                f"{comm.layout.nodes} x {comm.layout.ranks_per_node}",
                comm.weights_dense_because or _weights(config.weights, comm),
                comm.gradients_dense_because or _gradients(config.gradients, comm),
                *_bytes(sent),
            )
        )
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


def _bytes(sent: Traffic) -> tuple[str, str]:
    if not sent.collectives:
        return "-", "-"
    return f"{sent.intra_bytes:,.0f}", f"{sent.inter_bytes:,.0f}"


def _weights(config: WeightConfig | None, comm: GroupComm) -> str:
    assert config is not None
    if config.bits is None:
        return f"full precision, {config.replica} replica"
    frozen = sum(not segment.sharded.requires_grad for segment in comm.group.segments)
    note = f", {frozen} frozen not sent" if frozen else ""
    return f"int{config.bits}/{config.group_size} {config.mode}, {config.replica} replica{note}"


def _gradients(config: GradientConfig | None, comm: GroupComm) -> str:
    assert config is not None
    if comm.group.row_numel < config.min_numel:
        return f"row below min_numel={config.min_numel}"
    hops = []
    if comm.layout.ranks_per_node > 1:
        hops.append("intra " + _hop(config.intra_bits, config.intra_group_size))
    if comm.layout.nodes > 1:
        hops.append("inter " + _hop(config.inter_bits, config.inter_group_size))
    text = ", ".join(hops) + (", Hadamard" if config.hadamard else "")
    return text + (f", from step {config.start_step}" if config.start_step else "")


def _hop(bits: int | None, group_size: int) -> str:
    return "fp32" if bits is None else f"int{bits}/{group_size}"

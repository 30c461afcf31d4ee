"""The table of `explain()`: how each parameter group communicates, and why it is not quantized."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from sdp4bit.addresses import page
from sdp4bit.collectives.chunks import pipeline_chunks
from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.plan import hops_of
from sdp4bit.collectives.reasons import Cause, FullReason, Unquantized
from sdp4bit.collectives.sections import FINE_BITS, fine_bits
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weights import LARGEST_SMALL_EDIT, Weights
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization.formats import Bits, format_of
from sdp4bit.traffic import Traffic

MOST_NODES_IN_ONE_HOP = 64
"""More nodes than this get a note that blocks of nodes send fewer messages."""
_FULL_REFRESHES = {
    FullReason.FIRST_USE: "first use",
    FullReason.REQUESTED: (
        "requested (resync, full_precision, audit, auto), interrupted, or due on another rank"
    ),
    FullReason.LARGE: f"weights changed by more than 1/{round(1 / LARGEST_SMALL_EDIT)} of their norm",
    FullReason.LOADED: "weights were loaded",
    FullReason.NONFINITE: "the refresh before held NaN or infinity",
    FullReason.CHECKPOINT: "rows of a checkpoint",
    FullReason.MISFIT: "the loaded state belongs to other weights, ranks or nodes",
}

_PLACES = {"intra": "intra", "inter": "inter", "outer": "between blocks"}
_WIDTH = 80
_HEADER = ("group", "values/rank", "ranks", "intra B/step", "inter B/step")


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A line of the table."""

    name: str
    shard_numel: int
    ranks: str
    weights: str
    gradients: str
    sent: Traffic


def row_of(group: Group, sent: Traffic) -> TableRow:
    """Return a group's line, with the bytes that this rank sent."""
    ranks, remarks = group.layout.describe(), group.remarks()
    if group.replicate_layout not in (None, group.layout):
        ranks += f", replicated {group.replicate_layout.describe()}"
    return TableRow(
        name=group.view.name,
        shard_numel=_numel_of(group, remarks),
        ranks=ranks,
        weights=_weights_of(group, remarks),
        gradients=remarks.gradients or _gradients_of(group, remarks),
        sent=sent,
    )


def _numel_of(group: Group, remarks: Remarks) -> int:
    return group.view.shard_numel if remarks.numel is None else remarks.numel


def _weights_of(group: Group, remarks: Remarks) -> str:
    weights, replica = group.weights, group.weights.replica
    if replica is None:
        return str(weights.unquantized_reason or "")
    text = describe_weights(replica.config, where=remarks.place or f"{replica.config.replica} replica")
    text += _fine(group, [replica.bits])
    if weights.full_refreshes:
        text += f", full refreshes: {weights.full_refreshes} (the last: {last_full_refresh(weights)})"
    return ", ".join([text, *remarks.weights])


def describe_full_refresh(reason: FullReason, *, in_evaluation: bool) -> str:
    """Return why a refresh in full precision was sent."""
    return _FULL_REFRESHES[reason] + (", in evaluation" if in_evaluation else "")


def last_full_refresh(weights: Weights) -> str | None:
    """Return why the last refresh in full precision that counts was sent; None without one."""
    reason = weights.full_refresh_reason
    return None if reason is None else describe_full_refresh(reason, in_evaluation=weights.in_evaluation)


def _gradients_of(group: Group, remarks: Remarks) -> str:
    numel, gradients = _numel_of(group, remarks), group.gradients
    text = str(gradients.unquantized_reason or "")
    if gradients.reduction is not None:
        config = gradients.reduction.config
        shown = replace(config, pipeline_chunks=1) if remarks.staged else config
        text = describe_gradients(shown, group.layout, numel)
        if not config.exempts(numel=numel):
            text += _fine(group, [config.intra_bits, config.inter_bits])
        text += f", {remarks.staged}" if remarks.staged else ""
    if gradients.all_reduce is not None and group.replicate_layout is not None:
        text += f", {describe_all_reduce(gradients.all_reduce.config, group.replicate_layout, numel)}"
    return text


def _fine(group: Group, bits: Sequence[Bits]) -> str:
    has_fewer = any(fine_bits(each) != each for each in bits)
    return f", 1-D in {FINE_BITS} bits" if group.separate_parameters and has_fewer else ""


def layout_reason(part: WeightConfig | GradientConfig | None, layout: Nodes) -> Unquantized | None:
    """Return why weights or gradients of ranks in this layout are not quantized; None if they are."""
    if layout.size == 1:
        return Unquantized(Cause.ONE_RANK)
    return one_node_reason(part, nodes=layout.nodes)


def one_node_reason(part: WeightConfig | GradientConfig | None, *, nodes: int) -> Unquantized | None:
    """Return why weights or gradients of ranks on this many nodes are not quantized; None if they are."""
    if part is None:
        return Unquantized(Cause.OFF)
    if part.applies_to(nodes=nodes):
        return None
    return Unquantized(Cause.ONE_NODE_WEIGHTS if isinstance(part, WeightConfig) else Cause.ONE_NODE_GRADIENTS)


def one_node_note(reasons: Sequence[tuple[Unquantized | None, Unquantized | None]]) -> str:
    """Return a note about groups in full precision because their ranks share a node; "" for none.

    Args:
        reasons: for each group the reasons why its weights and its gradients are not quantized.
    """
    inside = 0
    for weights, gradients in reasons:
        if weights is not None and gradients is not None:
            inside += bool(
                {weights.cause, gradients.cause} & {Cause.ONE_NODE_WEIGHTS, Cause.ONE_NODE_GRADIENTS}
            )
    if not inside:
        return ""
    if inside == len(reasons):
        return (
            "all parameter groups have their ranks on one node, and stay in full precision. Over NVLink, "
            "leave it so. Over a slower link such as PCIe, attach with topology=1: each rank is its own node"
        )
    return (
        f"{inside} of {len(reasons)} parameter groups have their ranks on one node, and stay in full "
        'precision. To quantize these too: WeightConfig(replica="full") and '
        "GradientConfig(inside_one_node=True)"
    )


def one_hop_note(layouts: Iterable[Nodes]) -> str:
    """Return a note about gradients that cross many nodes in one hop; "" for none."""
    nodes = max((layout.nodes for layout in layouts if layout.blocks == 1), default=1)
    if nodes <= MOST_NODES_IN_ONE_HOP:
        return ""
    # Two hops have the fewest messages if both have about as many.
    inside = min(
        (each for each in range(1, nodes + 1) if nodes % each == 0), key=lambda each: each + nodes // each
    )
    if inside in (1, nodes):
        advice = f"{nodes} has no divisors: blocks of nodes, which need fewer messages, must be equal"
    else:
        advice = (
            f'Attach with topology=("auto", {inside}), or (ranks per node, {inside}): blocks of {inside} '
            f"nodes send {inside - 1} + {nodes // inside - 1} messages and round once more ({page('method')})"
        )
    return (
        f"{nodes} nodes reduce gradients in one hop between nodes, with {nodes - 1} messages per rank and "
        f"reduction. {advice}"
    )


def render(rows: Sequence[TableRow], *, full: bool = False) -> str:
    """Return the table in 80 columns: numbers and descriptions of each group, then totals.

    Groups that differ only in their names are one line, unless `full`.
    """
    total = sum((row.sent for row in rows), Traffic())
    rows = rows if full else _merged(rows)
    lines = [_HEADER]
    for row in rows:
        lines.append((row.name, f"{row.shard_numel:,}", row.ranks, *_bytes(row.sent)))
    lines.append(("total", "", "", *_bytes(total)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    # Longer names get a line of their own.
    widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    header, *numbers, totals = (_line(line, widths) for line in lines)
    rendered = [header, "-" * max(map(len, (header, totals)))]
    for row, line in zip(rows, numbers, strict=True):
        for kind, text in (("weights", row.weights), ("gradients", row.gradients)):
            first = f"  {kind:<11}"
            line += "\n" + wrapped(text, first=first, others=" " * len(first))
        rendered.append(line)
    return "\n".join([*rendered, totals])


def _merged(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return one row for all that differ only in their names."""
    equal: dict[tuple[object, ...], list[TableRow]] = {}
    for row in rows:
        equal.setdefault(astuple(replace(row, name="")), []).append(row)
    return [
        replace(first, name=f"{first.name} to {more[-1].name}, each of {1 + len(more)}") if more else first
        for first, *more in equal.values()
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *others = cells
    numeric = {1, 3, 4}
    aligned = [
        cell.rjust(width) if column in numeric else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(others, widths[1:], strict=True), start=1)
    ]
    apart = f"{name}\n" if len(name) > widths[0] else ""
    return apart + "  ".join([("" if apart else name).ljust(widths[0]), *aligned]).rstrip()


def wrapped(text: str, *, first: str = "", others: str = "") -> str:
    """Wrap a text at 80 columns, with these indents of the first and the other lines."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe_weights(config: WeightConfig, *, where: str) -> str:
    """Return a description of quantized weights and the place of their replica."""
    if config.bits is None:
        return f"full precision, {where}"
    clip = f" clipped at {config.effective_clip:g}" if config.effective_clip < 1 else ""
    return f"{format_of(config.bits).name}/{config.group_size}{clip} {config.mode}, {where}"


def describe_gradients(config: GradientConfig, layout: Nodes, shard_numel: int) -> str:
    """Return a description of the reduction of quantized gradients."""
    reason = config.exempts(numel=shard_numel)
    if reason:
        return reason
    options = ["Hadamard"] * config.hadamard
    options += [f"from step {config.start_step}"] if config.start_step else []
    chunks = pipeline_chunks(shard_numel, config=config, grid=layout)
    chosen = " (chosen)" if config.pipeline_chunks is None else ""
    options += [f"{chunks} chunks{chosen}"] if chunks > 1 else []
    return ", ".join([*_hops(config, layout), *options])


def describe_all_reduce(
    config: GradientConfig, layout: Nodes, numel: int, *, steps: int | None = None
) -> str:
    """Return a description of the all-reduce of this many gradient values between replicas.

    Args:
        steps: steps that have ended; None for any number from `start_step` on.
    """
    reason = config.exempts(numel=numel // layout.size, steps=steps, name="part")
    if reason:
        return f"all-reduce: {reason}"
    return "all-reduce " + " and ".join(_hops(config, layout))


def _hops(config: GradientConfig, layout: Nodes) -> list[str]:
    return [f"{_PLACES[hop.level]} {_coded(hop.bits, hop.group_size)}" for hop in hops_of(layout, config)]


def _bytes(sent: Traffic) -> tuple[str, str]:
    if not sent.collectives:
        return "-", "-"
    return f"{sent.intra_bytes:,.0f}", f"{sent.inter_bytes:,.0f}"


def _coded(bits: Bits, group_size: int) -> str:
    chosen = format_of(bits)
    return f"{chosen.name}/{group_size}" if chosen.has_scales else chosen.name

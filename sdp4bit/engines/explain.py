"""The table that tells what each parameter group sends, and why where it is not quantized."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from sdp4bit.collectives.pieces import is_long_enough
from sdp4bit.collectives.pipeline import pipeline_chunks
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Traffic

OFF = "off in the configuration"
ONE_RANK = "one rank"
ONE_NODE = 'full precision: sharded inside one node (WeightConfig(replica="full") quantizes)'
ONE_NODE_GRADIENTS = "full precision: all ranks on one node (GradientConfig(inside_one_node=True) quantizes)"
"""Reasons why weights or gradients are not quantized, as the table tells them."""

_WIDTH = 80
_HEADER = ("group", "values/rank", "ranks", "intra B/step", "inter B/step")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    shard_numel: int
    ranks: str
    weights: str
    gradients: str
    sent: Traffic


def one_node_reason(part: WeightConfig | GradientConfig | None, *, nodes: int) -> str:
    """Return why weights or gradients of ranks on so many nodes are not quantized; "" if they are."""
    if part is None:
        return OFF
    if part.applies_to(nodes=nodes):
        return ""
    return ONE_NODE if isinstance(part, WeightConfig) else ONE_NODE_GRADIENTS


def one_node_note(reasons: Sequence[tuple[str, str]]) -> str:
    """Return the note that groups stay in full precision because they are on one node; "" if none does.

    Args:
        reasons: for each group, why its weights and why its gradients are not quantized.
    """
    inside = sum(ONE_NODE in pair or ONE_NODE_GRADIENTS in pair for pair in reasons if "" not in pair)
    if not inside:
        return ""
    which = "all" if inside == len(reasons) else f"{inside} of {len(reasons)}"
    return (
        f"{which} parameter groups have their ranks on one node, and stay in full precision. To quantize "
        'these too: WeightConfig(replica="full") and GradientConfig(inside_one_node=True)'
    )


def render(rows: Sequence[Row]) -> str:
    """Return the table as text of 80 columns: of each group numbers and how it travels, then totals."""
    lines = [_HEADER]
    for row in rows:
        lines.append((row.name, f"{row.shard_numel:,}", row.ranks, *_bytes(row.sent)))
    total = sum((row.sent for row in rows), Traffic())
    lines.append(("total", "", "", *_bytes(total)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    # Names that are too long stand in a line of their own.
    widths[0] = min(widths[0], _WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    header, *numbers, totals = (_line(line, widths) for line in lines)
    rendered = [header, "-" * max(map(len, (header, totals)))]
    for row, line in zip(rows, numbers, strict=True):
        rendered += [line, _way("weights", row.weights), _way("gradients", row.gradients)]
    return "\n".join([*rendered, totals])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, *others = cells
    numeric = {1, 3, 4}
    aligned = [
        cell.rjust(width) if column in numeric else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(others, widths[1:], strict=True), start=1)
    ]
    apart = f"{name}\n" if len(name) > widths[0] else ""
    return apart + "  ".join([("" if apart else name).ljust(widths[0]), *aligned]).rstrip()


def _way(what: str, text: str) -> str:
    """Return how weights or gradients travel, below the numbers of their group."""
    first = f"  {what:<11}"
    return wrapped(text, first=first, others=" " * len(first))


def wrapped(text: str, *, first: str = "", others: str = "") -> str:
    """Return a text in lines of 80 columns, with what they begin with."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe_ranks(layout: NodeLayout) -> str:
    """Return nodes x ranks per node as text."""
    return f"{layout.nodes} x {layout.ranks_per_node}"


def describe_weights(config: WeightConfig | None, *, where: str) -> str:
    """Return how quantized weights travel, and where their replica is, as text."""
    assert config is not None
    if config.bits is None:
        return f"full precision, {where}"
    clip = f" clipped at {config.effective_clip:g}" if config.effective_clip < 1 else ""
    return f"int{config.bits:g}/{config.group_size}{clip} {config.mode}, {where}"


def describe_gradients(config: GradientConfig | None, layout: NodeLayout, shard_numel: int) -> str:
    """Return how rows of quantized gradients travel, as text."""
    assert config is not None
    if shard_numel < config.min_numel:
        return f"row below min_numel={config.min_numel}"
    options = ["Hadamard"] * config.hadamard
    options += [f"from step {config.start_step}"] if config.start_step else []
    return ", ".join([*_hops(config, layout), *options, *_chunks(config, layout, shard_numel)])


def describe_all_reduce(config: GradientConfig, layout: NodeLayout, numel: int) -> str:
    """Return how the gradients of this many values travel between replicas, as text."""
    if not is_long_enough(numel, ranks=layout.size, config=config):
        return f"all-reduce: part below min_numel={config.min_numel}"
    return "all-reduce " + " and ".join(_hops(config, layout))


def _hops(config: GradientConfig, layout: NodeLayout) -> list[str]:
    hops = []
    if layout.ranks_per_node > 1:
        hops.append("intra " + _hop(config.intra_bits, config.intra_group_size))
    if layout.nodes > 1:
        hops.append("inter " + _hop(config.inter_bits, config.inter_group_size))
    return hops


def _chunks(config: GradientConfig, layout: NodeLayout, shard_numel: int) -> list[str]:
    """Return into how many slices a row is cut, if several."""
    chunks = pipeline_chunks(
        shard_numel, config=config, nodes=layout.nodes, ranks_per_node=layout.ranks_per_node
    )
    chosen = " (chosen)" if config.pipeline_chunks is None else ""
    return [f"{chunks} chunks{chosen}"] if chunks > 1 else []


def _bytes(sent: Traffic) -> tuple[str, str]:
    if not sent.collectives:
        return "-", "-"
    return f"{sent.intra_bytes:,.0f}", f"{sent.inter_bytes:,.0f}"


def _hop(bits: float | None, group_size: int) -> str:
    return "fp32" if bits is None else f"int{bits:g}/{group_size}"

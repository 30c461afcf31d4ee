"""The table that tells what each parameter group sends, and why where it is not quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from sdp4bit.collectives.pipeline import pipeline_chunks
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Traffic

OFF = "off in the configuration"
ONE_RANK = "one rank"
ONE_NODE = "one node: differences would save nothing"
"""Reasons why weights or gradients are not quantized, as the table tells them."""

_HEADER = ("group", "values/rank", "ranks", "weights", "gradients", "intra B/step", "inter B/step")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    shard_numel: int
    ranks: str
    weights: str
    gradients: str
    sent: Traffic


def render(rows: Sequence[Row]) -> str:
    """Return the table as text, with a line of totals."""
    lines = [_HEADER]
    for row in rows:
        values = f"{row.shard_numel:,}"
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
    clip = f" clipped at {config.effective_clip:g}" if config.effective_clip < 1 else ""
    return f"int{config.bits}/{config.group_size}{clip} {config.mode}, {where}"


def describe_gradients(config: GradientConfig | None, layout: NodeLayout, shard_numel: int) -> str:
    """Return how rows of quantized gradients travel, as text."""
    assert config is not None
    if shard_numel < config.min_numel:
        return f"row below min_numel={config.min_numel}"
    hops = []
    if layout.ranks_per_node > 1:
        hops.append("intra " + _hop(config.intra_bits, config.intra_group_size))
    if layout.nodes > 1:
        hops.append("inter " + _hop(config.inter_bits, config.inter_group_size))
    options = [
        field.metadata["shown"].format(value)
        for field in fields(config)
        if field.metadata.get("shown") and (value := getattr(config, field.name))
    ]
    return ", ".join([*hops, *options, *_chunks(config, layout, shard_numel)])


def _chunks(config: GradientConfig, layout: NodeLayout, shard_numel: int) -> list[str]:
    """Return into how many slices a row is cut, if several."""
    chunks = pipeline_chunks(
        shard_numel, config=config, nodes=layout.nodes, ranks_per_node=layout.ranks_per_node
    )
    chosen = " (chosen)" if config.pipeline_chunks is None else ""
    return [f"{chunks} chunks{chosen}"] if chunks > 1 else []


def with_reason(text: str, reason: str | None) -> str:
    """Return how something travels, with why it is not as configured, if it is not."""
    return f"{text}, {reason}" if reason else text


def _bytes(sent: Traffic) -> tuple[str, str]:
    if not sent.collectives:
        return "-", "-"
    return f"{sent.intra_bytes:,.0f}", f"{sent.inter_bytes:,.0f}"


def _hop(bits: int | None, group_size: int) -> str:
    return "fp32" if bits is None else f"int{bits}/{group_size}"

"""Count the bytes that are sent per level, and those that full precision would have sent instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from sdp4bit.quantization.layout import JointLayout

Level = Literal["intra", "inter"]
"""Inside a node, or between nodes."""


@dataclass
class Traffic:
    """Bytes that one rank sent, by level.

    Messages between the ranks of one node are intra, others inter. Quantized messages are counted exactly.
    A collective that the communication library performs by itself is counted as a ring in rank order sends
    it, the least that any algorithm needs, spread evenly over the ranks of a node.
    """

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    padding_bytes: float = 0.0
    """The part of both that carries no values: rows filled to 32 values, messages to 16 bytes."""
    plain_intra_bytes: float = 0.0
    plain_inter_bytes: float = 0.0
    """What plain FSDP2 would have sent at the same calls (fp32 gradients or as reduced, bf16 weights)."""
    collectives: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def compression_ratio(self) -> float:
        """Plain bytes over sent bytes, between nodes; inside the node if there is only one."""
        if self.plain_inter_bytes or self.inter_bytes:
            plain, sent = self.plain_inter_bytes, self.inter_bytes
        else:
            plain, sent = self.plain_intra_bytes, self.intra_bytes
        if sent:
            return plain / sent
        return float("inf") if plain else 1.0

    def as_dict(self) -> dict[str, int]:
        """Return the sent bytes, rounded to whole ones, by name."""
        return {
            "intra_bytes": round(self.intra_bytes),
            "inter_bytes": round(self.inter_bytes),
            "padding_bytes": round(self.padding_bytes),
            "collectives": self.collectives,
        }


def format_bytes(count: float) -> str:
    """Return a byte count in decimal units, with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class TrafficCounter:
    """Counts what one rank of nodes x ranks_per_node sends, in total and from optimizer step to step."""

    def __init__(self, *, nodes: int, ranks_per_node: int) -> None:
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node
        self._total = Traffic()
        self._current, self._last = Traffic(), Traffic()

    @property
    def total(self) -> Traffic:
        """Everything sent so far, the unfinished step included."""
        return self._total + self._current

    @property
    def current_step(self) -> Traffic:
        """Traffic since the last optimizer step."""
        return self._current

    @property
    def last_step(self) -> Traffic:
        """Traffic between the last two optimizer steps."""
        return self._last

    def end_step(self) -> None:
        """Let the unfinished step be the last step."""
        self._total = self._total + self._current
        self._last, self._current = self._current, Traffic()

    def count_messages(self, layout: JointLayout, *, level: Level, peers: int, copies: int = 1) -> None:
        """Count `copies` messages of this layout to each of `peers` ranks of the level."""
        self.count_bytes(layout.nbytes * copies, level=level, peers=peers)
        self._current.padding_bytes += layout.padding_bytes * copies * peers

    def count_bytes(self, nbytes: int, *, level: Level, peers: int) -> None:
        """Count `nbytes` to each of `peers` ranks of the level ("intra" or "inter")."""
        if level == "intra":
            self._current.intra_bytes += nbytes * peers
        else:
            self._current.inter_bytes += nbytes * peers
        self._current.collectives += 1

    def count_plain(self, row_bytes: int, members: Sequence[int] | None = None) -> None:
        """Count what plain FSDP2 would have sent here, a ring of rows of this size; see count_ring."""
        intra, inter = self._ring(row_bytes, members)
        self._current.plain_intra_bytes += intra
        self._current.plain_inter_bytes += inter

    def count_ring(self, row_bytes: int, members: Sequence[int] | None = None) -> None:
        """Count a collective of the communication library's own, over rows of this size.

        Args:
            members: ranks that took part, in order; None for all.
        """
        intra, inter = self._ring(row_bytes, members)
        self._current.intra_bytes += intra
        self._current.inter_bytes += inter
        self._current.collectives += 1

    def _ring(self, row_bytes: float, members: Sequence[int] | None) -> tuple[float, float]:
        size, between = self._nodes * self._ranks_per_node, self._nodes if self._nodes > 1 else 0
        if members is not None:
            nodes = [rank // self._ranks_per_node for rank in members]
            size, between = len(nodes), sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
        sent = row_bytes * (size - 1)
        return sent * (size - between) / size, sent * between / size

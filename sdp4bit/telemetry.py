"""What was sent: bytes per level, padding, and what full precision would have sent instead."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from sdp4bit.quantization.layout import MessageLayout

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


class TrafficCounter:
    """Counts what one rank of nodes x ranks_per_node sends, in total and from optimizer step to step."""

    def __init__(self, *, nodes: int, ranks_per_node: int) -> None:
        self._nodes = nodes
        self._ranks_per_node = ranks_per_node
        self._total = Traffic()
        self._current = Traffic()
        self.last_step = Traffic()

    @property
    def total(self) -> Traffic:
        """Everything sent so far, the unfinished step included."""
        return self._total + self._current

    @property
    def current_step(self) -> Traffic:
        """What was sent since the last optimizer step."""
        return self._current

    def end_step(self) -> None:
        """The unfinished step becomes the last step."""
        self._total = self._total + self._current
        self.last_step, self._current = self._current, Traffic()

    def count_messages(self, layout: MessageLayout, *, level: Level, peers: int, copies: int = 1) -> None:
        """`copies` messages of this layout have gone to each of `peers` ranks of the level."""
        self.count_bytes(layout.nbytes * copies, level=level, peers=peers)
        self._current.padding_bytes += layout.padding_bytes * copies * peers

    def count_bytes(self, nbytes: int, *, level: Level, peers: int) -> None:
        """`nbytes` have gone to each of `peers` ranks of the level ("intra" or "inter")."""
        if level == "intra":
            self._current.intra_bytes += nbytes * peers
        else:
            self._current.inter_bytes += nbytes * peers
        self._current.collectives += 1

    def count_plain(self, row_bytes: int) -> None:
        """Plain FSDP2 would have sent a ring of rows of this size here."""
        intra, inter = self._ring(row_bytes)
        self._current.plain_intra_bytes += intra
        self._current.plain_inter_bytes += inter

    def count_ring(self, row_bytes: int) -> None:
        """The communication library has gathered or reduced rows of this size."""
        intra, inter = self._ring(row_bytes)
        self._current.intra_bytes += intra
        self._current.inter_bytes += inter
        self._current.collectives += 1

    def _ring(self, row_bytes: int) -> tuple[float, float]:
        sent = row_bytes * (self._nodes * self._ranks_per_node - 1)
        if self._nodes == 1:
            return float(sent), 0.0
        return sent * (self._ranks_per_node - 1) / self._ranks_per_node, sent / self._ranks_per_node

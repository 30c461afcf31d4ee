"""Counters of the bytes sent per level, and of the bytes that full precision would have sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

Level = Literal["intra", "inter", "outer"]
"""Inside a node, between nodes (with blocks: of one block), or between blocks of nodes."""
PLACES: dict[Level, str] = {
    "intra": "inside the node",
    "inter": "between nodes",
    "outer": "between blocks of nodes",
}
"""Descriptions of the levels for messages."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Ranks that communicate: nodes x ranks_per_node. Nodes may form blocks of equal size."""

    nodes: int
    ranks_per_node: int
    blocks: int = 1

    # Cached, because every message asks for them.

    @cached_property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @cached_property
    def levels(self) -> dict[Level, int]:
        """The ranks that exchange messages at each level, innermost first; 1 if the level does not exist.

        A rank's index is a number with these digits, the first one lowest.
        """
        return {"intra": self.ranks_per_node, "inter": self.nodes // self.blocks, "outer": self.blocks}

    def describe(self) -> str:
        """Return nodes x ranks per node as text; with blocks, blocks x nodes of a block x ranks per node."""
        intra, inter, outer = self.levels.values()
        return (f"{outer} x " if outer > 1 else "") + f"{inter} x {intra}"

    def apart(self, level: Level) -> int:
        """Return the difference between the indices of successive ranks of a level."""
        inside = {"intra": 1, "inter": self.ranks_per_node, "outer": self.size // self.blocks}
        return inside[level]


ALONE = Grid(nodes=1, ranks_per_node=1)


@dataclass
class Traffic:
    """Bytes that one rank sent, by level.

    Quantized messages are counted exactly. A collective of the backend counts as a ring in rank order, the
    minimum of all algorithms, spread evenly over the ranks of a node.
    """

    intra_bytes: float = 0.0
    inter_bytes: float = 0.0
    padding_bytes: float = 0.0  # padding in both: rows are padded to 32 values, messages to 16 bytes
    plain_intra_bytes: float = 0.0
    plain_inter_bytes: float = 0.0
    """Bytes that plain FSDP2 would have sent in the same calls (bf16 weights, gradients as reduced)."""
    collectives: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        mine, others = vars(self), vars(other)  # the fields; `fields()` would take longer than the sum
        return Traffic(**{name: value + others[name] for name, value in mine.items()})

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    @property
    def compression_ratio(self) -> float:
        """Plain bytes over sent bytes between nodes, or inside the node if there is only one."""
        if self.plain_inter_bytes or self.inter_bytes:
            plain, sent = self.plain_inter_bytes, self.inter_bytes
        else:
            plain, sent = self.plain_intra_bytes, self.intra_bytes
        if sent:
            return plain / sent
        return float("inf") if plain else 1.0

    def as_dict(self) -> dict[str, int]:
        """Return the sent bytes as integers, by name."""
        return {
            "intra_bytes": round(self.intra_bytes),
            "inter_bytes": round(self.inter_bytes),
            "padding_bytes": round(self.padding_bytes),
            "collectives": self.collectives,
        }


def format_bytes(count: float) -> str:
    """Format a byte count in decimal units with three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class TrafficCounter:
    """Counts the bytes that one rank of a grid sends, in total and per optimizer step."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # Of a row, the share that each rank of a ring over all of them sends inside its node, and to others.
        between = grid.nodes if grid.nodes > 1 else 0
        self._shares = _ring_shares(grid.size, between)
        self._total = Traffic()
        self.collectives = 0  # so far
        self.current_step = Traffic()  # traffic since the last optimizer step
        self.last_step = Traffic()  # traffic between the last two optimizer steps

    @property
    def total(self) -> Traffic:
        """Traffic so far, the unfinished step included."""
        return self._total + self.current_step

    def end_step(self) -> None:
        self._total = self._total + self.current_step
        self.last_step, self.current_step = self.current_step, Traffic()

    def count(self, nbytes: int, *, level: Level, padding_bytes: float = 0.0) -> None:
        """Count the bytes of one collective to all peers; all levels between nodes are one sum."""
        step = self.current_step
        if level == "intra":
            step.intra_bytes += nbytes
        else:
            step.inter_bytes += nbytes
        step.padding_bytes += padding_bytes
        step.collectives += 1
        self.collectives += 1

    def count_plain(self, row_bytes: int, members: Sequence[int] | None = None) -> None:
        """Count the bytes that plain FSDP2 would have sent here; see `count_ring`."""
        intra, inter = self._shares if members is None else self._shares_of(members)
        self.current_step.plain_intra_bytes += row_bytes * intra
        self.current_step.plain_inter_bytes += row_bytes * inter

    def count_ring(self, row_bytes: int, members: Sequence[int] | None = None) -> None:
        """Count a ring collective of the backend over rows of this size.

        Args:
            members: participating ranks, in order; None for all.
        """
        intra, inter = self._shares if members is None else self._shares_of(members)
        self.current_step.intra_bytes += row_bytes * intra
        self.current_step.inter_bytes += row_bytes * inter
        self.current_step.collectives += 1
        self.collectives += 1

    def _shares_of(self, members: Sequence[int]) -> tuple[float, float]:
        nodes = [rank // self._grid.ranks_per_node for rank in members]
        pairs = zip(nodes, nodes[1:] + nodes[:1], strict=True)
        return _ring_shares(len(nodes), sum(one != other for one, other in pairs))


def _ring_shares(size: int, between: int) -> tuple[float, float]:
    """Return the rows that a rank of a ring sends inside its node and to other nodes, on average.

    Args:
        between: neighbors in the ring that are on different nodes.
    """
    return (size - 1) * (size - between) / size, (size - 1) * between / size

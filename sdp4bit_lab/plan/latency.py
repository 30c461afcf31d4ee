"""Times of collectives and agreements that do not depend on their bytes.

Rings, trees and PAT follow the tuning table of NCCL (`src/graph/tuning.cc`, protocol LL128): a base time per
call, and a time per step. NCCL selects the fastest of them. It publishes no such table for all-to-alls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sdp4bit.traffic import Grid

MESSAGE_SECONDS = 8.5e-6
"""Network latency where every step waits for it, in NCCL's table."""
_RING_SHARE = 4.0 / 8.5
"""Part of it that a ring over several ranks per node does not hide."""
_TREE_NVLINK_SHARE = 1.25 / 1.9
_PAT_CALL_SHARE, _PAT_SHARE, _PAT_RANK = 8.0 / 14.0, 14.0 / 8.5 / 3.5, 2.8e-6
"""PAT, for one rank per node: share of the time of a call, of the network latency in each doubling, and the
time per rank."""

Kind = Literal["gather", "reduce", "all-reduce", "all-to-all"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Identical calls of a collective."""

    kind: Kind
    grid: Grid
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of the parts of a collective that do not depend on its bytes."""

    message: float = MESSAGE_SECONDS
    """Latency of a message between two nodes."""
    nvlink: float = 1.9e-6
    """A step of a ring inside a node."""
    call: float = 14e-6
    """Fixed time of a call."""
    peer: float = 2e-6
    """Each rank that an all-to-all sends to. Assumed."""
    gloo_hop: float = 25e-6
    """A message between two hosts over TCP. Assumed."""

    def seconds(self, call: Call) -> float:
        """Return the latency of all calls."""
        n, g = call.grid.nodes, call.grid.ranks_per_node
        if call.kind == "all-to-all":
            first = self.message if n > 1 else self.nvlink
            return call.times * (self.call + first + self.peer * (n * g - 1))
        step = self.message * (_RING_SHARE if g > 1 else 1.0)
        passes = 2 if call.kind == "all-reduce" else 1
        # A ring of R ranks has R - 1 steps per pass; of these, n - 1 cross to another node.
        between = n - 1
        choices = [self.call + passes * (between * step + (n * g - 1 - between) * self.nvlink)]
        if n > 1 and call.kind == "all-reduce":
            inside = (g - 1) * _TREE_NVLINK_SHARE * self.nvlink
            choices.append(self.call + 2 * (inside + math.log2(n) * self.message))
        elif n > 1 and g == 1:
            doublings = math.log2(n) * _PAT_SHARE * self.message
            choices.append(_PAT_CALL_SHARE * self.call + doublings + n * _PAT_RANK)
        return call.times * min(choices)

    def agreement(self, *, ranks: int) -> float:
        """Return the time of an agreement of the hosts by recursive doubling, in log2(ranks) hops."""
        hops = math.floor(math.log2(ranks))
        return (hops if ranks == 1 << hops else hops + 2) * max(self.gloo_hop, self.message)

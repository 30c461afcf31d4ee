"""How the messages of an all-to-all travel, and the memory they travel in."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from sdp4bit.collectives.exchange import PendingExchange, start_all_to_all
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import Topology
from sdp4bit.traffic import Level

Use = Literal["send", "receive"]


class MessageExchange(Protocol):
    """The all-to-alls of one rank, among the ranks of its node and among those with its local rank."""

    def messages(self, level: Level, use: Use, index: int, *, nbytes: int, device: torch.device) -> Tensor:
        """Return uint8 [ranks of the level, nbytes], to be filled and sent, or to be received into.

        Args:
            index: tells the messages of slices apart that are under way at once.
        """
        ...

    def start(
        self, received: Tensor, sent: Tensor, *, level: Level, index: int, what: str
    ) -> PendingExchange:
        """Row i of `sent` travels to rank i of the level, row i of `received` comes from it.

        Args:
            what: is exchanged, for errors.
        """
        ...


class GroupExchange:
    """Messages between processes, through the process groups of a topology."""

    def __init__(self, topology: Topology, scratch: Scratch) -> None:
        self._topology = topology
        self._scratch = scratch

    def messages(self, level: Level, use: Use, index: int, *, nbytes: int, device: torch.device) -> Tensor:
        """See MessageExchange; the memory is shared by the reductions that follow each other."""
        topology = self._topology
        count = topology.ranks_per_node if level == "intra" else topology.nodes
        return self._scratch.messages(f"{level} {use} {index}", count, nbytes, device=device)

    def start(
        self, received: Tensor, sent: Tensor, *, level: Level, index: int, what: str
    ) -> PendingExchange:
        """See MessageExchange."""
        group = self._topology.intra if level == "intra" else self._topology.inter
        assert group is not None
        return start_all_to_all(received, sent, group, tag=index, what=what)

"""Weights of a parameter group: the refresh of their replica that is due, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sdp4bit.collectives.gradients import NOT_PLANNED
from sdp4bit.collectives.plan import RefreshPlan
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.traffic import TrafficCounter

T = TypeVar("T")


class Weights:
    """Gathers of the weights of one parameter group, from a replica or in full precision.

    An engine reports changes of the main weights (`mark_changed`), and calls `gather` before weights are
    used, or `refresh` if it reads the replica itself. FSDP2 decides itself, and starts refreshes with
    `start_full_refresh` and `start_quantized_refresh`, which count them.
    """

    def __init__(self, *, nodes: Nodes) -> None:
        """Create weights without a replica, which the engine gathers in full precision."""
        self._size = nodes.size
        self.unquantized_reason = ""
        """Why there is no replica; if it is empty when an engine is attached, one is created."""
        self.make_replica: Callable[..., WeightReplica] = WeightReplica  # engines bind more arguments
        self.replica: WeightReplica | None = None
        self.traffic = TrafficCounter(nodes)
        self.refreshes = 0  # quantized refreshes so far
        self.full_refreshes = 0
        """Full-precision refreshes after the first one."""
        self.full_refresh_reason: str | None = None  # of the last one that counts
        self._was_refreshed = False
        self.is_changed = False  # the main weights have changed since the last refresh
        self.full_reason = ""  # of the refresh in full precision that is due; "" for none

    @property
    def plan(self) -> RefreshPlan | str:
        """The latest plan of a refresh, or the reason why there is none."""
        return self.unquantized_reason if self.replica is None else self.replica.plans.last or NOT_PLANNED

    def gather(self, output: Tensor, main: Tensor, *, plain: Callable[[], object]) -> None:
        """Write the weights of all ranks to the output, from the replica after a refresh if one is due.

        Args:
            output: [ranks * n], in the dtype of the replica, which the first call decides.
            main: [n], this rank's main shard, for instance in fp32.
            plain: the engine's own all-gather into the output, for weights without a replica.
        """
        if self.replica is None:
            self.gather_plain(output.nbytes // self._size, plain)
            return
        self.traffic.count_plain(output.nbytes // self._size)  # of the gather that this replaces
        self.refresh(main, dtype=output.dtype)
        self.replica.gather(output)

    def mark_changed(self) -> None:
        """Report a change of the main weights on all ranks, such as an optimizer step."""
        self.is_changed = self.replica is not None

    def require_full_refresh(self, reason: str) -> None:
        """Make the next refresh one in full precision; called on all ranks."""
        self.full_reason = reason if self.replica is not None else ""

    def refresh(self, main: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Start the refresh that is due, if any; `replica.wait()` or `replica.gather()` finishes it.

        Args:
            main: [n], this rank's main shard; must not change until the end of the refresh.
            dtype: dtype of a replica that is created now; None for that of the main shard.
        """
        assert self.replica is not None
        rows = self.replica.rows
        if rows is None:
            self.start_full_refresh(main.to(dtype or main.dtype), reason="first use")
        elif self.full_reason:
            self.start_full_refresh(main.to(rows.dtype), reason=self.full_reason)
        elif self.is_changed:
            self.start_quantized_refresh(main)
        # Only now, so that an exception above leaves the refresh due.
        self.is_changed, self.full_reason = False, ""

    def start_full_refresh(self, row: Tensor, *, reason: str) -> None:
        """Start a refresh in full precision; see `WeightReplica.start_full_refresh`."""
        assert self.replica is not None
        self.replica.start_full_refresh(row)
        self.count_full_refresh(reason)

    def start_quantized_refresh(self, main: Tensor, **options: Any) -> None:
        """Start a refresh by a quantized difference; see `WeightReplica.start_quantized_refresh`."""
        assert self.replica is not None
        self.replica.start_quantized_refresh(main, **options)
        self.refreshes += 1

    def count_full_refresh(self, reason: str) -> None:
        """Count a refresh in full precision, except for the first; called if the engine has sent it."""
        if self._was_refreshed:
            self.full_refreshes += 1
            self.full_refresh_reason = reason
        self._was_refreshed = True

    def gather_plain(
        self, row_bytes: int, plain: Callable[[], T], *, members: Sequence[int] | None = None
    ) -> T:
        """Gather in full precision by the engine's own collective, and count its bytes.

        Args:
            row_bytes: size of a rank's row.
            plain: the engine's own all-gather.
            members: indices in the nodes of the ranks that take part; None for all.
        """
        self.traffic.count_plain(row_bytes, members)
        self.traffic.count_ring(row_bytes, members)
        return plain()

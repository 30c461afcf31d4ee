"""The decision which refresh the replica of a parameter group needs.

A replica represents one version of the main weights. Optimizer steps, edits, loads and NaN make it stale.
`Freshness` decides and sends nothing: `events.py` makes the ranks agree on their flags, and `hooks.py` sends
the refresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.collectives.sections import Range, take_ranges
from sdp4bit.collectives.transport import HostCopy
from sdp4bit.engines.edits import LARGEST_SMALL_EDIT
from sdp4bit.engines.fsdp2.view import FSDPView
from sdp4bit.quantization import ops


class Due(IntEnum):
    """The part of a row that the next refresh sends. Events raise it, and a refresh that was sent ends it."""

    NOTHING = 0
    TRAINED = 1  # an optimizer has stepped: the difference of the trainable params
    ROW = 2  # weights anywhere have changed by at most LARGEST_SMALL_EDIT: the difference of the row
    FULL = 3  # a difference would be too coarse or NaN: the row in full precision


LARGE = f"weights changed by more than 1/{round(1 / LARGEST_SMALL_EDIT)} of their norm"
NONFINITE = "the refresh before held NaN or infinity"
LOADED = "weights were loaded"
REQUESTED = "requested (resync, full_precision, audit), interrupted, or due on another rank"
CHECKPOINT = "rows of a checkpoint"
MISFIT = "the loaded state belongs to other weights, ranks or nodes"
"""Why a refresh in full precision is due, in logs and statistics."""


@dataclass
class Seen:
    """The events of a group since its last refresh, as this rank has seen them."""

    has_stepped: bool = False  # an optimizer has stepped; reset when the ranks have agreed on it
    was_loaded: bool = False  # a state dict was loaded; reset likewise
    is_reduced: bool = False  # gradients have been reduced
    trained: frozenset[int] = frozenset()  # params that required a gradient when gradients were reduced


class Flags(NamedTuple):
    """Events on which the ranks of a group agree: each is the maximum over the ranks."""

    due: Due  # including a step that the ranks have not agreed on
    torn: bool  # an exception has interrupted a refresh, so ranks may hold different rows
    edited: bool
    loaded: bool
    nonfinite: bool
    evaluates: bool
    misfit: bool


class Refresh(NamedTuple):
    """A refresh of this rank's row, which `Freshness.sent` takes when it has been sent."""

    is_full: bool  # a row in full precision goes first: `loaded`, or else the main shard
    is_difference: bool  # then the quantized difference of the main shard
    loaded: Tensor | None  # [n], the row of a checkpoint
    ranges: list[Range] | None  # whose difference is sent; None for the entire row
    trained: frozenset[int]  # params that are trainable now


class Freshness:
    """All that decides the refreshes of one group: the level, this rank's events, and the last refresh."""

    def __init__(self, group: FSDPView, *, nodes: int) -> None:
        self._group = group
        self._nodes = nodes
        self.due = Due.FULL
        self.is_from_checkpoint = False  # loaded rows go first; they are dropped if full precision is due
        self.full_reason = "first use"  # of the refresh in full precision that is due, or of the last one
        self.seen = Seen()
        self._set_trained(frozenset())
        # Of the row of the last refresh: checksums of its trained and its frozen part, int64 [2], its dtype,
        # and whether it held NaN or infinity.
        self._checksums: Tensor | None = None
        self._dtype = torch.float32
        self._nonfinite: HostCopy | None = None
        self._comparisons: list[HostCopy] = []  # with these checksums, on their way to the host
        self._is_accumulating = False  # the last forward was in training and only accumulated gradients
        self.full_in_a_row = 0
        # From a checkpoint, until the next refresh: the replica's row of this rank's shard, and fingerprints
        # of the main shards when they were saved, int64 [params, slots of this rank].
        self.loaded_row: Tensor | None = None
        self.loaded_fingerprints: Tensor | None = None

    # -- events that this rank sees ---------------------------------------------------------------------

    def note_reduction(self) -> None:
        """Record that gradients of the group are being reduced."""
        self.seen.is_reduced = True
        self.seen.trained |= self._group.requiring_grad()

    def note_step(self, *, by_hand: bool) -> None:
        """Record that an optimizer of this rank has stepped somewhere in the model."""
        # Any optimizer counts, because other ranks may divide the parameters among optimizers differently. A
        # group without a gradient since its last refresh does not count, unless the user reports the step.
        # So a discriminator's step does not send the generator's weights.
        trainable = self._trainable()
        has_gradient = self.seen.is_reduced or self._group.has_gradient(trainable)
        self.seen.has_stepped |= bool(trainable) and (by_hand or has_gradient)

    def _trainable(self) -> frozenset[int]:
        """Return the params that an optimizer step may change; the same on every rank of the group."""
        # A parameter that was frozen after its gradient was reduced may still change in the step. Its `.grad`
        # must not decide that, because a rank whose shard is empty may never clear it.
        return self.seen.trained | self._group.requiring_grad()

    def load(self, row: Tensor | None, *, fingerprints: Tensor | None, due: frozenset[int]) -> None:
        """Continue from a checkpoint; `row` [n] and fingerprints are None if some are missing."""
        # The difference of the due params had not been sent when it was saved.
        self.seen = Seen(trained=due)
        self._set_trained(due)
        self.loaded_row, self.loaded_fingerprints = row, fingerprints
        self.due, self.is_from_checkpoint = Due.TRAINED if due else Due.NOTHING, True
        self.full_reason = CHECKPOINT

    # -- agreement of the ranks -------------------------------------------------------------------------

    def find_edits(self) -> Tensor | None:
        """Compare the weights with those of the last refresh; called once per forward.

        Returns:
            Whether they differ, a bool scalar on the device; None if unknown or if the host does not wait.
        """
        group, was_accumulating = self._group, self._is_accumulating
        self._is_accumulating = group.module.training and not group.reduces_gradients
        # A GPU would be waited for in every micro-batch after one whose gradients are not reduced. The last
        # one finds an edit between them, and the first forward after the result has arrived sends it.
        may_wait = _is_on_host(group) or not (was_accumulating and group.module.training)
        if not may_wait and self._is_accumulating:
            return None
        before = self._checksums
        if self.is_from_checkpoint or self.due > Due.TRAINED or before is None:
            return None
        # After a step only the frozen part is compared, because the difference of the rest is sent anyway.
        has_stepped = self.seen.has_stepped or self.due is Due.TRAINED
        trained, frozen = self._parts
        if has_stepped and not frozen:
            return None
        row = self._group.main_shard(self._dtype)
        first = int(has_stepped)
        sums = _add_checksums(row, (trained, frozen)[first:], torch.zeros_like(before[first:]))
        is_edited = (sums != before[first:]).any()
        if may_wait:
            return is_edited
        self._comparisons.append(HostCopy(is_edited))
        return None

    def flags(self, *, edited: bool, is_torn: bool, has_gradients: bool) -> Flags:
        """Return the events that this rank has seen; `edited` is the result of `find_edits`."""
        # The host does not wait for the flag of the device: one that arrives late counts in the next step.
        nonfinite = None if self._nonfinite is None else self._nonfinite.arrived()
        late = [(copy, copy.arrived()) for copy in self._comparisons]
        self._comparisons = [copy for copy, found in late if found is None]
        return Flags(
            due=max(self.due, Due.TRAINED if self.seen.has_stepped else Due.NOTHING),
            torn=is_torn,
            edited=edited or any(bool(found) for _, found in late if found is not None),
            loaded=self.seen.was_loaded,
            nonfinite=nonfinite is not None and bool(nonfinite),
            # Training in eval mode, which only switches dropout off, has gradients.
            evaluates=not self._group.module.training and not has_gradients,
            misfit=self._has_misfit(),
        )

    def _has_misfit(self) -> bool:
        """Return whether the loaded row is missing or was saved by another rank or with other weights."""
        if not self.is_from_checkpoint:
            return False
        if self.loaded_row is None or self.loaded_fingerprints is None:
            return True
        return not bool((self.loaded_fingerprints == self.fingerprints().unsqueeze(1)).all())

    def fingerprints(self) -> Tensor:
        """Return fingerprints of the main shards and the number of nodes, int64 [params]."""
        return self._group.fingerprints() + (self._nodes << 40)

    def agree(self, flags: Flags) -> bool:
        """Apply the events that any rank has seen; return whether rows of a checkpoint were refused."""
        self.seen.has_stepped = self.seen.was_loaded = False
        if flags.torn:
            self.raise_to(Due.FULL, REQUESTED)
        if flags.due > self.due:
            self.raise_to(flags.due, REQUESTED)
        # Rows of a checkpoint stay due: their weights may be loaded after them.
        if flags.loaded and not self.is_from_checkpoint:
            self.raise_to(Due.FULL, LOADED)
        # Unchanged weights that are not finite need no second refresh.
        if flags.nonfinite and self.due and not self.is_from_checkpoint:
            self.raise_to(Due.FULL, NONFINITE)
        is_refused = flags.misfit and self.is_from_checkpoint
        if is_refused:
            self.raise_to(Due.FULL, MISFIT)
        return is_refused

    def needs_size(self, flags: Flags, *, sends_differences: bool) -> bool:
        """Return whether the size of the change decides between a difference and full precision."""
        # An evaluation may have replaced the weights by averages, for which a difference is too coarse, and
        # its bytes hardly matter. With mode="direct" the replica always differs.
        if flags.evaluates and sends_differences and Due.NOTHING < self.due < Due.FULL:
            return True
        return flags.edited and self.due < Due.FULL and not self.is_from_checkpoint

    def agree_on_size(self, flags: Flags, *, is_large: bool, sends_differences: bool) -> None:
        """Apply the size of a change, on which the ranks have agreed."""
        if is_large or (flags.edited and not sends_differences):
            self.raise_to(Due.FULL, LARGE)
        elif flags.edited and not self.is_from_checkpoint:
            self.raise_to(Due.ROW)

    def raise_to(self, due: Due, reason: str = "") -> None:
        """Make at least this level due; called on all ranks.

        Args:
            reason: of full precision. The first one counts, but NaN gives way to any other.
        """
        if due is Due.FULL and (self.due < due or self.holds_nonfinite):
            self.full_reason = reason
        self.due = max(self.due, due)
        if self.due is Due.FULL:
            self.is_from_checkpoint, self.loaded_row = False, None

    # -- the refresh ------------------------------------------------------------------------------------

    @property
    def holds_nonfinite(self) -> bool:
        """Whether NaN or infinity cause the refresh in full precision that is due, or caused the last one."""
        return self.full_reason == NONFINITE

    @property
    def is_full(self) -> bool:
        """Whether the next refresh begins with rows in full precision."""
        return self.is_from_checkpoint or self.due is Due.FULL

    @property
    def is_current(self) -> bool:
        """Whether no refresh is due, apart from steps and loads that the ranks have not agreed on."""
        return not (self.due or self.is_from_checkpoint)

    def refresh(self) -> Refresh | None:
        """Return the refresh that the next gather needs; nothing changes until it has been `sent`."""
        if self.is_current:
            return None
        return Refresh(
            is_full=self.is_full,
            is_difference=Due.NOTHING < self.due < Due.FULL,
            loaded=self.loaded_row,
            ranges=self._parts[0] if self.due is Due.TRAINED and self._sends_part() else None,
            trained=self._group.requiring_grad(),
        )

    def _sends_part(self) -> bool:
        """Return whether a difference leaves out the frozen params."""
        # Edits of weights that were frozen until now may have gone undetected: then all are sent.
        return self.trained == self._trainable() != self._group.row.everything

    def due_params(self) -> frozenset[int]:
        """Return the params whose difference is due, including steps not yet agreed on."""
        due = Due.TRAINED if self.is_current and self.seen.has_stepped else self.due
        if due in (Due.NOTHING, Due.FULL):
            return frozenset()
        return self.trained if due is Due.TRAINED and self._sends_part() else self._group.row.everything

    def sent(self, refresh: Refresh, row: Tensor, *, nonfinite: Tensor) -> None:
        """Record a refresh; called once its transfers have been issued.

        Args:
            row: [n], the main shard in the gathered dtype.
            nonfinite: whether the values that were sent held NaN or infinity, a bool scalar on the device.
        """
        # The level first: if the checksums below run out of memory, the other ranks have this level, too, and
        # the old checksums find an edit.
        self.due, self.is_from_checkpoint = Due.NOTHING, False
        self.seen, self.loaded_row = Seen(), None
        self._nonfinite = HostCopy(nonfinite)
        before, is_full = self._checksums, refresh.is_full
        # An evaluation may have swapped averages in, and the next forward in training has them out again.
        # Those that the user has asked for are no surprise.
        counts = is_full and before is not None and self._group.module.training
        counts = counts and self.full_reason != REQUESTED
        self.full_in_a_row = self.full_in_a_row + 1 if counts else 0
        if refresh.ranges is None and refresh.trained != self.trained:
            self._set_trained(refresh.trained)
        trained, frozen = self._parts
        sums = row.new_zeros(2, dtype=torch.int64)
        if frozen and before is not None and not is_full and refresh.ranges is not None:
            # A difference of the rest has not sent an edit of the frozen part, which must still be detected.
            sums[1], frozen = before[1], []
        self._checksums, self._dtype = _add_checksums(row, (trained, frozen), sums), row.dtype

    def _set_trained(self, trained: frozenset[int]) -> None:
        """Set the params that are trainable at a refresh; the others are frozen and not sent."""
        row = self._group.row
        self.trained, self._parts = trained, (row.ranges(trained), row.ranges(row.everything - trained))


def _add_checksums(row: Tensor, parts: Sequence[Sequence[Range]], sums: Tensor) -> Tensor:
    """Add the checksums of parts of a row [n] to sums, int64 [parts], and return these."""
    for ranges, out in zip(parts, sums, strict=True):
        if ranges:
            pieces = take_ranges(row, ranges)
            ops.add_checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces), out=out)
    return sums


def _is_on_host(group: FSDPView) -> bool:
    return group.device.type == "cpu"

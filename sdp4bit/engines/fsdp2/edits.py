"""Detection of changes of a parameter group's weights: optimizer steps, edits, loads and NaN.

`Edits` decides nothing: ranks agree on its events in `events.py`, and the group's `Weights` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdp4bit.collectives.reasons import FullReason
from sdp4bit.collectives.sections import Range, take_ranges
from sdp4bit.collectives.streams import HostCopy
from sdp4bit.collectives.weights import Due, Events, Weights
from sdp4bit.engines.fsdp2.view import FSDPView
from sdp4bit.quantization import ops


@dataclass
class Seen:
    """The events of a group since its last refresh, as this rank has seen them."""

    has_stepped: bool = False  # an optimizer has stepped; reset when the ranks have agreed on it
    was_loaded: bool = False  # a state dict was loaded; reset likewise
    is_reduced: bool = False  # gradients have been reduced
    trained: frozenset[int] = frozenset()  # params that required a gradient when gradients were reduced


class Edits:
    """This rank's events of one group, and the checksums that show an edit."""

    def __init__(self, view: FSDPView, weights: Weights) -> None:
        self._view = view
        self._weights = weights
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
        # From a checkpoint: fingerprints of the main shards when they were saved, int64 [params, slots of
        # this rank].
        self.loaded_fingerprints: Tensor | None = None

    # -- events that this rank sees ---------------------------------------------------------------------

    def note_reduction(self) -> None:
        """Record that gradients of the group are being reduced."""
        self.seen.is_reduced = True
        self.seen.trained |= self._view.requiring_grad()

    def note_step(self, *, by_hand: bool) -> None:
        """Record that an optimizer of this rank has stepped somewhere in the model."""
        # Any optimizer counts, because other ranks may divide the parameters among optimizers differently. A
        # group without a gradient since its last refresh does not count, unless the user reports the step.
        # So a discriminator's step does not send the generator's weights.
        if self.seen.is_reduced and self.seen.trained:
            self.seen.has_stepped = True
            return
        trainable = self._trainable()
        has_gradient = self.seen.is_reduced or self._view.has_gradient(trainable)
        self.seen.has_stepped |= bool(trainable) and (by_hand or has_gradient)

    def _trainable(self) -> frozenset[int]:
        """Return the params that an optimizer step may change; the same on every rank of the group."""
        # A parameter that was frozen after its gradient was reduced may still change in the step. Its `.grad`
        # must not decide that, because a rank whose shard is empty may never clear it.
        return self.seen.trained | self._view.requiring_grad()

    def load(self, row: Tensor | None, *, fingerprints: Tensor | None, due: frozenset[int]) -> None:
        """Continue from a checkpoint; `row` [n] and fingerprints are None if some are missing."""
        # The difference of the due params had not been sent when it was saved.
        self.seen, self._comparisons = Seen(trained=due), []
        self._set_trained(due)
        self.loaded_fingerprints = fingerprints
        self._weights.load_rows(row, due=Due.TRAINED if due else Due.NOTHING)

    def find_edits(self, *, waits: bool = False) -> Tensor | None:
        """Compare the weights with those of the last refresh; called once per forward, and to save.

        Args:
            waits: whether the host waits for the result, also where a later forward could use it.

        Returns:
            Whether they differ, a bool scalar on the device; None if unknown or if the host does not wait.
        """
        group, weights, was_accumulating = self._view, self._weights, self._is_accumulating
        self._is_accumulating = group.module.training and not group.reduces_gradients
        # After a step only the frozen part is compared, because the difference of the rest is sent anyway.
        has_stepped = self.seen.has_stepped or weights.due is Due.TRAINED
        # In training a GPU would be waited for in every step with frozen weights, and in every micro-batch
        # after one whose gradients are not reduced. The last one of these finds an edit between them, and the
        # first forward after the result has arrived sends it.
        is_late = not (waits or _is_on_host(group)) and group.module.training
        if is_late and was_accumulating and self._is_accumulating:
            return None
        trained, frozen = self._parts
        is_late = is_late and (was_accumulating or has_stepped or not trained)
        before = self._checksums
        if weights.is_from_checkpoint or weights.due > Due.TRAINED or before is None:
            return None
        if has_stepped and not frozen:
            return None
        row = self._view.main_shard(self._dtype)
        first = int(has_stepped)
        sums = _add_checksums(row, (trained, frozen)[first:], torch.zeros_like(before[first:]))
        is_edited = (sums != before[first:]).any()
        if not is_late:
            return is_edited
        self._comparisons.append(HostCopy(is_edited))
        return None

    def events(self, *, edited: bool, has_gradients: bool) -> Events:
        """Return the events that this rank has seen; `edited` is the result of `find_edits`."""
        # The host does not wait for the flag of the device: one that arrives late counts in the next step.
        nonfinite = None if self._nonfinite is None else self._nonfinite.arrived()
        late = [(copy, copy.arrived()) for copy in self._comparisons]
        self._comparisons = [copy for copy, found in late if found is None]
        known = self._weights.events()
        return Events(
            due=max(known.due, Due.TRAINED if self.seen.has_stepped else Due.NOTHING),
            torn=known.torn,
            edited=edited or any(bool(found) for _, found in late if found is not None),
            loaded=self.seen.was_loaded,
            nonfinite=nonfinite is not None and bool(nonfinite),
            # Training in eval mode, which only switches dropout off, has gradients.
            evaluates=not self._view.module.training and not has_gradients,
            misfit=self._has_misfit(),
        )

    def _has_misfit(self) -> bool:
        """Return whether the loaded row is missing or was saved by another rank or with other weights."""
        if not self._weights.is_from_checkpoint:
            return False
        if self._weights.loaded_row is None or self.loaded_fingerprints is None:
            return True
        return not bool((self.loaded_fingerprints == self.fingerprints().unsqueeze(1)).all())

    def fingerprints(self) -> Tensor:
        """Return fingerprints of the main shards and the number of nodes, int64 [params]."""
        return self._view.fingerprints() + (self._weights.nodes.nodes << 40)

    def note_agreement(self) -> None:
        """Record that the group's `Weights` has the steps and loads of all ranks."""
        self.seen.has_stepped = self.seen.was_loaded = False

    # -- the refresh ------------------------------------------------------------------------------------

    def ranges(self) -> list[Range] | None:
        """Return the ranges whose difference is due; None for the row."""
        return self._parts[0] if self._weights.due is Due.TRAINED and self._sends_part() else None

    def _sends_part(self) -> bool:
        """Return whether a difference leaves out the frozen params."""
        # Edits of weights that were frozen until now may have gone undetected: then all are sent.
        return self.trained != self._view.row.everything and self.trained == self._trainable()

    def due_params(self) -> frozenset[int]:
        """Return the params whose difference is due, including steps not yet agreed on."""
        weights = self._weights
        due = Due.TRAINED if weights.is_current and self.seen.has_stepped else weights.due
        if due in (Due.NOTHING, Due.FULL):
            return frozenset()
        return self.trained if due is Due.TRAINED and self._sends_part() else self._view.row.everything

    def note_refresh(
        self, row: Tensor, *, ranges: list[Range] | None, is_full: bool, nonfinite: Tensor
    ) -> None:
        """Begin to look for edits after a refresh; called once its transfers have been issued.

        Args:
            row: [n], the main shard in the gathered dtype.
            ranges: the ranges that were sent; None for the row.
            is_full: whether rows in full precision were sent.
            nonfinite: whether the values that were sent held NaN or infinity, a bool scalar on the device.
        """
        group = self._view
        # The events first. If the checksums below run out of memory, the old ones find an edit.
        self.seen = Seen()
        self._nonfinite = HostCopy(nonfinite)
        before, requiring_grad = self._checksums, group.requiring_grad()
        # An evaluation may have swapped averages in, and the next forward in training has them out again.
        # Those that the user has asked for are no surprise.
        counts = is_full and before is not None and group.module.training
        counts = counts and self._weights.reason is not FullReason.REQUESTED
        self.full_in_a_row = self.full_in_a_row + 1 if counts else 0
        if ranges is None and requiring_grad != self.trained:
            self._set_trained(requiring_grad)
        trained, frozen = self._parts
        if is_full or (frozen and ranges is None):
            self._comparisons = []  # with weights that are sent now
        sums = row.new_zeros(2, dtype=torch.int64)
        if frozen and before is not None and not is_full and ranges is not None:
            # A difference of the rest has not sent an edit of the frozen part, which must still be detected.
            sums[1], frozen = before[1], []
        self._checksums, self._dtype = _add_checksums(row, (trained, frozen), sums), row.dtype

    def _set_trained(self, trained: frozenset[int]) -> None:
        """Set the params that are trainable at a refresh; the others are frozen and not sent."""
        row = self._view.row
        self.trained, self._parts = trained, (row.ranges(trained), row.ranges(row.everything - trained))


def _add_checksums(row: Tensor, parts: Sequence[Sequence[Range]], sums: Tensor) -> Tensor:
    """Add the checksums of parts of a row [n] to sums, int64 [parts], and return these."""
    for ranges, out in zip(parts, sums, strict=True):
        if ranges:
            pieces = take_ranges(row, ranges)
            ops.add_checksum(pieces[0] if len(pieces) == 1 else torch.cat(pieces), out=out)
    return sums


def _is_on_host(view: FSDPView) -> bool:
    return view.device.type == "cpu"

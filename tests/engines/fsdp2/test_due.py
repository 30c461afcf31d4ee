"""Levels of a refresh decide like a table of states and events, which this file holds as data.

Layer: pure functions over groups without a model, no process.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sdp4bit.collectives.reasons import FullReason
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weights import Due, Events, Weights
from sdp4bit.engines.fsdp2 import edits
from sdp4bit.engines.fsdp2.edits import Edits
from sdp4bit.engines.fsdp2.row import Row, RowParam
from tests import ROOT

# -- the model: states of a replica -------------------------------------------------------------------

# The next state, by the state (row) and the event (column); "." if it stays.
TABLE = """
                STEP            SMALL_EDIT  LARGE     NONFINITE   LOADED    REQUESTED  MISFIT
NEVER           .               .           .         .           .         .          .
CURRENT         STEPPED         EDITED      FULL_DUE  .           FULL_DUE  FULL_DUE   .
STEPPED         .               EDITED      FULL_DUE  NOT_FINITE  FULL_DUE  FULL_DUE   .
EDITED          .               .           FULL_DUE  NOT_FINITE  FULL_DUE  FULL_DUE   .
CHECKPOINT      AND_STEPPED     .           .         .           .         FULL_DUE   FULL_DUE
AND_STEPPED     .               .           FULL_DUE  .           .         FULL_DUE   FULL_DUE
FULL_DUE        .               .           .         .           .         .          .
NOT_FINITE      .               .           .         .           FULL_DUE  FULL_DUE   .
"""
# The rows in full precision of the next gather, and the part whose difference follows.
REFRESHES = {
    "NEVER": ("main", None),
    "CURRENT": (None, None),
    "STEPPED": (None, "trained"),
    "EDITED": (None, "row"),
    "CHECKPOINT": ("checkpoint", None),
    "AND_STEPPED": ("checkpoint", "trained"),
    "FULL_DUE": ("main", None),
    "NOT_FINITE": ("main", None),
}
HEADER, *LINES = (line.split() for line in TABLE.strip().splitlines())
NEXT = {state: dict(zip(HEADER, cells, strict=True)) for state, *cells in LINES}


@dataclass
class Model:
    """The state of a replica, and why its refresh is in full precision."""

    state: str = "NEVER"
    reason: FullReason = FullReason.FIRST_USE
    knows_frozen: bool = False  # a checkpoint without a step does not name the trainable params

    @property
    def refresh(self) -> tuple[str | None, str | None]:
        full, difference = REFRESHES[self.state]
        return full, "row" if difference and not self.knows_frozen else difference

    def apply(self, event: str) -> None:
        after = NEXT[self.state][event]
        if after != ".":
            self.state = after
            if after in ("FULL_DUE", "NOT_FINITE"):
                self.reason = FullReason[event]

    def load_state(self, *, stepped: bool) -> None:
        self.state, self.reason = "AND_STEPPED" if stepped else "CHECKPOINT", FullReason.CHECKPOINT
        self.knows_frozen = stepped

    def gather(self) -> bool:
        """Return whether a refresh was due."""
        is_due = self.state != "CURRENT"
        self.state, self.knows_frozen = "CURRENT", self.knows_frozen or is_due
        return is_due

    def edit(self, *, large: bool, edited: bool, evaluates: bool, direct: bool) -> None:
        """Apply a change of weights, if its size is measured: after an edit, and in evaluation."""
        held = self.state in ("CURRENT", "STEPPED", "EDITED")
        pending = self.state in ("STEPPED", "EDITED", "AND_STEPPED")
        if (edited and held) or (evaluates and pending and not direct):
            if large or (edited and direct):
                self.apply("LARGE")
            elif edited:
                self.apply("SMALL_EDIT")


# -- two ranks with a group ---------------------------------------------------------------------------

TRAINABLE = frozenset({0})


class Rank:
    """The level of one rank, and its detector of edits."""

    def __init__(self, view: Any) -> None:
        self.weights = Weights(nodes=Nodes(ranks=(0, 1), nodes=2, ranks_per_node=1))
        self.replica: Any = SimpleNamespace(
            is_torn=False,
            sends_differences=True,
            rows=None,
            start_full_refresh=lambda row: self.sent.update(full=row),
            start_quantized_refresh=lambda _, *, ranges, as_gathered: self.sent.update(difference=ranges),
        )
        self.weights.replica = self.replica
        self.edits = Edits(view, self.weights)
        self.sent: dict[str, Any] = {}

    def copied(self) -> Rank:
        other = copy.copy(self)
        replica: Any = SimpleNamespace(**vars(self.replica))
        replica.start_full_refresh = lambda row: other.sent.update(full=row)
        replica.start_quantized_refresh = lambda _, *, ranges, as_gathered: other.sent.update(
            difference=ranges
        )
        other.sent, other.replica = {}, replica
        other.weights, other.edits = copy.copy(self.weights), copy.copy(self.edits)
        other.weights.replica, other.edits._weights = replica, other.weights
        other.edits.seen = replace(self.edits.seen)
        return other

    def refresh(self, main: Tensor, *, nonfinite: bool = False) -> bool:
        """Send what is due, as the hook of FSDP2 does; return whether anything was."""
        self.sent.clear()
        is_full, ranges = self.weights.is_full, self.edits.ranges()
        is_sent = self.weights.refresh(main, row=main, ranges=ranges)
        if is_sent:
            self.edits.note_refresh(main, ranges=ranges, is_full=is_full, nonfinite=torch.tensor(nonfinite))
        return is_sent


class Ranks:
    """The decisions of two ranks, which agree as `FSDPModelState` does, beside the model."""

    def __init__(self) -> None:
        params = [
            RowParam(name=name, start=4 * i, end=4 * i + 4, numel=4, dim=2, holds_bits=False)
            for i, name in enumerate(("trainable", "frozen"))
        ]
        self.main = torch.arange(8.0)
        self.view: Any = SimpleNamespace(
            row=Row(params, kinds=[0, 0]),
            device=self.main.device,
            module=SimpleNamespace(training=True),
            requiring_grad=lambda: TRAINABLE,
            has_gradient=lambda chosen: bool(chosen),
            fingerprints=lambda: torch.tensor([1, 2]),
        )
        self.all = [Rank(self.view) for _ in range(2)]
        self.model = Model()

    def copied(self) -> Ranks:
        other = copy.copy(self)
        other.all = [rank.copied() for rank in self.all]
        other.model = replace(self.model)
        return other

    def agree(
        self,
        *,
        torn: Sequence[bool] = (False, False),
        edited: Sequence[bool] = (False, False),
        nonfinite: bool = False,
        misfit: bool = False,
        evaluates: bool = False,
        direct: bool = False,
        large: bool = False,
    ) -> list[bool]:
        """Let the ranks agree; return which of them have refused the rows of a checkpoint."""
        self.view.module.training = not evaluates
        for rank, is_torn in zip(self.all, torn, strict=True):
            rank.replica.is_torn, rank.replica.sends_differences = is_torn, not direct
        seen = [
            rank.edits.events(edited=is_edited, has_gradients=False)
            for rank, is_edited in zip(self.all, edited, strict=True)
        ]
        events = Events(*(max(column) for column in zip(*seen, strict=True)))
        events = events._replace(nonfinite=events.nonfinite or nonfinite, misfit=events.misfit or misfit)
        refused = []
        for rank in self.all:
            rank.edits.note_agreement()
            refused.append(rank.weights.agree(events))
            if rank.weights.needs_size(events):
                rank.weights.agree_on_size(events, is_large=large)
        return refused

    def load_state(self, *, stepped: bool, misfits: Sequence[bool] = (False, False)) -> None:
        marks = self.all[0].edits.fingerprints().unsqueeze(1)
        due = TRAINABLE if stepped else frozenset[int]()
        for rank, misfit in zip(self.all, misfits, strict=True):
            rank.edits.load(self.main.clone(), fingerprints=marks + int(misfit), due=due)

    def gather(self, *, nonfinite: Sequence[bool] = (False, False)) -> bool:
        """Send what is due; return whether anything was."""
        sent = [rank.refresh(self.main, nonfinite=bad) for rank, bad in zip(self.all, nonfinite, strict=True)]
        return any(sent)

    def check(self) -> None:
        """Every rank will send the refresh of the model, for its reason."""
        for rank in self.all:
            weights, trial = rank.weights, rank.copied()
            full, difference, is_sent = None, None, trial.refresh(self.main)
            if "full" in trial.sent:
                full = "main" if trial.sent["full"] is self.main else "checkpoint"
            if "difference" in trial.sent:
                difference = "row" if trial.sent["difference"] is None else "trained"
                assert trial.sent["difference"] in (None, [(0, 4)])
            assert (full, difference) == self.model.refresh, self.model
            assert weights.reason is self.model.reason
            params = {None: frozenset[int](), "trained": TRAINABLE, "row": frozenset({0, 1})}
            assert rank.edits.due_params() == params[difference]
            assert weights.is_current == (not is_sent) == (self.model.state == "CURRENT")
            assert (weights.loaded_row is not None) == (full == "checkpoint")
            assert trial.weights.is_current and trial.weights.loaded_row is None


# -- one event after another --------------------------------------------------------------------------

EVENTS: dict[str, Callable[[Ranks], object]] = {}
"""Each lets one of the ranks see an event, and both agree."""


def event(act: Callable[[Ranks], object]) -> Callable[[Ranks], object]:
    EVENTS[act.__name__] = act
    return act


@event
def step(ranks: Ranks) -> None:
    ranks.all[0].edits.note_step(by_hand=True)
    ranks.agree()
    ranks.model.apply("STEP")


@event
def edit(ranks: Ranks) -> None:
    ranks.agree(edited=(False, True))
    ranks.model.edit(large=False, edited=True, evaluates=False, direct=False)


@event
def large_edit(ranks: Ranks) -> None:
    ranks.agree(edited=(True, False), large=True)
    ranks.model.edit(large=True, edited=True, evaluates=False, direct=False)


@event
def edit_in_evaluation(ranks: Ranks) -> None:
    ranks.agree(edited=(True, False), evaluates=True)
    ranks.model.edit(large=False, edited=True, evaluates=True, direct=False)


@event
def large_change_in_evaluation(ranks: Ranks) -> None:
    ranks.agree(evaluates=True, large=True)
    ranks.model.edit(large=True, edited=False, evaluates=True, direct=False)


@event
def edit_of_values_sent_directly(ranks: Ranks) -> None:
    ranks.agree(edited=(False, True), evaluates=True, direct=True)
    ranks.model.edit(large=False, edited=True, evaluates=True, direct=True)


@event
def nan(ranks: Ranks) -> None:
    ranks.agree(nonfinite=True)
    ranks.model.apply("NONFINITE")


@event
def weights_loaded(ranks: Ranks) -> None:
    ranks.all[1].edits.seen.was_loaded = True
    ranks.agree()
    ranks.model.apply("LOADED")


@event
def resync(ranks: Ranks) -> None:
    for rank in ranks.all:
        rank.weights.raise_to(Due.FULL)
    ranks.model.apply("REQUESTED")


@event
def interrupted(ranks: Ranks) -> None:
    ranks.agree(torn=(False, True))
    ranks.model.apply("REQUESTED")


@event
def state_loaded(ranks: Ranks) -> None:
    ranks.load_state(stepped=False)
    ranks.model.load_state(stepped=False)


@event
def stepped_state_loaded(ranks: Ranks) -> None:
    ranks.load_state(stepped=True)
    ranks.model.load_state(stepped=True)


@event
def misfit(ranks: Ranks) -> None:
    """The row of one rank is found not to fit its weights."""
    ranks.all[1].edits.loaded_fingerprints = None
    refused = ranks.agree()
    assert refused == [ranks.model.state in ("CHECKPOINT", "AND_STEPPED")] * 2
    ranks.model.apply("MISFIT")


@event
def misfit_of_another_group(ranks: Ranks) -> None:
    refused = ranks.agree(misfit=True)
    assert refused == [ranks.model.state in ("CHECKPOINT", "AND_STEPPED")] * 2
    ranks.model.apply("MISFIT")


@event
def gather(ranks: Ranks) -> None:
    assert ranks.gather() == ranks.model.gather()


def walks(ranks: Ranks, *, steps: int) -> Iterator[Ranks]:
    """Yield the ranks after every sequence of at most so many events."""
    yield ranks
    if steps:
        for act in EVENTS.values():
            after = ranks.copied()
            act(after)
            yield from walks(after, steps=steps - 1)


def test_every_short_sequence_of_events_is_decided_like_the_table() -> None:
    count, states = 0, set()
    for ranks in walks(Ranks(), steps=3):
        ranks.check()
        count += 1
        states.add(ranks.model.state)
    assert count == sum(len(EVENTS) ** length for length in range(4)) and states == {*NEXT}


def check_step_before_agreement(ranks: Ranks) -> None:
    """A checkpoint saved after a step holds that the step is due, unless something else is already."""
    rank = ranks.copied().all[0]
    before = rank.edits.due_params()
    rank.edits.note_step(by_hand=True)
    assert rank.edits.due_params() == (TRAINABLE if rank.weights.is_current else before)


def test_every_event_in_every_state_is_decided_like_the_table() -> None:
    """From each state and with each reason, however many events lead to it."""
    found, waiting = [Model()], [Ranks()]
    while waiting:
        ranks = waiting.pop()
        for act in EVENTS.values():
            after = ranks.copied()
            act(after)
            after.check()
            check_step_before_agreement(after)
            if after.model not in found:
                found.append(after.model)
                waiting.append(after)
    assert {model.state for model in found} == {*NEXT}


# -- several events in one agreement ------------------------------------------------------------------


def test_long_random_sequences_with_several_events_at_once_are_decided_like_the_table() -> None:
    """Ranks see different events before they agree, and NaN stays in the replica until the next refresh."""
    draw = random.Random(0)

    def some(probability: float = 0.1) -> tuple[bool, bool]:
        return draw.random() < probability, draw.random() < probability

    for _ in range(20):
        ranks, holds_nan = Ranks(), False
        for _ in range(100):
            if draw.random() < 0.1:
                stepped, misfits = draw.random() < 0.5, some()
                ranks.load_state(stepped=stepped, misfits=misfits)
                ranks.model.load_state(stepped=stepped)
            else:
                misfits = (False, False)
            torn, edited, stepping, loaded = some(), some(), some(0.3), some()
            for rank, steps, loads in zip(ranks.all, stepping, loaded, strict=True):
                if steps:
                    rank.edits.note_step(by_hand=True)
                rank.edits.seen.was_loaded = loads
            size = {name: draw.random() < 0.3 for name in ("large", "evaluates", "direct")}
            ranks.agree(torn=torn, edited=edited, **size)
            seen = {
                "REQUESTED": any(torn),
                "STEP": any(stepping),
                "LOADED": any(loaded),
                "NONFINITE": holds_nan,
                "MISFIT": any(misfits),
            }
            for name in (name for name, is_seen in seen.items() if is_seen):
                ranks.model.apply(name)
            ranks.model.edit(edited=any(edited), **size)
            ranks.check()
            if draw.random() < 0.7:
                nonfinite = some()
                is_sent = ranks.gather(nonfinite=nonfinite)
                assert is_sent == ranks.model.gather()
                holds_nan = any(nonfinite) if is_sent else holds_nan
                ranks.check()


def test_ranks_that_differ_agree_on_the_highest_level() -> None:
    """A refresh that an exception has kept from one rank is repeated by all."""
    for mine in Due:
        for other in Due:
            ranks = Ranks()
            ranks.gather()
            for rank, level in zip(ranks.all, (mine, other), strict=True):
                rank.weights.raise_to(level, FullReason.LOADED)
            ranks.agree()
            assert [rank.weights.due for rank in ranks.all] == [max(mine, other)] * 2
            reasons = {rank.weights.reason for rank in ranks.all}
            if Due.FULL in (mine, other):
                of_other = set() if mine == other else {FullReason.REQUESTED}
                assert reasons == {FullReason.LOADED} | of_other


def test_events_only_raise_the_level() -> None:
    for first in Due:
        for second in Due:
            ranks = Ranks()
            ranks.gather()
            weights = ranks.all[0].weights
            weights.raise_to(first)
            weights.raise_to(second)
            assert weights.due == max(first, second)


def test_a_refresh_of_the_trained_part_does_not_hide_an_edit_of_the_frozen_one() -> None:
    """On a GPU micro-batches in a row compare nothing; the first comparison after them finds the edit."""
    ranks = Ranks()
    ranks.view.main_shard = lambda dtype: ranks.main.to(dtype)
    rank = ranks.all[0]
    for _ in range(2):  # the second refresh leaves out the frozen part
        ranks.gather()
        step(ranks)
    ranks.gather()
    with mock.patch.object(edits, "_is_on_host", return_value=False) as is_on_host:
        ranks.view.module.training, ranks.view.reduces_gradients = True, False
        assert rank.edits.find_edits() is not None  # the first micro-batch
        rank.edits.note_step(by_hand=True)
        ranks.main[5] += 1
        assert rank.edits.find_edits() is None
        ranks.agree()
        assert rank.refresh(ranks.main) and rank.sent == {"difference": [(0, 4)]}
        ranks.view.module.training = False
        edited = rank.edits.find_edits()
        assert edited is not None and edited
        assert is_on_host.called


def test_on_a_gpu_an_edit_of_the_frozen_part_is_sent_once_and_may_be_sent_late() -> None:
    """The host does not wait for the comparison in a step; a save does."""
    ranks = Ranks()
    ranks.view.main_shard = lambda dtype: ranks.main.to(dtype)
    for _ in range(2):
        ranks.gather()
        step(ranks)
    ranks.gather()
    (rank, _), arrives = ranks.all, False
    ranks.view.module.training = ranks.view.reduces_gradients = True
    with (
        mock.patch.object(edits, "_is_on_host", return_value=False) as is_on_host,
        mock.patch.object(edits.HostCopy, "arrived", lambda copy: copy._host if arrives else None),
    ):
        step(ranks)
        ranks.main[5] += 1
        for _ in range(2):  # two comparisons are under way
            assert rank.edits.find_edits() is None
            assert not rank.edits.events(edited=False, has_gradients=True).edited
        assert rank.edits.find_edits(waits=True)
        ranks.gather()  # the difference of the trained part
        arrives = True
        assert rank.edits.events(edited=False, has_gradients=True).edited
        step(ranks)
        assert rank.edits.find_edits() is None
        for each in ranks.all:
            each.weights.raise_to(Due.FULL)
        ranks.gather()
        assert not rank.edits.events(edited=False, has_gradients=True).edited
        assert is_on_host.called


def test_refreshes_in_full_precision_are_counted_in_a_row() -> None:
    """Neither the first one counts, nor those that the user has asked for."""
    ranks = Ranks()
    ranks.view.module.training = True
    ranks.gather()
    for act, expected in (
        (weights_loaded, 1),
        (weights_loaded, 2),
        (step, 0),
        (weights_loaded, 1),
        (resync, 0),
    ):
        act(ranks)
        ranks.gather()
        assert [rank.edits.full_in_a_row for rank in ranks.all] == [expected] * 2


def test_the_documentation_lists_the_levels() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n### Levels of a refresh\n")[2].partition("\n#")[0]
    assert re.findall(r"^\* \*\*`([A-Z]+)`\*\*", section, flags=re.MULTILINE) == [level.name for level in Due]

"""Choice of the settings with the fastest steps, in short blocks of training with each candidate."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.config import Auto, SDP4BitConfig
from sdp4bit.log import logger
from sdp4bit.observe.stats import Choosing
from sdp4bit.observe.timing import format_seconds
from sdp4bit.warn import warn_user

UNTIMED_STEPS = 2  # after a switch: the first gathers full weights, the second records the operator calls
TOLERANCE = 1.02  # a more exact candidate wins if its steps take at most this much longer
DROPPED = 1.1  # ratio of the best block to the worst of the fastest candidate, which drops a candidate
WATCHED_STEPS = 50  # of a window, after which the ranks compare the time of a step with that of the choice
CHANGED = 1.2  # of a step's time, in two windows in a row
PATIENCE = 100  # training passes without an optimizer step until a warning


class Clock(Protocol):
    """Marks points in the work of a rank."""

    def mark(self) -> Any:
        """Return the present point."""

    def has_passed(self, point: Any) -> bool:
        """Return whether the work before a point is done; never waits."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two points that have passed."""


class HostClock:
    """The time of the host, for work on the CPU and for medians of many steps."""

    def mark(self) -> float:
        return time.perf_counter()

    def has_passed(self, point: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """The time of the current stream of a GPU, which the host does not wait for."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, point: torch.cuda.Event) -> bool:
        return bool(point.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000


def check_choice(saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a state of a handle has a choice that `Search.state` has not made."""
    state = saved.get("auto")
    if state is not None and not (isinstance(state, Tensor) and state.shape == (2,)):
        raise ValueError(f"the saved state has auto={state!r}, which should be two numbers, in a tensor")


def _median(clock: Clock, marks: Sequence[Any]) -> float:
    """Return the median seconds from one mark to the next."""
    return statistics.median(map(clock.seconds, marks, marks[1:]))


class Search:
    """Trains with candidates in turns until the fastest is known, and then watches the time of its steps.

    Blocks are counted in training passes, which all ranks begin together: some ranks may see no optimizer
    step. The times are those between passes that an optimizer step of this rank precedes.
    """

    def __init__(
        self,
        auto: Auto,
        candidates: Sequence[str],
        *,
        use: Callable[[SDP4BitConfig | None], None],
        refusal: Callable[[], str],
        maximum: Callable[[Sequence[float]], Sequence[float]],
        device: torch.device | None,
        ranks: Sequence[int],
    ) -> None:
        """Create a search; the engine communicates by `settings`.

        Args:
            candidates: names of those that differ from full precision with this model and layout.
            use: makes the engine communicate with other settings (None: as without sdp4bit).
            refusal: returns why this rank cannot switch now; "" if it can.
            maximum: returns the maximum over the ranks, element by element; a collective.
            device: of the model, for the clock; None without a model.
            ranks: all ranks that switch together; the first one logs.
        """
        self._auto, self._names, self.candidates = auto, [*auto.named()], candidates
        self._use, self._refusal, self._maximum, self._ranks = use, refusal, maximum, ranks
        self._clock: Clock = DeviceClock() if device is not None and device.type == "cuda" else HostClock()
        self._host: Clock = HostClock()
        self.candidate = candidates[0]
        """Name of the candidate that communicates now."""
        self.is_chosen = len(candidates) == 1
        self._watches = False
        self._seconds: dict[str, list[float]] = {}  # of the blocks of each candidate
        self._is_paused = self._has_warned = self._has_stepped = False
        self._remaining: list[str]  # candidates that may be the fastest
        self._turns: list[str]  # those left in this round
        self._own_per_step: int  # fewest passes of a step on this rank; 0 if it sees none
        self._per_step: int  # likewise, the most of any rank
        self._passes: int  # since the search began, or since the choice
        self._last_mark: int  # the pass of the last mark
        self._marks: list[Any] = []  # of this block: its begin, and the ends of this rank's steps
        self._length: int  # of the block, in passes
        self._end: int  # the pass that begins behind the block
        self._usual = 0.0  # median seconds of a step in the first window after the choice
        self._begin()

    @property
    def settings(self) -> SDP4BitConfig | None:
        """Settings of the candidate that communicates now; None as without sdp4bit."""
        return self._auto.named()[self.candidate]

    # -- events of the engine ------------------------------------------------------------------------------

    def note_step(self) -> None:
        """Note that an optimizer of this rank has stepped."""
        self._has_stepped = True

    def begin_pass(self) -> None:
        """Note that all ranks begin a training pass; collective, and perhaps a switch, if a block ends."""
        if self._is_paused or (self.is_chosen and not self._watches):
            return
        ends_step, self._has_stepped = self._has_stepped, False
        self._passes += 1
        if ends_step or not self._marks:
            if self._marks:
                # The fewest, because GradScaler skips steps.
                passes = self._passes - self._last_mark
                self._own_per_step = min(self._own_per_step or passes, passes)
            self._marks.append((self._host if self.is_chosen else self._clock).mark())
            self._last_mark = self._passes
        if self._passes < self._end:
            return
        if self.is_chosen:
            self._watch()
        else:
            # A rank that sees no steps follows the others.
            self._end_block(is_between=ends_step or not self._own_per_step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the steps inside out of account, and begin the interrupted block again after them."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
            self._marks.clear()
            self._end = self._passes + 1 + self._length

    # -- the search ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a search, with a warm-up in which the present candidate stays."""
        self._in_warmup = True
        self._remaining, self._turns = [*self.candidates], []
        self._own_per_step = self._per_step = 0
        self._passes = self._last_mark = 0
        self._marks.clear()
        self._length = self._auto.warmup_steps
        self._end = 1 + self._length

    def _end_block(self, *, is_between: bool) -> None:
        refusal, seconds = self._refusal(), 0.0
        is_early = bool(refusal) or not is_between
        timed = self._marks[UNTIMED_STEPS : self._auto.block_steps]
        if not self._in_warmup and self._own_per_step:
            # The host may be some steps ahead of a GPU, which it does not wait for.
            is_measured = len(timed) > 1 and self._clock.has_passed(timed[-1])
            is_early = is_early or not is_measured
            seconds = _median(self._clock, timed) if is_measured else 0.0
        some_early, seconds, per_step = self._agree([is_early, seconds, self._own_per_step])
        if some_early:  # on some rank, so all try again at the next pass
            if refusal and not self._has_warned:
                self._has_warned = True
                warn_user(f"auto cannot switch yet: {refusal}")
            return
        if not per_step:
            self._wait_for_a_step()
            return
        self._per_step = round(per_step)
        if self._in_warmup:
            self._in_warmup, self._seconds = False, {name: [] for name in self.candidates}
        else:
            self._seconds[self.candidate].append(seconds)
        if not self._turns and not self._end_round():
            return
        self._switch(self._turns.pop(0))

    def _wait_for_a_step(self) -> None:
        """Prolong the warm-up, in which no rank has seen an optimizer step."""
        self._end = 2 * self._passes
        if self._passes > PATIENCE and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"auto has seen {self._passes} training passes but no optimizer step, without which it does "
                "not measure: call comm.mark_step() after each, unless the optimizer is a "
                "torch.optim.Optimizer over the parameters of this model",
                self._ranks,
            )

    def _end_round(self) -> bool:
        """Begin the next round with the candidates that may be the fastest, or choose; return which."""
        rounds = len(self._seconds[self._remaining[0]])
        if rounds >= 2:
            fastest = min(self._remaining, key=lambda name: statistics.median(self._seconds[name]))
            limit = DROPPED * max(self._seconds[fastest])
            self._remaining = [name for name in self._remaining if min(self._seconds[name]) <= limit]
        self._turns = [*self._remaining]
        if rounds < self._auto.rounds and len(self._remaining) > 1:
            return True
        medians = self.medians()
        limit = TOLERANCE * min(medians[name] for name in self._remaining)
        steps = self._passes // self._per_step
        chosen = next(name for name in self._remaining if medians[name] <= limit)
        self._adopt(chosen)
        self._log(f"auto chose {chosen} after {steps} steps ({self._measured()})")
        return False

    def _adopt(self, chosen: str) -> None:
        self._switch(chosen)
        self.is_chosen, self._watches = True, self._auto.recheck_steps is not None
        self._changed = 0  # windows in a row with other times
        self._usual = 0.0
        self._marks.clear()
        self._length = WATCHED_STEPS * max(1, self._per_step)
        self._passes, self._end = 0, 1 + self._length

    def _switch(self, name: str) -> None:
        """Begin a block with a candidate."""
        self._marks = self._marks[-1:]
        self._length = self._auto.block_steps * self._per_step
        self._end = self._passes + self._length
        if name != self.candidate:
            self.candidate = name
            self._use(self.settings)

    def _watch(self) -> None:
        """Search again if steps take another time for long, or after many steps."""
        timed = self._marks[UNTIMED_STEPS:]
        (seconds,) = self._agree([_median(self._host, timed) if len(timed) > 1 else 0.0])
        self._marks, self._end = self._marks[-1:], self._passes + self._length
        if not seconds:  # no rank has ended enough steps
            return
        self._usual = self._usual or seconds
        is_usual = self._usual / CHANGED <= seconds <= self._usual * CHANGED
        self._changed = 0 if is_usual else self._changed + 1
        assert self._auto.recheck_steps is not None
        if self._changed == 2:
            reason = f"a step takes {format_seconds(seconds)} now, {format_seconds(self._usual)} before"
        elif self._passes >= self._auto.recheck_steps * max(1, self._per_step):
            reason = f"{self._auto.recheck_steps} steps have passed"
        else:
            return
        self.is_chosen = False
        self._begin()
        self._log(f"auto measures again: {reason}")

    def _agree(self, values: Sequence[float]) -> Sequence[float]:
        """Return the maximum over the ranks, all of which must begin the same pass."""
        most, least, *agreed = self._maximum([self._passes, -self._passes, *values])
        if most != -least:
            raise RuntimeError(
                f"auto: some ranks begin training pass {-least:.0f} and others {most:.0f}. All ranks must "
                "call the model equally often with gradients enabled"
            )
        return agreed

    # -- reports and state ---------------------------------------------------------------------------------

    def medians(self) -> dict[str, float]:
        """Return the median seconds of a step with each candidate that the latest search has measured."""
        return {name: statistics.median(blocks) for name, blocks in self._seconds.items() if blocks}

    def choosing(self) -> Choosing:
        """Return the state for `stats()`."""
        return {"candidate": self.candidate, "is_chosen": self.is_chosen, "seconds": self.medians()}

    def __str__(self) -> str:
        """Describe the state for `explain()`."""
        if self._auto.choice is not None:
            return f"auto: {self.candidate}, as given by choice="
        if len(self.candidates) == 1:
            return f"auto: only {self.candidate} is left, because the others quantize nothing here"
        measured = f" ({self._measured()})" if self.medians() else ""
        verb = "chose" if self.is_chosen else "still measures, now with"
        return f"auto {verb} {self.candidate}{measured}"

    def _measured(self) -> str:
        each = (f"{name} {format_seconds(seconds)}" for name, seconds in self.medians().items())
        return f"{', '.join(each)} a step"

    def _log(self, text: str) -> None:
        if min(self._ranks) == dist.get_rank():
            logger.warning(text)

    @property
    def _fingerprint(self) -> int:
        """A number of the candidates, whose positions a state holds."""
        return int.from_bytes(hashlib.sha256(repr(self._auto.candidates).encode()).digest()[:6], "big")

    def state(self) -> Tensor:
        """Return the choice for a checkpoint, int64 [2]: fingerprint and position, -1 without a choice."""
        return torch.tensor([self._fingerprint, self._names.index(self.candidate) if self.is_chosen else -1])

    def load(self, state: Tensor | None) -> None:
        """Continue with the choice of a checkpoint, or search again if it has none of these candidates."""
        if self._auto.choice is not None or len(self.candidates) == 1:
            return
        if self._is_paused:
            raise RuntimeError("a state with a choice was loaded inside full_precision(): load it outside")
        number, position = (-1, -1) if state is None else state.tolist()
        chosen = self._names[position] if number == self._fingerprint and position >= 0 else ""
        if chosen in self.candidates:
            self._adopt(chosen)
            self._log(f"auto continues with {chosen}, the choice of the checkpoint")
        else:
            self.is_chosen = False
            self._marks.clear()
            self._begin()

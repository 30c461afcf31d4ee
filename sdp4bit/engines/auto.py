"""Choice of the settings with the fastest steps, in short blocks of training with each candidate."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
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
PATIENCE = 256  # training passes without an optimizer step until a warning


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


class Search:
    """Trains with candidates in turns until the fastest is known, and then watches the time of its steps.

    Independent of the engine, which calls `end_step` on all ranks at the same points, one per step, at which
    a switch is possible. Or it calls `note_forward` and `note_optimizer`, which find these points.
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
        self._is_paused = self._has_warned = False
        self._forwards: Counter[int] = Counter()  # of each module since the last step
        self._begin()

    @property
    def settings(self) -> SDP4BitConfig | None:
        """Settings of the candidate that communicates now; None as without sdp4bit."""
        return self._auto.named()[self.candidate]

    # -- events of the engine ------------------------------------------------------------------------------

    def note_forward(self, module: object) -> None:
        """Note that a module begins a forward of training."""
        if self.is_chosen and not self._watches:
            return
        self._forwards[id(module)] += 1
        if self._forwards[id(module)] == PATIENCE and not (self.steps or self.is_chosen):
            warn_user(
                f"auto has seen {PATIENCE} forwards but no optimizer step, without which it does not "
                "begin to measure: call comm.mark_step() after each, unless the optimizer is a "
                "torch.optim.Optimizer over the parameters of this model",
                self._ranks,
            )

    def note_optimizer(self) -> None:
        """Note that an optimizer has stepped; the first of several after a forward ends the step."""
        if self._forwards:
            self._forwards.clear()
            self.end_step()

    def end_step(self) -> None:
        """Note the end of a step; collective over the ranks, and possibly a switch, at the end of a block."""
        if self._is_paused or (self.is_chosen and not self._watches):
            return
        self.steps += 1
        self._marks.append((self._host if self.is_chosen else self._clock).mark())
        if self.is_chosen:
            if len(self._marks) > WATCHED_STEPS:
                self._watch()
        elif len(self._marks) > (self._auto.warmup_steps if self._in_warmup else self._auto.block_steps):
            self._end_block()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the steps inside out of account, and begin the interrupted block again after them."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before
            self._marks.clear()

    # -- the search ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a search, with a warm-up in which the present candidate stays."""
        self.steps = 0  # of this search, or since the choice
        self._in_warmup = True
        self._remaining, self._turns = [*self.candidates], list[str]()  # all, and those left in this round
        self._marks = list[Any]()  # of this block: its begin, and the end of each step

    def _end_block(self) -> None:
        refusal, last = self._refusal(), self._auto.block_steps - 1
        # The host may be some steps ahead of a GPU, which it does not wait for.
        is_measured = self._in_warmup or self._clock.has_passed(self._marks[last])
        seconds = self._median(self._clock, last) if is_measured and not self._in_warmup else 0.0
        is_early, seconds = self._agree([bool(refusal) or not is_measured, seconds])
        if is_early:  # on some rank, so all try again after the next step
            if refusal and not self._has_warned:
                self._has_warned = True
                warn_user(f"auto cannot switch yet: {refusal}")
            return
        if self._in_warmup:
            self._in_warmup, self._seconds = False, {name: [] for name in self.candidates}
        else:
            self._seconds[self.candidate].append(seconds)
        if not self._turns and not self._end_round():
            return
        self._switch(self._turns.pop(0))

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
        steps, chosen = self.steps, next(name for name in self._remaining if medians[name] <= limit)
        self._adopt(chosen)
        self._log(f"auto chose {chosen} after {steps} steps ({self._measured()})")
        return False

    def _adopt(self, chosen: str) -> None:
        self._switch(chosen)
        self.is_chosen, self._watches = True, self._auto.recheck_steps is not None
        self.steps, self._changed = 0, 0  # windows in a row with other times
        self._usual: float | None = None  # median seconds of a step in the first window
        self._marks.clear()

    def _switch(self, name: str) -> None:
        """Begin a block with a candidate."""
        self._marks = self._marks[-1:]
        if name != self.candidate:
            self.candidate = name
            self._use(self.settings)

    def _watch(self) -> None:
        """Search again if steps take another time for long, or after many steps."""
        (seconds,) = self._agree([self._median(self._host, WATCHED_STEPS)])
        self._marks = self._marks[-1:]
        if self._usual is None:
            self._usual = seconds
        is_usual = self._usual / CHANGED <= seconds <= self._usual * CHANGED
        self._changed = 0 if is_usual else self._changed + 1
        assert self._auto.recheck_steps is not None
        if self._changed == 2:
            reason = f"a step takes {format_seconds(seconds)} now, {format_seconds(self._usual)} before"
        elif self.steps >= self._auto.recheck_steps:
            reason = f"{self.steps} steps have passed"
        else:
            return
        self.is_chosen = False
        self._begin()
        self._log(f"auto measures again: {reason}")

    def _median(self, clock: Clock, last: int) -> float:
        """Return the median seconds of this rank's steps after the untimed ones, up to that number."""
        marks = self._marks[UNTIMED_STEPS : last + 1]
        return statistics.median(map(clock.seconds, marks, marks[1:]))

    def _agree(self, values: Sequence[float]) -> Sequence[float]:
        """Return the maximum over the ranks, all of which must be after the same step."""
        most, least, *agreed = self._maximum([self.steps, -self.steps, *values])
        if most != -least:
            raise RuntimeError(
                f"auto: some ranks have ended {-least:.0f} steps and others {most:.0f}. All ranks must step "
                "their optimizers, or call comm.mark_step(), equally often"
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

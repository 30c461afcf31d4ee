"""Show the phase of a command: an updating line on a terminal, a line after 30 silent seconds in a file."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sdp4bit_lab.common.files import note, time_left

if TYPE_CHECKING:
    from rich.console import Console

_LOG_SECONDS = 30.0
_REDRAWN_PER_SECOND = 4
_BAR_WIDTH, _STATE_WIDTH = 16, 36

_began: float | None = None
_printed = 0.0
"""Time of the last line in a log file."""
_phase: _Phase | None = None
_line: Any = None
"""The updating line, a `rich.progress.Progress`; None in a log file."""


@dataclass(kw_only=True)
class _Phase:
    text: str
    total: int | None
    done: int
    first: int
    """`done` at the start."""
    began: float = field(default_factory=time.monotonic)

    @property
    def state(self) -> str:
        """Return seconds since the start of the command, units, and an estimate of the time left."""
        now = time.monotonic()
        seconds = f"{now - (self.began if _began is None else _began):.0f} s"
        if self.total is None:
            return seconds
        units = f"{seconds}, {self.done:,} of {self.total:,}"
        if self.done == self.first:
            return units
        left = (now - self.began) / (self.done - self.first) * (self.total - self.done)
        return f"{units}, {f'{left:.0f} s left' if left < 90 else time_left(left)}"


def start_progress(text: str, *, began: float | None = None) -> float:
    """Begin the first phase and show every phase from now on; return the start, by the monotonic clock.

    Only the first rank shows anything.

    Args:
        began: start of the command in the process that has started this one; default: now.
    """
    global _began, _line
    if _began is None:
        _began = time.monotonic() if began is None else began
        if os.environ.get("RANK", "0") == "0":
            _line = _updating_line()
            if _line is None:
                threading.Thread(target=_log, daemon=True).start()
    phase(text)
    return _began


def phase(text: str, *, total: int | None = None, done: int = 0) -> None:
    """Begin a phase, which ends the one before, or continue the one with this text.

    Args:
        total: number of its units, such as steps; None if it is unknown.
        done: units that are done.
    """
    global _phase
    if _phase is not None and (_phase.text, _phase.total) == (text, total):
        _phase.done = done
        if _line is not None:
            _line.update(_line.task_ids[0], completed=done)
        return
    _phase = _Phase(text=text, total=total, done=done, first=done)
    if _line is not None:
        for task in _line.task_ids:
            _line.remove_task(task)
        _line.add_task(text, total=total, completed=done)
        _line.start()


def end_progress() -> None:
    """Show nothing until the next phase; call it before another process prints, or this one exits."""
    global _phase
    _phase = None
    if _line is not None:
        _line.stop()


@cache
def console() -> Console:
    """Return the console of standard output, which prints above the updating line."""
    from rich.console import Console

    class _Console(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            global _printed
            _printed = time.monotonic()
            super().print(*objects, **options)

        def show_cursor(self, show: bool = True) -> bool:
            # A process that hides the cursor and is killed leaves a terminal without one.
            return False

    return _Console(highlight=False, markup=False, soft_wrap=True)


def _updating_line() -> Any:
    # The self-test runs without the extra packages of the other commands.
    if find_spec("rich") is None or not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class _State(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if _phase is None else _phase.state)

    has_terminal = sys.stdout.isatty()
    screen = console() if has_terminal else Console(stderr=True, highlight=False, soft_wrap=True)
    # A line that is too long for the terminal loses the end of the phase's name.
    name = Column(no_wrap=True, max_width=max(8, screen.width - _BAR_WIDTH - _STATE_WIDTH - 6))
    if screen.is_dumb_terminal:
        return None
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=_BAR_WIDTH),
        _State(table_column=Column(no_wrap=True)),
        console=screen,
        # Results that go to a file must not be drawn on the terminal.
        redirect_stdout=has_terminal,
        refresh_per_second=_REDRAWN_PER_SECOND,
        transient=True,
    )


def _log() -> None:
    global _printed
    _printed = time.monotonic()
    while True:
        time.sleep(_LOG_SECONDS / 30)
        current = _phase
        if current is not None and time.monotonic() - _printed > 0.98 * _LOG_SECONDS:
            _printed = time.monotonic()
            note(f"{current.text}: {current.state}")

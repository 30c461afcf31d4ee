"""Print the phases of a program, at least every 5 seconds."""

from __future__ import annotations

import os
import threading
import time

from sdp4bit_lab.common.files import note

_INTERVAL = 5.0

_began: float | None = None
_phase: tuple[str, float] | None = None
"""The phase and the time at which it was printed last; None while nothing is printed."""


def start_phases(text: str, *, began: float | None = None) -> float:
    """Print a first phase and repeat each until the next one; return the start, by the monotonic clock.

    Args:
        began: start of the command in the process that has started this one; default: now.
    """
    global _began
    if _began is None:
        _began = time.monotonic() if began is None else began
        threading.Thread(target=_repeat, daemon=True).start()
    phase(text)
    return _began


def seconds_so_far() -> float:
    """Return the time since the start of the command; 0 without `start_phases`."""
    return 0.0 if _began is None else time.monotonic() - _began


def phase(text: str) -> None:
    """Print that a phase begins, with the seconds since the start of the command, on the first rank."""
    global _phase
    if os.environ.get("RANK", "0") == "0":
        _print(text)
        _phase = None if _began is None else (text, time.monotonic())


def lasting(text: str) -> None:
    """Begin a phase that is printed only if it lasts 5 seconds, after `start_phases`."""
    global _phase
    if _began is not None and os.environ.get("RANK", "0") == "0":
        _phase = text, time.monotonic()


def end_phases() -> None:
    """Repeat the last phase no longer."""
    global _phase
    _phase = None


def _print(text: str) -> None:
    note(text if _began is None else f"{time.monotonic() - _began:.0f} s: {text}")


def _repeat() -> None:
    global _phase
    while True:
        time.sleep(_INTERVAL / 10)
        current = _phase
        if current is not None and time.monotonic() - current[1] > 0.9 * _INTERVAL:
            _print(f"still {current[0]}")
            if _phase is current:
                _phase = (current[0], time.monotonic())

"""Checkpoint state of the communication of a Megatron-Core model.

The replica is Megatron's parameters themselves. The state adds counters, the same on every rank, whichever
rank's copy a checkpoint format saves.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdp4bit.engines.handle import StateDict
from sdp4bit.engines.megatron.communication import MegatronModelState

FORMAT_VERSION = 1
_COUNTERS = ("steps", "refreshes", "reductions", "pending")


def save_counters(state: MegatronModelState) -> dict[str, int]:
    """Return the counters and the version of the format."""
    return {
        "format_version": FORMAT_VERSION,
        "steps": state.steps,
        "refreshes": max((comm.refreshes for comm in state.groups), default=0),
        "reductions": max((comm.reductions for comm in state.groups), default=0),
        "pending": int(any(comm.is_changed for comm in state.groups)),
    }


def load_counters(state: MegatronModelState, counters: Mapping[str, int]) -> None:
    """Let rounding bits go on where they were, and what was still to be sent be sent."""
    state.steps = counters["steps"]
    for comm in state.groups:
        if comm.replica is not None:
            comm.refreshes = counters["refreshes"]
            comm.is_changed = bool(counters["pending"])
        if comm.reduction is not None:
            comm.reductions = counters["reductions"]


def checked(state_dict: StateDict) -> dict[str, int]:
    """Return the counters of a communication state.

    Raises:
        ValueError: it is none of a known format.
    """
    what = "this is not the state of sdp4bit communication on Megatron-Core"
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"{what}: a {type(state_dict).__name__}")
    missing = [key for key in ("format_version", *_COUNTERS) if key not in state_dict]
    if missing:
        raise ValueError(f"{what}: it lacks {', '.join(missing)}")
    if state_dict["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"communication state of format {state_dict['format_version']}, this version reads "
            f"{FORMAT_VERSION}"
        )
    wrong = [key for key in _COUNTERS if not isinstance(state_dict[key], int) or state_dict[key] < 0]
    if wrong:
        raise ValueError(f"{what}: {', '.join(wrong)} should be counts")
    return {key: int(state_dict[key]) for key in _COUNTERS}

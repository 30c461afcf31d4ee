"""Checkpoint state of the communication of a Megatron-Core model.

Megatron's parameters are the replica. The state adds counters that are equal on every rank, because some
checkpoint formats save only one rank's copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdp4bit.engines.handle import StateDict, check_state
from sdp4bit_megatron.communication import MegatronModelState

FORMAT_VERSION = 1
_OWNER = "sdp4bit communication on Megatron-Core"
_COUNTERS = ("steps", "refreshes", "reductions", "pending")


def save_counters(state: MegatronModelState) -> dict[str, int]:
    """Return the counters with the format version."""
    return {
        "format_version": FORMAT_VERSION,
        "steps": state.steps,
        "refreshes": max((group.weights.refreshes for group in state.groups), default=0),
        "reductions": max((group.gradients.reductions for group in state.groups), default=0),
        "pending": int(any(group.weights.is_changed for group in state.groups)),
    }


def load_counters(state: MegatronModelState, counters: Mapping[str, int]) -> None:
    """Continue from saved counters."""
    state.steps = counters["steps"]
    for group in state.groups:
        if group.weights.replica is not None:
            group.weights.refreshes = counters["refreshes"]
            group.weights.is_changed = bool(counters["pending"])
        if group.gradients.reduction is not None:
            group.gradients.reductions = counters["reductions"]


def checked(state_dict: StateDict) -> dict[str, int]:
    """Return the counters of a communication state.

    Raises:
        ValueError: the argument is no such state or has another format.
    """
    check_state(state_dict, owner=_OWNER, version=FORMAT_VERSION, keys=_COUNTERS)
    wrong = [key for key in _COUNTERS if not isinstance(state_dict[key], int) or state_dict[key] < 0]
    if wrong:
        raise ValueError(f"this is not the state of {_OWNER}: {', '.join(wrong)} should be counts")
    return {key: int(state_dict[key]) for key in _COUNTERS}

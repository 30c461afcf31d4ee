"""Checkpoint state of the communication of a Megatron-Core model.

Megatron's parameters are the replica. The state adds counters that are equal on every rank, because some
checkpoint formats save only one rank's copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdp4bit.engines.handle import StateDict
from sdp4bit.engines.loading import check_state
from sdp4bit_megatron.communication import MegatronModelState

FORMAT_VERSION = 2
_OWNER = "sdp4bit communication on Megatron-Core"


def save_counters(state: MegatronModelState) -> dict[str, int]:
    """Return the counters with the format version."""
    return {"format_version": FORMAT_VERSION, "steps": state.steps, **_largest(state)}


def _largest(state: MegatronModelState) -> dict[str, int]:
    """Return the state of a group; of several groups the largest numbers."""
    found: dict[str, int] = {}
    for group in state.groups:
        found |= {name: max(number, found.get(name, 0)) for name, number in group.state().items()}
    return found


def load_counters(state: MegatronModelState, counters: Mapping[str, int]) -> None:
    """Continue from saved counters."""
    state.steps = counters["steps"]
    for group in state.groups:
        group.load(counters)


def checked(state_dict: StateDict, state: MegatronModelState) -> dict[str, int]:
    """Return the counters of a communication state.

    Raises:
        ValueError: the argument is no such state or has another format.
    """
    names = ("steps", *_largest(state))
    check_state(state_dict, owner=_OWNER, version=FORMAT_VERSION, keys=names)
    wrong = [name for name in names if not isinstance(state_dict[name], int) or state_dict[name] < 0]
    if wrong:
        raise ValueError(f"this is not the state of {_OWNER}: {', '.join(wrong)} should be counts")
    return {name: int(state_dict[name]) for name in names}

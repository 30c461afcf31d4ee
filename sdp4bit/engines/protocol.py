"""The contract between a training engine and the library.

`CommHandle` and `attach.build` are independent of the engine, which supplies three calls. Operations that are
different in every engine stay methods of its handle: `mark_step`, `resync`, `state_dict`, `load_state_dict`.
A handle whose engine can be switched during training also overrides `_check_switch`, for `full_precision` and
`time_steps`. `examples/engine.py` is an engine of one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sdp4bit.collectives.group import Group

Undo = Callable[[], None]
"""Undoes a call; does nothing the second time."""


class Engine(Protocol):
    """A training engine, attached to one model."""

    def groups(self) -> Sequence[Group]:
        """Return the parameter groups, in the same order on all ranks that share them."""

    def install(self, group: Group) -> Undo:
        """Make the model communicate through a group, which has its quantizers; return the undo.

        The undo first finishes transfers of the group that are in flight. A group may be installed again.
        """

    def on_step(self, call: Callable[[int], None]) -> Undo:
        """Detect optimizer steps, and call with the number of steps after each; return the undo.

        Called on all ranks at the same point, after the step's measures and before anything of the next step
        is sent, so that the call may communicate.
        """

"""Hooks of torch that serve all optimizers or modules of the process, and end with their owner."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.utils.hooks import RemovableHandle

_left: list[RemovableHandle] = []
"""Hooks whose owners were freed without removing them."""


def end_with(owner: object, hooks: Sequence[RemovableHandle]) -> None:
    """Remove hooks after their owner was freed; they must hold only weak references to it.

    They are removed when hooks of another owner are registered, and not at once: a garbage collection may
    come while an optimizer or a module iterates over its hooks.
    """
    while _left:
        _left.pop().remove()
    weakref.finalize(owner, _left.extend, hooks)

"""Communication of FSDP2 and DDP, and the parts that engines of one's own and adapters are made of.

The names here are provisional: see docs/compatibility.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdp4bit.collectives.group import Group, Rows
    from sdp4bit.collectives.weights import Due, agree_on_refreshes
    from sdp4bit.engines.own import EngineHandle, attach_engine

__all__ = ["Due", "EngineHandle", "Group", "Rows", "agree_on_refreshes", "attach_engine"]

_IMPORTED_WHEN_USED = {
    "Due": "sdp4bit.collectives.weights",
    "EngineHandle": "sdp4bit.engines.own",
    "Group": "sdp4bit.collectives.group",
    "Rows": "sdp4bit.collectives.group",
    "agree_on_refreshes": "sdp4bit.collectives.weights",
    "attach_engine": "sdp4bit.engines.own",
}
"""Modules of this package import each other, so it cannot import them first."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _IMPORTED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
        return value


def __dir__() -> list[str]:
    """Return the public names, including those not imported yet."""
    return sorted(__all__)

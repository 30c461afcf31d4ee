"""Marks on fields of settings classes for the option parser, tyro.

The self-test makes such settings without tyro and the other packages of the extra `lab`. Nothing reads
the marks then but `options_of`, which needs their attributes alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

try:
    from tyro.conf import FlagCreatePairsOff as Switch
    from tyro.conf import Positional, arg
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        Switch, Positional, arg = "switch", "positional", SimpleNamespace

__all__ = ["Positional", "Switch", "arg"]

"""Marks on fields of settings classes for the option parser, tyro.

The self-test makes such settings without tyro and the other packages of the extra `lab`. Only `option_flags`
reads the marks then, and it needs their attributes alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

try:
    from tyro.conf import Positional, arg
except ModuleNotFoundError:
    if not TYPE_CHECKING:
        Positional, arg = "positional", SimpleNamespace

__all__ = ["Positional", "arg"]

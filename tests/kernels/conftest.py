"""A faster interpreter for Triton's kernels, with the same results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True, scope="session")
def language_patched_once_per_launch() -> Iterator[None]:
    """Triton's interpreter patches its language at each call of a device function, a third of all time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton")
    if not hasattr(interpreter, "_LangPatchScope"):  # private names of Triton 3.6 and 3.7
        yield
        return
    with patch.object(interpreter, "_patch_lang", _once_per_launch(interpreter)):
        yield


def _once_per_launch(interpreter: Any) -> Any:
    patch_language, patched = interpreter._patch_lang, set()
    languages = {interpreter.tl.__name__, interpreter.tl.core.__name__}

    def patch_once(function: Any) -> Any:
        # The modules that Triton would patch for this function.
        modules = [each for each in function.__globals__.values() if isinstance(each, ModuleType)]
        key = frozenset(each.__name__ for each in modules) & languages
        if key in patched:
            return interpreter._LangPatchScope()
        scope = patch_language(function)
        patched.add(key)
        restore = scope.restore

        def forget() -> None:
            restore()
            patched.clear()

        scope.restore = forget  # called at the end of the launch, for the scope of its kernel alone
        return scope

    return patch_once

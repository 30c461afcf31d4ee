"""A faster interpreter for Triton's kernels, with the same results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest


@pytest.fixture(autouse=True, scope="session")
def faster_interpreter() -> Iterator[None]:
    """Without work whose results Triton's interpreter discards: more than half of its time."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="needs Triton")
    builder = interpreter.interpreter_builder
    # Each sum of integers is repeated in 64 bits, for an assertion that exists in debug mode alone.
    options = replace(builder.options, sanitize_overflow=builder.options.debug)
    patch_language = interpreter._patch_lang
    if hasattr(interpreter, "_LangPatchScope"):  # since Triton 3.6; private, like the other names
        patch_language = _once_per_launch(interpreter)
    with (
        patch.object(builder, "options", options),
        patch.object(interpreter, "_patch_lang", patch_language),
    ):
        yield


def _once_per_launch(interpreter: Any) -> Any:
    """Return a function that patches the language for a launch, and not again for each device function."""
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

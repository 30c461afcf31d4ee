"""What Griffe shows as the default of a field: the value, instead of the call that makes the field."""

from __future__ import annotations

from typing import Any

import griffe


class Fields(griffe.Extension):
    """Take defaults out of `field(...)` and of the package's `_option(...)`."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace the value of an attribute, if it is such a call."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) not in ("field", "_option"):
            return
        first = call.arguments[0]
        if not isinstance(first, griffe.ExprKeyword):
            attr.value = first
        elif first.name == "default_factory":
            attr.value = f"{first.value}()"
        elif first.name == "default":
            attr.value = first.value

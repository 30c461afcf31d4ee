"""What Griffe shows of a field: its own text, and as default the value, not the call that makes the field."""

from __future__ import annotations

from typing import Any

import griffe

_SECTION = "\n\nAttributes:\n"


class Fields(griffe.Extension):
    """Move the texts of fields below their signatures, and unwrap the defaults in `field` and `_option`."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give every field its text in the section `Attributes` of the class, which ends the docstring."""
        docstring = cls.docstring
        if docstring is None or _SECTION not in docstring.value:
            return
        for section in docstring.parse("google"):
            if isinstance(section, griffe.DocstringSectionAttributes):
                for each in section.value:
                    cls.members[each.name].docstring = griffe.Docstring(each.description)
        docstring.value = docstring.value.partition(_SECTION)[0]

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

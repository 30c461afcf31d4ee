"""The rows of `explain()`, by parameter group."""

from __future__ import annotations


def explained(table: str) -> dict[str, str]:
    """Return the lines of each group, and of the total, as one with single spaces."""
    groups: dict[str, str] = {}
    name = ""
    for line in table.splitlines()[2:]:
        name = name if line.startswith(" ") else line.split()[0]
        groups[name] = " ".join(f"{groups.get(name, '')} {line}".split())
    return groups


def flat(table: str) -> str:
    """Return it all as one line, in which no phrase is cut."""
    return " ".join(table.split())

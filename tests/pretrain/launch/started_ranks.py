"""The processes that the command has started as ranks."""

from __future__ import annotations

from pathlib import Path


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that a launcher has started as ranks, in order: its server's children."""
    return [rank for server in children_of(launcher, command=b"forkserver") for rank in children_of(server)]


def children_of(parent: int, *, command: bytes = b"") -> list[int]:
    """Return the processes with this parent whose command line contains this, in order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            line = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and command in line:
            found.append(int(stat.parent.name))
    return sorted(found)

"""Time of the host that launches a step, and the constants of the planner that were measured.

The host launches all work of a GPU, so a step takes at least the host's time. Plain FSDP2 and this library
spend it per parameter group, whatever the group's size. `measured.json` beside this file holds the measured
constants with their sources; `python -m benchmarks.tables` writes it from `results/`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

HostName = Literal["measured", "server"]
SERVER_SHARE = 0.5
"""Assumed time of a bare server's host, relative to the measured one, which is a virtual machine."""


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Seconds of the host per parameter group."""

    plain: float
    """The model, the optimizer and plain FSDP2, per micro-batch."""
    added: float
    """Time of the library per step if it quantizes weights and gradients; half of it for one of them."""
    source: str
    """Where the numbers come from, in words."""
    computes: bool = False
    """Whether the host's cores are also the devices, so that its time adds to that of the arithmetic. `plain`
    is then contained in the compute rate, and not counted again."""

    def seconds(self, *, groups: int, accumulation: int, added_groups: int, quantized: int) -> float:
        """Return the time of a step.

        Args:
            groups: groups with a matrix.
            accumulation: micro-batches per step.
            added_groups: all groups.
            quantized: directions that are quantized: 0, 1 or 2.
        """
        plain = 0.0 if self.computes else self.plain * groups * accumulation
        return plain + self.added * added_groups * quantized / 2


@cache
def measured() -> dict[str, Any]:
    """Return the measured constants with their sources; seconds, and shares of a data sheet's rate."""
    content: dict[str, Any] = json.loads(
        files("sdp4bit_lab.plan").joinpath("measured.json").read_text(encoding="utf-8")
    )
    return content


def host_time(name: HostName) -> HostTime:
    """Return the host's time of a kind of machine."""
    found = measured()["host"]
    if name == "measured":
        return HostTime(
            plain=found["plain_seconds"],
            added=found["added_seconds"],
            source=f"measured on {found['machine']}",
        )
    return HostTime(
        plain=SERVER_SHARE * found["plain_seconds"],
        added=SERVER_SHARE * found["added_seconds"],
        source=f"assumed, not measured: {100 * SERVER_SHARE:.0f} % of {found['machine']}",
    )

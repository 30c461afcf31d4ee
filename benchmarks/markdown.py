"""Markdown tables, numbers and figures of the documentation, as benchmarks/tables.py writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOTICE = "<!-- Written by `python -m benchmarks.tables`. -->\n\n"
RATES = {
    **{"100mbit": "100 Mbit/s", "250mbit": "250 Mbit/s", "1gbit": "1 Gbit/s", "1000mbit": "1 Gbit/s"},
    **{"10gbit": "10 Gbit/s", "25gbit": "25 Gbit/s", "40gbit": "40 Gbit/s", "unshaped": "unlimited"},
}
"""Link rates as readers write them, by the names of `benchmarks.cluster`."""


def span(values: Sequence[float], *, digits: int = 1) -> str:
    """Format a range, or one number if its ends look the same."""
    least, most = (f"{value:,.{digits}f}" for value in sorted(values))
    return least if least == most else f"{least} to {most}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a Markdown table with the first `left` columns left-aligned and the others right-aligned."""
    assert all(len(row) == len(titles) for row in rows), titles
    rows = [
        [re.sub(r"(?<=\d) (?=%|to [+-]?\d)|(?<=\d to) (?=[+-]?\d)", "\N{NO-BREAK SPACE}", c) for c in r]
        for r in rows
    ]
    rule = ["---"] * left + ["---:"] * (len(titles) - left)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, rule, *rows))


def percent(value: float, *, digits: int = 3) -> str:
    """Format a signed percentage without a line-break opportunity."""
    return f"{value:+.{digits}f}\N{NO-BREAK SPACE}%"


def origin(result: dict[str, Any]) -> str:
    """Return command, commit, machine, versions and date of a result."""
    machine = result["machine"]
    if isinstance(machine, dict):
        result = {"commit": None, **machine, "machine": f"{machine['cores']} cores, {machine['cpu']}"}
    shown = {name: version for name, version in result["versions"].items() if name != "linux"}
    versions = ", ".join(f"{name} {version}" for name, version in shown.items())
    commit = f", commit {result['commit']}" if result["commit"] else ""
    facts = f"{result['machine']}; {versions}; {result['date'][:10]}{commit}."
    command = f"<details><summary>Command</summary><pre><code>{result['command']}</code></pre></details>\n"
    return f"{facts[0].upper()}{facts[1:]}\n\n{command}"


def ink() -> str:
    """Return the color of text and lines on the page that a figure is drawn for."""
    from matplotlib import rcParams  # takes a second

    return str(rcParams["text.color"])


def save_figure(figure: Any, path: Path, *, digest: str) -> None:
    """Write a figure that stores the digest of its result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=200, metadata={"Source": digest, "Software": None})

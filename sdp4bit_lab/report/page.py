"""The report as one HTML file that needs nothing else: style, script and data are in it."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import sdp4bit
from sdp4bit_lab.common.smoothing import WINDOW_SHARE
from sdp4bit_lab.report.charts import PLOTS, Plot, short
from sdp4bit_lab.report.figures import DASHES, figures, line_styles
from sdp4bit_lab.report.pairs import pair_rows, pair_titles
from sdp4bit_lab.report.runs import Alert, Run
from sdp4bit_lab.report.summary import fact_rows, setting_rows, summary_rows
from sdp4bit_lab.report.verdict import verdict

ALERTS_SHOWN = 200
"""Lines of the table of alerts; further ones are counted below it."""


def render_page(runs: Sequence[Run], *, now: datetime) -> str:
    """Return the HTML page about the runs; the first is what the others are compared with."""
    style, scripts = _asset("page.css"), (get_plotlyjs(), _asset("page.js"))
    sections = {title: make(runs) for title, make in PLOTS.items()}
    drawn: list[dict[str, Any]] = []
    numbers: dict[str, list[int]] = {}
    for plot in itertools.chain.from_iterable(sections.values()):
        made = [figure.to_plotly_json() for figure in figures(plot, runs)]
        numbers[plot.key] = list(range(len(drawn), len(drawn) + len(made)))
        drawn += made
    facts, settings = fact_rows(runs), setting_rows(runs)
    alerts = sorted(
        ((alert.step, run.name, alert) for run in runs for alert in run.alerts), key=lambda a: a[:2]
    )
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = template.from_string(_asset("page.html.j2")).render(
        # Nothing is fetched, and no script runs but these two, whatever the names in the files are.
        # Plotly styles its elements as it draws and paints heat maps as images that it makes itself.
        policy=f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'",
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        data=_embedded(drawn),
        numbers=numbers,
        runs=runs,
        styles=line_styles(runs),
        dashes=DASHES,
        strategies=list(dict.fromkeys(run.label or "unknown strategy" for run in runs)),
        made=f"{now:%Y-%m-%d %H:%M %Z}",
        version=sdp4bit.__version__,
        verdict=verdict(runs),
        summary=summary_rows(runs),
        pairs=pair_rows(runs),
        pair_titles=pair_titles(runs),
        notes=[f"{run.name}: {note}." for run in runs for note in run.notes],
        alike=[row for row in facts if len(set(row.cells)) == 1],
        differing=[row for row in facts if len(set(row.cells)) > 1],
        sections=[(title, plots, _nothing_to_draw(plots)) for title, plots in sections.items()],
        groups=list(_last_groups(runs)),
        alerts=[
            (step, name, alert.group or "all", alert.message, _number_list(alert))
            for step, name, alert in alerts[:ALERTS_SHOWN]
        ],
        alerts_left_out=max(0, len(alerts) - ALERTS_SHOWN),
        settings=settings,
        settings_differing=[row for row in settings if len(set(row.cells)) > 1],
        window_share=WINDOW_SHARE,
        unknown=[f"{kind} ({count})" for kind, count in sum((r.unknown for r in runs), Counter()).items()],
    )
    # Half of a surrogate pair, which JSON and file names may have, cannot be written.
    return page.encode("utf-8", errors="replace").decode("utf-8")


def _asset(name: str) -> str:
    return resources.files("sdp4bit_lab.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _embedded(data: Sequence[Mapping[str, Any]]) -> Markup:
    """Return JSON in which no text can end the element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _nothing_to_draw(plots: Sequence[Plot]) -> str:
    """Return the titles of plots that all have nothing to draw for the same reasons; else nothing."""
    if len(plots) == 1 or len({tuple(plot.missing) for plot in plots}) > 1:
        return ""
    drawn = any(plot.curves or plot.maps for plot in plots)
    return "" if drawn else ", ".join(plot.title.lower() for plot in plots)


def _last_groups(runs: Sequence[Run]) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Yield title, head and rows of a table of the last report of every run that has one."""
    for run in runs:
        if run.groups:
            step, groups = next(reversed(run.groups.items()))
            names = list(dict.fromkeys(name for numbers in groups.values() for name in numbers))
            rows = [
                (group, *("–" if numbers.get(name) is None else _number(numbers[name]) for name in names))
                for group, numbers in groups.items()
            ]
            yield f"{run.name}: all numbers of the groups at step {step}", ("Group", *names), rows


def _number_list(alert: Alert) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in alert.numbers.items())


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}" if short(value) != int(value) else f"{value:.0f}"

"""The report as one HTML file that needs nothing else: style, script and data are in it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

import sdp4bit
from sdp4bit.report.charts import PLOTS, WINDOW_SHARE, Plot, short
from sdp4bit.report.runs import Alert, Run
from sdp4bit.report.summary import Row, fact_rows, seed_rows, setting_rows, summary_rows

ALERTS_SHOWN = 200
"""Lines of the table of alerts; further ones are counted below it."""
ALERT_MARKS = 400
"""Marks of alerts in the plots; more are merged with their neighbours."""
COLOURS = 8
DASHES = 4
"""Colours and line styles in the style sheet."""


def render_page(runs: Sequence[Run], *, now: datetime) -> str:
    """Return the HTML page about the runs; the first is what the others are compared with."""
    style, script = _asset("page.css"), _script()
    sections = {title: make(runs) for title, make in PLOTS.items()}
    styles = line_styles(runs)
    data = {
        "runs": [
            {"name": run.name, "colour": colour, "dash": dash}
            for run, (colour, dash) in zip(runs, styles, strict=True)
        ],
        "plots": [plot.as_json() for plots in sections.values() for plot in plots],
        "alerts": alert_marks(runs),
    }
    body = [
        _header(runs, now),
        _legend(runs, styles),
        "<main>",
        _summary(runs, styles),
        *(_section(title, plots) for title, plots in sections.items()),
        _last_groups(runs),
        _alerts(runs),
        _settings(runs, styles),
        "</main>",
        _footer(runs),
    ]
    # Nothing is fetched, and no script runs but this one, whatever the names in the files are.
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    title = f"Training report: {', '.join(run.name for run in runs)}"
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="data">{_embedded(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
    # Half of a surrogate pair, which JSON and file names may have, cannot be written.
    return page.encode("utf-8", errors="replace").decode("utf-8")


def line_styles(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return colour and dash of each run: by strategy and seed if they tell the runs apart, else by place."""
    kinds = [(run.strategy, run.setting("seed")) for run in runs]
    strategies = list(dict.fromkeys(strategy for strategy, _ in kinds))
    seeds = list(dict.fromkeys(seed for _, seed in kinds))
    if len(set(kinds)) == len(runs) and len(strategies) <= COLOURS and 1 < len(seeds) <= DASHES:
        return [(strategies.index(strategy), seeds.index(seed)) for strategy, seed in kinds]
    return [(place % COLOURS, place // COLOURS % DASHES) for place in range(len(runs))]


def alert_marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return where the plots mark alerts: one mark per step, or per stretch of steps if there are many."""
    marks = []
    last = max((alert.step for run in runs for alert in run.alerts), default=0)
    width = max(1, -(-last * len(runs) // ALERT_MARKS))
    for index, run in enumerate(runs):
        stretches: dict[int, list[Alert]] = {}
        for alert in run.alerts:
            stretches.setdefault(alert.step // width, []).append(alert)
        for alerts in stretches.values():
            more = f" (and {len(alerts) - 1} more)" if len(alerts) > 1 else ""
            text = _alert_text(alerts[0]) + more
            marks.append({"run": index, "step": alerts[0].step, "text": text})
    return marks


def _asset(name: str) -> str:
    return resources.files("sdp4bit.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _script() -> str:
    """Return the page's script: its parts in one block, so that their names are not the window's."""
    parts = [_asset(f"{name}.js") for name in ("elements", "numbers", "curves", "maps", "start")]
    return "\n".join(['"use strict";', "{", *parts, "}"])


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _embedded(data: Mapping[str, Any]) -> str:
    """Return JSON in which no text can end the element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _header(runs: Sequence[Run], now: datetime) -> str:
    strategies = dict.fromkeys(run.strategy or "unknown strategy" for run in runs)
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return (
        f"<header><h1>Training report</h1>\n<p>{count}: {escape(', '.join(strategies))}. "
        f"Made {now:%Y-%m-%d %H:%M %Z} by sdp4bit {escape(sdp4bit.__version__)}.</p></header>"
    )


def _legend(runs: Sequence[Run], styles: Sequence[tuple[int, int]]) -> str:
    buttons = "".join(
        f'<button type="button" data-run="{index}" aria-pressed="true">'
        f"{_swatch(style)}{escape(run.name)}</button>"
        for index, (run, style) in enumerate(zip(runs, styles, strict=True))
    )
    return f'<nav aria-label="Runs shown in the plots">{buttons}</nav>'


def _swatch(style: tuple[int, int]) -> str:
    colour, dash = style
    line = f'<line class="c{colour} d{dash}" x1="0" y1="5" x2="26" y2="5"/>'
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{line}</svg>'


def _summary(runs: Sequence[Run], styles: Sequence[tuple[int, int]]) -> str:
    parts = ['<section id="summary"><h2>Summary</h2>', _run_table(summary_rows(runs), runs, styles)]
    seeds = seed_rows(runs)
    if seeds:
        head = ("Strategy", "Seeds", "Last validation loss", f"Difference to {seeds[0][0]}, same seed")
        parts.append("<h3>Over the seeds</h3><p>Mean ± standard deviation.</p>")
        parts.append(_table(head, seeds))
    notes = [f"<li>{escape(run.name)}: {escape(note)}.</li>" for run in runs for note in run.notes]
    if notes:
        parts.append(f'<h3>About the files</h3><ul id="notes">{"".join(notes)}</ul>')
    facts = fact_rows(runs)
    parts.append("<h2>What ran</h2>")
    if len(runs) == 1:
        parts.append(_list(facts))
    else:
        parts.append(_run_table([row for row in facts if len(set(row.cells)) > 1], runs, styles))
        alike = [row for row in facts if len(set(row.cells)) == 1]
        if alike:
            parts += ["<h3>The same in all runs</h3>", _list(alike)]
    return "\n".join([*parts, "</section>"])


def _section(title: str, plots: Sequence[Plot]) -> str:
    reasons = {tuple(plot.missing) for plot in plots}
    if len(plots) > 1 and len(reasons) == 1 and not any(plot.curves or plot.maps for plot in plots):
        names = ", ".join(plot.title.lower() for plot in plots)
        missing = "".join(f"<li>{escape(reason)}</li>" for reason in plots[0].missing)
        return (
            f"<section><h2>{escape(title)}</h2><p>Nothing to draw of {escape(names)}:</p>"
            f'<div class="missing"><ul>{missing}</ul></div></section>'
        )
    figures = "\n".join(_figure(plot) for plot in plots)
    return f'<section><h2>{escape(title)}</h2><div class="plots">\n{figures}\n</div></section>'


def _last_groups(runs: Sequence[Run]) -> str:
    """Return a table of the last report of every run that has one."""
    tables = []
    for run in runs:
        if run.groups:
            step, groups = next(reversed(run.groups.items()))
            names = list(dict.fromkeys(name for numbers in groups.values() for name in numbers))
            rows = [
                (group, *("–" if numbers.get(name) is None else _number(numbers[name]) for name in names))
                for group, numbers in groups.items()
            ]
            title = f"{run.name}: all numbers of the groups at step {step}"
            table = _table(("Group", *names), rows)
            tables.append(f"<details><summary>{escape(title)}</summary>{table}</details>")
    return "\n".join(tables)


def _figure(plot: Plot) -> str:
    drawn = bool(plot.curves or plot.maps)
    kind = "curves" if plot.curves else "maps"
    canvas = f'<div class="{kind}" data-plot="{plot.key}"></div>' if drawn else ""
    missing = "".join(f"<li>{escape(reason)}</li>" for reason in plot.missing)
    label = "Not drawn:" if drawn else "Nothing to draw:"
    return (
        f'<figure id="plot-{plot.key}"{" class=wide" if plot.maps else ""}>'
        f"<figcaption><h3>{escape(plot.title)}</h3><p>{escape(plot.about)}</p></figcaption>{canvas}"
        + (f'<div class="missing">{label}<ul>{missing}</ul></div>' if missing else "")
        + "</figure>"
    )


def _alerts(runs: Sequence[Run]) -> str:
    rows = sorted(
        ((run, alert) for run in runs for alert in run.alerts), key=lambda row: (row[1].step, row[0].name)
    )
    if not rows:
        return '<section id="alerts"><h2>Alerts</h2><p>No alert is in the files.</p></section>'
    table = _table(
        ("Step", "Run", "Group", "Alert", "Numbers"),
        [
            (str(alert.step), run.name, alert.group or "all", alert.message, _number_list(alert))
            for run, alert in rows[:ALERTS_SHOWN]
        ],
    )
    more = len(rows) - ALERTS_SHOWN
    rest = f"<p>{more} later alerts are not listed here; metrics.jsonl has them.</p>" if more > 0 else ""
    return f'<section id="alerts"><h2>Alerts</h2>{table}{rest}</section>'


def _number_list(alert: Alert) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in alert.numbers.items())


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}" if short(value) != int(value) else f"{value:.0f}"


def _alert_text(alert: Alert) -> str:
    return alert.message if alert.group is None else f"{alert.group}: {alert.message}"


def _settings(runs: Sequence[Run], styles: Sequence[tuple[int, int]]) -> str:
    rows = setting_rows(runs)
    if not rows:
        return ""
    differing = [row for row in rows if len(set(row.cells)) > 1]
    parts = ['<section id="settings"><h2>Settings</h2>']
    if len(runs) > 1:
        parts.append(f"<details><summary>{len(differing)} settings differ between the runs</summary>")
        parts.append(_run_table(differing, runs, styles) if differing else "<p>None.</p>")
        parts.append("</details>")
    parts.append(f"<details><summary>All {len(rows)} settings</summary>")
    parts.append(_run_table(rows, runs, styles))
    return "\n".join([*parts, "</details></section>"])


def _footer(runs: Sequence[Run]) -> str:
    unknown = {kind: sum(run.unknown[kind] for run in runs) for run in runs for kind in run.unknown}
    lines = [
        f"Smoothed lines are means over a window of a {WINDOW_SHARE}th of the steps. Where a curve has more "
        "points than can be drawn, the least and the largest of every stretch of steps are kept.",
        "Events of a kind that this version does not know: "
        + (", ".join(f"{kind} ({count})" for kind, count in unknown.items()) or "none")
        + ".",
    ]
    return "<footer>" + "".join(f"<p>{escape(line)}</p>" for line in lines) + "</footer>"


def _run_table(rows: Sequence[Row], runs: Sequence[Run], styles: Sequence[tuple[int, int]]) -> str:
    names = zip(runs, styles, strict=True)
    head = "".join(f'<th scope="col">{_swatch(style)}{escape(run.name)}</th>' for run, style in names)
    lines = []
    for row in rows:
        about = f"<small>{escape(row.about)}</small>" if row.about else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        lines.append(f'<tr><th scope="row">{escape(row.name)}{about}</th>{cells}</tr>')
    return (
        f'<div class="table"><table><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>'


def _list(rows: Sequence[Row]) -> str:
    items = "".join(f"<dt>{escape(row.name)}</dt><dd>{escape(row.cells[0])}</dd>" for row in rows)
    return f"<dl>{items}</dl>"

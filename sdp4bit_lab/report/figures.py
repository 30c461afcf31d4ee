"""The plots of a report as figures that plotly draws: the curves of all runs, or the heat map of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from sdp4bit_lab.report.charts import Plot
from sdp4bit_lab.report.runs import Alert, Run

COLOURS = ("#3b82d6", "#d9691e", "#2f9e5b", "#c74aa0", "#8468e0", "#1796a3", "#a57f0b", "#d94848")
"""Colours of the runs, each with a contrast above 3 to the page in light and in dark."""
DASHES = {"solid": "", "dash": "7 3", "dot": "2 2.5", "dashdot": "8 3 2 3"}
"""Line styles by plotly's name, as SVG's stroke-dasharray."""
ALERT_MARKS = 400
"""Marks of alerts in a plot; more are merged with their neighbours."""
LETTERS = 24
"""Longest name beside a heat map; longer ones lose their beginning."""
# Null in these means a number that was not finite, in others that there was nothing to measure.
NULL_IS_A_FAULT = ("loss", "validation", "grad_norm")
FROM_ZERO = ("bytes", "seconds", "count")
COOL = ("#2e215c", "#2b5ca3", "#1f9696", "#74c460", "#fadd42")
WARM = ("#facd78", "#f07832", "#af1428")
FORMATS = {"loss": ".4f", "difference": "+.4f", "bytes": ".4~s", "seconds": ".4~s"}
SUFFIXES = {"bytes": "B", "seconds": "s"}


@dataclass(frozen=True, kw_only=True)
class Style:
    """How the lines of a run are drawn."""

    colour: str
    dash: str
    """A member of `DASHES`."""


def line_styles(runs: Sequence[Run]) -> list[Style]:
    """Return colour and dash of each run: by strategy and seed if they tell the runs apart, else by place."""
    kinds = [(run.strategy, run.setting("seed")) for run in runs]
    strategies = list(dict.fromkeys(strategy for strategy, _ in kinds))
    seeds = list(dict.fromkeys(seed for _, seed in kinds))
    places = [(place, place // len(COLOURS)) for place in range(len(runs))]
    if len(set(kinds)) == len(runs) and len(strategies) <= len(COLOURS) and 1 < len(seeds) <= len(DASHES):
        places = [(strategies.index(strategy), seeds.index(seed)) for strategy, seed in kinds]
    return [
        Style(colour=COLOURS[colour % len(COLOURS)], dash=list(DASHES)[dash % len(DASHES)])
        for colour, dash in places
    ]


def figures(plot: Plot, runs: Sequence[Run]) -> list[go.Figure]:
    """Return one figure with the curves of all runs, or one per heat map; none if nothing can be drawn.

    The `meta` of a trace is the index of its run.
    """
    if plot.curves:
        return [_curve_figure(plot, runs)]
    values = [value for heat in plot.maps for row in heat["values"] for value in row]
    shown = [value for value in values if value is not None and (plot.unit != "count" or value > 0)]
    return [
        _heat_figure(plot, heat, _escaped(runs[heat["run"]].name), low=min(shown), high=max(shown))
        for heat in plot.maps
    ]


def alert_marks(run: Run, *, marks: int) -> dict[int, str]:
    """Return what the run warned about by step, merging neighbours so that about `marks` are left."""
    width = max(1, -(-max((alert.step for alert in run.alerts), default=0) // marks))
    ranges: dict[int, list[Alert]] = {}
    for alert in run.alerts:
        ranges.setdefault(alert.step // width, []).append(alert)
    return {
        alerts[0].step: (f"{alerts[0].group}: " if alerts[0].group is not None else "")
        + alerts[0].message
        + (f" (and {len(alerts) - 1} more)" if len(alerts) > 1 else "")
        for alerts in ranges.values()
    }


def _curve_figure(plot: Plot, runs: Sequence[Run]) -> go.Figure:
    steps = [step for curve in plot.curves for step in (curve["x"][0], curve["x"][-1])]
    first, last = min(steps), max(steps)
    figure = _figure(height=270, margin_t=34, hovermode="x unified", hoverdistance=60, showlegend=False)
    figure.update_xaxes(
        title={"text": "step", "standoff": 4},
        unifiedhovertitle_text="step %{x}",
        range=[first - 0.5, last + 0.5] if first == last else [first, last],
        dtick=1 if last - first < 8 else None,
        tickformat="d",
        showgrid=False,
    )
    figure.update_yaxes(
        **_axis(plot.unit),
        rangemode="tozero" if plot.unit in FROM_ZERO else "normal",
        zeroline=plot.unit == "difference",
        autorangeoptions=_limits(plot, first=first, last=last),
    )
    # Marks of alerts and faults stand at the bottom and at the top, whatever the values are.
    figure.update_layout(
        yaxis2={"overlaying": "y", "range": [0, 1], "fixedrange": True, "visible": False},
        updatemenus=_switches(plot, figure),
    )
    styles = line_styles(runs)
    kinds = {kind: {curve["run"] for curve in plot.curves if curve["kind"] == kind} for kind in _KINDS}
    for curve in sorted(plot.curves, key=lambda curve: _KINDS.index(curve["kind"])):
        run, kind = curve["run"], curve["kind"]
        smoothed, also = kind == "line" and run in kinds["raw"], kind == "points" and run in kinds["line"]
        figure.add_scatter(
            x=curve["x"],
            y=curve["y"],
            name=_escaped(runs[run].name) + ", smoothed" * smoothed + ", validation" * also,
            meta=run,
            **_marks(kind, curve["y"]),
            line={"color": styles[run].colour, "width": 1 if kind == "raw" else 1.8}
            | {"dash": "solid" if kind == "raw" else styles[run].dash},
            opacity=0.3 if kind == "raw" else 1,
            hovertemplate=_value("y", plot.unit) + "%{_xother}",
        )
        faults = [step for step, value in zip(curve["x"], curve["y"], strict=True) if value is None]
        if kind != "line" and plot.key in NULL_IS_A_FAULT and faults:
            texts = dict.fromkeys(faults, "not finite")
            _add_marks(figure, run, runs[run].name, texts, symbol="x-thin", colour=styles[run].colour)
    for run in sorted(set().union(*kinds.values())):
        alerts = alert_marks(runs[run], marks=max(1, ALERT_MARKS // len(runs)))
        texts = {step: text for step, text in alerts.items() if first <= step <= last}
        if texts:
            _add_marks(figure, run, runs[run].name, texts, symbol="triangle-up", colour=styles[run].colour)
    return figure


_KINDS = ("raw", "points", "line")


def _add_marks(
    figure: go.Figure, run: int, name: str, texts: Mapping[int, str], *, symbol: str, colour: str
) -> None:
    alerts = symbol == "triangle-up"
    figure.add_scatter(
        x=list(texts),
        y=[0 if alerts else 0.97] * len(texts),
        yaxis="y2",
        name=_escaped(name),
        meta=run,
        mode="markers",
        marker={"symbol": symbol, "size": 9, "color": colour, "line": {"width": 2, "color": colour}},
        error_y={"type": "constant", "value": 1, "width": 0, "thickness": 0.7, "visible": alerts},
        cliponaxis=False,
        text=[_escaped(text) for text in texts.values()],
        hovertemplate="%{text}%{_xother}",
    )


def _limits(plot: Plot, *, first: int, last: int) -> dict[str, float]:
    """Return the range of values after the first tenth of the steps if it is much the smaller one."""
    pairs = [pair for curve in plot.curves for pair in zip(curve["x"], curve["y"], strict=True)]
    values = [value for _, value in pairs if value is not None]
    later = [value for step, value in pairs if value is not None and step >= first + 0.1 * (last - first)]
    if all(len(curve["x"]) < 20 for curve in plot.curves) or not later:
        return {}
    low, high = min(later), max(later)
    if high - low >= (max(values) - min(values)) / 1.5:
        return {}
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1
    limits = {"clipmax": high + margin}
    if plot.unit not in FROM_ZERO:
        # A logarithmic axis has no zero.
        limits["clipmin"] = max(low - margin, 0.9 * low) if low > 0 else low - margin
    return limits


def _switches(plot: Plot, figure: go.Figure) -> list[dict[str, Any]]:
    """Return the buttons above the plot: the logarithmic axis, and the values that are cut off."""
    switches: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    if all(value > 0 for curve in plot.curves for value in curve["y"] if value is not None):
        switches.append(("log scale", {"yaxis.type": "log"}, {"yaxis.type": "linear"}))
    limits = figure.layout.yaxis.autorangeoptions.to_plotly_json()
    if limits:
        cut = {f"yaxis.autorangeoptions.{name}": limit for name, limit in limits.items()}
        switches.append(("whole range", dict.fromkeys(cut), cut))
    again = {"yaxis.autorange": True}
    place = {"type": "buttons", "active": -1, "y": 1.02, "yanchor": "bottom", "xanchor": "right"}
    return [
        {"buttons": [{"label": label, "method": "relayout", "args": [on | again], "args2": [off | again]}]}
        | {"x": 1 - 0.28 * index, "pad": {"b": 2}, "borderwidth": 1, "font": {"size": 11}, **place}
        for index, (label, on, off) in enumerate(switches)
    ]


def _heat_figure(plot: Plot, heat: Mapping[str, Any], name: str, *, low: float, high: float) -> go.Figure:
    """Return a heat map; its colours are those of the limits, logarithmic if these are far apart."""
    groups, values = [_escaped(group) for group in heat["groups"]], heat["values"]
    is_log, counts = 0 < 30 * low < high, plot.unit == "count"
    # What is null here has no colour.
    drawn = [[None if counts and value == 0 else value for value in row] for row in values]
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0, **_axis(plot.unit)}
    if is_log:
        drawn = [[None if value is None else math.log10(value) for value in row] for row in drawn]
        low, high = math.log10(low), math.log10(high)
        marks = np.linspace(low, high, 4)
        bar |= {"tickvals": marks.tolist(), "ticktext": [f"{10**mark:.2g}" for mark in marks]}
    size = min(16.0, max(4.0, 360 / len(groups)))
    several = heat["from"] != heat["to"]
    columns = zip(heat["from"], heat["to"], strict=True)
    figure = _figure(
        height=round(size * len(groups)) + 75, margin_t=30, title={"text": name, "font_size": 13}
    )
    figure.add_heatmap(
        x=[f"{a}" if a == b else f"{a} to {b}" for a, b in columns],
        y=groups,
        z=drawn,
        customdata=values if is_log or counts else None,
        meta=heat["run"],
        zmin=low,
        zmax=high,
        colorscale=WARM if counts else COOL,
        colorbar=bar,
        hovertemplate=f"%{{y}}<br>step{'s' * several} %{{x}}{', largest' * several}: "
        + _value("customdata" if is_log or counts else "z", plot.unit)
        + "<extra></extra>",
        hovertemplatefallback="no value",
    )
    labelled = heat["groups"][:: math.ceil(12 / size)]
    short = [name if len(name) <= LETTERS else f"…{name[1 - LETTERS :]}" for name in labelled]
    figure.update_yaxes(
        type="category",
        autorange="reversed",
        tickvals=[_escaped(group) for group in labelled],
        ticktext=[_escaped(label) for label in short],
        showgrid=False,
    )
    figure.update_xaxes(
        type="category", nticks=4 if several else 8, tickangle=0, showgrid=False, title="step"
    )
    return figure


def _figure(*, margin_t: int, **layout: Any) -> go.Figure:
    """Return an empty figure whose colours suit a light and a dark page; the style sheet colours its text."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 10, "r": 14, "t": margin_t, "b": 10},
        font_size=11,
        hoverlabel={"namelength": -1, "bgcolor": "white"},
        **layout,
    )
    lines = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.8)"}
    figure.update_xaxes(automargin=True, **lines)
    figure.update_yaxes(automargin=True, **lines)
    return figure


def _axis(unit: str) -> dict[str, Any]:
    si = unit in SUFFIXES
    return {"tickformat": "~s" if si else None, "ticksuffix": SUFFIXES.get(unit), "exponentformat": "power"}


def _value(name: str, unit: str) -> str:
    """Return the part of a hover template that writes the value."""
    return f"%{{{name}:{FORMATS.get(unit, '.4~g')}}}{SUFFIXES.get(unit, '')}"


def _escaped(text: str) -> str:
    """Return text that plotly, which reads some HTML, writes as it is."""
    return escape(text, quote=False)


def _marks(kind: str, values: Sequence[float | None]) -> dict[str, Any]:
    """Return which points have a mark: those of few validations, and those that no line shows."""
    there = np.array([False, *(value is not None for value in values), False])
    marked = there[1:-1] & ~there[:-2] & ~there[2:]
    if kind == "points" and len(values) <= 120:
        marked[:] = True
    if not marked.any():
        return {"mode": "lines"}
    return {"mode": "lines+markers", "marker": {"size": (5 * marked).tolist(), "line_width": 0}}

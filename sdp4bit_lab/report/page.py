"""Render the report as one HTML file with embedded style, scripts and data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from plotly.offline import get_plotlyjs

import sdp4bit
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.smoothing import smoothed
from sdp4bit_lab.compare.finished_run import flattened
from sdp4bit_lab.compare.paired import signed
from sdp4bit_lab.report.answers import answers, baseline_of, median, validated_together
from sdp4bit_lab.report.runs import Run

COLOURS = ("#3b82d6", "#d9691e", "#2f9e5b", "#c74aa0", "#8468e0", "#1796a3", "#a57f0b", "#d94848")
"""One per strategy; each has a contrast above 3 on light and dark pages."""
DASHES = {"solid": "", "dash": "7 3", "dot": "2 2.5", "dashdot": "8 3 2 3"}
"""One per seed: plotly's name and SVG's stroke-dasharray."""
MOST_POINTS = 6_000
"""Points of all curves of a plot together."""
MOST_MARKERS = 30
"""Most validations of a run that are drawn as points."""
MOST_RESUMES = 50
"""Marks of a run in a plot."""
MOST_GROUPS = 60
"""Parameter groups with the most bytes that are drawn."""
MOST_ALERTS = 200
FINAL_STEPS = 20
"""Steps averaged for the training loss of the table, as in summary.json."""
NONE = "–"

Curve = tuple[np.ndarray, np.ndarray]
"""Steps and values; NaN interrupts the line."""


class Plot(NamedTuple):
    """Plot over the steps with one curve per run."""

    title: str
    about: str
    curves: list[Curve]
    is_smoothed: bool = False
    """Whether to draw a smoothed line over faint values."""
    unit: str = ""
    """Unit of the values, which get SI prefixes and an axis from 0; empty for none."""
    has_points: bool = False
    """Whether to draw the values as points on the line."""


class Bars(NamedTuple):
    """One bar per parameter group and run."""

    title: str
    about: str
    groups: list[str]
    sizes: list[list[float | None]]
    """Bytes of each run by group; None for a group that it has not."""


def render_page(runs: Sequence[Run], *, now: datetime) -> str:
    """Return the HTML page."""
    scripts = get_plotlyjs(), _asset("page.js")
    plots, bars = _plots(runs), _bars(runs)
    alerts = sorted((a.step, run.name, a.group or "all", a.message) for run in runs for a in run.alerts)
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = template.from_string(_asset("page.html.j2")).render(
        # Load nothing and run only these scripts, whatever text the runs contain. Plotly sets inline styles.
        policy=f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'",
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        data=_json([*(_figure(plot, runs) for plot in plots), *(_bar_figure(each, runs) for each in bars)]),
        runs=runs,
        styles=_line_styles(runs),
        dashes=DASHES,
        made=f"{now:%Y-%m-%d %H:%M %Z} by sdp4bit {sdp4bit.__version__}",
        answers=answers(runs),
        plots=[*plots, *bars],
        rows=[_row(run, runs) for run in runs],
        alerts=alerts[:MOST_ALERTS],
        alerts_left=max(0, len(alerts) - MOST_ALERTS),
        settings=_setting_rows(runs),
    )
    # JSON and file names may contain lone surrogates, which UTF-8 cannot encode.
    return page.encode("utf-8", errors="replace").decode("utf-8")


def _asset(name: str) -> str:
    return resources.files("sdp4bit_lab.report").joinpath(f"assets/{name}").read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _json(data: Any) -> Markup:
    """Return JSON that cannot end the surrounding element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _line_styles(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return color and dash of each run: by strategy and seed if these are unique, else by position."""
    labels = list(dict.fromkeys(run.label for run in runs))
    seeds = list(dict.fromkeys(run.seed for run in runs))
    numbers = [(labels.index(run.label), seeds.index(run.seed)) for run in runs]
    if len(set(numbers)) < len(runs):
        numbers = [(position, 0) for position in range(len(runs))]
    return [(COLOURS[x % len(COLOURS)], list(DASHES)[y % len(DASHES)]) for x, y in numbers]


def _plots(runs: Sequence[Run]) -> list[Plot]:
    loss, norm, inter, intra = (
        [_curve(run.train, run.column(name)) for run in runs]
        for name in ("loss", "grad_norm", "inter_bytes", "intra_bytes")
    )
    validation = [_curve(run.validation, run.validation_losses()) for run in runs]
    difference = [_difference(run, baseline_of(run, runs)) for run in runs]
    relative = f"Training loss relative to {runs[0].label or runs[0].name}"
    seconds = [
        _curve(list(run.train)[1:], (run.column("step_seconds") * (np.nan if run.simulated_ranks else 1))[1:])
        for run in runs
    ]
    every = "Sent by all ranks in each step."
    marks = " Dotted lines: resumed." * any(run.resumes for run in runs)
    plots = [
        Plot("Training loss", "Nats per token. Faint: single steps.", loss, is_smoothed=True),
        Plot("Validation loss", "Nats per token.", validation, has_points=True),
        Plot(relative, "Same seed, same step; above zero is worse.", difference, is_smoothed=True),
        Plot("Gradient norm", "Of the whole model, before clipping.", norm, is_smoothed=True),
        Plot("Step time", "Without the first step.", seconds, is_smoothed=True, unit="s"),
        Plot("Inter-node bytes", every, inter, unit="B"),
        Plot("Intra-node bytes", every, intra, unit="B"),
    ]
    return [
        plot._replace(about=plot.about + marks)
        for plot in plots
        if any(_is_drawn(plot, values) for _, values in plot.curves)
    ]


def _bars(runs: Sequence[Run]) -> list[Bars]:
    """Return the bytes of the parameter groups, those between nodes if there are any; none if unmeasured."""
    for level, name in (("inter_bytes", "Inter-node"), ("intra_bytes", "Intra-node")):
        medians = [
            {group: statistics.median(sizes) for group, sizes in run.group_bytes.get(level, {}).items()}
            for run in runs
        ]
        largest = {
            group: max(sizes.get(group, 0.0) for sizes in medians)
            for group in dict.fromkeys(group for sizes in medians for group in sizes)
        }
        if any(largest.values()):
            shown = sorted(largest, key=lambda group: -largest[group])[:MOST_GROUPS]
            groups = [group for group in largest if group in shown]  # in the order of the model
            about = "Sent by rank 0 in a step, median of the measured ones."
            if len(groups) < len(largest):
                about += f" The largest {len(groups)} of {len(largest)} groups."
            sizes = [[each.get(group) for group in groups] for each in medians]
            return [Bars(f"{name} bytes by parameter group", about, groups, sizes)]
    return []


def _is_drawn(plot: Plot, values: np.ndarray) -> bool:
    """Return whether there is a finite value, which must be nonzero for bytes."""
    return bool((np.isfinite(values) & ((values != 0) if plot.unit else True)).any())


def _curve(steps: Iterable[int], values: np.ndarray) -> Curve:
    return np.array(list(steps), dtype=np.int64), values


def _difference(run: Run, baseline: Run | None) -> Curve:
    if baseline is None:
        return _curve([], np.array([]))
    steps, ours, theirs = np.intersect1d(list(run.train), list(baseline.train), return_indices=True)
    return steps, run.column("loss")[ours] - baseline.column("loss")[theirs]


def _figure(plot: Plot, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a figure in plotly's JSON; `meta` of a trace is the index of its run."""
    marks: list[dict[str, Any]] = []
    traces: list[dict[str, Any]] = []
    for number, ((colour, dash), curve) in enumerate(zip(_line_styles(runs), plot.curves, strict=True)):
        is_baseline = len(runs) > 1 and runs[number].label == runs[0].label
        main: dict[str, Any] = {"line": {"color": colour, "dash": dash, "width": 1.2 if is_baseline else 2}}
        main["hovertemplate"] = f"%{{y:{'.4s' if plot.unit else '.5g'}}}{plot.unit}"
        faint: dict[str, Any] = {"line": {"color": colour, "width": 1}, "opacity": 0.3, "hoverinfo": "skip"}
        lines = [(curve[1], faint), (smoothed(curve[1]), main)] if plot.is_smoothed else [(curve[1], main)]
        for values, style in lines:
            x, y = decimated(curve[0], values, most=MOST_POINTS // (len(runs) * len(lines)))
            drawn = [None if np.isnan(value) else float(f"{value:.7g}") for value in y]
            # A single value has no line.
            has_points = len(x) == 1 or (plot.has_points and len(x) <= MOST_MARKERS)
            mode = "lines+markers" if has_points and style is main else "lines"
            marker: dict[str, Any] = {"marker": {"size": 5}, "cliponaxis": False}
            # Plotly interprets HTML in names.
            name = html.escape(runs[number].name, quote=False)
            if len(x) == 1:
                mode, marker = "markers+text", marker | {"text": [name], "textposition": "middle left"}
            trace = {"x": x.tolist(), "y": drawn, "name": name, "meta": number, "mode": mode}
            trace["zorder"] = int(not is_baseline)
            traces.append(trace | marker | style)
        line = {"color": colour, "width": 1.2, "dash": "dot"}
        marks += [
            {"type": "line", "x0": step, "x1": step, "yref": "paper", "y0": 0, "y1": 1, "line": line}
            for step in runs[number].resumes[:MOST_RESUMES]
        ]
    x_axis: dict[str, Any] = {"title": {"text": "step", "standoff": 4}, "tickformat": "d", "showgrid": False}
    # All plots share one range, with space for markers at the ends.
    last = max((max(run.train, default=1) for run in runs), default=1)
    x_axis["range"] = [0, 1.03 * last]
    x_axis["unifiedhovertitle"] = {"text": "step %{x}"}
    y_axis = {"tickformat": "~s", "ticksuffix": plot.unit, "rangemode": "tozero"} if plot.unit else {}
    layout = _layout(x_axis, y_axis, height=270)
    return {"data": traces, "layout": layout | {"hovermode": "x unified", "shapes": marks}}


def _bar_figure(bars: Bars, runs: Sequence[Run]) -> dict[str, Any]:
    traces = [
        {
            **{"type": "bar", "orientation": "h", "meta": number, "marker": {"color": colour}},
            "name": html.escape(runs[number].name, quote=False),
            "x": sizes,
            "y": [html.escape(group, quote=False) for group in bars.groups],
            "hovertemplate": "%{x:.4s}B",
        }
        for number, ((colour, _), sizes) in enumerate(zip(_line_styles(runs), bars.sizes, strict=True))
    ]
    x_axis = {"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"}
    y_axis = {"type": "category", "autorange": "reversed", "showgrid": False}
    height = 60 + len(bars.groups) * max(18, 7 * len(runs))
    layout = _layout(x_axis, y_axis, height=height)
    return {"data": traces, "layout": layout | {"hovermode": "y unified", "bargap": 0.3}}


def _layout(x_axis: dict[str, Any], y_axis: dict[str, Any], *, height: int) -> dict[str, Any]:
    axis = {"automargin": True, "gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "gray"}
    return {
        "xaxis": axis | x_axis,
        "yaxis": axis | y_axis,
        "hoverlabel": {"namelength": -1},
        "showlegend": False,
        "margin": {"l": 10, "r": 14, "t": 10, "b": 10},
        "height": height,
        "font": {"size": 11},
        # The style sheet sets the colors for light and dark mode.
        **dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)"),
    }


def decimated(steps: np.ndarray, values: np.ndarray, *, most: int) -> Curve:
    """Reduce a curve to about `most` points: the extremes and a NaN of every range of steps."""
    if len(steps) <= most:
        return steps, values
    kept = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, most // 2)):
        finite = part[np.isfinite(values[part])]
        kept |= {int(place) for place in part[np.isnan(values[part])][:1]}
        if len(finite):
            kept |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
    places = np.array(sorted(kept))
    return steps[places], values[places]


def _row(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    baseline = baseline_of(run, runs)
    together = baseline and validated_together(run, baseline)
    last, losses = max(run.train, default=0), run.column("loss")[-FINAL_STEPS:]
    validation = run.validation_losses()
    validation = validation[np.isfinite(validation)]
    inter, intra, ratio = (median(run, name) for name in ("inter_bytes", "intra_bytes", "compression_ratio"))
    seconds = None if run.simulated_ranks else median(run, "step_seconds")
    return {
        "Strategy": run.label or "not recorded",
        "Seed": NONE if run.seed is None else str(run.seed),
        "Ranks": run.ranks,
        "Steps": f"{last} of {run.setting('training', 'steps') or '?'}",
        "Training loss": f"{losses.mean():.4f}" if len(losses) and np.isfinite(losses).all() else NONE,
        "Validation loss": f"{validation[-1]:.4f}" if len(validation) else NONE,
        "Difference": f"{signed(100 * (together[1] / together[2] - 1), digits=2)} %" if together else NONE,
        "Inter-node": NONE if inter is None else format_bytes(inter),
        "Intra-node": NONE if intra is None else format_bytes(intra),
        "Saved": NONE if ratio is None else f"{ratio:.2f}x",
        "Step time": NONE if seconds is None else f"{1000 * seconds:,.0f} ms",
        "Alerts": str(len(run.alerts)),
        "Quantization": _quantization(run),
    }


def _quantization(run: Run) -> str:
    """Describe bits and group sizes of weights and gradients, and the inter-node rounding."""
    weights, gradients = (run.setting("quantization", part) or {} for part in ("weights", "gradients"))
    parts = []
    if weights.get("bits"):
        direct = ", not differences" * (weights.get("mode") == "direct")
        parts.append(f"weights int{weights['bits']}/{weights.get('group_size')}{direct}")
    levels = [
        f"int{gradients[f'{level}_bits']}/{gradients.get(f'{level}_group_size')}"
        for level in ("intra", "inter")
        if gradients.get(f"{level}_bits")
    ]
    if levels:
        parts.append(f"gradients {', '.join(levels)}, {gradients.get('inter_rounding')}")
    return "\n".join(parts) or NONE


def _setting_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return name and values of every setting, those that differ between the runs first."""
    flat = [{k: json.dumps(v, ensure_ascii=False) for k, v in flattened(run.settings)} for run in runs]
    rows = [(name, [each.get(name, NONE) for each in flat]) for name in sorted(set().union(*flat))]
    return sorted(rows, key=lambda row: len(set(row[1])) == 1)

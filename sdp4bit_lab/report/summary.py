"""What came out of the runs in a few numbers, and what was run, as rows of text."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS
from sdp4bit_lab.pretrain.stability import SPIKE_RATIO
from sdp4bit_lab.report.pairs import NONE, difference_text, spikes_of
from sdp4bit_lab.report.runs import TIMES, Run

FINAL_STEPS = 20
"""Steps whose mean is the final training loss, as in summary.json."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: what it is, and a text for each run."""

    name: str
    about: str = ""
    cells: Sequence[str]


def summary_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the outcome of every run; a dash stands for what the run does not have."""
    rows = [
        Row(name="Strategy", cells=[run.label or "not recorded" for run in runs]),
        Row(name="Steps", about="done / planned", cells=[_steps(run) for run in runs]),
        Row(
            name="Training loss",
            about=f"mean of the last {FINAL_STEPS} steps",
            cells=[_text(final_train_loss(run), ".4f") for run in runs],
        ),
        Row(name="Validation loss", about="last", cells=[_at_step(last_validation(run)) for run in runs]),
        Row(name="Best validation", cells=[_at_step(best_validation(run)) for run in runs]),
        Row(
            name=f"Difference to {runs[0].label or runs[0].name}",
            about="same seed; validation loss at the last step that both have",
            cells=[difference_text(run, runs) for run in runs],
        ),
    ]
    if any(run.test for run in runs):
        rows.append(Row(name="Test loss", cells=[_at_step(_last(run.test)) for run in runs]))
    rows += [
        Row(name=name, about=about, cells=[_median(run, key, show) for run in runs])
        for name, about, key, show in _MEDIANS
    ]
    rows.append(
        Row(
            name="Gradient-norm spikes",
            about=f"steps above {SPIKE_RATIO:g} times the median before",
            cells=[_spikes(run) for run in runs],
        )
    )
    rows.append(Row(name="Alerts", cells=[str(len(run.alerts)) for run in runs]))
    rows.append(
        Row(name="Restarts", about="seen in the file", cells=[str(len(run.restarts)) for run in runs])
    )
    not_finite = [_not_finite(run) for run in runs]
    if any(not_finite):
        rows.append(Row(name="Steps whose loss is not a number", cells=[str(count) for count in not_finite]))
    skipped = [int(np.nansum(run.column("skipped"))) for run in runs]
    if any(skipped):
        rows.append(Row(name="Steps skipped", about="fp16 overflow", cells=[str(count) for count in skipped]))
    return rows


def final_train_loss(run: Run) -> float | None:
    """Return the mean loss of the last steps; None if one of them is not a number or there is none."""
    losses = run.column("loss")[-FINAL_STEPS:]
    return float(losses.mean()) if len(losses) and np.isfinite(losses).all() else None


def last_validation(run: Run) -> tuple[int, float] | None:
    """Return step and loss of the last validation; None without one or if it is not a number."""
    return _last(run.validation)


def best_validation(run: Run) -> tuple[int, float] | None:
    """Return step and loss of the lowest validation loss; None without one."""
    return min(run.validation_losses().items(), key=lambda point: point[1], default=None)


def median(run: Run, name: str) -> float | None:
    """Return the median over the steps, of which the first may differ; None without values."""
    values = run.column(name)
    values = values[np.isfinite(values)]
    return statistics.median(values.tolist()) if len(values) else None


def fact_rows(runs: Sequence[Run]) -> list[Row]:
    """Return what was run, for people; rows that say nothing of any run are left out."""
    facts = [dict(_facts(run)) for run in runs]
    names = dict.fromkeys(name for found in facts for name in found)
    return [Row(name=name, cells=[found.get(name, "not recorded") for found in facts]) for name in names]


def setting_rows(runs: Sequence[Run]) -> list[Row]:
    """Return every member of config.json, by its path, with its value in each run."""
    flat = [dict(_flat(run.settings, "")) for run in runs]
    names = sorted({name for found in flat for name in found})
    return [Row(name=name, cells=[found.get(name, NONE) for found in flat]) for name in names]


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    settings = run.settings
    if settings:
        yield "Model", _model(run)
        yield "Strategy", run.strategy or "not recorded"
        if "quantization" in settings:
            yield "Quantization", _quantization(run)
        yield "Ranks", ranks_text(run)
        yield "Seed", str(run.setting("seed"))
        precision = run.setting("training", "precision")
        flags = [name for name in ("fp16", "bf16") if run.setting("training", name) is True]
        yield "Gathered weights", str(precision or (flags or ["bf16"])[0])
        rate = run.setting("optimizer", "learning_rate")
        yield "Peak learning rate", "the card's" if rate is None else str(rate)
        yield "Data", _data(run)
        loaded = run.setting("checkpoint", "load")
        if loaded is not None:
            yield "Continued from", str(loaded)
        versions = run.setting("versions")
        if isinstance(versions, dict):
            yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    samples = [numbers.get("samples") for numbers in run.train.values()]
    batches = {b - a for a, b in itertools.pairwise(samples) if a is not None and b is not None}
    if len(batches) == 1:
        yield "Sequences per step", f"{batches.pop():.0f}"
    yield "Last written", run.written.strftime("%Y-%m-%d %H:%M %Z")
    yield "Folder", str(run.folder)


def _model(run: Run) -> str:
    name = run.setting("model", "model_card")
    card = next((card for known, card in MODEL_CARDS.items() if known == name), None)
    sizes = [
        f"{run.setting('model', size) or getattr(card, size, 'unknown')} {unit}"
        for size, unit in (("layers", "layers"), ("hidden", "wide"), ("heads", "heads"))
    ]
    length = run.setting("training", "sequence_length") or getattr(card, "sequence_length", "unknown")
    return f"{name}: {', '.join(sizes)}, sequences of {length} tokens"


def _quantization(run: Run) -> str:
    parts = []
    weights, gradients = run.setting("quantization", "weights"), run.setting("quantization", "gradients")
    if isinstance(weights, dict):
        what = "weight differences" if weights.get("mode") == "difference" else "weights"
        parts.append(f"{what} {weights.get('bits')} bits, groups of {weights.get('group_size')}")
    if isinstance(gradients, dict):
        transform = ", Hadamard" if gradients.get("hadamard") else ""
        parts.append(
            f"gradients {gradients.get('intra_bits')} bits intra-node, {gradients.get('inter_bits')} "
            f"inter-node{transform}"
        )
    return "; ".join(parts) or "none"


def ranks_text(run: Run) -> str:
    """Return how many ranks a run had, and how they were arranged, for people."""
    if run.simulated_ranks is not None:
        nodes = run.setting("parallel", "ranks_per_node")
        return f"{run.simulated_ranks} simulated in one process, {nodes} per node"
    count = run.setting("ranks") or run.setting("parallel", "nproc_per_node")
    per_node = run.setting("parallel", "ranks_per_node")
    text = "not recorded" if count is None else str(count)
    text += f", {per_node} per node" if per_node else ", nodes by host name"
    for size, name in (
        ("tensor_model_parallel_size", "tensor"),
        ("pipeline_model_parallel_size", "pipeline"),
    ):
        parallel = run.setting("parallel", size)
        if isinstance(parallel, int) and parallel > 1:
            text += f", {name} parallel {parallel}"
    return text


def _data(run: Run) -> str:
    if run.setting("data", "mock_data"):
        return "synthetic tokens"
    given = [run.setting("data", name) for name in ("data_path", "train_data_path")]
    paths = [str(part) for parts in given if isinstance(parts, list) for part in parts]
    return ", ".join(paths) or "the standard library's sources"


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield from _flat(member, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, json.dumps(value, ensure_ascii=False)


def _last(events: dict[int, dict[str, float | None]]) -> tuple[int, float] | None:
    step = next(reversed(events), None)
    loss = None if step is None else events[step].get("loss")
    return None if step is None or loss is None else (step, loss)


def _median(run: Run, key: str, show: Callable[[float | None], str]) -> str:
    """Return the median for people; times of simulated ranks, which took turns, mean nothing."""
    if key in TIMES and run.simulated_ranks is not None:
        return f"{NONE} (simulated)"
    return show(median(run, key))


def _spikes(run: Run) -> str:
    found = spikes_of(run)
    return f"{len(found)}; largest: {found[0]}" if found else "0"


def _steps(run: Run) -> str:
    planned = run.setting("training", "steps")
    done = max(run.train, default=0)
    return f"{done} / {planned}" if isinstance(planned, int) else f"{done}"


def _not_finite(run: Run) -> int:
    """Return the steps whose loss is null."""
    return int(np.isnan(run.column("loss")).sum())


def _text(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _at_step(point: tuple[int, float] | None) -> str:
    return NONE if point is None else f"{point[1]:.4f} at step {point[0]}"


def _bytes(value: float | None) -> str:
    return NONE if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


_MEDIANS: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("Inter-node bytes", "per step, median, all ranks", "inter_bytes", _bytes),
    ("Intra-node bytes", "per step, median, all ranks", "intra_bytes", _bytes),
    (
        *("Compression ratio", "median; inter-node, against plain FSDP2", "compression_ratio"),
        partial(_text, form=".2f"),
    ),
    ("Step time", "median", "step_seconds", _seconds),
    ("Tokens per second", "median, all ranks", "tokens_per_second", partial(_text, form=",.0f")),
)

"""Draw what strategies cost in loss over what they send: finished comparisons as one curve.

    sdp4bit compare --strategies baseline,tlq-hs,sdp4bit,... --seeds 1,2,3,4,5,6 --out runs/compare ...
    python -m benchmarks.curve runs/compare [runs/more ...] --out runs/curve

reads comparisons, of simulated ranks or of experiments/ddp_hooks, whose runs include the baseline. Bytes are
what a step sends per parameter to one other node, by the counted bytes of the runs. A two-level exchange
without quantization would send 6, an fp32 gradient and a bf16 weight; plain FSDP2, whose collectives know no
nodes, sends more. The cost is the difference of the validation loss to the baseline with the same seed, with
its 95 % interval. Beside it stands what was to be expected before the run: the cost of `tlq-hs` times the
squared error of the strategy's gradients over that of `tlq-hs`, both on normal values; weight differences are
expected to cost nothing: what one leaves out the next sends. Nothing is expected of DDP, whose hooks are
compared with `ddp`. Writes curve.md and curve.png.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sdp4bit.collectives.scratch import Scratch
from sdp4bit.config import GradientConfig
from sdp4bit.traffic import TrafficCounter
from sdp4bit_lab.common.files import save_figure, write_atomically
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.compare.paired import FEWEST_PAIRS, PairedDifference, paired_difference
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.report.answers import validated_together
from sdp4bit_lab.report.runs import Run, find_runs
from sdp4bit_lab.simulated.collectives import SimulatedReduceScatter, simulated_layout

BASELINE = "baseline"
BASELINE_OF_DDP = "ddp"
"""What `experiments.ddp_hooks.run` calls DDP without a hook, with which those with hooks are compared."""
MEASURE = "tlq-hs"
"""The strategy by whose cost that of others is predicted."""
_HALF = 2.0
"""Bytes per parameter, more than which a half in full precision takes alone."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A strategy on the curve."""

    label: str
    bytes_per_parameter: float
    difference: PairedDifference
    expected: float | None
    """Cost in percent that was to be expected; None without the strategy that it is measured by."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the cost, in percent."""
        interval = self.difference.percent_interval
        assert interval is not None
        return interval


def costs(runs: Sequence[Run]) -> dict[str, tuple[list[Run], PairedDifference]]:
    """Return of every strategy its runs and the difference of their validation loss to the baseline's.

    Strategies without three seeds or more in common with their baseline are left out.
    """
    found = {}
    for label in dict.fromkeys(run.label for run in runs):
        if label is None or label in (BASELINE, BASELINE_OF_DDP):
            continue
        plain = BASELINE_OF_DDP if _is_ddp(label) else BASELINE
        baselines = {run.seed: run for run in runs if run.label == plain}
        mine = [run for run in runs if run.label == label and run.seed in baselines]
        together = {run.seed: validated_together(run, baselines[run.seed]) for run in mine}
        pairs = {seed: losses[1:] for seed, losses in together.items() if seed is not None and losses}
        if len(pairs) >= FEWEST_PAIRS:
            found[label] = mine, paired_difference(pairs)
    return found


def points(runs: Sequence[Run]) -> list[Point]:
    """Return one point per strategy, from the fewest bytes to the most.

    Raises:
        SettingError: no strategy has three seeds or more in common with the baseline.
    """
    found = costs(runs)
    require(bool(found), "no strategy has three seeds in common with the baseline")
    rate = None
    if MEASURE in found:
        (measured, *_), difference = found[MEASURE]
        rate = difference.mean_percent / _squared_error(measured)
    result = [
        Point(
            label=label,
            bytes_per_parameter=bytes_per_parameter(mine[0]),
            difference=difference,
            expected=None if rate is None or _is_ddp(label) else rate * _squared_error(mine[0]),
        )
        for label, (mine, difference) in found.items()
    ]
    return sorted(result, key=lambda point: point.bytes_per_parameter)


def bytes_per_parameter(run: Run) -> float:
    """Return the bytes per parameter that a step of all ranks sends to one other node.

    Raises:
        SettingError: the run is not one of ranks on several nodes.
    """
    ranks, per_node = run.simulated_ranks or run.setting("ranks"), run.setting("parallel", "ranks_per_node")
    require(
        bool(ranks and per_node) and ranks > per_node,
        f"{run.name}: the curve is of ranks on several nodes: give --simulated-ranks and --ranks-per-node",
    )
    others = ranks // per_node - 1
    # The first steps also send whole weights.
    return float(np.median(run.column("inter_bytes"))) / (_parameters(run) * others)


def _is_ddp(label: str) -> bool:
    return label.startswith(f"{BASELINE_OF_DDP}-")


def _parameters(run: Run) -> int:
    """Return how many parameters the model has."""
    model = ModelConfig(**run.setting("model"))
    vocabulary = run.setting("data", "vocabulary_size") or model.card.vocabulary
    positions = run.setting("training", "sequence_length") or model.card.sequence_length
    with torch.device("meta"):
        gpt = GPT(model.shape(vocabulary=vocabulary, sequence_length=positions))
    return sum(parameter.numel() for parameter in gpt.parameters())


def _squared_error(run: Run) -> float:
    """Return what the run's gradient settings err on normal values, 0 for none."""
    settings = run.setting("quantization", "gradients")
    return 0.0 if settings is None else expected_error(GradientConfig(**{**settings, "start_step": 0}))


@cache
def expected_error(config: GradientConfig) -> float:
    """Return the relative squared error of a sum of normal gradients over 2 nodes of 2 ranks."""
    layout = simulated_layout(4, ranks_per_node=2)
    reduction = SimulatedReduceScatter(
        layout,
        config=config,
        seed=0,
        bucket=0,
        traffic=TrafficCounter(nodes=2, ranks_per_node=2),
        scratch=Scratch(),
    )
    gradients = torch.randn(4, 4, 1 << 16, generator=torch.Generator().manual_seed(0))
    for rows in gradients.clone():
        reduction.add(rows, call=0)
    exact, errors = gradients.double().sum(0), []
    reduction.finish(lambda rank, row: errors.append((row - exact[rank]).square().sum().item()))
    return sum(errors) / float(exact.square().sum())


def table(found: Sequence[Point]) -> str:
    """Return bytes, cost, its interval and what was expected, as Markdown."""
    titles = ("strategy", "bytes per parameter", "seeds", "cost", "95 % interval", "expected")
    text = f"| {' | '.join(titles)} |\n" + "| --- " * len(titles) + "|\n"
    for point in found:
        low, high = point.interval
        cells = (
            *(point.label, f"{point.bytes_per_parameter:.3f}", str(len(point.difference.by_seed))),
            *(f"{point.difference.mean_percent:+.3f} %", f"{low:+.3f} to {high:+.3f} %"),
            "" if point.expected is None else f"{point.expected:+.3f} %",
        )
        text += f"| {' | '.join(cells)} |\n"
    return text


_TICKS = (-0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def draw(found: Sequence[Point], path: Path) -> None:
    """Write the picture of cost over bytes; what leaves a half in full precision is on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    small = [point for point in found if point.bytes_per_parameter < _HALF]
    large = [point for point in found if point.bytes_per_parameter >= _HALF]
    parts = [(small, "all of it in few bits"), (large, "a part in 16 or 32 bits")]
    shown = [(part, title) for part, title in parts if part]
    markers = itertools.cycle("os^vPX*")
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False).flat
    for axes, (part, title) in zip(panels, shown, strict=True):
        for point in part:
            _draw_point(axes, point, marker=next(markers))
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("bytes per parameter and step to another node")
        # In proportion up to a tenth of a percent, where most lie; beyond it by factors.
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("difference of the validation loss to the baseline (%)")
    figure.suptitle(
        "measured with 95 % interval (filled), expected (diamonds); unquantized two-level exchange: 6 bytes",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    save_figure(figure, path, dpi=110)


def _draw_point(axes: Any, point: Point, *, marker: str) -> None:
    low, high = point.interval
    mean = point.difference.mean_percent
    (line, *_) = axes.errorbar(
        *(point.bytes_per_parameter, mean),
        yerr=[[mean - low], [high - mean]],
        fmt=marker,
        capsize=3,
        label=point.label,
    )
    if point.expected is not None:
        hollow: dict[str, Any] = {"marker": "D", "facecolors": "none", "edgecolors": line.get_color()}
        axes.scatter(point.bytes_per_parameter, point.expected, s=28, **hollow)


def write_findings(
    name: str,
    description: str | None,
    *,
    points: Callable[[Sequence[Run]], Sequence[Any]],
    table: Callable[[Sequence[Any]], str],
    draw: Callable[[Sequence[Any], Path], None],
) -> int:
    """Run a program that makes NAME.md and NAME.png of finished comparisons; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, help="--out folders of sdp4bit compare")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        found = points(find_runs(arguments.runs))
    except SettingError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    print(table(found))
    write_atomically(arguments.out / f"{name}.md", table(found))
    draw(found, arguments.out / f"{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(write_findings("curve", __doc__, points=points, table=table, draw=draw))

"""Measure where quantization errs while a model trains: by strategy, kind of layer and time. One process.

    python -m experiments.errors.run --out runs/errors --simulated-ranks 4 --ranks-per-node 2 --train-iters 250

trains as `sdp4bit pretrain` does with these options, on simulated ranks, and looks at every tenth step
(`--every`) at all of its gradients and weights. Sums of squares go to errors.jsonl, their shares over the
first, middle and last third of the run to the terminal and table.md, curves to errors.png:

* gradients: |reduced - mean of the ranks|^2 / |mean|^2, of what the run did, and of what other settings would
  have done with the same gradients (`SETTINGS`);
* weight differences: |received - wanted|^2 / |wanted|^2 of a refresh, with the rounding to the weights' type;
* drift: |main - held|^2 after the refresh, over what rounding the main weights to that type makes of it.

`--exact-gradients KIND ...` and `--exact-weights KIND ...` leave the errors of these kinds out of the run, to
see what they cost in loss; they are still measured. `--draw RUN` makes table and curves again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdp4bit.collectives.scratch import Scratch
from sdp4bit.config import GradientConfig
from sdp4bit.traffic import TrafficCounter
from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.common.files import save_figure, write_atomically
from sdp4bit_lab.common.ranks import Ranks, join_ranks
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.common.strategies import STRATEGIES, Strategy
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.step.simulated_model import SimulatedModel
from sdp4bit_lab.pretrain.trainer import build_run
from sdp4bit_lab.simulated.collectives import SimulatedReduceScatter
from sdp4bit_lab.simulated.communication import SimulatedCommHandle
from sdp4bit_lab.simulated.rows import RowLayout

KINDS = ("embeddings", "attention", "MLP", "norms and biases")
OWN = "this run"
"""The errors of the run's own settings, beside those of `SETTINGS`."""
THIRDS = ("first third", "middle", "last third")


def _gradients(strategy: Strategy, **changes: Any) -> GradientConfig:
    config = STRATEGIES[strategy].gradients
    assert config is not None
    return replace(config, **changes)


SETTINGS: dict[str, GradientConfig] = {
    "ulq": _gradients("ulq"),
    "tlq": _gradients("tlq"),
    "tlq-hs": _gradients("tlq-hs"),
    "tlq-hs, groups of 32 inter-node": _gradients("tlq-hs", inter_group_size=32),
    "tlq-hs, dither inter-node": _gradients("tlq-hs", inter_rounding="dither"),
    "tlq-hs, 8 bits inter-node": _gradients("tlq-hs", inter_bits=8),
}
"""What else the gradients of the run are reduced with."""

Squares = dict[str, dict[str, float]]
"""Sums of squares by kind of layer: "error" and "whole", and for weights "drift" and "rounding"."""


@dataclass(frozen=True, kw_only=True)
class ErrorConfig:
    """A run to train and to measure."""

    training: PretrainConfig
    every: int = 10
    """Steps from one measurement to the next."""
    exact_gradients: tuple[str, ...] = ()
    """Kinds of layers that are given the exact mean of the gradients."""
    exact_weights: tuple[str, ...] = ()
    """Kinds of layers whose held weights are the main weights, rounded to their type."""

    def __post_init__(self) -> None:
        require(
            self.training.parallel.simulated_ranks is not None,
            "the errors of real ranks are not in one process: give --simulated-ranks and --ranks-per-node",
        )
        require(self.every >= 1, f"--every {self.every} must be at least 1")


def kind_of(name: str, parameter: Tensor) -> str:
    """Return the kind of layer that a parameter of the GPT belongs to."""
    if parameter.ndim == 1:
        return "norms and biases"
    if "embedding" in name:
        return "embeddings"
    return "attention" if ".attention." in name else "MLP"


class ErrorRecorder:
    """Stands between a run of simulated ranks and its communication, and measures what that does."""

    def __init__(self, model: SimulatedModel, config: ErrorConfig) -> None:
        """Take the place of the handle's methods that the training step calls."""
        self._config = config
        handle = self._handle = model.communication
        self._main = dict(model.chunks[0].named_parameters())
        self._held = {name: parameter.detach() for name, parameter in model.compute.named_parameters()}
        self._kinds = {name: kind_of(name, parameter) for name, parameter in self._main.items()}
        self._exact: dict[str, Tensor] = {}
        self._others = {name: _OtherReduction(handle, setting) for name, setting in SETTINGS.items()}
        self.is_due = False
        """Whether the step under way is measured."""
        self.gradients: dict[str, Squares] = {}
        """Of the last measured step, by settings."""
        self.weights: Squares = {}
        self._add, self._reduce = handle.add_gradients, handle.reduce_gradients
        self._refresh = handle.before_forward
        handle.add_gradients = self.add_gradients  # type: ignore[method-assign]
        handle.reduce_gradients = self.reduce_gradients  # type: ignore[method-assign]
        handle.before_forward = self.before_forward  # type: ignore[method-assign]

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor], *, rank: int) -> None:
        """Sum the gradients in fp64, then let them be added as in any run."""
        if self.is_due or self._config.exact_gradients:
            for name, gradient in gradients.items():
                before = 0.0 if rank == 0 else self._exact[name]
                self._exact[name] = before + gradient.double()
        if self.is_due:
            for other in self._others.values():
                other.add(gradients)
        self._add(gradients, rank=rank)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce as in any run, and compare with the sum in fp64."""
        self._reduce()
        ranks = self._handle.layout.size
        reduced = {name: _gradient(parameter) for name, parameter in self._main.items()}
        if self.is_due:
            exact = {name: total / ranks for name, total in self._exact.items()}
            self.gradients = {OWN: self._compare(reduced, exact)}
            for name, other in self._others.items():
                self.gradients[name] = self._compare(other.finish(reduced), exact)
        for name, gradient in reduced.items():
            if self._kinds[name] in self._config.exact_gradients:
                gradient.copy_(self._exact[name] / ranks)

    @torch.no_grad()
    def before_forward(self) -> None:
        """Refresh as in any run, and compare what is held with the main weights."""
        before = {name: held.clone() for name, held in self._held.items()} if self.is_due else {}
        self._refresh()
        if before:
            found: Squares = defaultdict(lambda: defaultdict(float))
            for name, held in self._held.items():
                main, squares = self._main[name].detach(), found[self._kinds[name]]
                wanted = main - before[name].float()
                if not wanted.any():
                    continue
                squares["error"] += _square(held.float() - before[name].float() - wanted)
                squares["whole"] += _square(wanted)
                squares["drift"] += _square(main - held.float())
                squares["rounding"] += _square(main - main.to(held.dtype).float())
            self.weights = {kind: dict(squares) for kind, squares in found.items()}
        for name, held in self._held.items():
            if self._kinds[name] in self._config.exact_weights:
                held.copy_(self._main[name])

    def _compare(self, reduced: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Squares:
        found: Squares = {kind: {"error": 0.0, "whole": 0.0} for kind in KINDS}
        for name, mean in exact.items():
            squares = found[self._kinds[name]]
            squares["error"] += _square(reduced[name] - mean)
            squares["whole"] += _square(mean)
        return found


class _OtherReduction:
    """Reduces the gradients of a run with other settings, beside it."""

    def __init__(self, handle: SimulatedCommHandle, config: GradientConfig) -> None:
        layout = handle.layout
        uncounted = TrafficCounter(nodes=layout.nodes, ranks_per_node=layout.ranks_per_node)
        self._size, self._calls = layout.size, 0
        self._groups: list[tuple[RowLayout, SimulatedReduceScatter]] = [
            (
                rows,
                SimulatedReduceScatter(
                    layout, config=config, seed=0, bucket=index, traffic=uncounted, scratch=Scratch()
                ),
            )
            for index, rows in enumerate(handle.row_layouts)
        ]

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        for layout, reduction in self._groups:
            rows = torch.empty(self._size, layout.numel)
            layout.write_rows(gradients, rows)
            reduction.add(rows, call=self._calls)

    def finish(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        reduced = {name: torch.empty_like(gradient) for name, gradient in like.items()}
        for layout, reduction in self._groups:

            def take(rank: int, row: Tensor, layout: RowLayout = layout) -> None:
                layout.read_row(row / self._size, rank=rank, tensors=reduced)

            reduction.finish(take)
        self._calls += 1
        return reduced


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _square(tensor: Tensor) -> float:
    return tensor.double().square().sum().item()


def train_and_measure(config: ErrorConfig, *, ranks: Ranks) -> None:
    """Train the run, and write its errors, their table and their curves into its folder."""
    training = config.training
    out = training.logging.out
    run = build_run(training, ranks=ranks, label=training.strategy_name)
    assert isinstance(run.loop.model, SimulatedModel)
    recorder = ErrorRecorder(run.loop.model, config)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "errors.jsonl").open("w", encoding="utf-8") as lines:
        for metrics in _steps(run.loop.steps(), recorder, every=config.every):
            if recorder.is_due:
                record = {
                    "step": metrics.step,
                    "loss": metrics.loss,
                    "gradients": recorder.gradients,
                    "weights": recorder.weights,
                }
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                print(f"step {metrics.step}/{training.training.steps}  loss {metrics.loss:.4f}", flush=True)
    validation = run.loop.validate()
    result = {
        "validation_loss": validation.loss,
        "seed": training.seed,
        "strategy": training.strategy_name,
        "exact_gradients": config.exact_gradients,
        "exact_weights": config.exact_weights,
    }
    write_atomically(out / "result.json", json.dumps(result) + "\n")
    print(f"validation loss {validation.loss:.4f}")
    draw(out)


def _steps(steps: Any, recorder: ErrorRecorder, *, every: int) -> Any:
    """Yield the steps; the recorder knows before each whether it is measured."""
    number = 1
    while True:
        recorder.is_due = number % every == 0
        try:
            yield next(steps)
        except StopIteration:
            return
        number += 1


def read(folder: Path) -> list[dict[str, Any]]:
    """Return what was measured, in the order of the steps."""
    text = (folder / "errors.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def relative(squares: Squares, error: str = "error", whole: str = "whole", kind: str | None = None) -> float:
    """Return the squared error over the squared whole, of one kind or of all layers together."""
    chosen = [squares[name] for name in KINDS if name in squares and kind in (None, name)]
    total = sum(found[whole] for found in chosen)
    return sum(found[error] for found in chosen) / total if total else 0.0


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return mean relative squared errors over the thirds of the run, as Markdown."""
    parts = [list(part) for part in _thirds(records)]

    def row(name: str, of: Callable[[Mapping[str, Any]], float], form: str = ".4f") -> str:
        means = [sum(map(of, part)) / len(part) for part in parts]
        return f"| {name} | " + " | ".join(f"{mean:{form}}" for mean in means) + " |\n"

    text = f"| relative squared error | {' | '.join(THIRDS)} |\n| --- | --- | --- | --- |\n"
    for name in (*SETTINGS, OWN):
        text += row(f"gradients, {name}", lambda record, name=name: relative(record["gradients"][name]))
    for kind in KINDS:
        text += row(
            f"gradients of {kind}", lambda record, kind=kind: relative(record["gradients"][OWN], kind=kind)
        )
        text += row(
            f"their share of the error, {kind}", lambda r, kind=kind: _share(r["gradients"][OWN], kind)
        )
    for kind in (None, *KINDS):
        of = kind or "all weights"
        text += row(f"differences of {of}", lambda r, kind=kind: relative(r["weights"], kind=kind))
        text += row(
            f"drift of {of}, over rounding's",
            lambda r, kind=kind: relative(r["weights"], "drift", "rounding", kind),
            form=".3f",
        )
    return text


def _share(squares: Squares, kind: str) -> float:
    total = sum(found["error"] for found in squares.values())
    return squares[kind]["error"] / total if total else 0.0


def _thirds(records: Sequence[Mapping[str, Any]]) -> list[Sequence[Mapping[str, Any]]]:
    size = len(records)
    require(size >= len(THIRDS), f"{size} measured steps are too few: train longer, or set --every lower")
    cuts = [size * part // len(THIRDS) for part in range(len(THIRDS) + 1)]
    return [records[start:end] for start, end in itertools.pairwise(cuts)]


def draw(folder: Path) -> None:
    """Write table.md and errors.png of a run, and print the table."""
    from matplotlib.figure import Figure

    records = read(folder)
    write_atomically(folder / "table.md", table(records))
    print(table(records))
    steps = [record["step"] for record in records]
    figure = Figure(figsize=(12, 8), layout="constrained")
    by_setting, by_kind, differences, drift = figure.subplots(2, 2).flat
    for name in SETTINGS:
        by_setting.plot(steps, [relative(record["gradients"][name]) for record in records], label=name)
    for kind in KINDS:
        own = [relative(record["gradients"][OWN], kind=kind) for record in records]
        by_kind.plot(steps, own, label=kind)
        weights = [record["weights"] for record in records]
        differences.plot(steps, [relative(found, kind=kind) for found in weights], label=kind)
        drift.plot(steps, [relative(found, "drift", "rounding", kind) for found in weights], label=kind)
    for axes, title in (
        (by_setting, "gradients: the same ones, reduced with each setting"),
        (by_kind, "gradients of this run, by kind of layer"),
        (differences, "weight differences of this run, by kind of layer"),
    ):
        axes.set_title(title)
        axes.set_yscale("log")
        axes.set_ylabel("|error|² / |whole|²")
    drift.set_title("weights held, by kind of layer")
    drift.set_ylabel("|main - held|² over that of rounding alone")
    drift.axhline(1.0, color="grey", linewidth=0.8)
    for axes in (by_setting, by_kind, differences, drift):
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(figure, folder / "errors.png", dpi=110)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--exact-gradients", nargs="+", choices=KINDS, default=[])
    parser.add_argument("--exact-weights", nargs="+", choices=KINDS, default=[])
    parser.add_argument("--draw", type=Path, help="folder of a run that has been measured")
    arguments, options = parser.parse_known_args()
    try:
        if arguments.draw is not None:
            draw(arguments.draw)
            return 0
        config = ErrorConfig(
            training=COMMANDS["pretrain"].parse(options),
            every=arguments.every,
            exact_gradients=tuple(arguments.exact_gradients),
            exact_weights=tuple(arguments.exact_weights),
        )
        with join_ranks() as ranks:
            train_and_measure(config, ranks=ranks)
        return 0
    except SettingError as error:
        print(f"experiments.errors.run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

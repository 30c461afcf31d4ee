"""Measure the squared error of each hop on gradients and weight differences of a training run. One process.

    python -m experiments.vnmse.run measure --errors runs/vnmse/errors.json OPTIONS OF sdp4bit pretrain
    python -m experiments.vnmse.run eden --bits 3 OPTIONS OF sdp4bit compare
    python -m experiments.vnmse.run report --errors runs/vnmse/errors.json --eden runs/vnmse --facts JSON

The first command trains on 2 x 2 simulated ranks as `sdp4bit pretrain` does. At a few steps it sends the
gradients of all ranks, and the weight differences, in every format. The second trains with EDEN between
nodes, with the weights of a preset. The third writes result.json and loss.png.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.tables import losses
from experiments.vnmse.formats import RIVALS, eden
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.config import GradientConfig, SDP4BitConfig
from sdp4bit.quantization import definition
from sdp4bit.quantization.random import Stage
from sdp4bit.traffic import TrafficCounter
from sdp4bit_lab import cli
from sdp4bit_lab.common.files import save_figure
from sdp4bit_lab.common.ranks import join_ranks
from sdp4bit_lab.common.strategies import STRATEGIES
from sdp4bit_lab.compare.paired import confidence_interval
from sdp4bit_lab.compare.variants import parse_variant
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.step.simulated_model import SimulatedModel
from sdp4bit_lab.pretrain.trainer import build_run
from sdp4bit_lab.simulated.collectives import SimulatedReduceScatter, SimulatedReplica
from sdp4bit_lab.simulated.communication import SimulatedGroupState

ROOT = Path(__file__).resolve().parents[2]
STEPS = (20, 60, 120, 180, 240)
"""Measured steps."""
WINDOW = 5
"""Steps before a measured one in which replicas follow the weights."""
DRAWS = 8
"""Random draws of a message, for its bias."""
SHOWN = ("sdp4bit", "sdp4bit-w3g3.5", "sdp4bit-w2g3", "sdp4bit-w2g2", "sdp4bit-paper", "tlq", "ulq")
ACCURACY = ("accuracy", "accuracy-first-recipe")

Squares = dict[str, list[float]]
"""Squared error and squared norm by name, summed over parameter groups."""


def config_of(label: str, recipe: str) -> SDP4BitConfig:
    """Return the settings of a strategy at the time of a recipe."""
    shared = CommunicationConfig()
    variant = parse_variant(label, shared=shared)
    config = variant.communication.resolve(variant.strategy, seed=0)
    if recipe == "accuracy-first-recipe" and config.gradients is not None:
        return replace(config, gradients=replace(config.gradients, exact_own=False))
    return config


def key_of(config: SDP4BitConfig) -> str:
    """Return a name of the settings that decide the error of a gradient."""
    assert config.gradients is not None
    return f"{replace(config.gradients, start_step=0)} {config.separate_parameters}"


def reductions() -> dict[str, SDP4BitConfig]:
    """Return the different gradient settings of the strategies shown, and of all with measured losses."""
    found = [STRATEGIES[name] for name in SHOWN]
    for recipe in ACCURACY:
        result = json.loads((ROOT / "results" / f"{recipe}.json").read_text())
        labels = [row["strategy"] for row in result.get("runs") or result["outcomes"]]
        found += [config_of(label, recipe) for label in labels]
    return {key_of(config): config for config in found if config.gradients is not None}


def square(tensor: Tensor) -> float:
    """Return the sum of squares in fp64."""
    return tensor.double().square().sum().item()


class Recorder:
    """Keeps the gradients of all ranks in measured steps."""

    def __init__(self, model: SimulatedModel) -> None:
        handle = model.communication
        self.groups: Sequence[SimulatedGroupState] = handle._state.groups
        self.layout, self.is_due = handle.layout, False
        self.rows: list[list[Tensor]] = [[] for _ in self.groups]  # [ranks, n] of each rank, by group
        self._add = handle.add_gradients
        handle.add_gradients = self.add  # type: ignore[method-assign]

    @torch.no_grad()
    def add(self, gradients: Mapping[str, Tensor], *, rank: int) -> None:
        if self.is_due:
            for comm, kept in zip(self.groups, self.rows, strict=True):
                rows = torch.empty(self.layout.size, comm.view.rows.numel)
                comm.view.rows.write_rows(gradients, rows)
                kept.append(rows)
        self._add(gradients, rank=rank)

    def take(self) -> list[Tensor]:
        """Return the gradients of a step by group, [ranks, destination ranks, n], and forget them."""
        taken, self.rows = [torch.stack(kept) for kept in self.rows], [[] for _ in self.groups]
        return taken


def send(values: Tensor, config: GradientConfig, level: str, *, draw: int, sender: int) -> Tensor:
    """Return a message [rows, n] as it arrives over a hop of the library, by its definition."""
    size = getattr(config, f"{level}_group_size")
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % size))
    rows = definition.transform(padded, config.hadamard).reshape(-1, size)
    stage = Stage.INTRA if level == "intra" else Stage.INTER
    call = definition.Call(number=draw)
    sent = definition.send(rows, config=config, level=level, call=call, stage=stage, first=0, sender=sender)  # type: ignore[arg-type]
    return definition.restore(
        sent.view(padded.shape), values.shape[-1], hadamard=config.hadamard, multiplier=1.0
    )


def reduce(inputs: Tensor, config: GradientConfig, sections: Sequence[Section], recorder: Recorder) -> Tensor:
    """Return the sum [ranks, n] that the library's reduction delivers."""
    reduction = SimulatedReduceScatter(
        recorder.layout,
        config=config,
        seed=0,
        bucket=0,
        traffic=TrafficCounter(recorder.layout),
        scratch=Scratch(),
    )
    for rows in inputs:
        reduction.add(rows.clone(), call=0, sections=sections)
    result = torch.empty_like(inputs[0])
    reduction.finish(lambda rank, row: result[rank].copy_(row))
    return result


def measure_gradients(
    taken: Sequence[Tensor], recorder: Recorder, tried: Mapping[str, SDP4BitConfig]
) -> dict[str, Any]:
    """Return the squared errors of messages and of the sum over ranks, and the norms of the gradients."""
    layout, found = recorder.layout, defaultdict[str, Squares](lambda: defaultdict(lambda: [0.0, 0.0]))
    generator = torch.Generator().manual_seed(0)
    facts = {"mean": 0.0, "ranks": 0.0}

    def note(kind: str, name: str, received: Tensor, exact: Tensor) -> None:
        squares = found[kind][name]
        squares[0] += square(received - exact)
        squares[1] += square(exact)

    for comm, inputs in zip(recorder.groups, taken, strict=True):
        total = inputs.double().sum(0)
        facts["mean"] += square(total) / layout.size**2
        facts["ranks"] += square(inputs) / layout.size
        sums = inputs.view(layout.nodes, layout.ranks_per_node, *inputs.shape[1:]).sum(1)  # of each node
        for name in SHOWN:
            config = STRATEGIES[name].gradients
            assert config is not None
            for rank, rows in enumerate(inputs):
                note("intra", name, send(rows, config, "intra", draw=0, sender=rank), rows)
            for node, rows in enumerate(sums):
                note("inter", name, send(rows, config, "inter", draw=0, sender=node), rows)
        for name, rival in RIVALS.items():
            delivered = sums.new_zeros(*sums.shape[1:])
            for node, rows in enumerate(sums):
                received = rival.quantize(rows, generator)
                note("inter", name, received, rows)
                own = slice(node * layout.ranks_per_node, (node + 1) * layout.ranks_per_node)
                received[own] = rows[own]  # exact_own
                delivered += received
            note("sum", name, delivered, total)
        for name, settings in tried.items():
            config = settings.gradients
            assert config is not None
            unit = max(config.intra_group_size, config.inter_group_size)
            sections = comm.view.sections(unit=unit, separate=settings.separate_parameters)
            note("sum", name, reduce(inputs, config, sections, recorder), total)
    return {"squares": {kind: dict(squares) for kind, squares in found.items()}, **facts}


def bias_of_messages(rows: Tensor) -> dict[str, float]:
    """Return the squared bias of a message between nodes over the squared values, from several draws."""
    generator, found = torch.Generator().manual_seed(1), {}
    ways: dict[str, Callable[[int], Tensor]] = {
        name: functools.partial(lambda draw, r: r.quantize(rows, generator), r=rival)
        for name, rival in RIVALS.items()
    }
    for name in SHOWN:
        config = STRATEGIES[name].gradients
        ways[name] = functools.partial(lambda draw, c: send(rows, c, "inter", draw=draw, sender=0), c=config)
    for name, way in ways.items():
        errors = [way(draw) - rows for draw in range(DRAWS)]
        single = statistics.fmean(map(square, errors))
        mean = square(torch.stack(errors).mean(0))
        # The mean of n draws has the squared bias and 1 / n of the variance.
        found[name] = (DRAWS * mean - single) / (DRAWS - 1) / square(rows)
    return found


class Replicas:
    """Replicas in bf16 that follow the main weights, one per format."""

    def __init__(self, recorder: Recorder, main: Mapping[str, Tensor]) -> None:
        self._recorder, self._main = recorder, main
        self._generator = torch.Generator().manual_seed(0)
        self._library = {name: STRATEGIES[name].weights for name in (*SHOWN[:4], "qw")}
        self._held: dict[str, list[Tensor]] = {}
        self._previous: list[Tensor] = []

    def _rows(self) -> list[Tensor]:
        groups = self._recorder.groups
        rows = [torch.empty(each.view.rows.ranks, each.view.rows.numel) for each in groups]
        for comm, row in zip(groups, rows, strict=True):
            comm.view.rows.write_rows(self._main, row)
        return rows

    @torch.no_grad()
    def start(self) -> None:
        """Begin with the main weights, rounded."""
        self._previous = self._rows()
        for name in (*self._library, *RIVALS):
            self._held[name] = [row.bfloat16() for row in self._previous]

    @torch.no_grad()
    def follow(self) -> dict[str, Any]:
        """Refresh all replicas; return squared errors of differences, excess drifts, and the update's."""
        main, errors = self._rows(), defaultdict[str, list[float]](lambda: [0.0, 0.0])
        drift: dict[str, float] = defaultdict(float)
        for name, held in self._held.items():
            for index, (row, replica) in enumerate(zip(main, held, strict=True)):
                wanted = row - replica.float()
                received = self._received(name, index, row, replica) - replica.float()
                errors[name][0] += square(received - wanted)
                errors[name][1] += square(wanted)
                held[index] = (replica.float() + received).bfloat16()
                drift[name] += square(row - held[index].float()) - square(row - row.bfloat16().float())
        update = sum(square(now - before) for now, before in zip(main, self._previous, strict=True))
        self._previous = main
        return {"differences": dict(errors), "drift": dict(drift), "update": update}

    def _received(self, name: str, index: int, row: Tensor, replica: Tensor) -> Tensor:
        """Return the new replica, before it is rounded."""
        if name in RIVALS:
            change = row - replica.float()
            return replica.float() + RIVALS[name].quantize(change, self._generator)
        config, group = self._library[name], self._recorder.groups[index].group
        assert config is not None
        layout = self._recorder.layout
        sender = SimulatedReplica(layout, config=config, traffic=TrafficCounter(layout), scratch=Scratch())
        held, separate = replica.float(), STRATEGIES[name].separate_parameters
        # In fp32, so that the rounding of the format stands alone.
        sender.refresh(row, held, sections=group.sections(unit=config.group_size, separate=separate))
        return held


def measure(options: Sequence[str], out: Path) -> None:
    """Train, and write the squared errors of the measured steps."""
    training = cli.COMMANDS["pretrain"].parse(options)
    records, bias = [], {}
    tried = reductions()
    with join_ranks() as ranks:
        run = build_run(training, ranks=ranks, label=training.strategy_name)
        model = run.loop.model
        assert isinstance(model, SimulatedModel)
        recorder = Recorder(model)
        replicas = Replicas(recorder, {name: p.detach() for name, p in model.chunks[0].named_parameters()})
        steps = run.loop.steps()
        for number in range(1, training.training.steps + 1):
            recorder.is_due = number in STEPS
            metrics = next(steps)
            ahead = min((step - number for step in STEPS if step >= number), default=WINDOW + 1)
            if ahead == WINDOW:
                replicas.start()
            elif ahead < WINDOW:
                followed = replicas.follow()
            if number in STEPS:
                taken = recorder.take()
                record = {"step": number, "loss": metrics.loss, **measure_gradients(taken, recorder, tried)}
                records.append(record | followed)
                if number == STEPS[2]:
                    bias = bias_of_messages(taken[1][:2].sum(0))
                sys.stdout.write(f"step {number}, loss {metrics.loss:.4f}\n")
        validation = run.loop.validate().loss
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"validation_loss": validation, "steps": records, "bias": bias}))
    sys.stdout.write(f"validation loss {validation}\n")


class EdenReduceScatter(SimulatedReduceScatter):
    """Sums exactly inside a node, and in EDEN between nodes; own parts and 1-D parameters are exact."""

    bits = 3

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bucket, self._sums_of_nodes, self._count, self._called = options["bucket"], None, 0, 0

    def add(
        self, rows: Tensor, *, call: int, nonfinite: Any = None, sections: Sequence[Section] = ()
    ) -> None:
        """See SimulatedReduceScatter."""
        if self._sums_of_nodes is None:
            self._sums_of_nodes = torch.zeros(self._layout.nodes, *rows.shape)
        self._sums_of_nodes[self._count // self._layout.ranks_per_node] += rows
        self._count, self._called = self._count + 1, call
        self._sections = sections or whole_row(rows.shape[1])

    def finish(self, take: Callable[[int, Tensor], None]) -> None:
        """See SimulatedReduceScatter."""
        sums, self._sums_of_nodes, self._count = self._sums_of_nodes, None, 0
        generator = torch.Generator().manual_seed(self._called * 4096 + self._bucket)
        per_node = self._layout.ranks_per_node
        for sender, rows in enumerate(sums):
            for section in self._sections:
                if section.is_fine:
                    continue
                for rank in range(len(rows)):
                    if rank // per_node == sender:
                        continue
                    values = section.take(rows[rank])
                    values.copy_(eden(values, generator, bits=self.bits))
                    section.put(values, rows[rank])
        for rank, row in enumerate(sums.sum(0)):
            take(rank, row)


def encoded_bits(bits: float | None, group_size: int) -> str:
    """Return the bits of a value with its share of a scale."""
    return "32" if bits is None else f"{bits + 16 / group_size:.3g}"


def gradient_table(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the errors of gradients, as means over the measured steps."""

    def of(kind: str, name: str) -> float:
        return statistics.fmean(error / norm for error, norm in squares_of(measured, kind, name))

    rows = []
    for name in (*SHOWN, *RIVALS):
        sum_name, inside, bits = name, "", ""
        if name in RIVALS:
            bits = f"{RIVALS[name].bits:.4g}"
        else:
            config = STRATEGIES[name].gradients
            assert config is not None
            bits = encoded_bits(config.inter_bits, config.inter_group_size)
            sum_name, inside = key_of(STRATEGIES[name]), f"{of('intra', name):.5f}"
        error = of("sum", sum_name)
        cells = (bits, inside, f"{of('inter', name):.4f}", f"{max(measured['bias'][name], 0):.3f}")
        rows.append([f"`{name}`" if name in SHOWN else name, *cells, f"{error:.4f}", f"{error**-0.5:.1f}"])
    columns = ["gradients", "bits", "inside a node", "between nodes", "squared bias", "mean of 4 ranks"]
    return {"columns": [*columns, "signal over noise"], "rows": rows}


def squares_of(measured: Mapping[str, Any], kind: str, name: str) -> list[list[float]]:
    """Return squared error and norm of the measured steps."""
    return [step["squares"][kind][name] for step in measured["steps"]]


def weight_table(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the errors of weight differences and the excess drift of replicas."""
    rows = []
    for name in (*SHOWN[:3], "qw", *RIVALS):
        config = None if name in RIVALS else STRATEGIES[name].weights
        bits = encoded_bits(config.bits, config.group_size) if config else f"{RIVALS[name].bits:.4g}"
        errors = [step["differences"][name] for step in measured["steps"]]
        drifts = [step["drift"][name] / step["update"] for step in measured["steps"]]
        error, drift = statistics.fmean(e / n for e, n in errors), statistics.median(drifts)
        rows.append([name if name in RIVALS else f"`{name}`", bits, f"{error:.4f}", f"{drift:.3f}"])
    return {"columns": ["weight differences", "bits", "squared error", "excess drift"], "rows": rows}


def points(measured: Mapping[str, Any]) -> list[tuple[str, str, float, float, tuple[float, float], int]]:
    """Return recipe, strategy, squared error of the mean, loss in percent, its interval and seeds."""
    found = []
    for recipe in ACCURACY:
        for loss in losses(json.loads((ROOT / "results" / f"{recipe}.json").read_text())):
            config = config_of(loss.strategy, recipe)
            if config.gradients is None:
                continue
            errors = squares_of(measured, "sum", key_of(config))
            quantized = 1 - config.gradients.start_step / 250
            error = quantized * statistics.fmean(e / n for e, n in errors)
            found.append((recipe, loss.name, error, loss.percent, loss.interval, loss.seeds))
    return sorted(found, key=lambda point: point[2])


def slope_of(found: Sequence[tuple[str, str, float, float, tuple[float, float], int]]) -> float:
    """Return the slope of a line through zero, each point weighted by its interval."""
    weights = [(2 / (high - low)) ** 2 for *_, (low, high), _ in found]
    products = [w * point[2] * point[3] for w, point in zip(weights, found, strict=True)]
    return sum(products) / sum(w * point[2] ** 2 for w, point in zip(weights, found, strict=True))


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """Draw the loss of every strategy over its signal-to-noise ratio."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes, found = figure.subplots(), points(measured)
    slope, end = slope_of(found), 100.0
    for recipe, color in zip(ACCURACY, ("tab:green", "tab:blue"), strict=True):
        chosen = [point for point in found if point[0] == recipe]
        ratios, costs = [p[2] ** -0.5 for p in chosen], [p[3] for p in chosen]
        bars = [[p[3] - p[4][0] for p in chosen], [p[4][1] - p[3] for p in chosen]]
        label = {"accuracy": "second recipe"}.get(recipe, "first recipe")
        is_second = recipe == "accuracy"
        label = "second recipe" if is_second else "first recipe"
        axes.errorbar(ratios, costs, yerr=bars, fmt="o", markersize=4, capsize=2, color=color, label=label)
        for point, ratio, cost in zip(chosen, ratios, costs, strict=True):
            if "w2" in point[1]:
                axes.plot(ratio, cost, "o", markersize=9, markerfacecolor="none", color=color)
            if point[1].startswith("sdp4bit") and "," not in point[1] and is_second != ("w2" in point[1]):
                axes.annotate(point[1], (ratio, cost), (6, 5), textcoords="offset points", fontsize=8)
    line = [1.5 * (end / 1.5) ** (i / 200) for i in range(201)]
    axes.plot(line, [slope / x**2 for x in line], color="grey", label=f"{slope:.1f} % / ratio²")
    axes.axvline(3**0.5, color="tab:red", linewidth=0.8, label="√3 (arXiv 2505.19115)")
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xticks([2, 3, 5, 7, 10, 15, 30, 90], ["2", "3", "5", "7", "10", "15", "30", "90"])
    axes.minorticks_off()
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(-0.05, 2)
    ticks = [0.0, 0.05, 0.1, 0.2, 0.5, 1.0]
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_xlabel("norm of the mean gradient over its quantization error")
    axes.set_ylabel("validation loss over full precision")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path, dpi=110)


def eden_table(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return losses by seed, and the mean difference from the published baselines."""
    published = json.loads((ROOT / "results" / "accuracy.json").read_text())["runs"]
    baseline = {r["seed"]: r["validation"][-1][1] for r in published if r["strategy"] == "baseline"}
    by_seed, percent = [], []
    for path in sorted(folder.glob("eden-*/summary.json")):
        for run in json.loads(path.read_text())["runs"]:
            seed, loss = run["seed"], run["val_loss"]
            percent.append(100 * (loss / baseline[seed] - 1))
            by_seed.append([str(seed), f"{percent[-1]:+.3f} %", loss, run["train_loss"]])
    columns = ["training", "bytes", "seeds", "validation, over the baseline"]
    cells = []
    if percent:
        interval = confidence_interval(percent)
        shown = "one seed" if interval is None else f"{interval[0]:+.3f} to {interval[1]:+.3f} %"
        mean = f"{statistics.fmean(percent):+.3f} % ({shown})"
        cells.append(["gradients by 3-bit EDEN, weights of 2 bits", "0.648", str(len(percent)), mean])
    return {"columns": columns, "rows": cells}, {
        "columns": ["seed", columns[3], "validation loss", "training loss"],
        "rows": by_seed,
    }


def report(errors: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write result.json and loss.png beside this file."""
    measured, here = json.loads(errors.read_text()), Path(__file__).parent
    found = points(measured)
    slope, rows = slope_of(found), []
    for recipe, name, error, cost, (low, high), seeds in found:
        when = "second" if recipe == "accuracy" else "first"
        measures = f"{error:.4f}", f"{error**-0.5:.1f}", str(seeds)
        losses_text = f"{cost:+.3f} %", f"{low:+.3f} to {high:+.3f} %", f"{slope * error:+.3f} %"
        rows.append([f"`{name}`", when, *measures, *losses_text])
    columns = ["strategy", "recipe", "squared error", "signal over noise", "seeds", "loss"]
    columns += ["95 % interval", "line"]
    trained, by_seed = eden_table(folder)
    tables = [gradient_table(measured), weight_table(measured), {"columns": columns, "rows": rows}]
    result = {**facts, "slope": slope, "tables": [*tables, trained, by_seed]}
    (here / "result.json").write_text(json.dumps(result | {"measured": measured}, indent=1) + "\n")
    draw(measured, here / "loss.png")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=("measure", "eden", "report"))
    parser.add_argument("--errors", type=Path, default=Path("runs/vnmse/errors.json"))
    parser.add_argument("--eden", type=Path, default=Path("runs/vnmse"), help="folder of the runs' folders")
    parser.add_argument("--facts", type=json.loads, help="commit, date, hardware and so on, as JSON")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--preset", default="sdp4bit-w2g3")
    arguments, options = parser.parse_known_args()
    if arguments.task == "measure":
        measure(options, arguments.errors)
    elif arguments.task == "report":
        report(arguments.errors, arguments.eden, arguments.facts)
    elif arguments.task == "eden":
        kind = type("Eden", (EdenReduceScatter,), {"bits": arguments.bits})
        with mock.patch("sdp4bit_lab.simulated.communication.SimulatedReduceScatter", kind):
            label = arguments.preset
            return cli.main(["compare", "--strategies", label, "--baseline", label, *options])
    return 0


if __name__ == "__main__":
    sys.exit(main())

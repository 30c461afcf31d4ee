"""Distribute bits over parameters by reverse water-filling, and train with them on simulated ranks.

    python -m experiments.loss_budget.run measure runs/budget --steps 60
    python -m experiments.loss_budget.run train runs/budget --seeds 1,2,3,4
    python -m experiments.loss_budget.run report runs/budget

`measure` trains once with the default formats and notes, per matrix, how large the values of a group are that
travel: gradients after the Hadamard transform, and weight differences. From this one measurement bits are
distributed so that the predicted loss is least at the bytes of `uniform`, of 2-bit weight differences and
3.5-bit gradients. Vectors keep 8 bits.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sdp4bit.collectives.sections import Section
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import Bits, format_of
from sdp4bit.quantization.hadamard import hadamard32
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit_lab import cli
from sdp4bit_lab.compare.paired import confidence_interval
from sdp4bit_lab.simulated.collectives import SimulatedReplica
from sdp4bit_lab.simulated.communication import SimulatedCommHandle

GROUP = 128
GRADIENT_BITS: tuple[Bits, ...] = (2, 3, 3.5, 4, 8)
WEIGHT_BITS: tuple[Bits, ...] = (2, 3, 4, 8)
DRIFT = {2: 0.396, 3: 0.056, 4: 0.056 * (7 / 15) ** 2, 8: 0.056 * (7 / 255) ** 2}
"""|main - replica|^2 over |update|^2 (experiments/below_one_byte), beyond 3 bits by the square of a level."""
LOSS_PER_GRADIENT_ERROR, LOSS_PER_DRIFT = 3.0, 0.19
"""Percent of the loss per unit (experiments/law, experiments/below_one_byte)."""
MODEL = [
    *("--simulated-ranks", "2", "--ranks-per-node", "1", "--vocab-size", "1024", "--num-layers", "4"),
    *("--hidden-size", "128", "--num-attention-heads", "4", "--param-dtype", "fp32", "--lr", "2e-3"),
]
LABEL = "sdp4bit:wq-group-size=128"

Budget = dict[tuple[str, str], Bits]
"""Bits by "weights" or "gradients" and the name of a matrix."""


@dataclass(frozen=True, kw_only=True)
class BudgetedSection(Section):
    """A matrix with bits of its own."""

    own_bits: Bits = 4

    def layout(self, numel: int, *, bits: Bits, group_size: int, parts: int = 1) -> MessageLayout:
        """See Section."""
        return super().layout(numel, bits=self.own_bits, group_size=group_size, parts=parts)


class BudgetedReplica(SimulatedReplica):
    """Clips differences as their own bits need it."""

    def quantize(self, row: Tensor, replica: Tensor, out: Tensor, *, section: Section = Section()) -> None:
        """See WeightReplica."""
        layout = self._layout_of(row.numel(), section)
        clip = 1.0 if section.is_fine else layout.format.clip
        ops.subtract_quantize(row, replica=replica, out=out, layout=layout, clip=clip)


@contextmanager
def budgeted(budget: Budget) -> Iterator[None]:
    """Give each matrix a section with the bits of the budget."""
    choose = SimulatedCommHandle._choose

    def choose_budgeted(self: Any, comm: Any, config: Any) -> None:
        choose(self, comm, config)
        names = [param.name for param in comm.view.rows.params]

        def sections(kind: str) -> tuple[Section, ...]:
            # No unit is so large, so that neighbours do not share a section.
            cut = comm.view.sections(unit=1 << 40, separate=True)
            return tuple(
                each
                if each.is_fine
                else BudgetedSection(
                    ranges=each.ranges,
                    number=each.number,
                    count=each.count,
                    own_bits=budget[kind, names[each.number]],
                )
                for each in cut
            )

        if comm.weights.replica is not None:
            comm.weights.replica._sections = sections("weights")
            comm.gradient_sections = sections("gradients")

    with (
        mock.patch.object(SimulatedCommHandle, "_choose", choose_budgeted),
        mock.patch("sdp4bit_lab.simulated.communication.SimulatedReplica", BudgetedReplica),
    ):
        yield


class Meter:
    """Mean squares per matrix: of values, and of the largest value of each group."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.numels: dict[str, int] = {}
        self._before: dict[str, Tensor] = {}
        self._steps = 0

    def _add(self, kind: str, name: str, values: Tensor, grouped: Tensor) -> None:
        grouped = nn.functional.pad(grouped, (0, -grouped.numel() % GROUP)).view(-1, GROUP)
        total = self.sums[kind, name]
        total[0] += float(values.square().mean())
        total[1] += float(grouped.abs().amax(1).square().mean())
        total[2] += 1

    def add_gradients(self, handle: Any, gradients: Mapping[str, Tensor]) -> None:
        self._steps += 1
        if self._steps % 5:
            return
        for name, gradient in gradients.items():
            if gradient.dim() > 1:
                self.numels[name] = gradient.numel()
                values = gradient.float().flatten()
                padded = nn.functional.pad(values, (0, -values.numel() % 32))
                # hadamard32 multiplies by the root of 32.
                self._add("gradients", name, values, hadamard32(padded) / 32**0.5)

    def add_update(self, handle: Any) -> None:
        for name, main in handle._main.items():
            if main.dim() > 1:
                before = self._before.get(name)
                if before is not None and self._steps > 20:
                    update = (main - before).flatten()
                    self._add("weights", name, update, update)
                self._before[name] = main.clone()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note what the handle gets."""
        add, mark = SimulatedCommHandle.add_gradients, SimulatedCommHandle.mark_step

        def add_gradients(handle: Any, gradients: Mapping[str, Tensor], *, rank: int) -> None:
            if rank == 0:
                self.add_gradients(handle, gradients)
            add(handle, gradients, rank=rank)

        def mark_step(handle: Any) -> None:
            mark(handle)
            self.add_update(handle)

        with (
            mock.patch.object(SimulatedCommHandle, "add_gradients", add_gradients),
            mock.patch.object(SimulatedCommHandle, "mark_step", mark_step),
        ):
            yield

    def result(self) -> dict[str, Any]:
        return {
            name: {
                "numel": numel,
                **{
                    kind: {
                        "square": self.sums[kind, name][0] / self.sums[kind, name][2],
                        "largest_square": self.sums[kind, name][1] / self.sums[kind, name][2],
                    }
                    for kind in ("gradients", "weights")
                },
            }
            for name, numel in self.numels.items()
        }


def costs(measured: Mapping[str, Any]) -> dict[tuple[str, str], dict[Bits, float]]:
    """Return the predicted percent of the loss that each matrix adds, by its bits."""
    found: dict[tuple[str, str], dict[Bits, float]] = {}
    for kind in ("gradients", "weights"):
        total = sum(each["numel"] * each[kind]["square"] for each in measured.values())
        for name, each in measured.items():
            share = each["numel"] / total
            if kind == "gradients":
                # A dithered level's error is level^2 / 12; one of two nodes' gradients is rounded, which is
                # half of the sum's squared error.
                top = each[kind]["largest_square"]
                found[kind, name] = {
                    bits: LOSS_PER_GRADIENT_ERROR * share * top / format_of(bits).largest ** 2 / 12 / 2
                    for bits in GRADIENT_BITS
                }
            else:
                found[kind, name] = {
                    bits: LOSS_PER_DRIFT * share * each[kind]["square"] * DRIFT[bits] for bits in WEIGHT_BITS
                }
    return found


def distribute(measured: Mapping[str, Any], nbits: float) -> Budget:
    """Raise, one after another, the bits that save most per bit, within `nbits` for all values."""
    cost = costs(measured)
    budget: Budget = dict.fromkeys(cost, 2)
    used = sum(2 * measured[name]["numel"] for _, name in budget)
    while True:
        best: tuple[float, Any, Bits, float] | None = None
        for key, bits in budget.items():
            for more in (each for each in cost[key] if each > bits):
                price = (more - bits) * measured[key[1]]["numel"]
                gain = (cost[key][bits] - cost[key][more]) / price
                if used + price <= nbits and (best is None or gain > best[0]):
                    best = gain, key, more, price
        if best is None:
            return budget
        budget[best[1]] = best[2]
        used += best[3]


def uniform(measured: Mapping[str, Any], weights: Bits, gradients: Bits) -> Budget:
    kinds = {"weights": weights, "gradients": gradients}
    return {(kind, name): bits for name in measured for kind, bits in kinds.items()}


def nbits_of(budget: Budget, measured: Mapping[str, Any]) -> float:
    return sum(bits * measured[name]["numel"] for (_, name), bits in budget.items())


def budgets(measured: Mapping[str, Any]) -> dict[str, Budget]:
    least = uniform(measured, 2, 3.5)
    return {"uniform": least, "distributed": distribute(measured, nbits_of(least, measured))}


def compare(out: Path, *, label: str, seeds: str, steps: int) -> None:
    options = ["--train-iters", str(steps), "--lr-warmup-iters", str(steps // 5), "--seeds", seeds]
    evaluation = ["--eval-interval", str(steps), "--eval-iters", "32"]
    chosen = ["--strategies", label, "--baseline", label, "--out", str(out)]
    code = cli.main(["compare", *chosen, *MODEL, *options, *evaluation])
    assert code == 0, code


def report(out: Path) -> None:
    """Print the costs, predicted and measured."""
    measured = json.loads((out / "measured.json").read_text())
    cost, values = costs(measured), sum(each["numel"] for each in measured.values())
    losses: dict[str, dict[int, float]] = {}
    for name in ("baseline", "uniform", "distributed"):
        for path in sorted(out.glob(f"{name}-*/summary.json")):
            for run in json.loads(path.read_text())["runs"]:
                losses.setdefault(name, {})[run["seed"]] = run["val_loss"]
    for name, budget in budgets(measured).items():
        predicted = sum(cost[key][bits] for key, bits in budget.items())
        nbytes = (nbits_of(budget, measured) / values + 2 * 16 / GROUP) / 8
        text = f"{name}: {nbytes:.3f} bytes, predicted {predicted:+.3f} %"
        seeds = sorted(losses.get(name, {}).keys() & losses.get("baseline", {}).keys())
        if len(seeds) > 1:
            percent = [100 * (losses[name][seed] / losses["baseline"][seed] - 1) for seed in seeds]
            low, high = confidence_interval(percent)
            text += f", measured {sum(percent) / len(percent):+.3f} % ({low:+.3f} to {high:+.3f}), {percent}"
        print(text)
    for key, bits in budgets(measured)["distributed"].items():
        print(*key, bits)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=("measure", "train", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--names", default="baseline,uniform,distributed")
    arguments = parser.parse_args()
    out = arguments.out
    if arguments.command == "measure":
        meter = Meter()
        with meter.reading():
            compare(out / "measurement", label=LABEL, seeds="11", steps=arguments.steps)
        (out / "measured.json").write_text(json.dumps(meter.result(), indent=1))
        return
    if arguments.command == "report":
        report(out)
        return
    every = budgets(json.loads((out / "measured.json").read_text()))
    for seed in arguments.seeds.split(","):
        for name in arguments.names.split(","):
            with ExitStack() as stack:
                if name != "baseline":
                    stack.enter_context(budgeted(every[name]))
                compare(
                    out / f"{name}-{seed}",
                    label="baseline" if name == "baseline" else LABEL,
                    seeds=seed,
                    steps=arguments.steps,
                )


if __name__ == "__main__":
    main()

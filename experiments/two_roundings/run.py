"""Train as HSDP and DDP do, whose ranks send each other rounded means of rounded gradients. One process.

    python -m experiments.two_roundings.run --predict
    python -m experiments.two_roundings.run --seeds 1,2,3,4,5,6,7,8 --out runs/two --simulated-ranks 4 \\
        --ranks-per-node 1 ...
    python -m experiments.two_roundings.run --report --out runs/two

trains as `sdp4bit pretrain` does with these options, on simulated ranks of several nodes. A rank's part of the
mean, which FSDP2 leaves there, is rounded once more on its way back to the others, in one of these ways:

* `once`: not at all. This is what an exchange of whole gradients between two nodes does, where each rank reads
  both messages, its own too;
* `b4`, `b5`, `b6`, `b8`: with so many bits, in groups of 128, dithered. `b4` is what the library has done;
* `g32`: with 4 bits in groups of 32, on both ways;
* `residue`: with 4 bits to nearest, of the mean and what the last message of this part left out.

The second rounding is written in torch here, for any number of bits; --predict compares its squared error with
the library's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sdp4bit.collectives.sections import whole_row
from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.common.ranks import join_ranks
from sdp4bit_lab.compare.paired import confidence_interval
from sdp4bit_lab.pretrain.trainer import pretrain
from sdp4bit_lab.simulated import collectives as simulated

BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a part of the mean is rounded on its way back."""

    bits: int | None = 4
    group_size: int = 128
    there_group_size: int = 128
    keeps_residue: bool = False


WAYS = {
    "once": Way(bits=None),
    "b4": Way(),
    "b5": Way(bits=5),
    "b6": Way(bits=6),
    "b8": Way(bits=8),
    "g32": Way(group_size=32, there_group_size=32),
    "residue": Way(keeps_residue=True),
}


def hadamard(values: Tensor) -> Tensor:
    """Transform the blocks of 32 along the last axis, orthonormally."""
    blocks = values.reshape(-1, BLOCK)
    h = 1
    while h < BLOCK:
        pairs = blocks.view(-1, BLOCK // (2 * h), 2, h)
        blocks = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        blocks = blocks.reshape(-1, BLOCK)
        h *= 2
    return blocks.div(BLOCK**0.5).view_as(values)


def rounded(values: Tensor, *, bits: int, group_size: int, is_dithered: bool, random: torch.Generator) -> Tensor:
    """Return values [n] as they arrive in symmetric codes of these bits."""
    padding = -values.numel() % group_size
    groups = hadamard(torch.nn.functional.pad(values, (0, padding)).view(-1, group_size))
    scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = scale.mul(1 + 2**-8).bfloat16().float()  # rounded up on average, as the library's
    units = groups / scale.clamp(min=1e-30)
    if is_dithered:
        dither = torch.rand(groups.shape, generator=random)
        units = torch.floor(units + dither) + 0.5 - dither
    else:
        units = units.round()
    return hadamard(units * scale).view(-1)[: values.numel()]


class RoundedAgain(simulated.SimulatedReduceScatter):
    """Hands on every rank's row as the others receive it."""

    way: Way

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._residues: dict[tuple[int, int], Tensor] = {}
        self._random = torch.Generator().manual_seed(options["seed"] * 1000 + options["bucket"])
        self._sections: Any = ()

    def add(self, rows: Tensor, **options: Any) -> None:
        self._sections = options.get("sections") or whole_row(rows.shape[1])
        super().add(rows, **options)

    def finish(self, take: Any) -> None:
        def take_rounded(rank: int, row: Tensor) -> None:
            for number, section in enumerate(self._sections):
                values = section.take(row).clone()
                key = rank, number
                if self.way.keeps_residue:
                    values += self._residues.get(key, 0)
                received = rounded(
                    values,
                    bits=section.bits(self.way.bits),
                    group_size=min(self.way.group_size, 32) if section.is_fine else self.way.group_size,
                    is_dithered=not self.way.keeps_residue,
                    random=self._random,
                )
                if self.way.keeps_residue:
                    self._residues[key] = values - received
                section.take(row).copy_(received)  # a view of the row, if it is one range
                section.put(received, row)
            take(rank, row)

        super().finish(take_rounded if self.way.bits else take)


def predict() -> None:
    """Print squared errors of means of normal gradients over N ranks, in units of one rounding's."""
    random = torch.Generator().manual_seed(0)
    own = [torch.randn(2**20, generator=random) for _ in range(8)]

    def error(way: Way, *, ranks: int, first: bool = True) -> float:
        settings = {"is_dithered": True, "random": random}
        mean = sum(own[:ranks]) / ranks
        sent = mean
        if first:
            there = [rounded(g, bits=4, group_size=way.there_group_size, **settings) for g in own[:ranks]]
            sent = sum(there) / ranks
        if way.bits is not None:
            sent = rounded(sent, bits=way.bits, group_size=way.group_size, **settings)
        return float((sent - mean).square().sum() / mean.square().sum())

    one = error(WAYS["once"], ranks=4)
    print(f"one rounding with 4 bits: {one:.4f} (the library's, of the same kind of values: 0.0139)")
    for name, way in WAYS.items():
        if not way.keeps_residue:
            scale_bits = 16 / way.there_group_size + 16 / way.group_size
            sent = (4 + (way.bits or 4) + scale_bits) / (8 + 32 / 128)
            print(f"{name}: {error(way, ranks=4) / one:.2f} of it; bytes {sent:.3f}")


def report(out: Path) -> None:
    """Print what each way costs in loss, seed by seed, over the baseline and over one rounding."""
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted(out.glob("*-seed*/losses.json")):
        name, _, seed = path.parent.name.rpartition("-seed")
        losses.setdefault(name, {})[int(seed)] = json.loads(path.read_text())
    print("| way | over | seeds | validation | training |\n| --- | --- | --- | --- | --- |")
    for other in ("baseline", "once"):
        for name, by_seed in losses.items():
            shared = sorted(by_seed.keys() & losses[other].keys())
            if name == other or len(shared) < 2:
                continue
            cells = []
            for kind in ("validation", "training"):
                pairs = [(by_seed[seed][kind], losses[other][seed][kind]) for seed in shared]
                percent = [100 * (mine / reference - 1) for mine, reference in pairs]
                low, high = confidence_interval(percent)
                cells.append(f"{sum(percent) / len(percent):+.3f} % ({low:+.3f} to {high:+.3f})")
            print(f"| {name} | {other} | {len(shared)} | {' | '.join(cells)} |")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--seeds", default="1", help="numbers with commas between")
    parser.add_argument("--ways", nargs="+", choices=("baseline", *WAYS), default=["baseline", *WAYS])
    parser.add_argument("--out", type=Path, default=Path("runs/two"))
    arguments, options = parser.parse_known_args()
    if arguments.predict or arguments.report:
        predict() if arguments.predict else report(arguments.out)
        return 0
    with join_ranks() as ranks:
        for seed in map(int, arguments.seeds.split(",")):
            for name in arguments.ways:
                folder = arguments.out / f"{name}-seed{seed}"
                if (folder / "losses.json").exists():
                    continue
                strategy = ["--strategy", "baseline"]
                if name != "baseline":
                    strategy = ["--strategy", "tlq-hs", "--gradient-rounding-inter", "dither"]
                    strategy += ["--gq-group-size-inter", str(WAYS[name].there_group_size)]
                config = COMMANDS["pretrain"].parse(
                    [*options, *strategy, "--seed", str(seed), "--out", str(folder)]
                )
                config = replace(config, logging=replace(config.logging, tensorboard=False))
                kind = simulated.SimulatedReduceScatter
                if name != "baseline":
                    kind = type(name, (RoundedAgain,), {"way": WAYS[name]})
                with mock.patch("sdp4bit_lab.simulated.communication.SimulatedReduceScatter", kind):
                    result = pretrain(config, ranks=ranks, label=name)
                losses = {"validation": result.validation[-1][1], "training": result.train_loss}
                (folder / "losses.json").write_text(json.dumps(losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())

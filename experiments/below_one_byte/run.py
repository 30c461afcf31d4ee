"""Send weight differences in 4, 5 or 6 levels, which take from 2 to 2.7 bits. One process.

    python -m experiments.below_one_byte.run --predict
    python -m experiments.below_one_byte.run --way five-g64 --seeds 1 --out runs/below/five-g64-1 ...
    python -m experiments.below_one_byte.run --report runs/below

The second command runs `sdp4bit compare` with these options for the strategy `sdp4bit`, on simulated ranks
whose weight replica receives the differences of a way. Levels are a step apart: odd numbers of them include
zero, even ones are at +-1/2, +-3/2 and so on. Larger values take the outermost level, and the next difference
makes up for them. The rounding is written in torch here; --predict trains a small transformer and compares
the drift of its replicas with that of the library's widths, which are 3, 7 and 15 levels.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.kernels.cpu import backend
from sdp4bit_lab import cli
from sdp4bit_lab.compare.paired import confidence_interval
from sdp4bit_lab.simulated.collectives import SimulatedReplica

GROUP = 128
LOSS_PER_GRADIENT_ERROR = 3.0
LOSS_PER_DRIFT = 0.072 / (0.396 - 0.021)
"""Percent of the loss: experiments/law; and 2-bit differences, which cost 0.072 % more than 4-bit ones."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How weight differences are rounded, and in which groups gradients travel between nodes."""

    levels: int
    bits: float
    """Per value, packed: five levels as 3 values in 7 bits."""
    step: float
    """Part of a group's largest magnitude."""
    gradient_group_size: int = 128

    @property
    def bytes_per_parameter(self) -> float:
        """Between nodes, of gradients and weights, with their scales."""
        return (4 + 16 / self.gradient_group_size + self.bits + 16 / GROUP) / 8


WAYS = {
    "four-g128": Way(levels=4, bits=2, step=0.46),
    "four-g32": Way(levels=4, bits=2, step=0.46, gradient_group_size=32),
    "five-g128": Way(levels=5, bits=7 / 3, step=0.40),
    "five-g64": Way(levels=5, bits=7 / 3, step=0.40, gradient_group_size=64),
}


def rounded(values: Tensor, *, levels: int, step: float, group_size: int = GROUP) -> Tensor:
    """Return values [..., n] as they arrive, fp32."""
    numel = values.shape[-1]
    groups = nn.functional.pad(values, (0, -numel % group_size)).unflatten(-1, (-1, group_size))
    scale = (groups.abs().amax(-1, keepdim=True) * step).bfloat16().float()
    units = groups / scale.clamp(min=2.0**-100)
    top = (levels - 1) / 2
    units = units.round() if levels % 2 else units.floor() + 0.5
    return (units.clamp(-top, top) * scale).flatten(-2)[..., :numel]


class LevelsReplica(SimulatedReplica):
    """Follows the main weights by differences in these levels; as in the library where it sends 8 bits."""

    way: Way

    def refresh(self, rows: Tensor, held: Tensor, *, sections: tuple[Section, ...] = ()) -> None:
        """See SimulatedReplica. Counts 2 bits of a value, whatever the way."""
        chosen = sections or whole_row(rows.shape[1])
        for section in chosen:
            main, replica = section.take(rows), section.take(held)
            if section.is_fine:
                layout = self._layout_of(section.numel, section)
                messages = torch.empty(len(main), layout.nbytes, dtype=torch.uint8)
                for rank, message in enumerate(messages):
                    self.quantize(main[rank], replica[rank], message, section=section)
                self.apply(messages, replica, section=section)
            else:
                way, held_here = self.way, replica.float()
                replica.copy_(held_here + rounded(main.float() - held_here, levels=way.levels, step=way.step))
            section.put(replica, held)
        layout = self._topology.layout
        self._traffic.count_messages(self.message_layout(chosen), level="inter", peers=layout.nodes - 1)


class AlternatingReplica(SimulatedReplica):
    """Sends differences of 3 and of 2 bits in turn: 2.5 on average, and 3 bits make up for what 2 left out."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        wide = replace(options["config"], bits=3)
        self._wide, self._is_wide = SimulatedReplica(*arguments, **{**options, "config": wide}), False

    def refresh(self, rows: Tensor, held: Tensor, *, sections: tuple[Section, ...] = ()) -> None:
        """See SimulatedReplica."""
        self._is_wide = not self._is_wide
        if self._is_wide:
            self._wide.refresh(rows, held, sections=sections)
        else:
            super().refresh(rows, held, sections=sections)


def _step_of_eleven_levels(layout: Any, clip: float = 1.0) -> int:
    """Return what the CPU kernels' _step does, with codes from -5 to 5 in place of 4 bits."""
    largest = 5 if layout.bits == 4 else 2 ** (layout.bits - 1) - 1
    return backend._float_bits(clip / largest)


def _weights(seed: int, steps: int) -> Any:
    """Train a small transformer on the bytes of the standard library, and yield its weights [n] each step."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data, length, hidden = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), 128, 192
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    tokens, places, out = nn.Embedding(2048, hidden), nn.Embedding(length, hidden), nn.Linear(hidden, 256)
    model = nn.ModuleList([tokens, places, blocks, out])
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    for parameter in matrices:
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, betas=(0.9, 0.95))
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    for step in range(steps + 1):
        yield torch.cat([parameter.detach().flatten() for parameter in matrices])
        starts = torch.randint(0, len(data) - length - 1, (8,)).tolist()
        rows = torch.stack([data[start : start + length + 1] for start in starts])
        states = blocks(tokens(rows[:, :-1]) + places(torch.arange(length)), mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(out(states).flatten(0, 1), rows[:, 1:].flatten())
        rate = min((step + 1) / 25, 0.55 + 0.45 * math.cos(math.pi * (step + 1) / steps))
        optimizer.param_groups[0]["lr"] = 1e-3 * rate
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def predict(steps: int = 100) -> None:
    """Print |main - replica|^2, less that of a bf16 copy, over |update|^2 of a step; and the cost in loss."""
    tried = {
        **{f"{levels} levels, step {step:g}": (levels, step, GROUP) for levels, steps in (
            (3, (0.6,)), (4, (0.30, 0.36, 0.42, 0.46, 0.50, 0.60)), (5, (0.26, 0.30, 0.35, 0.40, 0.45)),
            (6, (0.26, 0.32)), (7, (0.24, 0.28, 1 / 3)),
        ) for step in steps},
        "4 levels, step 0.46, groups of 64": (4, 0.46, 64),
        "15 levels, groups of 2048": (15, 1 / 7, 2048),
    }  # fmt: skip
    held: dict[str, Tensor] = {}
    excess, updates, previous = dict.fromkeys(tried, 0.0), 0.0, None
    for number, main in enumerate(_weights(0, steps)):
        late = number > 20
        cast = float((main - main.bfloat16()).square().sum())
        if late:
            updates += float((main - previous).square().sum())
        previous = main
        for name, (levels, step, group_size) in tried.items():
            replica = held.setdefault(name, main.bfloat16()).float()
            difference = rounded(main - replica, levels=levels, step=step, group_size=group_size)
            held[name] = (replica + difference).bfloat16()
            if late:
                excess[name] += float((main - held[name]).square().sum()) - cast
    for name, total in excess.items():
        print(f"{name}: {total / updates:.4f}")
    normal = torch.randn(2**21, generator=torch.Generator().manual_seed(0))
    for name, way in WAYS.items():
        drift = excess[f"{way.levels} levels, step {way.step:g}"] / updates
        # 4 dithered bits of normal values, of one of two nodes.
        scale = (normal.view(-1, way.gradient_group_size).abs().amax(1) / 7).mul(1 + 2**-8)
        error = float(scale.square().mean() / 12)
        cost = LOSS_PER_GRADIENT_ERROR * error / 2 + LOSS_PER_DRIFT * drift
        print(
            f"{name}: gradient error {error:.4f}, {way.bytes_per_parameter:.3f} bytes, {cost:+.3f} % of the loss"
        )


def report(folder: Path) -> None:
    """Print what each way costs in loss over the baseline, from the results of its runs."""
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted(folder.glob("*/summary.json")):
        way = path.parent.name.rpartition("-")[0]
        for run in json.loads(path.read_text())["runs"]:
            losses.setdefault(way, {})[run["seed"]] = run
    print("| way | seeds | validation | training |\n| --- | --- | --- | --- |")
    for name, by_seed in losses.items():
        shared = sorted(by_seed.keys() & losses["baseline"].keys())
        if name == "baseline" or len(shared) < 2:
            continue
        cells = []
        for kind in ("val_loss", "train_loss"):
            pairs = [(by_seed[seed][kind], losses["baseline"][seed][kind]) for seed in shared]
            percent = [100 * (mine / reference - 1) for mine, reference in pairs]
            low, high = confidence_interval(percent)
            cells.append(f"{sum(percent) / len(percent):+.3f} % ({low:+.3f} to {high:+.3f})")
        print(f"| {name} | {len(shared)} | {' | '.join(cells)} |")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--report", type=Path, help="folder of the runs' folders, named WAY-SEED")
    parser.add_argument("--way", choices=(*WAYS, "alternate", "eleven"))
    arguments, options = parser.parse_known_args()
    if arguments.predict:
        predict()
    elif arguments.report:
        report(arguments.report)
    else:
        way = WAYS.get(arguments.way, Way(levels=3, bits=2.5, step=0.6))
        label = "sdp4bit:weight-quantization-bits=2:wq-group-size=128"
        if way.gradient_group_size != 128:
            label += f":gq-group-size-inter={way.gradient_group_size}"
        kind = type(arguments.way, (LevelsReplica,), {"way": way})
        if arguments.way == "alternate":
            kind = AlternatingReplica
        where = "sdp4bit_lab.simulated.communication.SimulatedReplica"
        if arguments.way == "eleven":
            # Gradients between nodes in 11 levels, two values in 7 bits; weights in 3 bits.
            label = "sdp4bit:weight-quantization-bits=3:wq-group-size=128"
            where, kind = "sdp4bit.kernels.cpu.backend._step", _step_of_eleven_levels
        with mock.patch(where, kind):
            return cli.main(["compare", "--strategies", label, "--baseline", label, *options])
    return 0


if __name__ == "__main__":
    sys.exit(main())

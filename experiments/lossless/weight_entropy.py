"""Measure what lossless weights cost: entropy of the change of the 16-bit weights, and bits that are sent.

    python -m benchmarks.weight_entropy --out runs/entropy --strategy baseline --train-iters 240 --lr 3e-4 \\
        --min-lr 1e-5 --lr-decay-iters 160 --simulated-ranks 2 --ranks-per-node 1

trains as `sdp4bit pretrain` does with these options, on simulated ranks, and looks at every step (`--every`)
at the weights in bf16 before and after it, each parameter group of each rank as one row, as it would be sent:

* entropy: of the change in units of the last place given the old exponent, over all weights alike, in bits
  per weight; and the share of weights that have not changed;
* sent: bits per weight of the lossless messages, headers, tables' offsets and coders' states included; and
  with the capacity that ranks agree on, which the wire sees, a second message for what has no room included;
* bits of 4-bit differences in groups of 2048 with their scales, for comparison.

One line per step goes to entropy.jsonl, the means over parts of the run to the terminal and table.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdp4bit.collectives.capacity import Capacity, room_for
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import message_layout
from sdp4bit.quantization.lossless import read_header
from sdp4bit.quantization.lossless_layout import largest_message, message_parts
from sdp4bit.quantization.lossless_reference import exponents, ordered
from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.ranks import Ranks, join_ranks
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.step.simulated_model import SimulatedModel
from sdp4bit_lab.pretrain.trainer import build_run
from sdp4bit_lab.simulated.rows import RowLayout

_MANTISSA_BITS = 7

Rows = list[Tensor]
"""[ranks, n] of each parameter group, bf16."""


def entropy(before: Tensor, after: Tensor) -> float:
    """Return the entropy of the change given the old exponent, in bits of all values [n] together."""
    old, new = (row.view(torch.int16).long() & 0xFFFF for row in (before, after))
    kind = exponents(old, mantissa_bits=_MANTISSA_BITS)
    change = ordered(new) - ordered(old)
    pairs, counts = ((kind << 18) + change + (1 << 17)).unique(return_counts=True)
    _, group = (pairs >> 18).unique(return_inverse=True)
    totals = torch.zeros(int(group.max()) + 1, dtype=torch.long).index_add_(0, group, counts)
    return float(-(counts * (counts / totals[group]).log2()).sum())


class EntropyRecorder:
    """Keeps the weights of before a step, and measures how the step has changed them."""

    def __init__(self, model: SimulatedModel) -> None:
        self._layouts: list[RowLayout] = model.communication.row_layouts
        self._main = {name: parameter.detach() for name, parameter in model.chunks[0].named_parameters()}
        self._capacities = [Capacity() for _ in self._layouts]
        self._before: Rows = []

    def _rows(self) -> Rows:
        rows = []
        for layout in self._layouts:
            held = torch.empty(layout.ranks, layout.numel)
            layout.write_rows(self._main, held)
            rows.append(held.bfloat16())
        return rows

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep the weights."""
        self._before = self._rows()

    @torch.no_grad()
    def after_step(self) -> dict[str, float]:
        """Return what the step has cost, in bits per weight, and the share of weights without a change."""
        after = self._rows()
        values = sum(rows.numel() for rows in after)
        flat = [torch.cat([rows.flatten() for rows in each]) for each in (self._before, after)]
        unchanged = int((flat[0].view(torch.int16) == flat[1].view(torch.int16)).sum())
        used = capacity = differences = 0
        for agreed, old, new in zip(self._capacities, self._before, after, strict=True):
            ranks, numel = new.shape
            needed = [_message_bytes(row, held) for row, held in zip(new, old, strict=True)]
            used += sum(needed)
            room = agreed.nbytes(numel)
            rest = max(max(needed) - room, 0)
            capacity += ranks * (room + (room_for(message_parts(numel) + rest, numel=numel) if rest else 0))
            agreed.note(needed, numel=numel)
            differences += ranks * message_layout(numel=numel, bits=4, group_size=2048).nbytes
        return {
            "entropy": entropy(*flat) / values,
            "unchanged": unchanged / values,
            "sent": 8 * used / values,
            "sent with capacity": 8 * capacity / values,
            "4-bit differences": 8 * differences / values,
        }


def _message_bytes(new: Tensor, held: Tensor) -> int:
    message = torch.empty(largest_message(new.numel()), dtype=torch.uint8)
    ops.encode_change(new, held=held, out=message)
    return read_header(message).used


def train_and_measure(config: PretrainConfig, *, ranks: Ranks, every: int, parts: int = 4) -> None:
    """Train the run; write the measures of every so many steps, and their table, into its folder."""
    require(
        config.parallel.simulated_ranks is not None,
        "the weights of real ranks are not in one process: give --simulated-ranks and --ranks-per-node",
    )
    require(every >= 1, f"--every {every} must be at least 1")
    out = config.logging.out
    run = build_run(config, ranks=ranks, label=config.strategy_name)
    assert isinstance(run.loop.model, SimulatedModel)
    recorder = EntropyRecorder(run.loop.model)
    out.mkdir(parents=True, exist_ok=True)
    records = []
    steps = run.loop.steps()
    with (out / "entropy.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(1, config.training.steps + 1):
            is_due = number % every == 0 or number == 1
            if is_due:
                recorder.before_step()
            metrics = next(steps)
            if is_due:
                measured = recorder.after_step()
                record = {"step": metrics.step, "lr": metrics.lr, "loss": metrics.loss, **measured}
                records.append(record)
                lines.write(json.dumps(record) + "\n")
                lines.flush()
    text = table(records, parts=parts)
    write_atomically(out / "table.md", text)
    print(text, end="")


COLUMNS = ("entropy", "unchanged", "sent", "sent with capacity", "4-bit differences")


def table(records: Sequence[Mapping[str, Any]], *, parts: int) -> str:
    """Return the means over equal parts of the run, and over all of it, as Markdown.

    The first step is a row of its own: Adam moves all weights by the same amount then.
    """
    lines = [("steps", "learning rate", *COLUMNS), ("---",) * (2 + len(COLUMNS))]
    first, *rest = records
    cuts = [len(rest) * part // parts for part in range(parts + 1)]
    groups = [rest[start:end] for start, end in itertools.pairwise(cuts) if start < end]
    for group in ([first], *groups, rest):
        if not group:
            continue
        rates = [record["lr"] for record in group]
        names = dict.fromkeys(f"{value:.2g}" for value in (rates[0], rates[-1]))
        span = dict.fromkeys(str(record["step"]) for record in (group[0], group[-1]))
        means = [statistics.fmean(record[column] for record in group) for column in COLUMNS]
        lines.append((" to ".join(span), " to ".join(names), *(f"{mean:.3f}" for mean in means)))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--parts", type=int, default=4, help="parts of the run in the table")
    arguments, options = parser.parse_known_args()
    try:
        require(arguments.parts >= 1, f"--parts {arguments.parts} must be at least 1")
        config = COMMANDS["pretrain"].parse(options)
        with join_ranks() as ranks:
            train_and_measure(config, ranks=ranks, every=arguments.every, parts=arguments.parts)
        return 0
    except SettingError as error:
        print(f"benchmarks.weight_entropy: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Say which training recipes are stable: a table of runs by learning rate, warm-up, batch and dtype.

    for rate in 5e-4 1e-3 2e-3; do for warmup in 15 40 60; do
        sdp4bit pretrain --strategy baseline --lr $rate --lr-warmup-iters $warmup --train-iters 150 \\
            --nproc-per-node 1 --micro-batch-size 16 --eval-iters 16 --compute-dtype bf16 \\
            --seed 1 --out runs/recipe/$rate-$warmup-1
    done; done
    python -m experiments.recipe.run runs/recipe

A run is stable if no gradient norm after the warm-up is above four times their median. Beside it are all
spikes by the rule of `sdp4bit_lab.pretrain.stability`, those while the learning rate still rises included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.report.runs import Run, find_runs

_SETTINGS = (
    *(("learning rate", ("optimizer", "learning_rate")), ("warm-up", ("optimizer", "warmup_steps"))),
    *(("steps", ("training", "steps")), ("compute dtype", ("training", "compute_dtype"))),
)


def largest_ratio(run: Run) -> float:
    """Return the largest gradient norm after the peak of the learning rate over the median of those norms."""
    peak = int(np.argmax(run.column("lr")))
    norms = run.column("grad_norm")[peak + 1 :]
    return float(norms.max() / np.median(norms)) if len(norms) else 0.0


def table(runs: Sequence[Run]) -> str:
    """Return one row per recipe, over its seeds, as Markdown; the lowest loss comes last."""
    recipes = defaultdict(list)
    for run in runs:
        sequences = next(iter(run.train.values())).get("samples")
        recipes[(*(run.setting(*path) for _, path in _SETTINGS), sequences)].append(run)
    titles = (*(name for name, _ in _SETTINGS), "sequences per step", "seeds")
    titles += ("largest norm / median", "spikes at all", "validation loss")
    rows = []
    for recipe, mine in recipes.items():
        losses = [run.validation_losses()[-1] for run in mine if run.validation]
        cells = (
            *(
                "card's" if value is None else f"{value:g}" if value != str(value) else value
                for value in recipe
            ),
            *(len(mine), f"{max(map(largest_ratio, mine)):.1f}", sum(len(run.spikes()) for run in mine)),
            f"{statistics.fmean(losses):.4f}" if losses else "-",
        )
        rows.append((statistics.fmean(losses) if losses else 0.0, cells))
    lines = [titles, ("---",) * len(titles), *(cells for _, cells in sorted(rows, key=lambda row: -row[0]))]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or one that holds several")
    try:
        print(table(find_runs(parser.parse_args().runs)), end="")
    except SettingError as error:
        print(f"experiments.recipe.run: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

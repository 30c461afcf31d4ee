"""Train the 125M preset with several strategies on one GPU, on simulated ranks, in pieces that continue.

    python -m benchmarks.gpu_text build/text
    python -m benchmarks.gpu_training training.json --runs runs/h100 --text build/text --seconds 540

All strategies have the same initial weights, batches and schedule. The strategy with the fewest steps goes
first, so that losses can be compared at equal tokens whenever the time ends. The same command then continues
from the checkpoints in --runs, bit for bit. Differences are those of equal validation batches; their 95 %
interval is of the mean over the batches, and so holds for this text and this seed.

The exit code is 75 if a later call has to continue, and 77 without the text.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_text import TOKENIZER, TOKENS
from benchmarks.kernels import describe_machine
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.compare.paired import confidence_interval, interval_text

UNFINISHED, SKIPPED = 75, 77
"""Exit codes: the same command continues; this machine cannot run it."""
STRATEGIES = ("baseline", "sdp4bit", "sdp4bit-paper", "qw")
"""The baseline, this library's default, the paper's method, and weights without differences (Table 1)."""
RANKS, RANKS_PER_NODE = 4, 2
PIECE_SECONDS = 540.0
START_SECONDS = 45.0
"""For imports, compilation and the checkpoint of a piece."""


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run; none before its start."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(folder: Path) -> int:
    """Return the number of steps that a run has finished."""
    return max((event["step"] for event in events(folder) if event["event"] == "train"), default=0)


def summarize(runs: Mapping[str, Path]) -> dict[str, Any]:
    """Return the losses of all runs, and the differences from the first one at equal steps."""
    found: dict[str, Any] = {}
    validations: dict[str, dict[int, dict[str, Any]]] = {}
    for name, folder in runs.items():
        of = events(folder)
        trained = [event for event in of if event["event"] == "train"]
        validations[name] = {event["step"]: event for event in of if event["event"] == "validation"}
        found[name] = {
            "steps": steps_of(folder),
            "tokens": round(sum(each["tokens_per_second"] * each["step_seconds"] for each in trained)),
            "seconds": sum(each["step_seconds"] for each in trained),
            "validation": [[step, event["loss"]] for step, event in validations[name].items()],
        }
    baseline, *others = runs
    common = set.intersection(*(set(of) for of in validations.values()))
    rows = []
    for step in sorted(common):
        reference = validations[baseline][step]
        for name in others:
            pairs = zip(validations[name][step]["batch_losses"], reference["batch_losses"], strict=True)
            percent = [100 * (loss / before - 1) for loss, before in pairs]
            rows.append(
                {
                    "strategy": name,
                    "step": step,
                    "baseline": reference["loss"],
                    "percent": statistics.fmean(percent),
                    "interval": confidence_interval(percent),
                    "batches": len(percent),
                }
            )
    return {"runs": found, "differences": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_training", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, help="file to write after each piece")
    parser.add_argument("--runs", type=Path, required=True, help="folder of checkpoints and losses")
    parser.add_argument("--text", type=Path, help="folder of benchmarks.gpu_text; default: Python's library")
    parser.add_argument("--seconds", type=float, default=PIECE_SECONDS, help="for this call")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--piece", type=int, default=500, help="steps of a strategy before the next one")
    parser.add_argument("--eval-interval", type=int, default=100)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="the first is the baseline")
    parser.add_argument("--options", nargs=argparse.REMAINDER, help="of `sdp4bit pretrain`; all that follows")
    chosen = parser.parse_args(arguments)
    options = chosen.options or ["--preset", "125M", "--eval-iters", "8", "--lr-warmup-iters", "100"]
    if chosen.text is not None:
        if not (chosen.text / f"{TOKENS}.bin").exists():
            how = f"python -m benchmarks.gpu_text {chosen.text}"
            print(f"skipped: no text in {chosen.text}; make it with `{how}`")
            return SKIPPED
        options += [
            "--data-path",
            str(chosen.text / TOKENS),
            "--tokenizer-model",
            str(chosen.text / TOKENIZER),
        ]
    begin = time.monotonic()
    runs = {name: chosen.runs / name for name in chosen.strategies.split(",")}
    while (name := min(runs, key=lambda each: steps_of(runs[each]))) and steps_of(runs[name]) < chosen.steps:
        left = chosen.seconds - (time.monotonic() - begin)
        minutes = (min(left, PIECE_SECONDS) - START_SECONDS) / 60
        if minutes <= 0:
            break
        command = [
            *(sys.executable, "-m", "sdp4bit_lab", "pretrain", "--strategy", name, "--seed", "1", *options),
            *("--simulated-ranks", str(RANKS), "--ranks-per-node", str(RANKS_PER_NODE)),
            *("--train-iters", str(chosen.steps), "--eval-interval", str(chosen.eval_interval)),
            *("--exit-interval", str(chosen.piece), "--exit-duration-in-mins", f"{minutes:.2f}"),
            *("--out", str(runs[name]), "--save", str(runs[name] / "checkpoints"), "--keep-last", "1"),
            *("--save-interval", str(chosen.steps), "--auto-resume", "--log-interval", "50"),
        ]
        before = steps_of(runs[name])
        done = subprocess.run(command, check=False)
        if done.returncode or steps_of(runs[name]) == before:
            print(f"{name} ended with exit code {done.returncode} after step {steps_of(runs[name])}")
            return done.returncode or 1
        given = sys.argv[1:] if arguments is None else arguments
        machine = describe_machine()
        machine["command"] = shlex.join(["python", "-m", "benchmarks.gpu_training", *given])
        content = {"machine": machine, "options": options, **summarize(runs)}
        write_atomically(chosen.json, json.dumps(content, indent=1) + "\n")
    for row in summarize(runs)["differences"]:
        about = f"step {row['step']}: {row['strategy']} {row['percent']:+.2f} %"
        print(f"{about}, {interval_text(row['interval'], digits=2, unit=' %')} ({row['batches']} batches)")
    return 0 if min(map(steps_of, runs.values())) >= chosen.steps else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())

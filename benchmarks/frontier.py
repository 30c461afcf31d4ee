"""Train with every method that people choose between, and join validation losses and seconds of slow links.

    python -m benchmarks.frontier --json results/frontier.json
    python -m benchmarks.frontier --hidden 32 --layers 1 --steps 20 --seeds 1,2 --out /tmp/rehearsal

1. Seconds: `benchmarks.cluster` times every strategy at every rate of the link. It needs root and iproute2.
2. Losses: two gloo processes, as two nodes of one rank, train the same strategies and shapes on the sources
   of Python's standard library. With the first seed every method tries each learning rate of the grid, and
   half or twice that if its best one is the lowest or the highest. The best one, by validation loss, trains
   the other seeds.
3. Both go into one file. OUT/report.md and its figure join them by steps.

Every finished run is a line of OUT/runs.jsonl, and every rate a file OUT/seconds-RATE.json. A second start of
the same command continues after them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks import cluster, cluster_report
from benchmarks.cluster_strategies import Cluster, Workload, build_model, read_tokens
from benchmarks.cluster_studies import BUILDERS
from benchmarks.frontier_tables import (
    COMPUTE,
    METHODS,
    best_rate,
    frontier_seconds,
    rates_tried,
    write_report,
)
from benchmarks.memory_use import PeakMode, bytes_in_use
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.pretrain.data.corpus import split_corpus
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer
from sdp4bit_lab.pretrain.model.gpt import GPT

NODES = Cluster(nodes=2, ranks_per_node=1)
HELD_OUT = 0.02
"""Fraction of the text that no rank trains on."""
CHUNK = 16
"""Sequences of one forward pass of the validation."""
WARM_UP = 0.1
"""Fraction of the steps in which the learning rate rises."""
CLIP = 1.0
"""Largest norm of all gradients. Without it, FSDP2 and DDP end far apart with the same rate and seed
(results/frontier-clipping.json)."""
MOST_BEYOND = 3
"""Learning rates that a method tries beyond the grid."""
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    strategy: str
    seed: int
    learning_rate: float


def write_tokens(path: Path, *, vocabulary: int) -> None:
    """Write the default corpus as tokens of a vocabulary that is learned from its training part."""
    documents = list(split_corpus([], validation_fraction=HELD_OUT).read())
    seen = [text for text, is_held_out in documents if not is_held_out]
    tokenizer = BytePairTokenizer.train(seen, vocabulary_size=vocabulary)
    tokens: dict[str, list[int]] = {"train": [], "held_out": []}
    encoded = tokenizer.encode_documents([text for text, _ in documents])
    for document, (_, is_held_out) in zip(encoded, documents, strict=True):
        tokens["held_out" if is_held_out else "train"] += document
    partial = path.with_suffix(".partial")
    torch.save({part: torch.tensor(values) for part, values in tokens.items()}, partial)
    partial.rename(path)


# -- losses ----------------------------------------------------------------------------------------------


def train(strategy: str, workload: Workload, *, evaluate_every: int, sequences: int) -> dict[str, Any]:
    """Train one run as one of the ranks; return its losses and this rank's memory.

    Args:
        sequences: sequences of the validation.
    """
    assert workload.decay_steps is not None
    build_model(workload)  # Keeps the initial weights, which are not memory of a strategy.
    gc.collect()
    before = bytes_in_use()
    step = BUILDERS[strategy](workload, NODES)
    losses: list[tuple[int, float | None]] = []
    while step.steps < workload.decay_steps - 1:
        step.load()
        step()
        if step.steps % evaluate_every == 0:
            losses.append((step.steps, evaluate(step, workload, sequences=sequences)))
    step.load()
    start = bytes_in_use()
    with PeakMode() as memory:
        step()
        step.finish()
    losses.append((step.steps, evaluate(step, workload, sequences=sequences)))
    return {"losses": losses, "peak_bytes": start - before + memory.growth}


def evaluate(step: Any, workload: Workload, *, sequences: int) -> float | None:
    """Return the mean loss of all ranks, each on its part of the held-out text; None if it is not finite."""
    length = workload.sequence_length
    rows = read_tokens(str(workload.text))["held_out"].unfold(0, length + 1, length)[:sequences]
    ranks = dist.get_world_size()
    rows = rows[dist.get_rank() :: ranks][: len(rows) // ranks]
    total = torch.zeros(1)
    for chunk in rows.split(CHUNK):
        total += step.evaluate(chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()).float()
    dist.all_reduce(total)
    loss = total.item() / (ranks * len(rows) * length)
    return loss if math.isfinite(loss) else None


def train_all(
    rank: int, store: str, runs: Sequence[Run], workload: Workload, options: dict[str, int], log: Path
) -> None:
    """Train runs as one rank; the first rank appends them to the log."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NODES.ranks, timeout=COLLECTIVE_TIMEOUT
    )
    for run in runs:
        start = time.perf_counter()
        chosen = replace(workload, seed=run.seed, learning_rate=run.learning_rate)
        result = asdict(run) | train(run.strategy, chosen, **options)
        if rank == 0:
            with log.open("a") as file:
                file.write(json.dumps(result) + "\n")
            shown = f"{run.strategy}, seed {run.seed}, rate {run.learning_rate:g}"
            print(f"{shown}: {result['losses'][-1][1]}, {time.perf_counter() - start:.0f} s", flush=True)
    dist.destroy_process_group()


def read_runs(log: Path) -> list[dict[str, Any]]:
    """Return the finished runs; a line that was cut off is none."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def wanted_runs(
    finished: Sequence[dict[str, Any]],
    *,
    strategies: Sequence[str],
    seeds: Sequence[int],
    grid: Sequence[float],
) -> list[Run]:
    """Return the runs that can start now: the grid of the first seed, rates beyond it, the other seeds."""
    done = {(run["strategy"], run["seed"], run["learning_rate"]) for run in finished}
    runs = [Run(strategy=name, seed=seeds[0], learning_rate=rate) for name in strategies for rate in grid]
    missing = [run for run in runs if (run.strategy, run.seed, run.learning_rate) not in done]
    if missing:
        return missing
    best = {name: best_rate(finished, name, seed=seeds[0]) for name in strategies}
    for name in strategies if len(grid) > 1 else ():
        tried = sorted(rates_tried(finished, name, seed=seeds[0]))
        if best[name] in (tried[0], tried[-1]) and len(tried) < len(grid) + MOST_BEYOND:
            rate = best[name] * (0.5 if best[name] == tried[0] else 2)
            missing.append(Run(strategy=name, seed=seeds[0], learning_rate=rate))
    return missing or [
        Run(strategy=name, seed=seed, learning_rate=best[name])
        for seed in seeds[1:]
        for name in strategies
        if (name, seed, best[name]) not in done
    ]


def measure_losses(folder: Path, workload: Workload, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all runs that are missing; return all."""
    log = folder / "runs.jsonl"
    if log.exists():  # without the line that was cut off
        log.write_text("".join(json.dumps(run) + "\n" for run in read_runs(log)))
    options = {"evaluate_every": chosen.evaluate_every, "sequences": chosen.validation_sequences}
    strategies = list(dict.fromkeys(METHODS[name].strategy for name in chosen.methods))
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    while runs := wanted_runs(
        read_runs(log), strategies=strategies, seeds=chosen.seeds, grid=chosen.learning_rates
    ):
        print(f"{len(runs)} runs", flush=True)
        with tempfile.TemporaryDirectory(prefix="sdp4bit-frontier-") as store:
            arguments = (f"{store}/store", runs, workload, options, log)
            multiprocessing.spawn(train_all, arguments, nprocs=NODES.ranks)
    os.environ.pop("GLOO_SOCKET_IFNAME")
    return read_runs(log)


# -- seconds ---------------------------------------------------------------------------------------------


def measure_seconds(folder: Path, workload: Workload, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the strategies at every rate that is missing; return all rows of the cluster."""
    rows = []
    strategies = dict.fromkeys((COMPUTE, *(METHODS[name].timed for name in chosen.methods)))
    for rate in chosen.rates.split(","):
        path = folder / f"seconds-{rate}.json"
        known = json.loads(path.read_text())["rows"] if path.exists() else []
        if not {*strategies} <= {row["strategy"] for row in known}:
            given = ["--rates", rate, "--strategies", ",".join(strategies), "--json", str(path)]
            given += ["--seconds-per-rate", str(chosen.seconds_per_rate)]
            for name in ("layers", "hidden", "vocabulary", "micro_batch"):
                given += [f"--{name.replace('_', '-')}", str(getattr(workload, name))]
            given += ["--sequence", str(workload.sequence_length), "--clip", str(workload.clip)]
            if code := cluster.main(given):
                sys.exit(code)
        rows += json.loads(path.read_text())["rows"]
    return rows


# -- command ---------------------------------------------------------------------------------------------


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    if unknown := [name for name in text.split(",") if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}: use {', '.join(METHODS)}")
    return text.split(",")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier",
        description=str(__doc__).split("\n")[0],
        epilog=f"Methods: {', '.join(METHODS)}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="folder of finished runs")
    parser.add_argument(
        "--json", type=Path, default=argparse.SUPPRESS, help="output file (default: OUT/frontier.json)"
    )
    parser.add_argument(
        "--methods", type=_names, metavar="NAME,...", default=",".join(METHODS), help="methods, with commas"
    )
    parser.add_argument(
        "--without", type=_names, metavar="NAME,...", default=[], help="methods to leave out, with commas"
    )
    parser.add_argument("--seeds", type=_integers, default="1,2,3", help="the first one tunes the rates")
    parser.add_argument("--learning-rates", type=_numbers, default="0.001,0.002,0.004", help="the grid")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a run, at least 20")
    parser.add_argument("--hidden", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=2, help="layers of the model")
    parser.add_argument("--vocabulary", type=int, default=512, help="tokens")
    parser.add_argument("--sequence", type=int, default=128, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a rank and step")
    parser.add_argument("--evaluate-every", type=int, default=25, help="steps")
    parser.add_argument("--validation-sequences", type=int, default=128, help="sequences")
    parser.add_argument("--rates", default="100mbit,250mbit,1gbit", help="of each link, per direction")
    parser.add_argument("--seconds-per-rate", type=float, default=60.0, help="runs at least three rounds")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 20:
        parser.error("--steps must be at least 20")
    chosen.methods = [name for name in chosen.methods if name not in chosen.without]
    chosen.json = getattr(chosen, "json", None) or chosen.out / "frontier.json"
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, time, write the result, and return the exit code."""
    chosen = parse_arguments(arguments)
    if reason := cluster.reason_to_skip():
        print(f"seconds cannot be measured here: {reason}", file=sys.stderr)
        return cluster.EXIT_IMPOSSIBLE
    chosen.out.mkdir(parents=True, exist_ok=True)
    tokens = chosen.out.resolve() / f"tokens-{chosen.vocabulary}.pt"
    if not tokens.exists():
        write_tokens(tokens, vocabulary=chosen.vocabulary)
    workload = Workload(
        hidden=chosen.hidden,
        heads=max(1, chosen.hidden // 64),
        layers=chosen.layers,
        vocabulary=chosen.vocabulary,
        sequence_length=chosen.sequence,
        micro_batch=chosen.micro_batch,
        warmup_steps=max(1, round(WARM_UP * chosen.steps)),
        clip=CLIP,
        decay_steps=chosen.steps,
        text=str(tokens),
    )
    machine = cluster_report.describe_machine([])
    settings = {
        "workload": asdict(workload),
        "evaluate_every": chosen.evaluate_every,
        "validation_sequences": chosen.validation_sequences,
        "commit": machine["commit"],
    }
    remembered = chosen.out / "settings.json"
    if not remembered.exists():
        remembered.write_text(json.dumps(settings) + "\n")
    if json.loads(remembered.read_text()) != settings:
        print(
            f"{chosen.out} has runs of other settings or another commit: give another --out", file=sys.stderr
        )
        return cluster.EXIT_IMPOSSIBLE
    seconds = measure_seconds(chosen.out, workload, chosen)
    runs = measure_losses(chosen.out, workload, chosen)
    command = ["python", "-m", "benchmarks.frontier", *(sys.argv[1:] if arguments is None else arguments)]
    result = {
        "title": "Loss against seconds",
        "machine": machine | {"command": shlex.join(command)},
        "parameters": sum(parameter.numel() for parameter in GPT(workload.shape).parameters()),
        **settings,
        "workload": settings["workload"] | {"text": "sources of Python's standard library"},
        "learning_rates": chosen.learning_rates,
        "seeds": chosen.seeds,
        "nodes": NODES.nodes,
        "ranks_per_node": NODES.ranks_per_node,
        "runs": runs,
        "seconds": seconds,
    }
    write_atomically(chosen.json, json.dumps(result, indent=1) + "\n")
    write_report(result, chosen.out)
    print(f"{frontier_seconds(result)}\n{chosen.out}/report.md has the losses, too, and a figure")
    return 0


if __name__ == "__main__":
    sys.exit(main())

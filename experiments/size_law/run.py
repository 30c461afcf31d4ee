"""Train the runs of this study: five sizes with the same number of tokens per parameter.

    python -m experiments.size_law.run DATA RUNS --jobs 16 --minutes 6

DATA is the prefix of the tokenized text. A worker trains one run after another, so that torch is imported once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdp4bit_lab.common.launch.local import run_on_ranks
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.compare.config import CompareConfig
from sdp4bit_lab.compare.finished_run import run_settings
from sdp4bit_lab.compare.jobs import Job, train
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, OptimizerConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.batches import prepare_dataset
from sdp4bit_lab.pretrain.data.config import DataConfig

NODES, LENGTH, VOCABULARY = 4, 128, 2048
EVALUATED_TOKENS = 1 << 18
COARSE = "sdp4bit:gradient-quantization-bits-inter=2:gq-group-size-inter=32"
"""Gradients with 2 bits: so large an error that its cost shows above the noise between runs."""
STRATEGIES = ("baseline", "sdp4bit", COARSE)


@dataclass(frozen=True)
class Size:
    """A model, and the sequences of a rank and step, which grow with it."""

    hidden: int
    layers: int
    heads: int
    sequences: int

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.hidden**2 + (VOCABULARY + LENGTH) * self.hidden


SIZES = {
    "0.3M": Size(64, 4, 1, 4),
    "1.1M": Size(128, 4, 2, 8),
    "3.7M": Size(256, 4, 4, 16),
    "11.4M": Size(384, 6, 6, 32),
    "20M": Size(512, 6, 8, 32),
}


def comparison(
    name: str, *, seeds: str, ratio: float, data: Path, out: Path, strategies: str
) -> CompareConfig:
    size = SIZES[name]
    batch = NODES * size.sequences
    steps = round(ratio * size.parameters / (batch * LENGTH))
    return CompareConfig(
        strategies=strategies,
        seeds=seeds,
        out=out / name,
        log_interval=100,
        model=ModelConfig(layers=size.layers, hidden=size.hidden, heads=size.heads),
        data=DataConfig(
            data_path=(str(data),),
            tokenizer_type="NullTokenizer",
            vocabulary_size=VOCABULARY - 1,
            split="980,20,0",
        ),
        training=TrainingConfig(
            steps=steps,
            micro_batch_size=size.sequences,
            eval_interval=max(1, steps // 2),
            eval_batches=EVALUATED_TOKENS // (batch * LENGTH),
            compute_dtype="bf16",
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=steps // 10),
        parallel=ParallelConfig(simulated_ranks=NODES, ranks_per_node=1),
    )


def order(first: int, last: int) -> list[tuple[str, int, str]]:
    """Return the runs, the most valuable first; those of a pair are neighbours."""
    small = ["11.4M", "3.7M", "1.1M", "0.3M"]
    middle = min(first + 3, last)
    half = [(name, seed, each) for seed in range(first, middle + 1) for name in small for each in STRATEGIES]
    half += [("20M", seed, each) for seed in range(first, min(first + 2, last) + 1) for each in STRATEGIES]
    rest = range(middle + 1, last + 1)
    return half + [(name, seed, each) for seed in rest for name in small for each in STRATEGIES[:2]]


def work(config: dict[str, Any], *, ranks: Ranks) -> None:
    """Train runs until the queue is empty."""
    torch.set_num_threads(1)
    while True:
        try:
            name, seed, strategy = config["queue"].get(timeout=1)
        except Exception:
            return
        chosen = comparison(
            name,
            seeds=str(seed),
            ratio=config["ratio"],
            data=config["data"],
            out=config["out"],
            strategies=strategy,
        )
        ((variant, run),) = chosen.runs()
        if (run.logging.out / "result.json").exists():
            continue
        dataset = prepare_dataset(run.resolved_data, ranks=ranks).key
        planned = {
            "settings": run_settings(run, dataset=dataset, world_size=1),
            "quantization": _plain(run.quantization),
        }
        train(Job(config=run, label=variant.label, part=name, planned=planned), ranks=ranks)


def _plain(quantization: Any) -> Any:
    import json
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(quantization)))


def _process(config: dict[str, Any], parallel: ParallelConfig) -> None:
    run_on_ranks("experiments.size_law.run:work", config=config, parallel=parallel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--ratio", type=float, default=1.0)
    parser.add_argument("--seeds", default="1-8")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    for run in order(*map(int, arguments.seeds.split("-"))):
        queue.put(run)
    config = {"queue": queue, "ratio": arguments.ratio, "data": arguments.data, "out": arguments.out}
    parallel = ParallelConfig(simulated_ranks=NODES, ranks_per_node=1)
    workers = [context.Process(target=_process, args=(config, parallel)) for _ in range(arguments.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0, end - time.monotonic()))
    for worker in workers:
        worker.kill()
    queue.cancel_join_thread()


if __name__ == "__main__":
    main()

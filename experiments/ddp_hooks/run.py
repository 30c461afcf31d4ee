"""Train with DistributedDataParallel and its communication hooks: the neighbours of sharded training.

    torchrun --nproc-per-node 4 -m experiments.ddp_hooks.run --hooks ddp ddp-bf16 ddp-powersgd-4 ddp-sdp4bit \\
        --seeds 1,2,3 --out runs/ddp --ranks-per-node 2 --train-iters 250 ...
    python -m benchmarks.curve runs/compare runs/ddp --out runs/curve

trains the model of `sdp4bit pretrain` with these options on the same samples, with every hook and every
seed: `ddp` averages fp32 gradients, `ddp-bf16` and `ddp-powersgd-RANK` are torch's hooks, `ddp-sdp4bit` is
`sdp4bit.ddp_comm_hook`. Every rank holds all weights, in fp32. Bytes of torch's hooks are those of a ring
over the ranks, in which one rank of a node sends to the next node, for every all-reduce that is called.

Each run leaves what a run of `pretrain` leaves. Its loss is compared with that of `ddp` with the same seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from benchmarks.cluster_strategies import ddp
from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.common.ranks import Ranks, join_ranks, sum_over_ranks
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, PretrainConfig
from sdp4bit_lab.pretrain.data.batches import Batches, prepare_dataset
from sdp4bit_lab.pretrain.metrics import MetricsWriter, StepMetrics, ValidationMetrics
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.optimizer import build_optimizer, learning_rate_at, set_learning_rate
from sdp4bit_lab.pretrain.step.parallelize import dtype_of, resolve_compute_dtype
from sdp4bit_lab.pretrain.trainer import write_settings

UNCOMPRESSED = 25
"""Steps that PowerSGD averages in full precision first; torch's default of 1,000 is meant for long runs."""


class AllReduceCounter:
    """Counts what all-reduces send in a ring of the default group."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        """By every rank since the start."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the calls inside the block."""
        all_reduce = dist.all_reduce

        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            ranks = dist.get_world_size()
            self.sent_bytes += round(2 * tensor.nbytes * (ranks - 1) / ranks)
            return all_reduce(tensor, *arguments, **options)

        with mock.patch.object(dist, "all_reduce", counted):
            yield


def parse_hook(name: str) -> tuple[str | None, dict[str, int]]:
    """Return the kind of a hook and the settings of PowerSGD."""
    kind = name.removeprefix("ddp").removeprefix("-")
    if kind in ("", "bf16", "sdp4bit"):
        return kind or None, {}
    rank = kind.removeprefix("powersgd-")
    require(
        kind != rank and rank.isdigit() and int(rank) > 0,
        f"--hooks {name}: use ddp, ddp-bf16, ddp-sdp4bit, or ddp-powersgd-RANK",
    )
    return "powersgd", {"matrix_approximation_rank": int(rank), "start_powerSGD_iter": UNCOMPRESSED}


class Training:
    """A run of one hook and one seed."""

    def __init__(self, config: PretrainConfig, hook: str, *, ranks: Ranks) -> None:
        """Build data, model and optimizer; SettingError if they do not fit together."""
        nodes_of, micro_batches = config.parallel.ranks_per_node, config.micro_batches(ranks.world_size)
        require(nodes_of is not None, "give --ranks-per-node: bytes are counted between nodes")
        require(micro_batches == 1, f"{micro_batches} micro batches: one a step is all this program does")
        assert nodes_of is not None
        self._config = config
        self._ranks = ranks
        self._nodes = ranks.world_size // nodes_of
        self._batches = Batches(
            prepare_dataset(config.resolved_data, ranks=ranks),
            sequence_length=config.sequence_length,
            micro_batch_size=config.micro_batch_size,
            accumulation=1,
            eval_batches=config.training.eval_batches,
            seed=config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
            device=ranks.device,
        )
        dtype = dtype_of(config.training.param_dtype)
        chosen = resolve_compute_dtype(config.training.compute_dtype, param_dtype=dtype, device=ranks.device)
        model = GPT(config.model_shape, compute_dtype=chosen).to(ranks.device)
        model.reset_parameters(seed=config.seed)
        torch.manual_seed(config.seed + ranks.rank)  # of dropout, as in `pretrain`
        kind, settings = parse_hook(hook)
        self._model: DistributedDataParallel
        self._state: sdp4bit.DDPCommState | None
        self._model, self._state = ddp(model, kind, ranks_per_node=nodes_of, **settings)
        if kind is None:
            # The same averages as DDP's own, through a call that can be counted.
            self._model.register_comm_hook(None, default_hooks.allreduce_hook)
        self._counter = AllReduceCounter()
        self._optimizer = build_optimizer(
            list(model.parameters()), config=config.optimizer, learning_rate=config.learning_rate
        )

    def steps(self) -> Iterator[StepMetrics]:
        """Train; yield the measurements of each step."""
        for step in range(self._config.training.steps):
            yield self._step(step)

    def _step(self, step: int) -> StepMetrics:
        config, start = self._config, time.perf_counter()
        samples = self._batches.global_batch_size
        learning_rate = learning_rate_at(
            step,
            config=config.optimizer,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            steps=config.training.steps,
        )
        set_learning_rate(self._optimizer, learning_rate)
        ((tokens, targets),) = self._batches.training(step * samples)
        before = self._sent()
        self._model.train()
        loss = self._model(tokens, targets).sum()
        with self._counter.counting():
            # Every rank has as many tokens; DDP averages over the ranks.
            (loss / targets.numel()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.optimizer.clip_grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total, inter = sum_over_ranks([loss.item(), self._sent() - before], device=self._ranks.device)
        seconds = time.perf_counter() - start
        trained = samples * config.sequence_length
        return StepMetrics(
            step=step + 1,
            samples=(step + 1) * samples,
            loss=total / trained,
            lr=learning_rate,
            grad_norm=norm.item(),
            tokens_per_second=trained / seconds,
            tflops_per_device=0.0,
            step_seconds=seconds,
            intra_bytes=0,
            inter_bytes=round(inter),
            compression_ratio=1.0 if self._state is None else self._state.stats()["compression_ratio"],
            weight_drift=None,
            gradient_error=None,
        )

    def _sent(self) -> float:
        """Return the bytes that this rank has sent to other nodes, on average over the ranks of a node."""
        if self._state is not None:
            return float(self._state.stats()["total"]["inter_bytes"])
        return self._counter.sent_bytes * self._nodes / self._ranks.world_size if self._nodes > 1 else 0.0

    @torch.no_grad()
    def validate(self) -> ValidationMetrics:
        """Return the mean loss over the validation batches of all ranks."""
        self._model.train(False)
        total = count = 0.0
        for tokens, targets in self._batches.validation():
            total += self._model.module(tokens, targets).sum().item()
            count += targets.numel()
        total, count = sum_over_ranks([total, count], device=self._ranks.device)
        steps = self._config.training.steps
        return ValidationMetrics(step=steps, loss=total / count, intra_bytes=0, inter_bytes=0)


def train(config: PretrainConfig, hook: str, *, ranks: Ranks) -> float:
    """Train a run, write its measurements into its folder, and return the validation loss."""
    training = Training(config, hook, ranks=ranks)
    logging = config.logging if ranks.is_first else LoggingConfig(jsonl=False, tensorboard=False)
    if ranks.is_first:
        write_settings(config, label=hook, ranks=ranks)
    description = f"{hook}, seed {config.seed}"
    writer = MetricsWriter(logging, description=description, steps=config.training.steps, first_step=0)
    with closing(writer):
        for metrics in training.steps():
            if ranks.is_first:
                writer.log_step(metrics)
        validation = training.validate()
        if ranks.is_first:
            writer.log_validation(validation)
    return validation.loss


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", required=True, help="numbers with commas between")
    parser.add_argument("--hooks", nargs="+", default=["ddp", "ddp-bf16", "ddp-powersgd-4", "ddp-sdp4bit"])
    parser.add_argument("--out", type=Path, required=True)
    arguments, options = parser.parse_known_args()
    try:
        with join_ranks() as ranks:
            for seed in map(int, arguments.seeds.split(",")):
                for hook in arguments.hooks:
                    folder = arguments.out / f"{hook}-seed{seed}"
                    given = ["--strategy", "baseline", "--seed", str(seed), "--out", str(folder)]
                    config = COMMANDS["pretrain"].parse([*options, *given])
                    config = replace(config, logging=replace(config.logging, tensorboard=False))
                    train(config, hook, ranks=ranks)
        return 0
    except SettingError as error:
        print(f"experiments.ddp_hooks.run: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

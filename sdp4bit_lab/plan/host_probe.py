"""Measure the host's time per parameter group, with plain FSDP2 and with sdp4bit, for the planner."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.parallelize import resolve_compute_dtype

LAYERS, HEADS, VOCABULARY, TOKENS = 4, 2, 512, 32
GROUPS = LAYERS + 1
"""Each block, and the rest."""
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class HostSeconds:
    """Seconds of the slowest rank's host per parameter group and step: medians over rounds."""

    plain: float
    quantized: float | None
    """None with one rank, which quantizes nothing."""

    @property
    def added(self) -> float | None:
        return None if self.quantized is None else max(0.0, self.quantized - self.plain)


def measure_host(ranks: Ranks, *, ranks_per_node: int, rounds: int) -> HostSeconds:
    """Return the host's time for steps of a GPT whose blocks have so few values that nothing else counts.

    Plain FSDP2 and sdp4bit train in turns. On a GPU, the time is that in which the host has issued a step: it
    does not wait for the GPU, but for other ranks' hosts where the library agrees with them. On a CPU it is
    the thread's time, without waits.

    Args:
        ranks_per_node: ranks of a node for sdp4bit; 1 on a single node, whose other layouts quantize nothing.
    """
    clock = time.perf_counter if ranks.device.type == "cuda" else time.thread_time
    steps = {"plain": _train(ranks, ranks_per_node=None)}
    if ranks.world_size > 1:
        steps["sdp4bit"] = _train(ranks, ranks_per_node=ranks_per_node)
    seconds = torch.zeros(len(steps), rounds, dtype=torch.float64)
    for number in range(-_WARM_UP, rounds):
        for row, step in enumerate(steps.values()):
            dist.barrier()
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
            began = clock()
            step()
            if number >= 0:
                seconds[row, number] = (clock() - began) / GROUPS
    medians = torch.tensor([statistics.median(row.tolist()) for row in seconds], device=ranks.device)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    plain, *quantized = medians.tolist()
    return HostSeconds(plain=plain, quantized=quantized[0] if quantized else None)


def _train(ranks: Ranks, *, ranks_per_node: int | None) -> Callable[[], None]:
    """Return a function that trains one step, with plain FSDP2 if the ranks per node are None."""
    # Many ranks need a wider model: a row of a block has 12 hidden^2 / ranks values, of which 1,024 are
    # quantized.
    hidden = 64 * max(2, -(-ranks.world_size // 32))
    shape = ModelShape(layers=LAYERS, hidden=hidden, heads=HEADS, vocabulary=VOCABULARY, positions=TOKENS)
    compute = resolve_compute_dtype("auto", param_dtype=torch.bfloat16, device=ranks.device)
    with ranks.device:
        model = GPT(shape, compute_dtype=compute)
    model.reset_parameters(seed=0)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if ranks_per_node is not None:
        sdp4bit.quantize_communication(model, topology=ranks_per_node)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device=ranks.device)

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step

"""Do random delays change a bit? Where an operation does not wait for what it needs, they do.

Every scenario is trained once with the host waiting for the device after each operator, as
CUDA_LAUNCH_BLOCKING=1 does, and then with random delays before operators and transfers: on a GPU kernels that
sleep on the stream, on a CPU ranks that sleep.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig, quantize_communication
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.selftest.check import CheckFailedError, CheckSkippedError, Context
from sdp4bit_lab.selftest.local_copies import simulated_world
from sdp4bit_lab.selftest.model import batches, blocks_of, loss_of, sharded_toy, topology_of

_STEPS = 4
_SHARE = 0.1
"""Of the operators that are delayed."""
_CYCLES, _SECONDS = 1_000_000, 0.001
"""Longest delay on a GPU, half a millisecond or so, and on a CPU."""
_QUANTIZED = SDP4BitConfig(gradients=GradientConfig(min_numel=0, inside_one_node=True))


def _prefetch(model: GPT) -> None:
    blocks = blocks_of(model)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def _unshard_ahead(model: GPT) -> None:
    """Ask for the last block while others are gathered, as pipeline schedules do."""
    _prefetch(model)
    first, *_, last = blocks_of(model)
    first.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda *_: last.unshard(async_op=True) and None
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained."""

    config: SDP4BitConfig
    models: int = 1
    prepare: Callable[[GPT], None] | None = None


SCENARIOS: dict[str, Scenario] = {
    "node replica": Scenario(config=_QUANTIZED),
    "full replica": Scenario(config=replace(_QUANTIZED, weights=WeightConfig(replica="full"))),
    "forward prefetch": Scenario(config=_QUANTIZED, prepare=_prefetch),
    "unshard(async_op=True)": Scenario(config=_QUANTIZED, prepare=_unshard_ahead),
    "two models": Scenario(config=_QUANTIZED, models=2, prepare=_prefetch),
    "three slices": Scenario(
        config=replace(
            _QUANTIZED, gradients=GradientConfig(min_numel=0, pipeline_chunks=3, inside_one_node=True)
        )
    ),
}


class _EachOperator(TorchDispatchMode):
    """Calls something before and after every operator on plain tensors."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes back with the local tensors
        self._before()
        result = func(*args, **(kwargs or {}))
        self._after()
        return result


def check_streams(context: Context) -> dict[str, Any]:
    """Return the scenarios, whose losses and weights no delay has changed."""
    if context.simulated_ranks is not None:
        with simulated_world(context.ranks, size=context.simulated_ranks) as ranks:
            return _check(context, ranks)
    if context.ranks.world_size == 1:
        raise CheckSkippedError("one rank exchanges nothing: start several, or give --simulated-ranks")
    return _check(context, context.ranks)


def _check(context: Context, ranks: Ranks) -> dict[str, Any]:
    for name, scenario in SCENARIOS.items():
        with _EachOperator(lambda: None, context.synchronize):
            expected = _train(context, ranks, scenario)
        for delay in range(context.config.delays):
            seed = 1000 * context.config.seed + 100 * delay + ranks.rank
            with _EachOperator(_delays(context, seed), lambda: None):
                found = _train(context, ranks, scenario)
            failure = None
            if found != expected:
                failure = CheckFailedError(
                    f"{name}: with random delays a step computes something else: losses {found[:_STEPS]}, "
                    f"without {expected[:_STEPS]}, sums of weights {found[_STEPS:]} and {expected[_STEPS:]}",
                    case=f"{name}, delays of seed {seed}",
                )
            context.fail_together(failure)
    context.say(
        f"      {', '.join(SCENARIOS)}: equal bit for bit with {context.config.delays} rounds of delays"
    )
    return {"scenarios": list(SCENARIOS), "delay_rounds": context.config.delays, "ranks": ranks.world_size}


def _delays(context: Context, seed: int) -> Callable[[], None]:
    """Return what delays some operators, always the same ones."""
    generator = random.Random(seed)

    def delay() -> None:
        if generator.random() < _SHARE:
            if context.is_cuda:
                torch.cuda._sleep(generator.randrange(_CYCLES))
            elif generator.random() < _SHARE:
                time.sleep(generator.uniform(0, _SECONDS))

    return delay


def _train(context: Context, ranks: Ranks, scenario: Scenario) -> list[float]:
    """Return this rank's losses, and sums over its parts of the weights."""
    models = [sharded_toy(context, ranks) for _ in range(scenario.models)]
    for model in models:
        if scenario.prepare is not None:
            scenario.prepare(model)
    with _attached(context, ranks, models, scenario.config):
        parameters = [parameter for model in models for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=2e-3, fused=True)
        losses = []
        for batch in batches(context, rank=ranks.rank, count=_STEPS):
            loss = torch.stack([loss_of(model, batch) for model in models]).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        sums = [_local(parameter).double().sum() for parameter in parameters]
    return [value.item() for value in (*losses, *sums)]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


@contextmanager
def _attached(context: Context, ranks: Ranks, models: list[GPT], config: SDP4BitConfig) -> Iterator[None]:
    handle = quantize_communication(models, topology=topology_of(context, ranks), config=config)
    try:
        yield
    finally:
        handle.remove()

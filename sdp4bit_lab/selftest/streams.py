"""Check that random delays change no bit, which exposes operations that do not wait for their inputs.

Every scenario is first trained with a synchronization after each operator, as with CUDA_LAUNCH_BLOCKING=1.
Then it is trained with random delays before operators: sleep kernels on a GPU's stream, or sleeping CPU
ranks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig, quantize_communication
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.selftest.check import ONE_RANK, CheckSkippedError, Context
from sdp4bit_lab.selftest.model import batches, blocks_of, loss_of, sharded_toy, topology_of

_STEPS = 4
_DELAYED = 0.1
"""Fraction of the operators that are delayed."""
_CYCLES, _SECONDS = 1_000_000, 0.001
"""Longest delay: on a GPU (about 0.5 ms), and on a CPU."""
_GRADIENTS = GradientConfig(min_numel=0, inside_one_node=True)
_QUANTIZED = SDP4BitConfig(gradients=_GRADIENTS)


def _prefetch(model: GPT) -> None:
    for block, following in itertools.pairwise(blocks_of(model)):
        block.set_modules_to_forward_prefetch([following])


def _unshard_ahead(model: GPT) -> None:
    """Gather the last block on the caller's stream while others are gathered, like pipeline schedules."""
    _prefetch(model)
    first, *_, last = blocks_of(model)
    first.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda *_: last.unshard(async_op=True) and None
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Variant of the training run."""

    config: SDP4BitConfig = _QUANTIZED
    models: int = 1
    prepare: Callable[[GPT], None] = lambda model: None


SCENARIOS: dict[str, Scenario] = {
    "node replica": Scenario(),
    "full replica": Scenario(config=replace(_QUANTIZED, weights=WeightConfig(replica="full"))),
    "forward prefetch": Scenario(prepare=_prefetch),
    "unshard(async_op=True)": Scenario(prepare=_unshard_ahead),
    "two models": Scenario(models=2, prepare=_prefetch),
    "three chunks": Scenario(config=SDP4BitConfig(gradients=replace(_GRADIENTS, pipeline_chunks=3))),
}


class _EachOperator(TorchDispatchMode):
    """Call functions before and after every operator on plain tensors."""

    def __init__(self, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor calls the operator again with local tensors
        self._before()
        result = func(*args, **(kwargs or {}))
        self._after()
        return result


def check_streams(context: Context) -> dict[str, Any]:
    """Return the scenarios whose losses and weights are unaffected by delays."""
    if context.ranks.world_size == 1:
        raise CheckSkippedError(ONE_RANK)
    for name, scenario in SCENARIOS.items():
        with _EachOperator(before=lambda: None, after=context.synchronize):
            expected = _train(context, scenario)
        for delay in range(context.config.delays):
            seed = 1000 * context.config.seed + 100 * delay + context.ranks.rank
            with _EachOperator(before=_delays(context, seed), after=lambda: None):
                delayed = _train(context, scenario)
            context.require(
                delayed == expected,
                f"{name}: random delays change a step: losses {delayed[:_STEPS]} instead of "
                f"{expected[:_STEPS]}, sums of weights {delayed[_STEPS:]} instead of {expected[_STEPS:]}",
                case=f"{name}, delays of seed {seed}",
            )
        context.say(f"      {name}: {context.config.delays} rounds of delays change no bit")
    return {
        "scenarios": list(SCENARIOS),
        "delay_rounds": context.config.delays,
        "ranks": context.ranks.world_size,
    }


def _delays(context: Context, seed: int) -> Callable[[], None]:
    """Return a function that delays some of its calls, reproducibly for each seed."""
    generator = random.Random(seed)

    def delay() -> None:
        if generator.random() >= _DELAYED:
            return
        if context.is_cuda:
            # A kernel on the current stream: work that does not wait for this stream overtakes it.
            torch.cuda._sleep(generator.randrange(_CYCLES))
        elif generator.random() < _DELAYED:
            time.sleep(generator.uniform(0, _SECONDS))

    return delay


def _train(context: Context, scenario: Scenario) -> list[float]:
    """Return this rank's losses and the sums of its weight shards."""
    models = [sharded_toy(context) for _ in range(scenario.models)]
    for model in models:
        scenario.prepare(model)
    handle = quantize_communication(models, topology=topology_of(context), config=scenario.config)
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, fused=True)
    results = []
    for batch in batches(context, rank=context.ranks.rank, count=_STEPS):
        loss = torch.stack([loss_of(model, batch) for model in models]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    handle.remove()
    for parameter in parameters:
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        results.append(shard.detach().double().sum())
    return [value.item() for value in results]

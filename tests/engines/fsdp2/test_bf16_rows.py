"""Rows of bf16 gradients stay bf16 until they are quantized, and nothing else changes.

Layer: 4 processes over gloo, as 2 nodes of 2 ranks. Each run is compared with one whose rows are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.engines.fsdp2 import hooks
from tests.engines.fsdp2.test_host_reductions import WHOLE, divided, micro_batches, stepping_in_backward
from tests.engines.fsdp2.test_hybrid import Accumulating, HybridRun
from tests.engines.fsdp2.test_users import adapt
from tests.ranks import on_ranks
from tests.toy import IDENTITY, POLICY, QUANTIZED, Run, build

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SOME = replace(QUANTIZED, gradients=GradientConfig(inside_one_node=True, start_step=1))
"""The first step and the smallest group are reduced in full precision."""

Reduction = tuple[torch.dtype, torch.dtype, bool]
"""The type of the gradients, that of their rows, and whether they are quantized."""
NARROW, WIDE = (BF16, BF16, True), (F32, F32, True)


@contextmanager
def reductions() -> Iterator[set[Reduction]]:
    """Collect the kinds of reductions that are done inside the block."""
    seen: list[Reduction] = []
    gradients: list[torch.dtype] = []
    reduce, call = _fsdp_param_group.foreach_reduce, hooks.ReduceScatterHook.__call__
    start = QuantizedReduceScatter.start

    def noted_reduce(params: Any, grads: list[Tensor], *args: Any) -> Any:
        gradients.append(grads[0].dtype)
        return reduce(params, grads, *args)

    def noted_call(hook: Any, output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> None:
        assert output_tensor.dtype == F32
        seen.append((gradients[-1], input_tensor.dtype, False))
        call(hook, output_tensor, input_tensor, **named)

    def noted_start(*args: Any, **named: Any) -> Any:
        seen[-1] = (*seen[-1][:2], True)
        return start(*args, **named)

    result: set[Reduction] = set()
    with ExitStack() as stack:
        for owner, name, noted in (
            (_fsdp_param_group, "foreach_reduce", noted_reduce),
            (hooks.ReduceScatterHook, "__call__", noted_call),
            (QuantizedReduceScatter, "start", noted_start),
        ):
            stack.enter_context(mock.patch.object(owner, name, noted))
        yield result
    result.update(seen)


def attached(config: SDP4BitConfig = QUANTIZED, **policy: torch.dtype | None) -> Run:
    return Run(build(policy=replace(POLICY, **policy)), config)


def with_bf16_weights() -> Run:
    """FSDP2 casts what was reduced in fp32 to the type of the weights."""
    return Run(build(policy=replace(POLICY, param_dtype=None)).to(BF16), QUANTIZED)


def steps(run: Run) -> None:
    run.train(2)


def with_a_plain_step(run: Run) -> None:
    run.train(1)
    with run.comm.full_precision():
        run.train(1)


CASES: dict[str, tuple[Callable[[], Run], Callable[[Run], object], set[Reduction]]] = {
    "usual": (attached, with_a_plain_step, {NARROW}),
    "without quantizers": (lambda: attached(IDENTITY), steps, {NARROW}),
    "some dense": (lambda: attached(SOME), steps, {NARROW, (BF16, F32, False)}),
    "micro-batches": (attached, micro_batches, {NARROW, WIDE}),
    "divided": (attached, divided, {NARROW}),
    "read in backward": (attached, stepping_in_backward, {NARROW}),
    "frozen": (lambda: Run(adapt(build()), QUANTIZED), steps, {NARROW}),
    "bf16 weights": (with_bf16_weights, steps, {NARROW}),
    "fp32": (lambda: Run(build(policy=WHOLE), QUANTIZED), steps, {WIDE}),
    "fp16": (lambda: attached(param_dtype=F16), steps, {(F16, F32, True)}),
    "replicas": (lambda: HybridRun(QUANTIZED), steps, {NARROW}),
    "micro-batches of replicas": (lambda: Accumulating(QUANTIZED), lambda run: run.train(1), {NARROW, WIDE}),
}


def outcome(make: Callable[[], Run], scenario: Callable[[Run], object]) -> tuple[Any, set[Reduction]]:
    """Return losses, gradients, weights and statistics of a run, and its reductions."""
    run = make()
    with reductions() as seen:
        scenario(run)
        run.train(1)
    losses = run.finish()
    weights = [getattr(param, "_local_tensor", param) for param in run.model.parameters()]
    tensors = [tensor.tolist() for tensor in (*losses.gradients, *weights)]
    return (losses, tensors, run.comm.stats(), run.comm.group_stats()), seen


QUICK = ("usual", "micro-batches", "fp32")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(CASES.keys() - set(QUICK)), id="others", marks=pytest.mark.slow)]
)
@on_ranks(4)
def test_rows_are_bf16_where_that_changes_no_bit(names: tuple[str, ...]) -> None:
    for name in sorted(names):
        make, scenario, expected = CASES[name]
        result, seen = outcome(make, scenario)
        assert seen == expected, (name, seen)
        with mock.patch.object(hooks, "gradient_dtype", return_value=None):
            before, seen = outcome(make, scenario)
        assert {rows for _, rows, _ in seen} == {F32}, name
        assert result == before, name

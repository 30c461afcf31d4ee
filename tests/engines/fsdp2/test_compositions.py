"""FSDP2 integration, compositions: other features of FSDP2 and PyTorch beside quantized communication.

Layer: real processes over gloo, 2 nodes x 2 ranks, or x 1 rank for what is the same on one level. A feature
trains with plain FSDP2, without quantizers on the same paths (bit-equal to plain FSDP2), and quantized.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig, quantize_communication
from tests import mutations
from tests.ranks import on_ranks
from tests.tables import explained
from tests.toy import (
    IDENTITY,
    POLICY,
    QUANTIZED,
    Result,
    Run,
    adamw,
    assert_close_to_plain,
    assert_equal,
    assert_variants_equal,
    build,
    gradient_of,
)

EXACT = [(IDENTITY, assert_equal)]
"""What a feature that reaches neither quantizer needs: both hops run, and equal plain FSDP2 bit for bit."""


def accumulate(config: SDP4BitConfig | None, reductions: int, evaluates: bool = False) -> list[float]:
    """Two micro-batches a step, reduced once or each by itself, perhaps with evaluations behind them.

    An evaluation leaves the root unsharded; the next forward must see the step all the same.
    """
    run = Run(build(), config, topology=1)
    for _ in range(2):
        for micro_batch in range(2):
            run.model.set_requires_gradient_sync(reductions == 2 or micro_batch == 1)
            run.backward()
            if evaluates:
                run.evaluate(torch.inference_mode if micro_batch else torch.no_grad)
        run.step()
    if config is not None:
        assert [group.gradients.reductions for group in run.comm.groups] == [2 * reductions] * 4
        assert run.comm.stats()["steps"] == 2
    return run.finish()


class Chain(nn.Module):
    """Blocks that take part by turns; the root has no parameters, so any block may be gathered first."""

    def __init__(self, paths: list[list[int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self._paths = iter(paths)

    def forward(self, x: Tensor) -> Tensor:
        for index in next(self._paths):
            x = x + torch.tanh(self.blocks[index](x))
        return x


def along(config: SDP4BitConfig | None) -> list[float]:
    """A step reaches blocks whatever path the last forward took."""
    paths = [[0, 1, 2], [1, 2], [0, 1, 1, 2], [0, 1, 2]]
    torch.manual_seed(0)
    model = Chain(paths)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=POLICY)
    if config is not None:
        quantize_communication(model, topology=1, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator, losses, gradients = torch.Generator().manual_seed(dist.get_rank()), [], []
    for _ in paths:
        loss = (model(torch.randn(4, 32, generator=generator)).float() - 1).square().mean()
        loss.backward()
        gradients.append(gradient_of(model))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, gradients)


@pytest.mark.like_plain
@on_ranks(2)
def test_micro_batches_evaluations_and_skipped_blocks_train_as_with_plain_fsdp2() -> None:
    assert_variants_equal(accumulate, (1,), (1, True))
    assert_close_to_plain(accumulate, 2, checks=EXACT, harmless=[mutations.TWICE])
    assert_close_to_plain(along, checks=EXACT, harmless=[mutations.TWICE])


FULL = replace(QUANTIZED, weights=WeightConfig(replica="full"))


@cache
def resharding(
    config: SDP4BitConfig | None, after_forward: bool = True, after_backward: bool = True
) -> list[float]:
    model = build(reshard_after_forward=after_forward)
    model.set_reshard_after_backward(after_backward)
    return Run(model, config, ordered=True).train(2).finish()


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4)
def test_resharding_does_not_change_the_result() -> None:
    resharding.cache_clear()
    assert_variants_equal(resharding, (), (False, False), (False, True), (True, False))
    assert resharding(FULL, False, False) == resharding(FULL) == resharding(QUANTIZED)
    assert resharding(None, False, False) != resharding(None)  # FSDP2 itself misses its optimizer's steps


def gathering(config: SDP4BitConfig | None, ahead: bool) -> list[float]:
    """Groups are gathered when needed, or ahead: asynchronously by hand and by FSDP2's setters."""
    model = build()
    run = Run(model, config, ordered=True)
    first, second = model.blocks
    if ahead:
        # The first block asks for one that the root has asked for already.
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([second, model.norm])
        second.set_modules_to_backward_prefetch([first])
    for step in range(3):
        if ahead:
            handles = [m.unshard(async_op=True) for m in (model, first, second)[: step + 1]]
            handles[0].wait()
        run.train(1)
    run.losses += [run.evaluate(), run.evaluate(torch.inference_mode)]
    if run.comm is not None:
        run.comm.resync()
    result = run.train(1).finish()
    assert run.comm is None or not any(group.weights.replica.is_pending for group in run.comm.groups)
    return result


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(4)
def test_gathering_ahead_does_not_change_the_result() -> None:
    assert_variants_equal(gathering, (False,), (True,))
    assert gathering(FULL, True) == gathering(FULL, False)


class Noisy(nn.Module):
    """A block with dropout: recomputation must draw the same random numbers again."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.block(x), 0.2)


def dropping(config: SDP4BitConfig | None, recompute: str = "") -> list[float]:
    """Train with dropout, with activation checkpointing inside or outside the FSDP module, or without."""

    def wrap(block: nn.Module) -> nn.Module:
        return checkpoint_wrapper(Noisy(block)) if recompute == "inside" else Noisy(block)

    model = build(wrap=wrap)
    if recompute == "outside":
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    torch.manual_seed(dist.get_rank())
    return Run(model, config, topology=1).train(2).finish()


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_activation_checkpointing_with_dropout_does_not_change_the_result() -> None:
    """Inside and outside of the FSDP modules."""
    assert_variants_equal(dropping, (), ("inside",), ("outside",))


def compiled(config: SDP4BitConfig | None) -> list[float]:
    """Blocks are compiled; gradients are clipped, and the optimizer steps all parameters in one call."""
    model = build(wrap=lambda block: torch.compile(block, backend="aot_eager"))
    return Run(model, config, topology=1, clip=0.05, fused=None, foreach=True).train(1).finish()


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_compiled_blocks_and_clipping_train_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(compiled, checks=EXACT, harmless=[mutations.TWICE])


def optimizing(
    config: SDP4BitConfig | None, in_backward: bool = False, after_backward: bool = True
) -> list[float]:
    """AdamW after the backward, or one per parameter that steps as soon as its gradient is there."""
    model = build()
    model.set_reshard_after_backward(after_backward)
    run = Run(model, config, topology=1)
    if not in_backward:
        return run.train(2).finish()
    optimizers = {p: adamw(model, params=[p]) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(2):
        run.backward()
    losses = run.finish()
    assert run.comm.stats()["steps"] == 2
    return losses


@pytest.mark.like_plain
@on_ranks(2)
def test_optimizers_in_backward_equal_one_after_it() -> None:
    assert_variants_equal(optimizing, (), (True, False), checks=EXACT, harmless=[mutations.TWICE])


@on_ranks(2)
def test_gradients_are_dense_before_the_start_step() -> None:
    config = SDP4BitConfig(weights=None, gradients=GradientConfig(start_step=2, min_numel=0))
    plain, run = Run(build(), None).train(3), Run(build(), config, topology=1)
    run.train(2)
    assert [group.gradients.reductions for group in run.comm.groups] == [0] * 4
    dense = run.comm.stats()["last_step"]
    run.train(1)
    assert [group.gradients.reductions for group in run.comm.groups] == [1] * 4
    assert run.losses == plain.losses
    assert run.evaluate() != plain.evaluate()
    assert run.comm.stats()["last_step"]["inter_bytes"] < dense["inter_bytes"]


@on_ranks(4)
def test_rows_below_the_minimum_are_reduced_densely_and_counted() -> None:
    run = Run(build(), SDP4BitConfig(weights=None, gradients=GradientConfig(min_numel=1024))).train(1)
    small = 0
    groups = explained(run.comm.explain(full=True))
    for group in run.comm.groups:
        line = groups[group.view.name]
        rows, sent = group.view.shard_numel, group.gradients.traffic.current_step
        assert ("below min_numel=1024" in line) == (group.gradients.reductions == 0) == (rows < 1024)
        if rows < 1024:
            small += 1
            # A ring of fp32 rows over 4 ranks: every second neighbour is on the other node.
            assert (sent.intra_bytes, sent.inter_bytes, sent.collectives) == (6 * rows, 6 * rows, 1)
    assert 0 < small < 4


# -- refreshes under way during the forward -----------------------------------------------------------


def raise_interrupted(*_: Any) -> None:
    raise InterruptedError


@on_ranks(2)
def test_the_next_block_is_refreshed_during_the_forward_and_whoever_needs_it_finishes_that() -> None:
    """Also after a forward that fails on all ranks between two blocks, and leaves a refresh under way."""
    outcomes = []
    for fails in (False, True):
        model = build()
        model.set_modules_to_forward_prefetch(model.blocks)
        run = Run(model, QUANTIZED, topology=1)
        _, first, second, _ = (group.weights.replica for group in run.comm.groups)
        pending: list[list[bool]] = []
        hook = model.blocks[0].ln1.register_forward_pre_hook(
            lambda *_, seen=pending, a=first, b=second: seen.append([a.is_pending, b.is_pending])
        )
        run.train(2)
        assert pending == [[False, True]] * 2
        hook.remove()
        if fails:
            hook = model.blocks[0].ln2.register_forward_pre_hook(raise_interrupted)
            with pytest.raises(InterruptedError):
                run.evaluate()
            hook.remove()
            assert second.is_pending
            assert run.comm.measure()["weight_drift"] > 0
            assert not second.is_pending
        outcomes.append(run.evaluate())
        run.comm.remove()
        dist.barrier()
    assert outcomes[0] == outcomes[1]

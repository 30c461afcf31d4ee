"""The communication hook for DistributedDataParallel, against DDP without one.

Layer: 2 and 4 real processes over gloo.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import GradientConfig
from sdp4bit.traffic import Grid
from tests import mutations
from tests.engines.fsdp2.test_bytes import count_sent_bytes
from tests.oracles.traffic import all_reduce_exchange
from tests.ranks import on_ranks, run_ranks
from tests.toy import (
    Result,
    ToyGPT,
    adamw,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    batches,
    gradient_of,
    loss_of,
)

ALL = GradientConfig(min_numel=0, inside_one_node=True)
EXACT = GradientConfig(intra_bits=None, inter_bits=None, min_numel=0)
BUCKET_MB = 0.02
"""Several buckets of a model of 130 kB."""


class DDPRun:
    """The toy model in DDP, with a hook unless the configuration is None."""

    def __init__(
        self,
        config: GradientConfig | None,
        *,
        topology: int = 1,
        model: nn.Module | None = None,
        clip: float | None = None,
        bucket_cap_mb: float = BUCKET_MB,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(model or ToyGPT(), bucket_cap_mb=bucket_cap_mb, **options)
        self.state: Any = None
        if config is not None:
            self.state = sdp4bit.DDPCommState(topology=topology, config=config)
            self.model.register_comm_hook(self.state, sdp4bit.ddp_comm_hook)
        self.optimizer = adamw(self.model)
        self.data = batches()
        self.clip = clip
        self.losses: list[float] = []
        self.gradients: list[torch.Tensor] = []

    def backward(self) -> None:
        loss = loss_of(self.model, next(self.data))
        loss.backward()
        self.losses.append(loss.item())

    def train(self, steps: int, *, accumulate: int = 1) -> DDPRun:
        for _ in range(steps):
            for _ in range(accumulate - 1):
                with self.model.no_sync():
                    self.backward()
            self.backward()
            self.gradients.append(gradient_of(self.model))
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def finish(self) -> Result:
        """Return the losses and the size of the weights; all ranks hold the same ones."""
        self.check_ranks()
        size = sum(values.double().abs().sum().item() for values in self.weights())
        return Result([*self.losses, size], self.gradients)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def check_ranks(self) -> None:
        """All ranks hold the same weights, bit for bit."""
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, self.weights())
        for other in held:
            assert all(map(torch.equal, held[0], other))


def sizes(state: Any) -> list[int]:
    return [numel for _, (numel, _) in sorted(state._buckets.items())]


def training(config: GradientConfig | None, options: dict[str, Any], accumulate: int = 1) -> Result:
    """Micro-batches under no_sync() are not exchanged."""
    run = DDPRun(config, **options).train(2, accumulate=accumulate)
    assert run.state is None or run.state.steps == 2
    return run.finish()


CHECKS = [(EXACT, assert_equal), (ALL, assert_close), (replace(ALL, inter_bits=3.5), assert_close)]
"""A mean of two is exact."""


@on_ranks(2)
def test_gradients_are_averaged_as_by_plain_ddp() -> None:
    for options in ({}, {"static_graph": True}):
        assert_close_to_plain(training, options, checks=CHECKS, harmless=mutations.WEIGHTS)


@on_ranks(4, timeout=400.0)
def test_weights_stay_equal_with_the_bytes_of_the_formula() -> None:
    """DDP rebuilds its buckets after the first step."""
    for topology, grid in (
        (1, Grid(nodes=4, ranks_per_node=1)),
        (2, Grid(nodes=2, ranks_per_node=2)),
        (4, Grid(nodes=1, ranks_per_node=4)),
    ):
        run, buckets = DDPRun(ALL, topology=topology), []
        for _ in range(2):
            with count_sent_bytes(topology) as sent:
                run.train(1)
            buckets.append(sizes(run.state))
            expected = [all_reduce_exchange(numel, grid=grid, config=ALL) for numel in buckets[-1]]
            last = run.state.stats()["last_step"]
            assert sent["inter"] == last["inter_bytes"] == sum(each.inter_bytes for each in expected)
            assert sent["intra"] == last["intra_bytes"] == sum(each.intra_bytes for each in expected)
        first, second = buckets
        assert len(first) < 3 <= len(second) and sum(first) == sum(second)
        run.check_ranks()
        stats = run.state.stats()
        assert stats["steps"] == 2
        assert stats["total"]["collectives"] > stats["last_step"]["collectives"] > 0
        table = run.state.explain()
        assert table.startswith(f"ranks {grid.nodes} x {grid.ranks_per_node}\nbucket 0: ")
        assert table.count("all-reduce ") == len(sizes(run.state))
        if topology == 1:
            # Buckets of 5,000 values: longer ones come nearer to 7.76.
            assert stats["compression_ratio"] > 6.5


@pytest.mark.slow
@on_ranks(2)
def test_accumulated_and_clipped_gradients_are_averaged_as_by_plain_ddp() -> None:
    for is_view in (False, True):
        options = {"clip": 0.5, "gradient_as_bucket_view": is_view}
        assert_close_to_plain(training, options, 3, checks=CHECKS, harmless=mutations.WEIGHTS)


class Unused(nn.Module):
    """One of two layers has a part in the loss, another one in each step, and perhaps on each rank."""

    def __init__(self, *, by_rank: bool = False) -> None:
        super().__init__()
        self.gpt, self.calls = ToyGPT(), 0
        self.layers = nn.ModuleList(nn.Linear(61, 61) for _ in range(2))
        self.offset = dist.get_rank() if by_rank else 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers[(self.calls + self.offset) % 2](self.gpt(tokens))


def using_some(config: GradientConfig | None, by_rank: bool, accumulate: int) -> Result:
    torch.manual_seed(1)
    run = DDPRun(config, model=Unused(by_rank=by_rank), find_unused_parameters=True)
    return run.train(3, accumulate=accumulate).finish()


def joining(config: GradientConfig | None) -> Result:
    """The first rank has a batch more than the other, which joins with zeros."""
    run = DDPRun(config)
    with run.model.join():
        run.train(3 - dist.get_rank())
    return run.finish()


@on_ranks(2)
def test_unused_parameters_and_uneven_inputs_are_averaged_as_by_plain_ddp() -> None:
    for by_rank, accumulate in ((False, 1), (True, 2)):
        assert_close_to_plain(using_some, by_rank, accumulate, checks=CHECKS, harmless=mutations.WEIGHTS)
    assert_close_to_plain(joining, checks=CHECKS, harmless=mutations.WEIGHTS)


@pytest.mark.slow
@on_ranks(4)
def test_full_precision_equals_plain_ddp_and_is_reported() -> None:
    plain = DDPRun(None).train(2).losses
    late = DDPRun(replace(ALL, start_step=2)).train(2)
    assert late.losses == plain
    assert late.state.explain().count("full precision until step 2") == len(sizes(late.state))
    stats = late.state.stats()
    assert stats["compression_ratio"] == 1.0
    assert stats["last_step"]["inter_bytes"] == pytest.approx(2 * 4 * sum(sizes(late.state)) * 3 / 4, abs=8)
    late.train(1)
    assert late.state.explain().count("all-reduce inter int4/128") == len(sizes(late.state))
    short = DDPRun(GradientConfig(min_numel=1 << 20)).train(2)
    assert short.losses == plain
    assert "all-reduce: part below min_numel=1048576" in short.state.explain()

    with pytest.warns(UserWarning, match="all ranks are on one node"):
        inside = DDPRun(GradientConfig(min_numel=0), topology=4).train(2)
    assert inside.losses == plain
    table = inside.state.explain()
    assert table.count("GradientConfig(inside_one_node=True) quantizes") == len(sizes(inside.state))

    torch.manual_seed(0)
    double = DDPRun(ALL, model=nn.Linear(64, 64).double())
    with pytest.warns(UserWarning, match="torch.float64 are averaged in full precision"):
        double.model(torch.ones(1, 64).double() * dist.get_rank()).sum().backward()
    (weight, _) = double.model.parameters()
    assert weight.grad is not None and (weight.grad == 1.5).all()
    assert "full precision: float64" in double.state.explain()


@pytest.mark.slow
@on_ranks(4)
def test_pairs_of_ranks_train_a_model_each_and_errors_are_the_same_on_all_ranks() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    outside = sdp4bit.DDPCommState(pairs[0], topology=1, config=ALL).explain()
    assert outside.startswith("ranks 2 x 1" if dist.get_rank() < 2 else "ranks 1 x 1")
    torch.manual_seed(0)
    model = DistributedDataParallel(ToyGPT(), process_group=mine)
    state = sdp4bit.DDPCommState(mine, topology=1, config=ALL)
    model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
    loss_of(model, next(batches())).backward()
    assert state.explain().startswith("ranks 2 x 1\nbucket 0: ")
    new = sdp4bit.DDPCommState(mine, topology=1)
    assert "no gradients yet" in new.explain() and new.stats()["compression_ratio"] is None
    with pytest.raises(ValueError, match=r"different settings(.|\n)*seed: 0 \[rank 0\], 1 \[rank 1\]"):
        sdp4bit.DDPCommState(mine, topology=1, seed=dist.get_rank())
    with pytest.raises(TypeError, match=r"sdp4bit\.DDPCommState: config='sdp4bit' must be a GradientConfig"):
        sdp4bit.DDPCommState(mine, config="sdp4bit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not the state of an sdp4bit\.DDPCommState"):
        state.load_state_dict({"steps": 3})


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 40, sparse=True), nn.Linear(40, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("config", [ALL, GradientConfig()], ids=["quantized", "rows that are too short"])
@on_ranks(3)
def test_sparse_gradients_are_averaged_as_without_a_hook(config: GradientConfig) -> None:
    def backward(hooked: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(SparseEmbedding())
        state = sdp4bit.DDPCommState(topology=1, config=config)
        if hooked:
            model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
        torch.manual_seed(dist.get_rank())
        # Tokens repeat, and ranks have different ones.
        tokens = torch.randint(10 + 10 * dist.get_rank(), (4, 30))
        model(tokens).square().mean().backward()
        module = model.module
        assert module.embed.weight.grad.is_sparse
        return module.embed.weight.grad.coalesce(), module.head.weight.grad, state

    rows, dense, _ = backward(False)
    ours, quantized, state = backward(True)
    assert torch.equal(ours.indices(), rows.indices()) and torch.equal(ours.values(), rows.values())
    assert torch.equal(quantized, dense) == (config != ALL)
    assert state.explain().count("values, full precision: sparse gradients") == 1
    assert state.stats()["steps"] == 1


def run_with_unused_parameters() -> DDPRun:
    torch.manual_seed(1)
    return DDPRun(ALL, model=Unused(), find_unused_parameters=True)


def train_and_save(folder: str) -> list[list[torch.Tensor]]:
    """Return the gradients of the two steps after the checkpoint."""
    run = run_with_unused_parameters().train(4)
    dcp.save({"model": run.model.state_dict(), "comm": run.state}, checkpoint_id=folder)
    return gradients_of_two_steps(run)


def gradients_of_two_steps(run: DDPRun) -> list[list[torch.Tensor]]:
    found = []
    for _ in range(2):
        run.backward()
        found.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
        run.model.zero_grad()
    return found


def load_and_continue(folder: str, loads: bool) -> list[list[torch.Tensor]]:
    run = run_with_unused_parameters()
    saved = {"model": run.model.state_dict()} | ({"comm": run.state} if loads else {})
    dcp.load(saved, checkpoint_id=folder)
    run.model.load_state_dict(saved["model"])
    run.model.module.calls = 4
    for _ in range(4):
        next(run.data)
    return gradients_of_two_steps(run)


def test_a_new_process_continues_from_a_distributed_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, 2, str(tmp_path))
    for loads in (True, False):
        resumed = run_ranks(load_and_continue, 2, str(tmp_path), loads)
        for step, (theirs, ours) in enumerate(zip(expected[0], resumed[0], strict=True)):
            assert all(map(torch.equal, theirs, ours)) == loads, (step, loads)


def test_without_a_process_group_the_error_says_how_to_get_one() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        sdp4bit.DDPCommState()

"""FSDP2 integration, what users bring: edits, frozen parameters, odd and mixed groups, their optimizers.

Layer: real processes over gloo, 2 nodes x 2 ranks, or x 1 rank for what is the same on one level. Where it
can be, results equal plain FSDP2's bit for bit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.traffic import Grid
from tests import mutations
from tests.oracles.traffic import gradient_exchange, weight_gather, weight_refresh
from tests.ranks import first_rank_warns, on_ranks
from tests.tables import explained, flat
from tests.toy import (
    IDENTITY,
    LOSSLESS,
    POLICY,
    QUANTIZED,
    VOCABULARY,
    Run,
    adamw,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    assert_variants_equal,
    build,
    data_mesh,
)


@on_ranks(2)
def test_models_that_never_train_serve_what_was_loaded_and_edited() -> None:
    """A model that is loaded, never trained and edited between generations."""
    expected = Run(build(), None).evaluate()
    for mode in (torch.no_grad, torch.inference_mode):
        model = build()
        with mode():
            model.load_state_dict(build().state_dict(), assign=True)
            model._apply(torch.clone)  # under inference_mode: tensors without version counters
        run = Run(model, LOSSLESS, topology=1)
        assert [run.evaluate(mode) for _ in range(2)] == [expected] * 2
        model.reshard()
        with mode():
            model.head.weight.mul_(0.5)
        assert run.evaluate(mode) != expected


def adapt(model: Any) -> Any:
    """Freeze the first block, and all of the second but the last layer."""
    model.blocks.requires_grad_(False)
    model.blocks[1].fc2.requires_grad_(True)
    return model


def adapting(config: SDP4BitConfig | None) -> list[float]:
    """Frozen weights are edited before the optimizer steps; then a frozen layer begins to train."""
    run = Run(adapt(build()), config, ordered=True)
    for step in range(3):
        if step == 2:
            run.model.reshard()
            run.model.blocks[1].fc1.requires_grad_(True)
        run.backward()
        with torch.no_grad():
            run.model.blocks[0].qkv.weight.mul_(0.9)
        run.step()
    return run.finish()


def assert_only_trainable_parameters_are_sent(run: Run) -> None:
    grid = Grid(nodes=2, ranks_per_node=2)
    for comm in run.comm.groups:
        group, config = comm.view, run.comm.config
        trainable = sum(s.end - s.start for s in group.params if s.sharded.requires_grad)
        times = 1 if group.name == "(root)" else 2  # the root's weights stay for the backward
        weights = [weight_gather(group.shard_numel, grid=grid, config=config.weights, times=times)]
        gradients = []
        if trainable:
            weights.append(weight_refresh(trainable, grid=grid, config=config.weights))
            gradients.append(gradient_exchange(trainable, grid=grid, config=config.gradients))
        for counter, planned in ((comm.weights.traffic, weights), (comm.gradients.traffic, gradients)):
            assert counter.last_step.intra_bytes == sum(each.intra_bytes for each in planned)
            assert counter.last_step.inter_bytes == sum(each.inter_bytes for each in planned)


@pytest.mark.like_plain
@on_ranks(4)
def test_frozen_parameters_are_not_sent_until_they_train() -> None:
    assert_close_to_plain(adapting)
    run = Run(adapt(build()), replace(QUANTIZED, separate_parameters=False)).train(2)
    run.evaluate()
    assert_only_trainable_parameters_are_sent(run)
    told = flat(run.comm.explain(full=True))
    assert "12 frozen not sent" in told and "10 frozen not sent" in told
    groups = explained(run.comm.explain(full=True))
    assert [name for name, text in groups.items() if "none, all frozen" in text] == ["blocks.0"]
    assert sum("Hadamard" in text for text in groups.values()) == 3
    run.model.reshard()
    run.model.blocks[1].fc1.requires_grad_(True)
    run.train(3)  # the first refresh after that sends the whole row
    run.evaluate()
    assert_only_trainable_parameters_are_sent(run)


class Experts(nn.Module):
    """Three experts: on four ranks one holds none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, width, width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("blw,ewv->blv", x, self.weight)


class Zoo(nn.Module):
    """Empty shards, shards along columns, buffers, fp32 beside bf16, tied weights, one element."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(VOCABULARY, width)
        self.experts, self.columns = Experts(width), nn.Linear(width, 8)
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 19), nn.Linear(19, width)
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        columns = self.columns(x + self.experts(x))
        normed = self.norm(columns.float().flatten(0, 1)).view(columns.shape).to(x.dtype)
        return self.out(x + self.second(F.gelu(self.first(normed)))) * self.scale


class Outer(nn.Module):
    """A root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.zoo = Zoo()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.zoo(tokens)


def visiting(config: SDP4BitConfig | None) -> list[float]:
    torch.manual_seed(0)
    model = Outer()
    zoo, mesh = model.zoo, data_mesh()

    def along_columns(parameter: nn.Parameter) -> Shard:
        return Shard(parameter.ndim - 1)

    fully_shard(zoo.columns, mesh=mesh, mp_policy=POLICY, shard_placement_fn=along_columns)
    fully_shard(zoo.norm, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    for module in (zoo.experts, [zoo.first, zoo.second], zoo, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    run = Run(model, config, ordered=True).train(2)
    if config is not None:
        replicas = {g.view.name: g.weights.replica.rows.dtype for g in run.comm.groups}
        assert list(replicas) == ["zoo", "zoo.experts", "zoo.columns", "zoo.norm", "zoo.first"]
        assert [name for name, dtype in replicas.items() if dtype == torch.float32] == ["zoo.norm"]
    return run.finish()


@pytest.mark.like_plain
@on_ranks(4)
def test_groups_of_every_kind_train_as_with_plain_fsdp2() -> None:
    # Embeddings of size 1, tied to the output, give losses of 9 to 14, which rounding moves further.
    checks = [(IDENTITY, assert_equal), (QUANTIZED, partial(assert_close, loss=0.01))]
    assert_close_to_plain(visiting, checks=checks)


class Both:
    """Two optimizers over disjoint parameters, in a wrapper that is no optimizer."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.both = optimizers

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()


def muon_and_adamw(model: nn.Module) -> Both:
    """Muon for the matrices of the blocks, AdamW for the rest, as is usual."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=2e-2, adjust_lr_fn="match_rms_adamw")
    return Both(muon, adamw(model, params=others))


def bringing(config: SDP4BitConfig | None, kind: str) -> list[float]:
    """Two steps with an optimizer of this kind."""
    run = Run(build(), config, topology=1)
    if kind == "two":
        params = list(run.model.parameters())
        run.optimizer = Both(*(adamw(run.model, params=half) for half in (params[::2], params[1::2])))
    if kind == "Muon":
        run.optimizer = muon_and_adamw(run.model)
    run.backward()
    if kind == "late":
        run.optimizer = adamw(run.model)
    run.step()
    if kind == "late":  # and then its parameters are others
        (group,) = run.optimizer.param_groups
        halves = group["params"][3:], group["params"][:3]
        run.optimizer.param_groups = [{**group, "params": params} for params in halves]
    losses = run.train(1).finish()
    assert config is None or run.comm.stats()["steps"] == 2
    return losses


class PlainSGD:
    """No torch optimizer: it updates local tensors. Unmarked steps are edits, sent in full precision."""

    def __init__(self, run: Run, *, marks: bool) -> None:
        self.run, self.marks = run, marks

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.run.model.parameters():
            parameter.to_local().add_(parameter.grad.to_local(), alpha=-0.3)
        if self.marks and self.run.comm is not None:
            self.run.comm.mark_step()

    def zero_grad(self) -> None:
        self.run.model.zero_grad()


def descending(config: SDP4BitConfig | None, marks: bool) -> list[float]:
    run = Run(build(), config, topology=1)
    run.optimizer = PlainSGD(run, marks=marks)
    losses = run.train(2).finish()
    if config is not None:
        assert run.comm.stats()["steps"] == 2
        assert (run.comm.stats()["full_refreshes"] == 0) == marks
    return losses


@pytest.mark.like_plain
@on_ranks(2)
def test_optimizers_may_come_late_change_be_wrapped_or_written_by_hand() -> None:
    exact = [(IDENTITY, assert_equal)]
    assert_variants_equal(bringing, ("usual",), ("two",), ("late",), checks=exact, harmless=[mutations.TWICE])
    # SGD takes larger steps than AdamW: rounding moves losses further.
    close = [(IDENTITY, assert_equal), (QUANTIZED, partial(assert_close, loss=0.01))]
    assert_close_to_plain(descending, True, checks=close)
    assert_close_to_plain(descending, False, checks=exact, harmless=[mutations.TWICE])


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_steps_of_muon_are_noticed() -> None:
    assert_close_to_plain(bringing, "Muon")


INSIDE = SDP4BitConfig(gradients=GradientConfig(min_numel=0, intra_bits=4, inside_one_node=True))
"""For one node: no bits between nodes."""


@on_ranks(2)
def test_muon_with_few_bits_is_warned_of_once() -> None:
    """Also if it steps views, which are no parameters of the model. Others and 8 bits are no cause."""
    warned = r"Muon steps with gradients of int4 .* GradientConfig\(inter_bits=8\)"
    for config, views, is_warned in (
        (QUANTIZED, False, True),
        (QUANTIZED, True, True),
        (SDP4BitConfig(gradients=GradientConfig(min_numel=0, inter_bits=8)), False, False),
        (SDP4BitConfig(gradients=None), False, False),
        (SDP4BitConfig(gradients=GradientConfig(min_numel=0, start_step=1)), False, True),
        (SDP4BitConfig(gradients=GradientConfig(min_numel=0, start_step=9)), False, False),
        (INSIDE, False, False),
    ):
        run = Run(build(), config, topology=2 if config is INSIDE else 1)
        run.optimizer = both = muon_and_adamw(run.model)
        if views:
            (group,) = both.both[0].param_groups
            given = group["params"]
            group["params"] = [p.detach() for p in given]
        with first_rank_warns(warned, firsts=(0,) if is_warned else ()):
            for _ in range(2):
                run.backward()
                if views:
                    for view, p in zip(group["params"], given, strict=True):
                        view.grad = p.grad
                run.step()
        run.comm.remove()


# -- groups whose weights are left to FSDP2 -----------------------------------------------------------


WIDTH = 24


class Adapted(nn.Module):
    """A frozen bf16 layer beside trainable fp32 ones; a scale in fp16 and an order of columns besides."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float16), requires_grad=False)
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))
        return x[..., self.order] * self.scale[1].float()


class Reordered(nn.Module):
    """Nothing but integers."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.order]


REASONS = {
    "layers.0": "types bfloat16 and float16 and float32 and int64 in one group whose shards do not align",
    "layers.1": "int64 parameters",
}


class Model(nn.Module):
    """Token logits through a layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Adapted(), Reordered()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixing(config: SDP4BitConfig | None) -> list[float]:
    """Train layers whose weights are not quantized, in a model whose other weights are."""
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    dense = ", ".join(f"{name} ({reason})" for name, reason in REASONS.items())
    told = re.escape(f"weights are left to FSDP2 in {dense}")
    with first_rank_warns(told, firsts=() if config is None else (0,)):
        run = Run(model, config, ordered=True, fused=None, foreach=False)
    losses = run.train(2).finish()
    if config is not None:
        root, *layers = run.comm.groups
        assert root.weights.replica is not None
        for layer in layers:
            reason, has_gradients = REASONS[layer.view.name], layer.view.name != "layers.1"
            assert layer.weights.replica is None and str(layer.weights.unquantized_reason) == reason
            assert layer.gradients.bits == (4 if config is QUANTIZED and has_gradients else None)
            assert layer.gradients.reductions == (2 if has_gradients else 0)
            # A ring over 2 x 2 ranks, in forward and backward.
            sent, group = layer.weights.traffic.last_step, layer.view
            row = sum((s.end - s.start) * (group.row_dtype or s.dtype).itemsize for s in group.params)
            assert sent.intra_bytes == sent.inter_bytes == 3 * row
            assert (sent.intra_bytes, sent.inter_bytes) == (sent.plain_intra_bytes, sent.plain_inter_bytes)
            assert reason in flat(run.comm.explain(full=True))
        run.comm.state_dict()
    return losses


@pytest.mark.like_plain
@pytest.mark.skipif(torch.__version__ < "2.10", reason="FSDP2 of torch 2.9 takes no integer parameters")
@on_ranks(4)
def test_groups_of_mixed_types_train_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(mixing)


def resharding(config: SDP4BitConfig | None, topology: int) -> list[float]:
    """Backward gathers over pairs of ranks, which may be those of a node."""
    run = Run(build(reshard_after_forward=2), config, topology=topology, ordered=True).train(2)
    losses = run.finish()
    if config is not None:
        assert flat(run.comm.explain(full=True)).count("reshard_after_forward=2") == 4
        for group in run.comm.groups:
            # A ring over all ranks in forward and, of rows of twice the size, over a pair in backward.
            sent, row = (
                group.weights.traffic.last_step,
                group.view.shard_numel * group.view.row_dtype.itemsize,
            )
            expected = (3.5 * row, 1.5 * row) if topology == 2 else (0, 5 * row)
            assert (sent.intra_bytes, sent.inter_bytes) == expected
            assert (sent.plain_intra_bytes, sent.plain_inter_bytes) == expected
            assert group.weights.replica is None and group.gradients.reductions == 2
    return losses


@pytest.mark.like_plain
@on_ranks(4)
def test_an_int_reshard_after_forward_trains_as_with_plain_fsdp2() -> None:
    # Without a replica nothing that breaks the refreshes matters.
    assert_close_to_plain(resharding, 2, harmless=mutations.WEIGHTS)
    resharding(QUANTIZED, 1)

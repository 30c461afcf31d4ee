"""FSDP2 integration, LoRA: frozen weights of other types, packed ones too, beside adapters in one group.

Layer: real processes over gloo, 4 ranks as 2 nodes x 2 or as 4 nodes. Frozen weights travel once, as bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sdp4bit import SDP4BitConfig
from sdp4bit.traffic import Grid
from tests.oracles.traffic import gradient_exchange, weight_refresh
from tests.ranks import on_ranks
from tests.tables import flat
from tests.toy import (
    IDENTITY,
    POLICY,
    QUANTIZED,
    VOCABULARY,
    Run,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    data_mesh,
)

TAKES_INTEGERS = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="FSDP2 of torch 2.9 takes no integer parameters"
)
WIDTH, RANK = 24, 8
FP32 = MixedPrecisionPolicy()
EXACT, CLOSE = (replace(config, separate_parameters=False) for config in (IDENTITY, QUANTIZED))
CHECKS = [(EXACT, assert_equal), (CLOSE, assert_close)]


class PackedLinear(nn.Module):
    """Represents bitsandbytes' Linear4bit, which `tests/ecosystem` trains: two 4-bit codes in each byte."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        codes = torch.randint(0, 0x7F, (WIDTH * WIDTH // 2, 1), dtype=torch.uint8)
        codes[::4], codes[1::4] = 0x80, 0x7F  # infinity if the bytes are read as bf16
        self.weight = nn.Parameter(codes.view(-1).view(storage).view(-1, 1), requires_grad=False)
        self.quant_state = "scales"

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.view(-1).view(torch.uint8)
        low, high = codes & 15, codes >> 4
        return x @ ((torch.stack([low, high]).to(x.dtype) - 7.5) / 60).view(WIDTH, WIDTH)


class Adapted(nn.Module):
    """A frozen layer, packed or in bf16, a frozen norm in fp32, and an adapter in fp32."""

    def __init__(self, storage: torch.dtype | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        plain = nn.Linear(WIDTH, WIDTH, bias=False).to(torch.bfloat16).requires_grad_(False)
        self.base = plain if storage is None else PackedLinear(storage)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.to(self.norm.weight.dtype))
        base = self.base(y.to(torch.bfloat16)).to(y.dtype)
        return x + base + self.up(self.down(y.to(self.down.weight.dtype))).to(y.dtype)


class Model(nn.Module):
    """Token logits through two adapted layers; the ends are frozen too."""

    def __init__(self, storage: torch.dtype | None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList([Adapted(storage), Adapted(storage)])
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(storage: torch.dtype | None, policy: MixedPrecisionPolicy) -> Any:
    torch.manual_seed(0)
    model = Model(storage)
    for layer in model.layers:
        fully_shard(layer, mesh=data_mesh(), mp_policy=policy)
    return fully_shard(model, mesh=data_mesh(), mp_policy=policy)


def frozen_bits(run: Run) -> list[Tensor]:
    """Return the frozen weights of a layer as they are gathered, as bytes."""
    layer = run.model.layers[0]
    layer.unshard()
    bits = [
        p.detach().contiguous().view(-1).view(torch.uint8).clone()
        for p in layer.parameters()
        if not p.requires_grad
    ]
    layer.reshard()
    return bits


def assert_frozen_weights_travel_once(comm: Any, config: SDP4BitConfig, *, nodes: int) -> None:
    """A layer sends all of its row in the first of three steps, and of adapters what a plan says."""
    grid, group = Grid(nodes=nodes, ranks_per_node=4 // nodes), comm.view
    trained = sum(s.end - s.start for s in group.params if s.sharded.requires_grad)
    refresh = weight_refresh(trained, grid=grid, config=config.weights).inter_bytes
    if config is EXACT:
        refresh = trained * group.row_dtype.itemsize * (nodes - 1)
    sent, total = comm.weights.traffic.last_step.inter_bytes, comm.weights.traffic.total.inter_bytes
    assert sent == refresh
    assert total == group.shard_numel * group.row_dtype.itemsize * (nodes - 1) + 3 * refresh
    reduction = gradient_exchange(trained, grid=grid, config=config.gradients)
    assert comm.gradients.traffic.last_step.inter_bytes == reduction.inter_bytes
    assert comm.weights.full_refreshes == 0


def training(
    config: SDP4BitConfig | None, storage: torch.dtype | None, policy: MixedPrecisionPolicy, topology: int
) -> list[float]:
    """Train adapters; frozen weights travel once and stay what they are, bit for bit."""
    run = Run(build(storage, policy), config, topology=topology, ordered=True, fused=None, foreach=False)
    before = frozen_bits(run)
    run.train(3)
    losses = run.finish()
    trained = [p.to_local() for p in run.model.parameters() if p.requires_grad]
    losses[-1] = sum(
        each.detach().double().abs().sum().item() for each in trained
    )  # packed infinities left out
    assert all(torch.equal(*pair) for pair in zip(before, frozen_bits(run), strict=True))
    if config is not None:
        for layer in run.comm.groups[1:]:
            assert_frozen_weights_travel_once(layer, config, nodes=4 // topology)
    return losses


@pytest.mark.like_plain
@pytest.mark.parametrize(
    ("storage", "policy", "topology"),
    [
        pytest.param(None, FP32, 2, id="bf16 base", marks=pytest.mark.slow),
        pytest.param(torch.uint8, FP32, 1, id="uint8, full replica", marks=TAKES_INTEGERS),
        pytest.param(
            torch.uint8, POLICY, 2, id="uint8, bf16 policy", marks=(TAKES_INTEGERS, pytest.mark.slow)
        ),
        pytest.param(torch.bfloat16, FP32, 2, id="packed bf16", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, POLICY, 1, id="packed bf16, bf16 policy, full replica"),
    ],
)
@on_ranks(4)
def test_adapters_train_beside_frozen_weights_of_other_types(
    storage: torch.dtype | None, policy: MixedPrecisionPolicy, topology: int
) -> None:
    assert_close_to_plain(training, storage, policy, topology, checks=CHECKS)


def editing(config: SDP4BitConfig | None, storage: torch.dtype | None) -> list[float]:
    """Edit frozen weights between two steps; later an adapter is frozen, and a norm begins to train."""
    run = Run(build(storage, FP32), config, ordered=True, fused=None, foreach=False).train(1)
    before = frozen_bits(run)
    frozen = run.model.layers[0].base.weight
    with torch.no_grad():
        if storage is None:
            frozen.mul_(0.999)
        else:
            frozen.to_local().bitwise_xor_(torch.tensor(1, dtype=torch.uint8))
    run.train(1)
    run.model.layers[0].norm.requires_grad_(True)
    run.model.layers[1].up.requires_grad_(False)
    run.train(2)
    losses = run.finish()
    if config is QUANTIZED:
        # Bits travel beside the differences of values, so nothing else is sent in full precision.
        assert [group.weights.full_refreshes for group in run.comm.groups[1:]] == [0, 0]
    if storage is not None:
        assert torch.equal(before[-1] ^ 1, frozen_bits(run)[-1])  # the base comes last
    return losses


@pytest.mark.like_plain
@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(None, id="bf16 base", marks=pytest.mark.slow),
        pytest.param(torch.uint8, id="packed uint8", marks=TAKES_INTEGERS),
    ],
)
@on_ranks(4)
def test_edits_of_frozen_bits_are_sent_as_they_are(storage: torch.dtype | None) -> None:
    assert_close_to_plain(editing, storage)


@pytest.mark.parametrize(
    ("storage", "policy"),
    [
        pytest.param(torch.uint8, FP32, id="uint8", marks=TAKES_INTEGERS),
        pytest.param(torch.bfloat16, POLICY, id="bf16", marks=pytest.mark.slow),
    ],
)
@on_ranks(4)
def test_a_resume_with_frozen_bits_is_bit_identical(
    storage: torch.dtype, policy: MixedPrecisionPolicy, tmp_path: Path
) -> None:
    run = Run(build(storage, policy), QUANTIZED, fused=None, foreach=False).train(2)
    dcp.save({"comm": run.comm, "model": run.model.state_dict()}, checkpoint_id=str(tmp_path))
    resumed = Run(build(storage, policy), QUANTIZED, fused=None, foreach=False)
    dcp.load({"comm": resumed.comm, "model": resumed.model.state_dict()}, checkpoint_id=str(tmp_path))
    assert resumed.evaluate() == run.evaluate()
    for mine, theirs in zip(resumed.comm.groups, run.comm.groups, strict=True):
        # Rows of the checkpoint were used: the one refresh in full precision sends them.
        assert mine.weights.traffic.total.inter_bytes > 0 and mine.weights.due is theirs.weights.due
        assert torch.equal(
            mine.weights.replica.own_shard.view(torch.uint8),
            theirs.weights.replica.own_shard.view(torch.uint8),
        )


@TAKES_INTEGERS
@on_ranks(4)
def test_telemetry_measures_values_alone() -> None:
    run = Run(build(torch.uint8, FP32), QUANTIZED, fused=None, foreach=False).train(3)
    run.evaluate()
    drift, error = run.comm.stats()["weight_drift"], run.comm.stats()["weight_error"]
    assert drift is not None and 0 < drift < 0.01
    assert error is not None and 0 < error < 0.5
    assert flat(run.comm.explain(full=True)).count("3 frozen not sent") == 3

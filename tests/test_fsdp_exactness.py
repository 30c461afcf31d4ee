"""FSDP2 integration, exactness: what must be equal bit for bit, in real processes over gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from tests.ranks import run_ranks
from tests.toy import adamw, assert_replicas_identical, batches, build, train

IDENTITY = SDP4BitConfig(
    weights=WeightConfig(bits=None), gradients=GradientConfig(intra_bits=None, inter_bits=None, min_numel=0)
)


def train_with(config: SDP4BitConfig | None, topology: int, steps: int) -> tuple[list[float], dict[str, Any]]:
    """Train the toy model; None for plain FSDP2. Returns this rank's losses and the statistics."""
    model = build()
    comm = None
    if config is not None:
        config = replace(config, telemetry=TelemetryConfig(interval=1))
        comm = sdp4bit.quantize_communication(model, topology=topology, config=config)
    losses = train(model, adamw(model), batches(), steps)
    if comm is None:
        return losses, {}
    assert_replicas_identical(comm)
    return losses, {**comm.stats(), **comm.measure()}


def losses_of(results: list[Any]) -> list[list[float]]:
    return [losses for losses, _ in results]


def test_the_baseline_preset_equals_plain_fsdp2_bit_for_bit() -> None:
    plain = run_ranks(train_with, 4, None, 2, 8)
    baseline = run_ranks(train_with, 4, SDP4BitConfig.preset("baseline"), 2, 8)
    assert losses_of(baseline) == losses_of(plain)


@pytest.mark.parametrize("replica", ["node", "full"])
@pytest.mark.parametrize("topology", [1, 2])
def test_two_ranks_with_the_identity_equal_plain_fsdp2_bit_for_bit(replica: str, topology: int) -> None:
    """A sum of two values has one rounding, whatever the order; so nothing may differ."""
    config = replace(IDENTITY, weights=replace(IDENTITY.weights, replica=replica))
    assert losses_of(run_ranks(train_with, 2, config, topology, 8)) == losses_of(
        run_ranks(train_with, 2, None, topology, 8)
    )


class SumInNodesFirst:
    """A dense reduction that adds as the two-level exchange does: within each node, then over nodes."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        gathered = [torch.empty_like(input_tensor) for _ in range(4)]
        dist.all_gather(gathered, input_tensor, group=group)
        total = (gathered[0] + gathered[1]) + (gathered[2] + gathered[3])
        output_tensor.copy_(total.view(4, -1)[dist.get_rank()])


def train_in_node_order(steps: int) -> tuple[list[float], dict[str, Any]]:
    model = build()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(SumInNodesFirst())
            module.set_force_sum_reduction_for_comms(True)
    return train(model, adamw(model), batches(), steps), {}


def test_four_ranks_with_the_identity_differ_from_plain_by_the_order_of_summation_only() -> None:
    """Added in the same order, all losses are equal bit for bit."""
    identity = run_ranks(train_with, 4, IDENTITY, 2, 8)
    assert losses_of(identity) == losses_of(run_ranks(train_in_node_order, 4, 8))


@pytest.mark.parametrize(
    "name",
    [
        "sdp4bit",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qw", "qwd", "ulq", "tlq", "tlq-hs")),
    ],
)
def test_presets_train_on_their_own_paths(name: str) -> None:
    config = SDP4BitConfig.preset(name)
    losses, stats = run_ranks(train_with, 4, config, 2, 6)[0]
    plain, _ = run_ranks(train_with, 4, None, 2, 6)[0]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.05)
    assert stats["compression_ratio"] > 1.3
    assert (stats["weight_drift"] is None) == (config.weights is None)
    assert (stats["gradient_error"] is None) == (config.gradients is None)


def test_qw_sends_the_weights_themselves_and_loses_their_precision() -> None:
    _, direct = run_ranks(train_with, 4, SDP4BitConfig.preset("qw"), 2, 6)[0]
    _, difference = run_ranks(train_with, 4, SDP4BitConfig.preset("qwd"), 2, 6)[0]
    assert direct["last_step"]["inter_bytes"] == difference["last_step"]["inter_bytes"]
    assert direct["weight_drift"] > 10 * difference["weight_drift"]


def test_slices_of_a_row_do_not_change_the_result() -> None:
    config = SDP4BitConfig()
    sliced = replace(config, gradients=replace(config.gradients, pipeline_chunks=4))
    assert losses_of(run_ranks(train_with, 4, sliced, 2, 4)) == losses_of(
        run_ranks(train_with, 4, config, 2, 4)
    )


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    config = SDP4BitConfig(seed=5)
    first, again = (losses_of(run_ranks(train_with, 4, config, 2, 4)) for _ in range(2))
    assert first == again
    assert losses_of(run_ranks(train_with, 4, replace(config, seed=6), 2, 4)) != first


def test_all_back_ends_give_the_same_losses() -> None:
    pytest.importorskip("numba")
    expected = losses_of(run_ranks(train_with, 4, SDP4BitConfig(), 2, 4))
    assert losses_of(run_ranks(train_with, 4, SDP4BitConfig(), 2, 4, backend="numba")) == expected


@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [(2, 2), pytest.param(3, 2, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_full_and_node_replicas_give_equal_losses(nodes: int, per_node: int) -> None:
    config = SDP4BitConfig()
    full = replace(config, weights=replace(config.weights, replica="full"))
    results = [run_ranks(train_with, nodes * per_node, c, per_node, 5) for c in (config, full)]
    assert losses_of(results[0]) == losses_of(results[1])


def train_long(replica: str, steps: int) -> list[float]:
    model = build()
    config = SDP4BitConfig(weights=WeightConfig(replica=replica))
    comm = sdp4bit.quantize_communication(model, topology=2, config=config)
    optimizer, data, losses = adamw(model), batches(), []
    for _ in range(2):
        losses += train(model, optimizer, data, steps // 2)
        assert_replicas_identical(comm)
    assert comm.measure()["weight_drift"] < 0.02
    return losses


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_replicas_stay_identical_and_both_kinds_agree(steps: int) -> None:
    node = run_ranks(train_long, 4, "node", steps, timeout=240, backend="auto")
    full = run_ranks(train_long, 4, "full", steps, timeout=240, backend="auto")
    assert node == full
    tenth = max(2, steps // 10)
    assert sum(node[0][-tenth:]) < (0.8 if steps == 200 else 1.0) * sum(node[0][:tenth])

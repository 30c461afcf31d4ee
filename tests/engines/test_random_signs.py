"""Random signs before the transform: drawn alike by all ranks, undone after the sum. Layer: processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import GradientConfig, SDP4BitConfig
from sdp4bit.engines.explain import describe_gradients
from sdp4bit.quantization import ops
from tests.collectives.test_reduce_scatter import make, reduce_special_values, reduce_with_slices
from tests.engines.fsdp2.test_exactness import train_with
from tests.ranks import on_ranks, run_ranks

SIGNED = GradientConfig(random_signs=True)
NEAREST = replace(SIGNED, intra_rounding="nearest", inter_rounding="nearest")
LENGTHS = (0, 1, 31, 128, 777)


def gathered(tensor: Tensor) -> list[Tensor]:
    results = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(results, tensor)
    return results


def reduce_integers(nodes: int, per_node: int, chunks: int) -> None:
    """With fp32 on the wire the transformed, signed reduction of integers is the plain one, exactly."""
    world, rank = nodes * per_node, dist.get_rank()
    config = GradientConfig(intra_bits=None, inter_bits=None, random_signs=True, pipeline_chunks=chunks)
    _, reduce_scatter, _ = make(nodes, per_node, config)
    assert not reduce_scatter._signs(0), "nothing is quantized: there is no transform and no sign to change"
    reduce_scatter._hadamard = reduce_scatter._random_signs = True
    for call, numel in enumerate(LENGTHS):
        rows = (torch.arange(world * numel) % 997).float().view(world, numel)
        inputs = [rows * (r + 1) + r for r in range(world)]
        output = torch.full((numel,), float("nan"))
        reduce_scatter(output, inputs[rank].reshape(-1).clone(), call=call)
        assert torch.equal(output, torch.stack(inputs).sum(0)[rank])


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 2), (2, 1), (1, 2)])
def test_an_unquantized_reduction_is_the_plain_one(nodes: int, per_node: int) -> None:
    run_ranks(reduce_integers, nodes * per_node, nodes, per_node, 3)


@on_ranks(4)
def test_signs_are_those_of_the_call_on_every_rank() -> None:
    """Other signs give another rounding of the same sum, every call other ones, and the ranks the same."""
    _, plain, _ = make(2, 2, replace(NEAREST, random_signs=False))
    _, signed, _ = make(2, 2, NEAREST)
    rows = torch.randn(4 * 1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    exact = sum(gathered(rows)).view(4, 1000)[dist.get_rank()]
    results = []
    for reduce_scatter, call in ((plain, 0), (plain, 1), (signed, 0), (signed, 1), (signed, 0)):
        results.append(torch.empty(1000))
        reduce_scatter(results[-1], rows, call=call)
        assert (results[-1] - exact).norm() < 0.15 * exact.norm()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[4])
    assert not torch.equal(results[2], results[0])
    assert not torch.equal(results[2], results[3])

    drawn = torch.tensor([signed._signs(call) for call in range(50)])
    assert len(set(drawn.tolist())) == 50
    assert all(torch.equal(drawn, others) for others in gathered(drawn))
    assert 0 < (signed.requantized(rows) - rows).norm() < 0.15 * rows.norm()
    assert not signed.requantized(torch.full((1000,), float("nan"))).isfinite().any()


def test_neither_slices_nor_back_ends_change_a_bit() -> None:
    pytest.importorskip("numba", reason="compares with numba")
    config = replace(SIGNED, intra_group_size=96, inter_group_size=256)
    expected = run_ranks(reduce_with_slices, 4, config)
    actual = run_ranks(reduce_with_slices, 4, config, backend="numba")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_values_that_are_not_finite_come_out_not_finite() -> None:
    run_ranks(reduce_special_values, 4, SIGNED)


@pytest.mark.slow
def test_training_with_them_is_another_rounding_of_the_same_run() -> None:
    signed = SDP4BitConfig(gradients=SIGNED)
    losses, stats, _ = run_ranks(train_with, 4, signed, 2, 5)[0]
    plain, _, _ = run_ranks(train_with, 4, SDP4BitConfig(), 2, 5)[0]
    assert losses != plain
    assert losses == pytest.approx(plain, rel=0.05)
    assert 0 < stats["gradient_error"] < 0.3


def test_calls_of_the_operators_without_signs_are_the_plain_transform() -> None:
    values = torch.randn(2, 1, 100, generator=torch.Generator().manual_seed(0))
    with ops.use_backend("reference"):
        messages = [torch.zeros(2, 64 + 16, dtype=torch.uint8) for _ in range(3)]
        for message, signs in zip(messages, ((), (0,), (6,)), strict=True):
            ops.hadamard_quantize(values, message, 4, 32, True, True, 1, 2, 0, 128, *signs)
    assert torch.equal(messages[0], messages[1])
    assert not torch.equal(messages[0], messages[2])


def test_explain_shows_them() -> None:
    layout = NodeLayout(ranks=(0, 1), nodes=2, ranks_per_node=1)
    assert describe_gradients(SIGNED, layout, 4096) == "inter int4/128, Hadamard with random signs"
    assert describe_gradients(GradientConfig(), layout, 4096) == "inter int4/128, Hadamard"

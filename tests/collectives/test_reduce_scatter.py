"""Two-level reduce-scatter between processes: whose row a rank gets, memory, special values. Layer: gloo.

Sums and bytes of all layouts and settings are tested in test_properties.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives.gradients import reduction_multiplier
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.config import GradientConfig
from sdp4bit.quantization import definition
from sdp4bit.quantization.definition import Call
from sdp4bit.quantization.random import MAX_BUCKETS
from tests.collectives.built import reduce_scatter_of
from tests.ranks import on_ranks, run_ranks, run_threads

EXACT = GradientConfig(intra_bits=None, inter_bits=None)


def reduce_integers() -> None:
    """Each rank ends with the sum of the rows meant for it, in the order of a plain reduce-scatter."""
    rank = dist.get_rank()
    for chunks in (1, 3):
        reduce_scatter, _ = reduce_scatter_of(2, 2, replace(EXACT, pipeline_chunks=chunks))
        assert not reduce_scatter.hadamard, "nothing is quantized: there is no transform"
        for call, numel in enumerate((0, 1, 31, 128, 777, 1000)):
            # Small integers, so that sums are exact in fp32 in any order.
            rows = (torch.arange(4 * numel) % 997).float().view(4, numel)
            inputs = [rows * (r + 1) + r for r in range(4)]
            output = torch.full((numel,), float("nan"))
            reduce_scatter(output, inputs[rank].reshape(-1).clone(), call=call)
            assert torch.equal(output, torch.stack(inputs).sum(0)[rank])


@pytest.mark.gloo
def test_every_rank_gets_its_row_exactly() -> None:
    """On other layouts: threads, in test_properties.py."""
    run_ranks(reduce_integers, 4)


def bytes_of_messages() -> list[int]:
    found = []
    for chunks in (1, 2, 4, 16):
        scratch = Scratch()
        config = GradientConfig(pipeline_chunks=chunks)
        reduce_scatter, _ = reduce_scatter_of(2, 2, config, scratch=scratch)
        reduce_scatter(torch.empty(1 << 14), torch.randn(4 << 14), call=0)
        found.append(sum(buffer.numel() for buffer in scratch._buffers.values()))
    return found


@pytest.mark.gloo
def test_messages_of_many_slices_take_the_memory_of_two() -> None:
    """Per value of the input, on 2 nodes x 2: int8 to and from 2 ranks, int4 rows to and from 2 nodes."""
    whole = 2 * 2 * (2 << 14) * (1 + 2 / 128) + 2 * 2 * (1 << 14) * (1 / 2 + 2 / 128)
    assert whole / (4 << 14) == 2.546875
    assert run_ranks(bytes_of_messages, 4) == 4 * [[whole, whole, whole / 2, whole / 8]]


def reduce_special_values() -> None:
    """A NaN or infinity of one rank reaches its group of the owner's row as NaN, and nothing else."""
    for infinity, hadamard in ((float("inf"), True), (float("-inf"), True), (float("inf"), False)):
        reduce_scatter, _ = reduce_scatter_of(2, 2, GradientConfig(hadamard=hadamard))
        rows = torch.ones(4, 512)
        if dist.get_rank() == 3:
            rows[1, 130], rows[2, 5] = float("nan"), infinity
        output = torch.empty(512)
        reduce_scatter(output, rows.view(-1), call=0)
        poisoned = {1: slice(128, 256), 2: slice(0, 128)}.get(dist.get_rank(), slice(0, 0))
        expected = torch.zeros(512, dtype=torch.bool)
        expected[poisoned] = True
        assert torch.equal(output.isnan(), expected)


@pytest.mark.gloo
def test_values_that_are_not_finite_come_out_not_finite() -> None:
    run_ranks(reduce_special_values, 4)


@on_ranks(2)
def test_the_last_group_and_a_late_step_are_reduced() -> None:
    """gloo's tags are C ints, and a group's last step is followed by its first."""
    rows = torch.randn(2 * 640, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for bucket, call in ((MAX_BUCKETS - 1, 5), (MAX_BUCKETS - 1, 5 + (1 << 32)), (MAX_BUCKETS - 2, 5)):
        reduce_scatter, _ = reduce_scatter_of(2, 1, GradientConfig(), bucket=bucket)
        results.append(torch.empty(640))
        reduce_scatter(results[-1], rows, call=call)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@on_ranks(2)
def test_an_input_of_the_wrong_size_is_an_error() -> None:
    reduce_scatter, _ = reduce_scatter_of(2, 1, GradientConfig())
    with pytest.raises(ValueError, match="2 x 10 values, got 30"):
        reduce_scatter(torch.empty(10), torch.empty(30), call=0)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_a_gradient_that_only_one_node_has_reaches_its_own_ranks_exactly(nodes: int, per_node: int) -> None:
    generator = torch.Generator().manual_seed(nodes * per_node)
    configs = GradientConfig(intra_bits=None), GradientConfig(intra_rounding="nearest")
    for owner, config in product(range(nodes), configs):
        rows = torch.zeros(nodes, per_node, nodes, per_node, 300)
        rows[owner] = torch.randn(per_node, nodes, per_node, 300, generator=generator)
        exact, paper = (
            definition.reduce_scatter(rows, config=replace(config, exact_own=own), call=Call())
            for own in (True, False)
        )
        inside = rows[owner : owner + 1, :, owner : owner + 1]
        expected = inside.sum((0, 1))[0]
        if config.intra_bits is not None and per_node > 1:
            first = owner * per_node
            expected = definition.reduce_scatter(inside, config=config, call=Call(), first_rank=first)[0]
        if per_node == 1:
            assert torch.equal(exact[owner], expected)
        assert (exact[owner] - expected).abs().max() < 1e-5 < (paper[owner] - expected).abs().max()
        others = [node for node in range(nodes) if node != owner]
        assert torch.equal(exact[others], paper[others])  # messages are the same


def count_nonfinite(per_node: int) -> list[tuple[float, bool]]:
    """Return the count of this rank, and whether its sum is finite, with and without exact_own."""
    rows = torch.ones(4, 4, 1000)
    rows[1, 0, 5] = rows[1, 3, 300] = float("inf")
    rows[2, 0, 999] = float("nan")
    found = []
    for exact in (True, False):
        reduce_scatter, _ = reduce_scatter_of(4 // per_node, per_node, GradientConfig(exact_own=exact))
        output, count = torch.empty(1000), torch.zeros(())
        reduce_scatter(output, rows[dist.get_rank()].flatten(), call=0, nonfinite=count)
        found.append((count.item(), bool(output.isfinite().all())))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("per_node", [1, 2])
def test_values_that_are_not_finite_are_counted_once_inside_their_node_or_not(per_node: int) -> None:
    counts = run_threads(count_nonfinite, 4, per_node)
    assert counts == [2 * [(2, False)], 2 * [(0, True)], 2 * [(0, True)], 2 * [(1, False)]]


def test_a_reduction_that_is_no_sum_is_refused() -> None:
    for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 0.25)):
        assert reduction_multiplier(op, ranks=4, name="block") == factor
    with pytest.raises(
        ValueError, match=r"block: the engine asks for the reduction RedOpType\.MAX, but only"
    ):
        reduction_multiplier(dist.ReduceOp.MAX, ranks=4, name="block")

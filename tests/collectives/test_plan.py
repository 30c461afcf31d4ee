"""Plans: chunks of a row, bytes and launches by independent accounts, and how long a plan is kept.

Layer: no process; of collectives that run, gloo.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp4bit.collectives import transport
from sdp4bit.collectives.chunks import MOST_CHUNKS, cut_into_chunks, pipeline_chunks
from sdp4bit.collectives.plan import MOST_PLANS, Plan, plan_all_reduce, plan_reduce, plan_refresh
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import CutParam, Section, cut_row, whole_row
from sdp4bit.collectives.topology import Nodes, Topology, arrange
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.observe.explain import describe_gradients
from sdp4bit.quantization import ops, tables
from sdp4bit.traffic import Grid
from tests.collectives.built import all_reduce_of, reduce_scatter_of, replica_of
from tests.oracles import traffic as oracle
from tests.ranks import run_ranks

MILLION = 1_000_000


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "numel", "chunks"),
    [
        # 4 x 8: 7 x 4 x 1.0156 B per value at 300 GB/s are 95 ps, 3 x 0.5156 B at 25 GB/s are 62 ps.
        (4, 8, 10_000, 1),
        (4, 8, 3 * MILLION, 1),  # 186 us: one cut would save 93 and cost 54
        (4, 8, 4 * MILLION, 2),  # 247 us: it saves 124
        (4, 8, 8 * MILLION, 3),  # 495 us, the root of 9.2
        (4, 8, 223 * MILLION, 15),
        (4, 8, 224 * MILLION, 16),
        (4, 8, 10_000 * MILLION, MOST_CHUNKS),
        # 16 x 2: inside the node 54 ps, which is now the shorter level.
        (16, 2, 5 * MILLION, 1),  # 271 us; a chunk costs 78
        (16, 2, 6 * MILLION, 2),
        # A chunk is a message to each node: 302 us with 128 nodes, 2 ms with 1,000.
        (2, 8, 26 * MILLION, 3),
        (128, 8, 26 * MILLION // 64, 1),
        (1000, 8, 26 * MILLION // 500, 1),
        # One level does nothing.
        (1, 8, 10_000 * MILLION, 1),
        (8, 1, 10_000 * MILLION, 1),
        (1, 1, 10_000 * MILLION, 1),
        (4, 8, 0, 1),
    ],
)
def test_a_row_is_cut_where_that_saves_more_than_it_costs(
    nodes: int, ranks_per_node: int, numel: int, chunks: int
) -> None:
    found = pipeline_chunks(
        numel, config=GradientConfig(), grid=Grid(nodes=nodes, ranks_per_node=ranks_per_node)
    )
    assert found == chunks


def test_what_is_asked_for_is_done() -> None:
    config = GradientConfig(pipeline_chunks=7, intra_group_size=96, inter_group_size=128)
    assert pipeline_chunks(10, config=config, grid=Grid(nodes=1, ranks_per_node=4)) == 7
    chunks = cut_into_chunks([10_000], config=config, grid=Grid(nodes=2, ranks_per_node=2))
    lengths = [place.stop - place.start for ((_, place),) in chunks]
    assert sum(lengths) == 10_000 and all(length % 384 == 0 for length in lengths[:-1])
    assert len(lengths) == 7
    # One value more than four chunks of complete groups makes longer chunks, not a fifth.
    four = GradientConfig(pipeline_chunks=4)
    assert len(cut_into_chunks([4 * 128 + 1], config=four, grid=Grid(nodes=2, ranks_per_node=2))) <= 4
    assert cut_into_chunks([], config=config, grid=Grid(nodes=2, ranks_per_node=2)) == []
    ((_, first),), *_ = cut_into_chunks([10_000], config=config, grid=Grid(nodes=1, ranks_per_node=2))
    assert first.stop == 1440  # groups of 96 only


def test_slices_hold_several_sections_and_cut_them_between_groups() -> None:
    config = GradientConfig(pipeline_chunks=3, intra_group_size=96, inter_group_size=128)
    lengths = [100, 5000, 33, 400, 1]
    chunks = cut_into_chunks(lengths, config=config, grid=Grid(nodes=2, ranks_per_node=2))
    assert len(chunks) == 3
    found: list[list[slice]] = [[] for _ in lengths]
    for chosen in chunks:
        for section, place in chosen:
            found[section].append(place)
    for length, places in zip(lengths, found, strict=True):
        assert places[0].start == 0 and places[-1].stop == length
        for before, after in pairwise(places):
            assert before.stop == after.start and after.start % 384 == 0


def test_the_table_tells_what_was_chosen() -> None:
    layout, one_level = arrange(range(32), [rank // 8 for rank in range(32)]), arrange((0, 1), (0, 0))

    def told(numel: int, chunks: int | None, where: Nodes = layout) -> str:
        return describe_gradients(GradientConfig(pipeline_chunks=chunks), where, numel).rpartition(", ")[2]

    assert told(2000, None) == "Hadamard"
    assert told(8 * MILLION, None) == "3 chunks (chosen)"
    assert told(8 * MILLION, 4) == "4 chunks"
    assert told(8 * MILLION, 1) == told(8 * MILLION, None, one_level) == "Hadamard"


GRIDS = [(1, 2, 1), (2, 1, 1), (2, 2, 1), (2, 8, 1), (3, 2, 1), (4, 1, 2), (8, 4, 1), (8, 2, 4), (6, 3, 2)]
CONFIGS = [
    GradientConfig(min_numel=0),
    GradientConfig(min_numel=0, pipeline_chunks=3, intra_group_size=96, inter_group_size=256, inter_bits=3.5),
    GradientConfig(min_numel=0, intra_bits=None, inter_bits=None, pipeline_chunks=2),
]
PARAMETERS = [(40_000, False), (512, True), (70, False), (31, True), (9_999, False)]


def rows() -> Iterator[tuple[Section, ...]]:
    """A whole row, and one that is cut: matrices, and norms in a section of several ranges."""
    parameters = [CutParam(numel=n, is_fine=fine, number=i) for i, (n, fine) in enumerate(PARAMETERS)]
    numel = sum(n for n, _ in PARAMETERS)
    return iter([whole_row(numel), cut_row(parameters, unit=96 * 8, count=len(parameters)), whole_row(5)])


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "3.5 bits", "exact"])
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_a_plan_sends_what_the_formulas_of_the_documentation_send(
    sizes: tuple[int, int, int], config: GradientConfig
) -> None:
    nodes, ranks_per_node, blocks = sizes
    grid = Grid(nodes=nodes, ranks_per_node=ranks_per_node, blocks=blocks)
    for sections in rows():
        numel = sum(each.numel for each in sections)
        reduced = plan_reduce(sections, grid=grid, config=config).sent
        assert reduced == oracle.gradient_exchange(numel, grid=grid, config=config, sections=sections)
        summed = plan_all_reduce(sections, grid=grid, config=config).sent
        expected = oracle.all_reduce_exchange(numel, grid=grid, config=config, sections=sections)
        # Three sums in another order.
        assert summed.as_dict() == expected.as_dict()
        for replica in ("full", "node"):
            weights = WeightConfig(bits=4, replica=replica)
            refreshed = plan_refresh(sections, grid=grid, config=weights, numel=numel).sent
            assert refreshed == oracle.weight_refresh(numel, grid=grid, config=weights, sections=sections)


def test_fine_sections_are_not_clipped() -> None:
    """Eight bits resolve the largest values, too, in a collective and in a message by hand."""
    _, sections, _ = rows()
    config, grid = WeightConfig(bits=2, replica="full"), Grid(nodes=2, ranks_per_node=1)
    numel = sum(each.numel for each in sections)
    plan = plan_refresh(sections, grid=grid, config=config, numel=numel)
    expected = [1.0 if each.is_fine else 0.6 for each in sections]
    assert list(plan.clips) == expected and {*expected} == {0.6, 1.0}
    topology = Topology(layout=arrange((0, 1), (0, 1)), node=0, local_rank=0, intra=None, inter=None)
    replica = WeightReplica(topology, config=config, sections=sections)
    with mock.patch.object(ops, "subtract_quantize") as quantize:
        for section in sections:
            row = torch.ones(section.numel)
            replica.quantize(row, row, out=torch.empty(0, dtype=torch.uint8), section=section)
    assert [call.kwargs["clip"] for call in quantize.call_args_list] == expected


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count the launches of the operators that collectives run."""
    found: Counter[str] = Counter()
    run = tables.Table.run

    def counted(table: tables.Table, call: int, *tensors: torch.Tensor) -> None:
        for kind in tables.launches(table.calls):
            found[kind[0].operator] += 1
        run(table, call, *tensors)

    with mock.patch.object(tables.Table, "run", counted):
        yield found


def planned(*plans: Plan) -> Counter[str]:
    found: Counter[str] = Counter()
    for plan in plans:
        for step in plan.steps:
            found[step.launch.operator] += step.launch.launches
    return +found


def run_collectives() -> None:
    """Operators that run and bytes that are counted are those of the plan."""
    rank = dist.get_rank()
    for nodes, per_node in ((2, 2), (4, 1)):
        for chunks in (1, 3):
            config = GradientConfig(min_numel=0, pipeline_chunks=chunks)
            for sections in rows():
                numel = max(end for each in sections for _, end in each.ranges)
                reduction, traffic = reduce_scatter_of(nodes, per_node, config)
                values = torch.randn(4, numel, generator=torch.Generator().manual_seed(rank))
                with launches() as found:
                    reduction(torch.empty(numel), values, call=0, sections=sections)
                plan = reduction.plans.last
                assert plan is not None and planned(plan) == found and plan.launches == found.total()
                assert traffic.total.as_dict() == plan.sent.as_dict()

                all_reduce, traffic = all_reduce_of(nodes, per_node, config)
                with launches() as found:
                    all_reduce(values[0], call=0, sections=sections)
                summed = all_reduce.plans.last
                assert summed is not None and planned(summed) == found
                assert traffic.total.as_dict() == summed.sent.as_dict()

                replica, traffic = replica_of(nodes, per_node, WeightConfig(), sections=sections)
                replica.start_full_refresh(values[0].bfloat16())
                replica.wait()
                traffic.end_step()
                with launches() as found:
                    replica.start_quantized_refresh(values[1])
                    replica.wait()
                refreshed = replica.plans.last
                assert refreshed is not None and planned(refreshed) == found
                assert traffic.current_step.as_dict() == refreshed.sent.as_dict()


@pytest.mark.gloo
def test_collectives_launch_and_send_what_their_plans_state() -> None:
    run_ranks(run_collectives, 4)


def copy_no_exact_part() -> None:
    """The own message of the last hop is neither written nor read, so it is not copied."""
    reduction, _ = reduce_scatter_of(2, 2, GradientConfig(min_numel=0, pipeline_chunks=2))
    start, skipped = transport.start_all_to_all, Counter[tuple[str, bool]]()

    def watched(received: Any, sent: Any, group: Any, *, skips_own: bool, what: str, **options: Any) -> Any:
        skipped[what.rpartition("all-to-all ")[2], skips_own] += 1
        return start(received, sent, group, skips_own=skips_own, what=what, **options)

    with mock.patch.object(transport, "start_all_to_all", watched):
        reduction(torch.empty(4096), torch.randn(4, 4096), call=0)
    assert skipped == {("inside the node", False): 2, ("between nodes", True): 2}


@pytest.mark.gloo
def test_the_exact_part_of_a_sum_is_not_copied() -> None:
    run_ranks(copy_no_exact_part, 4)


def reuse_plans() -> None:
    """Plans and views are made once, are dropped with a buffer that was too small, and stay few."""
    scratch = Scratch()
    reduction, _ = reduce_scatter_of(1, 2, GradientConfig(min_numel=0), scratch=scratch)
    other, _ = reduce_scatter_of(1, 2, GradientConfig(min_numel=0), scratch=Scratch())

    def reduce(numel: int) -> None:
        values = torch.randn(2, numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        outputs = torch.empty(2, numel)
        reduction(outputs[0], values, call=numel)
        other(outputs[1], values, call=numel)
        assert torch.equal(*outputs)

    reduce(1000)
    first, views = reduction.plans.last, dict(scratch._views)
    reduce(1000)
    assert reduction.plans.last is first
    assert {key: id(each) for key, each in scratch._views.items()} == {k: id(v) for k, v in views.items()}
    reduce(100_000)  # needs larger buffers
    reduce(1000)
    assert reduction.plans.last is first
    buffers = {buffer.data_ptr() for buffer in scratch._buffers.values()}
    assert {each.all.data_ptr() for each in scratch._views.values()} <= buffers
    for numel in range(1, 2 * MOST_PLANS):
        reduce(numel)
    assert len(reduction.plans._known) == MOST_PLANS
    reduce(1000)


@pytest.mark.gloo
def test_plans_and_views_of_buffers_are_made_once_and_are_bounded() -> None:
    run_ranks(reuse_plans, 2)


def change_dtype() -> None:
    """Exact ranges have the bytes of the replica's dtype, so a replica of another dtype has another plan."""
    numel, values = 4096, [(0, 4000)]
    replica, _ = replica_of(2, 1, WeightConfig())
    replica._values = values
    row = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        replica.start_full_refresh(row.to(dtype))
        replica.wait()
        row = row + 1e-3
        replica.start_quantized_refresh(row, as_gathered=row.to(dtype))
        replica.wait()
        plan = replica.plans.last
        assert plan is not None and plan.message.layouts[-1].numel == 96 * dtype.itemsize // 4
        # Bits are exact, values nearly so.
        assert torch.equal(replica.own_shard[4000:], row.to(dtype)[4000:])
        assert (replica.own_shard[:4000].float() - row[:4000]).abs().max() < 0.05
    replica.start_quantized_refresh(row, ranges=[(64, 128)])
    replica.wait()
    plan = replica.plans.last
    assert plan is not None and not plan.exact and plan.sections[0].ranges == ((64, 128),)


@pytest.mark.gloo
def test_a_plan_of_exact_ranges_follows_the_dtype() -> None:
    run_ranks(change_dtype, 2)


@pytest.mark.gloo
def test_plans_need_no_torch() -> None:
    program = "import sys, sdp4bit.collectives.plan; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_plan_prints_itself() -> None:
    grid = Grid(nodes=2, ranks_per_node=2)
    sections = whole_row(1 << 20)
    config = replace(CONFIGS[0], pipeline_chunks=2)
    assert (
        str(plan_reduce(sections, grid=grid, config=config))
        == """\
reduce-scatter of rows of 1,048,576 values over 2 x 2 ranks in 2 chunks
  1. hadamard_quantize: 2 launches, 4,194,304 values
     all-to-all inside the node: 2 messages, 2,129,920 B, int8/128
  2. dequantize_reduce_quantize: 2 launches, 2,097,152 values, 2 messages each
     all-to-all between nodes: 2 messages, 540,672 B, int4/128
  3. dequantize_reduce_hadamard: 2 launches, 1,048,576 values, 2 messages each
  sent: 2,129,920 B inside the node, 540,672 B between nodes; 6 launches; 10,682,368 B of buffers"""
    )

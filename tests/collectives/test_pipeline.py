"""Into how many chunks a row is cut: chosen by its size and the nodes, or as asked for. Layer: no process."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sdp4bit.collectives.plan import MOST_CHUNKS, cut_into_chunks, pipeline_chunks
from sdp4bit.collectives.topology import Nodes, arrange
from sdp4bit.config import GradientConfig
from sdp4bit.observe.explain import describe_gradients
from sdp4bit.traffic import Grid

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

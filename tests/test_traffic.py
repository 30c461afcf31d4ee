"""Traffic's ratios and shares of rings. Layer: no process."""

from __future__ import annotations

import math

from sdp4bit.traffic import Grid, Traffic, TrafficCounter


def test_the_ratio_is_of_the_link_between_nodes_if_there_is_one() -> None:
    both = Traffic(plain_inter_bytes=8, inter_bytes=2, plain_intra_bytes=9, intra_bytes=1)
    assert both.compression_ratio == 4
    assert Traffic(plain_intra_bytes=9, intra_bytes=1).compression_ratio == 9
    # Nothing was sent where plain FSDP2 sends; the other level does not count.
    assert Traffic(plain_inter_bytes=8, plain_intra_bytes=9, intra_bytes=1).compression_ratio == math.inf
    assert Traffic(plain_intra_bytes=9).compression_ratio == math.inf
    assert Traffic().compression_ratio == 1.0


def test_differences_are_of_all_fields() -> None:
    total = Traffic(intra_bytes=5, inter_bytes=7, collectives=3)
    assert total - Traffic(inter_bytes=2, collectives=1) == Traffic(
        intra_bytes=5, inter_bytes=5, collectives=2
    )


def test_a_ring_sends_all_rows_but_one_and_crosses_nodes_where_neighbors_do() -> None:
    """Of 2 x 2 ranks, two of four neighbors are on another node; of ranks 0, 1 and 2, two of three."""
    for members, ranks, crossings in ((None, 4, 2), ([0, 1, 2], 3, 2), ([0, 2], 2, 2), ([0, 1], 2, 0)):
        counter = TrafficCounter(Grid(nodes=2, ranks_per_node=2))
        counter.count_ring(120, members)
        sent = counter.current_step
        assert sent.inter_bytes == 120 * (ranks - 1) * crossings / ranks
        assert sent.intra_bytes == 120 * (ranks - 1) * (ranks - crossings) / ranks
        assert (sent.collectives, counter.collectives, sent.plain_inter_bytes) == (1, 1, 0)
        counter.count_plain(120, members)
        assert (sent.plain_intra_bytes, sent.plain_inter_bytes) == (sent.intra_bytes, sent.inter_bytes)
    alone = TrafficCounter(Grid(nodes=1, ranks_per_node=4))
    alone.count_ring(100)
    assert (alone.current_step.intra_bytes, alone.current_step.inter_bytes) == (300, 0)

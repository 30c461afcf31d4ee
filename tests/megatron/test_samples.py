"""Samples of a bucket's weights, some of which travel in full precision under tensor parallelism.

Layer: no process, and no Megatron-Core.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdp4bit import WeightConfig
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Range, take_ranges
from sdp4bit.collectives.topology import Nodes, Topology
from sdp4bit.traffic import TrafficCounter
from sdp4bit_megatron.communication import BucketReplica

NUMEL = 40
EXACT = [(4, 10), (20, 24), (30, 40)]
"""Of the second rank's row; those of the first are others."""


def replica_of(config: WeightConfig) -> tuple[BucketReplica, torch.Tensor, torch.Tensor]:
    """Return the replica of the second of two ranks, its main shard, and its row of the replica."""
    weights = torch.arange(2.0 * NUMEL)
    main = weights[NUMEL:] + 1000
    bucket: Any = SimpleNamespace(
        shard_numel=NUMEL,
        weights=weights,
        sample_main=lambda ranges: torch.cat(take_ranges(main, ranges)),
    )
    layout = Nodes(ranks=(0, 1), nodes=2, ranks_per_node=1)
    replica = BucketReplica(
        Topology(layout=layout, node=1, local_rank=0, intra=None, inter=None),
        bucket=bucket,
        exact_ranges=[[(0, 1)], EXACT],
        config=config,
        traffic=TrafficCounter(layout),
        scratch=Scratch(),
        name="a bucket",
    )
    return replica, main, weights[NUMEL:]


@pytest.mark.parametrize("ranges", [[(0, NUMEL)], [(2, 6), (8, 9), (12, 35)], [(10, 20)], [(22, 23)]])
def test_values_that_travel_in_full_precision_have_no_error(ranges: list[Range]) -> None:
    replica, main, held = replica_of(WeightConfig())
    expected = main.clone()
    for start, end in EXACT:
        expected[start:end] = held[start:end]
    sample, of_replica = replica.sample(ranges)
    assert torch.equal(sample, torch.cat(take_ranges(expected, ranges)))
    assert torch.equal(of_replica, torch.cat(take_ranges(held, ranges)))


def test_a_bucket_in_full_precision_is_sampled_as_it_is() -> None:
    replica, main, held = replica_of(WeightConfig(bits=None))
    sample, of_replica = replica.sample([(0, NUMEL)])
    assert torch.equal(sample, main) and torch.equal(of_replica, held)

"""The planner's parameter counts and shards against model cards and the sharded model. Layer: no process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from sdp4bit.traffic import Grid
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.plan.memory import memory_per_rank
from sdp4bit_lab.plan.model import PlanModelConfig, gpt_groups
from sdp4bit_lab.plan.traffic import group_traffic
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS, CardName
from sdp4bit_lab.pretrain.step.parallelize import lay_out, shard_chunks
from tests.ranks import fake_world


def parameters_of(card: CardName) -> int:
    """Return 12 L h^2 + 13 L h + V h + s h, and the 2 h of the last norm, which the paper leaves out."""
    sizes = MODEL_CARDS[card]
    h, padded = sizes.hidden, -(-sizes.vocabulary // 128) * 128
    return sizes.layers * (12 * h**2 + 13 * h) + (padded + sizes.sequence_length + 2) * h


def test_parameter_counts_are_the_model_cards():
    for card in MODEL_CARDS:
        shape = PlanModelConfig(model_card=card).padded_shape(tensor_parallel=1)
        assert sum(group.numel for group in gpt_groups(shape)) == parameters_of(card)


def test_operations_of_a_sample_are_those_of_the_paper():
    # Table 2's 18.58e12 per sample.
    shape = PretrainConfig(model=ModelConfig(model_card="1.3B")).model_shape
    assert shape.flops_per_sample(2048) == pytest.approx(18.58e12, rel=1e-3)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (1, 2), (4, 2)])
def test_a_rank_has_the_shards_of_the_training_program(tensor, pipeline):
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, ranks_per_node=8
    )
    config = PretrainConfig(model=ModelConfig(model_card="6.7B", layers=4), parallel=parallel)
    data_ranks = parallel.data_parallel_size(32)
    grid = Grid(nodes=data_ranks * tensor // 8, ranks_per_node=8 // tensor)
    groups = gpt_groups(config.model_shape, tensor_parallel=tensor, pipeline_parallel=pipeline)
    traffic = [group_traffic(group, grid=grid, config=config.quantization) for group in groups]
    memory = memory_per_rank(traffic, grid=grid, accumulation=1)
    with fake_world(32, rank=0):
        ranks = Ranks(rank=0, world_size=32, local_rank=0, local_world_size=8, device=torch.device("cpu"))
        chunks = shard_chunks(config, layout=lay_out(config, ranks=ranks))
        shards = [p.to_local() if isinstance(p, DTensor) else p for c in chunks for p in c.parameters()]
    row = sum(group.row_numel for group in traffic)
    assert row == sum(shard.numel() for shard in shards)
    assert memory["main weights, fp32"] == 4 * row
    assert memory["weight replica, bf16"] == 2 * grid.nodes * row

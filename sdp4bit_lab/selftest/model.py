"""Build a small GPT and synthetic batches for the self-test."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from sdp4bit.collectives.topology import TopologySpec, host_name
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.parallelize import lay_out, shard_chunks
from sdp4bit_lab.selftest.check import Context

VOCABULARY, SEQUENCE, SEQUENCES = 512, 64, 4
"""Vocabulary size; tokens per sequence; sequences per rank and step."""
_LARGEST_STRIDE = 6


def toy_config(context: Context) -> PretrainConfig:
    """Return the settings of a GPT with 0.9 million parameters."""
    return PretrainConfig(
        strategy="baseline",
        seed=context.config.seed,
        model=ModelConfig(layers=4, hidden=128, heads=4),
        data=DataConfig(mock_data=True, vocabulary_size=VOCABULARY),
        training=TrainingConfig(
            sequence_length=SEQUENCE, micro_batch_size=SEQUENCES, steps=context.config.steps
        ),
    )


def sharded_toy(context: Context, *, replicas: int = 1) -> GPT:
    """Return the GPT under FSDP2, or HSDP if replicas > 1, with the same weights in every call."""
    config, ranks, mesh = toy_config(context), context.ranks, None
    if replicas > 1:
        shape, names = (replicas, ranks.world_size // replicas), ("replicate", "shard")
        mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=names)
    (model,) = shard_chunks(config, layout=lay_out(config, ranks=ranks), mesh=mesh)
    model.to_empty(device=context.device)
    model.reset_parameters(seed=config.seed)
    return model


def blocks_of(model: GPT) -> list[FSDPModule]:
    """Return the blocks, which are parameter groups."""
    return [cast(FSDPModule, block) for block in model.blocks.values()]


def batches(context: Context, *, rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's inputs and targets, int64 [sequences, tokens]: arithmetic progressions."""
    generator = torch.Generator().manual_seed(1000 * context.config.seed + rank)
    result = []
    for _ in range(count):
        start = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=generator)
        stride = torch.randint(1, _LARGEST_STRIDE + 1, (SEQUENCES, 1), generator=generator)
        tokens = ((start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY).to(context.device)
        result.append((tokens[:, :-1], tokens[:, 1:]))
    return result


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch, in nats per token."""
    tokens, targets = batch
    loss: Tensor = model(tokens, targets)
    return loss.sum() / targets.numel()


def topology_of(context: Context) -> TopologySpec:
    """Return the given ranks per node, "auto" for several hosts, or half of a single host's ranks."""
    given, size = context.config.parallel.ranks_per_node, context.ranks.world_size
    if given is not None:
        return given
    if len(set(gather_over_ranks(host_name(), what="names of the hosts"))) > 1:
        return "auto"
    return size // 2 if size % 2 == 0 else 1

"""The small GPT that the self-test trains, and batches of made-up text for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from sdp4bit.collectives.topology import TopologySpec, host_name
from sdp4bit_lab.common.ranks import Ranks, gather_over_ranks
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.parallelize import lay_out, shard_chunks
from sdp4bit_lab.selftest.check import Context

VOCABULARY, SEQUENCE, SEQUENCES = 512, 64, 4
"""Tokens of the tokenizer and of a sequence; sequences per rank and step."""
_STRIDES = 7


def toy_config(context: Context) -> PretrainConfig:
    """Return the settings of a GPT of 0.9 million parameters."""
    return PretrainConfig(
        strategy="baseline",
        seed=context.config.seed,
        model=ModelConfig(layers=4, hidden=128, heads=4),
        data=DataConfig(mock_data=True, vocabulary_size=VOCABULARY),
        training=TrainingConfig(
            sequence_length=SEQUENCE, micro_batch_size=SEQUENCES, steps=context.config.steps
        ),
    )


def sharded_toy(context: Context, ranks: Ranks, *, replicas: int = 1) -> GPT:
    """Return the GPT under FSDP2, with the same weights in every call; nothing is attached to it.

    Args:
        replicas: of the sharded model, so many (HSDP).
    """
    config, mesh = toy_config(context), None
    if replicas > 1:
        shape, names = (replicas, ranks.world_size // replicas), ("replicate", "shard")
        mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=names)
    (model,) = shard_chunks(config, layout=lay_out(config, ranks=ranks), mesh=mesh)
    model.to_empty(device=context.device)
    model.reset_parameters(seed=config.seed)
    return model


def blocks_of(model: GPT) -> list[FSDPModule]:
    """Return the blocks, each a parameter group of its own."""
    return [cast(FSDPModule, block) for block in model.blocks.values()]


def batches(context: Context, *, rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets, int64 [sequences, tokens], others on every rank: numbers in even steps."""
    return list(_batches(context, rank=rank, count=count))


def _batches(context: Context, *, rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 * context.config.seed + rank)
    for _ in range(count):
        start = torch.randint(0, VOCABULARY, (SEQUENCES, 1), generator=generator)
        stride = torch.randint(1, _STRIDES, (SEQUENCES, 1), generator=generator)
        tokens = (start + stride * torch.arange(SEQUENCE + 1)) % VOCABULARY
        yield tokens[:, :-1].to(context.device), tokens[:, 1:].to(context.device)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch, in nats per token."""
    tokens, targets = batch
    loss: Tensor = model(tokens, targets)
    return loss.sum() / targets.numel()


def topology_of(context: Context, ranks: Ranks) -> TopologySpec:
    """Return the nodes: as given, by host name, or two halves of one host, so that something is quantized."""
    given = context.config.parallel.ranks_per_node
    if given is not None:
        return given
    hosts = {host_name()} if context.simulated_ranks else set(gather_over_ranks(host_name(), what="hosts"))
    if len(hosts) > 1:
        return "auto"
    return ranks.world_size // 2 if ranks.world_size % 2 == 0 else 1

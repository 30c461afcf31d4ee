"""A model sharded over all ranks with FSDP2, its communication quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit
from sdp4bit.pretrain.config import Arithmetic, PretrainConfig
from sdp4bit.pretrain.model import GPT
from sdp4bit.pretrain.ranks import Ranks
from sdp4bit.pretrain.settings import SettingError

Communication = Any
"""The handle of sdp4bit.quantize_communication."""


def arithmetic_dtype(arithmetic: Arithmetic, *, weights: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the activations."""
    if arithmetic != "auto":
        return torch.bfloat16 if arithmetic == "bf16" else torch.float32
    if device.type == "cpu" and not torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.float32
    return weights


def build_model(config: PretrainConfig, *, ranks: Ranks) -> tuple[GPT, Communication]:
    """Return a sharded model with its initial weights, and the handle of its communication.

    No rank ever holds the whole model: it is built without memory, sharded, and each shard is then filled.

    Raises:
        SettingError: the communication cannot be set up like this; on all ranks.
    """
    training = config.training
    weights = torch.bfloat16 if training.precision == "bf16" else torch.float32
    with torch.device("meta"):
        model = GPT(
            config.model_shape,
            arithmetic=arithmetic_dtype(training.arithmetic, weights=weights, device=ranks.device),
            activation_checkpointing=training.activation_checkpointing,
        )
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("data",))
    # Inputs are not cast: activations keep the dtype of the arithmetic, which may differ from the weights'.
    policy = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = training.reshard_after_forward
    for block in model.blocks:
        if training.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=ranks.device)
    model.reset_parameters(seed=config.seed)
    return model, quantize(model, config=config, ranks=ranks)


def quantize(model: nn.Module, *, config: PretrainConfig, ranks: Ranks) -> Communication:
    """Return the handle of the model's communication, quantized as the configured strategy says."""
    config.parallel.check_world(ranks.world_size)
    ranks_per_node = config.parallel.ranks_per_node
    try:
        return sdp4bit.quantize_communication(
            model,
            topology="auto" if ranks_per_node is None else ranks_per_node,
            config=config.quantization,
        )
    except ValueError as error:
        raise SettingError(str(error)) from error

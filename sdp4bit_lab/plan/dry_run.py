"""Print a training run's parameters and memory per rank without training."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from sdp4bit.traffic import Grid
from sdp4bit_lab.common.progress import console
from sdp4bit_lab.common.settings import require
from sdp4bit_lab.plan.memory import identifier, memory_per_rank
from sdp4bit_lab.plan.model import gpt_groups
from sdp4bit_lab.plan.traffic import group_traffic
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig


def dry_run(config: PretrainConfig) -> dict[str, Any]:
    """Return the number of parameters and the memory of the rank with the most parameters.

    Activations are excluded, because they depend on recomputation and kernels.

    Raises:
        SettingError: ranks, model and batch are incompatible.
    """
    parallel, shape = config.parallel, config.model_shape
    world_size = config.world_size or parallel.nproc_per_node or 1
    config.check_layout(world_size)
    data_ranks = parallel.data_parallel_size(world_size)
    per_node = (parallel.ranks_per_node or world_size) // parallel.tensor_model_parallel_size
    per_node = min(data_ranks, max(1, per_node))
    require(
        data_ranks % per_node == 0,
        f"the {data_ranks} ranks of a data-parallel group do not fill nodes of {per_node}: change "
        "--ranks-per-node, or the tensor or pipeline size",
    )
    nodes, in_block = data_ranks // per_node, parallel.nodes_per_block
    blocks = nodes // in_block if in_block is not None and 1 < in_block < nodes else 1
    grid = Grid(nodes=nodes, ranks_per_node=per_node, blocks=blocks)
    groups = gpt_groups(
        shape,
        tensor_parallel=parallel.tensor_model_parallel_size,
        pipeline_parallel=parallel.pipeline_model_parallel_size,
        freed_after_forward=config.training.reshard_after_forward,
    )
    micro_batches = config.micro_batches(data_ranks)
    traffic = [group_traffic(group, grid=grid, config=config.quantization) for group in groups]
    memory = memory_per_rank(traffic, grid=grid, accumulation=micro_batches)
    sequences = data_ranks * micro_batches * config.micro_batch_size
    return {
        "parameters": sum(group.numel for group in gpt_groups(shape)),
        "parameters_per_rank": sum(group.row_numel for group in traffic),
        "bytes_per_rank": {**memory, "total": sum(memory.values())},
        "world_size": world_size,
        "data_parallel_size": data_ranks,
        "micro_batches": micro_batches,
        "flops_per_step": sequences * shape.flops_per_sample(config.sequence_length),
    }


def print_dry_run(config: PretrainConfig) -> None:
    """Print a table or one JSON object; under torchrun, only on rank 0."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if int(os.environ["RANK"]):
            return
        config = replace(config, world_size=config.world_size or int(os.environ["WORLD_SIZE"]))
    needs = dry_run(config)
    sizes = needs["bytes_per_rank"]
    lines = [
        f"{needs['parameters']:,} parameters, at most {needs['parameters_per_rank']:,} on one of "
        f"{needs['world_size']} ranks",
        f"{needs['micro_batches']} micro batches per step",
        *(f"  {use:<28}{size / 1e9:>10.3f} GB" for use, size in sizes.items()),
        "Activations and communicators are not included.",
    ]
    if config.json:
        by_name = {identifier(use): size for use, size in sizes.items()}
        lines = [json.dumps({**needs, "bytes_per_rank": by_name})]
    console().print("\n".join(lines))

"""What the tests of the trainers share: FSDP2 on processes without a device, tiny models, bytes that are sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig

WORLD = 2
"""Processes: two nodes of one rank each, with `topology=1`, so that all that is sent is sent between nodes."""
LOSSLESS = SDP4BitConfig(weights=WeightConfig(bits=None), gradients=None)
"""Weights from replicas in full precision: a trainer's results are those of plain FSDP2, bit for bit."""
QUANTIZED = SDP4BitConfig(gradients=GradientConfig(min_numel=0), telemetry=TelemetryConfig(interval=2))
CONFIGS: dict[str, SDP4BitConfig | None] = {"plain": None, "lossless": LOSSLESS, "quantized": QUANTIZED}
TOKENS = 96


def as_launched() -> None:
    """Set what torchrun would have set; the process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", HF_HUB_OFFLINE="1")


def let_accelerate_shard_on_the_cpu() -> None:
    """Have accelerate take this CPU process for one of a device, as it offers FSDP2 on devices only."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def tiny_llama(**options: Any) -> Any:
    """Return a causal language model of transformers with the same random weights in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=TOKENS, max_position_embeddings=64, use_cache=False, **{**shape, **options}
    )
    return LlamaForCausalLM(config)


def tiny_rows(count: int = 64, length: int = 16) -> list[dict[str, list[int]]]:
    """Return rows of tokens in which there is something to learn."""
    starts = torch.randint(0, TOKENS, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [[(start + 7 * place) % TOKENS for place in range(length)] for start in starts]
    return [{"input_ids": row, "attention_mask": [1] * length, "labels": row} for row in rows]


@contextmanager
def count_sent_bytes() -> Iterator[dict[str, int]]:
    """Count what this rank sends for weights and gradients: plain collectives as rings, and messages."""
    sent = {"gathers": 0, "reductions": 0, "messages": 0}
    originals = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.isend
    peers = dist.get_world_size() - 1

    def all_gather(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["gathers"] += output.nbytes // (peers + 1) * peers
        return originals[0](output, *args, **kwargs)

    def all_gather_by_name(**kwargs: Any) -> Any:
        return all_gather(kwargs.pop("output_tensor"), **kwargs)

    def reduce_scatter(output: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        sent["reductions"] += (kwargs["output"] if output is None else output).nbytes * peers
        return originals[1](*([] if output is None else [output]), *args, **kwargs)

    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["messages"] += tensor.nbytes
        return originals[2](tensor, *args, **kwargs)

    dist.all_gather_into_tensor = lambda *a, **k: (all_gather if a else all_gather_by_name)(*a, **k)
    dist.reduce_scatter_tensor, dist.isend = reduce_scatter, send
    try:
        yield sent
    finally:
        dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.isend = originals

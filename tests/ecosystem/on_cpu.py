"""Tools of the trainers' tests: processes without a device, tiny models, bytes that are sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig

WORLD = 2
"""Processes: two nodes of one rank each, with `topology=1`, so that all is sent between nodes."""
LOSSLESS = SDP4BitConfig(
    weights=WeightConfig(bits=None), gradients=GradientConfig(intra_bits=None, inter_bits=None, min_numel=0)
)
"""All takes the usual path without quantizers: a trainer's results are those of plain FSDP2, bit for bit."""
QUANTIZED = SDP4BitConfig(gradients=GradientConfig(min_numel=0), telemetry=TelemetryConfig(interval=2))
CONFIGS: dict[str, SDP4BitConfig | None] = {"plain": None, "lossless": LOSSLESS, "quantized": QUANTIZED}
TOKENS = 96
STEPS, SAVED = 6, 3
"""Steps of a run, and those before its checkpoint."""


def as_launched() -> None:
    """Set the variables of torchrun; the process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", HF_HUB_OFFLINE="1", TORCHELASTIC_RUN_ID="0")
    os.environ.update(GROUP_RANK="0")


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


def tiny_tokenizer() -> Any:
    """Return a tokenizer of transformers for these tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(token): token for token in range(TOKENS)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0")


def tiny_rows(count: int = 64, length: int = 16) -> list[dict[str, list[int]]]:
    """Return rows of tokens in which there is something to learn."""
    starts = torch.randint(0, TOKENS, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [[(start + 7 * place) % TOKENS for place in range(length)] for start in starts]
    return [{"input_ids": row, "attention_mask": [1] * length, "labels": row} for row in rows]


@contextmanager
def count_sent_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that this rank sends for weights and gradients, with plain collectives as rings."""
    sent = {"gathers": 0, "reductions": 0, "messages": 0}
    gather, reduce, isend = dist.all_gather_single, dist.reduce_scatter_single, dist.isend
    peers = dist.get_world_size() - 1

    def all_gather(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
        sent["gathers"] += input.nbytes * peers
        return gather(output, input, **options)

    def reduce_scatter(*, output: torch.Tensor, **options: Any) -> Any:
        sent["reductions"] += output.nbytes * peers
        return reduce(output=output, **options)

    def send(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent["messages"] += tensor.nbytes
        return isend(tensor, *args, **options)

    dist.all_gather_single, dist.reduce_scatter_single, dist.isend = all_gather, reduce_scatter, send
    try:
        yield sent
    finally:
        dist.all_gather_single, dist.reduce_scatter_single, dist.isend = gather, reduce, isend


def weights_of(model: torch.nn.Module) -> float:
    """Return the sum of all magnitudes of this rank's part of the weights, in fp64, which hides nothing."""
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(part.detach().double().abs().sum().item() for part in local)


def outcome(model: torch.nn.Module, losses: list[float], sent: dict[str, int], comm: Any) -> dict[str, Any]:
    """Return the results of a run that are compared; comm is its handle or None."""
    reported = 0 if comm is None else comm.stats()["total"]["inter_bytes"]
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = {"losses": losses, "weights": weights_of(model), "sent": sent, "reported": reported}
    return {**found, "trained": numel, "passes": STEPS}


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars of a log by name, each with its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder))
    log.Reload()
    return {
        name: [(event.step, event.value) for event in log.Scalars(name)] for name in log.Tags()["scalars"]
    }


def assert_bytes(
    plain: dict[str, Any], quantized: dict[str, Any], *, least: float, ddp: bool = False
) -> None:
    """All bytes sent are reported, and plain FSDP2 or DDP sends more by this factor."""
    assert plain["sent"]["messages"] == 0 and quantized["sent"]["gathers"] == 0
    assert sum(quantized["sent"].values()) == quantized["reported"]
    sent = sum(plain["sent"].values())
    if ddp:
        # Python does not see the rings of plain DDP, which send each fp32 gradient once on two ranks.
        assert sent == 0
        sent = 4 * plain["trained"] * plain["passes"]
    assert sent / quantized["reported"] > least


def assert_losses(ranks: list[dict[str, Any]], *, learned: float = 0.3, rel: float = 0.02) -> None:
    """Full precision equals the plain run bit for bit; quantized does not, but each loss is within `rel`."""
    for rank in ranks:
        plain, lossless, quantized = rank["plain"], rank["lossless"], rank["quantized"]
        for what in ("losses", "weights", "evaluated"):
            assert lossless[what] == plain[what], what
        assert quantized["weights"] != plain["weights"]
        assert quantized["losses"] == pytest.approx(plain["losses"], rel=rel)
        assert quantized["evaluated"] == pytest.approx(plain["evaluated"], rel=rel)
        assert plain["losses"][-1] < plain["losses"][0] - learned

"""QLoRA: bitsandbytes' packed weights beside peft's adapters in FSDP2 groups, against plain FSDP2.

Layer: 2 gloo processes that represent 2 nodes; a Llama of 30 thousand random parameters, packed on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make test-ecosystem")
pytest.importorskip("peft", reason="peft is not installed: make test-ecosystem")

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sdp4bit import quantize_communication
from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, WORLD
from tests.ranks import run_ranks

PRELOAD = ["transformers.models.llama.modeling_llama", "peft", "bitsandbytes"]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STEPS, MICRO_BATCHES = 3, 2


def pack(linear: nn.Linear, storage: torch.dtype) -> nn.Module:
    """Return the layer in nf4, packed as `BitsAndBytesConfig(load_in_4bit=True)` does it."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": "nf4", "quant_storage": storage}
    packed = Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, **options
    )
    packed.weight = Params4bit(linear.weight.data, requires_grad=False, module=packed, **options)
    return packed.to("cpu")


def adapted_llama(storage: torch.dtype, policy: MixedPrecisionPolicy) -> Any:
    """Return a sharded Llama with packed layers and adapters of rank 8."""
    from peft import LoraConfig, get_peft_model

    llama = on_cpu.tiny_llama()
    for layer in llama.model.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, own = name.rpartition(".")
                setattr(layer.get_submodule(parent), own, pack(module, storage))
    torch.manual_seed(1)
    model = get_peft_model(llama, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for layer in llama.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def packed_bytes(model: Any) -> list[torch.Tensor]:
    """Return all packed weights as FSDP2 gathers them."""
    found = []
    for layer in model.base_model.model.model.layers:
        layer.unshard()
        packed = [m.weight for m in layer.modules() if getattr(m, "quant_state", None) is not None]
        found += [weight.detach().view(-1).view(torch.uint8).clone() for weight in packed]
        layer.reshard()
    return found


def train(storage: torch.dtype, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """Train adapters in all configurations, each with the same data."""
    on_cpu.as_launched()
    result: dict[str, Any] = {}
    rank = torch.distributed.get_rank()
    for name, config in CONFIGS.items():
        model = adapted_llama(storage, policy)
        comm = None if config is None else quantize_communication(model, topology=1, config=config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        rows = on_cpu.tiny_rows(2 * STEPS * MICRO_BATCHES * 4)[rank::2]
        losses = []
        with on_cpu.count_sent_bytes() as sent:
            for index in range(STEPS * MICRO_BATCHES):
                is_last = (index + 1) % MICRO_BATCHES == 0
                batch = torch.tensor([row["input_ids"] for row in rows[4 * index : 4 * index + 4]])
                model.set_requires_gradient_sync(is_last)
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                losses.append(loss.item())
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        trained = [p.to_local() for p in model.parameters() if p.requires_grad]
        result[name] = {
            "losses": losses,
            "weights": sum(each.detach().double().abs().sum().item() for each in trained),
            "sent": dict(sent),
            "reported": 0 if comm is None else comm.stats()["total"]["inter_bytes"],
            "full": 0 if comm is None else comm.stats()["full_refreshes"],
            "replicas": comm is None or all(group.weights.replica is not None for group in comm.groups),
            "packed": packed_bytes(model),
        }
    return result


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=["uint8", "bf16 storage"])
def test_packed_weights_travel_once_and_stay_what_they_are(
    storage: torch.dtype, policy: MixedPrecisionPolicy
) -> None:
    for rank in run_ranks(train, WORLD, storage, policy):
        plain, lossless, quantized = rank["plain"], rank["lossless"], rank["quantized"]
        assert lossless["losses"] == plain["losses"] and lossless["weights"] == plain["weights"]
        assert quantized["losses"] != plain["losses"]
        assert quantized["losses"] == pytest.approx(plain["losses"], rel=0.02)
        assert plain["packed"] and quantized["replicas"] and quantized["full"] == 0
        for ours in (lossless, quantized):
            assert all(torch.equal(*pair) for pair in zip(plain["packed"], ours["packed"], strict=True))
        on_cpu.assert_bytes(plain, quantized, least=6)

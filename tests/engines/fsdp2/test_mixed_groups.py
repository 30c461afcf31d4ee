"""FSDP2 integration, groups whose weights are left to FSDP2: mixed types, subclasses, gathers over a part.

Layer: real processes over gloo, 2 nodes x 2 ranks. Without a quantizer results equal plain FSDP2's bit for
bit; with one, the gradients of these groups are quantized.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from sdp4bit import SDP4BitConfig
from tests.ranks import on_ranks, run_ranks
from tests.toy import QUANTIZED, VOCABULARY, Run, assert_close_to_plain, build, data_mesh

WIDTH = 24


class Adapter(nn.Module):
    """The usual case: a frozen bf16 layer and trainable fp32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.to(torch.bfloat16)).float() + self.up(self.down(x))


class Adapted(Adapter):
    """Several frozen types: a scale in fp16 and an order of columns besides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5, dtype=torch.float16), requires_grad=False)
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., self.order] * self.scale[1].float()


class Reordered(nn.Module):
    """Nothing but integers."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.order]


class GatheredInBf16(torch.Tensor):
    """fp32 weights that FSDP2 gathers in bf16, by its extension point for tensor subclasses."""

    @staticmethod
    def __new__(cls, values: Tensor) -> GatheredInBf16:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype
        )

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = tree_map_only(cls, lambda each: each.values, (args, kwargs or {}))
        result = function(*plain[0], **plain[1])
        if function._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, cls, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.values.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (values,) = gathered
        return None if out is not None else (values, gathered)


class Subclassed(nn.Module):
    """A layer whose weight is a tensor subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(GatheredInBf16(torch.randn(WIDTH, WIDTH) / 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.to(torch.bfloat16) @ self.weight.to(torch.bfloat16)).float()


class Model(nn.Module):
    """Token logits through two layers of a kind."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mixing(config: SDP4BitConfig | None, kind: type[nn.Module], reason: str) -> list[float]:
    """Train layers of a kind, whose weights are not quantized, in a model whose other weights are."""
    torch.manual_seed(0)
    model = Model(kind)
    for layer in model.layers:
        fully_shard(layer, mesh=data_mesh())
    fully_shard(model, mesh=data_mesh())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(model, config, fused=None, foreach=False)
    run.train(3)
    losses = run.finish()
    if config is not None:
        (text,) = [str(warning.message) for warning in caught if "sdp4bit" in str(warning.message)]
        assert f"weights stay in full precision in layers.0 ({reason}), layers.1 ({reason})" in text
        root, *layers = run.comm._state.groups
        has_gradients = kind is not Reordered
        assert root.replica is not None
        for layer in layers:
            assert layer.replica is None and layer.weights_unquantized_reason == reason
            assert layer.gradient_bits == (4 if config is QUANTIZED and has_gradients else None)
            assert layer.reductions == (3 if config is QUANTIZED and has_gradients else 0)
            # A ring over 2 x 2 ranks, in forward and backward.
            row = layer.group.shard_nbytes // (2 if kind is Subclassed else 1)
            sent = layer.weight_traffic.last_step
            assert sent.intra_bytes == sent.inter_bytes == 3 * row
            assert (sent.intra_bytes, sent.inter_bytes) == (sent.plain_intra_bytes, sent.plain_inter_bytes)
        assert run.comm.explain().count(reason) == 2
        run.comm.state_dict()
    return losses


KINDS: dict[type[nn.Module], str] = {
    Adapter: "types bfloat16 and float32 in one group",
    Adapted: "types bfloat16 and float16 and float32 and int64 in one group",
    Reordered: "int64 parameters",
    Subclassed: "a tensor subclass changes what is gathered",
}


def check_kind(kind: type[nn.Module]) -> None:
    assert_close_to_plain(mixing, kind, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_mixed_types_train_as_with_plain_fsdp2(kind: type[nn.Module]) -> None:
    if "int64" in KINDS[kind] and torch.__version__ < "2.10":
        pytest.skip("FSDP2 of torch 2.9 takes no integer parameters")
    run_ranks(check_kind, 4, kind)


def resharding(config: SDP4BitConfig | None, topology: int) -> list[float]:
    """Backward gathers over pairs of ranks, which may be those of a node."""
    run = Run(build(reshard_after_forward=2), config, topology=topology).train(2)
    losses = run.finish()
    if config is not None:
        assert run.comm.explain().count("reshard_after_forward=2") == 4
        for group in run.comm._state.groups:
            # A ring over all ranks in forward and, of rows of twice the size, over a pair in backward.
            sent, row = group.weight_traffic.last_step, group.group.shard_nbytes
            expected = (3.5 * row, 1.5 * row) if topology == 2 else (0, 5 * row)
            assert (sent.intra_bytes, sent.inter_bytes) == expected
            assert (sent.plain_intra_bytes, sent.plain_inter_bytes) == expected
            assert group.replica is None and group.reductions == (2 if config is QUANTIZED else 0)
    return losses


@on_ranks(4)
def test_an_int_reshard_after_forward_trains_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(resharding, 2)
    assert_close_to_plain(resharding, 1)

"""Values and messages to call the operators with."""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout, message_layout
from sdp4bit.quantization.random import RoundingKey, derive_keys

KEY = RoundingKey(*derive_keys(5, 6))


def layout_of(numel: int, bits: float = 4, group_size: int = 32, *, parts: int = 1) -> MessageLayout:
    return message_layout(numel=numel, bits=bits, group_size=group_size, parts=parts)


def values_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def empty_messages(count: int, layout: MessageLayout, *, device: str = "cpu") -> Tensor:
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)


def quantized(
    values: Tensor,
    layout: MessageLayout,
    *,
    hadamard: bool = False,
    rounding: RoundingKey | None = None,
) -> Tensor:
    """Messages of values [destinations, parts, n]."""
    out = empty_messages(values.shape[0], layout)
    ops.hadamard_quantize(values, out=out, layout=layout, hadamard=hadamard, rounding=rounding)
    return out

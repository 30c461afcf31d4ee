"""Values and messages to call the operators with."""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import derive_keys

KEYS = derive_keys(5, 6)


def values_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def empty_messages(
    count: int, numel: int, bits: int, group_size: int, *, parts: int = 1, device: str = "cpu"
) -> Tensor:
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8, device=device)


def quantized(values: Tensor, bits: int, group_size: int, *, hadamard: bool = False) -> Tensor:
    """Messages of values [destinations, parts, n], rounded to nearest."""
    destinations, parts, numel = values.shape
    out = empty_messages(destinations, numel, bits, group_size, parts=parts)
    ops.hadamard_quantize(values, out, bits, group_size, hadamard, False, 0, 0, 0, 0)
    return out

"""A 64-bit checksum for tensors that should be bit-identical, in plain PyTorch."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

STRIPE_WORDS = 1 << 15
"""Words per piece: as many as fit a CPU's caches with their factors."""
_WORD_BYTES = 8

# The finalizer of splitmix64 (S. Vigna, public domain).
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def signed64(value: int) -> int:
    """Return the lowest 64 bits as int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: Tensor) -> Tensor:
    """Return 64 mixed bits per number, as int64."""
    for bits, factor in ROUNDS:
        # An arithmetic shift copies the sign bit; the mask removes the copies.
        x = (x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))) * signed64(factor)
    return x


@lru_cache
def stripe_factors(device: torch.device) -> Tensor:
    """Return odd pseudo-random factors of the words of a piece and of their high halves, int64 [2, words]."""
    with torch.inference_mode(False):
        numbers = torch.arange(2 * STRIPE_WORDS, dtype=torch.int64, device=device).view(2, STRIPE_WORDS)
        factors = _mix((numbers + 1) * signed64(GOLDEN)) | 1
    if device.type == "cuda":
        # Other streams use the factors without synchronization.
        torch.cuda.current_stream(device).synchronize()
    return factors


def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.add_checksum`.

    The bits are read as 64-bit words w_i, the last one padded with zeros. The checksum is the sum of
    a_i w_i + b_i (w_i >> 32) modulo 2^64, with odd pseudo-random a_i and b_i. A flipped bit k changes it by
    an odd multiple of 2^k or 2^(k - 32), which is not zero. Other changes cancel with a probability of 2^-64,
    or of 2^-32 if they are confined to the highest bits of words.
    """
    words, factors = words_of(values), stripe_factors(values.device)
    for index, part in enumerate(words.split(STRIPE_WORDS)):
        low, high = factors[:, : part.numel()].unbind()
        # Pieces share their factors, so each gets another odd number.
        number = signed64((2 * index + 1) * GOLDEN)
        out += _dot(part, low).add_(_dot(part >> 32, high)).mul_(number)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    # CUDA has no integer dot product.
    return torch.dot(x, y) if x.device.type == "cpu" else (x * y).sum()


def bytes_of(values: Tensor) -> Tensor:
    """Return the bytes of a tensor as uint8 [n], independent of its strides."""
    return values.detach().contiguous().view(-1).view(torch.uint8)


def words_of(values: Tensor) -> Tensor:
    """Return the bits of a tensor as int64 [n], aligned and padded with zeros."""
    flat = bytes_of(values)
    whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
    rest = flat.numel() - whole
    if not rest and flat.storage_offset() % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    padded = flat.new_zeros(whole + (_WORD_BYTES if rest else 0))
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)

"""A 64-bit checksum for tensors that should be bit-identical."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_WORD_BYTES = 8
_PIECE_WORDS = {"cpu": 1 << 15}
"""Words per piece: as many as fit a CPU's caches, more on other devices."""
_PIECE_WORDS_ELSEWHERE = 1 << 21

# The finalizer of splitmix64 (S. Vigna, public domain).
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(x: Tensor) -> Tensor:
    """Return 64 mixed bits per number, as int64."""
    for bits, factor in _ROUNDS:
        # An arithmetic shift copies the sign bit; the mask removes the copies.
        x = (x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))) * _signed(factor)
    return x


def prepare_checksums(device: torch.device) -> None:
    """Create the factors of checksums on a device, for which the host waits once on a GPU."""
    _factors(device)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """Return odd pseudo-random factors of the words of a piece and of their high halves, int64 [2, words]."""
    words = _PIECE_WORDS.get(device.type, _PIECE_WORDS_ELSEWHERE)
    with torch.inference_mode(False):
        numbers = torch.arange(2 * words, dtype=torch.int64, device=device).view(2, words)
        factors = _mix((numbers + 1) * _signed(_GOLDEN)) | 1
    if device.type == "cuda":
        # Other streams use the factors without synchronization.
        torch.cuda.current_stream(device).synchronize()
    return factors


def checksum(values: Tensor) -> Tensor:
    """Return an int64 scalar on the device of `values` that any single flipped bit changes.

    The bits are read as 64-bit words w_i, the last one padded with zeros. The checksum is the sum of
    a_i w_i + b_i (w_i >> 32) modulo 2^64, with odd pseudo-random a_i and b_i. A flipped bit k changes it by
    an odd multiple of 2^k or 2^(k - 32), which is not zero. Other changes cancel with a probability of 2^-64,
    or of 2^-32 if they are confined to the highest bits of words.

    Reads `values` once, in pieces; needs memory for one piece (0.25 MB on the CPU, else 16 MB).
    """
    words, factors = _words(values), _factors(values.device)
    terms = []
    for index, part in enumerate(words.split(factors.shape[1])):
        low, high = factors[:, : part.numel()].unbind()
        # Pieces share their factors, so each gets another odd number.
        number = _signed((2 * index + 1) * _GOLDEN)
        terms.append(_dot(part, low).add_(_dot(part >> 32, high)).mul_(number))
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    # CUDA has no integer dot product.
    return torch.dot(x, y) if x.device.type == "cpu" else (x * y).sum()


def _words(values: Tensor) -> Tensor:
    """Return the bits of a tensor as int64 [n], independent of its strides."""
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
    rest = flat.numel() - whole
    if not rest and flat.storage_offset() % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    padded = flat.new_zeros(whole + (_WORD_BYTES if rest else 0))
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)

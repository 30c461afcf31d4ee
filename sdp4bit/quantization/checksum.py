"""A 64-bit number that tells apart tensors that should hold the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BYTES = 8
_PIECE_WORDS = {"cpu": 1 << 17}
"""Words that are worked on at once: as many as the caches of a processor hold, more elsewhere."""
_PIECE_WORDS_ELSEWHERE = 1 << 22


def _signed(value: int) -> int:
    """Return the int64 of the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


# The finalizer of splitmix64 (S. Vigna, public domain). Multiplying by odd numbers modulo 2^64 loses nothing.
_PLACE = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))


def checksum(values: Tensor) -> Tensor:
    """Return an int64 scalar on the device of `values` that any single flipped bit changes.

    The bits are read as 64-bit words w_i, the last one filled up with zeros. The checksum is the sum of
    f(w_i + i K) modulo 2^64, K odd, where f takes turns at x -> x xor (x >> s), the shift without sign, and
    x -> C x, C odd. Both are one-to-one on 64 bits, so f is: whatever changes inside a single word changes
    exactly one term of the sum, and with it the sum. Changes of several words, and words that have changed
    places, cancel only by chance, one in 2^64 if terms behave as if drawn at random.

    Reads `values` once, in pieces, with memory for three pieces beside (3 MB on the host, else 96 MB).
    """
    words = _words(values)
    piece = _PIECE_WORDS.get(values.device.type, _PIECE_WORDS_ELSEWHERE)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    places = torch.arange(min(piece, words.numel()), device=values.device).mul_(_PLACE)
    for start in range(0, words.numel(), piece):
        part = words[start : start + piece]
        terms = (part + places[: part.numel()]).add_(_signed(start * _PLACE))
        for bits, factor in _ROUNDS:
            # int64 is shifted with its sign: the copies of it are masked off.
            terms.bitwise_xor_((terms >> bits).bitwise_and_((1 << (64 - bits)) - 1)).mul_(factor)
        total += terms.sum()
    return total


def _words(values: Tensor) -> Tensor:
    """Return the bits of a tensor as int64 [n], independent of how it lies in memory."""
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
    rest = flat.numel() - whole
    if not rest and flat.storage_offset() % _WORD_BYTES == 0:
        return flat.view(torch.int64)
    padded = flat.new_zeros(whole + (_WORD_BYTES if rest else 0))
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)

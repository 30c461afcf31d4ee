"""The keys of rounding bits that a job draws, for tests that none is drawn twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from sdp4bit.collectives.all_reduce import PieceQuantizer
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.quantization.random import RoundingKey

Key = tuple[int, int, int, int]


@contextmanager
def drawn_keys(*, expected: bool = True) -> Iterator[list[Key]]:
    """Collect the keys with which this process rounds values that it sends.

    A key is that of a stream, with its first element and, because senders of dither share a stream, the
    sender.

    Args:
        expected: whether any key must be drawn, or none may be.
    """
    keys: list[Key] = []
    of_part, quantize = QuantizedReduceScatter._rounding_key, PieceQuantizer.quantize

    def note(key: RoundingKey | None) -> RoundingKey | None:
        if key is not None:
            keys.append((key.k0, key.k1, key.first, key.sender))
        return key

    def part_key(collective: QuantizedReduceScatter, *args: Any) -> RoundingKey | None:
        return note(of_part(collective, *args))

    def pieces(quantizer: PieceQuantizer, plan: Any, *args: Any, call: int, row: int, **options: Any) -> None:
        for section in plan.sections:
            note(quantizer._key(section.call(call), row))
        quantize(quantizer, plan, *args, call=call, row=row, **options)

    with (
        mock.patch.object(QuantizedReduceScatter, "_rounding_key", part_key),
        mock.patch.object(PieceQuantizer, "quantize", pieces),
    ):
        yield keys
    assert bool(keys) == expected, f"{len(keys)} keys were drawn"


def check_unique(keys: Sequence[Key], *, at_least: int) -> None:
    """Fail if any rank of the job has drawn a key that it or another rank has drawn before."""
    every: list[Sequence[Key]] = [keys]
    if dist.is_initialized():
        every = [keys] * dist.get_world_size()
        dist.all_gather_object(every, keys)
    counts = Counter(key for one in every for key in one)
    twice = [key for key, count in counts.items() if count > 1]
    assert len(keys) >= at_least, f"only {len(keys)} keys were drawn"
    assert not twice, f"{len(twice)} of {len(counts)} keys were drawn twice, {twice[:3]} among them"

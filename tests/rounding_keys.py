"""The keys of rounding bits that a job draws, for tests that none is drawn twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from sdp4bit.quantization.tables import Table

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
    run = Table.run

    def noted(table: Table, call: int, *tensors: Tensor) -> None:
        for each in table.calls:
            if (key := each.bind(call, tensors).get("rounding")) is not None:
                keys.append((key.k0, key.k1, key.first, key.sender))
        run(table, call, *tensors)

    with mock.patch.object(Table, "run", noted):
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

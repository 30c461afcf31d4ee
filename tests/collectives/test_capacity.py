"""The size of lossless messages follows from what all ranks have seen. Layer: integers, no process."""

from __future__ import annotations

import pytest

from sdp4bit.collectives.capacity import Capacity, room_for
from sdp4bit.quantization.lossless_layout import ALIGNMENT, largest_message, smallest_message

NUMEL = 1_000_000


def at(bits: float, numel: int = NUMEL) -> int:
    return int(bits * numel / 8)


def test_it_begins_with_room_for_everything_and_takes_the_first_messages_measure() -> None:
    capacity = Capacity()
    assert capacity.nbytes(NUMEL) == largest_message(NUMEL)
    capacity.note([at(1), at(2.5), at(2)], numel=NUMEL)
    # A sixty-fourth of headroom, and up to the next level.
    assert at(2.5) * 65 / 64 <= capacity.nbytes(NUMEL) <= at(2.5) * 65 / 64 * 1.05


def test_it_grows_at_once_and_shrinks_when_several_messages_needed_less() -> None:
    capacity = Capacity()
    capacity.note([at(2)], numel=NUMEL)
    before = capacity.nbytes(NUMEL)
    capacity.note([before + 1], numel=NUMEL)
    grown = capacity.nbytes(NUMEL)
    assert grown > 1.04 * before
    for needed in (1.0, 1.3, 1.1):
        capacity.note([at(needed)], numel=NUMEL)
        assert capacity.nbytes(NUMEL) == grown
    capacity.note([grown - 1], numel=NUMEL)  # one that needs it begins the count anew
    for needed in (1.0, 1.3, 1.1):
        capacity.note([at(needed)], numel=NUMEL)
        assert capacity.nbytes(NUMEL) == grown
    capacity.note([at(1.0)], numel=NUMEL)
    assert at(1.3) * 65 / 64 <= capacity.nbytes(NUMEL) <= at(1.3) * 1.07


def test_what_needs_about_the_same_never_changes_it() -> None:
    capacity = Capacity()
    sizes = set()
    for step in range(100):
        capacity.note([at(2 + 0.005 * (step * 7 % 5 - 2))], numel=NUMEL)
        sizes.add(capacity.nbytes(NUMEL))
    assert len(sizes) == 1


@pytest.mark.parametrize("numel", [0, 1, 33, 5000, 1 << 14, NUMEL])
def test_every_size_is_one_that_a_message_may_have(numel: int) -> None:
    sizes = []
    for level in range(144):
        capacity = Capacity()
        capacity.level = level
        sizes.append(capacity.nbytes(numel))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == largest_message(numel)
    assert sizes[-1] >= smallest_message(numel)
    assert all(size % ALIGNMENT == 0 for size in sizes)
    assert room_for(1, numel=numel) == smallest_message(numel)
    assert room_for(1 << 40, numel=numel) == largest_message(numel)
    capacity = Capacity()
    capacity.note([largest_message(numel)], numel=numel)
    assert capacity.nbytes(numel) == largest_message(numel)

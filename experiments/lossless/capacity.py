"""How many bytes the messages of lossless weights have: agreed without asking, from the last ones' headers.

A collective needs messages whose size all ranks know beforehand, and what a message of lossless weights comes
to is known only to the rank that wrote it. Every receiver sees in the headers what the others' have come to:
the next capacity is a pure function of what all of them have seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdp4bit.quantization.lossless_layout import (
    ALIGNMENT,
    largest_message,
    smallest_message,
)

# Sixteenths of an octave below 1, times 2**20: in integers, since ranks with other mathematical libraries
# must come to the same size.
_SIXTEENTHS = (
    *(1048576, 1004120, 961548, 920782, 881744, 844361, 808563, 774282),
    *(741455, 710020, 679917, 651091, 623487, 597053, 571740, 547500),
)
_LEVELS = 144
"""From all 16 bits of a value down to 1/32 of one."""
_HEADROOM = 64
"""A capacity has at least a sixty-fourth more than the largest message of those it is chosen for."""
_GROWTH = 1
"""Levels, each 4 %, that are added when it has turned out too small: the next step may need more yet."""
_CALM = 4
"""Messages in a row that would have fitted into less before it shrinks."""


class Capacity:
    """The size of the next messages of one kind; equal on ranks that have seen the same headers.

    It begins with room for everything, takes the first messages' measure, grows at once and shrinks slowly.
    """

    def __init__(self) -> None:
        self.level = 0
        """0 has room for everything; each further one has 4.2 % less."""
        self._is_first = True
        self._calm: list[int] = []

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a message of so many values."""
        return _bytes_at(self.level, numel)

    def note(self, needed: Sequence[int], *, numel: int) -> None:
        """Take note of what the senders of the last messages needed, in bytes."""
        most = max(needed)
        wanted = _level_for(most + most // _HEADROOM, numel)
        if self._is_first:
            self.level, self._is_first = wanted, False
        elif most > self.nbytes(numel):
            self.level, self._calm = max(wanted - _GROWTH, 0), []
        elif wanted > self.level:
            self._calm.append(wanted)
            if len(self._calm) == _CALM:
                self.level, self._calm = min(self._calm), []
        else:
            self._calm = []


def room_for(nbytes: int, *, numel: int) -> int:
    """Return the smallest size of a message of so many values that has room for so many bytes."""
    return max(smallest_message(numel), min(-(-nbytes // ALIGNMENT) * ALIGNMENT, largest_message(numel)))


def _bytes_at(level: int, numel: int) -> int:
    if level == 0:
        return largest_message(numel)
    share = 2 * numel * _SIXTEENTHS[level % len(_SIXTEENTHS)] >> 20 + level // len(_SIXTEENTHS)
    return room_for(share, numel=numel)


def _level_for(nbytes: int, numel: int) -> int:
    """Return the highest level that has room for so many bytes."""
    for level in reversed(range(1, _LEVELS)):
        if _bytes_at(level, numel) >= nbytes:
            return level
    return 0

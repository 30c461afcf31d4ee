"""Lossless weights: the change of 16-bit weights in units of the last place, entropy-coded.

Both sides hold the old weights, so only the change of each travels. Bit patterns are ordered as the numbers
are (`lossless_reference.ordered`): from one to the next number of the type the change is 1, and *every*
pattern, NaN, signed zeros and subnormals included, has its place, so that what arrives is exact whatever the
values are.

What a change is likely to be, the receiver can tell beforehand. An optimizer moves all weights of a block by
amounts of about one size; in units of the last place that is the more, the smaller the old exponent: half as
large a weight, twice as large a change. The old exponent therefore chooses among 16 fixed tables of
probabilities, and only their common offset, one number per block, is sent.

A message, in a buffer whose size (its capacity) is agreed beforehand:

    [header: 6 int64][directory: code, words per block, int32][words of block 0][words of block 1]...[zeros]

A block has 16384 values, the last one of a message maybe fewer. Value i belongs to lane i % 32 of step
i // 32. Each lane is an rANS coder with 32 bits of state that emits words of 16 bits; the lanes of a block
share one stream of words. A block's words are the 32 final states and then the stream, which is read from its
end, where the encoder, which goes from the last step to the first, has left it. In each step all lanes that
need a word take one, in ascending order: a warp of a GPU can decode a block with a ballot and a count of
bits, without any other coordination, and blocks are independent of each other.

Sources: J. Duda, "Asymmetric numeral systems" (arXiv 1311.2540); F. Giesen, "Interleaved entropy coders"
(arXiv 1402.3392). Contents of tables and messages are this project's own; VERSION changes with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.quantization.checksum import checksum
from sdp4bit.quantization.layout import round_up
from sdp4bit.quantization.lossless_layout import (
    ALIGNMENT,
    BLOCK,
    HEADER_BYTES,
    LANES,
    message_parts,
    smallest_message,
)

MAGIC = 0x534C_5050_3454_4200
"""Upper bits of a header's first number; the lowest byte is the version."""
VERSION = 1
PROBABILITY_BITS = 10
STATE_BITS = 16
"""States are at least 2**16 between two steps, and below 2**32."""
LARGEST = 15
"""Changes of -15 to 15, after the shift, have codes; larger ones escape: they are sent in 16 bits."""
ESCAPE = 31
MAX_SHIFT = 12
HIGHEST_CLASS = 15 + 2 * MAX_SHIFT
SAMPLED = 8
"""The size of a block's changes is estimated from every eighth step, if it has enough that changed."""
LEAST_SAMPLE = 16

UNCHANGED, RAW = -1, -2
"""Codes of blocks without words: nothing changed, or it was left for the next message; and of blocks that
hold the new bit patterns themselves, which is the shorter way for few values, or for changes without any
order. Other codes are the offsets of tables."""
LARGEST_CODE = 1023

# Frequencies, of 1024, of the changes 0, 1, 2, ... and alike of -1, -2, ...; one more is the escape's. Table
# j is that of movements with a standard deviation of 2**(j / 2 - 6) units: how likely a number that lies
# anywhere around a 16-bit one rounds to the k-th next after it has moved by a Gaussian amount (94 %) or by
# one of twice that deviation (6 %), and at least 1 for the nearest. Numbers, not a formula: all ranks must
# have the same.
_FREQUENCIES = (
    (1009, 7),
    (1003, 10),
    (995, 14),
    (985, 19),
    (967, 27, 1),
    (945, 38, 1),
    (913, 54, 1),
    (867, 77, 1),
    (805, 108, 1),
    (719, 150, 2),
    (607, 199, 8, 1),
    (481, 237, 30, 3, 1),
    (363, 242, 72, 12, 2, 1, 1),
    (265, 215, 110, 38, 10, 3, 1, 1, 1),
    (187, 173, 122, 69, 31, 12, 5, 2, 1, 1, 1, 1),
    (133, 131, 109, 81, 54, 32, 17, 9, 4, 2, 1, 1, 1, 1, 1, 1),
)
TABLES = len(_FREQUENCIES)

MANTISSA_BITS = {torch.bfloat16: 7, torch.float16: 10}
"""Of the types that are coded."""


class DamagedMessageError(RuntimeError):
    """A message is not what its sender wrote; `index` says which of several, `reason` what is wrong."""

    def __init__(self, index: int, reason: str, *, message: str = "") -> None:
        self.index = index
        self.reason = reason
        super().__init__(message or f"message {index} of lossless weights is damaged: {reason}")


class Header(NamedTuple):
    """The numbers at the start of a message."""

    magic: int
    numel: int
    used: int
    """Bytes up to the end of the last block, a multiple of 8."""
    needed: int
    """What `used` would have been with room for everything."""
    late: int
    """Values that have changed and are not in the message, for want of room."""
    checksum: int
    """Of the `used` bytes, with a zero in this place."""


@dataclass(frozen=True)
class CodingTables:
    """The tables as coders need them; int32, on the host."""

    encode: Tensor
    """[16, 32]: frequency << 10 | start of each symbol; of those that escape, with the sign bit set, the
    escape's."""
    decode: Tensor
    """[16, 1024]: symbol << 20 | frequency << 10 | place within the symbol of each slot."""


@lru_cache
def coding_tables() -> CodingTables:
    """Return the tables of both directions."""
    size = 1 << PROBABILITY_BITS
    encode = torch.empty(TABLES, ESCAPE + 1, dtype=torch.int32)
    decode = torch.empty(TABLES, size, dtype=torch.int32)
    for row, half in enumerate(_FREQUENCIES):
        outer = [0] * (LARGEST + 1 - len(half))
        frequencies = [*outer, *half[:0:-1], *half, *outer, 1]
        start = 0
        for symbol, frequency in enumerate(frequencies):
            encode[row, symbol] = frequency << PROBABILITY_BITS | start
            places = torch.arange(frequency, dtype=torch.int32)
            decode[row, start : start + frequency] = (
                places | symbol << 2 * PROBABILITY_BITS | frequency << PROBABILITY_BITS
            )
            start += frequency
        encode[row, ESCAPE] |= -(1 << 31)
        for symbol, frequency in enumerate(frequencies):
            if not frequency:
                encode[row, symbol] = encode[row, ESCAPE]
    return CodingTables(encode, decode)


def check_row(name: str, row: Tensor) -> None:
    """Raise ValueError unless this is a row, or rows, of a 16-bit floating-point type on the host."""
    if row.dtype not in MANTISSA_BITS:
        raise ValueError(f"{name} must be bf16 or fp16, got {row.dtype}")
    if row.shape[-1] > 1 and row.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous")
    if row.device.type != "cpu":
        raise ValueError(f"{name} must be on the host, got {row.device}: there is no lossless coder for it")


def check_messages(name: str, messages: Tensor, *, numel: int) -> None:
    """Raise ValueError unless these are buffers [..., capacity] that can be messages of so many values."""
    least, capacity = smallest_message(numel), messages.shape[-1]
    if messages.dtype != torch.uint8 or messages.device.type != "cpu" or not messages.is_contiguous():
        raise ValueError(f"{name} must be uint8, contiguous, on the host")
    if capacity < least or capacity % ALIGNMENT or messages.storage_offset() % ALIGNMENT:
        raise ValueError(
            f"{name}: a message of {numel} values must have a multiple of {ALIGNMENT} bytes, at least "
            f"{least}, and begin at such a multiple, got {capacity} bytes at {messages.storage_offset()}"
        )


def read_header(message: Tensor) -> Header:
    """Return the numbers at the start of a message, unchecked."""
    return Header(*message[:HEADER_BYTES].view(torch.int64).tolist())


def directory_of(message: Tensor, *, numel: int) -> Tensor:
    """Return a view of a message's directory, int32 [blocks, 2]: code and words of each block."""
    return message[HEADER_BYTES : message_parts(numel)].view(torch.int32).view(-1, 2)


def finish_message(message: Tensor, *, numel: int, end: int, needed: int, late: int) -> None:
    """Write the header of a message whose directory and blocks are there, and zeros behind them.

    Args:
        end: of the last block.
        needed: what the end would have been with room for all.
    """
    message[end:] = 0
    used = round_up(end, 8)
    numbers = Header(MAGIC | VERSION, numel, used, round_up(needed, 8), late, 0)
    header = message[:HEADER_BYTES].view(torch.int64)
    header.copy_(torch.tensor(numbers, dtype=torch.int64))
    header[-1] = checksum(message[:used])


def check_integrity(message: Tensor, *, index: int, numel: int) -> Header:
    """Return the header of a message that is as it was sent, with a directory that fits its size.

    Raises:
        DamagedMessageError: otherwise.
    """
    header = read_header(message)
    if header.magic != MAGIC | VERSION:
        if header.magic & ~0xFF == MAGIC:
            raise DamagedMessageError(index, f"format {header.magic & 0xFF}, this version reads {VERSION}")
        raise DamagedMessageError(index, f"it begins with {header.magic & (1 << 64) - 1:016x}")
    if header.numel != numel:
        raise DamagedMessageError(index, f"it holds {header.numel} values instead of {numel}")
    first = message_parts(numel)
    if not first <= header.used <= message.numel() or header.used % 8:
        raise DamagedMessageError(
            index,
            f"{header.used} bytes are said to be used of {message.numel()}, the directory ends at {first}",
        )
    sent = message[: header.used].clone()
    sent[HEADER_BYTES - 8 : HEADER_BYTES] = 0
    found = int(checksum(sent))
    if found != header.checksum:
        wanted, got = (value & (1 << 64) - 1 for value in (header.checksum, found))
        raise DamagedMessageError(
            index, f"the checksum of its {header.used} bytes is {got:016x} instead of {wanted:016x}"
        )
    _check_directory(message, header, index=index)
    return header


def _check_directory(message: Tensor, header: Header, *, index: int) -> None:
    """Raise unless every block's words are where they can be read."""
    directory = directory_of(message, numel=header.numel)
    codes, words = directory.long().unbind(1)
    sizes = torch.full_like(words, BLOCK)
    if header.numel % BLOCK:
        sizes[-1] = header.numel % BLOCK
    coded = codes >= 0
    states = 2 * LANES  # each is two words
    fits = torch.where(coded, (codes <= LARGEST_CODE) & (words >= states) & (words <= sizes), False)
    fits |= (codes == UNCHANGED) & (words == 0) | (codes == RAW) & (words == sizes)
    end = message_parts(header.numel) + 2 * int(words.sum())
    if not fits.all():
        block = int((~fits).nonzero()[0])
        raise DamagedMessageError(
            index, f"block {block} has the code {int(codes[block])} and {int(words[block])} words"
        )
    if round_up(end, 8) != header.used:
        raise DamagedMessageError(index, f"its blocks end at byte {end} instead of {header.used}")


def words_left(block: int) -> str:
    """Return the reason why a message is damaged that only decoding finds: its checksum is right."""
    return f"the words of block {block} do not end where they begin"

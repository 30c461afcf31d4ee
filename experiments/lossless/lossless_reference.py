"""What the lossless coder means, in plain PyTorch: all blocks and lanes at once, one step after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdp4bit.quantization.lossless import (
    ESCAPE,
    HIGHEST_CLASS,
    LARGEST,
    LARGEST_CODE,
    LEAST_SAMPLE,
    MANTISSA_BITS,
    PROBABILITY_BITS,
    RAW,
    SAMPLED,
    STATE_BITS,
    TABLES,
    UNCHANGED,
    DamagedMessageError,
    check_integrity,
    coding_tables,
    directory_of,
    finish_message,
    words_left,
)
from sdp4bit.quantization.lossless_layout import (
    BLOCK,
    LANES,
    message_parts,
)

_WORD = 0xFFFF
_LOWEST = 1 << STATE_BITS
_SLOTS = (1 << PROBABILITY_BITS) - 1


def ordered(patterns: Tensor) -> Tensor:
    """Return the places of 16-bit patterns, int64 [...] of 0 to 65535, in the order of their numbers.

    The lowest is the negative NaN with all bits set, the highest the positive one; -0.0 comes right before
    0.0.
    """
    return torch.where(patterns >= 0x8000, patterns ^ 0xFFFF, patterns ^ 0x8000)


def pattern_of(places: Tensor) -> Tensor:
    """Return the patterns that have these places."""
    return torch.where(places >= 0x8000, places ^ 0x8000, places ^ 0xFFFF)


def exponents(patterns: Tensor, *, mantissa_bits: int) -> Tensor:
    """Return the exponent fields, 1 for subnormal numbers, whose units are those of exponent 1."""
    return ((patterns & 0x7FFF) >> mantissa_bits).clamp_(min=1)


def _signed(change: Tensor) -> Tensor:
    """Return differences of places modulo 2**16 as numbers from -32768 to 32767."""
    return ((change + 0x8000) & 0xFFFF) - 0x8000


class _Context(NamedTuple):
    """What the old values say of their changes; int64 [..., 32]."""

    table: Tensor
    shift: Tensor
    """Lowest bits of a change that are sent as they are: tables know changes of some units only."""


def _context(old: Tensor, code: Tensor, *, mantissa_bits: int) -> _Context:
    kind = (code - 2 * exponents(old, mantissa_bits=mantissa_bits)).clamp_(0, HIGHEST_CLASS)
    shift = ((kind - (TABLES - 2)) >> 1).clamp_(min=0)
    return _Context(kind - 2 * shift, shift)


def choose_code(old: Tensor, change: Tensor, *, mantissa_bits: int) -> int:
    """Return the offset of the tables for a block: that of the mean size of its changes.

    Args:
        old, change: int64 [steps, 32], patterns and signed differences of their places.

    The mean is taken in fixed point: 24 bits below the unit of the largest exponent that has a change.
    """
    for every in (SAMPLED, 1):
        patterns, changes = old[::every], change[::every]
        is_changed = changes != 0
        if int(is_changed.sum()) >= LEAST_SAMPLE:
            break
    exponent = exponents(patterns, mantissa_bits=mantissa_bits)
    largest = int(exponent[is_changed].max())
    up = exponent - largest + 24
    sizes = changes.abs().clamp_(max=4095)
    sizes = torch.where(up >= 0, sizes << up.clamp(min=0), sizes >> (-up).clamp_(0, 63))
    total = int(sizes[is_changed].sum())
    # 1526 / 1024 is sqrt(pi / 2), from the mean size to the standard deviation, times 2**(1 / 4), to round.
    mean = max(total * 1526 // changes.numel(), 1)
    twice_log = half_octaves(mean)
    return max(0, min(twice_log - 20 + 2 * (largest - 24) + 12, LARGEST_CODE))


def half_octaves(number: int) -> int:
    """Return floor(2 log2(number)) of a positive integer."""
    places = number.bit_length() - 1
    top = number >> places - 15 if places >= 15 else number << 15 - places
    return 2 * places + (top >= 46341)  # 2**15.5


class _Stream:
    """Words that the blocks have emitted, int64 [blocks, room], and how many."""

    def __init__(self, blocks: int, room: int) -> None:
        self.words = torch.zeros(blocks, room, dtype=torch.int64)
        self.count = torch.zeros(blocks, 1, dtype=torch.int64)

    def push(self, states: Tensor, needs: Tensor) -> Tensor:
        """Return the states of which those in need have emitted their low words, in ascending order."""
        places = self.count + needs.cumsum(1) - 1
        block = torch.arange(len(states)).unsqueeze(1).expand_as(states)
        self.words[block[needs], places[needs]] = states[needs] & _WORD
        self.count += needs.sum(1, keepdim=True)
        return torch.where(needs, states >> 16, states)

    def pop(self, states: Tensor) -> Tensor:
        """Return the states of which those that are too small have taken in a word; the opposite of push."""
        needs = states < _LOWEST
        self.count -= needs.sum(1, keepdim=True)
        places = (self.count + needs.cumsum(1) - 1).clamp_(min=0)  # below 0: found out at the end
        return torch.where(needs, states << 16 | self.words.gather(1, places), states)


def _encode_blocks(old: Tensor, new: Tensor, codes: Tensor, *, mantissa_bits: int) -> list[Tensor]:
    """Return the words of each block, int64 [words].

    Args:
        old, new: int64 [blocks, steps, 32], patterns.
        codes: int64 [blocks, 1].
    """
    blocks, steps, _ = old.shape
    table = coding_tables().encode.long().flatten()
    changes = _signed(ordered(new) - ordered(old))
    states = torch.full((blocks, LANES), _LOWEST, dtype=torch.int64)
    stream = _Stream(blocks, 2 * steps * LANES)
    for step in reversed(range(steps)):
        change, context = changes[:, step], _context(old[:, step], codes, mantissa_bits=mantissa_bits)
        moved = change + ((1 << context.shift) >> 1)
        level = moved >> context.shift
        symbol = torch.where(level.abs() <= LARGEST, level + LARGEST, ESCAPE)
        entry = table[context.table * (ESCAPE + 1) + symbol]
        escapes = entry < 0
        bits = torch.where(escapes, 16, context.shift)
        states = stream.push(states, states >> (32 - bits) != 0)
        states = states << bits | torch.where(escapes, change & _WORD, moved & ((1 << context.shift) - 1))
        frequency, start = entry >> PROBABILITY_BITS & _SLOTS, entry & _SLOTS
        states = stream.push(states, states >> (32 - PROBABILITY_BITS) >= frequency)
        quotient = states // frequency
        states = (quotient << PROBABILITY_BITS) + states - quotient * frequency + start
    halves = torch.stack([states & _WORD, states >> 16], dim=2).flatten(1)
    return [
        torch.cat([final, words[: int(count)]])
        for final, words, count in zip(halves, stream.words, stream.count, strict=True)
    ]


def _decode_blocks(old: Tensor, words: list[Tensor], codes: Tensor, *, mantissa_bits: int) -> Tensor:
    """Return the new patterns [blocks, steps, 32], -1 in blocks whose words do not end where they begin."""
    blocks, steps, _ = old.shape
    table = coding_tables().decode.long().flatten()
    stream = _Stream(blocks, max(2 * LANES, *(len(each) for each in words)))
    for block, each in enumerate(words):
        stream.words[block, : len(each)] = each
        stream.count[block] = len(each)
    halves = stream.words[:, : 2 * LANES].view(blocks, LANES, 2)
    states = halves[..., 0] | halves[..., 1] << 16
    stream.words, stream.count = stream.words[:, 2 * LANES :], stream.count - 2 * LANES
    stream.words = torch.cat([stream.words, stream.words.new_zeros(blocks, 1)], dim=1)
    new = torch.empty_like(old)
    is_short = torch.zeros(blocks, 1, dtype=torch.bool)
    for step in range(steps):
        context = _context(old[:, step], codes, mantissa_bits=mantissa_bits)
        entry = table[context.table << PROBABILITY_BITS | states & _SLOTS]
        symbol = entry >> 2 * PROBABILITY_BITS
        states = (entry >> PROBABILITY_BITS & _SLOTS) * (states >> PROBABILITY_BITS) + (entry & _SLOTS)
        states = stream.pop(states)
        escapes = symbol == ESCAPE
        bits = torch.where(escapes, 16, context.shift)
        low = states & ((1 << bits) - 1)
        states = stream.pop(states >> bits)
        is_short |= stream.count < 0
        change = ((symbol - LARGEST) << context.shift) + low - ((1 << context.shift) >> 1)
        change = torch.where(escapes, low, change)
        new[:, step] = pattern_of(ordered(old[:, step]) + change & _WORD)
    wrong = is_short | (stream.count != 0) | (states != _LOWEST).any(1, keepdim=True)
    return torch.where(wrong.unsqueeze(2), -1, new)


def _patterns(row: Tensor) -> Tensor:
    return row.view(torch.int16).long() & _WORD


def _steps_of(patterns: Tensor, *, padding: int) -> Tensor:
    """Return [steps, 32], the last step filled up with infinities, which have not changed."""
    missing = -patterns.numel() % LANES
    return torch.cat([patterns, patterns.new_full((missing,), padding)]).view(-1, LANES)


def encode_change(new: Tensor, *, held: Tensor, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.encode_change`."""
    numel, mantissa_bits = new.numel(), MANTISSA_BITS[new.dtype]
    padding = 0x7FFF >> mantissa_bits << mantissa_bits
    directory, found = directory_of(out, numel=numel), []
    rows = list(zip(_patterns(new).split(BLOCK), _patterns(held).split(BLOCK), strict=True)) if numel else []
    by_length: dict[int, list[int]] = {}
    for index, (block, old) in enumerate(rows):
        if (block != old).any():
            by_length.setdefault(block.numel(), []).append(index)
    coded: dict[int, tuple[int, Tensor]] = {}
    for chosen in by_length.values():
        olds = torch.stack([_steps_of(rows[index][1], padding=padding) for index in chosen])
        news = torch.stack([_steps_of(rows[index][0], padding=padding) for index in chosen])
        changes = _signed(ordered(news) - ordered(olds))
        codes = [
            choose_code(old, change, mantissa_bits=mantissa_bits)
            for old, change in zip(olds, changes, strict=True)
        ]
        words = _encode_blocks(olds, news, torch.tensor(codes).unsqueeze(1), mantissa_bits=mantissa_bits)
        coded.update(zip(chosen, zip(codes, words, strict=True), strict=True))
    for index, (block, old) in enumerate(rows):
        code, each = coded.get(index, (UNCHANGED, block[:0]))
        if each.numel() > block.numel():
            code, each = RAW, block
        found.append((code, each, int((block != old).sum())))
    used = needed = message_parts(numel)
    late = 0
    for index, (code, each, changed) in enumerate(found):
        needed += 2 * each.numel()
        if used + 2 * each.numel() + 7 & ~7 > out.numel():
            code, each, late = UNCHANGED, each[:0], late + changed
        directory[index] = torch.tensor([code, each.numel()])
        end = used + 2 * each.numel()
        out[used:end] = each.to(torch.int16).view(torch.uint8)
        used = end
    finish_message(out, numel=numel, end=used, needed=needed, late=late)


def decode_change(messages: Tensor, *, rows: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.decode_change`."""
    numel, mantissa_bits = rows.shape[1], MANTISSA_BITS[rows.dtype]
    padding = 0x7FFF >> mantissa_bits << mantissa_bits
    for index, message in enumerate(messages):
        check_integrity(message, index=index, numel=numel)
    for index, (message, row) in enumerate(zip(messages, rows, strict=True)):
        at = message_parts(numel)
        by_length: dict[int, list[tuple[int, int, Tensor]]] = {}
        for block, (code, count) in enumerate(directory_of(message, numel=numel).tolist()):
            words = message[at : at + 2 * count].view(torch.int16).long() & _WORD
            at += 2 * count
            start = block * BLOCK
            if code == RAW:
                row[start : start + BLOCK] = words.to(torch.int16).view(row.dtype)
            elif code != UNCHANGED:
                length = min(BLOCK, numel - start)
                by_length.setdefault(length, []).append((block, code, words))
        for length, found in by_length.items():
            blocks, codes, each = zip(*found, strict=True)
            starts = [block * BLOCK for block in blocks]
            old = torch.stack(
                [_steps_of(_patterns(row[start : start + length]), padding=padding) for start in starts]
            )
            offsets = torch.tensor(codes).unsqueeze(1)
            new = _decode_blocks(old, list(each), offsets, mantissa_bits=mantissa_bits)
            for block, start, patterns in zip(blocks, starts, new, strict=True):
                if (patterns < 0).any():
                    raise DamagedMessageError(index, words_left(block))
                values = patterns.flatten()[:length].to(torch.int16).view(row.dtype)
                row[start : start + length] = values

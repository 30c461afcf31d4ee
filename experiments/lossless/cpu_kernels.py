"""The lossless coder on CPU tensors: the bytes of :mod:`sdp4bit.quantization.lossless_reference`.

The 32 lanes of a block are a vector of 32 numbers, and a step of all lanes has no branch. Looking up tables,
and picking up or putting down the words of the lanes in need, are the costly parts of it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sdp4bit.kernels.cpu.kernels import _unpack
from sdp4bit.kernels.cpu.tiles import inline
from sdp4bit.kernels.cpu.vectors import (
    I32,
    INT8,
    INT16,
    INT32,
    INT64,
    _constant,
    _splat,
    _splat_int,
    load_scalar_u16,
    load_scalar_u32,
    point,
    store_u8,
    store_u16,
    store_u32,
)
from sdp4bit.quantization.lossless import (
    ESCAPE,
    HIGHEST_CLASS,
    LARGEST,
    LARGEST_CODE,
    LEAST_SAMPLE,
    PROBABILITY_BITS,
    RAW,
    SAMPLED,
    STATE_BITS,
    TABLES,
    UNCHANGED,
)
from sdp4bit.quantization.lossless_layout import (
    BLOCK,
    LANES,
)

_WORD = 0xFFFF
_SLOTS = (1 << PROBABILITY_BITS) - 1
_STATE_BYTES = 4 * LANES
STEP_BYTES = 2 * LANES
ENCODING_BYTES = 2 * STEP_BYTES + 4 * BLOCK + _STATE_BYTES + STEP_BYTES
"""A thread's memory for the values of a last step, and for a block's words: two for each value, and a vector
behind the last."""
ENTRY_NUMBERS = 3
_HAS_COMPRESS = binding.llvm_version_info >= (19,)

_V16 = ir.VectorType(INT16, LANES)
_V32 = ir.VectorType(INT32, LANES)
_V64 = ir.VectorType(INT64, LANES)
_VBOOL = ir.VectorType(ir.IntType(1), LANES)
_VFLOAT = ir.VectorType(ir.FloatType(), LANES)
_STATE_AND_PLACE = types.Tuple((I32, types.int64))


class _Lanes:
    """Writes instructions on vectors of 32 lanes; numbers among the operands become vectors of them."""

    def __init__(self, builder):
        self.builder = builder

    def _vector(self, value):
        return _constant(LANES, value) if isinstance(value, int) else value

    def __getattr__(self, name):
        instruction = getattr(self.builder, name)

        def write(a, b):
            return instruction(self._vector(a), self._vector(b))

        return write

    def compare(self, relation, a, b):
        a, b = self._vector(a), self._vector(b)
        return self.builder.icmp_signed(relation, a, b)

    def below(self, a, b):
        """Compare unsigned numbers."""
        return self.builder.icmp_unsigned("<", self._vector(a), self._vector(b))

    def select(self, mask, a, b):
        return self.builder.select(mask, self._vector(a), self._vector(b))

    def load_words(self, address):
        words = self.builder.load(point(self.builder, address, _V16), align=1)
        return self.builder.zext(words, _V32)

    def store_words(self, address, vector):
        words = self.builder.trunc(vector, _V16)
        self.builder.store(words, point(self.builder, address, _V16), align=1)

    def ordered(self, patterns):
        flipped = self.select(self.compare(">=", patterns, 0x8000), _WORD, 0x8000)
        return self.xor(patterns, flipped)

    def pattern_of(self, places):
        flipped = self.select(self.compare(">=", places, 0x8000), 0x8000, _WORD)
        return self.xor(places, flipped)

    def exponents(self, patterns, mantissa_bits):
        field = self.lshr(self.and_(patterns, 0x7FFF), _splat_int(self.builder, mantissa_bits, LANES))
        return self.select(self.compare(">", field, 1), field, 1)

    def context(self, patterns, code, mantissa_bits):
        """Return table and shift, see the reference."""
        twice = self.shl(self.exponents(patterns, mantissa_bits), 1)
        kind = self.sub(_splat_int(self.builder, code, LANES), twice)
        kind = self.select(self.compare(">", kind, 0), kind, 0)
        kind = self.select(self.compare("<", kind, HIGHEST_CLASS), kind, HIGHEST_CLASS)
        shift = self.ashr(self.sub(kind, TABLES - 2), 1)
        shift = self.select(self.compare(">", shift, 0), shift, 0)
        return self.sub(kind, self.shl(shift, 1)), shift

    def look_up(self, table, index):
        """Return the 32-bit entries at these places of a table at an address."""
        builder = self.builder
        entries = point(builder, table, INT32)
        result = ir.Constant(_V32, ir.Undefined)
        for lane in range(LANES):
            # An index is never negative: zero extension costs nothing.
            place = builder.zext(builder.extract_element(index, INT32(lane)), INT64)
            entry = builder.load(builder.gep(entries, [place]), align=4)
            result = builder.insert_element(result, entry, INT32(lane))
        return result

    def declared(self, name, result, arguments):
        """Return a builtin of LLVM, declared once per module."""
        function = self.builder.module.globals.get(name)
        return function or ir.Function(self.builder.module, ir.FunctionType(result, arguments), name)

    def count(self, mask):
        """Return the bytes of as many words as lanes are set, int64."""
        bits = self.builder.bitcast(mask, INT32)
        ones = self.builder.call(self.declared("llvm.ctpop.i32", INT32, [INT32]), [bits])
        return self.builder.shl(self.builder.zext(ones, INT64), INT64(1))

    def push(self, states, needs, place):
        """Let the states in need emit low words from an address on; return them and the next address."""
        builder = self.builder
        words = builder.trunc(states, _V16)
        if _HAS_COMPRESS:
            compress = self.declared("llvm.experimental.vector.compress.v32i16", _V16, [_V16, _VBOOL, _V16])
            packed = builder.call(compress, [words, needs, ir.Constant(_V16, None)])
            # Whole: what is behind the words of this step is overwritten by the next.
            builder.store(packed, point(builder, place, _V16), align=1)
        else:
            target = point(builder, place, INT16)
            store = self.declared(
                "llvm.masked.compressstore.v32i16", ir.VoidType(), [_V16, target.type, _VBOOL]
            )
            builder.call(store, [words, target, needs])
        after = builder.add(place, self.count(needs))
        return self.select(needs, self.lshr(states, 16), states), after

    def pop(self, states, place, lowest):
        """Let the states that are too small take in words before an address; return them and the new address.

        Nothing is read below the address `lowest`; the new one is then below it, from then on.
        """
        builder = self.builder
        needs = self.below(states, 1 << STATE_BITS)
        before = builder.sub(place, self.count(needs))
        is_there = builder.icmp_signed(">=", before, lowest)
        allowed = builder.and_(needs, _splat(builder, is_there, LANES))
        source = point(builder, before, INT16)
        expand = self.declared("llvm.masked.expandload.v32i16", _V16, [source.type, _VBOOL, _V16])
        words = builder.call(expand, [source, allowed, ir.Constant(_V16, None)])
        filled = self.or_(self.shl(states, 16), builder.zext(words, _V32))
        return self.select(needs, filled, states), before


@intrinsic
def _encode_step(typing_context, states, place, new, held, code, mantissa_bits, table):
    """Let all lanes encode the change of their values; return the states and where the next word goes."""

    def codegen(context, builder, sig, args):
        states, place, new, held, code, mantissa_bits, table = args
        lanes = _Lanes(builder)
        old = lanes.load_words(held)
        change = lanes.sub(lanes.ordered(lanes.load_words(new)), lanes.ordered(old))
        change = lanes.ashr(lanes.shl(change, 16), 16)
        kind, shift = lanes.context(old, code, mantissa_bits)
        unit = lanes.shl(1, shift)
        moved = lanes.add(change, lanes.lshr(unit, 1))
        symbol = lanes.add(lanes.ashr(moved, shift), LARGEST)
        symbol = lanes.select(lanes.below(symbol, ESCAPE), symbol, ESCAPE)
        entry = lanes.look_up(table, lanes.or_(lanes.shl(kind, 5), symbol))
        escapes = lanes.compare("<", entry, 0)
        bits = lanes.select(escapes, 16, shift)
        low = lanes.select(escapes, lanes.and_(change, _WORD), lanes.and_(moved, lanes.sub(unit, 1)))
        # By 32 in two shifts: LLVM leaves one of 32 undefined.
        above = lanes.lshr(lanes.lshr(states, 16), lanes.sub(16, bits))
        states, place = lanes.push(states, lanes.compare("!=", above, 0), place)
        states = lanes.or_(lanes.shl(states, bits), low)
        frequency = lanes.and_(lanes.lshr(entry, PROBABILITY_BITS), _SLOTS)
        start = lanes.and_(entry, _SLOTS)
        is_small = lanes.below(lanes.lshr(states, 32 - PROBABILITY_BITS), frequency)
        needs = builder.not_(is_small)
        states, place = lanes.push(states, needs, place)
        # The state is below frequency * 2**22: a quotient in fp32 is wrong by one at most, and put right.
        ratio = builder.fdiv(builder.uitofp(states, _VFLOAT), builder.sitofp(frequency, _VFLOAT))
        quotient = builder.fptosi(ratio, _V32)
        rest = lanes.sub(states, lanes.mul(quotient, frequency))
        is_less = lanes.compare("<", rest, 0)
        quotient = lanes.add(quotient, builder.sext(is_less, _V32))
        rest = lanes.add(rest, lanes.select(is_less, frequency, 0))
        is_more = lanes.compare(">=", rest, frequency)
        quotient = lanes.sub(quotient, builder.sext(is_more, _V32))
        rest = lanes.sub(rest, lanes.select(is_more, frequency, 0))
        states = lanes.add(lanes.shl(quotient, PROBABILITY_BITS), lanes.add(rest, start))
        return context.make_tuple(builder, sig.return_type, [states, place])

    return _STATE_AND_PLACE(I32, *[types.int64] * 6), codegen


@intrinsic
def _decode_step(typing_context, states, place, lowest, held, target, code, mantissa_bits, table):
    """Let all lanes decode a value each from its old one; return the states and where the words left end."""

    def codegen(context, builder, sig, args):
        states, place, lowest, held, target, code, mantissa_bits, table = args
        lanes = _Lanes(builder)
        old = lanes.load_words(held)
        kind, shift = lanes.context(old, code, mantissa_bits)
        slot = lanes.and_(states, _SLOTS)
        entry = lanes.look_up(table, lanes.or_(lanes.shl(kind, PROBABILITY_BITS), slot))
        frequency = lanes.and_(lanes.lshr(entry, PROBABILITY_BITS), _SLOTS)
        symbol = lanes.lshr(entry, 2 * PROBABILITY_BITS)
        states = lanes.mul(frequency, lanes.lshr(states, PROBABILITY_BITS))
        states = lanes.add(states, lanes.and_(entry, _SLOTS))
        states, place = lanes.pop(states, place, lowest)
        escapes = lanes.compare("==", symbol, ESCAPE)
        bits = lanes.select(escapes, 16, shift)
        low = lanes.and_(states, lanes.sub(lanes.shl(1, bits), 1))
        states, place = lanes.pop(lanes.lshr(states, bits), place, lowest)
        change = lanes.add(lanes.shl(lanes.sub(symbol, LARGEST), shift), low)
        change = lanes.sub(change, lanes.lshr(lanes.shl(1, shift), 1))
        change = lanes.select(escapes, low, change)
        places = lanes.and_(lanes.add(lanes.ordered(old), change), _WORD)
        lanes.store_words(target, lanes.pattern_of(places))
        return context.make_tuple(builder, sig.return_type, [states, place])

    return _STATE_AND_PLACE(I32, *[types.int64] * 7), codegen


@intrinsic
def _changes_of(typing_context, new, held):
    """Return how many of 32 values differ, int64."""

    def codegen(context, builder, sig, args):
        lanes = _Lanes(builder)
        differ = lanes.compare("!=", *(lanes.load_words(address) for address in args))
        return builder.lshr(lanes.count(differ), INT64(1))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _largest_exponent(typing_context, new, held, mantissa_bits):
    """Return the largest exponent among those of 32 values that differ, 0 if none does, int64."""

    def codegen(context, builder, sig, args):
        new, held, mantissa_bits = args
        lanes = _Lanes(builder)
        old = lanes.load_words(held)
        differ = lanes.compare("!=", lanes.load_words(new), old)
        found = lanes.select(differ, lanes.exponents(old, mantissa_bits), 0)
        largest = lanes.declared(f"llvm.vector.reduce.smax.v{LANES}i32", INT32, [_V32])
        return builder.sext(builder.call(largest, [found]), INT64)

    return types.int64(*[types.int64] * 3), codegen


@intrinsic
def _sum_of_sizes(typing_context, new, held, mantissa_bits, exponent):
    """Return the sum of the sizes of 32 changes in fixed point, 24 bits below the unit of an exponent."""

    def codegen(context, builder, sig, args):
        new, held, mantissa_bits, exponent = args
        lanes = _Lanes(builder)
        old = lanes.load_words(held)
        change = lanes.sub(lanes.ordered(lanes.load_words(new)), lanes.ordered(old))
        change = lanes.ashr(lanes.shl(change, 16), 16)
        size = lanes.select(lanes.compare("<", change, 0), lanes.sub(0, change), change)
        size = lanes.select(lanes.compare("<", size, 4095), size, 4095)
        above = _splat_int(builder, builder.sub(exponent, INT64(24)), LANES)
        up = lanes.sub(lanes.exponents(old, mantissa_bits), above)
        down = lanes.sub(0, up)
        # Sizes have 12 bits, and are not changed where the exponent is above the largest.
        up = lanes.select(lanes.compare(">", up, 0), up, 0)
        up = lanes.select(lanes.compare("<", up, 24), up, 24)
        down = lanes.select(lanes.compare(">", down, 0), down, 0)
        down = lanes.select(lanes.compare("<", down, 31), down, 31)
        size = lanes.lshr(size, down)
        wide = builder.shl(builder.zext(size, _V64), builder.zext(up, _V64))
        total = lanes.declared(f"llvm.vector.reduce.add.v{LANES}i64", INT64, [_V64])
        return builder.call(total, [wide])

    return types.int64(*[types.int64] * 4), codegen


@intrinsic
def _first_states(typing_context):
    """Return the states of 32 lanes that have coded nothing."""

    def codegen(context, builder, sig, args):
        return _constant(LANES, 1 << STATE_BITS)

    return I32(), codegen


@intrinsic
def _load_states(typing_context, address):
    """Return the states at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(point(builder, args[0], _V32), align=1)

    return I32(types.int64), codegen


@intrinsic
def _store_states(typing_context, address, states):
    """Write the states to an address."""

    def codegen(context, builder, sig, args):
        builder.store(args[1], point(builder, args[0], _V32), align=1)

    return types.void(types.int64, I32), codegen


@intrinsic
def _are_first(typing_context, states):
    """Return whether no lane has anything left to decode."""

    def codegen(context, builder, sig, args):
        lanes = _Lanes(builder)
        differ = lanes.compare("!=", args[0], 1 << STATE_BITS)
        return builder.icmp_unsigned("==", builder.bitcast(differ, INT32), INT32(0))

    return types.boolean(I32), codegen


@intrinsic
def _copy(typing_context, target, source, nbytes):
    """Copy bytes that do not overlap."""

    def codegen(context, builder, sig, args):
        target, source, nbytes = args
        cgutils.raw_memcpy(builder, point(builder, target, INT8), point(builder, source, INT8), nbytes, 1)

    return types.void(*[types.int64] * 3), codegen


@inline
def _copy_words(target, source, count):
    for i in range(count):
        store_u16(target + 2 * i, load_scalar_u16(source + 2 * i))


@inline
def _pad(target, source, count, padding):
    """Copy the words of a last step, and fill it up."""
    _copy_words(target, source, count)
    for i in range(count, LANES):
        store_u16(target + 2 * i, padding)


@inline
def _half_octaves(number):
    """Return floor(2 log2(number))."""
    places = np.int64(0)
    while number >> (places + 1):
        places += 1
    top = number >> (places - 15) if places >= 15 else number << (15 - places)
    return 2 * places + (1 if top >= 46341 else 0)


@inline
def _choose_code(new, held, whole, last_new, last_held, steps, mantissa_bits, every):
    """Return the offset of the tables for a block, see the reference; -1 if too few values have changed.

    Args:
        whole: steps that are read in place; a further one is at last_new and last_held.
        every: how many steps one is looked at of.
    """
    changed, largest, seen = np.int64(0), np.int64(0), np.int64(0)
    for step in range(0, steps, every):
        a = new + step * STEP_BYTES if step < whole else last_new
        b = held + step * STEP_BYTES if step < whole else last_held
        changed += _changes_of(a, b)
        largest = max(largest, _largest_exponent(a, b, mantissa_bits))
        seen += LANES
    if every > 1 and changed < LEAST_SAMPLE:
        return np.int64(-1)
    total = np.int64(0)
    for step in range(0, steps, every):
        a = new + step * STEP_BYTES if step < whole else last_new
        b = held + step * STEP_BYTES if step < whole else last_held
        total += _sum_of_sizes(a, b, mantissa_bits, largest)
    mean = max(total * 1526 // seen, 1)
    return max(0, min(_half_octaves(mean) - 20 + 2 * (largest - 24) + 12, LARGEST_CODE))


def encode_blocks(thread, threads, parameters):
    """Write the words of each block to its place in the arena, and what they are to its entry.

    An entry is code, number of words, number of changed values.
    """
    (
        new, held, numel, mantissa_bits, padding, arena, entries, table, blocks, scratch, stride,
    ) = _unpack(parameters, 11)  # fmt: skip
    last_new = scratch + thread * stride
    last_held = last_new + STEP_BYTES
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        a, b = new + 2 * block * BLOCK, held + 2 * block * BLOCK
        count = min(BLOCK, numel - block * BLOCK)
        whole = count // LANES
        steps = (count + LANES - 1) // LANES
        if whole < steps:
            _pad(last_new, a + whole * STEP_BYTES, count - whole * LANES, padding)
            _pad(last_held, b + whole * STEP_BYTES, count - whole * LANES, padding)
        changed = np.int64(0)
        for step in range(whole):
            changed += _changes_of(a + step * STEP_BYTES, b + step * STEP_BYTES)
        if whole < steps:
            changed += _changes_of(last_new, last_held)
        code, words = np.int64(UNCHANGED), np.int64(0)
        if changed:
            code = _choose_code(a, b, whole, last_new, last_held, steps, mantissa_bits, SAMPLED)
            if code < 0:
                code = _choose_code(a, b, whole, last_new, last_held, steps, mantissa_bits, 1)
            out = last_held + STEP_BYTES
            states, place = _first_states(), out + _STATE_BYTES
            if whole < steps:
                states, place = _encode_step(states, place, last_new, last_held, code, mantissa_bits, table)
            for step in range(whole - 1, -1, -1):
                states, place = _encode_step(
                    states, place, a + step * STEP_BYTES, b + step * STEP_BYTES, code, mantissa_bits, table
                )
            _store_states(out, states)
            words = (place - out) >> 1
            if words > count:
                code, words = np.int64(RAW), np.int64(count)
            else:
                _copy(arena + 2 * block * BLOCK, out, 2 * words)
        entry = entries + 4 * ENTRY_NUMBERS * block
        store_u32(entry, code)
        store_u32(entry + 4, words)
        store_u32(entry + 8, changed)


def pack_blocks(thread, threads, parameters):
    """Move the blocks from the arena to the message, as many as it has room for; write ends to `entries`."""
    (
        new, arena, entries, blocks, directory, first, limit, numbers,
    ) = _unpack(parameters, 8)  # fmt: skip
    end, needed, late = first, first, np.int64(0)
    for block in range(blocks):
        entry = entries + 4 * ENTRY_NUMBERS * block
        code, words = load_scalar_u32(entry), load_scalar_u32(entry + 4)
        needed += 2 * words
        if ((end + 2 * words + 7) & ~7) > limit:
            late += load_scalar_u32(entry + 8)
            code, words = np.int64(UNCHANGED), np.int64(0)
        store_u32(directory + 8 * block, code)
        store_u32(directory + 8 * block + 4, words)
        source = arena + 2 * block * BLOCK
        if code == (RAW & 0xFFFFFFFF):
            source = new + 2 * block * BLOCK
        _copy(end, source, 2 * words)
        end += 2 * words
    store_u32(numbers, (end - first) >> 1)
    store_u32(numbers + 4, (needed - first) >> 1)
    store_u32(numbers + 8, late)


def decode_blocks(thread, threads, parameters):
    """Change the blocks of a row as a message says; write to `failed` which ones it does not fit."""
    (
        row, numel, mantissa_bits, padding, directory, first, failed, table, blocks, scratch, stride,
    ) = _unpack(parameters, 11)  # fmt: skip
    last = scratch + thread * stride
    begin, stop = blocks * thread // threads, blocks * (thread + 1) // threads
    at = first
    for block in range(begin):
        at += 2 * load_scalar_u32(directory + 8 * block + 4)
    for block in range(begin, stop):
        code = load_scalar_u32(directory + 8 * block)
        words = load_scalar_u32(directory + 8 * block + 4)
        target = row + 2 * block * BLOCK
        count = min(BLOCK, numel - block * BLOCK)
        is_wrong = False
        if code == (RAW & 0xFFFFFFFF):
            _copy(target, at, 2 * count)
        elif code != (UNCHANGED & 0xFFFFFFFF):
            states, lowest = _load_states(at), at + _STATE_BYTES
            place = at + 2 * words
            whole = count // LANES
            for step in range(whole):
                here = target + step * STEP_BYTES
                states, place = _decode_step(states, place, lowest, here, here, code, mantissa_bits, table)
            if whole * LANES < count:
                here = target + whole * STEP_BYTES
                _pad(last, here, count - whole * LANES, padding)
                states, place = _decode_step(states, place, lowest, last, last, code, mantissa_bits, table)
                _copy_words(here, last, count - whole * LANES)
            is_wrong = place != lowest or not _are_first(states)
        store_u8(failed + block, is_wrong)
        at += 2 * words

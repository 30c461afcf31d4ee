"""Device functions of the Triton kernels: how a tile of values is read, transformed, coded and written.

Everything in a message is a multiple of 16 values: a half of an int4 group, the lanes that share one half
of a random word, a 16-byte vector of codes, a word of 2-bit codes. So a row is cut into chunks of 16, two to
a Hadamard block, and every tile has the shape [..., 16] with a whole chunk, or half of one, in a thread.
Codes then move as vectors or words at any group size, the strides 1 to 8 of the transform stay inside a
thread, and stride 16 adds two tiles.

A tile comes as two halves, `low` and `high`, computed side by side. Each slot of it holds one chunk in each:

* int4: the same place in the low and in the high half of a group, two chunks that share their bytes;
* the others: the first and the second chunk of a block, which share their random words.

int4 groups of an even number of blocks can be worked on in pairs of slots (PAIRED): a tile then comes as four
parts, `low` and `high` of an even slot and of the next one, so that a thread has both chunks of each block,
which are transformed together and share their random words. Only where a row ends with a group of an odd
number of blocks do its high chunks lie otherwise; that tile takes a longer way.

Names: `chunk`, `group`, `slot`, `blocks` count in a row; GROUP is the size of a group in blocks of 32. What
belongs to a chunk, such as its mask, has one dimension less than its values.
"""

from __future__ import annotations

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
CHUNK = tl.constexpr(16)
FULL_PRECISION = tl.constexpr(32)
# Constants of the definition, see sdp4bit.quantization.reference and random.
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_TINY_BITS = tl.constexpr(0x0D800000)
_NAN_SCALE = tl.constexpr(0x7FC0)
_SCALE_ROUND_UP = tl.constexpr(0x10003)
_HIGH_HALF = tl.constexpr(-65536)
_HALF = tl.constexpr(0x8000)
_INT4_OFFSETS = tl.constexpr(0x88 << 16)
_LOWBIAS_1 = tl.constexpr(0x7FEB352D)
_LOWBIAS_2 = tl.constexpr(0x846CA68B)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
# An int4 code in the mantissa of a float, see _decode_int4.
LOW_NIBBLE = tl.constexpr(0x0F)
LOW_EXPONENT = tl.constexpr(0x4B000000)  # 2**23
LOW_BIAS = tl.constexpr(2.0**23 + 8)
HIGH_NIBBLE = tl.constexpr(0xF0)
HIGH_EXPONENT = tl.constexpr(0x49000000)  # 2**19
HIGH_BIAS = tl.constexpr(2.0**19 + 8)


@triton.jit
def float_from_bf16(bits):
    """Return fp32 of bf16 bits in int16: bf16 is the upper half of an fp32 number."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def offsets(chunk):
    """Return the numbers of the values of chunks, int64 [..., 16]."""
    return tl.expand_dims(chunk.to(tl.int64) * CHUNK, -1) + tl.arange(0, CHUNK)


@triton.jit
def _inside(
    chunk, mask, numel, UNIT: tl.constexpr, FIRST: tl.constexpr = 0, SIZE: tl.constexpr = CHUNK
):  # fmt: skip
    """Return which of values FIRST to FIRST + SIZE of chunks lie before the row's end, at `numel` units."""
    if UNIT == CHUNK:
        return tl.expand_dims(mask & (chunk < numel), -1)
    else:
        # Compared chunk by chunk: where a part of a chunk is known to be whole, its accesses stay vectors.
        left = tl.expand_dims(numel.to(tl.int64) * UNIT - chunk.to(tl.int64) * CHUNK, -1)
        return tl.expand_dims(mask, -1) & ((FIRST + tl.arange(0, SIZE)) < left)


@triton.jit
def _load_piece(row, chunk, mask, numel, UNIT: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Return values FIRST to FIRST + SIZE of chunks, [..., SIZE], as load_values.

    The interpreter has no arithmetic for bf16, and gets its bits as integers.
    """
    inside = _inside(chunk, mask, numel, UNIT, FIRST, SIZE)
    place = tl.expand_dims(chunk.to(tl.int64) * CHUNK, -1) + (FIRST + tl.arange(0, SIZE))
    if _IS_INTERPRETED and row.dtype.element_ty == tl.bfloat16:
        bits = tl.load(row.to(tl.pointer_type(tl.int16)) + place, mask=inside, other=0)
        return float_from_bf16(bits)
    else:
        return tl.load(row + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_values(row, chunk, mask, numel, UNIT: tl.constexpr):
    """Return fp32 of chunks of a row of fp32, bf16 or fp16, zero beyond its `numel` units of UNIT values."""
    return _load_piece(row, chunk, mask, numel, UNIT, 0, CHUNK)


@triton.jit
def _load_four(row, chunk, mask, numel, UNIT: tl.constexpr, LANE: tl.constexpr):
    """Return values LANE, LANE + 4, LANE + 8, LANE + 12 of chunks, [..., 2, 2], each read by itself."""
    first = _load_piece(row, chunk, mask, numel, UNIT, LANE, 1)
    second = _load_piece(row, chunk, mask, numel, UNIT, LANE + 4, 1)
    third = _load_piece(row, chunk, mask, numel, UNIT, LANE + 8, 1)
    fourth = _load_piece(row, chunk, mask, numel, UNIT, LANE + 12, 1)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _load_whole(row, chunk, mask, numel, UNIT: tl.constexpr):
    """Return what load_values returns, each chunk in one thread whatever else is done with it.

    Triton lays a tile out after its accesses to memory. 16 codes of 4 or 8 bits are a vector, which keeps a
    chunk in a thread; smaller codes are words of a whole chunk, and 16 bytes of values are a part of one: the
    transform would exchange values between threads, at three times the instructions. So values are read
    as tiles of 16 bytes a row, of which a thread takes a whole one, or one by one where rows are not aligned.
    """
    if UNIT % 4 != 0:
        even = tl.join(
            _load_four(row, chunk, mask, numel, UNIT, 0), _load_four(row, chunk, mask, numel, UNIT, 2)
        )
        odd = tl.join(
            _load_four(row, chunk, mask, numel, UNIT, 1), _load_four(row, chunk, mask, numel, UNIT, 3)
        )
        # Joined from the highest bit of a value's number to the lowest.
        in_order = tl.join(even, odd)
    elif row.dtype.element_ty == tl.float32:
        first = _load_piece(row, chunk, mask, numel, UNIT, 0, 4)
        second = _load_piece(row, chunk, mask, numel, UNIT, 4, 4)
        third = _load_piece(row, chunk, mask, numel, UNIT, 8, 4)
        fourth = _load_piece(row, chunk, mask, numel, UNIT, 12, 4)
        pieces = tl.join(tl.join(first, second), tl.join(third, fourth))
        # [..., value of a piece, piece % 2, piece / 2], where slots have one dimension or two.
        in_order = tl.permute(pieces, (0, 3, 2, 1) if len(chunk.shape) == 1 else (0, 1, 4, 3, 2))
    else:
        first = _load_piece(row, chunk, mask, numel, UNIT, 0, 8)
        second = _load_piece(row, chunk, mask, numel, UNIT, 8, 8)
        in_order = tl.permute(tl.join(first, second), (0, 2, 1) if len(chunk.shape) == 1 else (0, 1, 3, 2))
    return tl.reshape(in_order, offsets(chunk).shape)


@triton.jit
def load_for(row, chunk, mask, numel, UNIT: tl.constexpr, BITS: tl.constexpr):
    """Return what load_values returns, laid out for codes of so many bits."""
    if BITS < 4:
        return _load_whole(row, chunk, mask, numel, UNIT)
    else:
        return load_values(row, chunk, mask, numel, UNIT)


@triton.jit
def store_values(row, chunk, value, mask, numel, UNIT: tl.constexpr):
    """Write fp32 values to chunks of a row of fp32, bf16 or fp16, rounded to nearest even."""
    inside = _inside(chunk, mask, numel, UNIT)
    if row.dtype.element_ty == tl.bfloat16:
        # 0x7FFF, and one more if the upper half is odd, carries into it for more than a half, or for a half
        # whose even neighbour is above. NaN could carry into infinity, or out of the word, and is set apart.
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & _ABS_MASK) > _INFINITY_BITS, _NAN_SCALE, rounded)
        tl.store(row.to(tl.pointer_type(tl.int16)) + offsets(chunk), rounded.to(tl.int16), mask=inside)
    else:
        tl.store(row + offsets(chunk), value.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _butterfly(x, STRIDE: tl.constexpr):
    """Return sums and differences of the values that lie STRIDE apart, each in its place."""
    # Triton has no slices: the two of a pair become the last dimension, which can be split and joined again.
    # All of it happens inside a thread, where it renames registers.
    pairs = tl.reshape(x, (x.numel // (2 * STRIDE), 2, STRIDE))
    low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
    mixed = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(mixed, x.shape)


@triton.jit
def mix16(x):
    """Apply strides 1, 2, 4, 8 of the Hadamard transform to each chunk; stride 16 is left to the caller.

    Written neither as a product with a matrix nor as a broadcast and a sum: compilers put both on TF32
    tensor cores, which round.
    """
    return _butterfly(_butterfly(_butterfly(_butterfly(x, 1), 2), 4), 8)


@triton.jit
def flip_signs(value, chunk, signs, HALF: tl.constexpr):
    """Change the sign of element k of each block if bit k of `signs` is set.

    HALF says that all are first (0) or second (1) chunks of their blocks; -1 leaves it to their numbers.
    """
    if HALF < 0:
        half = tl.expand_dims(signs >> ((chunk & 1) * 16), -1)
    else:
        half = signs >> (16 * HALF)
    # The bit of each lane as the sign bit of an fp32 number; the shift to the left drops the others.
    flip = (half >> tl.arange(0, CHUNK)) << 31
    return (value.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


@triton.jit
def load_mixed(row, chunk, mask, numel, signs, UNIT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr):
    """Return fp32 of chunks of a row, their signs changed unless `signs` is None, after mix16."""
    value = load_for(row, chunk, mask, numel, UNIT, BITS)
    if signs is not None:
        value = flip_signs(value, chunk, signs, HALF)
    return mix16(value)


@triton.jit
def _hash32(block, k0, k1):
    """Return 32 mixed bits, uint32 [..., 16], for the lanes of blocks; see _low16 and _high16."""
    # A counter is 16 * block + lane. A lane has four bits, which neither a shift by 16 nor an addition to a
    # multiple of 16 carries anywhere, so all of the first round but the lane is done once per block.
    block = block.to(tl.uint32)
    x = (block * 16) ^ k0.to(tl.uint32, bitcast=True)
    x = tl.expand_dims(x ^ (x >> 16), -1) ^ tl.arange(0, CHUNK).to(tl.uint32)
    x = x * _LOWBIAS_1
    # x ^= k1 and x ^= x >> 15, with what the key contributes to both in one number. A key can number 2**28
    # blocks, so the shift gives 0: zero in a register of the thread, which makes one instruction of
    # the two xor, where a number that all threads share would make two.
    key = k1.to(tl.uint32, bitcast=True)
    key = (key ^ (key >> 15)) ^ tl.expand_dims(block >> 28, -1)
    x = x ^ (x >> 15) ^ key
    return x * _LOWBIAS_2


@triton.jit
def _low16(mixed):
    """Return the random bits of lanes 0 to 15, int32: the low half of the hash, whose last step is here."""
    return ((mixed ^ (mixed >> 16)) & 0xFFFF).to(tl.int32, bitcast=True)


@triton.jit
def _high16(mixed):
    """Return the random bits of lanes 16 to 31, int32: the high half, which the last step leaves alone."""
    return (mixed >> 16).to(tl.int32, bitcast=True)


@triton.jit
def _random16(first_block, chunk, k0, k1):
    """Return 16 random bits, int32 [..., 16], for chunks of a row that begins at block `first_block`.

    One hash per value: the other chunk that the hash would serve is in another thread.
    """
    mixed = _hash32(first_block + (chunk >> 1), k0, k1)
    # The low half is moved up and gets its last step there; the high half has had it.
    moved = tl.expand_dims(((chunk & 1) - 1).to(tl.uint32, bitcast=True) << 16, -1)
    return _high16(mixed ^ ((mixed << 16) & moved))


@triton.jit
def chunks_of(group, slot, blocks, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return the low and the high chunk of slots of groups in a row of `blocks`, and which slots exist."""
    size = tl.minimum(blocks - group * GROUP, GROUP)  # the last group of a row may be shorter
    if BITS == 4:
        # A group of `size` blocks has 2 * size chunks: the first half in low nibbles, the rest in high ones.
        low = group * (2 * GROUP) + slot
        return low, low + size, slot < size
    else:
        low = (group * GROUP + slot) * 2
        return low, low + 1, slot < size


@triton.jit
def ends_odd(tile, blocks, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return whether a tile has the end of a row that ends with an odd number of blocks; GROUP is even."""
    rest = blocks - tile * (GROUP * GROUPS)
    return (rest < GROUP * GROUPS) & ((rest & 1) == 1)


@triton.jit
def codes_and_scales(message, part, parts, blocks, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return where the codes (uint8) and the scales (int16) of one part of a message begin."""
    row_bytes = blocks.to(tl.int64) * (4 * BITS)  # 32 values of BITS / 8 bytes
    groups = tl.cdiv(blocks, GROUP).to(tl.int64)
    scales = (message + parts * row_bytes).to(tl.pointer_type(tl.int16))
    return message + part * row_bytes, scales + part * groups


@triton.jit
def decode_int4(byte, nibble, exponent, bias):
    """Return fp32 of one nibble of bytes, put into the mantissa of 2**23 (low) or 2**19 (high, unshifted).

    To subtract that number and the code's offset of 8 is exact, and one addition does the work of a shift,
    a subtraction and a conversion, which runs at a fraction of an addition's rate.
    """
    bits = (byte.to(tl.int32) & nibble) | exponent
    return bits.to(tl.float32, bitcast=True) - bias


@triton.jit
def decode_int8(byte):
    """Return fp32 of int8 codes read as uint8."""
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _small_words(codes, chunk, BITS: tl.constexpr):
    """Return where the lower two bits of chunks lie, one word each, and their third bits, half a word."""
    half = chunk & 1
    block = codes + (chunk >> 1).to(tl.int64) * (4 * BITS)
    return block + half * 4, (block + (8 + half * 2)).to(tl.pointer_type(tl.int16))


@triton.jit
def _decode_small(byte, third, LANE: tl.constexpr, BITS: tl.constexpr):
    """Return fp32 of the codes that are value LANE of a byte each, in the mantissa as in decode_int4."""
    # Bit 2 * LANE counts ones in a number from 2**(23 - 2 * LANE) on.
    EXPONENT: tl.constexpr = (127 + 23 - 2 * LANE) << 23
    bits = (byte & (3 << (2 * LANE))) | EXPONENT
    if BITS == 3:
        bits = bits | ((third << (2 + LANE)) & (4 << (2 * LANE)))
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 2 * LANE) + 2 ** (BITS - 1))


@triton.jit
def load_small(codes, chunk, mask, BITS: tl.constexpr):
    """Return fp32 of chunks of 2-bit or 3-bit codes, [..., 16]."""
    words, thirds = _small_words(codes, chunk, BITS)
    # Read as four bytes, so that a chunk is in one thread, see _load_whole.
    lane = tl.arange(0, 4)
    byte = tl.load(tl.expand_dims(words, -1) + lane, mask=tl.expand_dims(mask, -1), other=0).to(tl.int32)
    third = byte
    if BITS == 3:
        third = tl.expand_dims(tl.load(thirds, mask=mask, other=0).to(tl.int32), -1) >> (lane * 4)
    even = tl.join(_decode_small(byte, third, 0, BITS), _decode_small(byte, third, 2, BITS))
    odd = tl.join(_decode_small(byte, third, 1, BITS), _decode_small(byte, third, 3, BITS))
    # [..., byte, value / 2, value % 2]
    return tl.reshape(tl.join(even, odd), offsets(chunk).shape)


@triton.jit
def _store_small(codes, chunk, number, mask, BITS: tl.constexpr):
    """Write chunks of codes, int32 [..., 16], offset so that none is negative."""
    lane = tl.arange(0, CHUNK)
    words, thirds = _small_words(codes, chunk, BITS)
    # No two terms share a bit: the sum joins them.
    number = number.to(tl.uint32)
    word = tl.sum((number & 3) << (lane * 2), -1).to(tl.int32, bitcast=True)
    tl.store(words.to(tl.pointer_type(tl.int32)), word, mask=mask)
    if BITS == 3:
        third = tl.sum(((number >> 2) & 1) << lane, -1)
        tl.store(thirds, third.to(tl.int16), mask=mask)


@triton.jit
def _load_codes(codes, scales, chunk, place, group, is_high, mask, BITS: tl.constexpr):
    """Return fp32 of chunks of a message; `is_high` says which nibble of the bytes at `place` is theirs."""
    each = tl.expand_dims(mask, -1)
    if BITS == FULL_PRECISION:
        return tl.load(codes.to(tl.pointer_type(tl.float32)) + place, mask=each, other=0.0)
    else:
        scale = float_from_bf16(tl.load(scales + group, mask=mask, other=0))
        if BITS == 8:
            value = decode_int8(tl.load(codes + place, mask=each, other=0))
        elif BITS < 4:
            value = load_small(codes, chunk, mask, BITS)
        else:
            byte = tl.load(codes + place, mask=each, other=0)
            high = tl.expand_dims(is_high, -1)
            nibble = tl.where(high, HIGH_NIBBLE, LOW_NIBBLE)
            exponent = tl.where(high, HIGH_EXPONENT, LOW_EXPONENT)
            value = decode_int4(byte, nibble, exponent, tl.where(high, HIGH_BIAS, LOW_BIAS))
        return value * tl.expand_dims(scale, -1)


@triton.jit
def sum_messages(
    codes, scales, stride, count, chunk, blocks, mask,
    BITS: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr, SIGNED_ZERO: tl.constexpr,
):  # fmt: skip
    """Return the fp32 sum of chunks over messages, in order, from +0.0.

    Without SIGNED_ZERO a zero may have either sign, and one addition per value is saved.

    Every chunk finds its own group, so it does not matter which groups the caller works in. `stride` is the
    distance of messages in bytes, even. COUNT unrolls the loop; -1 takes the number of messages from count.
    """
    group = chunk // (2 * GROUP)
    position = chunk  # of the chunk's codes, in units of 16 bytes
    is_high = mask
    if BITS == 4:
        slot = chunk - group * (2 * GROUP)
        size = tl.minimum(blocks - group * GROUP, GROUP)
        is_high = slot >= size
        position = group * GROUP + tl.where(is_high, slot - size, slot)
    place = offsets(position)
    total = tl.zeros(place.shape, tl.float32)
    if COUNT >= 0:
        for i in tl.static_range(COUNT):
            step = i * stride
            value = _load_codes(codes + step, scales + (step >> 1), chunk, place, group, is_high, mask, BITS)
            if i == 0 and not SIGNED_ZERO:
                total = value
            else:
                total += value
    else:
        for i in range(count):
            step = i * stride
            total += _load_codes(codes + step, scales + (step >> 1), chunk, place, group, is_high, mask, BITS)
    return total


@triton.jit
def largest_bits(values):
    """Return the largest magnitude of each group, int32 [groups, 1]: as bits, NaN > Inf > finite."""
    # As signed numbers the bits of positive floats are the largest, as unsigned ones those of negative
    # floats: two maxima per value, of which GPUs take two at a time, instead of a mask and a maximum.
    signed = values[0].to(tl.int32, bitcast=True)
    unsigned = values[0].to(tl.uint32, bitcast=True)
    for i in tl.static_range(1, len(values)):
        signed = tl.maximum(signed, values[i].to(tl.int32, bitcast=True))
        unsigned = tl.maximum(unsigned, values[i].to(tl.uint32, bitcast=True))
    largest = tl.maximum(tl.max(signed, 2), tl.max(unsigned, 2).to(tl.int32, bitcast=True) & _ABS_MASK)
    return tl.max(largest, 1, keep_dims=True)


@triton.jit
def compute_scale(largest, BITS: tl.constexpr, CLIP: tl.constexpr = 1.0):
    """Return the scale as bf16 bits in int32, and 65536 / scale, or 0 where all codes are zero."""
    not_finite = largest >= _INFINITY_BITS
    step = largest.to(tl.float32, bitcast=True) * (CLIP / (2 ** (BITS - 1) - 1))
    bits = (step.to(tl.int32, bitcast=True) + _SCALE_ROUND_UP) & _HIGH_HALF
    if BITS == 2:  # of others no scale is rounded up to infinity
        not_finite = not_finite | (bits >= _INFINITY_BITS)
    unused = not_finite | (largest < _TINY_BITS)
    # 65536 / scale, rounded to nearest. NVIDIA's division of floats calls a function for subnormals, and
    # registers are spilled around the call. A scale is M * 2**(e - 134), with M from 128 to 255 and e its
    # exponent field, and 65536 / scale is 2**31 / M * 2**(119 - e). Rounded to an integer (there are no
    # ties), 2**31 / M has the quotient's 24 bits, which fp32 holds; then their exponent is put right.
    mantissa = ((bits >> 16) & 0x7F | 0x80).to(tl.uint32)
    digits = ((mantissa >> 1) + 0x80000000) // mantissa
    exponent = (119 << 23) - (bits & _EXPONENT_MASK)
    quotient = (digits.to(tl.float32).to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)
    bits = tl.where(unused, 0, bits >> 16)
    return tl.where(not_finite, _NAN_SCALE, bits), tl.where(unused, 0.0, quotient)


@triton.jit
def _fixed(value, reciprocal, BITS: tl.constexpr = 0, CLIP: tl.constexpr = 1.0):
    """Return value * reciprocal in units of 2**-16, int32, cut to an integer and, if CLIP, to the codes."""
    # In a group without a reciprocal a product is zero or, if the value is NaN or infinite, NaN. GPUs of both
    # makers convert that to 0; a CPU may give the smallest integer, whose bits that reach a code are 0, too.
    # Nothing depends on the code: the scale of such a group is NaN.
    each = tl.expand_dims(reciprocal, -1)
    fixed = (value * each).to(tl.int32)
    if CLIP < 1:
        LIMIT: tl.constexpr = (2 ** (BITS - 1) - 1) * 65536
        fixed = tl.where(each == 0, 0, tl.minimum(tl.maximum(fixed, -LIMIT), LIMIT))
    return fixed


@triton.jit
def _pack(low, high):
    """Return the bytes of int4 codes of numbers in units of 2**-16, already rounded but for the cut."""
    # A code is what lies above the fraction of 16 bits. Both, the high one times 16, are added before the
    # fraction goes, and with them the offset of 8 that each has: a byte of two numbers from 0 to 15.
    return (((high & _HIGH_HALF) * 16 + low + _INT4_OFFSETS) >> 16).to(tl.uint8)


@triton.jit
def _store_pairs(
    codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1,
    GROUP: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Write the int4 codes of a tile of pairs of slots; none is clipped."""
    low_chunk, high_chunk, mask = chunks_of(group, slot, blocks, 4, GROUP)
    _, _, next_mask = chunks_of(group, slot + 1, blocks, 4, GROUP)
    # Rounded as soon as the bits are known, in either branch, so that only one of the two stays in registers.
    high = _fixed(values[1], reciprocal)
    next_high = _fixed(values[3], reciprocal)
    if STOCHASTIC:
        if is_odd:
            high += _random16(first_block, high_chunk, k0, k1)
            next_high += _random16(first_block, high_chunk + 1, k0, k1)
        else:
            mixed = _hash32(first_block + (high_chunk >> 1), k0, k1)
            high += _low16(mixed)
            next_high += _high16(mixed)
        mixed = _hash32(first_block + (low_chunk >> 1), k0, k1)
        low = _fixed(values[0], reciprocal) + _low16(mixed)
        next_low = _fixed(values[2], reciprocal) + _high16(mixed)
    else:
        high += _HALF
        next_high += _HALF
        low = _fixed(values[0], reciprocal) + _HALF
        next_low = _fixed(values[2], reciprocal) + _HALF
    position = group * GROUP + slot
    tl.store(codes + offsets(position), _pack(low, high), mask=tl.expand_dims(mask, -1))
    next_mask = tl.expand_dims(next_mask, -1)
    tl.store(codes + offsets(position + 1), _pack(next_low, next_high), mask=next_mask)


@triton.jit
def store_codes(
    codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1,
    BITS: tl.constexpr, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr, CLIP: tl.constexpr = 1.0,
):  # fmt: skip
    """Write the codes of a tile to a row of a message; `first_block` numbers the row for its random bits."""
    low_chunk, high_chunk, mask = chunks_of(group, slot, blocks, BITS, GROUP)
    each = tl.expand_dims(mask, -1)
    if BITS == FULL_PRECISION:
        floats = codes.to(tl.pointer_type(tl.float32))
        tl.store(floats + offsets(low_chunk), values[0], mask=each)
        tl.store(floats + offsets(high_chunk), values[1], mask=each)
    elif BITS != 4:
        if STOCHASTIC:
            # The two chunks of a block are in one thread, and share their hashes.
            mixed = _hash32(first_block + (low_chunk >> 1), k0, k1)
            low_random = _low16(mixed)
            high_random = _high16(mixed)
        else:
            low_random = _HALF
            high_random = _HALF
        low_code = (_fixed(values[0], reciprocal, BITS, CLIP) + low_random) >> 16
        high_code = (_fixed(values[1], reciprocal, BITS, CLIP) + high_random) >> 16
        if BITS == 8:
            tl.store(codes + offsets(low_chunk), low_code.to(tl.uint8), mask=each)
            tl.store(codes + offsets(high_chunk), high_code.to(tl.uint8), mask=each)
        else:
            OFFSET: tl.constexpr = 2 ** (BITS - 1)
            _store_small(codes, low_chunk, low_code + OFFSET, mask, BITS)
            _store_small(codes, high_chunk, high_code + OFFSET, mask, BITS)
    elif len(values) == 2:
        if STOCHASTIC:
            low_random = _random16(first_block, low_chunk, k0, k1)
            high_random = _random16(first_block, high_chunk, k0, k1)
        else:
            low_random = _HALF
            high_random = _HALF
        low = _fixed(values[0], reciprocal, BITS, CLIP) + low_random
        high = _fixed(values[1], reciprocal, BITS, CLIP) + high_random
        tl.store(codes + offsets(group * GROUP + slot), _pack(low, high), mask=each)
    else:
        _store_pairs(
            codes, values, reciprocal, group, slot, blocks, is_odd, first_block, k0, k1, GROUP, STOCHASTIC
        )


@triton.jit
def scale_slots(part, parts, blocks, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Return how many places for scales a part fills: one per group and, in the last part, the zeros with
    which the message ends on 16 bytes.
    """
    groups = tl.cdiv(blocks, GROUP)
    if BITS == FULL_PRECISION:
        return groups
    total = parts * groups.to(tl.int64)
    if BITS < 4:  # whose codes do not fill whole 16 bytes, as others do
        total += parts * blocks.to(tl.int64) * (2 * BITS)
    padding = ((total + 7) // 8 * 8 - total).to(tl.int32)
    return groups + tl.where(part == parts - 1, padding, 0)

"""Device functions of the Triton kernels that read, transform and write tiles of values.

Everything in a message is a multiple of 16 values. Examples are half an int4 group, the lanes that share one
half of a random word, a 16-byte vector of codes, and a word of 2-bit codes. So a row is cut into chunks of
16, two per Hadamard block, and every tile has the shape [..., 16] with a full chunk, or half of one, in a
thread. Codes then move as vectors or words at any group size, the strides 1 to 8 of the transform stay inside
a thread, and stride 16 adds two tiles.

A tile has two halves, `low` and `high`, computed side by side. Each slot has one chunk in each:

* int4: the same place in the low and in the high half of a group, two chunks that share their bytes;
* the others: the first and the second chunk of a block, which share their random words.

int4 groups with an even number of blocks can be processed in pairs of slots (PAIRED). A tile then has four
parts, `low` and `high` of an even slot and of the next one. So a thread has both chunks of each block, which
are transformed together and share their random words. If a row ends with a group of an odd number of blocks
(ODD_ROW), its high chunks are in other places, and that tile takes a slower path.

Names: `chunk`, `group`, `slot`, `blocks` count in a row; GROUP is the size of a group in blocks of 32.
Tensors per chunk, such as masks, have one dimension less than values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.coding import of

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
CHUNK = tl.constexpr(16)
# Constants of the definition, see sdp4bit.quantization.reference.
ABS_MASK = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_SCALE = tl.constexpr(0x7FC0)


@triton.jit
def float_from_bf16(bits):
    """Return fp32 of bf16 bits in int16: bf16 is the upper half of an fp32 number."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def offsets(chunk):
    """Return the numbers of the values of chunks, int64 [..., 16]."""
    return tl.expand_dims(chunk.to(tl.int64) * CHUNK, -1) + tl.arange(0, CHUNK)


@triton.jit
def _places(
    chunk, mask, numel, UNIT: tl.constexpr, FIRST: tl.constexpr = 0, SIZE: tl.constexpr = CHUNK
):  # fmt: skip
    """Return the places of values FIRST to FIRST + SIZE of chunks in a row, and which exist.

    `numel` is the end of the row in units of UNIT values, or points to the table of its blocks (see
    `ops.hadamard_quantize`).
    """
    lane = FIRST + tl.arange(0, SIZE)
    if numel.dtype.is_ptr():
        entry = tl.load(numel + (chunk >> 1), mask=mask, other=0)
        skipped = (chunk & 1) * CHUNK
        place = tl.expand_dims((entry >> 6) + skipped, -1) + lane
        return place, tl.expand_dims(mask, -1) & (lane < tl.expand_dims((entry & 63) - skipped, -1))
    else:
        place = tl.expand_dims(chunk.to(tl.int64) * CHUNK, -1) + lane
        if UNIT == CHUNK:
            return place, tl.expand_dims(mask & (chunk < numel), -1)
        else:
            # Compared per chunk, so that accesses to complete parts of a chunk stay vectors.
            left = tl.expand_dims(numel.to(tl.int64) * UNIT - chunk.to(tl.int64) * CHUNK, -1)
            return place, tl.expand_dims(mask, -1) & (lane < left)


@triton.jit
def _load_piece(row, chunk, mask, numel, UNIT: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """Return values FIRST to FIRST + SIZE of chunks, [..., SIZE]; see load_values.

    The interpreter does not support bf16 and gets its bits as integers.
    """
    place, inside = _places(chunk, mask, numel, UNIT, FIRST, SIZE)
    if IS_INTERPRETED and row.dtype.element_ty == tl.bfloat16:
        bits = tl.load(row.to(tl.pointer_type(tl.int16)) + place, mask=inside, other=0)
        return float_from_bf16(bits)
    else:
        return tl.load(row + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_values(row, chunk, mask, numel, UNIT: tl.constexpr):
    """Return fp32 of chunks of a row of fp32, bf16 or fp16, zero if they do not exist; see _places."""
    return _load_piece(row, chunk, mask, numel, UNIT, 0, CHUNK)


@triton.jit
def _load_four(row, chunk, mask, numel, UNIT: tl.constexpr, LANE: tl.constexpr):
    """Return values LANE, LANE + 4, LANE + 8, LANE + 12 of chunks, [..., 2, 2], read individually."""
    first = _load_piece(row, chunk, mask, numel, UNIT, LANE, 1)
    second = _load_piece(row, chunk, mask, numel, UNIT, LANE + 4, 1)
    third = _load_piece(row, chunk, mask, numel, UNIT, LANE + 8, 1)
    fourth = _load_piece(row, chunk, mask, numel, UNIT, LANE + 12, 1)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _load_whole(row, chunk, mask, numel, UNIT: tl.constexpr):
    """Load like load_values, with each chunk in one thread.

    Triton chooses layouts by memory accesses. 16 codes of 4 or 8 bits are a vector, which keeps a chunk in a
    thread. Smaller codes are words of a full chunk, while 16 bytes of values are only a part of one. The
    transform would then exchange values between threads, with three times the instructions. So values are
    read as rows of 16 bytes, one row per thread, or individually if rows are not aligned.
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
        # [..., value of a piece, piece % 2, piece / 2]; slots have one or two dimensions.
        in_order = tl.permute(pieces, (0, 3, 2, 1) if len(chunk.shape) == 1 else (0, 1, 4, 3, 2))
    else:
        first = _load_piece(row, chunk, mask, numel, UNIT, 0, 8)
        second = _load_piece(row, chunk, mask, numel, UNIT, 8, 8)
        in_order = tl.permute(tl.join(first, second), (0, 2, 1) if len(chunk.shape) == 1 else (0, 1, 3, 2))
    return tl.reshape(in_order, offsets(chunk).shape)


@triton.jit
def load_for(row, chunk, mask, numel, UNIT: tl.constexpr, FORMAT: tl.constexpr):
    """Load like load_values, with a layout for the codes."""
    if of(FORMAT, "in_words"):
        return _load_whole(row, chunk, mask, numel, UNIT)
    else:
        return load_values(row, chunk, mask, numel, UNIT)


@triton.jit
def bf16_bits(value):
    """Return the bits of fp32 values in bf16, int16, rounded to nearest even; NaN becomes 0x7FC0."""
    # Adding 0x7FFF, and 1 if the upper half is odd, carries for more than a half and for a half that rounds
    # to even. NaN might carry into infinity or out of the word, so it is handled separately.
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & ABS_MASK) > INFINITY_BITS, NAN_SCALE, rounded).to(tl.int16)


@triton.jit
def store_values(row, chunk, value, mask, numel, UNIT: tl.constexpr):
    """Write fp32 values to chunks of a row of fp32, bf16 or fp16, rounded to nearest even."""
    place, inside = _places(chunk, mask, numel, UNIT)
    if row.dtype.element_ty == tl.bfloat16:
        tl.store(row.to(tl.pointer_type(tl.int16)) + place, bf16_bits(value), mask=inside)
    else:
        tl.store(row + place, value.to(row.dtype.element_ty), mask=inside)


@triton.jit
def _butterfly(x, STRIDE: tl.constexpr):
    """Replace pairs of values at distance STRIDE by their sums and differences."""
    # Triton has no slices, so pairs become the last dimension, which can be split and joined again. Inside a
    # thread this only renames registers.
    pairs = tl.reshape(x, (x.numel // (2 * STRIDE), 2, STRIDE))
    low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
    mixed = tl.permute(tl.join(low + high, low - high), (0, 2, 1))
    return tl.reshape(mixed, x.shape)


@triton.jit
def mix16(x):
    """Apply strides 1, 2, 4, 8 of the Hadamard transform to each chunk; the caller applies stride 16.

    Not a matrix product or a broadcast and a sum, because compilers would use TF32 tensor cores, which round.
    """
    return _butterfly(_butterfly(_butterfly(_butterfly(x, 1), 2), 4), 8)


@triton.jit
def load_mixed(row, chunk, mask, numel, UNIT: tl.constexpr, FORMAT: tl.constexpr):
    """Return fp32 of chunks of a row after mix16."""
    return mix16(load_for(row, chunk, mask, numel, UNIT, FORMAT))


@triton.jit
def chunks_of(group, slot, blocks, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Return the low and the high chunk of slots of groups in a row of `blocks`, and which slots exist."""
    size = tl.minimum(blocks - group * GROUP, GROUP)  # the last group of a row may be shorter
    if of(FORMAT, "in_halves"):
        # Of the 2 * size chunks of a group the first half is in low nibbles, the rest in high ones.
        low = group * (2 * GROUP) + slot
        return low, low + size, slot < size
    else:
        low = (group * GROUP + slot) * 2
        return low, low + 1, slot < size


@triton.jit
def _read_transformed(
    row, numel, low_chunk, high_chunk, mask, is_odd,
    UNIT: tl.constexpr, FORMAT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Return a tile of a row, transformed. Stride 16 joins the two chunks of a block."""
    if not of(FORMAT, "in_halves"):
        # The two chunks are the low and the high one of a slot.
        first = load_mixed(row, low_chunk, mask, numel, UNIT, FORMAT)
        second = load_mixed(row, high_chunk, mask, numel, UNIT, FORMAT)
        return first + second, first - second
    elif PAIRED:
        # The two chunks are the low ones of a pair of slots, or the high ones. If the last slot has no
        # partner, the low chunk's block continues in the group's high chunks.
        first = load_mixed(row, low_chunk, mask, numel, UNIT, FORMAT)
        second = load_mixed(row, low_chunk + 1, mask, numel, UNIT, FORMAT)
        if is_odd:
            # The high chunks of a pair belong to two blocks, whose other chunks are read and transformed too.
            high = load_mixed(row, high_chunk, mask, numel, UNIT, FORMAT)
            twin = load_mixed(row, high_chunk ^ 1, mask, numel, UNIT, FORMAT)
            next_high = load_mixed(row, high_chunk + 1, mask, numel, UNIT, FORMAT)
            next_twin = load_mixed(row, (high_chunk + 1) ^ 1, mask, numel, UNIT, FORMAT)
            is_first = tl.expand_dims(high_chunk & 1, -1) == 0
            high = tl.where(is_first, high + twin, twin - high)
            next_high = tl.where(is_first, next_twin - next_high, next_high + next_twin)
        else:
            even = load_mixed(row, high_chunk, mask, numel, UNIT, FORMAT)
            odd = load_mixed(row, high_chunk + 1, mask, numel, UNIT, FORMAT)
            high = even + odd
            next_high = even - odd
        return first + second, high, first - second, next_high
    else:
        # The two chunks are in different threads. The other chunk of each block is read again from the cache
        # and transformed again. The first chunk of a block becomes the sum, the second the difference.
        low = load_mixed(row, low_chunk, mask, numel, UNIT, FORMAT)
        high = load_mixed(row, high_chunk, mask, numel, UNIT, FORMAT)
        low_twin = load_mixed(row, low_chunk ^ 1, mask, numel, UNIT, FORMAT)
        high_twin = load_mixed(row, high_chunk ^ 1, mask, numel, UNIT, FORMAT)
        low = tl.where(tl.expand_dims(low_chunk & 1, -1) == 0, low + low_twin, low_twin - low)
        high = tl.where(tl.expand_dims(high_chunk & 1, -1) == 0, high + high_twin, high_twin - high)
        return low, high


@triton.jit
def read_values(
    row, replica, numel, group, slot, blocks, is_odd,
    UNIT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    HAS_REPLICA: tl.constexpr, HADAMARD: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Return a tile of a row, minus the replica or transformed."""
    low_chunk, high_chunk, mask = chunks_of(group, slot, blocks, FORMAT, GROUP)
    if HADAMARD:
        return _read_transformed(row, numel, low_chunk, high_chunk, mask, is_odd, UNIT, FORMAT, PAIRED)
    else:
        low = load_for(row, low_chunk, mask, numel, UNIT, FORMAT)
        high = load_for(row, high_chunk, mask, numel, UNIT, FORMAT)
        if HAS_REPLICA:
            low -= load_for(replica, low_chunk, mask, numel, UNIT, FORMAT)
            high -= load_for(replica, high_chunk, mask, numel, UNIT, FORMAT)
        return low, high


@triton.jit
def ends_odd(tile, blocks, GROUP: tl.constexpr, GROUPS: tl.constexpr, ODD_ROW: tl.constexpr):
    """Return whether a tile ends a row whose last group has an odd number of blocks, with ODD_ROW."""
    if ODD_ROW:
        return blocks - tile * (GROUP * GROUPS) < GROUP * GROUPS
    else:
        return False  # a constant, which removes the slower path from the kernel


@triton.jit
def codes_and_scales(message, part, parts, blocks, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Return pointers to the codes (uint8) and the scales (int16) of one part of a message."""
    row_bytes = blocks.to(tl.int64) * of(FORMAT, "block_bytes")
    groups = tl.cdiv(blocks, GROUP).to(tl.int64)
    scales = (message + parts * row_bytes).to(tl.pointer_type(tl.int16))
    return message + part * row_bytes, scales + part * groups


@triton.jit
def scale_slots(part, parts, blocks, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Return the number of scales that a part writes, including the final zero padding in the last part."""
    groups = tl.cdiv(blocks, GROUP)
    if not of(FORMAT, "has_scales"):
        return groups
    total = parts * groups.to(tl.int64)
    if of(FORMAT, "block_bytes") % 16 != 0:  # other codes fill multiples of 16 bytes
        total += parts * blocks.to(tl.int64) * (of(FORMAT, "block_bytes") // 2)
    padding = ((total + 7) // 8 * 8 - total).to(tl.int32)
    return groups + tl.where(part == parts - 1, padding, 0)

"""The Triton kernels behind the back end, one per kind of operator. Not run on a GPU.

Group sizes are constants of a compiled kernel, so that its divisions are cheap. Row lengths and strides are
arguments that are not specialized: one kernel serves all shapes. Strides that must be multiples of 16 are
passed in units of 16, so that the compiler knows it. The shorter last group has fewer slots, nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import (
    FULL_PRECISION,
    HIGH_BIAS,
    HIGH_EXPONENT,
    HIGH_NIBBLE,
    LOW_BIAS,
    LOW_EXPONENT,
    LOW_NIBBLE,
    chunks_of,
    codes_and_scales,
    compute_scale,
    decode_int4,
    decode_int8,
    flip_signs,
    float_from_bf16,
    largest_bits,
    load_mixed,
    load_values,
    mix16,
    offsets,
    store_codes,
    store_scales,
    store_values,
    sum_messages,
)

# Arguments that Triton must not make constants of, nor compile variants for: they differ from call to call.
_RUNTIME = [
    *("numel", "parts", "blocks", "count", "k0", "k1", "first_block", "row_blocks", "signs"),
    *("destination_stride", "part_stride", "row_stride", "stride", "out_stride"),
]


@triton.jit
def _read_values(
    row, replica, numel, group, slot, blocks, signs,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_REPLICA: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Return a tile of a row, less the replica or transformed."""
    low_chunk, high_chunk, mask = chunks_of(group, slot, blocks, BITS, GROUP)
    if HADAMARD:
        # Stride 16 joins the two chunks of a block. With 8 bits they are the low and the high one of a slot;
        # with 4 bits the halves of a group, which may lie in different blocks.
        low = load_mixed(row, low_chunk, mask, numel, signs, -1 if BITS == 4 else 0)
        high = load_mixed(row, high_chunk, mask, numel, signs, -1 if BITS == 4 else 1)
        if BITS == 4:
            # The other chunk of each block is read again, from the cache, and transformed again. The first
            # chunk of a block becomes the sum, the second the difference.
            low_twin = load_mixed(row, low_chunk ^ 1, mask, numel, signs, -1)
            high_twin = load_mixed(row, high_chunk ^ 1, mask, numel, signs, -1)
            low = tl.where(tl.expand_dims(low_chunk & 1, -1) == 0, low + low_twin, low_twin - low)
            high = tl.where(tl.expand_dims(high_chunk & 1, -1) == 0, high + high_twin, high_twin - high)
        else:
            difference = low - high
            low = low + high
            high = difference
    else:
        low = load_values(row, low_chunk, mask, numel)
        high = load_values(row, high_chunk, mask, numel)
        if HAS_REPLICA:
            low -= load_values(replica, low_chunk, mask, numel)
            high -= load_values(replica, high_chunk, mask, numel)
    return low, high


@triton.jit(do_not_specialize=_RUNTIME)
def quantize_kernel(
    values,
    replica,
    out,
    numel,  # of a row, and the strides of values: in units of UNIT values
    destination_stride: tl.int64,
    part_stride: tl.int64,
    parts,
    blocks,  # of 32 values in a row, with padding
    out_stride: tl.int64,  # in units of 16 bytes
    k0,
    k1,
    first_block,
    row_blocks,
    signs,  # to change before the transform, or None
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_REPLICA: tl.constexpr,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Quantize rows of values, less the replica or transformed, into messages.

    A program handles GROUPS groups of a row. A group of more than SLOTS blocks is read twice, for its scale
    and for its codes, except for the first SLOTS, which stay in registers.
    """
    tiles = tl.cdiv(tl.cdiv(blocks, GROUP), GROUPS)
    row = tl.program_id(0) // tiles
    tile = tl.program_id(0) - row * tiles
    destination = row // parts
    part = row - destination * parts
    group = tl.expand_dims(tile * GROUPS + tl.arange(0, GROUPS), 1)
    slot = tl.expand_dims(tl.arange(0, SLOTS), 0)
    start = destination * destination_stride.to(tl.int64) + part * part_stride.to(tl.int64)
    source = values + start * UNIT
    length = numel.to(tl.int64) * UNIT
    message = out + destination * (out_stride.to(tl.int64) * 16)
    codes, scales = codes_and_scales(message, part, parts, blocks, BITS, GROUP)
    random = first_block + row * row_blocks

    # The first SLOTS blocks of a group stay in registers between the scale and the codes.
    low, high = _read_values(
        source, replica, length, group, slot, blocks, signs, BITS, GROUP, HAS_REPLICA, HADAMARD
    )
    largest = largest_bits(low, high)
    if SLOTS < GROUP:
        for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
            lo, hi = _read_values(
                source, replica, length, group, slot + i, blocks, signs, BITS, GROUP, HAS_REPLICA, HADAMARD
            )
            largest = tl.maximum(largest, largest_bits(lo, hi))
    bits, reciprocal = compute_scale(largest, BITS)
    if BITS != FULL_PRECISION:
        store_scales(scales, bits, group, part, parts, blocks, (part == 0) & (tile == 0), GROUP)
    store_codes(codes, low, high, reciprocal, group, slot, blocks, random, k0, k1, BITS, GROUP, STOCHASTIC)
    if SLOTS < GROUP:
        for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
            lo, hi = _read_values(
                source, replica, length, group, slot + i, blocks, signs, BITS, GROUP, HAS_REPLICA, HADAMARD
            )
            store_codes(
                codes, lo, hi, reciprocal, group, slot + i, blocks, random, k0, k1, BITS, GROUP, STOCHASTIC
            )


@triton.jit
def _read_sums(
    codes, scales, stride, count, group, slot, blocks,
    BITS_IN: tl.constexpr, GROUP_IN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return a tile of the sum of a part over all messages, in the slots of the message that is sent."""
    low_chunk, high_chunk, mask = chunks_of(group, slot, blocks, BITS, GROUP)
    low = sum_messages(codes, scales, stride, count, low_chunk, blocks, mask, BITS_IN, GROUP_IN, COUNT)
    high = sum_messages(codes, scales, stride, count, high_chunk, blocks, mask, BITS_IN, GROUP_IN, COUNT)
    return low, high


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_quantize_kernel(
    messages,
    out,
    count,
    parts,
    blocks,  # of 32 values in a row, with padding
    stride: tl.int64,  # in units of 16 bytes, as is out_stride
    out_stride: tl.int64,
    k0,
    k1,
    first_block,
    row_blocks,
    COUNT: tl.constexpr,
    BITS_IN: tl.constexpr,
    GROUP_IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Quantize the sum of each part over all messages into one message per part.

    A program handles GROUPS groups that are sent, whatever the groups received: each chunk finds its own
    codes and scale, so the two group sizes need not fit each other. Long groups are read twice, as above.
    """
    tiles = tl.cdiv(tl.cdiv(blocks, GROUP), GROUPS)
    part = tl.program_id(0) // tiles
    tile = tl.program_id(0) - part * tiles
    group = tl.expand_dims(tile * GROUPS + tl.arange(0, GROUPS), 1)
    slot = tl.expand_dims(tl.arange(0, SLOTS), 0)
    step = stride.to(tl.int64) * 16
    codes_in, scales_in = codes_and_scales(messages, part, parts, blocks, BITS_IN, GROUP_IN)
    message = out + part * (out_stride.to(tl.int64) * 16)
    codes, scales = codes_and_scales(message, 0, 1, blocks, BITS, GROUP)
    random = first_block + part * row_blocks

    low, high = _read_sums(
        codes_in, scales_in, step, count, group, slot, blocks, BITS_IN, GROUP_IN, BITS, GROUP, COUNT
    )
    largest = largest_bits(low, high)
    if SLOTS < GROUP:
        for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
            lo, hi = _read_sums(
                codes_in,
                scales_in,
                step,
                count,
                group,
                slot + i,
                blocks,
                BITS_IN,
                GROUP_IN,
                BITS,
                GROUP,
                COUNT,
            )
            largest = tl.maximum(largest, largest_bits(lo, hi))
    bits, reciprocal = compute_scale(largest, BITS)
    if BITS != FULL_PRECISION:
        store_scales(scales, bits, group, 0, 1, blocks, tile == 0, GROUP)
    store_codes(codes, low, high, reciprocal, group, slot, blocks, random, k0, k1, BITS, GROUP, STOCHASTIC)
    if SLOTS < GROUP:
        for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
            lo, hi = _read_sums(
                codes_in,
                scales_in,
                step,
                count,
                group,
                slot + i,
                blocks,
                BITS_IN,
                GROUP_IN,
                BITS,
                GROUP,
                COUNT,
            )
            store_codes(
                codes, lo, hi, reciprocal, group, slot + i, blocks, random, k0, k1, BITS, GROUP, STOCHASTIC
            )


@triton.jit(do_not_specialize=_RUNTIME)
def dequantize_kernel(
    messages,
    replica,
    numel,  # of a row, and row_stride: in units of UNIT values
    blocks,  # of 32 values in a row, with padding
    stride: tl.int64,  # in units of 16 bytes
    row_stride: tl.int64,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Add its message to each row of the replica, or replace the row by it.

    A program handles ROWS consecutive slots, whatever the groups: nothing here is summed over a group.
    """
    tiles = tl.cdiv(blocks, ROWS)
    row = tl.program_id(0) // tiles
    position = (tl.program_id(0) - row * tiles) * ROWS + tl.arange(0, ROWS)
    group = position // GROUP
    low_chunk, high_chunk, mask = chunks_of(group, position - group * GROUP, blocks, BITS, GROUP)
    each = tl.expand_dims(mask, -1)
    message = messages + row * (stride.to(tl.int64) * 16)
    codes, scales = codes_and_scales(message, 0, 1, blocks, BITS, GROUP)
    if BITS == FULL_PRECISION:
        floats = codes.to(tl.pointer_type(tl.float32))
        low = tl.load(floats + offsets(low_chunk), mask=each, other=0.0)
        high = tl.load(floats + offsets(high_chunk), mask=each, other=0.0)
    else:
        scale = tl.expand_dims(float_from_bf16(tl.load(scales + group, mask=mask, other=0)), -1)
        if BITS == 8:
            low = decode_int8(tl.load(codes + offsets(low_chunk), mask=each, other=0)) * scale
            high = decode_int8(tl.load(codes + offsets(high_chunk), mask=each, other=0)) * scale
        else:
            byte = tl.load(codes + offsets(position), mask=each, other=0)
            low = decode_int4(byte, LOW_NIBBLE, LOW_EXPONENT, LOW_BIAS) * scale
            high = decode_int4(byte, HIGH_NIBBLE, HIGH_EXPONENT, HIGH_BIAS) * scale
    values = replica + row * (row_stride.to(tl.int64) * UNIT)
    length = numel.to(tl.int64) * UNIT
    if ACCUMULATE:
        low += load_values(values, low_chunk, mask, length)
        high += load_values(values, high_chunk, mask, length)
    store_values(values, low_chunk, low, mask, length)
    store_values(values, high_chunk, high, mask, length)


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_hadamard_kernel(
    messages,
    out,
    numel,  # in units of UNIT values
    count,
    blocks,  # of 32 values in a row, with padding
    stride: tl.int64,  # in units of 16 bytes
    multiplier,
    signs,  # to change after the transform, or None
    UNIT: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """Write the sum of all messages, transformed, times the multiplier.

    A program handles ROWS blocks, whatever the groups. Both chunks of a block are in one thread, so that the
    transform needs no exchange; the bytes of an int4 group are read twice, once for each nibble, the second
    time from the cache.
    """
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = block < blocks
    step = stride.to(tl.int64) * 16
    codes, scales = codes_and_scales(messages, 0, 1, blocks, BITS, GROUP)
    low_chunk = block * 2
    high_chunk = low_chunk + 1
    low = sum_messages(codes, scales, step, count, low_chunk, blocks, mask, BITS, GROUP, COUNT)
    high = sum_messages(codes, scales, step, count, high_chunk, blocks, mask, BITS, GROUP, COUNT)
    if HADAMARD:
        low = mix16(low)
        high = mix16(high)
        difference = low - high
        low = low + high
        high = difference
        if signs is not None:
            low = flip_signs(low, low_chunk, signs, 0)
            high = flip_signs(high, high_chunk, signs, 1)
    length = numel.to(tl.int64) * UNIT
    store_values(out, low_chunk, low * multiplier, mask, length)
    store_values(out, high_chunk, high * multiplier, mask, length)

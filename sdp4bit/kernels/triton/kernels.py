"""The Triton kernels behind the back end, one per kind of operator.

Programs are persistent. The grid is [programs, parts, destinations], and each of the n programs of a row
processes every n-th tile. Arithmetic that depends only on the row runs once per program. No program reads
another one's output, so their order does not matter.

Group sizes are constants of a compiled kernel, so that divisions are cheap. Row lengths and strides are not
specialized, so one kernel serves all shapes. Strides that are multiples of 16 are passed in units of 16, for
the compiler to know. The shorter last group only has fewer slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import (
    NAN_SCALE,
    chunks_of,
    codes_and_scales,
    ends_odd,
    float_from_bf16,
    load_values,
    mix16,
    offsets,
    read_values,
    scale_slots,
    store_values,
)
from sdp4bit.kernels.triton.codes import (
    HIGH_BIAS,
    HIGH_EXPONENT,
    HIGH_NIBBLE,
    LOW_BIAS,
    LOW_EXPONENT,
    LOW_NIBBLE,
    NEAREST,
    add_product,
    compute_scale,
    decode_int4,
    largest_bits,
    store_codes,
    sum_messages,
)
from sdp4bit.kernels.triton.coding import of
from sdp4bit.kernels.triton.random_bits import draw_dither, draw_dithers
from sdp4bit.kernels.triton.sections import (
    DITHER_KEY,
    OTHER_STRIDE,
    OTHER_VALUES,
    RECEIVED,
    ROUNDING_KEY,
    SENT,
    STRIDE,
    VALUES,
    counter_of,
    find_section,
    keys_of,
    lengths_of,
    random_of,
    share_of,
)

# Arguments that Triton must not specialize, because they vary between calls.
_RUNTIME = [
    *("numel", "blocks", "count", "k0", "k1", "first_block", "row_blocks"),
    *("destination_stride", "part_stride", "row_stride", "stride", "out_stride", "multiplier"),
    *("part", "parts_in", "parts_out", "skip", "own_numel", "nonfinite"),
    *("piece_stride", "first_key", "key_step"),
    *("sender_mask", "k0_in", "k1_in", "first_block_in", "row_blocks_in"),
    *("own_multiplier", "table", "sections", "call"),
]


@triton.jit(do_not_specialize=_RUNTIME)
def quantize_kernel(
    values,
    replica,
    out,
    numel,  # of a row; like the strides of values in units of UNIT values; or the table of its blocks
    destination_stride: tl.int64,
    part_stride: tl.int64,
    blocks,  # of 32 values in a row, with padding
    out_stride: tl.int64,  # in units of 16 bytes
    k0,
    k1,
    first_block,
    row_blocks,
    sender_mask,  # of dither, or None
    skip,  # a destination that is left out, or None
    nonfinite,  # uint8, set to 1 if a group is not finite, or None
    table,  # see `find_section`; None if the arguments above describe all values
    sections,
    call: tl.int64,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    CLIP: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_REPLICA: tl.constexpr,
    HADAMARD: tl.constexpr,
    ROUNDING: tl.constexpr,
    PAIRED: tl.constexpr,
    ODD_ROW: tl.constexpr,
):
    """Quantize rows of values, minus the replica or transformed, into messages.

    A tile is GROUPS groups of a row. A group of more than SLOTS blocks is read twice, for its scale and for
    its codes, except for the first SLOTS, which stay in registers.
    """
    section = find_section(table, sections)
    if section is not None:
        values += tl.load(section + VALUES) * UNIT
        replica += tl.load(section + OTHER_VALUES) * UNIT
        out += tl.load(section + SENT) * 16
        numel, blocks = lengths_of(section, table, numel)
        destination_stride, part_stride = tl.load(section + STRIDE), tl.load(section + OTHER_STRIDE)
        if ROUNDING != NEAREST:
            first_block, row_blocks, k0, k1 = random_of(section, call, ROUNDING_KEY)
    part, parts = tl.program_id(1), tl.num_programs(1)
    destination = tl.program_id(2)
    if skip is not None:
        destination += destination >= skip
    start = destination * destination_stride.to(tl.int64) + part * part_stride.to(tl.int64)
    source = values + start * UNIT
    message = out + destination * (out_stride.to(tl.int64) * 16)
    codes, scales = codes_and_scales(message, part, parts, blocks, FORMAT, GROUP)
    random = first_block + (destination * parts + part) * row_blocks
    places = scale_slots(part, parts, blocks, FORMAT, GROUP)
    slot = tl.expand_dims(tl.arange(0, SLOTS // 2) * 2 if PAIRED else tl.arange(0, SLOTS), 0)

    program, programs = share_of(section)
    for tile in range(program, tl.cdiv(places, GROUPS), programs):
        group = tl.expand_dims(tile * GROUPS + tl.arange(0, GROUPS), 1)
        is_odd = ends_odd(tile, blocks, GROUP, GROUPS, ODD_ROW)
        held = read_values(
            source, replica, numel, group, slot, blocks, is_odd,
            UNIT, FORMAT, GROUP, HAS_REPLICA, HADAMARD, PAIRED,
        )  # fmt: skip
        largest = largest_bits(held)
        if SLOTS < GROUP:
            for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
                again = read_values(
                    source, replica, numel, group, slot + i, blocks, is_odd,
                    UNIT, FORMAT, GROUP, HAS_REPLICA, HADAMARD, PAIRED,
                )  # fmt: skip
                largest = tl.maximum(largest, largest_bits(again))
        bits, reciprocal = compute_scale(largest, FORMAT, CLIP)
        if of(FORMAT, "has_scales"):
            tl.store(scales + group, bits.to(tl.int16), mask=group < places)
        if nonfinite is not None:
            is_bad = largest >= of(FORMAT, "infinite")
            if of(FORMAT, "has_scales"):
                is_bad = is_bad | (bits == NAN_SCALE)
            tl.store(nonfinite + tl.zeros_like(group), tl.full(group.shape, 1, tl.uint8), mask=is_bad)
        store_codes(
            codes, held, reciprocal, group, slot, blocks, is_odd, random, k0, k1, sender_mask,
            FORMAT, GROUP, ROUNDING, CLIP,
        )  # fmt: skip
        if SLOTS < GROUP:
            for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
                again = read_values(
                    source, replica, numel, group, slot + i, blocks, is_odd,
                    UNIT, FORMAT, GROUP, HAS_REPLICA, HADAMARD, PAIRED,
                )  # fmt: skip
                store_codes(
                    codes, again, reciprocal, group, slot + i, blocks, is_odd, random, k0, k1, sender_mask,
                    FORMAT, GROUP, ROUNDING, CLIP,
                )  # fmt: skip


@triton.jit
def _read_sums(
    codes, scales, stride, count, group, slot, blocks, random, k0, k1,
    FORMAT_IN: tl.constexpr, GROUP_IN: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    COUNT: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Return a tile of the sum of a part over all messages, in the slots of the sent message.

    `random` is the row's first block for its dither; None without dither.
    """
    low_chunk, high_chunk, mask = chunks_of(group, slot, blocks, FORMAT, GROUP)
    low_dither = None
    high_dither = None
    next_dither = None
    if random is not None:
        # The low chunks of a pair of slots share their hashes, and so do the two chunks of a block.
        if PAIRED:
            low_dither, next_dither = draw_dithers(random + (low_chunk >> 1), k0, k1)
            high_dither = draw_dither(random, high_chunk, k0, k1)
        elif of(FORMAT, "in_halves"):
            low_dither = draw_dither(random, low_chunk, k0, k1)
            high_dither = draw_dither(random, high_chunk, k0, k1)
        else:
            low_dither, high_dither = draw_dithers(random + (low_chunk >> 1), k0, k1)
    SIGNED_ZERO: tl.constexpr = not of(FORMAT, "has_scales")  # codes have no sign for zero
    low = sum_messages(
        codes, scales, stride, count, low_chunk, blocks, mask, low_dither,
        FORMAT_IN, GROUP_IN, COUNT, SIGNED_ZERO,
    )  # fmt: skip
    if not PAIRED:
        high = sum_messages(
            codes, scales, stride, count, high_chunk, blocks, mask, high_dither,
            FORMAT_IN, GROUP_IN, COUNT, SIGNED_ZERO,
        )  # fmt: skip
        return low, high
    else:
        _, _, next_mask = chunks_of(group, slot + 1, blocks, FORMAT, GROUP)
        next_low = sum_messages(
            codes, scales, stride, count, low_chunk + 1, blocks, next_mask, next_dither,
            FORMAT_IN, GROUP_IN, COUNT, SIGNED_ZERO,
        )  # fmt: skip
        high = sum_messages(
            codes, scales, stride, count, high_chunk, blocks, mask, high_dither,
            FORMAT_IN, GROUP_IN, COUNT, SIGNED_ZERO,
        )  # fmt: skip
        next_high_dither = None
        if random is not None:
            next_high_dither = draw_dither(random, high_chunk + 1, k0, k1)
        next_high = sum_messages(
            codes, scales, stride, count, high_chunk + 1, blocks, next_mask, next_high_dither,
            FORMAT_IN, GROUP_IN, COUNT, SIGNED_ZERO,
        )  # fmt: skip
        return low, high, next_low, next_high


@triton.jit
def _write_sums(
    section, codes, scales, step, count, blocks, written, own, own_multiplier, out, numel,
    multiplier, first_block, k0, k1, skip,
    UNIT: tl.constexpr, COUNT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HADAMARD: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Write a part's sum over the messages, transformed, times the multiplier, plus the own values.

    `own_multiplier` is that of the own values, or None for 1.

    A tile is ROWS blocks, independent of groups. Both chunks of a block are in one thread, so that the
    transform needs no exchange. The bytes of an int4 group are read once for each nibble, the second time
    from the cache. Only the first `written` blocks are written.
    """
    program, programs = share_of(section)
    for tile in range(program, tl.cdiv(written, ROWS), programs):
        block = tile * ROWS + tl.arange(0, ROWS)
        mask = block < written
        low_chunk = block * 2
        high_chunk = low_chunk + 1
        low_dither = None
        high_dither = None
        if first_block is not None:
            low_dither, high_dither = draw_dithers(first_block + block, k0, k1)
        low = sum_messages(
            codes, scales, step, count, low_chunk, blocks, mask, low_dither,
            FORMAT, GROUP, COUNT, True, skip,
        )  # fmt: skip
        high = sum_messages(
            codes, scales, step, count, high_chunk, blocks, mask, high_dither,
            FORMAT, GROUP, COUNT, True, skip,
        )  # fmt: skip
        if HADAMARD:
            low = mix16(low)
            high = mix16(high)
            difference = low - high
            low = low + high
            high = difference
        low *= multiplier
        high *= multiplier
        if HAS_OWN:
            own_low = load_values(own, low_chunk, mask, numel, UNIT)
            own_high = load_values(own, high_chunk, mask, numel, UNIT)
            if own_multiplier is not None:
                own_low *= own_multiplier
                own_high *= own_multiplier
            low += own_low
            high += own_high
        store_values(out, low_chunk, low, mask, numel, UNIT)
        store_values(out, high_chunk, high, mask, numel, UNIT)


@triton.jit
def _quantize_sums(
    section, codes_in, scales_in, step, count, blocks, message, part, parts, random, k0, k1,
    sender_mask, random_in, k0_in, k1_in,
    COUNT: tl.constexpr, FORMAT_IN: tl.constexpr, GROUP_IN: tl.constexpr, FORMAT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROUNDING: tl.constexpr,
    PAIRED: tl.constexpr, ODD_ROW: tl.constexpr,
):  # fmt: skip
    """Quantize the sum of a part over all messages; the loop of reduce_quantize_kernel.

    It becomes part `part` of the `parts` of a message.
    """
    codes, scales = codes_and_scales(message, part, parts, blocks, FORMAT, GROUP)
    places = scale_slots(part, parts, blocks, FORMAT, GROUP)
    slot = tl.expand_dims(tl.arange(0, SLOTS // 2) * 2 if PAIRED else tl.arange(0, SLOTS), 0)

    program, programs = share_of(section)
    for tile in range(program, tl.cdiv(places, GROUPS), programs):
        group = tl.expand_dims(tile * GROUPS + tl.arange(0, GROUPS), 1)
        is_odd = ends_odd(tile, blocks, GROUP, GROUPS, ODD_ROW)
        held = _read_sums(
            codes_in, scales_in, step, count, group, slot, blocks, random_in, k0_in, k1_in,
            FORMAT_IN, GROUP_IN, FORMAT, GROUP, COUNT, PAIRED,
        )  # fmt: skip
        largest = largest_bits(held)
        if SLOTS < GROUP:
            for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
                again = _read_sums(
                    codes_in, scales_in, step, count, group, slot + i, blocks, random_in, k0_in, k1_in,
                    FORMAT_IN, GROUP_IN, FORMAT, GROUP, COUNT, PAIRED,
                )  # fmt: skip
                largest = tl.maximum(largest, largest_bits(again))
        bits, reciprocal = compute_scale(largest, FORMAT)
        if of(FORMAT, "has_scales"):
            tl.store(scales + group, bits.to(tl.int16), mask=group < places)
        store_codes(
            codes, held, reciprocal, group, slot, blocks, is_odd, random, k0, k1, sender_mask,
            FORMAT, GROUP, ROUNDING,
        )  # fmt: skip
        if SLOTS < GROUP:
            for i in range(SLOTS, tl.minimum(blocks - tile * GROUP, GROUP), SLOTS):
                again = _read_sums(
                    codes_in, scales_in, step, count, group, slot + i, blocks, random_in, k0_in, k1_in,
                    FORMAT_IN, GROUP_IN, FORMAT, GROUP, COUNT, PAIRED,
                )  # fmt: skip
                store_codes(
                    codes, again, reciprocal, group, slot + i, blocks, is_odd, random, k0, k1, sender_mask,
                    FORMAT, GROUP, ROUNDING,
                )  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_quantize_kernel(
    messages,
    own,
    out,
    count,
    blocks,  # of 32 values in a row, with padding
    stride: tl.int64,  # in units of 16 bytes, like out_stride
    out_stride: tl.int64,
    parts_in,
    parts_out,  # of a message
    skip,  # a message that is left out, or whose only part is written to `own`, or None
    k0,
    k1,
    first_block,
    row_blocks,
    sender_mask,  # of dither, or None
    k0_in,
    k1_in,
    first_block_in,  # of the dither of received messages, or None
    row_blocks_in,
    multiplier,
    own_numel,  # in units of OWN_UNIT values, or the table of the blocks of `own`
    table,  # as in quantize_kernel
    sections,
    call: tl.int64,
    COUNT: tl.constexpr,
    FORMAT_IN: tl.constexpr,
    GROUP_IN: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUNDING: tl.constexpr,
    PAIRED: tl.constexpr,
    ODD_ROW: tl.constexpr,
    HAS_OWN: tl.constexpr,
    OWN_UNIT: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """Quantize the sum of each part over all messages: part p into message p % m, as its part p // m.

    The grid is [programs, parts of a message, messages].

    A tile is GROUPS sent groups. Each chunk finds its own received codes and scale, so the two group sizes
    are independent. Long groups are read twice, as above.
    """
    section = find_section(table, sections)
    if section is not None:
        messages += tl.load(section + RECEIVED) * 16
        own += tl.load(section + VALUES) * OWN_UNIT
        out += tl.load(section + SENT) * 16
        own_numel, blocks = lengths_of(section, table, own_numel)
        if ROUNDING != NEAREST:
            first_block, row_blocks, k0, k1 = random_of(section, call, ROUNDING_KEY)
        if first_block_in is not None:
            first_block_in, row_blocks_in, k0_in, k1_in = random_of(section, call, DITHER_KEY)
    place, destination = tl.program_id(1), tl.program_id(2)
    if skip is not None and not HAS_OWN:
        destination += destination >= skip
    part = place * (parts_in // parts_out) + destination
    step = stride.to(tl.int64) * 16
    codes_in, scales_in = codes_and_scales(messages, part, parts_in, blocks, FORMAT_IN, GROUP_IN)
    random_in = None
    if first_block_in is not None:
        random_in = first_block_in + part * row_blocks_in
    # Threads of the own part process a block each, as many as those of the others.
    ROWS: tl.constexpr = GROUPS * SLOTS // 2 if PAIRED else GROUPS * SLOTS
    is_own = False
    if HAS_OWN:
        is_own = part == skip
    if is_own:
        _write_sums(
            section, codes_in, scales_in, step, count, blocks, blocks, own, None, own, own_numel,
            multiplier, random_in, k0_in, k1_in, None,
            OWN_UNIT, COUNT, FORMAT_IN, GROUP_IN, ROWS, HADAMARD, False,
        )  # fmt: skip
    else:
        _quantize_sums(
            section, codes_in, scales_in, step, count, blocks,
            out + destination * (out_stride.to(tl.int64) * 16),
            place, parts_out, first_block + (destination * parts_out + place) * row_blocks, k0, k1,
            sender_mask, random_in, k0_in, k1_in,
            COUNT, FORMAT_IN, GROUP_IN, FORMAT, GROUP, GROUPS, SLOTS, ROUNDING, PAIRED, ODD_ROW,
        )  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def dequantize_kernel(
    messages,
    replica,
    numel,  # of a row; like row_stride in units of UNIT values; or the table of its blocks
    blocks,  # of 32 values in a row, with padding
    stride: tl.int64,  # in units of 16 bytes
    row_stride: tl.int64,
    table,  # as in quantize_kernel
    sections,
    call: tl.int64,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Add its message to each row of the replica, or replace the row by it.

    A tile is ROWS consecutive slots, independent of groups.
    """
    section = find_section(table, sections)
    if section is not None:
        messages += tl.load(section + RECEIVED) * 16
        replica += tl.load(section + VALUES) * UNIT
        numel, blocks = lengths_of(section, table, numel)
        row_stride = tl.load(section + STRIDE)
    row = tl.program_id(1)
    message = messages + row * (stride.to(tl.int64) * 16)
    codes, scales = codes_and_scales(message, 0, 1, blocks, FORMAT, GROUP)
    values = replica + row * (row_stride.to(tl.int64) * UNIT)
    program, programs = share_of(section)
    for tile in range(program, tl.cdiv(blocks, ROWS), programs):
        position = tile * ROWS + tl.arange(0, ROWS)
        group = position // GROUP
        low_chunk, high_chunk, mask = chunks_of(group, position - group * GROUP, blocks, FORMAT, GROUP)
        if of(FORMAT, "in_halves"):
            byte = tl.load(codes + offsets(position), mask=tl.expand_dims(mask, -1), other=0)
            low = decode_int4(byte, LOW_NIBBLE, LOW_EXPONENT, LOW_BIAS)
            high = decode_int4(byte, HIGH_NIBBLE, HIGH_EXPONENT, HIGH_BIAS)
        else:
            low = of(FORMAT, "load")(codes, low_chunk, mask, None, FORMAT)
            high = of(FORMAT, "load")(codes, high_chunk, mask, None, FORMAT)
        if of(FORMAT, "has_scales"):
            scale = tl.expand_dims(float_from_bf16(tl.load(scales + group, mask=mask, other=0)), -1)
            if ACCUMULATE:
                low = add_product(low, scale, load_values(values, low_chunk, mask, numel, UNIT))
                high = add_product(high, scale, load_values(values, high_chunk, mask, numel, UNIT))
            else:
                low *= scale
                high *= scale
        elif ACCUMULATE:
            low += load_values(values, low_chunk, mask, numel, UNIT)
            high += load_values(values, high_chunk, mask, numel, UNIT)
        store_values(values, low_chunk, low, mask, numel, UNIT)
        store_values(values, high_chunk, high, mask, numel, UNIT)


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_hadamard_kernel(
    messages,
    own,
    out,
    numel,  # in units of UNIT values, or the table of the blocks of the output and the own values
    count,
    blocks,  # of 32 values in a row, with padding
    stride: tl.int64,  # in units of 16 bytes
    part,
    parts_in,
    multiplier,
    k0_in,
    k1_in,
    first_block_in,  # of dither, or None
    skip,  # a message that is left out and not counted, or None
    own_multiplier,  # or None for 1
    table,  # as in quantize_kernel
    sections,
    call: tl.int64,
    UNIT: tl.constexpr,
    COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HADAMARD: tl.constexpr,
    HAS_OWN: tl.constexpr,
):
    """Write a part's sum over the messages to the output; see _write_sums."""
    section = find_section(table, sections)
    if section is not None:
        messages += tl.load(section + RECEIVED) * 16
        own += tl.load(section + OTHER_VALUES) * UNIT
        out += tl.load(section + VALUES) * UNIT
        numel, blocks = lengths_of(section, table, numel)
        if first_block_in is not None:
            first_block_in, _, k0_in, k1_in = random_of(section, call, DITHER_KEY)
    codes, scales = codes_and_scales(messages, part, parts_in, blocks, FORMAT, GROUP)
    _write_sums(
        section, codes, scales, stride.to(tl.int64) * 16, count, blocks, blocks, own,
        own_multiplier, out, numel, multiplier, first_block_in, k0_in, k1_in, skip,
        UNIT, COUNT, FORMAT, GROUP, ROWS, HADAMARD, HAS_OWN,
    )  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME)
def reduce_pieces_kernel(
    messages,
    out,
    numel,  # of a message and of the last piece; like piece_stride in units of UNIT values
    piece_stride: tl.int64,
    count,  # of messages of a piece
    blocks,  # of 32 values in a message, with padding
    stride: tl.int64,  # in units of 16 bytes
    multiplier,
    first_key,  # of the dither of piece 0, before mixing, or None
    key_step,
    table,  # as in quantize_kernel
    sections,
    call: tl.int64,
    UNIT: tl.constexpr,
    COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """Write the sum of each piece over its messages to its place; see _write_sums.

    The grid is [programs, pieces]. A piece ends where the next one begins.
    """
    section = find_section(table, sections)
    if section is not None:
        messages += tl.load(section + RECEIVED) * 16
        out += tl.load(section + VALUES) * UNIT
        numel, blocks = lengths_of(section, table, numel)
        piece_stride = tl.load(section + STRIDE)
        if first_key is not None:
            first_key = counter_of(section, call, DITHER_KEY)
    piece, pieces = tl.program_id(1), tl.num_programs(1)
    step = stride.to(tl.int64) * 16
    codes, scales = codes_and_scales(messages + piece * step, 0, 1, blocks, FORMAT, GROUP)
    units = piece_stride.to(tl.int64)
    end = tl.where(piece == pieces - 1, numel.to(tl.int64), units)
    written = tl.where(piece == pieces - 1, blocks, (units * UNIT // 32).to(tl.int32))
    first_block = None
    k0 = 0
    k1 = 0
    if first_key is not None:
        # The keys of `KeySeries`, once per program.
        first_block = 0
        k0, k1 = keys_of(first_key.to(tl.int64) + piece * key_step.to(tl.int64))
    place = out + piece * (units * UNIT)
    _write_sums(
        section, codes, scales, step * pieces, count, blocks, written, out, None, place, end,
        multiplier, first_block, k0, k1, None,
        UNIT, COUNT, FORMAT, GROUP, ROWS, HADAMARD, False,
    )  # fmt: skip

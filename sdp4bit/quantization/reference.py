"""Every operator in plain PyTorch, which defines it. Each kernel must produce the same bytes.

The numbers are chosen so that fp32 arithmetic gives one answer everywhere:

* The largest magnitude of a group is the maximum of the integer bits of |x|, which order NaN > Inf > finite.
* The scale is bf16, rounded up with integers, so |x / scale| never exceeds the largest code (no clamp) and
  code * scale is exact in fp32 and finite (no difference between fused and separate multiply-add). Clipping
  reduces the scale, and values beyond it saturate at the largest code.
* code = (trunc(x * (65536 / scale)) + r) >> 16, with r = 0x8000 (nearest) or 16 random bits (stochastic):
  one correctly rounded division per group, one multiplication per value, integers afterwards.
* With subtractive dither (arXiv 1904.01197) the code is the stochastic one. The receiver knows r and decodes
  (code + 1/2 - r / 65536) * scale. The error is uniform over one step, independent of x and unbiased, with
  half the variance. Only the upper 8 bits of r are subtracted, plus half a unit for the others. All 16 would
  make the product with the scale inexact, to reduce the variance by 2**-16.
* With dither, an x whose fixed-point number is 0 gets an otherwise unused code that decodes to 0, so that
  values without a gradient on any sender stay exactly unchanged.
* A group with NaN or Inf gets a NaN scale and dequantizes to NaN, so that a loss scaler or a norm check sees
  it. So does a group whose scale would be 2**120 or more, so that no product overflows. A group below 2**-100
  becomes zero in any flush-to-zero mode.
* Sums start from +0.0 and add the contributions in rank order, in fp32.

Messages: :mod:`sdp4bit.quantization.layout` and :mod:`sdp4bit.quantization.formats`. Quantizer: paper section
2.2, with the 2**(b-1)-1 symmetric levels of the reference implementation. The integer scale, the packing and
11 levels are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sdp4bit.quantization.checksum import add_checksum  # noqa: F401 - an operator
from sdp4bit.quantization.formats import BF16, BLOCK, Format
from sdp4bit.quantization.hadamard import hadamard32
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey, dither_mask, random_bits16

_ABS_MASK = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_TINY_BITS = 0x0D800000  # 2**-100
_NAN_SCALE = 0x7FC0
_SCALE_LIMIT = 0x7B800000  # 2**120
_SCALE_ROUND_UP = 0x10003
_HIGH_HALF = -65536  # 0xFFFF0000 as int32
_FIXED_POINT = 65536.0
_HALF = 0x8000


def compute_scales(groups: Tensor, format: Format, clip: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale of each group, its fixed-point reciprocal, and whether it is not finite.

    Args:
        groups: fp32 [..., group size].
        clip: fraction of a group's largest magnitude that the largest code represents.

    Returns:
        scales bf16 [...], 65536 / scale fp32 [...] (0 if all codes are zero), bool [...].
    """
    largest = (groups.view(torch.int32) & _ABS_MASK).amax(-1)
    not_finite = largest >= _INFINITY_BITS
    tiny = largest < _TINY_BITS
    step = largest.view(torch.float32) * torch.tensor(clip / format.largest, dtype=torch.float32)
    scale_bits = (step.view(torch.int32) + _SCALE_ROUND_UP) & _HIGH_HALF
    not_finite |= scale_bits >= _SCALE_LIMIT
    scale_bits = scale_bits.masked_fill(not_finite, _NAN_SCALE << 16).masked_fill(tiny, 0)
    reciprocal = _FIXED_POINT / scale_bits.view(torch.float32)
    reciprocal = reciprocal.masked_fill(not_finite | tiny, 0.0)
    return (scale_bits >> 16).to(torch.int16).view(torch.bfloat16), reciprocal, not_finite


def quantize_groups(
    groups: Tensor, format: Format, random: Tensor | None, *, clip: float = 1.0, dither: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the codes (int32, shape of groups) and the bf16 scales [...] of fp32 groups [..., size].

    Args:
        random: 16 random bits per value, int32, for stochastic rounding or dither; None rounds to nearest.
        clip: as in compute_scales.
        dither: mark zeros, for :func:`subtract_dither`.
    """
    scales, reciprocal, not_finite = compute_scales(groups, format, clip)
    finite = groups.masked_fill(not_finite.unsqueeze(-1), 0.0)
    fixed = (finite * reciprocal.unsqueeze(-1)).to(torch.int32)
    if clip < 1:
        limit = format.largest << 16
        fixed = fixed.clamp(-limit, limit)
    codes = (fixed + (_HALF if random is None else random)) >> 16
    return format.mark_zeros(codes, fixed == 0) if dither else codes, scales


def subtract_dither(codes: Tensor, format: Format, random: Tensor) -> Tensor:
    """Decode dithered codes exactly, in units of their scale: fp32 of the shape of the codes.

    Args:
        codes: int8.
        random: the 16 random bits of their rounding, int32.
    """
    # (upper 8 bits + 1/2) / 256 is the midpoint of the numbers in [0, 1) that begin with these bits.
    dither = ((random >> 8) * 2 + 1).float() / 512
    return (codes.float() + (0.5 - dither)).masked_fill(format.find_zeros(codes), 0.0)


def _group_ranges(layout: MessageLayout) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first value, values, first group, group size) of the full groups, then of the tail."""
    full = layout.padded_numel - layout.tail
    if full:
        yield 0, full, 0, layout.group_size
    if layout.tail:
        yield full, layout.tail, full // layout.group_size, layout.tail


def _pad(rows: Tensor, layout: MessageLayout) -> Tensor:
    """Pad rows with zeros to padded_numel fp32 values."""
    if rows.shape[-1] == layout.padded_numel:
        return rows.float().contiguous()
    padded = torch.zeros(*rows.shape[:-1], layout.padded_numel, dtype=torch.float32, device=rows.device)
    padded[..., : rows.shape[-1]] = rows
    return padded


def _places_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the values of blocks in a longer row, and which exist, [blocks, 32]."""
    lane = torch.arange(BLOCK, device=blocks.device)
    return (blocks >> 6).unsqueeze(1) + lane, lane < (blocks & 63).unsqueeze(1)


def _gather(rows: Tensor, blocks: Tensor | None) -> Tensor:
    """Return the blocks of rows, [..., n] of [..., longer]; None for the rows as they are."""
    if blocks is None:
        return rows
    places, exist = _places_of(blocks)
    return rows[..., places * exist].masked_fill(~exist, 0).flatten(-2)


def _codes_of(messages: Tensor, layout: MessageLayout) -> Tensor:
    """View the codes of messages [m, nbytes] as uint8 [m, parts, code_bytes]."""
    codes: Tensor = messages[:, : layout.scales_offset].unflatten(1, (layout.parts, layout.code_bytes))
    return codes


def _scales_of(messages: Tensor, layout: MessageLayout) -> Tensor:
    """View the scales of messages [m, nbytes] as bf16 [m, parts, groups]."""
    flat = messages[:, layout.scales_offset : layout.payload_bytes].view(torch.bfloat16)
    scales: Tensor = flat.unflatten(1, (layout.parts, layout.groups))
    return scales


def _rounded_to_bf16(values: Tensor) -> Tensor:
    """Return the bits of fp32 values in bf16, int16, rounded to nearest even; NaN becomes 0x7FC0.

    By integers, because PyTorch's own conversion has another NaN on some processors.
    """
    bits = values.view(torch.int32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return (rounded.masked_fill(values.isnan(), _NAN_SCALE << 16) >> 16).to(torch.int16)


def encode(
    values: Tensor, out: Tensor, layout: MessageLayout, rounding: RoundingKey | None, clip: float = 1.0
) -> None:
    """Write values, fp32 [m, parts, padded_numel], into messages out [m, nbytes]; rows are m * parts."""
    out[:, layout.payload_bytes :] = 0
    if not layout.padded_numel:
        return
    codes = _codes_of(out, layout)
    if not layout.format.has_scales:
        codes.copy_((_rounded_to_bf16(values) if layout.format is BF16 else values).view(torch.uint8))
        return
    scales = _scales_of(out, layout)
    random = None
    if rounding is not None:
        rows = values.shape[0] * layout.parts
        random = _random_rows(rounding, rows=rows, layout=layout, device=values.device).view(values.shape)
    for first, count, group, size in _group_ranges(layout):
        grouped = values[..., first : first + count].unflatten(-1, (-1, size)).contiguous()
        bits = None if random is None else random[..., first : first + count].unflatten(-1, (-1, size))
        dither = rounding is not None and rounding.dither
        integer, group_scales = quantize_groups(grouped, layout.format, bits, clip=clip, dither=dither)
        start = first // BLOCK * layout.format.block_bytes
        packed = layout.format.pack(integer).flatten(-2)
        codes[..., start : start + packed.shape[-1]] = packed
        scales[..., group : group + count // size] = group_scales


def _encode_others(
    values: Tensor, out: Tensor, layout: MessageLayout, rounding: RoundingKey | None, skip: int | None
) -> None:
    """Write values into all messages but one, with the random bits of the rows of all."""
    count = len(out)
    for first, end in ((0, count),) if skip is None else ((0, skip), (skip + 1, count)):
        key = rounding and rounding.at_row(first * layout.parts)
        encode(values[first:end], out[first:end], layout, key)


def decode(
    messages: Tensor,
    layout: MessageLayout,
    random: Tensor | None = None,
    *,
    first: int = 0,
    count: int | None = None,
) -> Tensor:
    """Return the values of messages [m, nbytes] as fp32 [m, parts, padded_numel].

    Args:
        random: int32 [m, parts, padded_numel], the random bits of dithered codes.
        first, count: the parts to return, all by default.
    """
    parts = slice(first, layout.parts if count is None else first + count)
    shape = (messages.shape[0], parts.stop - first, layout.padded_numel)
    if not layout.padded_numel:
        return torch.zeros(shape, dtype=torch.float32, device=messages.device)
    codes = _codes_of(messages, layout)[:, parts]
    if not layout.format.has_scales:
        return codes.contiguous().view(torch.bfloat16 if layout.format is BF16 else torch.float32).float()
    scales = _scales_of(messages, layout)[:, parts]
    values = torch.empty(shape, dtype=torch.float32, device=messages.device)
    for first, count, group, size in _group_ranges(layout):
        start, end = (place // BLOCK * layout.format.block_bytes for place in (first, first + count))
        packed = codes[..., start:end].unflatten(-1, (count // size, -1))
        group_scales = scales[..., group : group + count // size].float().unsqueeze(-1)
        integer = layout.format.unpack(packed)
        units = integer.float()
        if random is not None:
            drawn = random[..., first : first + count].unflatten(-1, (-1, size))
            units = subtract_dither(integer, layout.format, drawn)
        values[..., first : first + count] = (units * group_scales).flatten(-2)
    return values


def _reduce(
    messages: Tensor,
    layout: MessageLayout,
    dither: RoundingKey | None,
    *,
    first: int,
    count: int,
    skip: int | None = None,
) -> Tensor:
    """Return the sum over messages [k, nbytes], in order, of some parts, as fp32 [count, padded_numel]."""
    total = torch.zeros(count, layout.padded_numel, dtype=torch.float32, device=messages.device)
    if dither is not None:
        # Those of sender 0, whose mask is 0. The bits of the others differ from them by a mask.
        drawn = _random_rows(dither._replace(sender=0), rows=count, layout=layout, device=messages.device)
    for sender, message in enumerate(messages):
        if sender == skip:
            continue
        random = None if dither is None else drawn ^ (dither_mask(sender) << 8)
        total = total + decode(message.unsqueeze(0), layout, random, first=first, count=count)[0]
    return total


def _random_rows(rounding: RoundingKey, *, rows: int, layout: MessageLayout, device: torch.device) -> Tensor:
    """Return the random bits of rows, int32 [rows, padded_numel], in 0 .. 65535."""
    numel, stride = layout.padded_numel, rounding.row_stride
    keys = (rounding.k0, rounding.k1)
    bits = random_bits16(rounding.first, numel, *keys, rows=rows, row_stride=stride, device=device)
    bits = bits.view(rows, numel)
    return bits ^ (rounding.mask << 8) if rounding.dither else bits


def subtract_quantize(
    main: Tensor,
    *,
    replica: Tensor | None,
    out: Tensor,
    layout: MessageLayout,
    clip: float = 1.0,
    blocks: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`."""
    difference = main.float() if replica is None else main.float() - replica.float()
    message = out.unsqueeze(0)
    encode(_pad(_gather(difference, blocks).view(1, 1, -1), layout), message, layout, None, clip)
    if nonfinite is not None:
        numbers = _scales_of(message, layout) if layout.format.has_scales else decode(message, layout)
        nonfinite |= numbers.isfinite().logical_not_().any()


def dequantize_add(
    messages: Tensor,
    *,
    replica: Tensor,
    layout: MessageLayout,
    accumulate: bool,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`."""
    received = decode(messages, layout)[:, 0, : layout.numel]
    if accumulate:
        received = _gather(replica.float(), blocks)[:, : layout.numel] + received
    _scatter(received, replica, blocks)


def _scatter(rows: Tensor, out: Tensor, blocks: Tensor | None) -> None:
    """Write rows [..., n] to their blocks of a longer row; None for the row as it is."""
    if blocks is None:
        out.copy_(rows)
        return
    places, exist = (each.flatten()[: rows.shape[-1]] for each in _places_of(blocks))
    out[..., places[exist]] = rows[..., exist].to(out.dtype)


def hadamard_quantize(
    values: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    rounding: RoundingKey | None,
    skip: int | None = None,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`."""
    padded = _pad(_gather(values, blocks), layout)
    if hadamard:
        padded = hadamard32(padded)
    _encode_others(padded, out, layout, rounding, skip)


def dequantize_reduce_quantize(
    messages: Tensor,
    *,
    received: MessageLayout,
    out: Tensor,
    sent: MessageLayout,
    rounding: RoundingKey | None,
    dither: RoundingKey | None,
    skip: int | None = None,
    own: Tensor | None = None,
    blocks: Tensor | None = None,
    hadamard: bool = False,
    multiplier: float = 1.0,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`."""
    total = _reduce(messages, received, dither, first=0, count=received.parts)
    # Part p of the sums is part p // m of message p % m.
    _encode_others(total.unflatten(0, (sent.parts, len(out))).transpose(0, 1), out, sent, rounding, skip)
    if own is not None:
        assert skip is not None
        result = hadamard32(total[skip]) if hadamard else total[skip]
        result = result[: received.numel] * torch.tensor(multiplier, dtype=torch.float32)
        _scatter(result, own, blocks)


def dequantize_reduce_hadamard(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    multiplier: float,
    dither: RoundingKey | None,
    part: int = 0,
    skip: int | None = None,
    own: Tensor | None = None,
    own_multiplier: float = 1.0,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`."""
    total = _reduce(messages, layout, dither, first=part, count=1, skip=skip)[0]
    if hadamard:
        total = hadamard32(total)
    result = total[: layout.numel] * torch.tensor(multiplier, dtype=torch.float32)
    if own is not None:
        held = _gather(own, blocks)[: layout.numel].float()
        result = held * torch.tensor(own_multiplier, dtype=torch.float32) + result
    _scatter(result, out, blocks)


def dequantize_reduce_pieces(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    pieces: int,
    stride: int,
    hadamard: bool,
    multiplier: float,
    dither: KeySeries | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_pieces`."""
    for piece in range(pieces):
        place = out[piece * stride :][: layout.numel if piece == pieces - 1 else stride]
        key = None if dither is None else dither.key(piece)
        total = _reduce(messages[piece::pieces], layout, key, first=0, count=1)[0]
        if hadamard:
            total = hadamard32(total)
        place.copy_(total[: len(place)] * torch.tensor(multiplier, dtype=torch.float32))

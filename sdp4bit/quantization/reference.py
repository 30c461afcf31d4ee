"""The definition of every operator in plain PyTorch. Each kernel must produce the same bytes.

The numbers are chosen so that fp32 arithmetic gives one answer everywhere:

* The largest magnitude of a group is taken over the integer bits of |x|, which order NaN > Inf > finite.
* The scale is bf16, rounded up with integers, so |x / scale| never exceeds the largest code (no clamp) and
  code * scale is exact in fp32 (no difference between fused and separate multiply-add).
* code = (trunc(x * (65536 / scale)) + r) >> 16, with r = 0x8000 (nearest) or 16 random bits (stochastic):
  one correctly rounded division per group, one multiplication per value, integers afterwards.
* A group that holds NaN or Inf gets a NaN scale and dequantizes to NaN, so that a loss scaler or a norm
  check still sees it. A group below 2**-100 becomes zero, whatever the flush-to-zero mode.
* Sums start from +0.0 and add the contributions in rank order, in fp32.

Layout of the messages: :mod:`sdp4bit.quantization.layout`. Quantizer: paper section 2.2, with the 2**(b-1)-1
symmetric levels of the reference implementation; the integer scale and the packing are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sdp4bit.quantization import lossless_reference
from sdp4bit.quantization.hadamard import Hadamard, flip_signs, hadamard32
from sdp4bit.quantization.layout import FULL_PRECISION, MessageLayout
from sdp4bit.quantization.random import RoundingKey, random_bits16

_ABS_MASK = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_TINY_BITS = 0x0D800000  # 2**-100
_NAN_SCALE = 0x7FC0
_SCALE_ROUND_UP = 0x10003
_HIGH_HALF = -65536  # 0xFFFF0000 as int32
_FIXED_POINT = 65536.0
_HALF = 0x8000


def compute_scales(groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale of each group, its fixed-point reciprocal, and which groups are not finite.

    Args:
        groups: fp32 [..., group size].
        bits: 4 or 8.

    Returns:
        scales bf16 [...], 65536 / scale fp32 [...] (0 where no code is needed), bool [...].
    """
    largest = (groups.view(torch.int32) & _ABS_MASK).amax(-1)
    not_finite = largest >= _INFINITY_BITS
    tiny = largest < _TINY_BITS
    step = largest.view(torch.float32) * torch.tensor(1.0 / (2 ** (bits - 1) - 1), dtype=torch.float32)
    scale_bits = (step.view(torch.int32) + _SCALE_ROUND_UP) & _HIGH_HALF
    scale_bits = scale_bits.masked_fill(not_finite, _NAN_SCALE << 16).masked_fill(tiny, 0)
    reciprocal = _FIXED_POINT / scale_bits.view(torch.float32)
    reciprocal = reciprocal.masked_fill(not_finite | tiny, 0.0)
    return (scale_bits >> 16).to(torch.int16).view(torch.bfloat16), reciprocal, not_finite


def quantize_groups(groups: Tensor, bits: int, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the codes (int32, shape of groups) and the bf16 scales [...] of fp32 groups [..., size].

    Args:
        random: 16 random bits per value, int32, for stochastic rounding; None rounds to nearest.
    """
    scales, reciprocal, not_finite = compute_scales(groups, bits)
    finite = groups.masked_fill(not_finite.unsqueeze(-1), 0.0)
    fixed = (finite * reciprocal.unsqueeze(-1)).to(torch.int32)
    return (fixed + (_HALF if random is None else random)) >> 16, scales


def _group_ranges(layout: MessageLayout) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first value, values, first group, group size) of the full groups, then of the tail."""
    full = layout.padded_numel - layout.tail
    if full:
        yield 0, full, 0, layout.group_size
    if layout.tail:
        yield full, layout.tail, full // layout.group_size, layout.tail


def _pad(rows: Tensor, layout: MessageLayout) -> Tensor:
    """Return fp32 rows of padded_numel values, zero beyond the given ones."""
    if rows.shape[-1] == layout.padded_numel:
        return rows.float().contiguous()
    padded = torch.zeros(*rows.shape[:-1], layout.padded_numel, dtype=torch.float32, device=rows.device)
    padded[..., : rows.shape[-1]] = rows
    return padded


def _codes_of(messages: Tensor, layout: MessageLayout) -> Tensor:
    """View the codes of messages [m, nbytes] as uint8 [m, parts, code_bytes]."""
    codes: Tensor = messages[:, : layout.scales_offset].unflatten(1, (layout.parts, layout.code_bytes))
    return codes


def _scales_of(messages: Tensor, layout: MessageLayout) -> Tensor:
    """View the scales of messages [m, nbytes] as bf16 [m, parts, groups]."""
    flat = messages[:, layout.scales_offset : layout.payload_bytes].view(torch.bfloat16)
    scales: Tensor = flat.unflatten(1, (layout.parts, layout.groups))
    return scales


def encode(values: Tensor, out: Tensor, layout: MessageLayout, random: Tensor | None) -> None:
    """Write values, fp32 [m, parts, padded_numel], into messages out [m, nbytes].

    Args:
        random: int32 [m * parts, padded_numel] for stochastic rounding, or None for nearest.
    """
    out[:, layout.payload_bytes :] = 0
    if not layout.padded_numel:
        return
    codes = _codes_of(out, layout)
    if layout.bits == FULL_PRECISION:
        codes.copy_(values.view(torch.uint8))
        return
    scales = _scales_of(out, layout)
    random = None if random is None else random.view(values.shape)
    for first, count, group, size in _group_ranges(layout):
        grouped = values[..., first : first + count].unflatten(-1, (-1, size)).contiguous()
        bits = None if random is None else random[..., first : first + count].unflatten(-1, (-1, size))
        integer, group_scales = quantize_groups(grouped, layout.bits, bits)
        if layout.bits == 8:
            packed = integer.to(torch.int8).view(torch.uint8)
        else:
            offset = integer + 8
            packed = (offset[..., : size // 2] | offset[..., size // 2 :] << 4).to(torch.uint8)
        start = first * layout.bits // 8
        codes[..., start : start + count * layout.bits // 8] = packed.flatten(-2)
        scales[..., group : group + count // size] = group_scales


def decode(messages: Tensor, layout: MessageLayout) -> Tensor:
    """Return the values of messages [m, nbytes] as fp32 [m, parts, padded_numel]."""
    shape = (messages.shape[0], layout.parts, layout.padded_numel)
    if not layout.padded_numel:
        return torch.zeros(shape, dtype=torch.float32, device=messages.device)
    codes = _codes_of(messages, layout)
    if layout.bits == FULL_PRECISION:
        return codes.contiguous().view(torch.float32)
    scales = _scales_of(messages, layout)
    values = torch.empty(shape, dtype=torch.float32, device=messages.device)
    for first, count, group, size in _group_ranges(layout):
        start = first * layout.bits // 8
        packed = codes[..., start : start + count * layout.bits // 8].unflatten(-1, (count // size, -1))
        if layout.bits == 8:
            integer = packed.contiguous().view(torch.int8)
        else:
            integer = torch.cat([packed & 15, packed >> 4], dim=-1).to(torch.int8) - 8
        group_scales = scales[..., group : group + count // size].float().unsqueeze(-1)
        values[..., first : first + count] = (integer.float() * group_scales).flatten(-2)
    return values


def _reduce(messages: Tensor, layout: MessageLayout) -> Tensor:
    """Return the sum over messages [k, nbytes], in order, as fp32 [parts, padded_numel]."""
    total = torch.zeros(layout.parts, layout.padded_numel, dtype=torch.float32, device=messages.device)
    for message in messages:
        total = total + decode(message.unsqueeze(0), layout)[0]
    return total


def _random_rows(
    rounding: RoundingKey | None, *, rows: int, layout: MessageLayout, device: torch.device
) -> Tensor | None:
    """Return the random bits of rows, int32 [rows, padded_numel], or None for rounding to nearest."""
    if rounding is None:
        return None
    bits = torch.empty(rows, layout.padded_numel, dtype=torch.int32, device=device)
    for row in range(rows):
        first = row * rounding.row_stride + rounding.first
        bits[row] = random_bits16(first, layout.padded_numel, rounding.k0, rounding.k1, device=device)
    return bits


def subtract_quantize(
    main: Tensor, *, replica: Tensor | None, out: Tensor, layout: MessageLayout, rounding: RoundingKey | None
) -> None:
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`."""
    difference = main.float() if replica is None else main.float() - replica.float()
    random = _random_rows(rounding, rows=1, layout=layout, device=main.device)
    encode(_pad(difference.view(1, 1, -1), layout), out.unsqueeze(0), layout, random)


def dequantize_add(messages: Tensor, *, replica: Tensor, layout: MessageLayout, accumulate: bool) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`."""
    received = decode(messages, layout)[:, 0, : layout.numel]
    replica.copy_(replica.float() + received if accumulate else received)


def hadamard_quantize(
    values: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: Hadamard | None,
    rounding: RoundingKey | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`."""
    padded = _pad(values, layout)
    if hadamard:
        padded = hadamard32(flip_signs(padded, hadamard.signs))
    rows = values.shape[0] * layout.parts
    encode(padded, out, layout, _random_rows(rounding, rows=rows, layout=layout, device=values.device))


def dequantize_reduce_quantize(
    messages: Tensor,
    *,
    received: MessageLayout,
    out: Tensor,
    sent: MessageLayout,
    rounding: RoundingKey | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`."""
    total = _reduce(messages, received)
    random = _random_rows(rounding, rows=received.parts, layout=sent, device=messages.device)
    encode(total.unsqueeze(1), out, sent, random)


def dequantize_reduce_hadamard(
    messages: Tensor, *, out: Tensor, layout: MessageLayout, hadamard: Hadamard | None, multiplier: float
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`."""
    total = _reduce(messages, layout)[0]
    if hadamard:
        total = flip_signs(hadamard32(total), hadamard.signs)
    out.copy_(total[: layout.numel] * torch.tensor(multiplier, dtype=torch.float32))


encode_change, decode_change = lossless_reference.encode_change, lossless_reference.decode_change

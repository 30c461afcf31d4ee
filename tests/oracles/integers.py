"""An independent definition of the messages in Python integers, and values to try it on.

It loops over groups and values, follows docs/spec.md, and shares no code with the library but the random
bits, which tests/quantization/test_random.py compares with integers by themselves.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization import reference
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys

repeatable = settings(deadline=None, derandomize=True)
NAN, INF = float("nan"), float("inf")
KEY = RoundingKey(*derive_keys(11, 22))
QMAX = {2: 1, 3: 3, 3.5: 5, 4: 7, 8: 127}


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def rounded(value: float) -> float:
    """To fp32. A product of two fp32 numbers is exact in fp64, so the product is rounded once."""
    return float(np.float32(value))


def bit_string(numbers: list[int], width: int) -> bytes:
    """Return numbers of so many bits one after the other, the first in the lowest bits."""
    joined = sum(number << width * place for place, number in enumerate(numbers))
    return joined.to_bytes(len(numbers) * width // 8, "little")


def oracle_codes(codes: list[int], bits: float) -> bytes:
    """Return the bytes of a group's codes."""
    if bits == 8:
        return struct.pack(f"{len(codes)}b", *codes)
    unsigned = [code + (5 if bits == 3.5 else 1 << bits - 1) for code in codes]
    if bits == 4:
        half = len(codes) // 2
        return bytes(unsigned[i] + 16 * unsigned[i + half] for i in range(half))
    if bits == 2:
        return bit_string(unsigned, 2)
    if bits == 3.5:
        first = [place for place in range(len(codes)) if place % 32 < 16]
        return bit_string([unsigned[place] + 11 * unsigned[place + 16] for place in first], 7)
    assert bits == 3
    blocks = [unsigned[start : start + 32] for start in range(0, len(unsigned), 32)]
    return b"".join(bit_string([n % 4 for n in b], 2) + bit_string([n // 4 for n in b], 1) for b in blocks)


def oracle_integers(packed: bytes, bits: float) -> list[int]:
    """Return a group's codes from their bytes."""
    if bits == 8:
        return list(struct.unpack(f"{len(packed)}b", packed))
    if bits == 4:
        return [byte % 16 - 8 for byte in packed] + [byte // 16 - 8 for byte in packed]
    integers: list[int] = []
    size = int(4 * bits)
    for start in range(0, len(packed), size):
        block = packed[start : start + size]
        if bits == 3.5:
            pairs = [(int.from_bytes(block, "little") >> 7 * i) % 128 for i in range(16)]
            integers += [pair % 11 - 5 for pair in pairs] + [pair // 11 - 5 for pair in pairs]
            continue
        assert bits in (2, 3)
        lower, third = int.from_bytes(block[:8], "little"), int.from_bytes(block[8:], "little")
        integers += [(lower >> 2 * i) % 4 + 4 * ((third >> i) % 2) - (1 << bits - 1) for i in range(32)]
    return integers


def oracle_group(
    group: list[float], bits: float, random: list[int], clip: float = 1.0
) -> tuple[list[int], int]:
    """Return the codes and the bf16 bits of the scale of one group."""
    largest = max(float_bits(value) & 0x7FFFFFFF for value in group)
    if largest >= 0x7F800000:
        return [0] * len(group), 0x7FC0
    if bits_float(largest) < 2.0**-100:
        return [0] * len(group), 0
    step = rounded(bits_float(largest) * rounded(clip / QMAX[bits]))
    scale = -(-(float_bits(step) + 4) // 65536)  # round up 4 units in the last place above
    if scale >= 0x7B80:  # 2**120
        return [0] * len(group), 0x7FC0
    inverse = rounded(65536.0 / bits_float(scale << 16))
    codes = [(math.trunc(rounded(x * inverse)) + r) >> 16 for x, r in zip(group, random, strict=True)]
    # A clipped code is the largest: the random bits do not reach the next one.
    return [max(-QMAX[bits], min(QMAX[bits], code)) for code in codes], scale


def oracle_message(
    rows: list[list[float]],
    bits: float,
    group_size: int,
    random: list[list[int]] | None,
    clip: float = 1.0,
) -> bytes:
    """Return the bytes of a message of these rows; random bits per row, or None for nearest."""
    codes, scales = b"", b""
    for index, row in enumerate(rows):
        padded = row + [0.0] * (-len(row) % 32)
        draws = [0x8000] * len(padded) if random is None else random[index]
        if bits == 32:
            codes += struct.pack(f"<{len(padded)}f", *padded)
            continue
        for start in range(0, len(padded), group_size):
            group = padded[start : start + group_size]
            integers, scale = oracle_group(group, bits, draws[start : start + group_size], clip)
            scales += struct.pack("<H", scale)
            codes += oracle_codes(integers, bits)
    message = codes + scales
    return message + bytes(-len(message) % 16)


def oracle_values(message: bytes, numel: int, bits: float, group_size: int, parts: int) -> list[list[float]]:
    """Return the rows that a message carries, padding included."""
    padded = -(-numel // 32) * 32
    if bits == 32:
        flat = struct.unpack(f"<{parts * padded}f", message[: 4 * parts * padded])
        return [list(flat[part * padded : (part + 1) * padded]) for part in range(parts)]
    code, scale, rows = 0, int(parts * padded * bits) // 8, []
    for _ in range(parts):
        row: list[float] = []
        while len(row) < padded:
            size = min(group_size, padded - len(row))
            packed = message[code : code + int(size * bits) // 8]
            factor = bits_float(struct.unpack("<H", message[scale : scale + 2])[0] << 16)
            row += [rounded(q * factor) for q in oracle_integers(packed, bits)]
            code, scale = code + len(packed), scale + 2
        rows.append(row)
    return rows


# Calls of the reference


def values_of(*shape: int, seed: int = 0, heavy: bool = True) -> Tensor:
    """Values over many magnitudes, with zeros, ties, subnormal numbers and repeated values among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if heavy:
        exponents = torch.randn(shape, generator=generator) * 3
        values = values * torch.exp2(exponents.round())
        kind = torch.randint(0, 20, shape, generator=generator)
        values = torch.where(kind == 0, 0.0, values)
        values = torch.where(kind == 1, 3.5, values)
        values = torch.where(kind == 2, torch.tensor(1e-42), values)
    return values


def encoded(rows: Tensor, bits: float, group_size: int, *, stochastic: bool = False) -> Tensor:
    """The message of rows [parts, n], without a transform."""
    parts, numel = rows.shape
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    out = torch.full((1, layout.nbytes), 0xAA, dtype=torch.uint8)
    rounding = KEY._replace(row_stride=layout.padded_numel) if stochastic else None
    reference.hadamard_quantize(rows[None], out=out, layout=layout, hadamard=False, rounding=rounding)
    return out[0]


def decoded(message: Tensor, numel: int, bits: float, group_size: int, parts: int = 1) -> Tensor:
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    return reference.decode(message.unsqueeze(0), layout)[0, :, :numel]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal bits, except that one NaN is as good as another."""
    bits_equal = a.view(torch.int32) == b.view(torch.int32)
    return bool((bits_equal | (a.isnan() & b.isnan())).all())


# Scale rule

finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)

"""Every format of the table packs its codes without loss, and a format whose codes do not fit is refused.

A format that is added to `FORMATS` is tested here without a change. Layer: pure functions, no process.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import (
    BLOCK,
    FORMATS,
    Bits,
    Format,
    InHalves,
    InOrder,
    InPairs,
    Signed,
    choices,
    with_scales,
)
from sdp4bit.quantization.layout import MessageLayout


def test_formats_by_their_kind() -> None:
    """Other tests run over these lists."""
    assert with_scales() == [2, 3, 3.5, 4, 8]
    assert choices() == [2, 3, 3.5, 4, 8, 16]


@pytest.mark.parametrize("bits", with_scales())
def test_all_codes_come_back_and_zeros_are_told_apart(bits: Bits) -> None:
    each = FORMATS[bits]
    codes = torch.arange(-each.largest, each.largest + 1, dtype=torch.int32)
    # Every code in every place of a block.
    rows = torch.stack([codes.roll(shift).repeat(BLOCK)[:BLOCK] for shift in range(len(codes))])
    packed = each.pack(rows)
    assert packed.shape == (len(codes), each.block_bytes) and packed.dtype == torch.uint8
    assert torch.equal(each.unpack(packed).int(), rows)
    assert not each.find_zeros(each.unpack(packed)).any()
    marked = each.unpack(each.pack(each.mark_zeros(rows, torch.ones_like(rows, dtype=torch.bool))))
    assert each.find_zeros(marked).all()


@pytest.mark.parametrize("bits", with_scales())
def test_an_error_is_at_most_half_a_code(bits: Bits) -> None:
    values = torch.linspace(-1, 1, 2 * BLOCK)
    layout = MessageLayout(numel=2 * BLOCK, bits=bits, group_size=BLOCK)
    message, result = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.zeros(1, 2 * BLOCK)
    with ops.use_backend("reference"):
        ops.subtract_quantize(values, replica=None, out=message, layout=layout)
        ops.dequantize_add(message.view(1, -1), replica=result, layout=layout, accumulate=False)
    # Half a code of the largest value, and the rounding of its scale to bf16 on as many codes.
    bound = 0.5 / FORMATS[bits].largest + 2**-8
    assert (result[0] - values).abs().max().item() <= bound


REFUSED: dict[str, tuple[type[Format], dict[str, object], str]] = {
    "33 codes and zero in 5 bits": (
        InOrder,
        {"largest": 16, "block_bytes": 20, "widths": (2, 2, 1)},
        "34 codes",
    ),
    "a plane less than its bytes": (InOrder, {"largest": 7, "block_bytes": 20, "widths": (2, 2)}, "16 bytes"),
    "an odd number of bytes": (Format, {"largest": 0, "block_bytes": 7}, "even number"),
    "3 bits that lie together": (InOrder, {"largest": 3, "block_bytes": 12, "widths": (3,)}, "1, 2 or 4"),
    "5 bits in nibbles": (InHalves, {"largest": 15, "block_bytes": 20}, "16 bytes"),
    "16 as a nibble": (InHalves, {"largest": 8, "block_bytes": 16}, "18 codes"),
    "128 as a signed byte": (Signed, {"largest": 128, "block_bytes": 32}, "258 codes"),
    "13 codes in pairs of 7 bits": (InPairs, {"largest": 6, "block_bytes": 14}, "13 codes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_whose_codes_do_not_fit_is_refused(name: str) -> None:
    kind, arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        kind(name=name, **arguments)  # type: ignore[arg-type]


def nearest_bf16(value: float) -> int:
    """The bits of the nearest bf16 number to a finite fp32 value, by fp64 distances; of two, the even one."""
    below = struct.unpack("<I", struct.pack("<f", value))[0] >> 16
    numbers = [struct.unpack("<f", struct.pack("<I", each << 16))[0] for each in (below, below + 1)]
    # Beyond the largest number, the next one would be 2**128 in magnitude.
    numbers = [math.copysign(2.0**128, value) if math.isinf(each) else each for each in numbers]
    near, far = (abs(value - each) for each in numbers)
    return below + int(far < near or (far == near and below % 2 == 1))


def test_bf16_is_the_nearest_number_and_nan_has_one_code() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0))
    ties = torch.arange(0x3F80, 0x4000) << 16 | 0x8000
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000])
    values = torch.cat([bits, ties, edges, edges - 2**31]).to(torch.int32).view(torch.float32)
    values = torch.cat([values, torch.full((-len(values) % BLOCK,), math.nan)])
    layout = MessageLayout(numel=len(values), bits=16, group_size=BLOCK)
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)
    result = torch.zeros(1, len(values))
    with ops.use_backend("reference"):
        ops.subtract_quantize(values, replica=None, out=message, layout=layout)
        ops.dequantize_add(message.view(1, -1), replica=result, layout=layout, accumulate=False)
    assert layout.nbytes == 2 * len(values)
    for value, code in zip(values.tolist(), message.view(torch.int16).tolist(), strict=True):
        expected = 0x7FC0
        if math.isfinite(value):
            expected = nearest_bf16(value)
        elif math.isinf(value):
            expected = 0x7F80 if value > 0 else 0xFF80
        assert code & 0xFFFF == expected, value
    assert torch.equal(result[0].view(torch.int32) >> 16, message.view(torch.int16).int())

"""Every format of the table packs its codes without loss, and a format whose codes do not fit is refused.

A format that is added to `FORMATS` is tested here without a change. Layer: pure functions, no process.
"""

from __future__ import annotations

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
    with_scales,
)
from sdp4bit.quantization.layout import MessageLayout


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

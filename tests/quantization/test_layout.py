"""Byte layout of a message: sizes computed by hand, and no two parts ever share a byte."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp4bit.quantization.layout import MESSAGE_ALIGNMENT, MessageLayout, message_layout, round_up

repeatable = settings(deadline=None, derandomize=True)

layouts = st.builds(
    MessageLayout,
    numel=st.integers(0, 5000),
    bits=st.sampled_from([2, 3, 3.5, 4, 8, 32]),
    group_size=st.integers(1, 64).map(lambda blocks: 32 * blocks),
    parts=st.integers(1, 9),
)


# numel, bits, group, parts -> padded, groups, tail, codes per row, scales begin, payload, message
@pytest.mark.parametrize(
    ("numel", "bits", "group_size", "parts", "expected"),
    [
        (4096, 4, 2048, 1, (4096, 2, 0, 2048, 2048, 2052, 2064)),
        (4096, 8, 128, 1, (4096, 32, 0, 4096, 4096, 4160, 4160)),
        (1024, 4, 128, 4, (1024, 8, 0, 512, 2048, 2112, 2112)),
        (1000, 4, 128, 1, (1024, 8, 0, 512, 512, 528, 528)),
        (1025, 8, 128, 2, (1056, 9, 32, 1056, 2112, 2148, 2160)),
        (200, 4, 96, 3, (224, 3, 32, 112, 336, 354, 368)),
        (1, 4, 2048, 1, (32, 1, 32, 16, 16, 18, 32)),
        (4096, 3, 128, 1, (4096, 32, 0, 1536, 1536, 1600, 1600)),
        (4096, 2, 128, 1, (4096, 32, 0, 1024, 1024, 1088, 1088)),
        (1000, 3, 128, 1, (1024, 8, 0, 384, 384, 400, 400)),
        (200, 3, 96, 3, (224, 3, 32, 84, 252, 270, 272)),
        (200, 2, 96, 3, (224, 3, 32, 56, 168, 186, 192)),
        (33, 2, 32, 1, (64, 2, 0, 16, 16, 20, 32)),
        (1, 3, 2048, 1, (32, 1, 32, 12, 12, 14, 16)),
        (1, 3.5, 2048, 1, (32, 1, 32, 14, 14, 16, 16)),
        (200, 3.5, 96, 3, (224, 3, 32, 98, 294, 312, 320)),
        (1, 2, 2048, 3, (32, 1, 32, 8, 24, 30, 32)),
        (100, 32, 128, 2, (128, 0, 0, 512, 1024, 1024, 1024)),
        (0, 4, 128, 3, (0, 0, 0, 0, 0, 0, 0)),
    ],
)
def test_sizes_equal_the_hand_computed_ones(
    numel: int, bits: float, group_size: int, parts: int, expected: tuple[int, ...]
) -> None:
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    assert (
        layout.padded_numel,
        layout.groups,
        layout.tail,
        layout.code_bytes,
        layout.scales_offset,
        layout.payload_bytes,
        layout.nbytes,
    ) == expected


@pytest.mark.parametrize(
    ("bits", "group_size", "bytes_per_value"),
    [
        (2, 128, 0.265625),
        (3, 128, 0.390625),
        (3.5, 128, 0.453125),
        (4, 128, 0.515625),
        (8, 128, 1.015625),
        (4, 2048, 0.5009765625),
        (32, 128, 4.0),
    ],
)
def test_cost_per_value_is_exact_when_the_sizes_divide(
    bits: float, group_size: int, bytes_per_value: float
) -> None:
    layout = MessageLayout(numel=2048 * 8, bits=bits, group_size=group_size, parts=16)
    assert layout.nbytes == bytes_per_value * 16 * layout.numel
    assert layout.padding_bytes == 0.0


def test_padding_bytes_are_what_raggedness_adds() -> None:
    # 1 value: 32 codes of half a byte and a scale are 18 bytes, sent as 32; the value alone is 0.5 + 2/128.
    assert MessageLayout(numel=1, bits=4, group_size=128).padding_bytes == 32 - 0.5 - 2 / 128
    assert MessageLayout(numel=100, bits=32, group_size=128).padding_bytes == 4 * 28
    assert MessageLayout(numel=0, bits=4, group_size=128).padding_bytes == 0


@repeatable
@given(layouts)
def test_padding_costs_at_most_31_values_and_a_scale_per_row_and_the_alignment(
    layout: MessageLayout,
) -> None:
    scales = Fraction(0) if layout.bits == 32 else Fraction(2, layout.group_size)
    needed = layout.parts * layout.numel * (Fraction(layout.bits) / 8 + scales)
    padding = layout.nbytes - needed
    per_row = Fraction(31 * layout.bits) / 8 + (0 if layout.bits == 32 else 2)
    assert 0 <= padding < layout.parts * per_row + MESSAGE_ALIGNMENT
    # Reported as a float: three roundings of numbers no larger than the message.
    assert abs(Fraction(layout.padding_bytes) - padding) <= 3 * Fraction(layout.nbytes, 1 << 52)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"bits": 1}, "bits=1"),
        ({"bits": 5}, "bits=5"),
        ({"bits": 2.5}, "bits=2.5"),
        ({"bits": 6}, "bits=6"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": -32}, "group_size=-32"),
        ({"group_size": 100}, "group_size=100"),
        ({"numel": -1}, "numel=-1"),
        ({"parts": 0}, "parts=0"),
    ],
)
def test_bad_numbers_are_refused_by_name(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MessageLayout(**({"numel": 64, "bits": 4, "group_size": 32} | arguments))


@repeatable
@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up_is_the_smallest_multiple_not_below(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


def test_equal_numbers_of_other_types_do_not_get_each_others_layout() -> None:
    message_layout(numel=4128, bits=4.0, group_size=96.0)  # type: ignore[arg-type]
    layout = message_layout(numel=4128, bits=4, group_size=96)
    assert type(layout.nbytes) is int and type(layout.bits) is int

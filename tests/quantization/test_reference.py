"""The definition of the operators, byte for byte against an independent one in Python integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization import reference
from sdp4bit.quantization.formats import format_of, with_scales
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import random_bits16
from tests.oracles.integers import (
    INF,
    KEY,
    NAN,
    QMAX,
    bits_float,
    decoded,
    encoded,
    finite_floats,
    float_bits,
    oracle_group,
    oracle_message,
    oracle_values,
    repeatable,
    rounded,
    same_values,
    values_of,
)


def scale_of(largest: float, bits: float) -> Tensor:
    group = torch.zeros(1, 32)
    group[0, 5] = largest
    return reference.compute_scales(group, format_of(bits))[0][0]


@repeatable
@given(finite_floats, st.sampled_from(with_scales()))
def test_scale_is_the_rounded_up_largest_magnitude_over_qmax(largest: float, bits: float) -> None:
    _, expected = oracle_group([largest], bits, [0])
    scale = scale_of(largest, bits)
    assert scale.dtype == torch.bfloat16
    assert scale.view(torch.int16).item() == expected
    if scale.isnan():
        assert abs(largest) > QMAX[bits] * 2.0**120 * (1 - 2**-7)
    elif abs(largest) >= 2.0**-100:
        exact = abs(largest) / QMAX[bits]
        assert exact < scale.item() <= exact * (1 + 2**-7) * (1 + 2**-20)


@pytest.mark.parametrize("bits", with_scales())
def test_a_scale_of_2_to_the_120_is_nan_and_none_below(bits: float) -> None:
    largest_scale = bits_float(0x7B7F0000)
    below = largest_scale * QMAX[bits] * (1 - 2**-20)
    assert scale_of(below, bits).item() == scale_of(-below, bits).item() == largest_scale
    for value in (largest_scale * QMAX[bits] * (1 + 2**-20), -float(np.finfo(np.float32).max)):
        assert scale_of(value, bits).isnan()
        assert decoded(encoded(torch.full((1, 32), value), bits, 32), 32, bits, 32).isnan().all()


@pytest.mark.parametrize("bits", with_scales())
def test_products_of_codes_and_scales_are_exact_and_finite(bits: float) -> None:
    """Of all codes, dithers and mantissas of scales, so that a multiply-add may be fused."""
    codes = torch.arange(-QMAX[bits], QMAX[bits] + 1, dtype=torch.float64)
    offsets = torch.cat([torch.zeros(1), 0.5 - (torch.arange(256) + 0.5) / 256]).double()
    for exponent in (-107, 119):
        scales = (1 + torch.arange(128).double() / 128) * 2.0**exponent
        products = (codes[:, None, None] + offsets[:, None]) * scales
        assert torch.equal(products.float().double(), products)


@pytest.mark.parametrize("bits", with_scales())
def test_group_below_2_to_the_minus_100_is_zero_and_at_it_is_not(bits: float) -> None:
    limit = 2.0**-100
    below = bits_float(float_bits(limit) - 1)
    assert scale_of(below, bits).item() == 0
    assert scale_of(1e-45, bits).item() == 0
    assert scale_of(limit, bits).item() > 0
    message = encoded(torch.full((1, 32), -below), bits, 32)
    assert torch.equal(decoded(message, 32, bits, 32), torch.zeros(1, 32))


@repeatable
@given(
    st.lists(finite_floats, min_size=32, max_size=32),
    st.sampled_from(with_scales()),
    st.sampled_from([0, 0x8000, 0xFFFF]),
)
def test_codes_stay_in_range_without_a_clamp(group: list[float], bits: float, draw: int) -> None:
    values = torch.tensor([group])
    codes, scales = reference.quantize_groups(values, format_of(bits), torch.full((1, 32), draw).int())
    assert codes.abs().max().item() <= QMAX[bits]
    _, reciprocal, _ = reference.compute_scales(values, format_of(bits))
    assert (values * reciprocal).abs().max().item() <= QMAX[bits] * 65536
    assert scales.isfinite().all() or values.abs().max().item() > QMAX[bits] * 2.0**120 * (1 - 2**-7)


@pytest.mark.parametrize("bits", with_scales())
def test_scale_and_range_hold_for_every_mantissa_of_the_largest_value(bits: float) -> None:
    # All 2**23 mantissas in one binade; the scale rule does not depend on the exponent.
    values = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32).view(-1, 1)
    for piece in values.split(1 << 20):
        scales, reciprocal, _ = reference.compute_scales(piece, format_of(bits))
        step = (piece[:, 0].numpy().astype(np.float64) * rounded(1.0 / QMAX[bits])).astype(np.float32)
        expected = -(-(step.view(np.int32).astype(np.int64) + 4) // 65536)
        assert np.array_equal(scales.view(torch.int16).numpy(), expected)
        fixed = (piece[:, 0] * reciprocal).to(torch.int32)
        assert fixed.max().item() <= QMAX[bits] << 16
        # The lower bound of the scale rule: the largest value keeps (1 - 2**-7) of the range.
        assert fixed.min().item() >= (QMAX[bits] << 16) * (1 - 2**-7) * (1 - 2**-20)


# Rounding


@pytest.mark.parametrize("bits", with_scales())
def test_mean_over_all_draws_is_the_fixed_point_value_exactly(bits: float) -> None:
    group = values_of(1, 32, seed=3)
    draws = torch.arange(65536, dtype=torch.int32).view(-1, 1).expand(-1, 32)
    codes, _ = reference.quantize_groups(group.expand(65536, 32), format_of(bits), draws)
    _, reciprocal, _ = reference.compute_scales(group, format_of(bits))
    fixed = (group * reciprocal).double().trunc()
    assert torch.equal(codes.double().sum(0), fixed[0])
    # Truncation moves a value by less than 2**-16 of a level, towards zero.
    assert ((group * reciprocal).double() - fixed).abs().max().item() < 1.0


def test_nearest_rounds_ties_up() -> None:
    # 6.99 / 7 rounds up to a scale of exactly one: multiples of a half are ties.
    group = torch.zeros(1, 32)
    group[0, :7] = torch.tensor([6.99, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5])
    codes, scales = reference.quantize_groups(group, format_of(4), None)
    assert scales.item() == 1.0
    assert codes[0, :7].tolist() == [7, 1, 0, 2, -1, 3, -2]


# Clipped scales


@repeatable
@given(
    st.lists(finite_floats, min_size=32, max_size=32),
    st.sampled_from(with_scales()),
    st.sampled_from([0.1, 0.25, 0.6, 0.99]),
    st.booleans(),
)
def test_clipped_groups_equal_the_oracle(
    group: list[float], bits: float, clip: float, stochastic: bool
) -> None:
    draws = random_bits16(0, 32, 3, 5) if stochastic else torch.full((32,), 0x8000).int()
    codes, scales = reference.quantize_groups(torch.tensor([group]), format_of(bits), draws[None], clip=clip)
    expected, scale = oracle_group(group, bits, draws.tolist(), clip)
    assert codes[0].tolist() == expected
    assert scales.view(torch.int16).item() == scale


# Dither


@pytest.mark.parametrize("bits", with_scales())
def test_dithered_values_come_back_within_half_a_step_and_zeros_as_zeros(bits: float) -> None:
    """With 3.5 bits a zero does if the other value of its pair is zero."""
    values = torch.ones(1, 64)
    values[0, :20] = values[0, 32:40] = values[0, 48:64] = 0  # both of 4 pairs and of 8
    random = random_bits16(0, 64, 3, 5)[None]
    codes, scales = reference.quantize_groups(values, format_of(bits), random, dither=True)
    received = format_of(bits).unpack(format_of(bits).pack(codes))
    units = reference.subtract_dither(received, format_of(bits), random).double()
    # Receivers know the upper 8 of the 16 random bits, in the middle of their interval.
    undithered = received.double() + 0.5 - (random.double() // 256 + 0.5) / 256
    assert torch.equal(units[units != 0], undithered[units != 0])
    error = units - values / scales.float()
    assert error.abs().max() <= 0.5 + 2**-8
    zeros = values == 0
    if bits == 3.5:
        zeros[:, 4:16] = zeros[:, 56:] = False
    assert torch.equal(error == 0, zeros)


# Packing and layout


@pytest.mark.parametrize("bits", with_scales())
def test_every_code_comes_back(bits: float) -> None:
    """The lowest one, which no value is rounded to, included."""
    lowest = -QMAX[bits] - (bits != 3.5)
    codes = (torch.arange(288, dtype=torch.int32) % (QMAX[bits] - lowest + 1) + lowest)[None]
    packed = format_of(bits).pack(codes)
    assert packed.shape == (1, 288 * bits / 8)
    assert torch.equal(format_of(bits).unpack(packed).int(), codes)


SHAPES = [
    (1, 1, 32),
    (1, 31, 2048),
    (2, 32, 32),
    (3, 100, 64),
    (2, 96, 96),
    (2, 500, 96),
    (1, 257, 128),
    (2, 640, 512),
    (1, 2048, 2048),
    (1, 4097, 2048),
    (2, 0, 128),
]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [*with_scales(), 32])
@pytest.mark.parametrize(("parts", "numel", "group_size"), SHAPES)
def test_message_equals_the_oracle_byte_for_byte(
    parts: int, numel: int, group_size: int, bits: float, stochastic: bool
) -> None:
    rows = values_of(parts, numel, seed=numel)
    if numel > 200:
        rows[-1, 150] = NAN
        rows[0, -1] = -INF
    padded = -(-numel // 32) * 32
    random = None
    if stochastic:
        random = [random_bits16(i * padded, padded, KEY.k0, KEY.k1).tolist() for i in range(parts)]
    expected = oracle_message(rows.tolist(), bits, group_size, random)
    message = encoded(rows, bits, group_size, stochastic=stochastic)
    if bits == 32:  # the oracle packs through fp64, which may quieten a NaN
        finite = rows.nan_to_num(0.0, 0.0, 0.0)
        assert bytes(encoded(finite, bits, group_size)) == oracle_message(
            finite.tolist(), bits, group_size, None
        )
        assert same_values(decoded(message, numel, bits, group_size, parts), rows)
        return
    assert bytes(message.tolist()) == expected
    values = torch.tensor(oracle_values(expected, numel, bits, group_size, parts))
    assert same_values(decoded(message, numel, bits, group_size, parts), values[:, :numel])


@repeatable
@given(
    st.lists(finite_floats, min_size=1, max_size=130),
    st.sampled_from([32, 64, 96, 128]),
    st.sampled_from(with_scales()),
)
def test_any_finite_row_equals_the_oracle(row: list[float], group_size: int, bits: float) -> None:
    message = encoded(torch.tensor([row]), bits, group_size)
    assert bytes(message.tolist()) == oracle_message([row], bits, group_size, None)


def test_unquantized_message_is_exact_to_the_bit() -> None:
    rows = torch.tensor([[0.0, -0.0, 1e-45, INF, -INF, 1.1, -3e38]])
    message = encoded(rows, 32, 32)
    assert torch.equal(decoded(message, 7, 32, 32).view(torch.int32), rows.view(torch.int32))


# Non-finite values


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(("group_in", "group_out"), [(128, 128), (64, 256), (256, 64)])
def test_a_non_finite_value_of_one_rank_survives_the_reduction(
    bad: float, group_in: int, group_out: int
) -> None:
    numel, parts = 512, 2
    ranks = [values_of(parts, numel, seed=seed) for seed in range(3)]

    def reduced() -> Tensor:
        messages = torch.stack([encoded(rows, 8, group_in) for rows in ranks])
        received = MessageLayout(numel=numel, bits=8, group_size=group_in, parts=parts)
        sent = MessageLayout(numel=numel, bits=4, group_size=group_out)
        out = torch.empty(parts, sent.nbytes, dtype=torch.uint8)
        reference.dequantize_reduce_quantize(
            messages, received=received, out=out, sent=sent, rounding=None, dither=None
        )
        result = torch.empty(parts, numel)
        for part in range(parts):
            reference.dequantize_reduce_hadamard(
                out[part : part + 1],
                out=result[part],
                layout=sent,
                hadamard=False,
                multiplier=0.5,
                dither=None,
            )
        return result

    clean = reduced()
    assert clean.isfinite().all()
    ranks[1][1, 300] = bad
    wider = max(group_in, group_out)
    first = 300 // wider * wider
    expected = clean.clone()
    expected[1, first : first + wider] = NAN
    assert same_values(reduced(), expected)

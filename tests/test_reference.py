"""The definition of the operators, byte for byte against an independent one in Python integers.

The oracle below loops over groups and values, follows docs/method.md, and shares no code with the library
but the random bits, which tests/test_random.py compares with integers by themselves.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization import reference
from sdp4bit.quantization.hadamard import hadamard32
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import derive_keys, random_bits16

repeatable = settings(deadline=None, derandomize=True)
NAN, INF = float("nan"), float("inf")
K0, K1 = derive_keys(11, 22)
QMAX = {4: 7, 8: 127}


# The oracle


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits_float(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def rounded(value: float) -> float:
    """To fp32. A product of two fp32 numbers is exact in fp64, so the product is rounded once."""
    return float(np.float32(value))


def oracle_group(group: list[float], bits: int, random: list[int]) -> tuple[list[int], int]:
    """Return the codes and the bf16 bits of the scale of one group."""
    largest = max(float_bits(value) & 0x7FFFFFFF for value in group)
    if largest >= 0x7F800000:
        return [0] * len(group), 0x7FC0
    if bits_float(largest) < 2.0**-100:
        return [0] * len(group), 0
    step = rounded(bits_float(largest) * rounded(1.0 / QMAX[bits]))
    scale = -(-(float_bits(step) + 4) // 65536)  # round up 4 units in the last place above
    inverse = rounded(65536.0 / bits_float(scale << 16))
    codes = [(math.trunc(rounded(x * inverse)) + r) >> 16 for x, r in zip(group, random, strict=True)]
    return codes, scale


def oracle_message(
    rows: list[list[float]], bits: int, group_size: int, random: list[list[int]] | None
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
            integers, scale = oracle_group(group, bits, draws[start : start + group_size])
            scales += struct.pack("<H", scale)
            if bits == 8:
                codes += struct.pack(f"{len(group)}b", *integers)
            else:
                half = len(group) // 2
                codes += bytes(integers[i] + 8 + 16 * (integers[i + half] + 8) for i in range(half))
    message = codes + scales
    return message + bytes(-len(message) % 16)


def oracle_values(message: bytes, numel: int, bits: int, group_size: int, parts: int) -> list[list[float]]:
    """Return the rows that a message carries, padding included."""
    padded = -(-numel // 32) * 32
    if bits == 32:
        flat = struct.unpack(f"<{parts * padded}f", message[: 4 * parts * padded])
        return [list(flat[part * padded : (part + 1) * padded]) for part in range(parts)]
    code, scale, rows = 0, parts * padded * bits // 8, []
    for _ in range(parts):
        row: list[float] = []
        while len(row) < padded:
            size = min(group_size, padded - len(row))
            packed = message[code : code + size * bits // 8]
            if bits == 8:
                integers = list(struct.unpack(f"{size}b", packed))
            else:
                integers = [byte % 16 - 8 for byte in packed] + [byte // 16 - 8 for byte in packed]
            factor = bits_float(struct.unpack("<H", message[scale : scale + 2])[0] << 16)
            row += [rounded(q * factor) for q in integers]
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


def encoded(rows: Tensor, bits: int, group_size: int, *, stochastic: bool = False) -> Tensor:
    """The message of rows [parts, n], without a transform."""
    parts, numel = rows.shape
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    out = torch.full((1, layout.nbytes), 0xAA, dtype=torch.uint8)
    reference.hadamard_quantize(
        rows.unsqueeze(0),
        out,
        bits=bits,
        group_size=group_size,
        hadamard=False,
        stochastic=stochastic,
        k0=K0,
        k1=K1,
        first=0,
        row_stride=layout.padded_numel,
    )
    return out[0]


def decoded(message: Tensor, numel: int, bits: int, group_size: int, parts: int = 1) -> Tensor:
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    return reference.decode(message.unsqueeze(0), layout)[0, :, :numel]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal bits, except that one NaN is as good as another."""
    bits_equal = a.view(torch.int32) == b.view(torch.int32)
    return bool((bits_equal | (a.isnan() & b.isnan())).all())


# Scale rule

finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def scale_of(largest: float, bits: int) -> Tensor:
    group = torch.zeros(1, 32)
    group[0, 5] = largest
    return reference.compute_scales(group, bits)[0][0]


@repeatable
@given(finite_floats, st.sampled_from([4, 8]))
def test_scale_is_the_rounded_up_largest_magnitude_over_qmax(largest: float, bits: int) -> None:
    _, expected = oracle_group([largest], bits, [0])
    scale = scale_of(largest, bits)
    assert scale.dtype == torch.bfloat16
    assert scale.view(torch.int16).item() == expected
    if abs(largest) >= 2.0**-100:
        exact = abs(largest) / QMAX[bits]
        assert exact < scale.item() <= exact * (1 + 2**-7) * (1 + 2**-20)


@pytest.mark.parametrize("bits", [4, 8])
def test_scale_that_would_be_exact_moves_one_bf16_up(bits: int) -> None:
    for exponent in range(-90, 120, 7):
        power = 2.0**exponent
        assert scale_of(QMAX[bits] * power, bits).item() == power * (1 + 2**-7)


def test_scale_is_the_next_bf16_where_the_quotient_lies_below_one() -> None:
    # 7 * 1.0078125 = 7.0546875; one fp32 unit less than a bf16 number less 4 units still rounds to it.
    below = bits_float(float_bits(1.0078125) - 64)
    assert scale_of(7 * below, 4).item() == 1.0078125
    assert scale_of(7 * 1.0078125, 4).item() == 1.015625


@pytest.mark.parametrize("bits", [4, 8])
def test_huge_values_have_finite_scales_and_decode_within_the_scale_rule(bits: int) -> None:
    largest = float(np.finfo(np.float32).max)
    group = torch.full((1, 32), largest)
    group[0, ::2] *= -1
    codes, scales = reference.quantize_groups(group, bits, None)
    assert scales.isfinite().all()
    assert codes.abs().max().item() <= QMAX[bits]
    # A decoded value is at most 1 + 2**-7 times the largest, so only the last binade can overflow.
    group /= 1 + 2**-6
    codes, scales = reference.quantize_groups(group, bits, None)
    assert (codes.float() * scales.float().unsqueeze(-1)).isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_group_below_2_to_the_minus_100_is_zero_and_at_it_is_not(bits: int) -> None:
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
    st.sampled_from([4, 8]),
    st.sampled_from([0, 0x8000, 0xFFFF]),
)
def test_codes_stay_in_range_without_a_clamp(group: list[float], bits: int, draw: int) -> None:
    values = torch.tensor([group])
    codes, scales = reference.quantize_groups(values, bits, torch.full((1, 32), draw).int())
    assert codes.abs().max().item() <= QMAX[bits]
    _, reciprocal, _ = reference.compute_scales(values, bits)
    assert (values * reciprocal).abs().max().item() <= QMAX[bits] * 65536
    assert scales.isfinite().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_scale_and_range_hold_for_every_mantissa_of_the_largest_value(bits: int) -> None:
    # All 2**23 mantissas in one binade; the scale rule does not depend on the exponent.
    values = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32).view(-1, 1)
    for piece in values.split(1 << 20):
        scales, reciprocal, _ = reference.compute_scales(piece, bits)
        step = (piece[:, 0].numpy().astype(np.float64) * rounded(1.0 / QMAX[bits])).astype(np.float32)
        expected = -(-(step.view(np.int32).astype(np.int64) + 4) // 65536)
        assert np.array_equal(scales.view(torch.int16).numpy(), expected)
        fixed = (piece[:, 0] * reciprocal).to(torch.int32)
        assert fixed.max().item() <= QMAX[bits] << 16
        # The lower bound of the scale rule: the largest value keeps (1 - 2**-7) of the range.
        assert fixed.min().item() >= (QMAX[bits] << 16) * (1 - 2**-7) * (1 - 2**-20)


# Rounding


@repeatable
@given(st.lists(finite_floats, min_size=32, max_size=32), st.sampled_from([4, 8]))
def test_every_random_draw_gives_a_neighbouring_level(group: list[float], bits: int) -> None:
    values = torch.tensor([group])
    down, _ = reference.quantize_groups(values, bits, torch.zeros(1, 32).int())
    up, _ = reference.quantize_groups(values, bits, torch.full((1, 32), 0xFFFF).int())
    nearest, _ = reference.quantize_groups(values, bits, None)
    assert ((up - down >= 0) & (up - down <= 1)).all()
    assert ((nearest == down) | (nearest == up)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_mean_over_all_draws_is_the_fixed_point_value_exactly(bits: int) -> None:
    group = values_of(1, 32, seed=3)
    draws = torch.arange(65536, dtype=torch.int32).view(-1, 1).expand(-1, 32)
    codes, _ = reference.quantize_groups(group.expand(65536, 32), bits, draws)
    _, reciprocal, _ = reference.compute_scales(group, bits)
    fixed = (group * reciprocal).double().trunc()
    assert torch.equal(codes.double().sum(0), fixed[0])
    # Truncation moves a value by less than 2**-16 of a level, towards zero.
    assert ((group * reciprocal).double() - fixed).abs().max().item() < 1.0


def test_nearest_rounds_ties_up() -> None:
    # 6.99 / 7 rounds up to a scale of exactly one: multiples of a half are ties.
    group = torch.zeros(1, 32)
    group[0, :7] = torch.tensor([6.99, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5])
    codes, scales = reference.quantize_groups(group, 4, None)
    assert scales.item() == 1.0
    assert codes[0, :7].tolist() == [7, 1, 0, 2, -1, 3, -2]


# Packing and layout


def test_int4_bytes_hold_value_i_low_and_value_i_plus_half_high() -> None:
    codes = torch.arange(64) % 15 - 7  # scale one: codes are the values themselves
    values = codes.float().clamp(-6.99, 6.99).view(1, 64)
    message = encoded(values, 4, 64).tolist()
    expected = [(codes[i].item() + 8) | (codes[i + 32].item() + 8) << 4 for i in range(32)]
    assert message[:32] == expected
    assert message[32:34] == [0x80, 0x3F]  # bf16 one, little-endian
    assert message[34:] == [0] * 14


def test_int8_bytes_are_twos_complement_in_order() -> None:
    values = (torch.arange(32).float() * 8 - 124).view(1, 32)
    values[0, 0] = 126.75  # makes the scale exactly one
    message = encoded(values, 8, 32).tolist()
    codes = [127, *(8 * i - 124 for i in range(1, 32))]
    assert message[:32] == [code & 0xFF for code in codes]
    assert message[32:] == [0x80, 0x3F] + [0] * 14


def test_tail_group_is_packed_by_its_own_halves() -> None:
    values = torch.zeros(1, 160)
    values[0, 128:160] = torch.tensor([6.99] * 16 + [-6.99] * 16)
    message = encoded(values, 4, 128)
    assert message[:64].tolist() == [0x88] * 64
    assert message[64:80].tolist() == [15 | 1 << 4] * 16
    assert message[80:84].tolist() == [0, 0, 0x80, 0x3F]


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
@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize(("parts", "numel", "group_size"), SHAPES)
def test_message_equals_the_oracle_byte_for_byte(
    parts: int, numel: int, group_size: int, bits: int, stochastic: bool
) -> None:
    rows = values_of(parts, numel, seed=numel)
    if numel > 200:
        rows[-1, 150] = NAN
        rows[0, -1] = -INF
    padded = -(-numel // 32) * 32
    random = None
    if stochastic:
        random = [random_bits16(i * padded, padded, K0, K1).tolist() for i in range(parts)]
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
    st.sampled_from([4, 8]),
)
def test_any_finite_row_equals_the_oracle(row: list[float], group_size: int, bits: int) -> None:
    message = encoded(torch.tensor([row]), bits, group_size)
    assert bytes(message.tolist()) == oracle_message([row], bits, group_size, None)


def test_unquantized_message_is_exact_to_the_bit() -> None:
    rows = torch.tensor([[0.0, -0.0, 1e-45, INF, -INF, 1.1, -3e38]])
    message = encoded(rows, 32, 32)
    assert torch.equal(decoded(message, 7, 32, 32).view(torch.int32), rows.view(torch.int32))


def test_group_of_zeros_is_zero() -> None:
    for bits in (4, 8):
        rows = torch.zeros(1, 64)
        rows[0, ::2] = -0.0
        message = encoded(rows, bits, 64, stochastic=True)
        assert torch.equal(decoded(message, 64, bits, 64).view(torch.int32), torch.zeros(1, 64).int())


# Non-finite values


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 96, 128])
def test_a_non_finite_value_poisons_exactly_its_group(bad: float, bits: int, group_size: int) -> None:
    numel = 500
    for place in (0, group_size - 1, group_size, 300, numel - 1):
        rows = values_of(2, numel)
        clean = decoded(encoded(rows, bits, group_size), numel, bits, group_size, parts=2)
        rows[1, place] = bad
        message = encoded(rows, bits, group_size)
        spoiled = decoded(message, numel, bits, group_size, parts=2)
        first = place // group_size * group_size
        expected = clean.clone()
        expected[1, first : first + group_size] = NAN
        assert same_values(spoiled, expected)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(("group_in", "group_out"), [(128, 128), (64, 256), (256, 64)])
def test_a_non_finite_value_of_one_rank_survives_the_reduction(
    bad: float, group_in: int, group_out: int
) -> None:
    numel, parts = 512, 2
    ranks = [values_of(parts, numel, seed=seed) for seed in range(3)]

    def reduced() -> Tensor:
        messages = torch.stack([encoded(rows, 8, group_in) for rows in ranks])
        layout = MessageLayout(numel=numel, bits=4, group_size=group_out)
        out = torch.empty(parts, layout.nbytes, dtype=torch.uint8)
        reference.dequantize_reduce_quantize(
            messages,
            out,
            numel=numel,
            bits_in=8,
            group_size_in=group_in,
            bits_out=4,
            group_size_out=group_out,
            stochastic=False,
            k0=0,
            k1=0,
            first=0,
            row_stride=numel,
        )
        result = torch.empty(parts, numel)
        for part in range(parts):
            reference.dequantize_reduce_hadamard(
                out[part : part + 1],
                result[part],
                bits=4,
                group_size=group_out,
                hadamard=False,
                multiplier=0.5,
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


# Sums


def test_sum_starts_from_plus_zero_and_adds_in_rank_order() -> None:
    # In fp32, (1e8 + 1) - 1e8 = 0 but (1e8 - 1e8) + 1 = 1.
    rows = torch.tensor([[1e8], [1.0], [-1e8], [-0.0]]).expand(4, 32)
    messages = torch.stack([encoded(row.view(1, 32), 32, 32) for row in rows])

    def total(order: list[int]) -> Tensor:
        out = torch.empty(32)
        reference.dequantize_reduce_hadamard(
            messages[order], out, bits=32, group_size=32, hadamard=False, multiplier=1.0
        )
        return out

    assert torch.equal(total([0, 1, 2]), torch.zeros(32))
    assert torch.equal(total([0, 2, 1]), torch.ones(32))
    assert total([3]).view(torch.int32).tolist() == [0] * 32  # +0.0 + -0.0 is +0.0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [32, 200, 1000])
def test_reduction_equals_the_oracle(bits: int, numel: int) -> None:
    group_size = 96
    messages = torch.stack([encoded(values_of(1, numel, seed=seed), bits, group_size) for seed in range(5)])
    total = np.zeros(numel, dtype=np.float32)
    for message in messages.tolist():
        row = oracle_values(bytes(message), numel, bits, group_size, 1)[0][:numel]
        total = total + np.array(row, dtype=np.float32)
    multiplier = 1 / 3
    out = torch.empty(numel)
    reference.dequantize_reduce_hadamard(
        messages, out, bits=bits, group_size=group_size, hadamard=False, multiplier=multiplier
    )
    assert torch.equal(out, torch.from_numpy(total * np.float32(multiplier)))


def test_requantized_sum_equals_the_oracle_with_other_group_sizes() -> None:
    numel, parts, ranks = 300, 2, 3
    messages = torch.stack([encoded(values_of(parts, numel, seed=seed), 8, 128) for seed in range(ranks)])
    first, row_stride = 64, 4096
    out = torch.full((parts, 176), 0xAA, dtype=torch.uint8)
    reference.dequantize_reduce_quantize(
        messages,
        out,
        numel=numel,
        bits_in=8,
        group_size_in=128,
        bits_out=4,
        group_size_out=96,
        stochastic=True,
        k0=K0,
        k1=K1,
        first=first,
        row_stride=row_stride,
    )
    total = np.zeros((parts, 320), dtype=np.float32)
    for message in messages.tolist():
        total = total + np.array(oracle_values(bytes(message), numel, 8, 128, parts), dtype=np.float32)
    for part in range(parts):
        random = random_bits16(part * row_stride + first, 320, K0, K1).tolist()
        expected = oracle_message([total[part].tolist()], 4, 96, [random])
        assert bytes(out[part].tolist()) == expected


def test_transform_happens_once_before_the_first_and_once_after_the_last_sum() -> None:
    numel = 100
    values = values_of(2, 1, numel, heavy=False)
    messages = torch.empty(2, 512, dtype=torch.uint8)
    reference.hadamard_quantize(
        values, messages, bits=32, group_size=32, hadamard=True, stochastic=False,
        k0=0, k1=0, first=0, row_stride=128,
    )  # fmt: skip
    padded = torch.nn.functional.pad(values, (0, 28))
    mixed = hadamard32(padded)
    assert torch.equal(messages.view(torch.float32).view(2, 1, 128), mixed)
    out = torch.empty(numel)
    reference.dequantize_reduce_hadamard(
        messages, out, bits=32, group_size=32, hadamard=True, multiplier=1 / 64
    )
    assert torch.equal(out, hadamard32(mixed[0, 0] + mixed[1, 0])[:numel] * (1 / 64))


# Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [96, 2048])
def test_weight_difference_is_taken_and_added_in_fp32(dtype: torch.dtype, group_size: int) -> None:
    numel, bits = 2100, 4
    main = values_of(numel, heavy=False)
    replica = (main + values_of(numel, seed=1, heavy=False) * 1e-2).to(dtype)
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.subtract_quantize(
        main, replica, out, bits=bits, group_size=group_size, stochastic=True, k0=K0, k1=K1
    )
    difference = (main.numpy() - replica.float().numpy()).tolist()
    random = random_bits16(0, layout.padded_numel, K0, K1).tolist()
    expected = oracle_message([difference], bits, group_size, [random])
    assert bytes(out.tolist()) == expected

    received = torch.tensor(oracle_values(expected, numel, bits, group_size, 1)[0][:numel])
    rows = torch.stack([replica, -replica])
    updated = rows.clone()
    reference.dequantize_add(
        torch.stack([out, out]), updated, bits=bits, group_size=group_size, accumulate=True
    )
    assert torch.equal(updated, (rows.float() + received).to(dtype))
    reference.dequantize_add(
        torch.stack([out, out]), updated, bits=bits, group_size=group_size, accumulate=False
    )
    assert torch.equal(updated, received.to(dtype).expand(2, numel))


def test_bf16_sum_is_rounded_to_nearest_even() -> None:
    # Between 1 and 1 + 2**-7 in bf16 lies the tie 1 + 2**-8; between the next two, 1 + 3 * 2**-8.
    replica = torch.ones(1, 32, dtype=torch.bfloat16)
    replica[0, 1] = 1 + 2**-7
    difference = torch.full((1, 32), 2.0**-8)
    difference[0, 2] = 2.0**-8 + 2.0**-20
    message = encoded(difference, 32, 32).unsqueeze(0)
    reference.dequantize_add(message, replica, bits=32, group_size=32, accumulate=True)
    assert replica[0, :3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_a_zero_difference_leaves_the_replica_alone() -> None:
    main = values_of(4096, heavy=False).to(torch.bfloat16)
    layout = MessageLayout(numel=4096, bits=4, group_size=2048)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.subtract_quantize(
        main.float(), main, out, bits=4, group_size=2048, stochastic=True, k0=K0, k1=K1
    )
    replica = main.clone().unsqueeze(0)
    reference.dequantize_add(out.unsqueeze(0), replica, bits=4, group_size=2048, accumulate=True)
    assert torch.equal(replica[0], main)

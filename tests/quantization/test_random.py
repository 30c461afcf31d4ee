"""Random bits of stochastic rounding: known answers, no shared streams, no memory, no visible pattern."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization.random import (
    MAX_BUCKETS,
    MAX_ELEMENTS,
    MAX_RANKS,
    Stage,
    check_numbers,
    derive_keys,
    derive_series,
    pack_stream,
    random_bits16,
)

repeatable = settings(deadline=None, derandomize=True)
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def splitmix64_finalizer(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def keys_by_hand(seed: int, stream: int) -> tuple[int, int]:
    state = seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15
    mixed = splitmix64_finalizer(state & M64)
    return mixed & M32, mixed >> 32


def hash_by_hand(counter: int, k0: int, k1: int) -> int:
    x = counter ^ k0
    x ^= x >> 16
    x = x * 0x7FEB352D & M32
    x ^= k1
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return x ^ x >> 16


def bits_by_hand(element: int, k0: int, k1: int) -> int:
    mixed = hash_by_hand(element // 32 * 16 + element % 16, k0, k1)
    return mixed & 0xFFFF if element % 32 < 16 else mixed >> 16


keys = st.integers(0, M32)


# Keys


@repeatable
@given(
    st.integers(0, M64), st.integers(0, M32), st.integers(0, 1000), st.integers(1, 50), st.integers(0, 4000)
)
def test_a_series_has_the_keys_of_ranks_at_its_distance(
    seed: int, step: int, first: int, rank_step: int, piece: int
) -> None:
    first_stream, stream = (
        pack_stream(step=step, bucket=9, stage=Stage.GATHER, rank=rank)
        for rank in (first, first + piece * rank_step)
    )
    key = derive_series(seed, first_stream, rank_step=rank_step).key(piece)
    assert key[:2] == keys_by_hand(seed, stream) and key.dither


def test_keys_of_stream_zero_are_the_published_outputs_of_splitmix64() -> None:
    # The first three outputs of splitmix64 from state 0: the seed advances by the same increment.
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for seed, output in enumerate(published):
        assert derive_keys(seed, 0) == (output & M32, output >> 32)


@repeatable
@given(st.integers(0, 1 << 70), st.integers(0, M64))
def test_keys_equal_the_definition_in_integers(seed: int, stream: int) -> None:
    assert derive_keys(seed, stream) == keys_by_hand(seed, stream)


# Streams

LIMITS = {"step": 1 << 32, "bucket": 1 << 12, "rank": 1 << 18}
"""Of the first 4096 buckets."""
stream_names = st.fixed_dictionaries(
    {name: st.integers(0, limit - 1) for name, limit in LIMITS.items()}
    | {"stage": st.sampled_from(list(Stage))}
)


def names_of_job(page_bits: int) -> st.SearchStrategy[dict]:
    """Names in a job of 4096 * 2**page_bits buckets, as many steps as these have; corners more often."""
    limits = {"step": 1 << 32 - page_bits, "bucket": 1 << 12 + page_bits, "rank": 1 << 18}
    names = {
        name: st.integers(0, limit - 1) | st.sampled_from([0, 1, limit // 2, limit - 1])
        for name, limit in limits.items()
    }
    return st.fixed_dictionaries(names | {"stage": st.sampled_from(list(Stage))})


@repeatable
@given(st.integers(0, 8).flatmap(lambda bits: st.tuples(names_of_job(bits), names_of_job(bits))))
def test_different_names_of_a_job_have_different_streams(pair: tuple[dict, dict]) -> None:
    a, b = pair
    assert (pack_stream(**a) == pack_stream(**b)) == (a == b)
    assert pack_stream(**a) <= M64


@pytest.mark.parametrize("page_bits", range(1, 9))
def test_pages_of_buckets_share_out_all_steps(page_bits: int) -> None:
    """The streams of bucket 0 of every page begin as far apart as there are steps for each."""
    pages = 1 << page_bits
    names = {"stage": Stage.INTRA, "rank": 0}
    first = sorted(pack_stream(step=0, bucket=page << 12, **names) >> 32 for page in range(pages))
    assert first == [page << 32 - page_bits for page in range(pages)]


@pytest.mark.parametrize("page_bits", range(9))
def test_streams_repeat_after_the_last_step(page_bits: int) -> None:
    """A row of 768 sections has 5.6 million reductions of its own; a job may be longer."""
    names = {"bucket": (1 << page_bits) - 1 << 12, "stage": Stage.INTRA, "rank": 0}
    period = 1 << 32 - page_bits
    first = [pack_stream(step=step, **names) for step in range(3)]
    assert [pack_stream(step=7 * period + step, **names) for step in range(3)] == first
    assert pack_stream(step=period - 1, **names) == first[0] + (period - 1 << 32)


def test_more_groups_or_ranks_than_streams_are_refused() -> None:
    check_numbers(buckets=MAX_BUCKETS, ranks=MAX_RANKS)
    last = {"step": 0, "stage": Stage.INTRA}
    pack_stream(bucket=MAX_BUCKETS - 1, rank=MAX_RANKS - 1, **last)
    with pytest.raises(ValueError, match=r"1,048,577 parameter groups are more than the 1,048,576"):
        check_numbers(buckets=MAX_BUCKETS + 1, ranks=1)
    with pytest.raises(ValueError, match=r"262,145 data-parallel ranks are more than the 262,144"):
        check_numbers(buckets=1, ranks=MAX_RANKS + 1)
    with pytest.raises(ValueError, match=rf"bucket={MAX_BUCKETS} does not fit the 20 bits"):
        pack_stream(bucket=MAX_BUCKETS, rank=0, **last)


@pytest.mark.parametrize("name", ["bucket", "rank"])
def test_a_name_beyond_its_field_is_refused(name: str) -> None:
    names = {"step": 0, "bucket": 0, "stage": Stage.INTER, "rank": 0}
    with pytest.raises(ValueError, match=r"step=-1 must be at least 0"):
        pack_stream(**names | {"step": -1})
    limit = MAX_BUCKETS if name == "bucket" else LIMITS[name]
    pack_stream(**names | {name: limit - 1})
    for value in (-1, limit):
        bits = limit.bit_length() - 1
        with pytest.raises(ValueError, match=rf"{name}={value} does not fit the {bits} bits"):
            pack_stream(**names | {name: value})


# Bits


@repeatable
@given(st.integers(0, MAX_ELEMENTS // 32 - 5), st.integers(0, 5), keys, keys)
def test_bits_equal_the_definition_in_integers(block: int, blocks: int, k0: int, k1: int) -> None:
    """Element by element: they do not depend on how a range is split either."""
    first, numel = 32 * block, 32 * blocks
    bits = random_bits16(first, numel, k0, k1)
    assert bits.dtype == torch.int32
    assert bits.tolist() == [bits_by_hand(e, k0, k1) for e in range(first, first + numel)]


@repeatable
@given(st.integers(0, 1 << 20), st.integers(0, 3), st.integers(0, 4), st.integers(0, 1 << 20), keys, keys)
def test_rows_have_the_bits_of_each_row(
    block: int, blocks: int, rows: int, stride: int, k0: int, k1: int
) -> None:
    first, numel, stride = 32 * block, 32 * blocks, 32 * stride
    bits = random_bits16(first, numel, k0, k1, rows=rows, row_stride=stride)
    each = [random_bits16(first + row * stride, numel, k0, k1) for row in range(rows)]
    assert torch.equal(bits, torch.cat([torch.empty(0, dtype=torch.int32), *each]))


def test_known_bits_do_not_change() -> None:
    k0, k1 = keys_by_hand(7, pack_stream(step=3, bucket=5, stage=Stage.INTER, rank=2))
    first = [bits_by_hand(e, k0, k1) for e in range(0, 64, 8)]
    assert first == KNOWN_BITS
    keys = derive_keys(7, pack_stream(step=3, bucket=5, stage=Stage.INTER, rank=2))
    assert random_bits16(0, 64, *keys)[::8].tolist() == KNOWN_BITS


KNOWN_BITS = [15965, 52246, 698, 17974, 57510, 46946, 336, 29160]


@pytest.mark.parametrize(
    ("first", "numel", "stride"),
    [(1, 32, 0), (0, 31, 0), (16, 32, 0), (-32, 64, 0), (32, -32, 0), (0, 32, 33), (64, 32, -32)],
)
def test_range_that_is_no_multiple_of_32_or_negative_is_refused(first: int, numel: int, stride: int) -> None:
    with pytest.raises(ValueError, match=f"first={first}, numel={numel} and row_stride={stride} must be mul"):
        random_bits16(first, numel, 1, 2, row_stride=stride)


def test_last_element_has_bits_and_the_next_is_refused() -> None:
    assert MAX_ELEMENTS == 1 << 33
    last = random_bits16(MAX_ELEMENTS - 32, 32, 1, 2)
    assert last.tolist() == [bits_by_hand(e, 1, 2) for e in range(MAX_ELEMENTS - 32, MAX_ELEMENTS)]
    with pytest.raises(ValueError, match=f"element {MAX_ELEMENTS + 32} is beyond {MAX_ELEMENTS}"):
        random_bits16(MAX_ELEMENTS, 32, 1, 2)
    with pytest.raises(ValueError, match=f"element {MAX_ELEMENTS + 32} is beyond {MAX_ELEMENTS}"):
        random_bits16(0, 32, 1, 2, rows=2, row_stride=MAX_ELEMENTS)


# Statistics: fixed keys, so that each bound is met or missed for good. A sound generator fails a
# one-in-a-million bound for one key in a million.

SIGMA_ONE_IN_A_MILLION = 4.892  # two-sided normal quantile
COUNT = 1 << 20
STATISTICS_KEYS = [derive_keys(0, 0), derive_keys(1234, pack_stream(step=9, bucket=1, stage=1, rank=3))]


def chi_square_quantile(degrees: int, z: float) -> float:
    """Wilson-Hilferty approximation of the quantile that a normal variable has at z."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return (((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())).item()


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    # The correlation of n independent pairs is normal with standard deviation 1/sqrt(n).
    assert abs(correlation(a, b)) < SIGMA_ONE_IN_A_MILLION / math.sqrt(a.numel())


@pytest.mark.parametrize("k", STATISTICS_KEYS)
@pytest.mark.parametrize(("shift", "bins"), [(0, 1 << 16), (8, 256), (4, 256), (0, 256)])
def test_bits_are_uniform(k: tuple[int, int], shift: int, bins: int) -> None:
    values = random_bits16(0, COUNT, *k) >> shift & (bins - 1)
    observed = torch.bincount(values, minlength=bins).double()
    expected = COUNT / bins
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    low = chi_square_quantile(bins - 1, -SIGMA_ONE_IN_A_MILLION)
    high = chi_square_quantile(bins - 1, SIGMA_ONE_IN_A_MILLION)
    assert low < chi_square < high


@pytest.mark.parametrize("k", STATISTICS_KEYS)
def test_every_bit_of_every_lane_is_fair(k: tuple[int, int]) -> None:
    lanes = random_bits16(0, COUNT, *k).view(-1, 32)
    for bit in range(16):
        ones = (lanes >> bit & 1).sum(0).double()
        z = (ones - len(lanes) / 2) / math.sqrt(len(lanes) / 4)
        assert z.abs().max().item() < SIGMA_ONE_IN_A_MILLION


@pytest.mark.parametrize("k", STATISTICS_KEYS)
def test_lanes_are_uncorrelated(k: tuple[int, int]) -> None:
    bits = random_bits16(0, COUNT, *k)
    halves = bits.view(-1, 2, 16)
    assert_uncorrelated(halves[:, 0].reshape(-1), halves[:, 1].reshape(-1))
    for lag in (1, 2, 16, 31, 32, 64, 128):
        assert_uncorrelated(bits[lag:], bits[:-lag])


@pytest.mark.parametrize(
    "other",
    [
        {"step": 10},
        {"bucket": 2},
        {"stage": Stage.INTER},
        {"rank": 4},
        {"rank": 5, "step": 8},
    ],
)
def test_streams_are_uncorrelated(other: dict[str, int]) -> None:
    names = {"step": 9, "bucket": 1, "stage": Stage.INTRA, "rank": 3}
    a = random_bits16(0, COUNT, *derive_keys(0, pack_stream(**names)))
    b = random_bits16(0, COUNT, *derive_keys(0, pack_stream(**names | other)))
    assert_uncorrelated(a, b)
    # Two streams agree at an element with probability 2**-16: 16 expected here, Poisson.
    assert (a == b).sum().item() < 16 + SIGMA_ONE_IN_A_MILLION * math.sqrt(16) + 8


def test_seeds_are_uncorrelated() -> None:
    stream = pack_stream(step=9, bucket=1, stage=Stage.INTRA, rank=3)
    a = random_bits16(0, COUNT, *derive_keys(0, stream))
    for seed in (1, 2, 1 << 31):
        assert_uncorrelated(a, random_bits16(0, COUNT, *derive_keys(seed, stream)))

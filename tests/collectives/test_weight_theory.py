"""What the paper proves or shows about weight differences: contraction, tracking, the counterexample."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization import ops, reference
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import Stage, derive_keys, pack_stream
from tests.collectives.test_error_theory import relative_mse, student_t

repeatable = settings(deadline=None, derandomize=True)
WEIGHT_GROUP = 2048
QMAX = {4: 7, 8: 127}


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with ops.use_backend("reference"):
        yield


# Contraction, paper definition 4.2: |C(v) - v|**2 <= (1 - delta) |v|**2


def keys(seed: int, *, step: int) -> tuple[int, int]:
    return derive_keys(seed, pack_stream(step=step, bucket=0, stage=Stage.WEIGHT, rank=0))


def quantize_once(values: Tensor, bits: int, group_size: int, *, seed: int | None = None) -> Tensor:
    """Return what arrives of values [n]; rounded to nearest, or stochastically with a seed."""
    layout = MessageLayout(numel=values.numel(), bits=bits, group_size=group_size)
    message = torch.empty(layout.nbytes, dtype=torch.uint8)
    key = (0, 0) if seed is None else keys(seed, step=0)
    ops.subtract_quantize(values, None, message, bits, group_size, seed is not None, *key)
    received = torch.empty(1, values.numel())
    ops.dequantize_add(message.unsqueeze(0), received, bits, group_size, False)
    return received[0]


def guaranteed_delta(bits: int, group_size: int) -> float:
    """Delta of nearest rounding for any group.

    In units of the scale the largest value m is at least qmax (1 - 2**-7) and errs by at most 1/2. Every
    other value x errs by at most min(|x|, 1/2). The ratio is worst when all others are 1/2.
    """
    largest = (QMAX[bits] * (1 - 2**-7) * (1 - 2**-20)) ** 2
    others = (group_size - 1) / 4
    return 1 - (others + 1 / 4) * (1 + 2**-14) / (others + largest)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@repeatable
@given(
    st.lists(finite, min_size=1, max_size=64),
    st.sampled_from([4, 8]),
    st.integers(0, 2**20),
)
def test_nearest_rounding_contracts_every_group(some: list[float], bits: int, seed: int) -> None:
    values = torch.tensor(some)[torch.arange(64) % len(some)]
    if seed % 2:  # as bad as it gets: one large value, all others near half a level
        values[1:] = values[0].abs() / QMAX[bits] * (0.49 + 0.02 * (seed % 53) / 52)
    error = (quantize_once(values, bits, 64).double() - values.double()).square().sum().item()
    norm = values.double().square().sum().item()
    tiny = values.abs().max().item() < 2.0**-99
    assert error <= (1 if tiny else 1 - guaranteed_delta(bits, 64)) * norm


def test_guaranteed_contraction_of_the_weight_group_is_positive_and_almost_reached() -> None:
    delta = guaranteed_delta(4, WEIGHT_GROUP)
    assert 0.085 < delta < 0.087
    values = torch.full((WEIGHT_GROUP,), 0.4999)
    values[0] = 6.99  # a scale of exactly one
    error = relative_mse(quantize_once(values, 4, WEIGHT_GROUP), values)
    assert 1 - delta - 0.01 < error <= 1 - delta


def test_stochastic_rounding_need_not_contract() -> None:
    # One value 7, all others 0.1 in a group of 2048. In exact arithmetic with step one: 2.65 and 0.29.
    values = torch.full((WEIGHT_GROUP,), 0.1)
    values[0] = 7.0
    exact = 0.09 * 2047 / (49 + 20.47)  # a value at 0.1 of a level varies by 0.1 * 0.9
    assert exact == pytest.approx(2.65, abs=0.005)
    _, reciprocal, _ = reference.compute_scales(values.view(1, -1), 4)
    fixed = (values * reciprocal).to(torch.int32)
    scale = 65536 / reciprocal.item()
    fraction = (fixed & 0xFFFF).double() / 65536
    variance = (fraction * (1 - fraction)).sum().item() * scale**2
    expected = variance / values.double().square().sum().item()
    # The scale rule takes a step of 1 + 2**-7 instead of 1: the variance x (step - x) grows with the step.
    assert exact <= expected <= exact * (1 + 2**-7 / 0.9) + 0.01
    repeats = [relative_mse(quantize_once(values, 4, WEIGHT_GROUP, seed=s), values) for s in range(50)]
    # Each of 50 x 2047 values moves up with probability 0.1: five standard deviations.
    spread = 5 * math.sqrt(0.1 * 0.9 / (50 * 2047)) / 0.09
    assert sum(repeats) / 50 == pytest.approx(expected, rel=spread)
    assert min(repeats) > 2
    assert relative_mse(quantize_once(values, 4, WEIGHT_GROUP), values) == pytest.approx(0.295, abs=1e-3)


# Weights over steps


def adam_like_updates(numel: int, steps: int, *, learning_rate: float) -> Iterator[Tensor]:
    """Updates of Adam on noisy gradients with a slowly moving mean."""
    generator = torch.Generator().manual_seed(8)
    drift = torch.randn(numel, generator=generator)
    scale = torch.exp(torch.randn(numel, generator=generator))
    first, second = torch.zeros(numel), torch.zeros(numel)
    for step in range(1, steps + 1):
        drift = 0.99 * drift + 0.14 * torch.randn(numel, generator=generator)
        gradient = scale * (0.5 * drift + torch.randn(numel, generator=generator))
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient.square()
        yield learning_rate * (first / (1 - 0.9**step)) / (second / (1 - 0.95**step)).sqrt()


def test_quantized_differences_track_the_main_weights_for_200_steps() -> None:
    numel, bits = 3 * WEIGHT_GROUP + 500, 4
    main = 0.02 * torch.randn(numel, generator=torch.Generator().manual_seed(7))
    replica = main.to(torch.bfloat16)
    layout = MessageLayout(numel=numel, bits=bits, group_size=WEIGHT_GROUP)
    message = torch.empty(layout.nbytes, dtype=torch.uint8)
    contraction = math.sqrt(1 - guaranteed_delta(bits, WEIGHT_GROUP))
    largest_update, largest_cast, gaps, casts, directs = 0.0, 0.0, [], [], []
    for update in adam_like_updates(numel, 200, learning_rate=3e-4):
        main = main - update
        before = (main.double() - replica.double()).norm().item()
        ops.subtract_quantize(main, replica, message, bits, WEIGHT_GROUP, False, 0, 0)
        ops.dequantize_add(message.unsqueeze(0), replica.unsqueeze(0), bits, WEIGHT_GROUP, True)
        # One step of the paper's recursion. bf16 rounds by at most 2**-8 of a value, fp32 by 2**-24.
        gap = (main.double() - replica.double()).norm().item()
        cast = 2**-8 * replica.double().norm().item() + 2**-23 * main.double().norm().item()
        assert gap <= contraction * before + cast
        largest_update = max(largest_update, update.double().norm().item())
        largest_cast = max(largest_cast, cast)
        gaps.append(gap / main.double().norm().item())
        casts.append(relative_mse(main.to(torch.bfloat16), main))
        directs.append(relative_mse(quantize_once(main, bits, WEIGHT_GROUP), main))
    # Unrolled: a geometric series, whatever the number of steps.
    bound = (contraction * largest_update + largest_cast) / (1 - contraction)
    assert max(gaps) * main.double().norm().item() <= bound
    # In fact the replica is about as close as a plain bf16 copy, and direct quantization is far off.
    differences = [gap**2 for gap in gaps]
    assert sum(differences) <= 2 * sum(casts)
    assert sum(directs) >= 1000 * sum(differences)


@pytest.mark.parametrize("stochastic", [False, True])
def test_residual_is_not_lost_but_sent_later(stochastic: bool) -> None:
    # With the main weights at rest, repeated differences bring an fp32 replica to them.
    main = student_t(WEIGHT_GROUP, seed=1)
    replica = torch.zeros(1, WEIGHT_GROUP)
    layout = MessageLayout(numel=WEIGHT_GROUP, bits=4, group_size=WEIGHT_GROUP)
    message = torch.empty(layout.nbytes, dtype=torch.uint8)
    for step in range(40):
        ops.subtract_quantize(main, replica[0], message, 4, WEIGHT_GROUP, stochastic, *keys(0, step=step))
        ops.dequantize_add(message.unsqueeze(0), replica, 4, WEIGHT_GROUP, True)
    # The largest residual falls to half a level (nearest) or a level (stochastic) of 7 per step.
    assert (replica[0] - main).abs().max().item() <= 2.0**-23 * main.abs().max().item()


# Counterexample 4.1: f(w) = w1**2 + w2**2, gradient (4 w1, 0) or (0, 4 w2) with probability 1/2 each.
# In rational numbers, hence exact.

ETA = Fraction(1, 10)
START = (Fraction(1), Fraction(-1))
Point = tuple[Fraction, Fraction]


def ternary(point: Point) -> Point:
    """Nearest multiple of the largest magnitude: each coordinate becomes -s, 0 or s."""
    largest = max(abs(x) for x in point)
    if not largest:
        return point
    return (round(point[0] / largest) * largest, round(point[1] / largest) * largest)


def gradient_step(point: Point, at: Point, coordinate: int) -> Point:
    """Move a point by the stochastic gradient taken at another."""
    moved = list(point)
    moved[coordinate] -= ETA * 4 * at[coordinate]
    return (moved[0], moved[1])


def coordinates(steps: int) -> list[int]:
    """Which of the two gradients each step draws."""
    return random.Random(5).choices((0, 1), k=steps)


def test_quantized_point_that_replaces_the_iterate_never_moves() -> None:
    # Both draws lead back to the start, so every sequence of draws does.
    assert Fraction(1, 2) < 1 - 4 * ETA < 1  # rounds to 1
    for coordinate in (0, 1):
        assert ternary(gradient_step(START, START, coordinate)) == START


def test_quantized_differences_reach_the_minimum_on_the_same_example() -> None:
    main = model = START
    draws = [0, 0]
    for coordinate in coordinates(200):
        main = gradient_step(main, model, coordinate)
        difference = ternary((main[0] - model[0], main[1] - model[1]))
        model = (model[0] + difference[0], model[1] + difference[1])
        draws[coordinate] += 1
        # One coordinate differs, and a single value is quantized without error.
        assert model == main
        shrunk = [(1 - 4 * ETA) ** count for count in draws]
        assert model == (shrunk[0], -shrunk[1])
    assert max(map(abs, model)) < Fraction(1, 10**18)


def test_direct_quantization_beside_a_main_copy_reaches_the_minimum_too() -> None:
    # The limit of the counterexample: it needs the quantized point to replace the iterate. Strategies that
    # keep full-precision main weights, like ZeRO++ as deployed, are not described by the stuck case.
    main, model = START, ternary(START)
    for coordinate in coordinates(200):
        main = gradient_step(main, model, coordinate)
        model = ternary(main)
    assert max(map(abs, model)) < Fraction(1, 10**12)

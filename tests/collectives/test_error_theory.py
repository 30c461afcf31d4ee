"""Errors of gradients and weight differences, in one step and over steps, as the paper shows them.

Seeds are fixed, so each bound is met or missed for good. The definition computes all ranks in one process;
test_properties.py shows that the collectives equal it. Layer: no process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization import definition
from sdp4bit.quantization.definition import Call
from sdp4bit.quantization.formats import with_scales
from sdp4bit.quantization.hadamard import hadamard32
from tests.oracles.integers import QMAX

GROUP = 128


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A gradient reduction over nodes x ranks_per_node ranks."""

    nodes: int
    ranks_per_node: int
    config: GradientConfig
    blocks: int = 1

    def __call__(self, gradients: Tensor, *, seed: int, step: int = 0) -> Tensor:
        """Return the mean of gradients [ranks, n], n = ranks x shard, as the shards concatenated."""
        rows = gradients.view(*2 * (self.blocks, self.nodes // self.blocks, self.ranks_per_node), -1)
        call = Call(seed=seed, number=step)
        return definition.reduce_scatter(
            rows, config=self.config, call=call, multiplier=1 / len(gradients)
        ).flatten()

    def with_config(self, **settings: Any) -> Reduction:
        """Return the reduction with other settings."""
        return replace(self, config=replace(self.config, **settings))


def student_t(*shape: int, seed: int) -> Tensor:
    """Heavy-tailed values: Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    chi_square = sum(torch.randn(shape, generator=generator).square() for _ in range(3))
    return normal / (chi_square / 3).sqrt()


def relative_mse(approximation: Tensor, exact: Tensor) -> float:
    error = approximation.double() - exact.double()
    return (error.square().sum() / exact.double().square().sum()).item()


PAPER = GradientConfig(inter_rounding="stochastic", exact_own=False)
CLUSTER = Reduction(nodes=4, ranks_per_node=8, config=PAPER)
STRATEGIES = {
    "ulq": CLUSTER.with_config(intra_bits=4, hadamard=False),
    "tlq": CLUSTER.with_config(hadamard=False),
    "tlq-hs": CLUSTER,
}


ErrorTable = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def error_table() -> ErrorTable:
    """Relative MSE of the reduced gradient of 32 ranks x 16384 values, by data and strategy.

    "independent": no two ranks agree on anything. "common": a tenth of a common heavy-tailed gradient under
    each rank's own noise; the sum then grows faster than the rounding errors.
    """
    noise = student_t(32, 32 * 512, seed=0)
    common = 0.1 * student_t(1, 32 * 512, seed=100)
    table: ErrorTable = {}
    for data, gradients in (("independent", noise), ("common", noise + common)):
        exact = gradients.double().mean(0)
        table[data] = {
            name: relative_mse(reduction(gradients, seed=0), exact) for name, reduction in STRATEGIES.items()
        }
    return table


@pytest.mark.parametrize("data", ["independent", "common"])
def test_error_falls_from_ulq_to_tlq_to_tlq_hs_by_a_factor_of_two_each(
    error_table: ErrorTable, data: str
) -> None:
    errors = error_table[data]
    assert errors["ulq"] > 2 * errors["tlq"] > 4 * errors["tlq-hs"]


@pytest.mark.parametrize(
    ("data", "name", "expected"),
    [
        ("common", "ulq", 0.136),
        ("common", "tlq", 0.054),
        ("common", "tlq-hs", 0.023),
        ("independent", "ulq", 0.18),
        ("independent", "tlq", 0.07),
        ("independent", "tlq-hs", 0.028),
    ],
)
def test_error_on_heavy_tails_has_the_documented_size(
    error_table: ErrorTable, data: str, name: str, expected: float
) -> None:
    # docs/theory.md. t(3) has no fourth moment, so even large draws differ by up to 10 %: 15 % here.
    assert error_table[data][name] == pytest.approx(expected, rel=0.15)


def test_transform_makes_heavy_tails_cost_what_gaussian_values_cost(error_table: ErrorTable) -> None:
    generator = torch.Generator().manual_seed(9)
    gaussian = torch.randn(32, 32 * 512, generator=generator)
    error = relative_mse(CLUSTER(gaussian, seed=3), gaussian.double().mean(0))
    assert error_table["independent"]["tlq-hs"] == pytest.approx(error, rel=0.1)
    # The squared error of stochastic rounding is step**2 / 6 on average; the step is E max|x| of 128 / 7,
    # rounded up.
    largest = torch.randn(4096, GROUP, generator=generator).abs().amax(-1)
    step_square = (largest / 7).square().mean().item()
    assert step_square / 6 < error < step_square / 6 * (1 + 2**-7) ** 2 * 1.05


def test_8_bits_at_both_hops_have_a_hundredth_of_the_error_of_tlq(error_table: ErrorTable) -> None:
    gradients = student_t(32, 32 * 512, seed=0)
    eight = CLUSTER.with_config(inter_bits=8, hadamard=False)
    error = relative_mse(eight(gradients, seed=0), gradients.double().mean(0))
    assert error < 0.01 * error_table["independent"]["tlq"]


# Unbiasedness. With T repetitions the mean error of an unbiased value, over its standard error, is a
# t variable with T - 1 degrees of freedom: z. Truncation to 2**-16 of a level is far below that.

REPEATS = 120
LARGEST_Z = 5.2
"""P(|z| > 5.2) is below 1e-6 for 119 degrees of freedom: 1e-3 for the largest of 1024."""
MEAN_SQUARE_MARGIN = 0.31
"""Five standard deviations of the mean of 1024 squares, each of variance 2, their sum's doubled because
the transform correlates the values of a block."""


def z_scores(reduction: Reduction, gradients: Tensor) -> Tensor:
    exact = gradients.double().mean(0)
    results = [reduction(gradients, seed=17, step=step).double() for step in range(REPEATS)]
    errors = torch.stack(results) - exact
    if not reduction.config.hadamard:
        # A value near a level moves rarely, too rarely for a normal mean; sums of 32 values do not.
        errors = hadamard32(errors)
    return errors.mean(0) / (errors.std(0) / math.sqrt(REPEATS)).clamp_min(1e-30)


def is_unbiased(z: Tensor) -> bool:
    assert z.numel() == 1024
    mean_square = z.square().mean().item()
    return z.abs().max().item() < LARGEST_Z and abs(mean_square - 1) < MEAN_SQUARE_MARGIN


SMALL = Reduction(nodes=2, ranks_per_node=2, config=PAPER)
ONE_NODE = replace(SMALL, nodes=1, ranks_per_node=4)
DITHER = {"intra_rounding": "dither", "inter_rounding": "dither"}
UNBIASED = {
    "int8 alone": ONE_NODE,
    "int4 alone": ONE_NODE.with_config(intra_bits=4),
    "tlq-hs": SMALL,
    "tlq": SMALL.with_config(hadamard=False),
    "ulq": SMALL.with_config(intra_bits=4, hadamard=False),
    "dither": SMALL.with_config(**DITHER),
    "dither, 3.5 bits": SMALL.with_config(**DITHER, inter_bits=3.5),
    "dither without a transform": SMALL.with_config(**DITHER, intra_bits=4, hadamard=False),
    "dither, int4 alone": ONE_NODE.with_config(**DITHER, intra_bits=4),
}


MIXES = {"int4 alone", "dither, int4 alone", "ulq", "dither without a transform"}
"""Operators that the others have too, put together in another way; the slow tests have them."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in MIXES else []) for n in UNBIASED]
)
def test_random_rounding_leaves_the_mean_gradient_unbiased(name: str) -> None:
    assert is_unbiased(z_scores(UNBIASED[name], student_t(4, 1024, seed=5)))


@pytest.mark.parametrize(("bits", "largest"), [(4, 7), (3.5, 5)])
def test_dither_halves_the_squared_error_of_the_same_bytes(bits: float, largest: int) -> None:
    gradients = torch.randn(32, 32 * 512, generator=torch.Generator().manual_seed(3))
    exact = gradients.double().mean(0)
    # One lossy hop, which the law describes.
    stochastic = CLUSTER.with_config(intra_bits=None, inter_bits=bits)
    errors = [
        relative_mse(reduction(gradients, seed=0), exact)
        for reduction in (stochastic, stochastic.with_config(inter_rounding="dither"))
    ]
    # The error of stochastic rounding has variance f (1 - f), on average 1/6 of a step squared; that of
    # subtractive dither 1/12 wherever the value lies. Four nodes round their sums; the transform back divides
    # variances by 32. For int4 of normal values in groups of 128 that is 0.0277 and 0.0139.
    sums = hadamard32(gradients.view(4, 8, -1).sum(1)).view(-1, GROUP)
    step_square = (sums.abs().amax(-1) / largest).square().mean()
    unit = (4 * step_square / 32 / (32 * exact).square().mean()).item()
    # The mean of 16384 squares has a standard deviation of 1 %; scales are rounded up, squared by 0.6 %.
    assert errors[0] == pytest.approx(unit / 6, rel=0.05)
    assert errors[1] == pytest.approx(unit / 12, rel=0.05)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("rounding", ["dither", "stochastic"])
def test_of_n_nodes_n_minus_1_are_rounded(nodes: int, ranks_per_node: int, rounding: str) -> None:
    config = GradientConfig(intra_bits=None, inter_rounding=rounding)
    exact_own = Reduction(nodes=nodes, ranks_per_node=ranks_per_node, config=config)
    ranks = nodes * ranks_per_node
    gradients = torch.randn(ranks, 12 * 16384, generator=torch.Generator().manual_seed(5))
    errors = [
        relative_mse(reduction(gradients, seed=0), gradients.double().mean(0))
        for reduction in (exact_own, exact_own.with_config(exact_own=False))
    ]
    # The errors of nodes are independent, and of one variance: the mean square of 1536 groups' steps, whose
    # relative standard deviation is 0.3. So the ratio's is at most 0.3 / sqrt(2 * 1536) = 0.55 %: five times.
    assert errors[0] / errors[1] == pytest.approx((nodes - 1) / nodes, rel=0.028)


@pytest.mark.parametrize("blocks", [2, 4, 8])
@pytest.mark.parametrize("rounding", ["dither", "stochastic"])
def test_blocks_of_nodes_round_sums_once_more(blocks: int, rounding: str) -> None:
    nodes, inside = 16, 16 // blocks
    config = GradientConfig(intra_bits=None, inter_rounding=rounding)
    two = Reduction(nodes=nodes, ranks_per_node=1, config=config)
    gradients = torch.randn(nodes, nodes * 8192, generator=torch.Generator().manual_seed(5))
    errors = [
        relative_mse(reduction(gradients, seed=0), gradients.double().mean(0))
        for reduction in (replace(two, blocks=blocks), two)
    ]
    # In units of one node's rounding: a rank's row is rounded on N - 1 other nodes with two levels. In blocks
    # of S it is rounded on all N nodes. The sums of the other N / S - 1 blocks are rounded again. Their
    # variance is S times that of a node, and 1.4 or 2.8 % more by the first rounding.
    first = 0.0139 if rounding == "dither" else 0.0277
    expected = (nodes + (nodes - inside) * (1 + first)) / (nodes - 1)
    # Each mean square is of at least 64 x 16 groups' steps, with a relative standard deviation of 0.3; the
    # uniform errors of 131072 values add less. Five times that.
    assert errors[0] / errors[1] == pytest.approx(expected, rel=0.05)


def test_dithers_of_senders_with_equal_values_cancel() -> None:
    # The digital shift puts the dithers of k = 2**m senders into different k-ths of a step. Of equal values
    # their sum is as exact as that of one with a step k times as small.
    reduction = Reduction(nodes=4, ranks_per_node=1, config=GradientConfig(hadamard=False, exact_own=False))
    one = torch.randn(1, 4 * 8192, generator=torch.Generator().manual_seed(4))
    gradients = one.expand(4, -1).contiguous()
    alone = relative_mse(
        replace(reduction, nodes=2)(torch.cat([one, torch.zeros_like(one)]), seed=0), one[0] / 2
    )
    together = relative_mse(reduction(gradients, seed=0), one[0].double())
    assert together == pytest.approx(alone / 16, rel=0.05)


def test_zeros_that_no_rank_had_a_gradient_for_stay_zeros() -> None:
    # As in the rows of an embedding whose tokens did not occur: noise in them would be all that Adam sees.
    gradients = torch.randn(4, 1024, generator=torch.Generator().manual_seed(9))
    untouched = torch.zeros(1024, dtype=torch.bool)
    untouched.view(-1, 64)[::3] = True  # whole blocks, within groups of 128 that hold others
    gradients[:, untouched] = 0
    narrow = ({}, {"intra_bits": 4}, {"intra_bits": 3.5, "inter_bits": 3.5})
    for reduction in (SMALL.with_config(**DITHER, **bits) for bits in narrow):
        mean = reduction(gradients, seed=0)
        assert (mean[untouched] == 0).all()
        assert (mean[~untouched] != 0).all()


def test_nearest_rounding_between_nodes_is_biased() -> None:
    nearest = SMALL.with_config(inter_rounding="nearest")
    z = z_scores(nearest, student_t(4, 1024, seed=5))
    assert not is_unbiased(z)
    assert z.square().mean().item() > 100


def test_stochastic_error_averages_out_over_steps_and_nearest_error_does_not() -> None:
    gradients = student_t(4, 1024, seed=6)
    exact = gradients.double().mean(0)
    steps = 30

    def errors(reduction: Reduction) -> tuple[float, float]:
        results = [reduction(gradients, seed=1, step=step).double() for step in range(steps)]
        single = sum(relative_mse(result, exact) for result in results) / steps
        return single, relative_mse(torch.stack(results).mean(0), exact)

    single, averaged = errors(SMALL)
    # 1 / steps in expectation; 1024 values estimate it to about sqrt(2 * 2 / 1024) = 6 %, five times that.
    assert averaged == pytest.approx(single / steps, rel=0.31)
    single_nearest, averaged_nearest = errors(SMALL.with_config(inter_rounding="nearest"))
    assert single_nearest < single
    assert averaged_nearest > 10 * averaged


# -- weight differences: contraction, tracking --------------------------------------------------------


WEIGHT_GROUP = 2048


def transmitted(values: Tensor, bits: float, group_size: int, clip: float = 1.0) -> Tensor:
    """Return the values that arrive of values [n], rounded to nearest."""
    sent = definition.pad(values)
    return definition.transmit(sent, bits=bits, group_size=group_size, clip=clip)[: len(values)]


def guaranteed_delta(bits: float, group_size: int) -> float:
    """Return delta of nearest rounding for any group: |C(v) - v|**2 <= (1 - delta) |v|**2 (definition 4.2).

    In units of the scale the largest value m is at least qmax (1 - 2**-7), with an error of at most 1/2.
    Every other value x has an error of at most min(|x|, 1/2). The ratio is worst when all others are 1/2.
    """
    largest = (QMAX[bits] * (1 - 2**-7) * (1 - 2**-20)) ** 2
    others = (group_size - 1) / 4
    return 1 - (others + 1 / 4) * (1 + 2**-14) / (others + largest)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(finite, min_size=1, max_size=64),
    st.sampled_from(with_scales()),
    st.sampled_from([1.0, 0.6, 0.1]),
    st.integers(0, 2**20),
)
def test_nearest_rounding_contracts_every_group(
    some: list[float], bits: float, clip: float, seed: int
) -> None:
    values = torch.tensor(some)[torch.arange(64) % len(some)]
    if seed % 2:  # the worst case: one large value, all others near half a level
        values[1:] = values[0].abs() / QMAX[bits] * (0.49 + 0.02 * (seed % 53) / 52)
    error = (transmitted(values, bits, 64, clip).double() - values.double()).abs()
    magnitudes = values.double().abs()
    # No value moves away, and the largest comes nearer, however far it is clipped: differences die out. At a
    # tie the rounding of the reciprocal may choose the farther level.
    assert (error <= magnitudes * (1 + 2**-14)).all()
    if magnitudes.max() >= 2.0**-99:
        assert error[magnitudes == magnitudes.max()].max() <= (1 - clip / 2) * magnitudes.max()
        if clip == 1:
            norm = magnitudes.square().sum().item()
            assert error.square().sum().item() <= (1 - guaranteed_delta(bits, 64)) * norm


def test_guaranteed_contraction_of_the_weight_group_is_positive_and_almost_reached() -> None:
    delta = guaranteed_delta(4, WEIGHT_GROUP)
    assert 0.085 < delta < 0.087
    values = torch.full((WEIGHT_GROUP,), 0.4999)
    values[0] = 6.99  # a scale of exactly one
    error = relative_mse(transmitted(values, 4, WEIGHT_GROUP), values)
    assert 1 - delta - 0.01 < error <= 1 - delta


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
    numel, config = 3 * WEIGHT_GROUP + 500, WeightConfig()
    main = 0.02 * torch.randn(1, numel, generator=torch.Generator().manual_seed(7))
    replica = main.to(torch.bfloat16)
    contraction = math.sqrt(1 - guaranteed_delta(4, WEIGHT_GROUP))
    largest_update, largest_cast, gaps, casts, directs = 0.0, 0.0, [], [], []
    for update in adam_like_updates(numel, 200, learning_rate=3e-4):
        main = main - update
        before = (main.double() - replica.double()).norm().item()
        replica = definition.refresh(replica, main, config=config)
        # One step of the paper's recursion. bf16 rounds by at most 2**-8 of a value, fp32 by 2**-24.
        gap = (main.double() - replica.double()).norm().item()
        cast = 2**-8 * replica.double().norm().item() + 2**-23 * main.double().norm().item()
        assert gap <= contraction * before + cast
        largest_update = max(largest_update, update.double().norm().item())
        largest_cast = max(largest_cast, cast)
        gaps.append(gap / main.double().norm().item())
        casts.append(relative_mse(main.to(torch.bfloat16), main))
        directs.append(relative_mse(transmitted(main[0], 4, WEIGHT_GROUP), main[0]))
    # Unrolled: a geometric series, whatever the number of steps.
    bound = (contraction * largest_update + largest_cast) / (1 - contraction)
    assert max(gaps) * main.double().norm().item() <= bound
    # In fact the replica is about as close as a plain bf16 copy, and direct quantization is far off.
    differences = [gap**2 for gap in gaps]
    assert sum(differences) <= 2 * sum(casts)
    assert sum(directs) >= 1000 * sum(differences)


def test_residual_is_not_lost_but_sent_later() -> None:
    # With the main weights at rest, repeated differences bring an fp32 replica to them.
    main = student_t(1, WEIGHT_GROUP, seed=1)
    replica = torch.zeros_like(main)
    for _ in range(40):
        replica = definition.refresh(replica, main, config=WeightConfig())
    # The largest residual falls to half a level of 7 per step.
    assert (replica - main).abs().max().item() <= 2.0**-23 * main.abs().max().item()

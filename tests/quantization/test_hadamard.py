"""The transform is the Sylvester matrix, exactly where fp32 is exact and in a fixed order elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization.hadamard import INVERSE_FACTOR, hadamard32

repeatable = settings(deadline=None, derandomize=True)

# Sums of 32 * 32 integers below 2**13 stay below 2**24, where fp32 holds every integer.
integers = st.integers(-(2**13), 2**13)
blocks = st.lists(integers, min_size=32, max_size=32)


def sylvester(order: int) -> Tensor:
    """H(1) = 1, H(2n) = [[H, H], [H, -H]], in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def random_integers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**13), 2**13, shape, generator=generator).float()


def test_columns_are_the_sylvester_matrix() -> None:
    assert torch.equal(hadamard32(torch.eye(32)).double(), sylvester(32))


@repeatable
@given(blocks)
def test_equals_the_matrix_product_on_integers(block: list[int]) -> None:
    values = torch.tensor(block, dtype=torch.float64)
    assert torch.equal(hadamard32(values.float()).double(), sylvester(32) @ values)


def test_twice_with_the_inverse_factor_is_the_identity() -> None:
    values = random_integers(3, 96)
    assert torch.equal(hadamard32(hadamard32(values)) * INVERSE_FACTOR, values)


def test_blocks_do_not_mix_and_rows_do_not_either() -> None:
    values = random_integers(3, 5, 96)
    whole = hadamard32(values)
    assert whole.shape == values.shape
    for row in range(3):
        for column in range(5):
            for start in (0, 32, 64):
                piece = values[row, column, start : start + 32].contiguous()
                assert torch.equal(whole[row, column, start : start + 32], hadamard32(piece))


def test_rounding_follows_the_order_of_strides() -> None:
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * 1e3

    def scalar_butterflies(block: list[float], strides: tuple[int, ...]) -> list[float]:
        rounded = torch.tensor(block)
        for stride in strides:
            mixed = rounded.clone()
            for i in range(32):
                if not i & stride:
                    mixed[i] = rounded[i] + rounded[i + stride]
                    mixed[i + stride] = rounded[i] - rounded[i + stride]
            rounded = mixed
        return rounded.tolist()

    transformed = hadamard32(values).tolist()
    in_order = [scalar_butterflies(row, (1, 2, 4, 8, 16)) for row in values.tolist()]
    backwards = [scalar_butterflies(row, (16, 8, 4, 2, 1)) for row in values.tolist()]
    assert transformed == in_order
    assert transformed != backwards  # the order is visible in the last bits


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_value_spoils_its_block_only(bad: float) -> None:
    values = random_integers(4, 32)
    values[2, 7] = bad
    transformed = hadamard32(values)
    assert not transformed[2].isfinite().any()
    assert transformed[[0, 1, 3]].isfinite().all()

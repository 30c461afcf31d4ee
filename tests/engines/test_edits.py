"""The size of an edit that is sent as a difference; no process."""

from __future__ import annotations

import math

import torch

from sdp4bit.collectives.weights import LARGEST_SMALL_EDIT, change_squares, is_large_change


def test_an_edit_is_large_above_a_part_of_the_norm() -> None:
    held = torch.full((64,), 2.0)
    for factor, expected in ((0.99, False), (1.01, True), (8.0, True)):
        squares = change_squares(held * (1 + factor * LARGEST_SMALL_EDIT), held)
        # Of the new norm, which is larger than the old one by less than a hundredth.
        assert bool(is_large_change(squares)) == expected, factor
    squares = torch.tensor([[1.0, 128.0**2], [math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf], [0, 0]])
    assert is_large_change(squares).tolist() == [False, True, True, True, False]


def test_a_change_is_taken_in_fp32() -> None:
    main, held = torch.tensor([1 + 2**-7]).bfloat16(), torch.tensor([2**-9]).bfloat16()
    assert main - held == main  # in bf16
    assert change_squares(main, held).tolist() == [(1 + 2**-7 - 2**-9) ** 2, (1 + 2**-7) ** 2]

"""Any call of an operator: numba gives the reference's bits and writes all of them, or the call is refused.

Layer: no process. The cases are drawn, smallest first if one fails; see tests/quantization/property_cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="needs numba")

from sdp4bit.kernels.cpu import programs
from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import with_scales
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, hadamard32
from sdp4bit.quantization.layout import MessageLayout
from tests.kernels.byte_tests import compare
from tests.quantization import property_cases as draws
from tests.quantization.property_cases import PROFILES, hold

QMAX = {2: 1, 3: 3, 3.5: 5, 4: 7, 8: 127}


@pytest.fixture(autouse=True)
def any_threads() -> Iterator[None]:
    """The least of work is divided among the threads that a case draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_VALUES_PER_THREAD", 1)
        previous = torch.get_num_threads()
        yield
        torch.set_num_threads(previous)


@PROFILES
@pytest.mark.parametrize("name", draws.CALLS)
def test_back_ends_agree(name: str, profile: settings) -> None:
    def check(case: tuple[int, tuple[Tensor, dict[str, Any]]]) -> None:
        threads, (first, named) = case
        torch.set_num_threads(threads)
        compare(getattr(ops, name), first, backend="numba", **named)

    cases = st.tuples(st.sampled_from([1, 2]), draws.CALLS[name]())
    hold(profile, cases, check, name=name)


# Meaning of the bits


@st.composite
def round_trips(draw: st.DrawFn) -> tuple[Any, ...]:
    numel = draw(draws.lengths)
    values = draw(draws.tensors((1, 1, numel), dtype=torch.float32))
    layout = MessageLayout(
        numel=numel, bits=draw(st.sampled_from(with_scales())), group_size=draw(draws.group_sizes)
    )
    # The only message of a sum is sender 0's.
    rounding = draw(draws.roundings.map(lambda key: key and key._replace(sender=0)))
    return values, layout, draw(draws.transforms), rounding


def check_round_trip(case: tuple[Any, ...]) -> None:
    """A finite group comes back within one level of each value, half of one if it was rounded to nearest or
    its dither is taken off, before the transform back.
    """
    values, layout, hadamard, rounding = case
    numel, bits, group_size = layout.numel, layout.bits, layout.group_size
    values = values.nan_to_num(0.0, 0.0, 0.0).clamp(-1e30, 1e30)
    message, result = torch.zeros(1, layout.nbytes, dtype=torch.uint8), torch.full((numel,), math.nan)
    with ops.use_backend("numba"):
        named = {"layout": layout, "hadamard": hadamard}
        ops.hadamard_quantize(values, out=message, rounding=rounding, **named)
        factor = INVERSE_FACTOR if hadamard else 1.0
        dither = rounding if rounding and rounding.dither else None
        ops.dequantize_reduce_hadamard(message, out=result, multiplier=factor, **named, dither=dither)
    padded = torch.zeros(-(-numel // 32) * 32)
    padded[:numel] = values.view(-1)
    transformed = hadamard32(padded) if hadamard else padded
    error = (result.double() - values.view(-1).double()).abs()
    for start in range(0, numel, group_size):
        largest = float(transformed[start : start + group_size].abs().max())
        # A level is the scale, at most 1 + 2**-7 times largest / qmax; below 2**-100 all is zero. A sum of 32
        # errors of a level each, over 32, is a level; fp32 sums are 2**-21 of the largest off.
        level = largest / QMAX[bits] * (1 + 2**-6)
        level *= 1.0 if rounding and not rounding.dither else 0.5 + 2**-8
        bound = level + largest * 2**-18 + 2.0**-100
        assert float(error[start : start + group_size].max()) <= bound


@PROFILES
def test_finite_values_come_back_within_a_level(profile: settings) -> None:
    hold(profile, round_trips(), check_round_trip)

"""A call of an operator with one argument that does not fit is refused, and nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import MAX_ELEMENTS
from tests.kernels.kernel_buffers import POISON, bits_of, guarded_messages, whole
from tests.quantization.property_cases import PROFILES, hold

NUMEL, BITS, GROUP, ROWS, PARTS = 128, 4, 64, 2, 3
"""A row without padding: one value more has another layout."""
LAYOUT = MessageLayout(numel=NUMEL, bits=BITS, group_size=GROUP)
PARTED = MessageLayout(numel=NUMEL, bits=BITS, group_size=GROUP, parts=PARTS)


@pytest.fixture(autouse=True, params=["reference", "numba"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "numba":
        pytest.importorskip("numba", reason="needs numba")
    with ops.use_backend(request.param):
        yield


def messages(count: int, layout: MessageLayout) -> Tensor:
    return torch.full((count, layout.nbytes), POISON, dtype=torch.uint8)


def valid_calls() -> dict[str, dict[str, Any]]:
    """A call of each operator that fits."""
    rounding = {"stochastic": True, "k0": 1, "k1": 2}
    numbering = {**rounding, "first": 32, "row_stride": 128}
    sizes = {"bits": BITS, "group_size": GROUP}
    return {
        "subtract_quantize": {
            "main": torch.ones(NUMEL),
            "replica": torch.zeros(NUMEL, dtype=torch.bfloat16),
            "out": guarded_messages(1, LAYOUT)[0],
            **sizes,
            **rounding,
        },
        "dequantize_add": {
            "messages": messages(ROWS, LAYOUT),
            "replica": torch.zeros(ROWS, NUMEL, dtype=torch.bfloat16),
            **sizes,
            "accumulate": True,
        },
        "hadamard_quantize": {
            "values": torch.ones(ROWS, PARTS, NUMEL),
            "out": guarded_messages(ROWS, PARTED),
            **sizes,
            "hadamard": True,
            **numbering,
            "signs": 5,
        },
        "dequantize_reduce_quantize": {
            "messages": messages(ROWS, PARTED),
            "out": guarded_messages(PARTS, LAYOUT),
            "numel": NUMEL,
            **{f"{name}_{end}": value for end in ("in", "out") for name, value in sizes.items()},
            **numbering,
        },
        "dequantize_reduce_hadamard": {
            "messages": messages(ROWS, LAYOUT),
            "out": torch.zeros(NUMEL),
            **sizes,
            "hadamard": True,
            "multiplier": 0.5,
            "signs": 5,
        },
    }


WRITTEN = {name: "replica" if name == "dequantize_add" else "out" for name in valid_calls()}

junk = st.sampled_from([None, "4", b"4", 4.5, math.nan, [4], {}, object(), np.ones(3), 2**70, -(2**70)])
"""What no argument can be, save None for the replica of a difference."""
wrong_bits = st.sampled_from([-4, 0, 1, 2, 3, 5, 7, 9, 16, 31, 33, 64, 2**40, True, False])
wrong_group_sizes = st.sampled_from([-64, -1, 0, 1, 31, 33, 48, 65, 100, 2**40 + 1, True])
wrong_numbers = st.sampled_from([-32, -1, 1, 31, 33, MAX_ELEMENTS, 2**40, -(2**40)])
wrong_keys = st.sampled_from([-1, 1 << 32, 1 << 40, -(1 << 31)])
wrong_signs = st.sampled_from([-1, -(1 << 31), 1 << 32, (1 << 32) + 5])
wrong_lengths = st.sampled_from([-100, -1, 0, 63, 64, 129, 1 << 40])
wrong_dtypes = st.sampled_from(
    [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64, torch.uint8, torch.float32]
)


def _misaligned(tensor: Tensor, offset: int) -> Tensor:
    """Messages whose rows begin where a kernel must not write."""
    rows, length = tensor.shape if tensor.dim() == 2 else (1, tensor.shape[0])
    buffer = torch.full((rows, length + 32), POISON, dtype=torch.uint8)
    view = buffer[:, offset : offset + length]
    return view if tensor.dim() == 2 else view[0]


def _strided(tensor: Tensor) -> Tensor:
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)[..., ::2]


shape_changes: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda x: torch.cat([x, x[..., -16:]], -1).clone(),
    "shorter": lambda x: x[..., :-48].clone(),
    "empty": lambda x: x[..., :0].clone(),
    "one more row": lambda x: torch.cat([x, x[-1:]]).clone(),
    "one more dimension": lambda x: x.unsqueeze(0).clone(),
    "no dimension": lambda x: x.new_zeros(()),
    "flat": lambda x: x.flatten().clone() if x.dim() > 1 else x.view(1, 1, -1).clone(),
    "every other value": _strided,
}
"""Each makes a tensor of any argument one that does not fit; the first of a reduction may have more rows."""


kinds = {
    "bits": wrong_bits,
    "group_size": wrong_group_sizes,
    "first": wrong_numbers,
    "row_stride": wrong_numbers,
    "k0": wrong_keys,
    "k1": wrong_keys,
    "numel": wrong_lengths,
    "signs": wrong_signs,
}


@st.composite
def wrong_arguments(draw: st.DrawFn) -> tuple[str, str, str, Any]:
    """An operator, the argument that does not fit, and what is wrong with it."""
    name = draw(st.sampled_from(sorted(WRITTEN)))
    call = valid_calls()[name]
    wrong = draw(st.sampled_from(sorted(call)))
    value = call[wrong]
    if not isinstance(value, Tensor):
        kind = wrong.removesuffix("_in").removesuffix("_out")
        if isinstance(value, bool):  # PyTorch takes None and numbers, too
            values = junk.filter(lambda x: not isinstance(x, float | int | None))
        elif isinstance(value, float):
            values = junk.filter(lambda x: not isinstance(x, float | int))
        else:
            values = junk | kinds[kind]
        return name, wrong, "value", draw(values)
    changes = [*shape_changes, "dtype", "value"]
    if value.dtype == torch.uint8:
        changes.append("misaligned")
    if wrong == "messages" and name != "dequantize_add":
        changes.remove("one more row")
    change = draw(st.sampled_from(changes))
    how: Any = None
    if change == "value":
        how = draw(junk.filter(lambda x: x is not None or wrong != "replica" or name == "dequantize_add"))
    elif change == "misaligned":
        how = draw(st.integers(1, 15))
    elif change == "dtype":
        fitting = {value.dtype, torch.float32} if value.is_floating_point() else {value.dtype}
        how = draw(wrong_dtypes.filter(lambda dtype: dtype not in fitting))
    return name, wrong, change, how


def check_refused(case: tuple[str, str, str, Any]) -> None:
    """ValueError or, from PyTorch's own check of types, RuntimeError; nothing has been written."""
    name, wrong, change, how = case
    call = valid_calls()[name]
    if change == "value":
        call[wrong] = how
    elif change == "misaligned":
        call[wrong] = _misaligned(call[wrong], how)
    elif change == "dtype":
        call[wrong] = call[wrong].to(how)
    else:
        call[wrong] = shape_changes[change](call[wrong])
    tensors = [value for value in call.values() if isinstance(value, Tensor)]
    before = [whole(tensor).clone() for tensor in tensors]
    with pytest.raises((ValueError, RuntimeError)) as error:
        getattr(ops, name)(*call.values())
    assert str(error.value).strip(), "refused without a word"
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(whole(tensor), copy)


def test_valid_calls_are_not_refused() -> None:
    for name, call in valid_calls().items():
        before = bits_of(call[WRITTEN[name]]).clone()
        getattr(ops, name)(*call.values())
        assert not torch.equal(bits_of(call[WRITTEN[name]]), before)


@PROFILES
def test_an_argument_that_does_not_fit_is_refused(profile: settings) -> None:
    hold(profile, wrong_arguments(), check_refused)


def test_multipliers_beyond_fp32_are_infinite() -> None:
    call = valid_calls()["dequantize_reduce_hadamard"] | {"multiplier": 1e300}
    ops.dequantize_reduce_hadamard(*call.values())
    assert call["out"].isinf().any() and not call["out"].isfinite().all()

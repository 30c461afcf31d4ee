"""Any call of an operator: numba gives the reference's bits and writes all of them, or the call is refused.

Layer: no process. The cases are drawn, smallest first if one fails; see tests/quantization/property_cases.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="needs numba")

from sdp4bit.kernels.cpu import backend as cpu
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, hadamard32
from sdp4bit.quantization.layout import MessageLayout
from tests.kernels.kernel_buffers import bits_of, guarded_messages, guarded_values, whole
from tests.quantization import property_cases as draws
from tests.quantization.property_cases import PROFILES, hold

QMAX = {4: 7, 8: 127}


@pytest.fixture(autouse=True)
def any_threads() -> Iterator[None]:
    """The least of work is divided among the threads that a case draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_VALUES_PER_THREAD", 1)
        previous = torch.get_num_threads()
        yield
        torch.set_num_threads(previous)


def compare(operator: Callable[..., None], inputs: list[Tensor | None], out: Tensor, *rest: Any) -> None:
    """The operator writes the same bits on both back ends, all of them, and nothing around them or before.

    Args:
        inputs: the tensors before `out`.
        out: fp32, bf16, fp16, or a message with `rest[0]` bits or, of dequantize_reduce_quantize, `rest[3]`.
    """
    exact = torch.zeros_like(out, memory_format=torch.contiguous_format)
    kept = [None if tensor is None else tensor.clone() for tensor in inputs]
    before = whole(out).clone()
    with ops.use_backend("reference"):
        operator(*inputs, exact, *rest)
    with ops.use_backend("numba"):
        operator(*inputs, out, *rest)
    same_bits(out, exact, floats=out.dtype == torch.uint8 and 32 in rest[:5:3])
    written = out.clone()
    out.copy_(before.as_strided(out.shape, out.stride(), out.storage_offset()))
    same_bits(whole(out), before)  # what is around the output
    out.copy_(written)
    for tensor, copy in zip(inputs, kept, strict=True):
        if tensor is not None and copy is not None:
            same_bits(tensor, copy)


def same_bits(actual: Tensor, expected: Tensor, *, floats: bool = False) -> None:
    """Bit for bit, but any NaN is as good as another."""
    if floats and actual.numel():
        actual, expected = (x.contiguous().view(torch.float32) for x in (actual, expected))
    different = bits_of(actual.contiguous()) != bits_of(expected.contiguous())
    assert not different.any(), f"{int(different.sum())} differ, first at {different.nonzero()[:8].tolist()}"


class TestBackEndsAgree:
    @PROFILES
    def test_subtract_quantize(self, profile: settings) -> None:
        hold(profile, subtract_quantize_calls(), check_subtract_quantize)

    @PROFILES
    def test_dequantize_add(self, profile: settings) -> None:
        hold(profile, dequantize_add_calls(), check_dequantize_add)

    @PROFILES
    def test_hadamard_quantize(self, profile: settings) -> None:
        hold(profile, hadamard_quantize_calls(), check_hadamard_quantize)

    @PROFILES
    def test_dequantize_reduce_quantize(self, profile: settings) -> None:
        hold(profile, dequantize_reduce_quantize_calls(), check_dequantize_reduce_quantize)

    @PROFILES
    def test_dequantize_reduce_hadamard(self, profile: settings) -> None:
        hold(profile, dequantize_reduce_hadamard_calls(), check_dequantize_reduce_hadamard)


threads = st.sampled_from([1, 2])


@st.composite
def subtract_quantize_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Threads; then the arguments."""
    numel, bits, group_size = draw(draws.lengths), draw(draws.bits), draw(draws.group_sizes)
    main = draw(draws.laid_out(draw(draws.tensors((numel,)))))
    replica = draw(st.none() | draws.tensors((numel,)).flatmap(draws.laid_out))
    out = guarded_messages(1, MessageLayout(numel=numel, bits=bits, group_size=group_size))[0]
    return draw(threads), main, replica, out, bits, group_size, draw(st.booleans()), *draw(draws.keys)


def check_subtract_quantize(call: tuple[Any, ...]) -> None:
    threads, main, replica, out, *rest = call
    torch.set_num_threads(threads)
    compare(ops.subtract_quantize, [main, replica], out, *rest)


@st.composite
def dequantize_add_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Threads; then the arguments."""
    numel, bits, group_size = draw(draws.lengths), draw(draws.bits), draw(draws.group_sizes)
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    rows = draw(st.integers(0, 4))
    messages = draw(draws.received_messages(rows, layout))
    replica = draw(draws.tensors((rows, numel)))
    return (
        draw(threads),
        messages,
        replica,
        draw(draws.laid_out(replica)),
        bits,
        group_size,
        draw(st.booleans()),
    )


def check_dequantize_add(call: tuple[Any, ...]) -> None:
    threads, messages, replica, strided, *rest = call
    torch.set_num_threads(threads)
    around = whole(strided).clone()
    with ops.use_backend("reference"):
        ops.dequantize_add(messages, replica, *rest)
    with ops.use_backend("numba"):
        ops.dequantize_add(messages, strided, *rest)
    same_bits(strided, replica)
    strided.copy_(around.as_strided(strided.shape, strided.stride(), strided.storage_offset()))
    same_bits(whole(strided), around)


@st.composite
def hadamard_quantize_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Threads; then the arguments."""
    numel, bits, group_size = draw(draws.lengths), draw(draws.bits), draw(draws.group_sizes)
    destinations, parts = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    values = draw(draws.laid_out(draw(draws.tensors((destinations, parts, numel)))))
    if destinations and draw(st.integers(0, 9)) == 0:
        values = values[:1].expand(destinations, -1, -1)
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    hadamard, signs = draw(draws.transforms)
    numbering = (draw(st.booleans()), *draw(draws.keys), *draw(draws.numberings))
    out = guarded_messages(destinations, layout)
    return draw(threads), values, out, bits, group_size, hadamard, *numbering, signs


def check_hadamard_quantize(call: tuple[Any, ...]) -> None:
    threads, values, out, *rest = call
    torch.set_num_threads(threads)
    compare(ops.hadamard_quantize, [values], out, *rest)


@st.composite
def dequantize_reduce_quantize_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Threads; then the arguments."""
    numel, parts = draw(draws.lengths), draw(st.integers(1, 3))
    bits_in, group_size_in = draw(draws.bits), draw(draws.group_sizes)
    bits_out, group_size_out = draw(draws.bits), draw(draws.group_sizes)
    received = MessageLayout(numel=numel, bits=bits_in, group_size=group_size_in, parts=parts)
    sent = MessageLayout(numel=numel, bits=bits_out, group_size=group_size_out)
    messages = draw(draws.received_messages(draw(draws.counts), received))
    numbering = (draw(st.booleans()), *draw(draws.keys), *draw(draws.numberings))
    sizes = (numel, bits_in, group_size_in, bits_out, group_size_out)
    return draw(threads), messages, guarded_messages(parts, sent), *sizes, *numbering


def check_dequantize_reduce_quantize(call: tuple[Any, ...]) -> None:
    threads, messages, out, *rest = call
    torch.set_num_threads(threads)
    compare(ops.dequantize_reduce_quantize, [messages], out, *rest)


@st.composite
def dequantize_reduce_hadamard_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Threads; then the arguments."""
    numel, bits, group_size = draw(draws.lengths), draw(draws.bits), draw(draws.group_sizes)
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    messages = draw(draws.received_messages(draw(draws.counts), layout))
    poison = torch.full((numel,), math.nan, dtype=draw(draws.dtypes))
    out = guarded_values(poison, offset=draw(st.integers(0, 8)))
    hadamard, signs = draw(draws.transforms)
    multiplier = draw(st.sampled_from([1.0, 1 / 32, 1 / 96, -0.3, 0.0, 1e30, 1e-44, math.inf]))
    return draw(threads), messages, out, bits, group_size, hadamard, multiplier, signs


def check_dequantize_reduce_hadamard(call: tuple[Any, ...]) -> None:
    threads, messages, out, *rest = call
    torch.set_num_threads(threads)
    compare(ops.dequantize_reduce_hadamard, [messages], out, *rest)


# What the bits mean


@st.composite
def round_trips(draw: st.DrawFn) -> tuple[Any, ...]:
    numel = draw(draws.lengths)
    values = draw(draws.tensors((1, 1, numel), dtype=torch.float32))
    sizes = (draw(st.sampled_from([4, 8])), draw(draws.group_sizes))
    return values, *sizes, *draw(draws.transforms), draw(st.booleans()), *draw(draws.keys)


def check_round_trip(case: tuple[Any, ...]) -> None:
    """A finite group comes back within one level of each value, before the transform back."""
    values, bits, group_size, hadamard, signs, stochastic, k0, k1 = case
    numel = values.shape[-1]
    values = values.nan_to_num(0.0, 0.0, 0.0).clamp(-1e30, 1e30)
    message = torch.zeros(1, MessageLayout(numel=numel, bits=bits, group_size=group_size).nbytes).byte()
    result = torch.full((numel,), math.nan)
    with ops.use_backend("numba"):
        ops.hadamard_quantize(
            values, message, bits, group_size, hadamard, stochastic, k0, k1, 0, 0, signs
        )  # fmt: skip
        factor = INVERSE_FACTOR if hadamard else 1.0
        ops.dequantize_reduce_hadamard(message, result, bits, group_size, hadamard, factor, signs)
    padded = torch.zeros(-(-numel // 32) * 32)
    padded[:numel] = values.view(-1)
    changed = torch.tensor([-1.0 if signs >> lane & 1 else 1.0 for lane in range(32)])
    transformed = hadamard32((padded.view(-1, 32) * changed).view(-1)) if hadamard else padded
    error = (result.double() - values.view(-1).double()).abs()
    for start in range(0, numel, group_size):
        largest = float(transformed[start : start + group_size].abs().max())
        # A level is the scale, at most 1 + 2**-7 times largest / qmax; below 2**-100 all is zero. A sum of 32
        # errors of a level each, over 32, is a level; fp32 sums of 32 values err by 2**-21 of the largest.
        level = largest / QMAX[bits] * (1 + 2**-6) * (1.0 if stochastic else 0.5 + 2**-12)
        bound = level + largest * 2**-18 + 2.0**-100
        assert float(error[start : start + group_size].max()) <= bound


@PROFILES
def test_finite_values_come_back_within_a_level(profile: settings) -> None:
    hold(profile, round_trips(), check_round_trip)

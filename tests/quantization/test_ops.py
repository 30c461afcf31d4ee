"""Equalities between calls of the operators, and the choice of a back end."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import ops, reference
from sdp4bit.quantization.formats import with_scales
from sdp4bit.quantization.random import MAX_ELEMENTS, RoundingKey, derive_keys
from tests.quantization.operator_calls import KEY, empty_messages, layout_of, quantized, values_of
from tests.ranks import on_ranks


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with ops.use_backend("reference"):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values_equal_their_fp32_copies(dtype: torch.dtype) -> None:
    values, parted, layout = values_of(2, 2, 100, dtype=dtype), layout_of(100, 4, 96, parts=2), layout_of(100)
    assert torch.equal(quantized(values, parted), quantized(values.float(), parted))
    messages = quantized(values_of(2, 1, 100), layout)
    narrow, wide = torch.empty(100, dtype=dtype), torch.empty(100)
    for out in (narrow, wide):
        ops.dequantize_reduce_hadamard(
            messages, out=out, layout=layout, hadamard=True, multiplier=0.1, dither=None
        )
    assert torch.equal(narrow, wide.to(dtype))


def test_transposed_view_equals_its_copy() -> None:
    values, layout = values_of(3, 2, 100).transpose(0, 1), layout_of(100, 8, 64, parts=3)
    assert torch.equal(quantized(values, layout), quantized(values.contiguous(), layout))


@pytest.mark.parametrize("bits", with_scales())
def test_slices_of_a_row_carry_the_codes_and_scales_of_the_whole(bits: float) -> None:
    # So a pipelined reduction equals the unpipelined one bit for bit.
    numel, group_size, destinations, parts, ranks = 1000, 96, 2, 3, 2
    gradients = [values_of(destinations, parts, numel, seed=seed) for seed in range(ranks)]

    def reduced(ranges: list[tuple[int, int]]) -> Tensor:
        result = torch.empty(parts, numel)
        for start, end in ranges:
            received = layout_of(end - start, bits, group_size, parts=parts)
            sent = layout_of(end - start, min(bits, 4), group_size)
            numbered = {"first": start, "row_stride": 1024}
            messages = []
            for rank, gradient in enumerate(gradients):
                key = RoundingKey(*derive_keys(0, rank), **numbered)
                slices = gradient[..., start:end]
                messages.append(quantized(slices, received, hadamard=True, rounding=key)[1])
            summed = empty_messages(parts, sent)
            key = KEY._replace(**numbered)
            ops.dequantize_reduce_quantize(
                torch.stack(messages),
                received=received,
                out=summed,
                sent=sent,
                rounding=key,
                dither=None,
            )
            for part in range(parts):
                ops.dequantize_reduce_hadamard(
                    summed[part : part + 1],
                    out=result[part, start:end],
                    layout=sent,
                    hadamard=True,
                    multiplier=1 / 64,
                    dither=None,
                )
        return result

    whole = reduced([(0, numel)])
    assert torch.equal(reduced([(0, 480), (480, 960), (960, 1000)]), whole)
    assert torch.equal(reduced([(0, 96), (96, 1000)]), whole)


def test_row_strides_beyond_32_bits_number_the_last_element() -> None:
    values, last = values_of(1, 2, 32), MAX_ELEMENTS - 32
    both = quantized(values, layout_of(32, parts=2), rounding=KEY._replace(row_stride=last))
    alone = quantized(values[:, 1:], layout_of(32), rounding=KEY._replace(first=last))
    assert torch.equal(both[0, 16:32], alone[0, :16])


def test_named_backend_serves_the_block_and_the_previous_one_afterwards() -> None:
    with warnings.catch_warnings(), ops.use_backend("auto"):
        warnings.simplefilter("ignore")
        automatic = ops.backend_name("cpu")
        assert automatic in ("numba", "reference")
        with ops.use_backend("reference"):
            assert ops.backend_name("cpu") == ops.backend_name("cuda") == "reference"
        assert ops.backend_name("cpu") == automatic
        with pytest.raises(KeyError), ops.use_backend("reference"):
            raise KeyError
        assert ops.backend_name("cpu") == automatic
    with pytest.raises(ValueError, match="'cuda'") as error, ops.use_backend("cuda"):  # type: ignore[arg-type]
        pass
    assert all(name in str(error.value) for name in ("auto", "reference", "numba", "triton"))
    assert ops.backend_name("cpu") == "reference"


def test_operator_runs_on_the_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(reference, "hadamard_quantize", lambda values, **named: calls.append(named["layout"]))
    quantized(values_of(1, 1, 64), layout_of(64))
    assert calls == [layout_of(64)]


@pytest.mark.parametrize("name", ["reference", "numba", "triton"])
def test_backends_have_the_signatures_of_the_checked_operators(name: str) -> None:
    module = (
        reference if name == "reference" else import_module(pytest.importorskip(name) and ops._MODULE[name])
    )
    for operator in ops.CHECKS:
        checked, unchecked = (inspect.signature(getattr(each, operator)) for each in (ops, module))
        assert list(checked.parameters.values()) == list(unchecked.parameters.values()), operator


@on_ranks(1)
def test_ranks_of_tests_check() -> None:
    assert ops.is_checked()


def test_backend_of_formats_that_it_lacks_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = ModuleType("numba kernels")
    numba.FORMATS = {"int4": None}  # type: ignore[attr-defined]
    monkeypatch.setattr(ops, "_loaded", {"auto:cpu": numba})
    monkeypatch.setattr(ops, "_forced", [])
    ops._warn_of_format.cache_clear()
    assert ops.backend_of(torch.device("cpu"), [layout_of(64)]) is numba
    with pytest.warns(UserWarning, match="numba kernels has no format int8"):
        assert ops.backend_of(torch.device("cpu"), [layout_of(64), layout_of(64, 8)]) is reference


def test_unchecked_operators_are_ranges_of_a_profile() -> None:
    values, layout = values_of(1, 1, 64), layout_of(64)
    out, named = empty_messages(1, layout), {"layout": layout, "hadamard": False, "rounding": None}
    with torch.profiler.profile() as profile:
        ops.run_unchecked("hadamard_quantize", values, out=out, **named)
    assert torch.equal(out, quantized(values, layout))
    names = [event.name for event in profile.events() if event.name.startswith("sdp4bit::")]
    assert names == ["sdp4bit::hadamard_quantize"]


def test_device_without_fast_kernels_warns_once_and_uses_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "_loaded", {})
    with ops.use_backend("auto"):
        with pytest.warns(UserWarning, match="no fast kernels for xpu"):
            assert ops.backend_name("xpu") == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ops.backend_name("xpu") == "reference"


def test_missing_kernels_are_warned_about_by_the_first_process_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for local_rank, warned in ("0", 1), ("1", 0):
        monkeypatch.setattr(ops, "_loaded", {})
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with warnings.catch_warnings(record=True) as caught, ops.use_backend("auto"):
            warnings.simplefilter("always")
            assert ops.backend_name("xpu") == "reference"
        assert len(caught) == warned


def test_missing_package_is_named_in_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_loaded", {})
    monkeypatch.setattr(ops, "_is_available", lambda name: False)
    with ops.use_backend("auto"), pytest.warns(UserWarning, match=r'pip install "\.\[cpu\]"'):
        assert ops.backend_name("cpu") == "reference"
    for name, extra in ("numba", "cpu"), ("triton", "cuda"):
        with (
            pytest.raises(ModuleNotFoundError, match=rf'pip install "\.\[{extra}\]"'),
            ops.use_backend(name),
        ):
            pass

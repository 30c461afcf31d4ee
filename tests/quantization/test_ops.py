"""The operators as PyTorch sees them: registered soundly, compilable, strict about what they are given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdp4bit.config import QUANTIZED_BITS
from sdp4bit.quantization import ops, reference
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import MAX_ELEMENTS, RoundingKey, derive_keys
from tests.quantization.operator_calls import KEY, empty_messages, layout_of, quantized, values_of


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with ops.use_backend("reference"):
        yield


DITHER = KEY._replace(dither=True)

# Registration


def calls_of(name: str) -> Iterator[dict[str, Any]]:
    """Calls of an operator: every kind of argument, and None where it may be."""
    if name == "subtract_quantize":
        for layout, dtype, rounding in [
            (layout_of(4096, 4, 2048), torch.bfloat16, None),
            (layout_of(100, 8, 96), torch.float32, KEY),
            (layout_of(1, 32, 32), torch.float16, None),
            (layout_of(100, 3, 96), torch.float32, KEY),
            (layout_of(100, 2, 96), torch.bfloat16, None),
        ]:
            for replica in (values_of(layout.numel, dtype=dtype, seed=1), None):
                out = empty_messages(1, layout)[0]
                main = values_of(layout.numel)
                named = {"layout": layout, "rounding": rounding, "clip": 1.0 if layout.bits > 3 else 0.6}
                yield {"main": main, "replica": replica, "out": out, **named}
    elif name == "dequantize_add":
        for rows, layout, dtype, accumulate, dither in [
            (2, layout_of(4096, 4, 2048), torch.bfloat16, True, None),
            (3, layout_of(100, 8, 96), torch.float32, False, DITHER),
        ]:
            messages = quantized(values_of(rows, 1, layout.numel), layout)
            replica = values_of(rows, layout.numel, dtype=dtype, seed=1)
            named = {"layout": layout, "accumulate": accumulate, "dither": dither}
            yield {"messages": messages, "replica": replica, **named}
    elif name == "hadamard_quantize":
        for values, layout, hadamard, rounding in [
            (values_of(2, 3, 256), layout_of(256, 8, 128, parts=3), Hadamard(), KEY),
            (values_of(1, 2, 100, dtype=torch.bfloat16), layout_of(100, 4, 96, parts=2), None, None),
            (values_of(3, 2, 256).transpose(0, 1), layout_of(256, 4, 128, parts=3), Hadamard(6), DITHER),
        ]:
            out = empty_messages(values.shape[0], layout)
            numbered = rounding and rounding._replace(first=32, row_stride=512)
            named = {"layout": layout, "hadamard": hadamard, "rounding": numbered}
            yield {"values": values, "out": out, **named}
    elif name == "dequantize_reduce_quantize":
        for ranks, received, sent, rounding, dither in [
            (2, layout_of(256, 8, 128, parts=3), layout_of(256, 4, 128), KEY._replace(row_stride=512), None),
            (3, layout_of(100, 4, 32), layout_of(100, 8, 96), None, DITHER),
        ]:
            messages = quantized(values_of(ranks, received.parts, received.numel), received)
            out = empty_messages(received.parts, sent)
            named = {"received": received, "out": out, "sent": sent, "rounding": rounding}
            yield {"messages": messages, **named, "dither": dither}
    else:
        for ranks, layout, dtype, hadamard, dither in [
            (2, layout_of(256, 4, 128), torch.float32, Hadamard(), None),
            (2, layout_of(256, 4, 128), torch.float32, Hadamard(0xDEADBEEF), DITHER),
            (3, layout_of(100, 8, 96), torch.bfloat16, None, None),
        ]:
            messages = quantized(values_of(ranks, 1, layout.numel), layout)
            out = torch.zeros(layout.numel, dtype=dtype)
            named = {"layout": layout, "hadamard": hadamard, "multiplier": 1 / 96}
            yield {"messages": messages, "out": out, **named, "dither": dither}


WRITTEN = {
    "subtract_quantize": "out",
    "dequantize_add": "replica",
    "hadamard_quantize": "out",
    "dequantize_reduce_quantize": "out",
    "dequantize_reduce_hadamard": "out",
}


def call(name: str, arguments: dict[str, Any]) -> object:
    (_, first), *named = arguments.items()
    return getattr(ops, name)(first, **dict(named))


class _Recorded(TorchDispatchMode):
    """The operators and their arguments as numbers, which do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))


@pytest.mark.parametrize("name", WRITTEN)
def test_schema_fake_and_dispatch_are_sound(name: str) -> None:
    for arguments in calls_of(name):
        with _Recorded() as recorded:
            call(name, arguments)
        ((operator, numbers),) = recorded.calls
        assert operator is getattr(torch.ops.sdp4bit, name).default
        results = torch.library.opcheck(operator, numbers)
        assert {"test_schema", "test_faketensor", "test_aot_dispatch_dynamic"} <= set(results)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("name", "written"), WRITTEN.items())
def test_operator_changes_one_argument_and_returns_nothing(name: str, written: str) -> None:
    for before in calls_of(name):
        after = {key: a.clone() if isinstance(a, Tensor) else a for key, a in before.items()}
        assert call(name, after) is None
        for key, value in before.items():
            if isinstance(value, Tensor):
                assert torch.equal(after[key], value) == (key != written)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": None}, "layout must be .*MessageLayout"),
        ({"layout": 4}, "layout must be .*MessageLayout"),
        ({"rounding": (1, 2)}, "rounding must be .*RoundingKey"),
        ({"hadamard": True}, "hadamard must be .*Hadamard"),
        ({"signs": 5}, "signs"),
    ],
)
def test_argument_of_another_kind_is_a_type_error(change: dict[str, Any], named: str) -> None:
    arguments = next(calls_of("hadamard_quantize"))
    with pytest.raises(TypeError, match=named):
        call("hadamard_quantize", arguments | change)
    del arguments["layout"]
    with pytest.raises(TypeError, match=r"missing a required .*layout"):
        call("hadamard_quantize", arguments)


def test_whole_round_compiles_into_one_graph_with_the_same_result() -> None:
    numel, ranks, nodes = 320, 2, 3
    intra, inter = layout_of(numel, 8, 128, parts=nodes), layout_of(numel, 4, 96)
    weights = layout_of(numel, 4, 2048)
    numbered = KEY._replace(row_stride=numel)

    def round_trip(gradient: Tensor, main: Tensor, replica: Tensor) -> tuple[Tensor, Tensor]:
        sent = torch.empty(ranks, intra.nbytes, dtype=torch.uint8)
        ops.hadamard_quantize(
            gradient.view(nodes, ranks, numel).transpose(0, 1),
            out=sent,
            layout=intra,
            hadamard=Hadamard(),
            rounding=numbered,
        )
        summed = torch.empty(nodes, inter.nbytes, dtype=torch.uint8)
        ops.dequantize_reduce_quantize(
            sent, received=intra, out=summed, sent=inter, rounding=numbered, dither=None
        )
        reduced = torch.empty(numel)
        ops.dequantize_reduce_hadamard(
            summed,
            out=reduced,
            layout=inter,
            hadamard=Hadamard(),
            multiplier=1 / 192,
            dither=None,
        )
        difference = torch.empty(weights.nbytes, dtype=torch.uint8)
        ops.subtract_quantize(
            main - reduced, replica=replica[0], out=difference, layout=weights, rounding=None
        )
        updated = replica.clone()
        ops.dequantize_add(
            torch.stack([difference, difference]),
            replica=updated,
            layout=weights,
            accumulate=True,
            dither=None,
        )
        return reduced, updated

    arguments = (
        values_of(nodes * ranks * numel),
        values_of(numel, seed=1),
        values_of(2, numel, dtype=torch.bfloat16, seed=2),
    )
    expected = round_trip(*arguments)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(compiled[0], expected[0])
    assert torch.equal(compiled[1], expected[1])
    assert expected[0].abs().min() > 0


def test_records_and_sizes_that_a_compiled_function_makes() -> None:
    """A key, a transform and a layout of sizes that are symbols while it is traced."""

    def sum_of(values: Tensor, sent: Tensor, k0: int) -> Tensor:
        layout = MessageLayout(numel=values.shape[2], bits=4, group_size=64)
        rounding = RoundingKey(k0, 7, first=32)
        ops.hadamard_quantize(values, out=sent, layout=layout, hadamard=Hadamard(3), rounding=rounding)
        total = torch.empty(values.shape[2])
        ops.dequantize_reduce_hadamard(
            sent,
            out=total,
            layout=layout,
            hadamard=Hadamard(3),
            multiplier=1 / 32,
            dither=None,
        )
        return total

    compiled = torch.compile(sum_of, fullgraph=True, backend="aot_eager", dynamic=True)
    for numel in (100, 320, 77):
        values, sent = values_of(2, 1, numel), empty_messages(2, layout_of(numel, 4, 64))
        assert torch.equal(compiled(values, sent, 5), sum_of(values, sent, 5))


def test_meta_tensors_are_checked_and_nothing_is_computed() -> None:
    layout, values = layout_of(100), torch.empty(2, 1, 100, device="meta")
    out = empty_messages(2, layout, device="meta")
    named = {"layout": layout, "hadamard": Hadamard(), "rounding": None}
    assert ops.hadamard_quantize(values, out=out, **named) is None
    with pytest.raises(ValueError, match=rf"uint8 \[messages, {layout.nbytes}\]"):
        ops.hadamard_quantize(values, out=out[:, :48], **named)


# Equalities between calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values_equal_their_fp32_copies(dtype: torch.dtype) -> None:
    values, parted, layout = values_of(2, 2, 100, dtype=dtype), layout_of(100, 4, 96, parts=2), layout_of(100)
    assert torch.equal(quantized(values, parted), quantized(values.float(), parted))
    messages = quantized(values_of(2, 1, 100), layout)
    narrow, wide = torch.empty(100, dtype=dtype), torch.empty(100)
    for out in (narrow, wide):
        ops.dequantize_reduce_hadamard(
            messages, out=out, layout=layout, hadamard=Hadamard(), multiplier=0.1, dither=None
        )
    assert torch.equal(narrow, wide.to(dtype))


def test_transposed_view_equals_its_copy() -> None:
    values, layout = values_of(3, 2, 100).transpose(0, 1), layout_of(100, 8, 64, parts=3)
    assert torch.equal(quantized(values, layout), quantized(values.contiguous(), layout))


@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_slices_of_a_row_carry_the_codes_and_scales_of_the_whole(bits: int) -> None:
    # What lets a pipelined reduction equal the unpipelined one bit for bit.
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
                messages.append(quantized(slices, received, hadamard=Hadamard(), rounding=key)[1])
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
                    hadamard=Hadamard(),
                    multiplier=1 / 64,
                    dither=None,
                )
        return result

    whole = reduced([(0, numel)])
    assert torch.equal(reduced([(0, 480), (480, 960), (960, 1000)]), whole)
    assert torch.equal(reduced([(0, 96), (96, 1000)]), whole)


def test_random_bits_are_numbered_by_row_and_first() -> None:
    values = values_of(1, 2, 64)
    both = quantized(values, layout_of(64, parts=2), rounding=KEY._replace(first=96, row_stride=160))
    for part, first in ((0, 96), (1, 256)):
        row, key = values[:, part : part + 1], KEY._replace(first=first)
        alone = quantized(row, layout_of(64), rounding=key)
        assert torch.equal(both[0, 32 * part : 32 * part + 32], alone[0, :32])
        difference = torch.empty_like(alone)
        ops.subtract_quantize(
            row.flatten(), replica=None, out=difference[0], layout=layout_of(64), rounding=key
        )
        assert torch.equal(difference, alone)


def test_keys_decide_the_codes() -> None:
    values, layout = values_of(1, 1, 256), layout_of(256, 4, 128)
    message = quantized(values, layout, rounding=RoundingKey(1, 2))
    assert torch.equal(message, quantized(values, layout, rounding=RoundingKey(1, 2)))
    for other in (RoundingKey(3, 2), RoundingKey(1, 4), None):
        assert not torch.equal(message, quantized(values, layout, rounding=other))


def test_bytes_outside_the_message_are_untouched_and_padding_is_zero() -> None:
    buffer, layout = torch.full((3, 64), 0xAA, dtype=torch.uint8), layout_of(64)
    out = buffer[1:, : layout.nbytes]
    ops.hadamard_quantize(values_of(2, 1, 64), out=out, layout=layout, hadamard=None, rounding=None)
    assert (buffer[0] == 0xAA).all()
    assert (buffer[:, layout.nbytes :] == 0xAA).all()
    assert (buffer[1:, layout.payload_bytes : layout.nbytes] == 0).all()


def test_row_strides_beyond_32_bits_number_the_last_element() -> None:
    values, last = values_of(1, 2, 32), MAX_ELEMENTS - 32
    both = quantized(values, layout_of(32, parts=2), rounding=KEY._replace(row_stride=last))
    alone = quantized(values[:, 1:], layout_of(32), rounding=KEY._replace(first=last))
    assert torch.equal(both[0, 16:32], alone[0, :16])


def test_empty_rows_and_no_rows_are_allowed() -> None:
    layout, parted = layout_of(0), layout_of(0, 8, parts=3)
    assert quantized(values_of(2, 3, 0), parted).shape == (2, 0)
    messages = torch.empty(2, 0, dtype=torch.uint8)
    ops.dequantize_add(messages, replica=torch.empty(2, 0), layout=layout, accumulate=True, dither=None)
    ops.dequantize_reduce_hadamard(
        messages,
        out=torch.empty(0),
        layout=layout,
        hadamard=Hadamard(),
        multiplier=1.0,
        dither=None,
    )
    out = torch.empty(3, 0, dtype=torch.uint8)
    ops.dequantize_reduce_quantize(messages, received=parted, out=out, sent=layout, rounding=KEY, dither=None)
    ops.subtract_quantize(torch.empty(0), replica=None, out=messages[0], layout=layout, rounding=KEY)
    nothing = quantized(torch.empty(0, 1, 64), layout_of(64), hadamard=Hadamard(), rounding=KEY)
    ops.dequantize_add(
        nothing, replica=torch.empty(0, 64), layout=layout_of(64), accumulate=True, dither=None
    )


# Back ends


def test_named_backend_serves_the_block_and_the_previous_one_afterwards() -> None:
    assert ops.backend_name("cpu") == "reference"
    with ops.use_backend("auto"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            automatic = ops.backend_name("cpu")
        assert automatic in ("numba", "reference")
        with ops.use_backend("reference"):
            assert ops.backend_name("cpu") == "reference"
            assert ops.backend_name("cuda") == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert ops.backend_name("cpu") == automatic
    assert ops.backend_name("cpu") == "reference"


def test_backend_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), ops.use_backend("auto"):
        raise KeyError
    assert ops.backend_name("cpu") == "reference"


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'cuda'") as error, ops.use_backend("cuda"):  # type: ignore[arg-type]
        pass
    for name in ("auto", "reference", "numba", "triton"):
        assert name in str(error.value)
    assert ops.backend_name("cpu") == "reference"


def test_operator_runs_on_the_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(reference, "hadamard_quantize", lambda **named: calls.append(named["layout"]))
    quantized(values_of(1, 1, 64), layout_of(64))
    assert calls == [layout_of(64)]


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


def test_missing_package_is_named_in_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_loaded", {})
    monkeypatch.setattr(ops, "_is_available", lambda name: False)
    with ops.use_backend("auto"), pytest.warns(UserWarning, match=r'pip install "sdp4bit\[cpu\]"'):
        assert ops.backend_name("cpu") == "reference"
    for name, extra in ("numba", "cpu"), ("triton", "cuda"):
        with (
            pytest.raises(ModuleNotFoundError, match=rf'pip install "sdp4bit\[{extra}\]"'),
            ops.use_backend(name),
        ):
            pass

"""The operators as PyTorch sees them: registered soundly, compilable, strict about what they are given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import ops, reference
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import MAX_ELEMENTS, derive_keys
from tests.quantization.operator_calls import KEYS, empty_messages, quantized, values_of


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    with ops.use_backend("reference"):
        yield


# Registration


def subtract_quantize_arguments() -> Iterator[tuple]:
    for numel, bits, group_size, dtype, stochastic in [
        (4096, 4, 2048, torch.bfloat16, False),
        (100, 8, 96, torch.float32, True),
        (1, 32, 32, torch.float16, False),
    ]:
        out = empty_messages(1, numel, bits, group_size)[0]
        replica = values_of(numel, dtype=dtype, seed=1)
        yield values_of(numel), replica, out, bits, group_size, stochastic, *KEYS
        yield values_of(numel), None, out, bits, group_size, stochastic, *KEYS


def dequantize_add_arguments() -> Iterator[tuple]:
    for rows, numel, bits, group_size, dtype, accumulate in [
        (2, 4096, 4, 2048, torch.bfloat16, True),
        (3, 100, 8, 96, torch.float32, False),
    ]:
        messages = quantized(values_of(rows, 1, numel), bits, group_size)
        yield messages, values_of(rows, numel, dtype=dtype, seed=1), bits, group_size, accumulate


def hadamard_quantize_arguments() -> Iterator[tuple]:
    for shape, bits, group_size, dtype, hadamard, stochastic in [
        ((2, 3, 256), 8, 128, torch.float32, True, True),
        ((1, 2, 100), 4, 96, torch.bfloat16, False, False),
    ]:
        out = empty_messages(shape[0], shape[2], bits, group_size, parts=shape[1])
        values = values_of(*shape, dtype=dtype)
        yield values, out, bits, group_size, hadamard, stochastic, *KEYS, 32, 512
    transposed = values_of(3, 2, 256).transpose(0, 1)
    out = empty_messages(2, 256, 4, 128, parts=3)
    yield transposed, out, 4, 128, True, True, *KEYS, 0, 256, 0xDEADBEEF


def dequantize_reduce_quantize_arguments() -> Iterator[tuple]:
    for ranks, parts, numel, bits_in, group_in, bits_out, group_out, stochastic in [
        (2, 3, 256, 8, 128, 4, 128, True),
        (3, 1, 100, 4, 32, 8, 96, False),
    ]:
        messages = quantized(values_of(ranks, parts, numel), bits_in, group_in)
        out = empty_messages(parts, numel, bits_out, group_out)
        yield (
            *(messages, out, numel, bits_in, group_in, bits_out, group_out, stochastic, *KEYS),
            *(0, 512),
        )


def dequantize_reduce_hadamard_arguments() -> Iterator[tuple]:
    for ranks, numel, bits, group_size, dtype, hadamard in [
        (2, 256, 4, 128, torch.float32, True),
        (3, 100, 8, 96, torch.bfloat16, False),
    ]:
        messages = quantized(values_of(ranks, 1, numel), bits, group_size)
        yield messages, torch.zeros(numel, dtype=dtype), bits, group_size, hadamard, 1 / 96
        signs = 0xDEADBEEF * hadamard
        yield messages, torch.zeros(numel, dtype=dtype), bits, group_size, hadamard, 1 / 96, signs


ARGUMENTS = {
    "subtract_quantize": subtract_quantize_arguments,
    "dequantize_add": dequantize_add_arguments,
    "hadamard_quantize": hadamard_quantize_arguments,
    "dequantize_reduce_quantize": dequantize_reduce_quantize_arguments,
    "dequantize_reduce_hadamard": dequantize_reduce_hadamard_arguments,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_schema_fake_and_dispatch_are_sound(name: str) -> None:
    for arguments in ARGUMENTS[name]():
        results = torch.library.opcheck(getattr(torch.ops.sdp4bit, name).default, arguments)
        assert {"test_schema", "test_faketensor", "test_aot_dispatch_dynamic"} <= set(results)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("name", "written"),
    list(zip(ARGUMENTS, ("out", "replica", "out", "out", "out"), strict=True)),
)
def test_operator_changes_one_argument_and_returns_nothing(name: str, written: str) -> None:
    op = getattr(ops, name)
    names = [argument.name for argument in getattr(torch.ops.sdp4bit, name).default._schema.arguments]
    for arguments in ARGUMENTS[name]():
        copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        assert op(*copies) is None
        given = names[: len(arguments)]  # the last may have a default
        for argument, after, before in zip(given, copies, arguments, strict=True):
            if isinstance(before, Tensor):
                assert torch.equal(after, before) == (argument != written)


def test_whole_round_compiles_into_one_graph_with_the_same_result() -> None:
    numel, ranks, nodes = 320, 2, 3
    intra_bytes = MessageLayout(numel=numel, bits=8, group_size=128, parts=nodes).nbytes
    inter_bytes = MessageLayout(numel=numel, bits=4, group_size=96).nbytes
    weight_bytes = MessageLayout(numel=numel, bits=4, group_size=2048).nbytes

    def round_trip(gradient: Tensor, main: Tensor, replica: Tensor) -> tuple[Tensor, Tensor]:
        sent = torch.empty(ranks, intra_bytes, dtype=torch.uint8)
        ops.hadamard_quantize(
            gradient.view(nodes, ranks, numel).transpose(0, 1),
            sent, 8, 128, True, True, *KEYS, 0, numel,
        )  # fmt: skip
        summed = torch.empty(nodes, inter_bytes, dtype=torch.uint8)
        ops.dequantize_reduce_quantize(sent, summed, numel, 8, 128, 4, 96, True, *KEYS, 0, numel)
        reduced = torch.empty(numel)
        ops.dequantize_reduce_hadamard(summed, reduced, 4, 96, True, 1 / 192)
        difference = torch.empty(weight_bytes, dtype=torch.uint8)
        ops.subtract_quantize(main - reduced, replica[0], difference, 4, 2048, False, 0, 0)
        updated = replica.clone()
        ops.dequantize_add(torch.stack([difference, difference]), updated, 4, 2048, True)
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


def test_meta_tensors_are_checked_and_nothing_is_computed() -> None:
    out = empty_messages(2, 100, 4, 32, device="meta")
    values = torch.empty(2, 1, 100, device="meta")
    assert ops.hadamard_quantize(values, out, 4, 32, True, False, 0, 0, 0, 0) is None
    with pytest.raises(ValueError, match=rf"uint8 \[messages, {out.shape[1]}\]"):
        ops.hadamard_quantize(values, out[:, :48], 4, 32, True, False, 0, 0, 0, 0)


# Equalities between calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values_equal_their_fp32_copies(dtype: torch.dtype) -> None:
    values = values_of(2, 2, 100, dtype=dtype)
    assert torch.equal(quantized(values, 4, 96), quantized(values.float(), 4, 96))
    messages = quantized(values_of(2, 1, 100), 4, 96)
    narrow, wide = torch.empty(100, dtype=dtype), torch.empty(100)
    ops.dequantize_reduce_hadamard(messages, narrow, 4, 96, True, 0.1)
    ops.dequantize_reduce_hadamard(messages, wide, 4, 96, True, 0.1)
    assert torch.equal(narrow, wide.to(dtype))


def test_transposed_view_equals_its_copy() -> None:
    values = values_of(3, 2, 100).transpose(0, 1)
    assert torch.equal(quantized(values, 8, 64), quantized(values.contiguous(), 8, 64))


@pytest.mark.parametrize("bits", [4, 8])
def test_slices_of_a_row_carry_the_codes_and_scales_of_the_whole(bits: int) -> None:
    # What lets a pipelined reduction equal the unpipelined one bit for bit.
    numel, group_size, destinations, parts, ranks = 1000, 96, 2, 3, 2
    row_stride = 1024
    gradients = [values_of(destinations, parts, numel, seed=seed) for seed in range(ranks)]

    def reduced(spans: list[tuple[int, int]]) -> Tensor:
        result = torch.empty(parts, numel)
        for start, end in spans:
            count = end - start
            messages = []
            for rank, gradient in enumerate(gradients):
                out = empty_messages(destinations, count, bits, group_size, parts=parts)
                ops.hadamard_quantize(
                    gradient[..., start:end], out, bits, group_size, True, True,
                    *derive_keys(0, rank), start, row_stride,
                )  # fmt: skip
                messages.append(out[1])
            summed = empty_messages(parts, count, 4, group_size)
            ops.dequantize_reduce_quantize(
                torch.stack(messages), summed, count, bits, group_size, 4, group_size, True,
                *KEYS, start, row_stride,
            )  # fmt: skip
            for part in range(parts):
                ops.dequantize_reduce_hadamard(
                    summed[part : part + 1], result[part, start:end], 4, group_size, True, 1 / 64
                )
        return result

    whole = reduced([(0, numel)])
    assert torch.equal(reduced([(0, 480), (480, 960), (960, 1000)]), whole)
    assert torch.equal(reduced([(0, 96), (96, 1000)]), whole)


def test_random_bits_are_numbered_by_row_and_first() -> None:
    values = values_of(1, 2, 64)
    out = empty_messages(1, 64, 4, 32, parts=2)
    ops.hadamard_quantize(values, out, 4, 32, False, True, *KEYS, 96, 160)
    for part, first in ((0, 96), (1, 256)):
        alone = empty_messages(1, 64, 4, 32)
        ops.hadamard_quantize(values[:, part : part + 1], alone, 4, 32, False, True, *KEYS, first, 0)
        assert torch.equal(out[0, 32 * part : 32 * part + 32], alone[0, :32])


def test_keys_decide_stochastic_rounding_and_nothing_else() -> None:
    values = values_of(1, 1, 256)

    def message(stochastic: bool, keys: tuple[int, int]) -> Tensor:
        out = empty_messages(1, 256, 4, 128)
        ops.hadamard_quantize(values, out, 4, 128, True, stochastic, *keys, 0, 0)
        return out

    assert torch.equal(message(False, (1, 2)), message(False, (3, 4)))
    assert torch.equal(message(True, (1, 2)), message(True, (1, 2)))
    for other in ((3, 2), (1, 4)):
        assert not torch.equal(message(True, (1, 2)), message(True, other))


def test_bytes_outside_the_message_are_untouched_and_padding_is_zero() -> None:
    buffer = torch.full((3, 64), 0xAA, dtype=torch.uint8)
    layout = MessageLayout(numel=64, bits=4, group_size=32)
    ops.hadamard_quantize(values_of(2, 1, 64), buffer[1:, : layout.nbytes], 4, 32, True, False, 0, 0, 0, 0)
    assert (buffer[0] == 0xAA).all()
    assert (buffer[:, layout.nbytes :] == 0xAA).all()
    assert (buffer[1:, layout.payload_bytes : layout.nbytes] == 0).all()


def test_row_strides_beyond_32_bits_number_the_last_element() -> None:
    out = empty_messages(1, 32, 4, 32, parts=2)
    values = values_of(1, 2, 32)
    ops.hadamard_quantize(values, out, 4, 32, True, True, *KEYS, 0, MAX_ELEMENTS - 32)
    alone = empty_messages(1, 32, 4, 32)
    ops.hadamard_quantize(values[:, 1:], alone, 4, 32, True, True, *KEYS, MAX_ELEMENTS - 32, 0)
    assert torch.equal(out[0, 16:32], alone[0, :16])


def test_empty_rows_are_allowed() -> None:
    assert quantized(values_of(2, 3, 0), 4, 32).shape == (2, 0)
    messages = torch.empty(2, 0, dtype=torch.uint8)
    ops.dequantize_add(messages, torch.empty(2, 0), 4, 32, True)
    ops.dequantize_reduce_hadamard(messages, torch.empty(0), 4, 32, True, 1.0)
    ops.dequantize_reduce_quantize(
        messages, torch.empty(3, 0, dtype=torch.uint8), 0, 8, 32, 4, 32, True, 0, 0, 0, 0
    )
    ops.subtract_quantize(torch.empty(0), None, messages[0], 4, 32, True, 0, 0)


def test_no_rows_are_allowed() -> None:
    nothing = empty_messages(1, 64, 4, 32)[:0]
    ops.hadamard_quantize(torch.empty(0, 1, 64), nothing, 4, 32, True, True, *KEYS, 0, 64)
    ops.dequantize_add(nothing, torch.empty(0, 64), 4, 32, True)


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
    monkeypatch.setattr(reference, "hadamard_quantize", lambda *a, **k: calls.append(k["bits"]))
    out = empty_messages(1, 64, 4, 32)
    ops.hadamard_quantize(values_of(1, 1, 64), out, 4, 32, True, False, 0, 0, 0, 0)
    assert calls == [4]


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
    with ops.use_backend("auto"), pytest.warns(UserWarning, match="pip install numba"):
        assert ops.backend_name("cpu") == "reference"

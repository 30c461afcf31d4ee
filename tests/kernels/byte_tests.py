"""The kernels of every back end against the reference, bit for bit, on the cases of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import format_of, with_scales
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit_lab.selftest.cases import (
    BY_SHAPE,
    EDGE_CASES,
    KernelCase,
    Shape,
    difference,
    guarded_messages,
)
from tests.quantization.table_cases import outcomes, quantizing


def compare(*args: Any, **named: Any) -> None:
    """Fail with a description of the difference."""
    found = difference(*args, **named)
    assert found is None, found


def _name(make: Callable[..., Any]) -> str:
    return make.__name__


class ByteTests:
    """The operators write the bytes of the reference, and nothing else, on the `backend` of a subclass.

    Its module has a fixture `shape`.
    """

    backend: str
    device = torch.device("cpu")
    running = staticmethod(nullcontext)
    """The context of tables on the back end."""

    def compare(self, *args: Any, **named: Any) -> None:
        compare(*args, backend=self.backend, device=self.device, **named)

    @pytest.mark.parametrize("make", BY_SHAPE, ids=_name)
    def test_operator(self, make: Callable[[Shape], Iterator[KernelCase]], shape: Shape) -> None:
        for case in make(shape):
            self.compare(case.operator, case.first, **case.named)

    @pytest.mark.parametrize("make", EDGE_CASES, ids=_name)
    def test_edge_cases(self, make: Callable[[], Iterator[KernelCase]]) -> None:
        for case in make():
            self.compare(case.operator, case.first, **case.named)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_tables(self, dtype: torch.dtype) -> None:
        """Packed tables write the same bytes as the operators of the reference, call by call."""
        with ops.use_backend("reference"):
            expected = outcomes(torch.device("cpu"), dtype)
        with ops.use_backend(self.backend), ops.checked(), self.running():
            found = outcomes(self.device, dtype)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            # The bits of a NaN are those of the processor.
            one, other = (torch.where(each.isnan(), 9e4, each).to(each.dtype) for each in (one.cpu(), other))
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), index

    @pytest.mark.parametrize("numels", [(0,), (64, 0, 64), (0, 96)])
    def test_tables_with_empty_sections(self, numels: tuple[int, ...]) -> None:
        """Sections without values launch nothing, and those beside them are written."""
        values, written = torch.randn(1, 1, sum(numels)), []
        for backend, device in (("reference", torch.device("cpu")), (self.backend, self.device)):
            with ops.use_backend(backend), ops.checked(), self.running():
                table, parts = quantizing(numels, device)
                for call in range(3):
                    table.run(call, values.to(device))
            written.append(torch.cat(parts, 1).cpu())
        assert torch.equal(*written)

    @pytest.mark.parametrize("bits", with_scales())
    def test_ties_of_every_scale(self, bits):
        """Values half way between two codes, whose rounding shows the last bit of the scale's reciprocal."""
        scales = torch.arange(0x3F80, 0x4000).to(torch.int16).view(torch.bfloat16)
        largest = format_of(bits).largest
        ties = torch.arange(32) % max(2 * largest - 3, 2) + min(2.5 - largest, -0.5)
        main = ties * scales.float()[:, None]
        # A scale is rounded up from that of the largest value, which here is the next lower one's exactly.
        main[:, 0] = largest * (scales.view(torch.int16) - 1).view(torch.bfloat16).float()
        for exponent in (-90, 0, 100):
            layout = MessageLayout(numel=main.numel(), bits=bits, group_size=32)
            out = guarded_messages(1, layout)[0]
            scaled = (main * 2.0**exponent).view(-1)
            named = {"out": out, "layout": layout}
            self.compare(ops.subtract_quantize, scaled, replica=None, **named)
            with ops.use_backend("reference"):
                ops.subtract_quantize(scaled, replica=None, **named)
            written = out[layout.scales_offset : layout.payload_bytes].view(torch.bfloat16)
            assert torch.equal(written.float(), scales.float() * 2.0**exponent)

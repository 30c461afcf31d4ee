"""Every Triton kernel compiles for every target, exactly as written: nothing approximate, fused or spilled.

No GPU is needed. The host code of the operators runs with CPU tensors up to the launch, which compiles for a
target instead; `test_triton.py` compares results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton

from sdp4bit.kernels.triton import backend

try:  # None of this is public, so it may move in any release.
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
except ImportError:
    pytest.skip("this Triton has no known way to compile without a GPU", allow_module_level=True)

if not backend._IS_COMPILED:
    pytest.skip("Triton interprets kernels in this process", allow_module_level=True)

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")},
}
QUICK = ("sm_90", "gfx942")
"""One of either compiler; code for the other generations differs little from these."""
KEY = RoundingKey(0xFFFFFFFF, 3, row_stride=1 << 20)
DITHER = KEY._replace(dither=True)


@pytest.fixture(params=[pytest.param(t, marks=[] if t in QUICK else [pytest.mark.slow]) for t in TARGETS])
def compiled(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """The kernels that operators would launch on a target."""
    target, kernels = TARGETS[request.param], []
    active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 1000 + list(TARGETS).index(request.param),  # kernels are kept per device
        get_current_stream=lambda _: 0,
    )

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            kernels.append(kernel.run(*arguments, grid=grid, warmup=True, **options))

        return launch

    with (
        patch.object(driver, "_active", active),
        patch.object(triton.JITFunction, "__getitem__", compile_only),
        patch.object(backend, "_IS_COMPILED", False),
        patch.object(backend, "_warp_size", lambda _: target.warp_size),
        patch.object(backend, "_multiprocessors", lambda _: 132),
        ops.use_backend("triton"),
    ):
        yield kernels


def messages(count: int, layout: MessageLayout) -> torch.Tensor:
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8)


def subtract_quantize(numel: int, bits: float) -> None:
    layout, replica = MessageLayout(numel=numel, bits=bits, group_size=2048), torch.zeros(numel).bfloat16()
    ops.subtract_quantize(torch.zeros(numel), replica=replica, out=messages(1, layout)[0], layout=layout)


def dequantize_add(numel: int, bits: float) -> None:
    layout, replica = MessageLayout(numel=numel, bits=bits, group_size=2048), torch.zeros(2, numel).bfloat16()
    ops.dequantize_add(messages(2, layout), replica=replica, layout=layout, accumulate=True)


def hadamard_quantize(numel: int, bits: float) -> None:
    layout = MessageLayout(numel=numel, bits=8 if bits == 4 else bits, group_size=128, parts=2)
    values = torch.zeros(2, 4, numel).transpose(0, 1)
    ops.hadamard_quantize(values, out=messages(4, layout), layout=layout, hadamard=True, rounding=KEY)


def dequantize_reduce_quantize(numel: int, bits: float) -> None:
    received = MessageLayout(numel=numel, bits=8, group_size=128, parts=2)
    sent = MessageLayout(numel=numel, bits=bits, group_size=128)
    named: dict[str, Any] = {"received": received, "out": messages(2, sent), "sent": sent, "rounding": DITHER}
    ops.dequantize_reduce_quantize(messages(8, received), dither=None, **named)


def dequantize_reduce_hadamard(numel: int, bits: float) -> None:
    layout, out = MessageLayout(numel=numel, bits=bits, group_size=128), torch.zeros(numel)
    named: dict[str, Any] = {"out": out, "layout": layout, "hadamard": True, "multiplier": 1 / 128}
    ops.dequantize_reduce_hadamard(messages(4, layout), dither=DITHER, **named)


def dequantize_reduce_pieces(numel: int, bits: float) -> None:
    layout = MessageLayout(numel=numel, bits=bits, group_size=128)
    out = torch.zeros(2 * (numel // 32 * 32) + numel)
    named: dict[str, Any] = {"pieces": 3, "stride": numel // 32 * 32, "hadamard": True, "multiplier": 1 / 128}
    dither = KeySeries((1 << 64) - 1, (1 << 63) + 1)
    ops.dequantize_reduce_pieces(messages(6, layout), out=out, layout=layout, dither=dither, **named)


def add_checksum(numel: int, bits: float) -> None:
    """Of this many bf16 values, whatever the bits."""
    ops.add_checksum(torch.zeros(4 * numel).bfloat16(), out=torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("bits", [4, 3.5])
@pytest.mark.parametrize(
    "operator",
    [
        subtract_quantize,
        dequantize_add,
        hadamard_quantize,
        dequantize_reduce_quantize,
        dequantize_reduce_hadamard,
        dequantize_reduce_pieces,
        add_checksum,
    ],
)
def test_kernel(compiled, operator, bits):
    for numel in (4096, 16, 32 * 3, 100_000):  # neither short rows nor ragged groups compile again
        operator(numel, bits)
    (kernel,) = {id(kernel): kernel for kernel in compiled}.values()
    if "ptx" in kernel.asm:
        # The one division is that of 65536 by at least 2**-107: nothing is flushed, as Triton 3.5 asks for.
        text = kernel.asm["ptx"].replace("div.rn.ftz.f32", "div.rn.f32")
        assert not re.findall(r"tf32|\bmma\b|\bfma\.|\.ftz|\.approx|div\.full|\.local\.", text)
        assert not re.findall(r"(?:ld|st)\.global\S*b8\b", text), "single bytes move"
        # ptxas could contract, too.
        assert "EXIT" in kernel.asm["sass"] and not re.findall(r"\bH?FFMA2?\b", kernel.asm["sass"])
    else:
        text = kernel.asm["amdgcn"]
        assert not re.findall(r"v_mfma|v_fmac?_f|v_mac_f|v_pk_fma|v_rcp_f32(?=.*approx)", text)
        assert (
            sum(map(int, re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size): +(\d+)", text))) == 0
        )

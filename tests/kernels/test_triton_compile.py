"""The Triton kernels compile for NVIDIA and AMD targets, to the instructions they were written for.

No GPU is needed, and nothing runs: the host code of the operators is executed with CPU tensors up to the
launch, which compiles for a given target instead. Results and speed are other tests' business.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton

from sdp4bit.kernels.triton import backend as cuda
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey

try:  # None of this is public, so it may move in any release.
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    assert hasattr(driver, "_active") and hasattr(triton.JITFunction, "run")
except (ImportError, AssertionError):
    pytest.skip("this Triton has no known way to compile without a GPU", allow_module_level=True)

if not cuda._IS_COMPILED:
    pytest.skip("Triton interprets kernels in this process", allow_module_level=True)

SM80 = GPUTarget("cuda", 80, 32)
SM90 = GPUTarget("cuda", 90, 32)
GFX942 = GPUTarget("hip", "gfx942", 64)
TARGETS = [SM80, SM90, GFX942]


def target_name(target: GPUTarget) -> str:
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch


@pytest.fixture
def compiled(monkeypatch, request):
    """A list that receives every kernel that an operator would launch on `request.param`."""
    target = request.param
    device = 1000 + TARGETS.index(target)  # Triton keeps compiled kernels per device number
    active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: device,
        get_current_stream=lambda _: 0,
    )
    kernels = []

    def compile_only(kernel, grid):
        def launch(*arguments, **options):
            kernels.append(kernel.run(*arguments, grid=grid, warmup=True, **options))

        return launch

    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(triton.JITFunction, "__getitem__", compile_only)
    monkeypatch.setattr(cuda, "_IS_COMPILED", False)
    monkeypatch.setattr(cuda, "_warp_size", lambda _: target.warp_size)
    with ops.use_backend("triton"):
        yield kernels


def messages(count: int, layout: MessageLayout) -> torch.Tensor:
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8)


KEY = RoundingKey(0xFFFFFFFF, 3, row_stride=1 << 20)


def subtract_quantize(numel=4096, bits=4, group_size=2048, stochastic=False, dtype=torch.float32):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    replica = torch.zeros(numel, dtype=torch.bfloat16)
    out, rounding = messages(1, layout)[0], RoundingKey(1, 2) if stochastic else None
    ops.subtract_quantize(replica.to(dtype), replica=replica, out=out, layout=layout, rounding=rounding)


def dequantize_add(numel=4096, bits=4, group_size=2048, accumulate=True, dtype=torch.bfloat16):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    replica = torch.zeros(2, numel, dtype=dtype)
    ops.dequantize_add(messages(2, layout), replica=replica, layout=layout, accumulate=accumulate)


def hadamard_quantize(
    numel=4096, bits=8, group_size=128, hadamard=True, stochastic=True, dtype=torch.float32, signs=0
):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=2)
    values = torch.zeros(2, 4, numel, dtype=dtype).transpose(0, 1)
    transform, rounding = Hadamard(signs) if hadamard else None, KEY if stochastic else None
    out = messages(4, layout)
    ops.hadamard_quantize(values, out=out, layout=layout, hadamard=transform, rounding=rounding)


def dequantize_reduce_quantize(numel=4096, count=8, bits_in=8, group_size_in=128, bits=4, group_size=128):
    received = MessageLayout(numel=numel, bits=bits_in, group_size=group_size_in, parts=2)
    sent = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    out = messages(2, sent)
    ops.dequantize_reduce_quantize(
        messages(count, received), received=received, out=out, sent=sent, rounding=KEY
    )


def dequantize_reduce_hadamard(
    numel=4096, count=4, bits=4, group_size=128, hadamard=True, dtype=torch.float32, signs=0
):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    out, transform = torch.zeros(numel, dtype=dtype), Hadamard(signs) if hadamard else None
    ops.dequantize_reduce_hadamard(
        messages(count, layout), out=out, layout=layout, hadamard=transform, multiplier=1 / 128
    )


DEFAULTS = [
    subtract_quantize,
    dequantize_add,
    hadamard_quantize,
    dequantize_reduce_quantize,
    dequantize_reduce_hadamard,
]
ON_ALL_TARGETS = pytest.mark.parametrize("compiled", TARGETS, indirect=True, ids=target_name)
ON_SM90 = pytest.mark.parametrize("compiled", [SM90], indirect=True, ids=target_name)


def check_arithmetic(assembly: dict) -> None:
    """Nothing approximate, nothing fused, nothing flushed: the order and rounding of the definition."""
    if "ptx" in assembly:
        # The one division is that of 65536 by at least 2**-107: there is nothing to flush, which Triton 3.5
        # always asks for.
        ptx = assembly["ptx"].replace("div.rn.ftz.f32", "div.rn.f32")
        found = re.findall(r"tf32|\bmma\b|\bfma\.|\.ftz|\.approx|div\.full", ptx)
    else:
        found = re.findall(r"v_mfma|v_rcp_f32(?=.*approx)", assembly["amdgcn"])
    assert not found, set(found)


def spilled_bytes(assembly: dict, directory: Path) -> int | None:
    """Stack and local memory per thread, or None without the tool that tells."""
    if "amdgcn" in assembly:
        # Scalar registers are spilled into lanes of vector registers, not into memory.
        found = r"\.(?:vgpr_spill_count|private_segment_fixed_size): +(\d+)"
        counts = re.findall(found, assembly["amdgcn"])
        return sum(map(int, counts)) if counts else None
    try:
        tool = triton.knobs.nvidia.cuobjdump.path
    except (AttributeError, RuntimeError):
        return None
    file = directory / "kernel.cubin"
    file.write_bytes(assembly["cubin"])
    usage = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))


@ON_ALL_TARGETS
@pytest.mark.parametrize("operator", DEFAULTS)
def test_default_configurations(compiled, operator, tmp_path):
    operator()
    (kernel,) = compiled
    check_arithmetic(kernel.asm)
    assert not spilled_bytes(kernel.asm, tmp_path)
    if "ptx" in kernel.asm:
        accesses = re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"])
        assert not [x for x in accesses if x.endswith("b8")], "single bytes move"
        # Scales are read alone; every other load moves at least 8 bytes.
        assert all("v2" in x or "v4" in x for x in accesses if x.endswith("b32")), set(accesses)


@ON_SM90
@pytest.mark.parametrize("operator", DEFAULTS)
def test_one_kernel_serves_all_aligned_lengths(compiled, operator):
    """Neither 16 values (1 in the kernel's units) nor a ragged last group nor more rows compile anew."""
    for numel in (4096, 16, 32 * 3, 100_000):
        operator(numel=numel)
    assert len({id(kernel) for kernel in compiled}) == 1


@ON_ALL_TARGETS
@pytest.mark.parametrize("operator", [hadamard_quantize, dequantize_reduce_hadamard])
def test_random_signs(compiled, operator, tmp_path):
    """One more kernel, which serves all signs, without another access to memory."""
    for signs in (0, 1, 16, 0xDEADBEEF, 0x7FFFFFFF):
        operator(signs=signs)
    plain, signed, *others = compiled
    assert plain is not signed and all(kernel is signed for kernel in others)
    check_arithmetic(signed.asm)
    assert not spilled_bytes(signed.asm, tmp_path)
    if "ptx" in signed.asm:
        accesses = [re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"]) for kernel in (plain, signed)]
        assert sorted(accesses[0]) == sorted(accesses[1])


@ON_SM90
@pytest.mark.parametrize("numel", [4096, 4095])
def test_bf16_gradients(compiled, numel):
    """Codes are written as vectors even if the values have to be read one by one."""
    hadamard_quantize(numel=numel, dtype=torch.bfloat16)
    check_arithmetic(compiled[0].asm)
    loads, stores = (re.findall(rf"{kind}\.global\S*", compiled[0].asm["ptx"]) for kind in ("ld", "st"))
    assert stores.count("st.global.v4.b32") == 2
    assert set(loads) == ({"ld.global.v4.b32"} if numel % 16 == 0 else {"ld.global.b16"})


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [SM90, GFX942], indirect=True, ids=target_name)
@pytest.mark.parametrize(("group_size", "numel"), [(32, 4096), (96, 4095), (2048, 4096), (16384, 4095)])
@pytest.mark.parametrize("bits", [4, 8, 32])
class TestEveryConfiguration:
    """The larger rest: every number of bits, odd and long groups, aligned and ragged rows."""

    @pytest.fixture(autouse=True)
    def check(self, compiled, tmp_path):
        yield
        assert compiled
        for kernel in compiled:
            check_arithmetic(kernel.asm)
            assert not spilled_bytes(kernel.asm, tmp_path)

    def test_subtract_quantize(self, numel, bits, group_size):
        for stochastic, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            subtract_quantize(numel, bits, group_size, stochastic, dtype)

    def test_dequantize_add(self, numel, bits, group_size):
        for accumulate, dtype in ((False, torch.float16), (True, torch.float32)):
            dequantize_add(numel, bits, group_size, accumulate, dtype)

    def test_hadamard_quantize(self, numel, bits, group_size):
        for hadamard, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            hadamard_quantize(numel, bits, group_size, hadamard, hadamard, dtype)
        hadamard_quantize(numel, bits, group_size, signs=0xDEADBEEF)

    def test_dequantize_reduce_quantize(self, numel, bits, group_size):
        for count, bits_in in ((9, 8), (2, 4), (4, 32)):
            dequantize_reduce_quantize(numel, count, bits_in, 128, bits, group_size)

    def test_dequantize_reduce_hadamard(self, numel, bits, group_size):
        for count, dtype in ((8, torch.float16), (9, torch.float32)):
            dequantize_reduce_hadamard(numel, count, bits, group_size, True, dtype)


@pytest.mark.slow
@ON_ALL_TARGETS
def test_lengths_beyond_32_bits(compiled):
    """Memory is reserved, never touched."""
    numel = (1 << 31) + 1
    layout = MessageLayout(numel=numel, bits=4, group_size=2048)
    main, out = torch.empty(numel, dtype=torch.bfloat16), torch.empty(layout.nbytes, dtype=torch.uint8)
    ops.subtract_quantize(main, replica=None, out=out, layout=layout, rounding=None)
    ops.dequantize_add(out[None], replica=main[None], layout=layout, accumulate=True)
    assert len(compiled) == 2

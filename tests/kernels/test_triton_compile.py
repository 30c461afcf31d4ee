"""The Triton kernels compile for NVIDIA and AMD targets, to the instructions they were written for.

No GPU is needed, and nothing runs; see :mod:`tests.kernels.compiled_code`. Results and speed are other tests'
business.
"""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton

from sdp4bit.kernels.triton import backend as cuda

try:  # None of what this needs is public, so it may move in any release.
    from tests.kernels import compiled_code
except ImportError:
    pytest.skip("this Triton has no known way to compile without a GPU", allow_module_level=True)

if not cuda._IS_COMPILED:
    pytest.skip("Triton interprets kernels in this process", allow_module_level=True)

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from tests.kernels.compiled_code import (
    CASES,
    GPUS,
    KEY,
    TARGETS,
    compile_case,
    compiling_for,
    dequantize_add,
    dequantize_reduce_hadamard,
    dequantize_reduce_quantize,
    hadamard_quantize,
    missing_tools,
    spilled_bytes,
    subtract_quantize,
)


@pytest.fixture
def compiled(request):
    """A list that receives every kernel that an operator would launch on `request.param`."""
    with compiling_for(TARGETS[request.param]) as launches:
        yield launches


DEFAULTS = [
    subtract_quantize,
    dequantize_add,
    hadamard_quantize,
    dequantize_reduce_quantize,
    dequantize_reduce_hadamard,
]
# One of either compiler; code for the other generations differs little from these.
QUICK = ("sm_90", "gfx942")
EACH_TARGET = [
    pytest.param(target, marks=[] if target in QUICK else [pytest.mark.slow]) for target in TARGETS
]
ON_ALL_TARGETS = pytest.mark.parametrize("compiled", EACH_TARGET, indirect=True)
ON_SM90 = pytest.mark.parametrize("compiled", ["sm_90"], indirect=True)


TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
BUDGETED_TRITON = (3, 7)
# Instructions per value that a kernel may take on each of TARGETS, in their order: what this release of
# Triton makes of it, and 3 %. Another release may choose other instructions for the same kernel.
LIMITS = {
    "subtract_quantize fp32": (18.0, 17.5, 18.0, 19.0, 18.5, 18.5),
    "subtract_quantize bf16": (19.0, 18.5, 18.0, 19.5, 19.0, 19.0),
    "dequantize_add bf16": (18.5, 18.5, 16.5, 18.5, 16.5, 16.5),
    "hadamard_quantize fp32 to 8": (19.5, 19.0, 20.0, 19.5, 22.5, 23.0),
    "hadamard_quantize bf16 to 8": (21.0, 20.0, 19.0, 21.0, 22.0, 22.5),
    "hadamard_quantize fp32 to 4": (19.5, 18.5, 17.5, 19.5, 17.5, 17.5),
    "reduce_quantize 4 x 8 to 4": (30.5, 29.5, 25.5, 30.0, 23.0, 23.0),
    "reduce_quantize 8 x 8 to 4": (53.5, 53.0, 45.5, 53.5, 43.0, 42.0),
    "reduce_hadamard 4 x 4 to fp32": (34.0, 34.0, 26.5, 34.0, 28.0, 28.0),
    "hadamard_quantize fp32 to dithered 8": (22.5, 21.5, 22.5, 22.5, 26.0, 26.5),
    "hadamard_quantize fp32 to dithered 4": (22.0, 21.5, 19.5, 22.0, 19.5, 19.5),
    "reduce_quantize 4 x 8 to dithered 4": (33.0, 32.5, 28.0, 33.0, 25.5, 26.0),
    "reduce_quantize 4 x dithered 8 to 4": (59.5, 59.0, 51.5, 62.5, 55.0, 54.5),
    "reduce_hadamard 4 x dithered 4 to fp32": (57.5, 57.5, 50.0, 57.5, 50.0, 49.0),
    "subtract_quantize fp32 to 3": (18.0, 17.0, 17.5, 18.0, 17.0, 17.0),
    "dequantize_add 3 to bf16": (21.5, 21.5, 20.0, 21.5, 20.0, 20.0),
    "hadamard_quantize fp32 to 3": (23.5, 23.0, 24.0, 24.0, 25.0, 25.0),
    "reduce_quantize 4 x 8 to 3": (35.0, 34.5, 31.0, 35.0, 28.5, 28.5),
    "reduce_hadamard 4 x 3 to fp32": (44.0, 44.0, 37.0, 44.0, 42.0, 42.5),
    "subtract_quantize fp32 to 2": (16.0, 15.5, 16.0, 16.5, 15.0, 15.0),
    "dequantize_add 2 to bf16": (18.5, 18.5, 17.0, 18.5, 16.0, 16.0),
    "hadamard_quantize fp32 to 2": (20.5, 19.5, 20.5, 20.5, 21.0, 21.0),
    "reduce_quantize 4 x 8 to 2": (31.5, 31.0, 27.5, 31.5, 26.5, 26.5),
    "reduce_hadamard 4 x 2 to fp32": (34.0, 34.0, 25.0, 34.0, 27.5, 27.5),
}
BUDGETS = {name: dict(zip(TARGETS, limits, strict=True)) for name, limits in LIMITS.items()}
# Kernels that take more than a GPU can issue while its memory moves at 92 % of its speed.
ABOVE_H200 = {
    *("reduce_quantize 4 x 8 to 3", "reduce_hadamard 4 x 3 to fp32"),
    *("reduce_quantize 4 x 8 to 2", "reduce_hadamard 4 x 2 to fp32"),
    *("reduce_quantize 4 x dithered 8 to 4", "reduce_hadamard 4 x dithered 4 to fp32"),
    "reduce_quantize 4 x 8 to dithered 4",
}
ABOVE_B200 = ABOVE_H200 | {
    *("hadamard_quantize bf16 to 8", "hadamard_quantize fp32 to 3", "hadamard_quantize fp32 to 2"),
    *("reduce_quantize 4 x 8 to 4", "reduce_quantize 8 x 8 to 4"),
}


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


@ON_ALL_TARGETS
@pytest.mark.parametrize("operator", DEFAULTS)
def test_default_configurations(compiled, operator):
    operator()
    ((kernel, *_),) = compiled
    check_arithmetic(kernel.asm)
    assert not spilled_bytes(kernel.asm)
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
    assert len({id(launch.kernel) for launch in compiled}) == 1


@ON_ALL_TARGETS
@pytest.mark.parametrize("operator", [hadamard_quantize, dequantize_reduce_hadamard])
def test_random_signs(compiled, operator):
    """One more kernel, which serves all signs, without another access to memory."""
    for signs in (0, 1, 16, 0xDEADBEEF, 0x7FFFFFFF):
        operator(signs=signs)
    plain, signed, *others = [launch.kernel for launch in compiled]
    assert plain is not signed and all(kernel is signed for kernel in others)
    check_arithmetic(signed.asm)
    assert not spilled_bytes(signed.asm)
    if "ptx" in signed.asm:
        accesses = [re.findall(r"(?:ld|st)\.global\S*", kernel.asm["ptx"]) for kernel in (plain, signed)]
        assert sorted(accesses[0]) == sorted(accesses[1])


@ON_SM90
@pytest.mark.parametrize("numel", [4096, 4095])
def test_bf16_gradients(compiled, numel):
    """Codes are written as vectors even if the values have to be read one by one."""
    hadamard_quantize(numel=numel, dtype=torch.bfloat16)
    check_arithmetic(compiled[0].kernel.asm)
    loads, stores = (
        re.findall(rf"{kind}\.global\S*", compiled[0].kernel.asm["ptx"]) for kind in ("ld", "st")
    )
    assert stores.count("st.global.v4.b32") == 2
    assert set(loads) == ({"ld.global.v4.b32"} if numel % 16 == 0 else {"ld.global.b16"})


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["sm_90", "gfx942"], indirect=True)
@pytest.mark.parametrize(("group_size", "numel"), [(32, 4096), (96, 4095), (2048, 4096), (16384, 4095)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 32])
class TestEveryConfiguration:
    """The larger rest: every number of bits, odd and long groups, aligned and ragged rows."""

    @pytest.fixture(autouse=True)
    def check(self, compiled):
        yield
        assert compiled
        for kernel, *_ in compiled:
            check_arithmetic(kernel.asm)
            assert not spilled_bytes(kernel.asm)

    def test_subtract_quantize(self, numel, bits, group_size):
        for stochastic, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            subtract_quantize(numel, bits, group_size, stochastic, dtype)

    def test_dequantize_add(self, numel, bits, group_size):
        for accumulate, dtype in ((False, torch.float16), (True, torch.float32)):
            dequantize_add(numel, bits, group_size, accumulate, dtype)

    def test_hadamard_quantize(self, numel, bits, group_size):
        for hadamard, dtype in ((False, torch.bfloat16), (True, torch.float32)):
            hadamard_quantize(numel, bits, group_size, hadamard, KEY if hadamard else None, dtype)
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
    ops.dequantize_add(out[None], replica=main[None], layout=layout, accumulate=True, dither=None)
    assert len(compiled) == 2


class TestInstructions:
    """What docs/benchmarks.md says of the code of the defaults."""

    @pytest.fixture(params=EACH_TARGET)
    def target(self, request):
        if TRITON < BUDGETED_TRITON:
            pytest.skip(f"older compilers spill and split accesses: {triton.__version__}")
        reason = missing_tools(TARGETS[request.param])
        if reason:
            pytest.skip(reason)
        return request.param

    @pytest.mark.parametrize("name", CASES)
    def test_within_budget(self, name, target):
        code = compile_case(name, TARGETS[target])
        assert code.spilled_bytes == 0
        if TRITON == BUDGETED_TRITON:
            assert code.per_value <= BUDGETS[name][target], code
        # A program of one warp waits for nobody; one that shares a group waits for its maximum.
        assert code.barriers <= (3 if name.startswith("subtract") else 2), code
        if target.startswith("sm_"):
            # Smaller codes are words of 32 bits and of 16.
            wide = r"\.(128|64|U16|E)$" if re.search(r"to [23]$|[23] to", name) else r"\.(128|64|U16)$"
            narrow = [x for x in code.accesses if not re.search(wide, x)]
            assert not narrow, narrow

    @pytest.mark.parametrize("name", CASES)
    def test_budgets_fit_what_a_gpu_can_issue(self, name):
        """So that a budget that is raised says what it costs."""
        allowed = {gpu: limits.budget(CASES[name].bytes_per_value) for gpu, limits in GPUS.items()}
        assert (BUDGETS[name]["sm_90"] <= allowed["H200"]) == (name not in ABOVE_H200)
        assert (BUDGETS[name]["sm_100"] <= allowed["B200"]) == (name not in ABOVE_B200)


def test_counting_takes_the_common_way():
    """Twice through a loop, past what is skipped; the subroutine behind the end is not read."""
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   FADD R1, R1, R2 ;
        /*0020*/              @P0  BRA `(.L_x_2) ;
        /*0030*/                   FMUL R1, R1, R2 ;
        /*0040*/                   FMUL R1, R1, R2 ;
.L_x_2:
        /*0050*/                   NOP ;
        /*0060*/             @!P1  BRA `(.L_x_0) ;
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3) ;
$__internal_0_$__slowpath:
        /*00a0*/                   MUFU.RCP R1, R2 ;
    """
    blocks = compiled_code.read_blocks(text, "cuda")
    assert sum(len(block.names) for block in blocks) == 10
    inside, outside = compiled_code.split_loop(blocks)
    assert inside == ["FADD", "BRA", "BRA"]
    assert outside == ["LDC", "STG.E.128", "EXIT"]

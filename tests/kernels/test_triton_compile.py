"""The machine code of every Triton kernel: nothing approximate, contracted or spilled, and within its budget.

No GPU is needed. `test_triton.py` compares results, in Triton's interpreter; the byte permutation, which the
interpreter skips, is run here from its PTX.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl

from sdp4bit.kernels.triton import backend

try:  # None of this is public, so it may move in any release.
    import triton.backends.compiler
    import triton.runtime.driver
except ImportError:
    pytest.skip("this Triton has no known way to compile without a GPU", allow_module_level=True)

if not backend._IS_COMPILED:
    pytest.skip("Triton interprets kernels in this process", allow_module_level=True)

from sdp4bit.kernels.triton import formats
from sdp4bit.kernels.triton.chunks import offsets
from sdp4bit.kernels.triton.coding import Coding
from sdp4bit.quantization.formats import INT8
from sdp4bit.quantization.tables import Table
from tests.kernels import compiled
from tests.kernels.compiled import KERNELS, TARGETS, Launch, launched, machine_code
from tests.oracles.machine_code import MachineCode, read_gcn, read_sass
from tests.oracles.ptx import stored_words
from tests.quantization.table_cases import outcomes

BUDGETS_ARE_OF = "3.7."
"""The Triton whose code generation the budgets describe; the rest holds for every release."""


class Budget(NamedTuple):
    """Limits of a kernel on one target, which a change of more than 5 % must move."""

    registers: int
    instructions: float
    """Per value in the loop; on AMD of vectors."""
    conversions: float
    """Per value in the loop."""


FUSED = {
    **dict.fromkeys(["dequantize_add, 4 bits to bf16", "dequantize_add, 3.5 bits to bf16"], 1),
    # The own part is summed by as many threads as the others are, with 32 values each, from +0.0.
    "dequantize_reduce_quantize, 4 messages of 8 bits to 4 bits": 3 + 4 // 2,
    **{f"dequantize_reduce_quantize, 8 messages of 8 bits to {bits} bits": 7 + 8 for bits in (4, 3.5)},
    **{f"dequantize_reduce_hadamard, {n} nodes, 4 bits": n - 1 for n in (2, 4, 8)},
    "dequantize_reduce_hadamard, 4 nodes, 3.5 bits": 3,
    "dequantize_reduce_pieces, 4 bits": 2,
}
"""Fused products per value: of all messages, except for a first one that is not added to anything."""

SPILLS = {("sm_100", "dequantize_reduce_hadamard, 4 nodes, 3.5 bits"): 8}
"""Known spills. A thread with more than 128 registers would cost each scheduler a warp."""

BUDGETS: dict[str, dict[str, tuple[int, float, float]]] = {
    "subtract_quantize, fp32 and bf16 to 4 bits": {
        "sm_80": (48, 15.8, 1.25),
        "sm_90": (56, 15.2, 1.19),
        "sm_100": (62, 15.8, 1.19),
        "gfx942": (43, 11.0, 1.19),
    },
    "subtract_quantize, fp32 and bf16 to 3.5 bits": {
        "sm_80": (62, 14.6, 1.13),
        "sm_90": (64, 14.0, 1.1),
        "sm_100": (70, 14.5, 1.1),
        "gfx942": (72, 11.3, 1.1),
    },
    "dequantize_add, 4 bits to bf16": {
        "sm_80": (40, 16.0, 0.0),
        "sm_90": (45, 15.9, 0.0),
        "sm_100": (47, 14.9, 0.0),
        "gfx942": (47, 12.2, 0.0),
    },
    "dequantize_add, 3.5 bits to bf16": {
        "sm_80": (39, 24.3, 1.0),
        "sm_90": (40, 24.3, 0.13),
        "sm_100": (43, 23.8, 0.13),
        "gfx942": (48, 19.1, 1.0),
    },
    "hadamard_quantize, bf16 to 4 bits": {
        "sm_80": (96, 21.7, 1.07),
        "sm_90": (96, 21.0, 1.05),
        "sm_100": (96, 18.8, 1.05),
        "gfx942": (130, 18.8, 1.05),
    },
    "dequantize_reduce_quantize, 8 messages of 8 bits to 4 bits": {
        "sm_80": (80, 51.8, 1.13),
        "sm_90": (80, 51.6, 1.1),
        "sm_100": (80, 44.1, 1.1),
        "gfx942": (156, 37.9, 9.1),
    },
    "dequantize_reduce_quantize, 4 messages of 8 bits to 4 bits": {
        "sm_80": (123, 30.5, 1.07),
        "sm_90": (118, 29.8, 1.05),
        "sm_100": (126, 26.2, 1.05),
        "gfx942": (142, 21.8, 5.05),
    },
    "hadamard_quantize, fp32 to 8 bits": {
        "sm_80": (69, 18.3, 1.13),
        "sm_90": (72, 17.5, 1.1),
        "sm_100": (85, 18.3, 1.1),
        "gfx942": (92, 20.0, 1.1),
    },
    "hadamard_quantize, bf16 to 8 bits": {
        "sm_80": (67, 19.4, 1.13),
        "sm_90": (70, 18.7, 1.1),
        "sm_100": (79, 17.7, 1.1),
        "gfx942": (96, 19.8, 1.1),
    },
    "hadamard_quantize, fp32 to 3.5 bits": {
        "sm_80": (70, 21.7, 1.13),
        "sm_90": (70, 20.9, 1.1),
        "sm_100": (85, 21.8, 1.1),
        "gfx942": (80, 20.4, 1.1),
    },
    "dequantize_reduce_quantize, 8 messages of 8 bits to 3.5 bits": {
        "sm_80": (80, 47.2, 1.13),
        "sm_90": (80, 47.0, 1.1),
        "sm_100": (80, 39.3, 1.1),
        "gfx942": (118, 33.1, 9.1),
    },
    "dequantize_reduce_hadamard, 2 nodes, 4 bits": {
        "sm_80": (95, 27.0, 0.0),
        "sm_90": (109, 26.9, 0.0),
        "sm_100": (96, 24.9, 0.0),
        "gfx942": (91, 22.0, 0.0),
    },
    "dequantize_reduce_hadamard, 4 nodes, 4 bits": {
        "sm_80": (122, 44.3, 0.0),
        "sm_90": (123, 44.3, 0.0),
        "sm_100": (127, 39.9, 0.0),
        "gfx942": (133, 36.7, 0.0),
    },
    "dequantize_reduce_hadamard, 8 nodes, 4 bits": {
        "sm_80": (126, 81.4, 0.0),
        "sm_90": (128, 81.3, 0.0),
        "sm_100": (128, 73.6, 0.0),
        "gfx942": (160, 66.0, 0.0),
    },
    "dequantize_reduce_hadamard, 4 nodes, 3.5 bits": {
        "sm_80": (126, 75.3, 3.0),
        "sm_90": (126, 75.5, 0.0),
        "sm_100": (128, 71.1, 0.0),
        "gfx942": (198, 62.5, 3.0),
    },
    "add_checksum": {
        "sm_80": (96, 24.4, 0.0),
        "sm_90": (96, 25.9, 0.0),
        "sm_100": (96, 25.8, 0.0),
        "gfx942": (51, 17.0, 0.0),
    },
}
"""Budgets by kernel and target: registers, instructions and conversions per value; see `Budget`."""

QUICK = {
    (target, name)
    for target in ("sm_90", "gfx942")
    for name in KERNELS
    if name.endswith(("fp32 and bf16 to 4 bits", "4 bits to bf16", "fp32 to 8 bits", "checksum"))
    or name.endswith(("8 messages of 8 bits to 4 bits", "4 nodes, 4 bits", "pieces, 4 bits"))
}
"""One kernel per operator, and one target per compiler: code for other generations differs little."""
COMPILED = [
    pytest.param(*each, marks=[] if each in QUICK else [pytest.mark.slow])
    for each in ((target, name) for target in TARGETS for name in KERNELS)
]
EVEN, ODD = (4096, 64, 9 * 128 + 48), (16, 96, 100_000)
"""Lengths of rows, short, long and ragged, by the number of blocks in the last group of 128 values."""


@cache
def compiled_kernel(target: str, name: str) -> Launch:
    # No length compiles again, except that one bit of it is a constant if threads process pairs of slots.
    is_paired = name.endswith(("bf16 to 4 bits", "4 messages of 8 bits to 4 bits"))
    return launched(target, KERNELS[name], numels=EVEN if is_paired else EVEN + ODD)


def check_budget(code: MachineCode, launch: Launch, budget: Budget) -> None:
    """Fail if the kernel needs more than its budget, or so little that the budget hides a regression."""
    per_value = {
        "registers": float(code.registers),
        "instructions": code.instructions / launch.values,
        "conversions": code.conversions / launch.values,
    }
    for name, limit in budget._asdict().items():
        assert 0.95 * limit <= per_value[name] <= limit, f"{name}: {per_value[name]:.2f}, budget {limit}"


@pytest.mark.parametrize(("target", "name"), COMPILED)
def test_machine_code(target: str, name: str) -> None:
    launch = compiled_kernel(target, name)
    code = machine_code(launch.kernel)
    assert (code.spilled, code.flushing, code.narrow) == (SPILLS.get((target, name), 0), 0, 0)
    # The kernels fuse the products that are exact; see `codes.add_product`. Compilers fuse nothing.
    assert code.fused == FUSED.get(name, 0) * launch.values
    if triton.__version__.startswith(BUDGETS_ARE_OF) and target in BUDGETS.get(name, {}):
        check_budget(code, launch, Budget(*BUDGETS[name][target]))


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(each, marks=pytest.mark.slow) for each in TARGETS)]
)
def test_machine_code_of_tables(target: str) -> None:
    """The launches for all sections of a kind need no memory of the stack, either."""

    def run_packed(table: Table, call: int, *tensors: torch.Tensor) -> None:
        if call == 0:
            backend.pack(table.calls, tensors).run(call, tensors)

    with compiled.compiling(target) as launches, patch.object(Table, "run", run_packed):
        outcomes(torch.device("cpu"), torch.float32, weight_group=2048)
    tables = [each for each in launches if each.constants.get("table") is not None]
    assert len(tables) == 12, "two of each operator"
    for each in tables:
        code, has_flag = machine_code(each.kernel), each.constants.get("nonfinite") is not None
        assert (code.spilled, code.flushing, code.narrow) == (0, 0, has_flag), each.kernel.metadata.name


@triton.jit
def decode_kernel(codes, out):  # type: ignore[no-untyped-def]
    place = tl.arange(0, 512)
    value = formats._decode_int8(tl.load(codes + place))
    tl.store(out + place, value.to(tl.int32).to(tl.uint8))


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_byte_permutation_decodes_every_code(target: str) -> None:
    codes = torch.arange(512).to(torch.uint8)
    with compiled.compiling(target) as launches:
        decode_kernel[(1,)](codes, codes.clone(), num_warps=1)
    ptx = launches[0].kernel.asm["ptx"]
    assert ptx.count("prmt.b32") >= 16 and "cvt.rn.f32.s" not in ptx
    for words in codes.view(torch.int32).view(-1, 4).tolist():
        loaded = [word & 0xFFFFFFFF for word in words]
        assert stored_words(ptx, loaded) == loaded
    wrong = ptx.replace("0x7442", "0x7441")
    assert stored_words(wrong, [0x03020100] * 4) == [0x03010100] * 4


# Mutations that the counters and budgets must notice.


@triton.jit
def _load_by_conversion(codes, chunk, mask, dither, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.load(codes + offsets(chunk), mask=tl.expand_dims(mask, -1), other=0)
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


REDUCED = "dequantize_reduce_quantize, 8 messages of 8 bits to 4 bits"


def test_conversions_of_codes_are_noticed() -> None:
    slow = Coding(INT8, load=_load_by_conversion, store=formats._store_int8)
    one_message = partial(compiled.dequantize_reduce_quantize, count=1, own=False)
    with patch.dict(formats.FORMATS, int8=slow):
        launch = launched("sm_90", one_message)
    code = machine_code(launch.kernel)
    with pytest.raises(AssertionError, match=r"conversions: 2\."):
        check_budget(code, launch, Budget(code.registers, code.instructions / launch.values, 1.1))


def test_the_slower_path_of_odd_rows_is_noticed() -> None:
    name = "hadamard_quantize, bf16 to 4 bits"
    launch = launched("sm_90", KERNELS[name], numels=ODD)
    code = machine_code(launch.kernel)
    assert code.spilled == 0
    # Also without its registers, because launches limit them.
    _, *rest = BUDGETS[name]["sm_90"]
    with pytest.raises(AssertionError, match="instructions"):
        check_budget(code, launch, Budget(code.registers, *rest))


def test_spills_are_noticed() -> None:
    launch = launched("sm_90", KERNELS["subtract_quantize, fp32 and bf16 to 4 bits"], maxnreg=24)
    code = machine_code(launch.kernel)
    assert code.registers <= 24 and code.spilled > 0


def test_contraction_is_noticed() -> None:
    one_message = KERNELS["dequantize_reduce_hadamard, 2 nodes, 4 bits"]
    launch = launched("sm_90", one_message, enable_fp_fusion=True)
    # The product with the multiplier and the sum with the own node's part become one operation.
    assert machine_code(launch.kernel).fused > launch.values


SASS = """
 Function kernel:
  REG:40 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:640
        /*0000*/                   HFMA2.MMA R5, -RZ, RZ, 0, 0 ;   /* 0xfe */
        /*0010*/                   FMUL.FTZ R5, R4, R3 ;
        /*0020*/                   LDG.E.U8 R2, desc[UR4][R2.64] ;
        /*0030*/              @!P1 I2F.S16 R1, R2 ;
        /*0040*/                   I2FP.F32.U32 R1, R2 ;
        /*0050*/                   FFMA2 R4, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO ;
        /*0060*/                   MUFU.RCP R4, R4 ;
        /*0068*/                   VIADD R7, R4, 0xffffffe ;
        /*0070*/                   IMAD.MOV.U32 R1, RZ, RZ, R2 ;
        /*0080*/                   LOP3.LUT R1, R1, 0xff, RZ, 0xc0, !PT ;
        /*0090*/                   ULOP3.LUT UR1, UR1, 0xff, URZ, 0xc0, !UPT ;
        /*00a0*/                   NOP ;
        /*00b0*/              @!P0 BRA 0x20 ;
        /*00c0*/                   MUFU.RCP R4, R4 ;
        /*00c8*/                   FMUL R6, R6, R4 ;
        /*00d0*/                   FFMA R4, R4, R4, R4 ;
        /*00e0*/                   HFMA2 R4, R4, R4, R4 ;
        /*00f0*/                   BRA 0xf0;
"""
GCN = """
kernel:
	v_fma_f32 v1, v2, v3, v4
.LBB0_1:
	v_cvt_f32_i32_e32 v1, v2
	s_waitcnt vmcnt(0)
	global_load_ubyte v1, v2, s[0:1]
	v_pk_fma_f32 v[2:3], v[0:1], v[2:3], v[4:5]
	v_mad_u64_u32 v[0:1], s[2:3], v4, v5, 0
	v_rcp_f32_e32 v1, v1
	v_mul_f32_e32 v1, 0x4f7ffffe, v1
	s_cbranch_scc1 .LBB0_1
	v_rcp_f32_e32 v1, v1
	v_mul_f32_e32 v1, v2, v1
	s_endpgm
		.amdhsa_float_denorm_mode_32 0
    .private_segment_fixed_size: 4
    .sgpr_spill_count: 1
    .vgpr_count:     44
    .vgpr_spill_count: 2
"""


def test_counts_are_those_of_a_text() -> None:
    sass = read_sass(SASS)
    assert (sass.registers, sass.spilled, sass.instructions, sass.narrow) == (40, 24, 10, 1)
    assert (sass.conversions, sass.integers, sass.fused, sass.flushing) == (2, 3, 2 + 1 + 2, 2)
    gcn = read_gcn(GCN)
    assert (gcn.registers, gcn.spilled, gcn.instructions, gcn.narrow) == (44, 7, 5, 1)
    assert (gcn.conversions, gcn.fused, gcn.flushing) == (1, 3, 2)
    with pytest.raises(AssertionError, match="no loop"):
        read_sass(SASS.replace("BRA 0x20", "BRA 0xc0"))

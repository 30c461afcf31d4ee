"""Counts of the instructions of compiled kernels: SASS of NVIDIA and GCN of AMD, as disassemblers print them.

The loop of a kernel is its longest backward branch. A persistent program runs it once per tile, so its
instructions per value determine the speed. The counts are static: an inner loop is counted once, and the
slow path of a branch counts as if it ran.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class MachineCode(NamedTuple):
    """Numbers of one kernel."""

    registers: int
    spilled: int
    """Bytes of local memory per thread, plus spilled registers on AMD."""
    instructions: int
    """Of the loop. On AMD of vectors alone, because scalar instructions have a unit of their own."""
    conversions: int
    """Of the loop: those of the slow unit of an NVIDIA GPU, and all of floats on AMD."""
    integers: int
    """Of the loop: instructions of the integer pipe of an NVIDIA GPU, which has half the rate; 0 on AMD."""
    fused: int
    """Multiply-adds of floats with one rounding, in the whole kernel; a packed one counts twice."""
    flushing: int
    """Instructions that flush subnormal floats or approximate, in the whole kernel; on AMD also the mode."""
    narrow: int
    """Loads and stores of single bytes in global memory, in the whole kernel."""


_SASS_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
# The halves of a register pair by an immediate: a way to move a constant.
_MOVE = re.compile(r"^\w+, -RZ, RZ,")
_SASS_SLOW = re.compile(r"MUFU|I2F(?!P)|F2I(?!P)|F2F(?!P)")
_SASS_FLOAT = re.compile(r"FADD|FMUL|FFMA|IMAD")
_SASS_MEMORY = re.compile(r"LD|ST|ATOM|RED|SHFL")
_SASS_CONTROL = re.compile(
    r"BAR|BRA|EXIT|BSSY|BSYNC|WARPSYNC|CALL|RET|DEPBAR|YIELD|BREAK|ERRBAR|MEMBAR|C?S2R"
)
_SASS_FUSED = re.compile(r"[DFH]FMA|\w*MMA")
_SASS_FLUSHING = re.compile(r"F(?:ADD|MUL|FMA|SETP?|SEL|MNMX)\d?\b.*\.FTZ|MUFU")
# Integer division adds this to the bits of a float's reciprocal, and corrects the quotient: it is exact.
_SASS_DIVISION = (r"MUFU\.RCP", "0xffffffe")


def read_sass(text: str) -> MachineCode:
    """Count the output of `cuobjdump -sass -res-usage` for one kernel."""
    usage = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    code = [(int(at, 16), op, rest) for at, op, rest in _SASS_LINE.findall(text)]
    code = [each for each in code if each[1] != "NOP"]
    targets = [(at, _hex(rest)) for at, op, rest in code if op.split(".")[0] == "BRA"]
    start, end = _longest([(target, at) for at, target in targets if target is not None])
    loop = [op for at, op, _ in code if start <= at <= end]
    real = [op for _, op, rest in code if not (op.startswith("HFMA2") and _MOVE.match(rest))]
    return MachineCode(
        registers=usage["REG"],
        spilled=usage["STACK"] + usage["LOCAL"],
        instructions=len(loop),
        conversions=sum(_SASS_SLOW.match(op) is not None for op in loop),
        integers=sum(_is_integer(op) for op in loop),
        fused=sum(1 + ("2" in op.split(".")[0]) for op in real if _SASS_FUSED.match(op)),
        flushing=sum(_SASS_FLUSHING.match(op) is not None for op in real)
        - _integer_divisions([(op, rest) for _, op, rest in code], *_SASS_DIVISION),
        narrow=sum(re.match(r"(?:LDG|STG)\b.*\.[US]8\b", op) is not None for op in real),
    )


def _is_integer(op: str) -> bool:
    # Names that begin with U are of the uniform pipe.
    others = (_SASS_SLOW, _SASS_FLOAT, _SASS_MEMORY, _SASS_CONTROL)
    return not op.startswith(("U", "R2UR")) and not any(each.match(op) for each in others)


def _hex(operands: str) -> int | None:
    found = re.search(r"\b0x([0-9a-f]+)", operands)
    return found and int(found[1], 16)


_GCN_LINE = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)(.*)")
_GCN_FUSED = re.compile(r"v_(?:pk_)?(?:fma|fmac|mac|mad|fma_mix|mad_mix)_(?:legacy_)?f|v_dot|v_mfma")
_GCN_APPROXIMATE = re.compile(r"v_(?:rcp|rsq|sqrt|exp|log|sin|cos)_")
# Integer division multiplies the reciprocal by 2**32 - 512, and corrects the quotient: it is exact.
_GCN_DIVISION = (r"v_rcp_(?:iflag_)?f32_e(?:32|64)", "0x4f7ffffe")


def read_gcn(text: str) -> MachineCode:
    """Count an assembly text of AMD's compiler for one kernel."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    branches: list[tuple[int, int]] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.\w+):", line):
            labels[label[1]] = len(code)
        elif found := _GCN_LINE.match(line):
            op, rest = found.groups()
            target = re.match(r"\s+(\.\w+)", rest) if op.startswith(("s_cbranch", "s_branch")) else None
            if target and target[1] in labels:
                branches.append((labels[target[1]], len(code)))
            code.append((op, rest))
    start, end = _longest(branches)
    loop = Counter(op for op, _ in code[start : end + 1])
    numbers = _metadata(
        text, "vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"
    )
    (denormals,) = re.findall(r"\.amdhsa_float_denorm_mode_32\s+(\d)", text)
    return MachineCode(
        registers=numbers["vgpr_count"],
        spilled=sum(numbers.values()) - numbers["vgpr_count"],
        instructions=sum(n for op, n in loop.items() if op.startswith("v_")),
        conversions=sum(n for op, n in loop.items() if op.startswith("v_cvt_")),
        integers=0,
        fused=sum(1 + ("_pk_" in op) for op, _ in code if _GCN_FUSED.match(op)),
        flushing=sum(_GCN_APPROXIMATE.match(op) is not None for op, _ in code)
        - _integer_divisions(code, *_GCN_DIVISION)
        + (denormals != "3"),
        narrow=sum(
            re.match(r"(?:global|buffer|flat)_(?:load|store)_\w*byte\b", op) is not None for op, _ in code
        ),
    )


def _integer_divisions(code: Sequence[tuple[str, str]], reciprocal: str, constant: str) -> int:
    """Count the reciprocals whose next use is with this constant; divisions of floats look different."""
    count = 0
    for place, (op, rest) in enumerate(code):
        if re.fullmatch(reciprocal, op):
            register = re.compile(rf"\b{rest.split(',')[0].strip()}\b")
            uses = (later for _, later in code[place + 1 :] if register.search(later))
            count += constant in next(uses, "")
    return count


def _metadata(text: str, *names: str) -> dict[str, int]:
    return {name: int(re.findall(rf"\.{name}: +(\d+)", text)[0]) for name in names}


def _longest(branches: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the ends of the longest backward branch, (target, branch)."""
    loops = [each for each in branches if each[0] < each[1]]
    assert loops, "there is no loop"
    return max(loops, key=lambda each: each[1] - each[0])

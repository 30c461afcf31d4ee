"""An interpreter of a few PTX instructions, for one thread between its load and its store."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

_WORD = 0xFFFFFFFF


def _permute(a: int, b: int, selector: int) -> int:
    """Select four of the eight bytes of a (the lower four) and b, the lowest result by the lowest digit."""
    source = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")


def _each_half(operation: Callable[[int, int], int], a: int, b: int) -> int:
    return operation(a & _WORD, b & _WORD) | operation(a >> 32, b >> 32) << 32


def _float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def _bits(value: np.float32) -> int:
    return int(value.view(np.uint32))


_OPERATIONS: dict[str, Callable[..., int]] = {
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _permute,
    "add.f32": lambda a, b: _bits(_float(a) + _float(b)),
    "add.f32x2": lambda a, b: _each_half(_OPERATIONS["add.f32"], a, b),
    "sub.f32": lambda a, b: _bits(_float(a) - _float(b)),
    "cvt.rzi.s32.f32": lambda a: int(_float(a)) & _WORD,
}


def stored_words(ptx: str, loaded: Sequence[int]) -> list[int]:
    """Return the words that a thread stores if it loads these; both are one vector.

    Instructions whose operands do not depend on the loaded words compute addresses and are skipped.
    """
    known: dict[str, int] = {}
    for line in ptx.splitlines():
        found = re.match(r"\s*([a-z][\w.]*)\s+([^;]*);", line)
        if not found:
            continue
        op, operands = found[1].replace(".rn", ""), re.findall(r"%?\w+", found[2])
        first, *rest = operands
        if op.startswith("ld.global.v"):
            known |= dict(zip(operands, loaded, strict=False))
        elif op.startswith("st.global.v"):
            return [known[name] for name in operands[-len(loaded) :]]
        elif op == "mov.b32" and first not in known and not rest[0].startswith("%"):
            known[first] = _value(rest[0], known)
        elif op == "mov.b64" and rest[-1] in known:
            if found[2].startswith("{"):
                known |= {first: known[rest[-1]] & _WORD, rest[0]: known[rest[-1]] >> 32}
            else:
                low, high = (_value(each, known) for each in rest)
                known[first] = low | high << 32
        elif any(name in known for name in rest):
            known[first] = _OPERATIONS[op](*(_value(each, known) for each in rest))
    raise AssertionError("the thread stores no vector")


def _value(operand: str, known: dict[str, int]) -> int:
    if operand in known:
        return known[operand]
    return int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)

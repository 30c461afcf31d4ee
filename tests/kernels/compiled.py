"""Kernels compiled for a GPU that is not there, as the operators would launch them.

The host code of an operator runs with CPU tensors up to the launch, which compiles for a target instead.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from sdp4bit.kernels.triton import backend
from sdp4bit.kernels.triton import launch as launch_module
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey
from tests.oracles.machine_code import MachineCode, read_gcn, read_sass

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")},
}
KEY = RoundingKey(0xFFFFFFFF, 3, row_stride=1 << 20)
DITHER = KEY._replace(dither=True)


@dataclass(frozen=True)
class Launch:
    """A compiled kernel, its constants by name, and the threads of a program."""

    kernel: Any
    constants: dict[str, Any]
    threads: int

    @property
    def values(self) -> int:
        """Values of a thread per tile; for checksums words of 8 bytes."""
        given = self.constants
        if "WORDS" in given:
            return int(given["WORDS"]) // self.threads
        slots = given["ROWS"] if "ROWS" in given else given["GROUPS"] * given["SLOTS"]
        return 32 * int(slots) // self.threads


@contextmanager
def compiling(name: str, **changes: Any) -> Iterator[list[Launch]]:
    """Compile the launches inside the block for a target, with changed options."""
    target, launches = TARGETS[name], []
    active = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 1000 + list(TARGETS).index(name),  # kernels are kept per device
        get_current_stream=lambda _: 0,
    )

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **options | changes)
            constants = dict(zip([each.name for each in kernel.params], arguments, strict=True))
            launches.append(Launch(compiled, constants, options["num_warps"] * target.warp_size))

        return launch

    with (
        patch.object(driver, "_active", active),
        patch.object(triton.JITFunction, "__getitem__", compile_only),
        patch.object(launch_module, "_IS_HIP", target.backend == "hip"),
        patch.object(backend, "_IS_COMPILED", False),
        patch.object(backend, "_warp_size", lambda _: target.warp_size),
        patch.object(backend, "_multiprocessors", lambda _: 132),
        ops.use_backend("triton"),
    ):
        yield launches


def _messages(count: int, layout: MessageLayout) -> torch.Tensor:
    return torch.zeros(count, layout.nbytes, dtype=torch.uint8)


def subtract_quantize(numel: int, *, bits: float, group_size: int = 2048) -> None:
    layout, replica = MessageLayout(numel=numel, bits=bits, group_size=group_size), torch.zeros(numel)
    out = _messages(1, layout)[0]
    ops.subtract_quantize(torch.zeros(numel), replica=replica.bfloat16(), out=out, layout=layout)


def dequantize_add(numel: int, *, bits: float) -> None:
    layout, replica = MessageLayout(numel=numel, bits=bits, group_size=2048), torch.zeros(2, numel).bfloat16()
    ops.dequantize_add(_messages(2, layout), replica=replica, layout=layout, accumulate=True)


def hadamard_quantize(
    numel: int, *, bits: float, dtype: torch.dtype = torch.float32, rounding: RoundingKey = KEY
) -> None:
    parts = 1 if rounding.dither else 2
    layout = MessageLayout(numel=numel, bits=bits, group_size=128, parts=parts)
    values = torch.zeros(parts, 4, numel, dtype=dtype).transpose(0, 1)
    ops.hadamard_quantize(values, out=_messages(4, layout), layout=layout, hadamard=True, rounding=rounding)


def dequantize_reduce_quantize(numel: int, *, count: int, bits: float = 4, own: bool = True) -> None:
    received = MessageLayout(numel=numel, bits=8, group_size=128, parts=2)
    sent = MessageLayout(numel=numel, bits=bits, group_size=128)
    kept: dict[str, Any] = {"skip": 1, "own": torch.zeros(numel), "hadamard": True, "multiplier": 1 / 128}
    named: dict[str, Any] = {"received": received, "out": _messages(2, sent), "sent": sent}
    named |= {"rounding": DITHER, "dither": None, **(kept if own else {})}
    ops.dequantize_reduce_quantize(_messages(count, received), **named)


def dequantize_reduce_hadamard(numel: int, *, count: int, bits: float = 4, dither: bool = True) -> None:
    """With the own node's part, whose message is not read: `count` messages are."""
    layout, own = MessageLayout(numel=numel, bits=bits, group_size=128), torch.zeros(numel)
    named: dict[str, Any] = {"out": torch.zeros(numel), "layout": layout, "hadamard": True}
    named |= {"multiplier": 1 / 128, "dither": DITHER if dither else None, "skip": 1, "own": own}
    ops.dequantize_reduce_hadamard(_messages(count + 1, layout), **named)


def dequantize_reduce_pieces(numel: int) -> None:
    """Three pieces, of two messages each."""
    layout, stride = MessageLayout(numel=numel, bits=4, group_size=128), numel // 32 * 32
    named: dict[str, Any] = {"pieces": 3, "stride": stride, "hadamard": True, "multiplier": 1 / 128}
    named |= {"dither": KeySeries((1 << 64) - 1, (1 << 63) + 1)}
    out = torch.zeros(2 * stride + layout.numel)
    ops.dequantize_reduce_pieces(_messages(6, layout), out=out, layout=layout, **named)


def add_checksum(numel: int) -> None:
    ops.add_checksum(torch.zeros(4 * numel).bfloat16(), out=torch.zeros((), dtype=torch.int64))


def launched(
    target: str, call: Callable[[int], None], *, numels: tuple[int, ...] = (4096,), **changes: Any
) -> Launch:
    """Compile the one kernel that calls of an operator launch, for rows of these lengths."""
    with compiling(target, **changes) as launches:
        for numel in numels:
            call(numel)
    kernels = {id(launch.kernel): launch for launch in launches}
    assert len(kernels) == 1, f"{len(kernels)} kernels for rows of {numels} values"
    return launches[0]


@cache
def machine_code(kernel: Any) -> MachineCode:
    """Return the counts of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        return read_gcn(kernel.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return read_sass(text)


KERNELS: dict[str, Callable[[int], None]] = {
    "subtract_quantize, fp32 and bf16 to 4 bits": partial(subtract_quantize, bits=4),
    "subtract_quantize, fp32 and bf16 to 3.5 bits": partial(subtract_quantize, bits=3.5),
    "dequantize_add, 4 bits to bf16": partial(dequantize_add, bits=4),
    "dequantize_add, 3.5 bits to bf16": partial(dequantize_add, bits=3.5),
    "hadamard_quantize, fp32 to 8 bits": partial(hadamard_quantize, bits=8),
    "hadamard_quantize, bf16 to 8 bits": partial(hadamard_quantize, bits=8, dtype=torch.bfloat16),
    "hadamard_quantize, bf16 to 4 bits": partial(
        hadamard_quantize, bits=4, dtype=torch.bfloat16, rounding=DITHER
    ),
    "hadamard_quantize, fp32 to 3.5 bits": partial(hadamard_quantize, bits=3.5, rounding=DITHER),
    **{
        f"dequantize_reduce_quantize, {count} messages of 8 bits to {bits} bits": partial(
            dequantize_reduce_quantize, count=count, bits=bits
        )
        for count, bits in ((4, 4), (8, 4), (8, 3.5))
    },
    **{
        f"dequantize_reduce_hadamard, {nodes} nodes, {bits} bits": partial(
            dequantize_reduce_hadamard, count=nodes - 1, bits=bits
        )
        for nodes, bits in ((2, 4), (4, 4), (8, 4), (4, 3.5))
    },
    "dequantize_reduce_pieces, 4 bits": dequantize_reduce_pieces,
    "add_checksum": add_checksum,
}
"""Calls in the default configuration and with 3.5 bits. Both sums include the own node's part."""

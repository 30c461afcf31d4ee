"""A launch that skips Triton's own way launches the same kernel with the same arguments.

On a driver that launches nothing: kernels are compiled for a real target, and their arguments are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from sdp4bit.kernels.triton import backend
from sdp4bit.kernels.triton import launch as launch_module
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey

if not backend._IS_COMPILED:
    pytest.skip("Triton interprets kernels in this process", allow_module_level=True)

try:  # All of these names are private, so they may move in any release.
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
except ImportError:
    pytest.skip("this Triton has no known way to compile without a GPU", allow_module_level=True)

Call = tuple[Any, ...]


@pytest.fixture
def calls() -> Iterator[list[Call]]:
    """The kernel, the grid and the arguments of every launch."""
    reached: list[Call] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.source = source

        def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
            # stream, function, metadata of two kinds, two hooks, and the arguments
            reached.append((self.source, x, y, z, *map(identity, rest[6:])))

    device = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 2000,  # Triton keeps compiled kernels per device number
        get_current_stream=lambda _: 0,
        launcher_cls=Launcher,
        map_python_to_cpp_type=str,
        utils=SimpleNamespace(
            load_binary=lambda *_: ("module", "function", 64, 0, 1024),  # and registers, spills, threads
            get_device_properties=lambda _: device,
            unload_module=lambda _: None,
        ),
    )
    # Kernels that Triton keeps for the device hold the launcher they were made with, and its list.
    backend.quantize_kernel.device_caches.pop(2000, None)
    with (
        patch.object(driver, "_active", active),
        patch.object(backend, "_IS_COMPILED", False),
        patch.object(backend, "_warp_size", lambda _: 32),
        patch.object(backend, "_multiprocessors", lambda _: 132),
        patch.dict(launch_module._known, clear=True),
        ops.use_backend("triton"),
    ):
        yield reached


def identity(argument: Any) -> Any:
    """The value of an argument on the device; views of one tensor are new objects in each call."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.data_ptr(), argument.dtype, argument.shape, argument.stride()


class Forgetful(dict[Any, Any]):
    """Knows no kernel, so that every launch is Triton's own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


BUFFER = torch.zeros(4096 + 8, dtype=torch.float32)


def quantize(numel: int, offset: int, k0: int, dtype: torch.dtype, bits: int, hadamard: bool) -> None:
    layout = MessageLayout(numel=numel, bits=bits, group_size=128)
    values, out = BUFFER.view(dtype)[offset : offset + numel].view(1, 1, -1), BUFFER.view(torch.uint8)
    rounding = None if k0 < 0 else RoundingKey(k0, 1, row_stride=(1 << 32) * (k0 & 32))
    named: dict[str, Any] = {"layout": layout, "hadamard": hadamard, "rounding": rounding}
    ops.hadamard_quantize(values, out=out[None, : layout.nbytes], **named)


VARIANTS = [
    *product((4096, 4095, 16), (0, 1, 8), (-1, 0, 32, 0xFFFFFFDF), (torch.bfloat16,), (4,), (True,)),
    *product((4096,), (0, 1, 4), (0,), (torch.float32,), (4, 8), (True, False)),
]
"""Lengths, alignments, numbers of 32 and of 64 bits, types and constants."""


def test_known_kernels_are_those_that_triton_chooses(calls):
    """Twice through many calls: the kernel, the grid and the arguments of Triton's own launch."""
    with patch.object(launch_module, "_known", Forgetful()):
        for variant in VARIANTS:
            quantize(*variant)
    expected = calls.copy()
    kernels = {id(source) for source, *_ in expected}
    assert 10 < len(kernels) < len(VARIANTS)
    for _ in range(2):
        calls.clear()
        for variant in VARIANTS:
            quantize(*variant)
        for call, own, variant in zip(calls, expected, VARIANTS, strict=True):
            assert call[0] is own[0] and call == own, variant
    assert len(launch_module._known) == len(kernels)


@pytest.mark.parametrize("name", ["quantize", "dequantize", "reduce_quantize", "reduce_hadamard", "checksum"])
def test_numbers_are_never_specialized(name):
    """Arguments that choose a kernel: tensors, numbers of which only the type counts, constants."""
    kernel = getattr(backend, f"{name}_kernel")
    kinds = [
        "constant" if p.is_constexpr else "number" if p.do_not_specialize else "tensor" for p in kernel.params
    ]
    assert kinds == sorted(kinds, key=["tensor", "number", "constant"].index)
    assert kinds.count("tensor") == (2 if name in ("dequantize", "checksum") else 3)


def test_a_grid_has_several_waves_of_programs_unless_there_are_fewer_tiles() -> None:
    """One wave took up to 31 % longer on an H200."""
    device, at_once = torch.device("cuda"), 132 * 4 * (512 // 80) // 4
    with patch.object(backend, "_multiprocessors", lambda _: 132):
        for rows in (1, 4):
            programs = rows * backend._programs(1 << 20, rows, 4, 80, device)
            assert 4 * at_once < programs < 16 * at_once
        assert backend._programs(100, 1, 4, 80, device) == 100

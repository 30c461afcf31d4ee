"""A CUDA driver for Triton that launches nothing: what a call of an operator does up to the driver.

    python -m tests.kernels.fake_driver      # microseconds of a call on this CPU, as a Markdown table

Kernels are compiled for a real target, by Triton, and given to a launcher that writes down its arguments.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.runtime import driver

from sdp4bit.kernels.triton import backend
from sdp4bit.kernels.triton import launch as launch_module
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey
from tests.kernels.compiled_code import MULTIPROCESSORS, TARGETS

TARGET = TARGETS["sm_90"]


class DriverCall(NamedTuple):
    """One kernel that reached the driver."""

    kernel: Any  # triton.compiler.CompiledKernel's source, of which there is one per variant
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@contextmanager
def fake_driver() -> Iterator[list[DriverCall]]:
    """Let operators launch their kernels of CPU tensors on a driver that only lists them."""
    calls: list[DriverCall] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.source = source

        def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
            # stream, function, metadata of two kinds, two hooks, and the arguments
            calls.append(DriverCall(self.source, (x, y, z), rest[6:]))

    device = {"max_shared_mem": 232448, "multiprocessor_count": MULTIPROCESSORS, "warpSize": 32}
    loaded = "module", "function", 64, 0, 1024  # and registers, spills, threads
    active = SimpleNamespace(
        get_current_target=lambda: TARGET,
        get_current_device=lambda: 2000,  # Triton keeps compiled kernels per device number
        get_current_stream=lambda _: 0,
        launcher_cls=Launcher,
        map_python_to_cpp_type=str,
        utils=SimpleNamespace(
            load_binary=lambda *_: loaded,
            get_device_properties=lambda _: device | {"max_num_regs": 65536},
            unload_module=lambda _: None,
        ),
    )
    # Kernels that Triton keeps for the device hold the launcher they were made with, and its list.
    for kernel in KERNELS:
        kernel.device_caches.pop(2000, None)
    with (
        patch.object(driver, "_active", active),
        patch.object(backend, "_IS_COMPILED", False),
        patch.object(backend, "_warp_size", lambda _: 32),
        patch.object(backend, "_multiprocessors", lambda _: MULTIPROCESSORS),
        patch.dict(launch_module._known, clear=True),
        ops.use_backend("triton"),
    ):
        yield calls


KERNELS = (
    *(backend.quantize_kernel, backend.dequantize_kernel),
    *(backend.reduce_quantize_kernel, backend.reduce_hadamard_kernel),
)
KEY = RoundingKey(1, 2, row_stride=1 << 20)


def operator_calls(numel: int = 1 << 20, *, offset: int = 0) -> dict[str, Callable[[], None]]:
    """A call of every operator, as a step makes it.

    Args:
        offset: bytes from an address of 16 bytes to the messages, in units of messages' alignment, and values
            from one to the values.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.zeros(count + offset, dtype=dtype)[offset:].view(shape)

    weights = MessageLayout(numel=numel, bits=4, group_size=2048)
    main, replica = zeros(numel, dtype=torch.bfloat16), zeros(1, numel, dtype=torch.bfloat16)
    message = torch.zeros(1, weights.nbytes, dtype=torch.uint8)
    row = numel // 8
    intra = MessageLayout(numel=row, bits=8, group_size=128, parts=2)
    gradient, sent = zeros(2, 4, row).transpose(0, 1), torch.zeros(4, intra.nbytes, dtype=torch.uint8)
    inter = MessageLayout(numel=row, bits=4, group_size=128)
    reduced, result = torch.zeros(2, inter.nbytes, dtype=torch.uint8), zeros(row)
    transform = Hadamard()
    return {
        "subtract_quantize": lambda: ops.subtract_quantize(
            main, replica=replica[0], out=message[0], layout=weights, rounding=None
        ),
        "dequantize_add": lambda: ops.dequantize_add(
            message,
            replica=replica,
            layout=weights,
            accumulate=True,
            dither=None,
        ),
        "hadamard_quantize": lambda: ops.hadamard_quantize(
            gradient, out=sent, layout=intra, hadamard=transform, rounding=KEY
        ),
        "dequantize_reduce_quantize": lambda: ops.dequantize_reduce_quantize(
            sent,
            received=intra,
            out=reduced,
            sent=inter,
            rounding=KEY,
            dither=None,
        ),
        "dequantize_reduce_hadamard": lambda: ops.dequantize_reduce_hadamard(
            reduced,
            out=result,
            layout=inter,
            hadamard=transform,
            multiplier=1 / 256,
            dither=None,
        ),
    }


def measure(repetitions: int = 300, rounds: int = 15) -> dict[str, tuple[float, float]]:
    """Return microseconds of the CPU per call, of Triton's own launch and of this library's, medians.

    Rounds of both alternate, so that a disturbance hits them alike.
    """
    taken: dict[str, tuple[list[float], list[float]]] = {}
    with fake_driver() as driver_calls:
        for name, run in operator_calls().items():
            taken[name] = [], []
            for round_ in range(2 * rounds + 2):
                is_known = round_ % 2
                with patch.object(launch_module, "_known", {} if is_known else Forgetful()):
                    run()
                    start = time.process_time()
                    for _ in range(repetitions):
                        run()
                    seconds = time.process_time() - start
                driver_calls.clear()
                if round_ > 1:
                    taken[name][is_known].append(seconds / repetitions * 1e6)
    return {name: (statistics.median(a), statistics.median(b)) for name, (a, b) in taken.items()}


class Forgetful(dict[Any, Any]):
    """Knows no kernel, so that every launch is Triton's own."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def main() -> None:
    print("| operator | Triton's launch, microseconds | this library's | ratio |\n| --- | --- | --- | --- |")
    for name, (own, known) in measure().items():
        print(f"| `{name}` | {own:.1f} | {known:.1f} | {known / own:.2f} |")


if __name__ == "__main__":
    main()

"""How long the quantization kernels take: memory traffic or instructions, whichever takes longer.

Numbers of data sheets and of compiled code; no kernel of this library has been timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["a100", "h100", "h200", "b200"]
Operator = Literal[
    "hadamard_quantize_8",
    "hadamard_quantize_4",
    "dequantize_reduce_quantize",
    "dequantize_reduce_hadamard",
    "subtract_quantize",
    "dequantize_add",
]

INSTRUCTIONS: dict[Operator, tuple[float, float]] = {
    "hadamard_quantize_8": (18.2, 0),
    "hadamard_quantize_4": (17.9, 0),
    "dequantize_reduce_quantize": (5.9, 5.65),
    "dequantize_reduce_hadamard": (14.6, 4.5),
    "subtract_quantize": (17.6, 0),
    "dequantize_add": (17.6, 0),
}
"""Instructions of a thread per value that an operator writes: a number, and one per message that it sums.

Counted in the code that Triton compiles for an H100 (docs/benchmarks.md): with stochastic rounding, 28.5 to
sum 4 messages of 8 bits and round to 4, 51.1 for 8 messages; 32.6 for `dequantize_reduce_hadamard` of 4, with
the share per message of an earlier count. Whoever changes a kernel changes its line here."""

BELOW_4_BITS: dict[tuple[Operator, int], tuple[float, float]] = {
    ("hadamard_quantize_4", 3): (22.1, 0),
    ("hadamard_quantize_4", 2): (18.9, 0),
    ("dequantize_reduce_quantize", 3): (10.5, 5.65),
    ("dequantize_reduce_quantize", 2): (7.2, 5.65),
    ("dequantize_reduce_hadamard", 3): (14.6, 7.0),
    ("dequantize_reduce_hadamard", 2): (14.6, 4.6),
    ("subtract_quantize", 3): (16.4, 0),
    ("subtract_quantize", 2): (14.8, 0),
    ("dequantize_add", 3): (20.6, 0),
    ("dequantize_add", 2): (17.8, 0),
}
"""The same with codes of 3 and 2 bits: those written or, where none is, those read; groups of 128. The last
share of a message is that which makes 42.6 (3 bits) and 33.0 (2) of 4 messages."""

DRAM_SHARE = 0.92
"""Of the nominal memory bandwidth, what a copy reaches."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as its data sheet has it, and what that allows kernels and transfers."""

    dram_bandwidth: float
    """Bytes per second, nominal."""
    issue_rate: float
    """Instructions of a thread per second: multiprocessors x 4 schedulers x 32 threads x clock."""
    nvlink_bandwidth: float
    """Bytes per second and direction to the other devices of the node, nominal."""


DEVICES: dict[DeviceName, Device] = {
    "a100": Device(dram_bandwidth=2.04e12, issue_rate=108 * 128 * 1.41e9, nvlink_bandwidth=300e9),
    "h100": Device(dram_bandwidth=3.35e12, issue_rate=132 * 128 * 1.755e9, nvlink_bandwidth=450e9),
    "h200": Device(dram_bandwidth=4.8e12, issue_rate=132 * 128 * 1.755e9, nvlink_bandwidth=450e9),
    "b200": Device(dram_bandwidth=8e12, issue_rate=148 * 128 * 1.85e9, nvlink_bandwidth=900e9),
}
NVLINK_SHARE = 2 / 3
"""Of the nominal rate of NVLink, what all-to-alls are taken to reach."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One operator on a number of values."""

    operator: Operator
    values: float
    """That it writes."""
    messages: int = 0
    """That it sums."""
    bits: int = 4
    """Of the codes that it writes or, if it writes none, reads; 4 stands for all that are not fewer."""
    nbytes: float
    """That it reads and writes."""

    def seconds(self, device: Device) -> float:
        """Return how long it takes at least: the longer of memory traffic and perfect issue."""
        usual = INSTRUCTIONS[self.operator]
        fixed, per_message = BELOW_4_BITS.get((self.operator, self.bits), usual)
        instructions = self.values * (fixed + per_message * self.messages)
        return max(self.nbytes / (DRAM_SHARE * device.dram_bandwidth), instructions / device.issue_rate)

    def times(self, count: int) -> Kernel:
        """Return the same on as many values as so many calls have."""
        return Kernel(
            operator=self.operator,
            values=self.values * count,
            messages=self.messages,
            bits=self.bits,
            nbytes=self.nbytes * count,
        )


def kernel_seconds(kernels: Iterable[Kernel], device: Device) -> float:
    """Return how long kernels take one after the other."""
    return sum(kernel.seconds(device) for kernel in kernels)

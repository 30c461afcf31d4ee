"""Speeds of GPUs from data sheets, and limits of the quantization kernels from their machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdp4bit_lab.plan.host import measured

DeviceName = Literal["a40", "l40s", "a100", "h100", "h200", "b200"]
LinkName = Literal["pcie3", "pcie4", "pcie5", "nvlink"]
Operator = Literal["quantize to 8 bits", "quantize to 4 bits", "reduce and requantize", "reduce", "weights"]
"""Fused operators; "weights" are the two that send and add a difference."""

MEMORY_SHARE: float = measured()["kernels"]["memory_share"]
"""Fraction of the data sheet's memory bandwidth that the operators reach on an H200 if arithmetic does not
limit them. Assumed for other GPUs."""
LINK_SHARE = 2 / 3
"""Assumed fraction of the rate of NVLink, or of a PCIe slot with its own path, that all-to-alls reach."""
PCIE_BANDWIDTH: dict[LinkName, float] = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63e9}
"""Bytes per second and direction of 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Memory traffic and arithmetic of one operator."""

    operator: Operator
    moved_bytes: float
    """Read and written."""
    values: float
    """Values that are quantized, or sums."""
    messages: int = 0
    """Messages that each sum adds."""


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """Arithmetic of the operators: seconds per value, and per value and message.

    Derived from the instructions of the compiled Triton kernels and the rates of a multiprocessor. Operators
    without an entry are bound by memory on all devices.
    """

    quantize_8: float
    quantize_4: float
    requantize: tuple[float, float]
    """Per sum, and per message of 8 bits in it (conversions of integers)."""
    reduce: float
    """Per message of 4 bits in a sum with dither (integer arithmetic)."""

    def seconds(self, work: Work) -> float:
        """Return the time of the arithmetic alone."""
        if work.operator == "quantize to 8 bits":
            return work.values * self.quantize_8
        if work.operator == "quantize to 4 bits":
            return work.values * self.quantize_4
        if work.operator == "reduce and requantize":
            once, each = self.requantize
            return work.values * (once + each * work.messages)
        return work.values * self.reduce * work.messages if work.operator == "reduce" else 0.0

    def scaled(self, factor: float) -> KernelLimits:
        once, each = self.requantize
        return KernelLimits(
            quantize_8=factor * self.quantize_8,
            quantize_4=factor * self.quantize_4,
            requantize=(factor * once, factor * each),
            reduce=factor * self.reduce,
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU; those with NVLink in their SXM form."""

    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    nvlink_bandwidth: float | None
    """Bytes per second and direction to all other GPUs of the node; None: the node has PCIe 4 only."""
    kernels: KernelLimits

    @property
    def link_bandwidth(self) -> float:
        return self.nvlink_bandwidth or PCIE_BANDWIDTH["pcie4"]


_HOPPER = KernelLimits(
    quantize_8=0.79e-12, quantize_4=0.885e-12, requantize=(0.325e-12, 0.299e-12), reduce=0.388e-12
)
DEVICES: dict[DeviceName, Device] = {
    # Multiprocessors and clock scale the arithmetic from an H100, 132 x 1.76 GHz. An A40 has 84 x 1.74 GHz,
    # an L40S 142 x 2.52 GHz, and an A100 108 x 1.41 GHz.
    "a40": Device(memory=48e9, memory_bandwidth=696e9, nvlink_bandwidth=None, kernels=_HOPPER.scaled(1.59)),
    "l40s": Device(memory=48e9, memory_bandwidth=864e9, nvlink_bandwidth=None, kernels=_HOPPER.scaled(0.65)),
    "a100": Device(
        memory=80e9, memory_bandwidth=2.04e12, nvlink_bandwidth=300e9, kernels=_HOPPER.scaled(1.52)
    ),
    "h100": Device(memory=80e9, memory_bandwidth=3.35e12, nvlink_bandwidth=450e9, kernels=_HOPPER),
    "h200": Device(memory=141e9, memory_bandwidth=4.8e12, nvlink_bandwidth=450e9, kernels=_HOPPER),
    "b200": Device(
        memory=180e9,
        memory_bandwidth=8e12,
        nvlink_bandwidth=900e9,
        kernels=KernelLimits(
            quantize_8=0.635e-12, quantize_4=0.72e-12, requantize=(0.279e-12, 0.251e-12), reduce=0.33e-12
        ),
    ),
}

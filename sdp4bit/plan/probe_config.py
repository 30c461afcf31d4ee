"""Settings of the probe command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sdp4bit.pretrain.launch.config import ParallelConfig
from sdp4bit.pretrain.options import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What the probe sends and computes, and where it writes what it finds."""

    out: Path = Path("runs/probe.json")
    """JSON file for `sdp4bit plan --probe`."""
    megabytes: float = 16.0
    """MB (1e6 bytes) that each rank sends in one exchange, over all peers of the level together."""
    rounds: int = 5
    """Timed exchanges of each level, after two that warm up; the median counts."""
    quantized_values: int = 4 * 1024**2
    """Values of the tensor that the quantization kernels are timed on."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        require(
            self.parallel.simulated_ranks is None,
            "--simulated-ranks has no network to measure: leave it out of probe",
        )
        require(self.megabytes > 0, f"--megabytes {self.megabytes} must be positive")
        require_at_least("--rounds", self.rounds, 1)
        require_at_least("--quantized-values", self.quantized_values, 4096)

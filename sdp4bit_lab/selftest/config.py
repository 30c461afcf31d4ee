"""Settings of the self-test."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.shared_gpu import MPSMode
from sdp4bit_lab.common.settings import SettingError, option, require_at_least

CheckName = Literal[
    "facts", "kernels", "collectives", "exchanges", "streams", "training", "removal", "recommendation"
]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
_TIMEOUT_MINUTES = 2.0


@dataclass(frozen=True, kw_only=True)
class SelftestConfig:
    """Settings of the self-test."""

    json: Path | None = None
    """JSON file to write for bug reports."""
    device: Literal["auto", "cpu"] = "auto"
    """Device to test; auto uses GPUs if available."""
    only: str = ",".join(CHECKS)
    """Checks to run, separated by commas."""
    quick: bool = False
    """Compare one call of every operator, of 4 bits, instead of all widths, dtypes and lengths. On a CPU,
    which compiles kernels for each of these, this takes about a minute."""
    share_gpu: int | None = None
    """Ranks to start on one GPU, over NCCL. With `--device cpu`, over gloo."""
    mps: MPSMode = "auto"
    """NVIDIA's Multi-Process Service for `--share-gpu`; auto uses it if it is installed."""
    seed: int = 0
    """Seed of all random values and delays."""
    steps: int = 20
    """Optimizer steps of the training check."""
    delays: Annotated[int, option("delay-rounds")] = 3
    """Repetitions of the streams check, each with different random delays."""
    parallel: RanksConfig = field(
        default_factory=lambda: RanksConfig(distributed_timeout_minutes=_TIMEOUT_MINUTES)
    )

    def __post_init__(self) -> None:
        require_at_least(1, self, "steps", "delays")
        require_at_least(0, self, "seed")
        require_at_least(2, self, "share_gpu")
        if self.share_gpu is not None:
            if self.parallel.nproc_per_node is not None or "RANK" in os.environ:
                raise SettingError(
                    f"--share-gpu {self.share_gpu} starts all ranks itself: use it without "
                    "--nproc-per-node and torchrun"
                )
            self.parallel.check_world(self.share_gpu)
        _ = self.checks

    @property
    def checks(self) -> list[CheckName]:
        """Selected checks in execution order."""
        given = [name.strip() for name in self.only.split(",") if name.strip()]
        if not given or not set(given) <= set(CHECKS):
            raise SettingError(f"--only {self.only!r}: give a comma-separated list of {', '.join(CHECKS)}")
        return [name for name in CHECKS if name in given]

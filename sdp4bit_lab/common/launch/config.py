"""Settings of processes and nodes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sdp4bit_lab.common.settings import SettingError, require_at_least, require_positive


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Processes and nodes."""

    nproc_per_node: int | None = None
    """Processes to start on this machine; not used under a launcher. Default: one per GPU, or 1."""
    ranks_per_node: int | None = None
    """Consecutive ranks that count as one node. Default: detected by host name."""
    distributed_timeout_minutes: float = 10.0
    """Timeout of collectives in minutes. Must exceed tasks of a single rank, such as tokenizing."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "nproc_per_node", "ranks_per_node")
        require_positive(self, "distributed_timeout_minutes")

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=self.distributed_timeout_minutes)

    def processes(self, devices: int) -> int:
        """Return the number of processes to start on this machine, which has `devices` GPUs."""
        return self.nproc_per_node or devices or 1

    def check_world(self, world_size: int) -> None:
        """Raise SettingError unless the nodes divide the world size."""
        self._check_nodes(world_size)

    def _check_nodes(self, ranks: int, *, kind: str = "") -> None:
        if self.ranks_per_node is not None and ranks % self.ranks_per_node:
            divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
            raise SettingError(
                f"--ranks-per-node {self.ranks_per_node} does not divide the {ranks} {kind}ranks: "
                f"use one of {divisors}"
            )

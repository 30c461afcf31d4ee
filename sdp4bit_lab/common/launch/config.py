"""Settings of how a run is laid out over processes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sdp4bit_lab.common.settings import (
    SettingError,
    require,
    require_at_least,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Processes and nodes."""

    nproc_per_node: int | None = None
    """Processes to start on this machine. Under torchrun, torchrun's option applies. Default: one per GPU, or
    1."""
    ranks_per_node: int | None = None
    """Consecutive ranks that count as one node. Default: detected by host name."""
    distributed_timeout_minutes: float = 10.0
    """Minutes that a rank waits for the others in an exchange before it fails. Must exceed the longest task
    of a single rank, such as tokenizing a text."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "nproc_per_node", "ranks_per_node")
        require_positive(self, "distributed_timeout_minutes")

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for the others."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    def processes(self, devices: int) -> int:
        """Return how many processes to start on this machine with so many GPUs."""
        return self.nproc_per_node or devices or 1

    def check_world(self, world_size: int) -> None:
        """Raise SettingError unless nodes divide the world."""
        self._check_nodes(world_size, what=f"{world_size} ranks")

    def _check_nodes(self, ranks: int, *, what: str) -> None:
        if self.ranks_per_node is not None and ranks % self.ranks_per_node:
            divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
            raise SettingError(
                f"--ranks-per-node {self.ranks_per_node} does not divide the {what}: use one of {divisors}"
            )


@dataclass(frozen=True, kw_only=True)
class SimulatedRanksConfig(RanksConfig):
    """Processes and nodes, or one process that simulates several."""

    simulated_ranks: int | None = None
    """Simulate this many data-parallel ranks in one process, including the effect of their communication on
    weights and gradients. Needs --ranks-per-node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "simulated_ranks")
        if self.simulated_ranks is not None:
            self._check_simulated(self.simulated_ranks)

    def _check_simulated(self, ranks: int) -> None:
        require(ranks > 1, f"--simulated-ranks {ranks}: one rank sends nothing; give at least 2")
        require(
            self.nproc_per_node in (None, 1),
            f"--simulated-ranks {ranks} are all in one process: leave out --nproc-per-node",
        )
        if self.ranks_per_node is None:
            raise SettingError(
                f"--simulated-ranks {ranks} needs --ranks-per-node: they have no host names that define nodes"
            )
        self._check_nodes(ranks, what=f"{ranks} simulated ranks")

    def processes(self, devices: int) -> int:
        """Return how many processes to start: one if it simulates all."""
        return super().processes(devices) if self.simulated_ranks is None else 1

    def check_world(self, world_size: int) -> None:
        """Raise SettingError unless nodes divide the world, or one process simulates all."""
        if self.simulated_ranks is None:
            super().check_world(world_size)
        else:
            require(
                world_size == 1,
                f"--simulated-ranks {self.simulated_ranks} are all in one process, but {world_size} have "
                "been started: start one",
            )

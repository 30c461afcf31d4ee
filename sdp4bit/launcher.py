"""Read how a launcher describes this process: torchrun, Slurm, Open MPI, MPICH, DeepSpeed, Kubeflow."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PORTS = range(15_000, 29_000)
"""Ports for jobs whose launcher names none: below those that Linux gives to connections."""
_LOCAL = "127.0.0.1"
_MPI = (
    (
        "Open MPI's mpirun",
        [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
        "PMIX_NAMESPACE",
    ),
    (
        "mpiexec of MPICH or Intel MPI",
        ["PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
        "PMI_JOBID",
    ),
)
"""Launchers, the variables with the numbers of a process, and the one that identifies the job."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """This process among those that a launcher has started; None for each number that it does not give."""

    launcher: str
    seen: Mapping[str, str]
    """The variables that were read."""
    world_size: int | None
    rank: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str | None = None
    """Host of rank 0, and the port of its store."""
    port: int | None = None

    def __str__(self) -> str:
        """Return the launcher and its variables."""
        return f"{self.launcher} ({', '.join(f'{name}={value}' for name, value in self.seen.items())})"


def find_launcher(environment: Mapping[str, str]) -> Launched | None:
    """Return the place of this process in the job that the environment describes; None without a launcher.

    RANK comes first: torchrun, DeepSpeed and Kubeflow's PyTorchJob set it, also inside a step of Slurm. MPI
    starts its daemons by Slurm, whose numbers then count the daemons.
    """
    if "RANK" in environment:
        return _by_rank(environment)
    mpi = next(filter(None, (_by_mpi(environment, *launcher) for launcher in _MPI)), None)
    slurm = _by_slurm(environment)
    if slurm is not None and (mpi is None or (mpi.rank, mpi.world_size) == (slurm.rank, slurm.world_size)):
        return slurm  # srun --mpi=pmi2 sets the variables of PMI, too
    return mpi or _by_kubeflow(environment) or _without_rank(environment)


def _by_rank(environment: Mapping[str, str]) -> Launched:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launcher = "the environment"
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher = "torchrun"
    elif "CROSS_SIZE" in environment:
        launcher = "DeepSpeed's launcher"
    elif any(name.startswith("PET_") for name in environment):
        launcher = "Kubeflow's PyTorchJob"
    local_size = _number(environment, "LOCAL_WORLD_SIZE")
    if local_size is None:
        local_size = _number(environment, "LOCAL_SIZE")  # DeepSpeed's
    return Launched(
        launcher=launcher,
        seen=_seen(environment, *names, "PET_NPROC_PER_NODE"),
        world_size=_number(environment, "WORLD_SIZE"),
        rank=_number(environment, "RANK"),
        local_rank=_number(environment, "LOCAL_RANK"),
        local_world_size=local_size,
        address=environment.get("MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT"),
    )


def _by_slurm(environment: Mapping[str, str]) -> Launched | None:
    """Read the variables of a task of srun; a batch script is no task of a step."""
    world_size = _number(environment, "SLURM_STEP_NUM_TASKS")
    if world_size is None or world_size < 2:
        return None
    nodes, tasks = environment.get("SLURM_STEP_NODELIST"), environment.get("SLURM_STEP_TASKS_PER_NODE")
    node = _number(environment, "SLURM_NODEID")
    counts = [] if tasks is None else _task_counts(tasks)
    first = None if nodes is None else _first_host(nodes)
    return Launched(
        launcher="Slurm's srun",
        seen=_seen(
            environment, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"
        ),
        world_size=world_size,
        rank=_number(environment, "SLURM_PROCID"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=counts[node] if node is not None and node < len(counts) else None,
        address=environment.get("MASTER_ADDR") or (_LOCAL if counts == [world_size] else first),
        port=_port(environment, "SLURM_JOB_ID", "SLURM_STEP_ID"),
    )


def _by_mpi(environment: Mapping[str, str], launcher: str, names: Sequence[str], job: str) -> Launched | None:
    world_size, rank, local_rank, local_world_size = (_number(environment, name) for name in names)
    if world_size is None or world_size < 2:
        return None
    return Launched(
        launcher=launcher,
        seen=_seen(environment, *names),
        world_size=world_size,
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        # MPI names no host. If all ranks are on this one, it is known.
        address=environment.get("MASTER_ADDR") or (_LOCAL if local_world_size == world_size else None),
        port=_port(environment, job),
    )


def _by_kubeflow(environment: Mapping[str, str]) -> Launched | None:
    """Read the variables that Kubeflow sets for torchrun in a pod that runs another program."""
    names = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    pods, processes, pod, _, port = (_number(environment, name) for name in names)
    world_size = (pods or 1) * (processes or 1)
    if world_size < 2:
        return None
    is_rank = processes in (1, None)
    return Launched(
        launcher="Kubeflow's TrainJob",
        seen=_seen(environment, *names),
        world_size=world_size,
        rank=pod if is_rank else None,
        local_rank=0 if is_rank else None,
        local_world_size=processes or 1,
        address=environment.get("PET_MASTER_ADDR"),
        port=port,
    )


def _without_rank(environment: Mapping[str, str]) -> Launched | None:
    world_size = _number(environment, "WORLD_SIZE") or 1
    seen = _seen(environment, "WORLD_SIZE", "LOCAL_RANK")
    return Launched(launcher="the environment", seen=seen, world_size=world_size) if world_size > 1 else None


def _seen(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: environment[name] for name in names if name in environment}


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else None


def _port(environment: Mapping[str, str], *job: str) -> int | None:
    """Return MASTER_PORT, or else a port that follows from the job's identity; None without one."""
    given = _number(environment, "MASTER_PORT")
    if given is not None or not all(name in environment for name in job):
        return given
    identity = ".".join(environment[name] for name in job)
    return _PORTS[zlib.crc32(identity.encode()) % len(_PORTS)]


def _first_host(hosts: str) -> str:
    """Return the first host of a list of Slurm, such as "a[07-09,12],b3"."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0] if match else hosts)


def _task_counts(counts: str) -> list[int]:
    """Return the tasks of each node from a list of Slurm, such as "8(x3),4"; [] if it is another text."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]

"""A rank under every launcher: joined or refused, never one of several runs of one rank.

Layer: the variables alone, as the launchers set them; processes with these variables; processes of the real
launchers, if they are installed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

from sdp4bit.launcher import find_launcher
from sdp4bit_lab.common.launch import environment
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.environment import adopt_launcher
from sdp4bit_lab.common.settings import SettingError

PROGRAM = [sys.executable, "-m", "tests.lab.common.launch.adopted_program"]
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1661534209",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
DEEPSPEED = {**PYTORCH_JOB, "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0",
    "PET_MASTER_PORT": "29400",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_", "PET_", "MASTER_")) or name.endswith("RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(environment.os, "environ", dict(os.environ))


def adopted(variables: dict[str, str], **options: int) -> list[str | None]:
    """Return torchrun's variables after a process with these has joined its launcher."""
    os.environ.update(variables)
    adopt_launcher(RanksConfig(**options))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return [os.environ.get(name) for name in names]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("variables", "launcher", "expected"),
    [
        (SLURM, "Slurm's srun", ["9", "11", "1", "3", "gpu007", "18719"]),
        (
            {**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "1234"},
            "Slurm's srun",
            ["9", "11", "1", "3", "a", "1234"],
        ),
        (
            {**SLURM, "PMI_RANK": "9", "PMI_SIZE": "11"},
            "Slurm's srun",
            ["9", "11", "1", "3", "gpu007", "18719"],
        ),
        (OPEN_MPI, "Open MPI's mpirun", ["3", "4", "3", "4", "127.0.0.1", "18663"]),
        ({**SLURM, **OPEN_MPI}, "Open MPI's mpirun", ["3", "4", "3", "4", "127.0.0.1", "18663"]),
        (HYDRA, "mpiexec of MPICH or Intel MPI", ["1", "2", "1", "2", "127.0.0.1", "29500"]),
        (
            {**HYDRA, "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "a"},
            "mpiexec of MPICH or Intel MPI",
            ["1", "2", "1", "1", "a", "29500"],
        ),
        (PYTORCH_JOB, "the environment", ["1", "2", None, None, "job-master-0", "23456"]),
        (DEEPSPEED, "DeepSpeed's launcher", ["1", "2", "1", "2", "job-master-0", "23456"]),
        (
            {**PYTORCH_JOB, "PET_NPROC_PER_NODE": "1"},
            "Kubeflow's PyTorchJob",
            ["1", "2", None, None, "job-master-0", "23456"],
        ),
        (TRAIN_JOB, "Kubeflow's TrainJob", ["1", "2", "0", "1", "job-node-0", "29400"]),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "the environment", ["0", "1", None, None, "127.0.0.1", "0"]),
    ],
)
def test_a_process_joins_the_ranks_of_its_launcher(
    variables: dict[str, str], launcher: str, expected: list[str | None]
) -> None:
    found = find_launcher(variables)
    assert found is not None
    assert found.launcher == launcher
    assert adopted(variables) == expected


@pytest.mark.unit
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"WORLD_SIZE": "1"},
    ],
)
def test_one_process_is_no_job(variables: dict[str, str]) -> None:
    assert find_launcher(variables) is None
    assert adopted(variables, nproc_per_node=8)[0] is None


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("variables", "options", "error"),
    [
        (
            without(SLURM, "SLURM_STEP_NODELIST"),
            {},
            r"^Slurm's srun \(.*SLURM_PROCID=9.*the host of rank 0 is unknown",
        ),
        (without(SLURM, "SLURM_PROCID"), {}, "are not complete"),
        (SLURM, {"nproc_per_node": 8}, r"each of these 11 processes would start 8 more \(--nproc-per-node\)"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), {}, "-x MASTER_ADDR=HOST -x MASTER_PORT=29500"),
        ({**HYDRA, "MPI_LOCALNRANKS": "1"}, {}, "the host of rank 0 is unknown"),
        (
            {"WORLD_SIZE": "4"},
            {},
            r"^the environment \(WORLD_SIZE=4\): .* torchrun --standalone --nproc-per-node 4",
        ),
        ({"RANK": "0"}, {}, "are not complete"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, {}, "are not complete"),
        ({**PYTORCH_JOB, "RANK": "2"}, {}, "rank 2 is none of 2 ranks, which begin at 0"),
        (without(PYTORCH_JOB, "MASTER_ADDR"), {}, "the host of rank 0 is unknown"),
        (
            {**PYTORCH_JOB, "PET_NPROC_PER_NODE": "4"},
            {},
            "RANK is the pod's, .* in each pod: torchrun -m sdp4bit_lab",
        ),
        (
            {**TRAIN_JOB, "PET_NPROC_PER_NODE": "8"},
            {},
            "are not complete.* in each pod: torchrun -m sdp4bit_lab",
        ),
    ],
)
def test_incomplete_variables_are_refused_with_the_command_that_works(
    variables: dict[str, str], options: dict[str, int], error: str
) -> None:
    with pytest.raises(SettingError, match=error):
        adopted(variables, **options)


def outputs_of(
    commands: Sequence[Sequence[str]], variables: Sequence[dict[str, str]]
) -> list[tuple[int, str]]:
    """Run commands at the same time, each with its variables; return exit codes and outputs."""
    started = [
        subprocess.Popen(
            command,
            env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


@pytest.mark.gloo
def test_ranks_without_local_numbers_count_those_of_their_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (first, text), (second, other) = outputs_of(
        [PROGRAM] * 2, [{**given, "RANK": str(rank)} for rank in range(2)]
    )
    assert (first, second) == (0, 0), text + other
    assert f"the environment has started 2 ranks; rank 0 listens at 127.0.0.1:{port}" in text
    assert "ranks [(0, 2, 0, 2), (1, 2, 1, 2)]" in text


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"], "Open MPI's mpirun"),
        (["mpiexec.mpich", "-n", "2"], "mpiexec of MPICH or Intel MPI"),
        (["srun", "-n", "2"], "Slurm's srun"),
        (["srun", "--mpi=pmi2", "-n", "2"], "Slurm's srun"),
    ],
)
def test_processes_of_a_real_launcher_are_the_ranks_of_one_job(command: list[str], launcher: str) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    if command[0] == "srun" and subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        pytest.skip("Slurm's controller does not run here")
    ((code, output),) = outputs_of([[*command, *PROGRAM]], [{}])
    assert code == 0, output
    assert f"{launcher} has started 2 ranks; rank 0 listens at " in output
    assert "ranks [(0, 2, 0, 2), (1, 2, 1, 2)]" in output

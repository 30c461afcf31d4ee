"""Ranks that share a GPU: their variables, and the Multi-Process Service, which ends with its user.

Layers: a shell script in place of nvidia-cuda-mps-control; fresh processes; two ranks over gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdp4bit_lab.common.launch import shared_gpu
from sdp4bit_lab.common.launch.shared_gpu import CONTROL, multi_process_service, nccl_variables
from sdp4bit_lab.common.ranks import Ranks
from tests import ROOT

MPS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
# Like NVIDIA's program: -d leaves a daemon behind, which keeps the output open; otherwise it reads commands.
SERVICE = """#!/bin/sh
log() { echo "$* in $CUDA_MPS_PIPE_DIRECTORY" >> "$0.log"; }
if [ "$1" = -d ]; then
    log start
    sleep 300 &
    echo $! > "$0.daemon"
    exit 0
fi
while read -r line; do
    log "$line"
    case $line in
        quit*) kill "$(cat "$0.daemon")" ;;
        *) echo 100.0 ;;
    esac
done
"""
USER = """
import os, time
from sdp4bit_lab.common.launch.shared_gpu import multi_process_service
with multi_process_service() as (runs, _):
    print(runs, os.getppid(), flush=True)
    time.sleep(300)
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a script in the place of the control program; return the file of its log."""
    for name in MPS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shared_gpu, "_DRIVER_PROGRAMS", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(script: str) -> Path:
        program = tmp_path / CONTROL
        program.write_text(script)
        program.chmod(0o755)
        return tmp_path / f"{CONTROL}.log"

    return install


def commands(log: Path) -> list[str]:
    """Return the log's commands without their folder, which is the same for all."""
    lines = [line.split(" in ") for line in log.read_text().splitlines()] if log.exists() else []
    assert len({folder for _, folder in lines}) <= 1
    return [command for command, _ in lines]


def ends(log: Path) -> bool:
    """Wait until the service was told to quit."""
    deadline = time.monotonic() + 20
    while "quit -t 5" not in commands(log) and time.monotonic() < deadline:
        time.sleep(0.05)
    return "quit -t 5" in commands(log)


def is_set() -> list[str]:
    return [name for name in MPS if name in os.environ]


# -- the service -----------------------------------------------------------------------------------------


@pytest.mark.gloo
def test_the_service_runs_once_and_only_inside_the_block(control: Callable[[str], Path]) -> None:
    log = control(SERVICE)
    with multi_process_service() as (runs, about):
        assert (runs, about) == (True, "ranks run under MPS")
        folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir() and is_set() == [*MPS]
        assert commands(log) == ["start", "get_default_active_thread_percentage"]
    assert commands(log) == ["start", "get_default_active_thread_percentage", "quit -t 5"]
    assert f"start in {folder}\n" in log.read_text()
    assert is_set() == [] and not folder.exists()


@pytest.mark.gloo
def test_an_error_of_the_block_ends_the_service(control: Callable[[str], Path]) -> None:
    log = control(SERVICE)
    with pytest.raises(ZeroDivisionError), multi_process_service():
        raise ZeroDivisionError
    assert commands(log)[-1] == "quit -t 5" and is_set() == []


@pytest.mark.gloo
@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_the_service_ends_when_its_user_is_killed(control: Callable[[str], Path], group: bool) -> None:
    log = control(SERVICE)
    user = subprocess.Popen(
        [sys.executable, "-c", USER], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert user.stdout is not None
    assert user.stdout.readline().split() == ["True", str(os.getpid())]
    assert commands(log) == ["start", "get_default_active_thread_percentage"]
    (os.killpg if group else os.kill)(user.pid, 9)
    user.wait()
    assert ends(log), commands(log)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('#!/bin/sh\n[ "$1" != -d ] || { echo "no access to /dev/nvidiactl"; exit 1; }\n', "no access to"),
        ("#!/bin/sh\nexit 3\n", "exit code 3"),
        ('#!/bin/sh\n[ "$1" = -d ] || { echo "cannot find the daemon" >&2; exit 1; }\n', "cannot find the"),
        ('#!/bin/sh\n[ "$1" = -d ] || exit 1\n', "exit code 1"),
        ("#!/no/such/shell\n", "No such file"),
    ],
)
def test_a_service_that_does_not_start_is_a_sentence(
    control: Callable[[str], Path], script: str, problem: str
) -> None:
    control(script)
    with multi_process_service() as (runs, about):
        assert not runs and is_set() == []
        assert about.startswith("MPS does not start (") and about.endswith("): ranks take turns on the GPU")
        assert problem in about
    assert is_set() == []


@pytest.mark.gloo
def test_off_starts_nothing(control: Callable[[str], Path]) -> None:
    log = control(SERVICE)
    with multi_process_service("off") as (runs, about):
        assert (runs, about) == (False, "MPS is off: ranks take turns on the GPU")
    assert commands(log) == [] and is_set() == []


@pytest.mark.gloo
def test_without_the_program_nothing_starts(
    control: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with multi_process_service() as (runs, about):
        assert not runs and about.startswith(f"no {CONTROL} here")


@pytest.mark.gloo
def test_a_running_service_is_used_and_not_stopped(
    control: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = control(SERVICE)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/of-the-cluster")
    with multi_process_service() as (runs, about):
        assert runs and about == "uses the MPS of CUDA_MPS_PIPE_DIRECTORY=/tmp/of-the-cluster"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/of-the-cluster"
    assert commands(log) == []


# -- variables of the ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, "0"), ("3", "3"), ("2,0", "2"), ("GPU-a,GPU-b", "GPU-a")]
)
def test_ranks_are_hosts_of_their_own_on_one_gpu(
    visible: str | None, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    ranks = [nccl_variables(rank, interface="eth0") for rank in range(8)]
    assert len({rank["NCCL_HOSTID"] for rank in ranks}) == 8
    assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {gpu}
    # An interface whose name only begins like this one is not used.
    assert {rank["NCCL_SOCKET_IFNAME"] for rank in ranks} == {"=eth0"}
    others = [{**rank, "NCCL_HOSTID": ""} for rank in ranks]
    assert others == others[:1] * 8


STARTS = """
import sys
from functools import partial
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.local import run_on_ranks
from tests.lab.common.launch.test_shared_gpu import report_variables, variables
if __name__ == "__main__":
    parallel = RanksConfig(nproc_per_node=2, distributed_timeout_minutes=1)
    program = "tests.lab.common.launch.test_shared_gpu:report_variables"
    sys.exit(run_on_ranks(program, config=None, parallel=parallel, variables=variables))
"""


def variables(rank: int) -> dict[str, str]:
    """Return a variable that torch reads when it is imported, and one that replaces the launcher's."""
    return {"OMP_NUM_THREADS": str(rank + 1), "MINE": f"rank {rank}", "LOCAL_WORLD_SIZE": "1"}


def report_variables(_: None, *, ranks: Ranks) -> None:
    found = [ranks.rank, torch.get_num_threads(), os.environ["MINE"], ranks.local_world_size]
    sys.stdout.write(f"{found}\n")


@pytest.mark.gloo
def test_variables_reach_a_rank_before_it_imports_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    # OpenMP starts no more threads than there are cores.
    several = min(2, len(os.sched_getaffinity(0)))
    assert lines == ["[0, 1, 'rank 0', 1]", f"[1, {several}, 'rank 1', 1]"]

"""Several ranks on one GPU over NCCL: the variables of each rank, and NVIDIA's Multi-Process Service (MPS).

NCCL refuses two ranks of one host on one GPU. It recognizes a host by a hash, which NCCL_HOSTID replaces
(`initTransportsRank` in NCCL's src/init.cc, 2.26 to 2.30). With a value per rank, NCCL takes every rank for a
host of its own and connects all of them by sockets, as over Ethernet. NCCL_MULTI_RANK_GPU_ENABLE of 2.30.3
and later is not needed: it concerns ranks of one host.

Processes take turns on a GPU, and a kernel of NCCL spins until its peer's kernel has run. Under MPS, kernels
of several processes run at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

CONTROL = "nvidia-cuda-mps-control"
MPSMode = Literal["auto", "off"]
_DRIVER_PROGRAMS = "/usr/local/nvidia/bin"
"""Container runtimes may mount the driver's programs here, outside PATH."""
_SECONDS = 15
_KEEPER = "trap '' INT TERM HUP; cat > /dev/null; echo quit -t 5 | exec \"$0\""
"""Ends the service when its standard input closes, so also after its user was killed."""


def nccl_variables(rank: int, *, interface: str) -> dict[str, str]:
    """Return the variables of a rank that shares the first visible GPU.

    Args:
        rank: global rank.
        interface: network interface of NCCL's sockets, such as lo.
    """
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        # A client of MPS has 2 work queues by default. Streams would share them, and a copy would wait behind
        # a kernel of NCCL that waits for the copy.
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        # Ways between GPUs of one host or one NVLink domain, which these ranks are not.
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_RAS_ENABLE": "0",  # it listens on one port per host
        # Kernels that wait for each other must fit on the GPU together: ranks x communicators x 4 blocks.
        "NCCL_MAX_CTAS": "4",
        "NCCL_SOCKET_NTHREADS": "2",
        "NCCL_NSOCKS_PERTHREAD": "2",
    }


def program_path() -> str:
    """Return PATH and the folder of the driver's programs."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), _DRIVER_PROGRAMS))


@contextmanager
def multi_process_service(mode: MPSMode = "auto") -> Iterator[tuple[bool, str]]:
    """Run MPS for the processes that the block starts, if it is installed.

    A service that CUDA_MPS_PIPE_DIRECTORY names is used and left running. No setting of the GPU changes.

    Args:
        mode: "off" starts nothing.

    Yields:
        Whether ranks run under MPS, and a sentence about it.
    """
    if mode == "off":
        yield False, "MPS is off: ranks take turns on the GPU"
        return
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield True, f"uses the MPS of CUDA_MPS_PIPE_DIRECTORY={os.environ['CUDA_MPS_PIPE_DIRECTORY']}"
        return
    path = program_path()
    if (control := shutil.which(CONTROL, path=path)) is None:
        yield False, f"no {CONTROL} here: ranks take turns on the GPU, 2 ms or more per collective"
        return
    with tempfile.TemporaryDirectory(prefix="sdp4bit-mps-") as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables, "PATH": path}
        keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, control],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach the service before its clients
        )
        try:
            problem = _start(control, Path(folder) / "answer", environment)
            if problem:
                yield False, f"MPS does not start ({problem}): ranks take turns on the GPU"
            else:
                os.environ.update(variables)
                yield True, "ranks run under MPS"
        finally:
            for name in variables:
                os.environ.pop(name, None)
            assert keeper.stdin is not None
            keeper.stdin.close()
            try:
                keeper.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()


def _start(control: str, answer: Path, environment: dict[str, str]) -> str:
    """Start the service; return why it does not answer, or ""."""
    try:
        with answer.open("w") as output:  # a file, because the service does not close it
            started = subprocess.run(
                [control, "-d"], env=environment, stdout=output, stderr=output, timeout=_SECONDS, check=False
            )
        if started.returncode:
            return _problem(answer.read_text(errors="replace"), started.returncode)
        asked = subprocess.run(
            [control],
            input="get_default_active_thread_percentage\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return _problem(asked.stdout + asked.stderr, asked.returncode) if asked.returncode else ""


def _problem(output: str, code: int) -> str:
    return " ".join(output.split()) or f"exit code {code}"

"""Slurm on this machine: two nodes in namespaces of their own, joined by a link with a limited rate.

Each node has a network namespace, a host name and the name of its peer, so it looks like a machine. The
daemons are Debian's, with a configuration, keys and sockets in one folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster_network import Network, reason_to_skip
from tests import ROOT

NAMES = ("node0", "node1")
_SECRET = 64
_CONFIG = """
ClusterName=two
SlurmctldHost=node0(10.77.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=5
KillWait=2
MessageTimeout=5
NodeName=node0 NodeAddr=10.77.0.1 CPUs=1 Gres=gpu:8
NodeName=node1 NodeAddr=10.77.0.2 CPUs=1 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def environment(**more: str) -> dict[str, str]:
    """Return the variables of a machine without GPUs, whose commands are those of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    return {**os.environ, **alone, **more}


def reason_against_slurm() -> str | None:
    """Return why Slurm cannot be started here, or None."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurmctld slurmd slurm-client munge"
    return reason_to_skip()


class Machines:
    """Two machines without GPUs, joined by a link of this rate; a context manager."""

    def __init__(self, *, rate: str) -> None:
        self._network, self._rate = Network(2), rate
        self.folder = Path(tempfile.mkdtemp(prefix="machines-"))

    def __enter__(self) -> Machines:
        self._network.__enter__()
        self._network.set_rate(self._rate)
        for own in NAMES:
            # As Debian and Ubuntu write it: a machine's own name leads to itself, and to no network.
            places = [
                "127.0.1.1" if name == own else self._network.address(n) for n, name in enumerate(NAMES)
            ]
            hosts = [f"{place} {name}\n" for place, name in zip(places, NAMES, strict=True)]
            (self.folder / f"hosts-{own}").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        return self

    def __exit__(self, *_: object) -> None:
        self._network.close()
        shutil.rmtree(self.folder)

    def start(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a machine, which ends with the block."""
        name = NAMES[number]
        own = f'hostname {name}; mount --bind {self.folder}/hosts-{name} /etc/hosts; exec "$@"'
        wrapped = ["unshare", "--uts", "--mount", "sh", "-c", own, "sh", *command]
        return self._network.start(number, wrapped, **{"cwd": ROOT, "env": environment()} | options)

    def lose(self, number: int) -> None:
        """Kill all processes of a machine."""
        node = self._network.nodes[number]
        found = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=True)
        for pid in found.stdout.split():
            os.kill(int(pid), 9)


class Slurm:
    """The daemons of Slurm on two machines."""

    def __init__(self, machines: Machines) -> None:
        self._machines, self._folder = machines, machines.folder
        for name in ("state", "spool-node0", "spool-node1"):
            (self._folder / name).mkdir()
        (self._folder / "munge.key").write_bytes(os.urandom(_SECRET))
        (self._folder / "munge.key").chmod(0o600)
        self._folder.chmod(0o755)  # munged refuses a folder that others may write
        (self._folder / "slurm.conf").write_text(_CONFIG.format(folder=self._folder))
        for number in range(8):  # files in place of devices: Slurm counts GPUs, and none is there
            (self._folder / f"gpu{number}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-7]\n")
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, and never used
        self._variables = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        keys = [f"--{name}={self._folder}/munge.{end}" for name, end in _MUNGE.items()]
        self._start(0, "munged", ["munged", "--foreground", "--force", *keys])
        self._start(0, "slurmctld", ["slurmctld", "-D", "-c"])
        for number in range(len(NAMES)):
            self.start_node(number)
        self.wait_for(lambda: self.run("sinfo", "--noheader", "--format=%T").split() == ["idle"], seconds=60)

    def _start(self, number: int, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.log").open("a") as log:
            variables = environment(**self._variables)
            self._machines.start(number, command, stdout=log, stderr=subprocess.STDOUT, env=variables)

    def start_node(self, number: int) -> None:
        """Start the daemon of a node."""
        self._start(number, f"slurmd-{NAMES[number]}", ["slurmd", "-D", "-N", NAMES[number]])

    def run(self, *command: str, **variables: str) -> str:
        """Return the output of a command on the first machine."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = self._machines.start(0, command, env=environment(**self._variables, **variables), **pipes)
        output: str = process.communicate(timeout=60)[0]
        return output

    def wait_for(self, done: Callable[[], object], *, seconds: float = 300) -> None:
        """Wait until something is so; AssertionError with the daemons' last lines if it takes too long."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                logs = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in self._folder.glob("*.log")]
                raise AssertionError("\n".join([*logs, self.run("scontrol", "show", "job")]))
            time.sleep(0.5)


_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "daemon", "seed-file": "seed"}


@contextmanager
def slurm_nodes(*, rate: str) -> Iterator[tuple[Slurm, Machines]]:
    """Run Slurm on two machines while the block runs."""
    with Machines(rate=rate) as machines:
        yield Slurm(machines), machines

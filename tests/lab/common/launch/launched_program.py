"""A program whose last rank does something to the run: `launched_program.py DEED RANKS`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.local import run_on_ranks
from sdp4bit_lab.common.launch.signals import received
from sdp4bit_lab.common.ranks import Ranks, listen_on_rank
from sdp4bit_lab.common.settings import SettingError

PROGRAM = "tests.lab.common.launch.launched_program:program"


def program(deed: str, *, ranks: Ranks) -> None:
    if deed == "setting":
        raise SettingError("change it")
    if deed == "addresses":
        if ranks.is_first:
            print("listens on", *sorted(_listening_addresses()))
        return
    if deed != "early SIGTERM":
        listen_on_rank(ranks)
        dist.barrier()
    if ranks.rank == ranks.world_size - 1:
        _strike(deed)
    left = torch.zeros(())
    while not left:
        left.fill_(received() is not None)
        dist.all_reduce(left)
    if ranks.is_first:
        print(f"left because of {received().name}")


def _listening_addresses() -> set[str]:
    """Return the addresses, in hexadecimal, of the sockets on which this process and its parent listen."""
    own = set()
    for process in (os.getpid(), os.getppid()):
        links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
        own |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own}


def _strike(deed: str) -> None:
    number = signal.SIGTERM if "SIGTERM" in deed else signal.Signals[deed]
    if number == signal.SIGKILL:
        os.kill(os.getpid(), number)
    # As `timeout` does it: the command, then the whole process group.
    os.kill(os.getpid() if "RANK" not in os.environ else os.getppid(), number)
    os.killpg(0, number)
    if deed == "second SIGTERM":
        time.sleep(1.5)
        os.killpg(0, number)
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(run_on_ranks(PROGRAM, config=sys.argv[1], parallel=RanksConfig(nproc_per_node=int(sys.argv[2]))))

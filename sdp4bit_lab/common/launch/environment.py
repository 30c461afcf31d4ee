"""Take the rank of this process from any launcher, in torchrun's variables, or refuse to train alone."""

from __future__ import annotations

import os
import shlex
import sys

from sdp4bit.addresses import page
from sdp4bit.launcher import Launched, find_launcher
from sdp4bit_lab.common.files import note
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.settings import SettingError

_DEFAULT_PORT = 29_500  # torchrun's


def adopt_launcher(parallel: RanksConfig) -> None:
    """Set torchrun's variables for a process that another launcher has started, and note it on rank 0.

    LOCAL_RANK and LOCAL_WORLD_SIZE stay unset if unknown; `join_ranks` then counts the ranks of each host.

    Raises:
        SettingError: the environment announces several processes, but not the place of this one.
    """
    found = find_launcher(os.environ)
    if found is None:
        return
    if problem := _problem(found, parallel):
        raise SettingError(f"{found}: {problem}")
    values = {
        "RANK": found.rank,
        "WORLD_SIZE": found.world_size,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_world_size,
        "MASTER_ADDR": found.address or "127.0.0.1",  # None for one rank alone
        "MASTER_PORT": found.port or (_DEFAULT_PORT if found.world_size != 1 else 0),
    }
    os.environ.update({name: str(value) for name, value in values.items() if value is not None})
    if found.launcher != "torchrun" and found.rank == 0 and found.world_size != 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        note(f"{found.launcher} has started {found.world_size} ranks; rank 0 listens at {address}")


def _problem(found: Launched, parallel: RanksConfig) -> str:
    """Return why this process cannot join the others, and the command that works; "" if it can."""
    size, here = found.world_size, parallel.nproc_per_node or 1
    processes = max(size or 1, here)
    remedy = (
        f"This works on one machine: torchrun --standalone --nproc-per-node {processes} {_arguments()}. "
        f"Several machines: {page('launching')}"
    )
    if is_pod := any(name.startswith("PET_") for name in found.seen):
        remedy = f"This works in each pod: torchrun {_arguments()}"
    if size is None or found.rank is None:
        return f"RANK and WORLD_SIZE, or numbers that they follow from, are not complete. {remedy}"
    if found.rank >= size:
        return f"rank {found.rank} is none of {size} ranks, which begin at 0. {remedy}"
    if is_pod and found.local_rank is None and found.seen.get("PET_NPROC_PER_NODE", "1") not in ("1", "auto"):
        return f"RANK is the pod's, not that of a process. {remedy}"
    if size > 1 and found.address is None:
        return (
            "the host of rank 0 is unknown. Set MASTER_ADDR and MASTER_PORT on all ranks, as by `mpirun -x "
            f"MASTER_ADDR=HOST -x MASTER_PORT={_DEFAULT_PORT} ...`. {remedy}"
        )
    if size > 1 and "RANK" not in os.environ and here not in (1, found.local_world_size):
        return (
            f"each of these {size} processes would start {here} more (--nproc-per-node). Leave this option "
            f"out, and start {here} processes per node. {remedy}"
        )
    return ""


def _arguments() -> str:
    return f"-m sdp4bit_lab {shlex.join(sys.argv[1:])}"

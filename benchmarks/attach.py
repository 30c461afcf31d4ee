"""Time attaching to a model on one rank of a large job, and count what the rank asks of torch.distributed.

    python -m benchmarks.attach --world 64,1024,4096 --ranks-per-node 8 --json FILE

One process poses as one rank (torch's fake process group): what is measured is this rank's own work. The
job's network and the rendezvous of its groups come on top of it, once per group; groups and bytes are exact.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """This process is the last rank of a job of this size."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Calls:
    """Groups asked for, and bytes that this rank gives to gathers of Python objects."""

    def __init__(self) -> None:
        self.groups = 0
        self.gathered_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What torch.distributed is asked for meanwhile is counted."""
        c10d: Any = dist.distributed_c10d
        create, to_tensor = dist.new_group, c10d._object_to_tensor

        @functools.wraps(create)
        def count_group(*args: Any, **kwargs: Any) -> Any:
            self.groups += 1
            return create(*args, **kwargs)

        def count_bytes(*args: Any, **kwargs: Any) -> Any:
            tensor, size = to_tensor(*args, **kwargs)
            self.gathered_bytes += int(size)
            return tensor, size

        dist.new_group, c10d._object_to_tensor = count_group, count_bytes
        try:
            yield
        finally:
            dist.new_group, c10d._object_to_tensor = create, to_tensor


def measure(world: int, *, ranks_per_node: int, layers: int, repeats: int) -> dict[str, Any]:
    """Return what attaching to a model of `layers` FSDP modules, and its root, takes on one rank."""
    seconds = []
    with fake_world(world):
        mesh = init_device_mesh("cpu", (world,))
        model = nn.Sequential(*(fully_shard(nn.Linear(32, 32), mesh=mesh) for _ in range(layers)))
        fully_shard(model, mesh=mesh)
        open_groups = len(dist.distributed_c10d._world.pg_map)
        for _ in range(repeats):
            calls = Calls()
            start = time.perf_counter()
            with calls.counted():
                comm = sdp4bit.quantize_communication(model, topology=ranks_per_node)
            seconds.append(time.perf_counter() - start)
            communicators = len(dist.distributed_c10d._world.pg_map) - open_groups
            comm.remove()
    return {
        "world": world,
        "seconds": statistics.median(seconds),
        "seconds_all": seconds,
        "groups_asked_for": calls.groups,
        "communicators": communicators,
        "object_bytes_sent": calls.gathered_bytes,
        "object_bytes_received": calls.gathered_bytes * world,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", default="64,1024,4096", help="numbers of ranks, with commas")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24, help="FSDP modules below the root")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements here as well")
    options = parser.parse_args(arguments)
    results = [
        measure(
            int(world),
            ranks_per_node=options.ranks_per_node,
            layers=options.layers,
            repeats=options.repeats,
        )
        for world in options.world.split(",")
    ]
    print(f"{'ranks':>7}  {'seconds':>8}  {'groups asked for':>16}  {'joined':>6}  {'objects received':>16}")
    for row in results:
        print(
            f"{row['world']:>7}  {row['seconds']:>8.3f}  {row['groups_asked_for']:>16}  "
            f"{row['communicators']:>6}  {row['object_bytes_received'] / 1e6:>13.2f} MB"
        )
    if options.json:
        report = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processor": platform.machine(),
            "ranks_per_node": options.ranks_per_node,
            "layers": options.layers,
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

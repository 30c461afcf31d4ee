"""The demo's step times at three link rates. Layer: 2 processes, in network namespaces with root."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.link import linked_nodes, reason_against_link, set_rate
from sdp4bit_lab.common.launch.local import run_on_ranks
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.compare.links import LinkTimes

SENT = 1 << 20
MEGABITS = 10


def exchange(out: Path, *, ranks: Ranks) -> None:
    """Write the seconds of an exchange of a megabyte, without and with a limit."""
    values, seconds = torch.zeros(SENT, dtype=torch.uint8), []
    for rate in (None, MEGABITS):
        if rate is not None:
            set_rate(rate)
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(values, src=0)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if ranks.is_first:
        out.write_text(" ".join(map(str, seconds)))


@pytest.mark.skipif(reason_against_link() != "", reason="needs root and iproute2")
def test_the_link_between_the_nodes_has_the_rate_and_is_gone_afterwards(tmp_path: Path) -> None:
    with linked_nodes() as link:
        code = run_on_ranks(
            f"{__name__}:exchange",
            config=tmp_path / "seconds",
            parallel=RanksConfig(nproc_per_node=2),
            leaves_early=False,
            link=link,
        )
        assert code == 0
        keepers = [Path(f"/proc/{keeper}") for keeper in link.keepers]
        assert all(map(Path.exists, keepers))
    assert not any(map(Path.exists, keepers))
    free, limited = map(float, (tmp_path / "seconds").read_text().split())
    # The bucket lets 128 KiB pass at once.
    assert limited > 0.8 * (SENT - (1 << 17)) * 8e-6 / MEGABITS
    assert free < limited


def test_the_table_says_whether_times_are_measured() -> None:
    seconds = {100: ([1.5, 1.0, 0.9], [0.25]), 1000: ([0.2], [0.1])}
    times = LinkTimes(seconds=seconds, sent=(12.5e6, 2.5e6), why_calculated="")
    measured = [" ".join(line.split()) for line in times.text().splitlines()]
    assert measured[:4] == [
        "a step takes plain FSDP2 sdp4bit gain",
        "at 100 Mbit/s 1,000 ms (900 to 1,500) 250 ms (250 to 250) 4.00x",
        "at 1,000 Mbit/s 200 ms (200 to 200) 100 ms (100 to 100) 2.00x",
        "each node sends 12.5 MB 2.5 MB 5.00x",
    ]
    assert measured[4].startswith("Measured: ") and "all 4 ranks, that is, both nodes." in measured[-1]
    calculated = LinkTimes(seconds=seconds, sent=(12.5e6, 2.5e6), why_calculated="no root").text()
    assert "Calculated, not measured: " in calculated and "(no root)." in calculated
    assert max(map(len, calculated.splitlines())) <= 80

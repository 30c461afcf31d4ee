"""The demo's step times at three link rates.

Layer: files; 2 processes, in network namespaces with root."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
import torch.distributed as dist

from sdp4bit.observe.timing import StepTimes
from sdp4bit_lab.common import files
from sdp4bit_lab.common.files import lock_folder
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.link import linked_nodes, reason_against_link, set_rate
from sdp4bit_lab.common.launch.local import run_on_ranks
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.config import DemoConfig
from sdp4bit_lab.compare.demo import _LOCK, _stored, demo
from sdp4bit_lab.compare.links import LinkTimes, why_unreliable
from sdp4bit_lab.compare.tables import Report
from tests.lab.compare.synthetic_runs import finished

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


@pytest.mark.gloo
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


def link_times(**changed: Any) -> LinkTimes:
    seconds = {100: ([1.5, 1.0, 0.9], [0.25]), 1000: ([0.2], [0.1])}
    settings: dict[str, Any] = {"seconds": seconds, "sent": (12.5e6, 2.5e6), "why_calculated": ""}
    return LinkTimes(**{**settings, "unreliable": {}, "dtype": "auto", **changed})


def test_the_table_states_whether_times_are_measured() -> None:
    table, conditions = link_times().text()
    assert [" ".join(line.split()) for line in table.splitlines()] == [
        "a step takes plain FSDP2 sdp4bit gain",
        "at 100 Mbit/s 1,000 ms (900 to 1,500) 250 ms (250 to 250) 4.00x",
        "at 1,000 Mbit/s 200 ms (200 to 200) 100 ms (100 to 100) 2.00x",
        "each node sends 12.5 MB 2.5 MB 5.00x",
    ]
    assert conditions.startswith("Measured: ")
    table, conditions = link_times(why_calculated="no root").text()
    assert "Calculated, not measured: " in conditions and "(no root)." in conditions
    assert max(map(len, [*table.splitlines(), *conditions.splitlines()])) <= 80


def test_a_line_has_the_factor_of_a_rate() -> None:
    assert link_times().line(100) == "at 100 Mbit/s: 1.00 s, 0.25 s with sdp4bit: 4.0x"
    assert link_times(why_calculated="no root").line(1000).endswith("2.0x (calculated)")
    assert link_times(unreliable={100: "load 9"}).line(100).endswith(", but unreliable (load 9)")


def test_unreliable_times_have_no_gain_no_bar_and_are_not_used_again(tmp_path: Path) -> None:
    config = DemoConfig(out=tmp_path)
    seconds = {**link_times().seconds, 250: ([0.5], [0.2])}
    link_times(seconds=seconds).write(config.links)
    stored = _stored(config)
    assert stored is not None and stored.text() == link_times(seconds=seconds).text()
    # Without seconds of its own, the demo was stopped before its last rate.
    for changed in ({"unreliable": {1000: "load 20 on 2 cores"}}, {"dtype": "fp32"}, {"seconds": {}}):
        link_times(**{"seconds": seconds, **changed}).write(config.links)
        assert _stored(config) is None
    times = link_times(unreliable={1000: "load 20 on 2 cores"})
    table, conditions = times.text()
    rows = table.splitlines()
    assert rows[1].endswith("4.00x") and rows[2].endswith("unreliable")
    assert "1,000 Mbit/s: load 20 on 2 cores." in " ".join(conditions.split())
    times.draw(tmp_path / "one.png")
    link_times().draw(tmp_path / "two.png")
    heights = [matplotlib.image.imread(tmp_path / name).shape[0] for name in ("one.png", "two.png")]
    assert heights[0] < 0.7 * heights[1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "sdp4bit-links-1"}', '{"format": 1}', "\0"])
def test_a_damaged_file_of_times_is_measured_again(text: str, tmp_path: Path) -> None:
    config = DemoConfig(out=tmp_path)
    config.links.write_text(text)
    assert _stored(config) is None


@pytest.mark.parametrize(
    ("load", "gains", "reason"),
    [
        (3.0, (4.0, 4.4), ""),
        (3.0, (4.0, 5.2), "gains of 4.00 to 5.20 in repetitions"),
        (100.0, (4.0, 4.0), "load 100 on "),
    ],
)
def test_other_work_on_the_machine_is_noticed(
    load: float, gains: tuple[float, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    timed = StepTimes(
        plain_seconds=tuple((gain,) for gain in gains), quantized_seconds=((1.0,),) * len(gains)
    )
    found = why_unreliable(timed)
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_second_demo_in_the_folder_of_a_running_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.1)
    with (
        lock_folder(tmp_path, option="--out", name=_LOCK),
        pytest.raises(SettingError, match=f"another run writes here .process {os.getpid()} on "),
    ):
        demo(DemoConfig(out=tmp_path))


def test_the_demo_advises_no_option_that_it_refuses() -> None:
    names = {field.name for field in fields(DemoConfig)}
    finished_runs = [finished("baseline", 1, 3.0), finished("sdp4bit", 1, 3.1)]
    for command, text in (("compare", "give 3 seeds"), ("demo", "`sdp4bit compare` trains several")):
        report = Report(
            runs=finished_runs,
            baseline="baseline",
            planned=2,
            command=command,
        )
        assert text in " ".join(report.text().split())
        assert ("ms/step" in report.text()) == (command == "compare")
    assert "seeds" not in names

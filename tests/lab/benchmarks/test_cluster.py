"""Emulated cluster: the network cleans up however its owner ends, and no strategy trains less than another.

Layers: namespaces (root and iproute2, else skipped), two ranks over loopback, pure functions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cluster, cluster_network, cluster_report
from benchmarks.cluster_network import Network, rate_in_bits, reason_to_skip, remove_leftovers
from benchmarks.cluster_report import Sample
from benchmarks.cluster_strategies import STRATEGIES, Cluster, Workload, strategies_for
from tests import ROOT
from tests.ranks import run_ranks

REASON = reason_to_skip()
pytestmark = pytest.mark.slow
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TINY = Workload(layers=2, hidden=64, heads=2, vocabulary=512, sequence_length=32, warmup_steps=1)
ONE_PER_NODE = Cluster(nodes=2, ranks_per_node=1)
STEPS = 6

OWNER = """
import signal, sys, time
from benchmarks.cluster_network import Network
# Shells start their background commands with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with Network(2) as network:
    network.start(0, ["sleep", "300"])
    print(*network.nodes, flush=True)
    time.sleep(300)
"""


def namespaces() -> set[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split(" ")[0] for line in listing.splitlines()}


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


# -- network -----------------------------------------------------------------------------------------


@needs_namespaces
def test_nodes_reach_each_other_at_the_rate_and_their_bytes_are_counted() -> None:
    program = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server((sys.argv[2], 5000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        count, start = 0, time.monotonic()
        while data := connection.recv(1 << 20):
            count += len(data)
        print(count, time.monotonic() - start)
else:
    with socket.create_connection((sys.argv[2], 5000)) as connection:
        connection.sendall(bytes(2_000_000))
"""
    with Network(2) as network:
        network.set_rate("1gbit")
        network.set_rate("40mbit")
        command = [sys.executable, "-c", program]
        receiver = network.start(
            0, [*command, "receive", network.address(0)], stdout=subprocess.PIPE, text=True
        )
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        before = network.sent_bytes()
        sender = network.start(1, [*command, "send", network.address(0)])
        count, seconds = receiver.communicate(timeout=30)[0].split()
        assert sender.wait() == 0
        sent = network.sent_bytes()[1] - before[1]
    assert int(count) == 2_000_000
    assert 2_000_000 <= sent <= 2_000_000 * 1.05
    # A lower bound only: no link may be faster than its shaping, whatever else the machine does.
    assert float(seconds) > 0.9 * 8 * (2_000_000 - 128 * 1024) / 40e6


@needs_namespaces
def test_a_closed_network_leaves_no_namespace_and_no_process() -> None:
    with Network(3) as network:
        assert set(network.nodes) < namespaces()
        sleeper = network.start(2, ["sleep", "300"])
    assert not any(name in namespaces() for name in network.nodes)
    assert sleeper.wait(timeout=5) == -signal.SIGKILL


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_network_is_removed_when_its_owner_is_killed(how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    nodes = owner.stdout.readline().split()
    assert set(nodes) <= namespaces()
    owner.send_signal(how)
    owner.wait(timeout=10)
    assert wait_until(lambda: not namespaces() & set(nodes)), namespaces()


@needs_namespaces
def test_the_next_network_removes_what_a_killed_watchdog_left() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = f"{cluster_network.PREFIX}{ended.pid}-1-n0"
    foreign = f"foreign-{os.getpid()}-n0"
    for name in (left, foreign):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with Network(2) as network:
            assert left not in namespaces()
            assert left not in remove_leftovers()
            assert {foreign, *network.nodes} <= namespaces()
    finally:
        for name in {left, foreign} & namespaces():
            subprocess.run(["ip", "netns", "del", name], check=True)


def test_rates_are_decimal_and_others_are_refused() -> None:
    assert [rate_in_bits(rate) for rate in ("100mbit", "1gbit", "2.5gbit")] == [1e8, 1e9, 2.5e9]
    for rate in ("", "100", "mbit", "0mbit", "-1mbit", "1tbit", "1gbit; reboot"):
        with pytest.raises(ValueError, match="use the form"):
            rate_in_bits(rate)


# -- command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("user", "reason"), [(1000, "needs root"), (0, "install iproute2")])
def test_without_root_or_iproute2_it_gives_the_reason_and_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: int, reason: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(cluster_network.shutil, "which", lambda program: None)
    assert cluster.main([]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--nodes", "1"], ["--rates", "fast"], ["--ranks-per-node", "0"]])
def test_impossible_settings_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cluster.main(arguments)


# -- strategies --------------------------------------------------------------------------------------


def train(names: list[str], layout: Cluster) -> dict[str, tuple[list[float], float | None]]:
    """Return per strategy the losses of every step, averaged over the ranks, and the bytes of the last."""
    torch.set_num_threads(1)
    results = {}
    for name in names:
        step = STRATEGIES[name](TINY, layout)
        losses, before = [], None
        for index in range(STEPS):
            if index == STEPS - 1:
                before = step.sent_bytes()
            loss = step()
            torch.distributed.all_reduce(loss)
            losses.append(loss.item() / layout.ranks)
        after = step.sent_bytes()
        results[name] = losses, None if before is None or after is None else after - before
    return results


def numel() -> int:
    """Parameters of the tiny model."""
    hidden = TINY.hidden
    per_layer = 12 * hidden**2 + 13 * hidden
    return TINY.layers * per_layer + (TINY.vocabulary + TINY.sequence_length) * hidden + 2 * hidden


def test_every_strategy_trains_the_same_model_and_sends_what_it_should() -> None:
    names = strategies_for(ONE_PER_NODE)
    first, second = run_ranks(train, 2, names, ONE_PER_NODE, timeout=240.0)
    assert {name: losses for name, (losses, _) in first.items()} == {
        name: losses for name, (losses, _) in second.items()
    }
    losses = {name: losses for name, (losses, _) in first.items()}
    # The same start, the same data, and steps that make a difference.
    starts = [values[0] for values in losses.values()]
    assert max(starts) - min(starts) < 2e-3
    assert all(values[-1] < values[0] - 0.1 for values in losses.values())
    # Full precision is full precision: only the order of a sum of two may differ, which it does not.
    assert losses["fair"] == losses["fsdp2"]
    similar = ("fair-bf16", "ddp", "ddp-bf16", "ddp-sdp4bit", "qwd", "ulq", "tlq", "tlq-hs", "sdp4bit")
    for name in similar:
        assert losses[name][-1] == pytest.approx(losses["fsdp2"][-1], abs=0.02), name
    assert losses["sdp4bit-4chunks"] == losses["sdp4bit"]

    half = numel() / 2  # what a rank sends to the only other one
    full = {"fair": 6, "fair-bf16": 4, "compute": 0}
    for name, per_value in full.items():
        assert first[name][1] == pytest.approx(per_value * half, rel=0.01, abs=1), name
    gradient, weight = 0.5 + 2 / 128, 0.5 + 2 / 2048
    quantized = {"qwd": 4 + weight, "tlq-hs": gradient + 2, "sdp4bit": gradient + weight}
    quantized["ddp-sdp4bit"] = 2 * gradient  # to be reduced, and what has been
    for name, per_value in quantized.items():
        # Short rows: a shorter last group per row and 15 bytes of alignment per message.
        assert first[name][1] == pytest.approx(per_value * half, rel=0.02), name
    assert first["qw"][1] == first["qwd"][1]
    assert first["ulq"][1] == first["tlq"][1] == first["tlq-hs"][1]
    assert all(first[name][1] is None for name in ("fsdp2", "ddp", "ddp-bf16", "ddp-powersgd"))


def test_levels_send_less_and_change_no_result_in_full_precision() -> None:
    layout = Cluster(nodes=2, ranks_per_node=2)
    names = ["fair", "hierarchical", "sdp4bit", "hsdp", "hsdp-sdp4bit"]
    assert {"hierarchical", "hsdp", "hsdp-sdp4bit"} == {*strategies_for(layout)} - {
        *strategies_for(ONE_PER_NODE)
    }
    results = run_ranks(train, 4, names, layout, timeout=240.0)[0]
    # Between nodes and per rank: each of 2 rows in a quarter of the ranks, or one row reduced in the node.
    assert results["fair"][1] == pytest.approx(6 * numel() / 4 * 2, rel=0.01)
    assert results["hierarchical"][1] == pytest.approx(6 * numel() / 4, rel=0.01)
    assert results["hierarchical"][0] == pytest.approx(results["fair"][0], abs=2e-3)
    # A rank's shard is half of the weights, and twice half of it goes to the other node.
    gradient = 0.5 + 2 / 128
    assert results["hsdp-sdp4bit"][1] == pytest.approx(2 * gradient * numel() / 4, rel=0.02)
    assert results["hsdp"][0] == pytest.approx(results["fair"][0], abs=2e-3)
    assert results["hsdp-sdp4bit"][0][-1] == pytest.approx(results["hsdp"][0][-1], abs=0.02)


def test_batches_differ_by_step_and_rank_and_repeat() -> None:
    tokens, targets = TINY.batch(3, rank=1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, TINY.batch(3, rank=1)[0])
    for step, rank in ((4, 1), (3, 0)):
        assert not torch.equal(tokens, TINY.batch(step, rank=rank)[0])


# -- report ------------------------------------------------------------------------------------------


def sample(strategy: str, seconds: float, round: int, *, sent: float = 100.0) -> Sample:
    return Sample(
        strategy=strategy,
        rate="1gbit",
        round=round,
        seconds=seconds,
        tx_bytes=sent,
        reported_bytes=98.0,
        loss=1.0 / (round + 1),
    )


def summary(*samples: Sample) -> dict[str, Any]:
    return cluster_report.summarize(samples, cluster=ONE_PER_NODE, parameters=1, arguments=[])


def test_rows_hold_medians_and_ratios_are_those_of_one_round() -> None:
    # The second round is disturbed; its ratio is not.
    samples = [sample("fair", s, i) for i, s in enumerate([4.0, 12.0, 5.0])]
    samples += [sample("sdp4bit", s, i, sent=110.0) for i, s in enumerate([1.0, 3.0, 1.0])]
    result = summary(*samples)
    fair, ours = result["rows"]
    assert (fair["seconds_per_step"], fair["spread"]) == (5.0, pytest.approx(8 / 5))
    assert (ours["tx_bytes_per_node_per_step"], ours["loss"]) == (110.0, pytest.approx(1 / 3))
    assert (fair["bytes_agree"], ours["bytes_agree"]) == (True, False)
    (ratio,) = result["ratios"]
    assert (ratio["reference"], ratio["strategy"]) == ("fair", "sdp4bit")
    assert (ratio["ratio"], ratio["lowest"], ratio["highest"]) == (4.0, 4.0, 5.0)


def test_several_runs_are_shown_by_the_medians_of_their_medians(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for number, seconds in enumerate([2.0, 8.0, 3.0]):
        samples = [sample(name, s, i) for name, s in (("fair", seconds), ("sdp4bit", 1.0)) for i in range(3)]
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(summary(*samples)))
    combined = cluster_report.combine([json.loads(file.read_text()) for file in files])
    fair, _ = combined["rows"]
    assert (fair["seconds_per_step"], fair["fastest"], fair["slowest"]) == (3.0, 2.0, 8.0)
    assert (fair["spread"], fair["rounds"]) == (2.0, 9)
    assert cluster_report.main([*map(str, files)]) == 0
    assert "| 1gbit | fair | sdp4bit | 3.00 (2.00 to 8.00) |" in capsys.readouterr().out
    files[0].write_text(json.dumps(summary(*samples[:3])))
    assert cluster_report.main([*map(str, files)]) == 2
    assert "the runs differ in nodes" in capsys.readouterr().err


@needs_namespaces
def test_a_small_cluster_is_measured_from_end_to_end(tmp_path: Path) -> None:
    before = namespaces()
    command = [sys.executable, "-m", "benchmarks.cluster", "--nodes", "2", "--ranks-per-node", "2"]
    command += ["--rates", "500mbit,1gbit", "--strategies", "hierarchical,fair,fair-bf16,ddp,sdp4bit"]
    command += ["--seconds-per-rate", "1", "--hidden", "256", "--layers", "4", "--profile", "sdp4bit"]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert namespaces() == before
    result = json.loads((tmp_path / "rows.json").read_text())
    rows = {(row["rate"], row["strategy"]): row for row in result["rows"]}
    assert len(rows) == 10
    spent = result["profile"]["ms"]
    assert all(spent[part] > 0 for part in spent), spent
    assert sum(spent.values()) < 10 * 1e3 * rows["1gbit", "sdp4bit"]["seconds_per_step"]
    for row in rows.values():
        assert row["seconds_per_step"] > 0
        assert row["bytes_agree"] is not False, row
    assert rows["1gbit", "sdp4bit"]["bytes_agree"]
    for rate in ("500mbit", "1gbit"):
        sent = {name: rows[rate, name]["tx_bytes_per_node_per_step"] for _, name in rows}
        assert sent["sdp4bit"] * 5 < sent["hierarchical"] < 0.55 * sent["fair"]

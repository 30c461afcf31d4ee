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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cluster, cluster_network, cluster_report, send_limit
from benchmarks.cluster_network import Network, rate_in_bits, reason_to_skip, remove_leftovers
from benchmarks.cluster_report import Sample
from benchmarks.cluster_strategies import STRATEGIES, Cluster, Workload, strategies_for
from tests import ROOT
from tests.ranks import guard, run_ranks

REASON = reason_to_skip()
pytestmark = pytest.mark.slow
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))

TINY = Workload(layers=2, hidden=64, heads=2, vocabulary=512, sequence_length=32, warmup_steps=1)
ONE_PER_NODE, TWO_PER_NODE = (Cluster(nodes=2, ranks_per_node=ranks) for ranks in (1, 2))
LEVELS = ("hierarchical", "hsdp", "hsdp-bf16", "hsdp-sdp4bit")
DEFERRED = ("hsdp-bf16-deferred", "hsdp-sdp4bit-deferred")
STEPS = 6

OWNER = """
import signal, sys, time
from benchmarks.cluster_network import Network
# Shells start their background commands with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
with Network(2) as network:
    sleeper = network.start(0, ["sleep", "300"])
    print(sleeper.pid, *network.nodes, flush=True)
    time.sleep(300)
"""


def namespaces() -> set[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split(" ")[0] for line in listing.splitlines()}


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


# -- network -----------------------------------------------------------------------------------------


@pytest.mark.gloo
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


@pytest.mark.gloo
@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_network_is_removed_when_its_owner_is_killed(how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    sleeper, *nodes = owner.stdout.readline().split()
    assert set(nodes) <= namespaces()
    owner.send_signal(how)
    owner.wait(timeout=30)
    assert wait_until(lambda: not namespaces() & set(nodes)), namespaces()
    assert wait_until(lambda: not cluster_network.process_status(int(sleeper)))


@pytest.mark.gloo
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


@pytest.mark.gloo
def test_impossible_settings_and_missing_rights_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--nodes", "1"], ["--rates", "fast"], ["--ranks-per-node", "0"]):
        with pytest.raises(SystemExit, match="2"):
            cluster.main(arguments)
    monkeypatch.setattr(cluster_network.shutil, "which", lambda program: None)
    for user, reason in ((1000, "needs root"), (0, "install iproute2")):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert cluster.main([]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("namespaces_missing", "per_node", "text"),
    [
        (None, "2", "torch sees no GPU"),
        ("no root", "1", "torch sees no GPU"),
        ("no root", "2", "no root; limiting send() instead needs one rank per node"),
    ],
)
def test_a_cluster_of_gpu_ranks_needs_a_gpu(
    namespaces_missing: str | None,
    per_node: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cluster, "reason_to_skip", lambda: namespaces_missing)
    monkeypatch.setattr(send_limit.shutil, "which", lambda program: program)
    assert cluster.main(["--device", "cuda", "--ranks-per-node", per_node]) == 2
    assert capsys.readouterr().err == f"the emulated cluster cannot run here: {text}\n"


# -- strategies --------------------------------------------------------------------------------------


def train(names: list[str], layout: Cluster, micro_batches: int = 1) -> dict[str, list[float]]:
    """Return each strategy's losses of every step, averaged over the ranks."""
    torch.set_num_threads(1)
    losses = {}
    for name in names:
        step = STRATEGIES[name](replace(TINY, micro_batches=micro_batches), layout)
        sums = []
        for _ in range(STEPS):
            step.load()
            sums.append(step())
        for loss in sums:
            torch.distributed.all_reduce(loss)
        losses[name] = [loss.item() / layout.ranks for loss in sums]
    return losses


def test_only_strategies_that_differ_run_by_default() -> None:
    everywhere = {*strategies_for(ONE_PER_NODE)}
    assert set(STRATEGIES) - everywhere == {*LEVELS, *DEFERRED, "fsdp2-bf16"}
    assert {*strategies_for(ONE_PER_NODE, transport="nccl")} - everywhere == {"fsdp2-bf16"}
    assert {*strategies_for(TWO_PER_NODE)} - everywhere == {*LEVELS}
    assert {*strategies_for(ONE_PER_NODE, micro_batches=2)} == everywhere
    every = strategies_for(TWO_PER_NODE, micro_batches=2, transport="nccl")
    assert every == list(STRATEGIES)


@pytest.mark.gloo
@pytest.mark.parametrize(("layout", "names"), [(ONE_PER_NODE, None), (TWO_PER_NODE, ["fsdp2", *LEVELS])])
def test_every_strategy_trains_the_same_model(layout: Cluster, names: list[str] | None) -> None:
    names = names or strategies_for(layout)
    assert set(LEVELS) & set(strategies_for(layout)) == (set(LEVELS) if layout is TWO_PER_NODE else set())
    first, *others = run_ranks(train, layout.ranks, names, layout, timeout=240.0)
    assert all(losses == first for losses in others)
    # The same start, the same data, and steps that make a difference.
    assert max(starts := [losses[0] for losses in first.values()]) - min(starts) < 2e-3
    assert all(losses[-1] < losses[0] - 0.1 for losses in first.values())
    # Ranks of the upper bound "compute" diverge, and PowerSGD and presets of few bits are less exact.
    for name in {*names} & {*LEVELS, "fair", "fair-bf16", "ddp", "ddp-sdp4bit", "qwd", "tlq-hs", "sdp4bit"}:
        assert first[name][-1] == pytest.approx(first["fsdp2"][-1], abs=0.02), name
    if layout is ONE_PER_NODE:
        # Only the order of a sum of two may differ.
        assert first["fair"] == first["fsdp2"] and first["sdp4bit-4chunks"] == first["sdp4bit"]


@pytest.mark.gloo
def test_a_deferred_all_reduce_trains_like_one_per_micro_batch() -> None:
    names = ["hsdp-bf16", "hsdp-sdp4bit", *DEFERRED]
    first, *others = run_ranks(train, 4, names, TWO_PER_NODE, 2, timeout=240.0)
    assert all(losses == first for losses in others)
    for name, tolerance in (("hsdp-bf16", 2e-3), ("hsdp-sdp4bit", 2e-2)):
        assert first[f"{name}-deferred"] == pytest.approx(first[name], abs=tolerance), name


# -- report ------------------------------------------------------------------------------------------


def sample(
    strategy: str, seconds: float, round: int, *, sent: float = 100.0, reported: float = 98.0
) -> Sample:
    return Sample(
        strategy=strategy,
        rate="1gbit",
        round=round,
        seconds=seconds,
        tx_bytes=sent,
        reported_bytes=reported,
        loss=1.0 / (round + 1),
    )


def summary(*samples: Sample) -> dict[str, Any]:
    return cluster_report.summarize(samples, cluster=ONE_PER_NODE, parameters=1, arguments=[])


@pytest.mark.gloo
def test_rows_hold_medians_and_ratios_are_those_of_one_round(tmp_path: Path, capsys: Any) -> None:
    # The second round is disturbed; its ratio is not.
    samples = [sample("fair", s, i) for i, s in enumerate([4.0, 12.0, 5.0])]
    samples += [sample("sdp4bit", s, i, sent=110e6) for i, s in enumerate([1.0, 3.0, 1.0])]
    result = summary(*samples)
    fair, ours = result["rows"]
    assert (fair["seconds_per_step"], fair["spread"]) == (5.0, pytest.approx(8 / 5))
    assert (ours["tx_bytes_per_node_per_step"], ours["loss"]) == (110e6, pytest.approx(1 / 3))
    assert (fair["bytes_agree"], ours["bytes_agree"]) == (True, False)
    (ratio,) = result["ratios"]
    assert (ratio["reference"], ratio["strategy"]) == ("fair", "sdp4bit")
    assert (ratio["ratio"], ratio["lowest"], ratio["highest"]) == (4.0, 4.0, 5.0)
    # Several runs are shown by the medians of their medians.
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file, seconds in zip(files, (2.0, 8.0, 3.0), strict=True):
        rounds = [sample(name, s, i) for name, s in (("fair", seconds), ("sdp4bit", 1.0)) for i in range(3)]
        file.write_text(json.dumps(summary(*rounds)))
    assert cluster_report.main([*map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "| 1gbit | fair | 3.000 | 200% |" in printed
    assert "| 1gbit | fair | sdp4bit | 3.00 (2.00 to 8.00) |" in printed
    files[0].write_text(json.dumps(summary(*rounds[:3])))
    assert cluster_report.main([*map(str, files)]) == 2
    assert "the runs differ in nodes" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("reported", "sent", "agrees"),
    [
        (1e3, 40e3, True),  # a tiny job, and the barriers around its steps
        (1e3, 60e3, False),
        (100e6, 102e6, True),
        (100e6, 104e6, False),
        (100e6, 96e6, False),
    ],
)
def test_bytes_agree_within_headers_and_barriers(reported: float, sent: float, agrees: bool) -> None:
    (row,) = summary(sample("sdp4bit", 1.0, 0, sent=sent, reported=reported))["rows"]
    assert row["bytes_agree"] is agrees


@pytest.mark.gloo
def test_the_transport_and_the_sharing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {**cluster_report.kernels.describe_machine(), "gpu": "H100"}
    monkeypatch.setattr(cluster_report.kernels, "describe_machine", lambda: described)
    shared: dict[str, Any] = {"cluster": TWO_PER_NODE, "parameters": 1, "arguments": []}
    samples = [sample("sdp4bit", 1.0, 0)]
    cpu = cluster_report.summarize(samples, **shared)
    gpu = cluster_report.summarize(samples, **shared, device="cuda", sharing="ranks run under MPS")
    names = ("label", "transport", "device", "ranks", "sharing")
    assert [cpu.get(name) for name in names] == ["emulated cluster, TCP, gloo, CPU", "gloo", "cpu", 4, None]
    label = "emulated cluster, TCP, NCCL, 4 ranks share one H100"
    assert [gpu[name] for name in names] == [label, "nccl", "cuda", 4, "ranks run under MPS"]


@pytest.mark.gloo
@needs_namespaces
def test_a_deferred_all_reduce_of_two_micro_batches_sends_half(tmp_path: Path) -> None:
    strategies = ["hsdp-bf16", "hsdp-bf16-deferred"]
    command = [sys.executable, "-m", "benchmarks.cluster", "--nodes", "2", "--ranks-per-node", "2"]
    command += ["--rates", "unshaped", "--micro-batches", "2", "--strategies", ",".join(strategies)]
    command += ["--hidden", "64", "--layers", "1", "--sequence", "16", "--seconds-per-rate", "1"]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=guard(280), check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "rows.json").read_text())
    assert (result["workload"]["micro_batches"], result["workload"]["sequence_length"]) == (2, 16)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert {row["rate"] for row in rows.values()} == {"unshaped"}
    sent = [rows[name]["tx_bytes_per_node_per_step"] for name in strategies]
    # Each of two ranks all-reduces half of the bf16 gradients with its partner of the other node.
    assert sent[1] == pytest.approx(2 * result["parameters"], rel=0.1)
    assert sent[0] == pytest.approx(2 * sent[1], rel=0.1)
    assert rows[strategies[1]]["loss"] == pytest.approx(rows[strategies[0]]["loss"], abs=0.01)


@pytest.mark.gloo
@needs_namespaces
def test_a_small_cluster_is_measured_from_end_to_end(tmp_path: Path) -> None:
    before = namespaces()
    command = [sys.executable, "-m", "benchmarks.cluster", "--nodes", "2", "--ranks-per-node", "2"]
    command += ["--rates", "500mbit,1gbit", "--strategies", "hierarchical,fair,fair-bf16,ddp,sdp4bit"]
    command += ["--seconds-per-rate", "1", "--hidden", "256", "--layers", "4", "--profile", "sdp4bit"]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=guard(280), check=False)
    assert done.returncode == 0, done.stderr
    assert namespaces() == before
    result = json.loads((tmp_path / "rows.json").read_text())
    rows = {(row["rate"], row["strategy"]): row for row in result["rows"]}
    assert len(rows) == 10
    (profile,) = result["profiles"]
    spent = profile["ms"]
    assert profile["groups"] == 5 and profile["device"] is None
    assert all(spent[part] > 0 for part in spent), spent
    assert sum(spent.values()) < 10 * 1e3 * rows["1gbit", "sdp4bit"]["seconds_per_step"]
    for row in rows.values():
        assert row["seconds_per_step"] > 0
        assert row["bytes_agree"] is not False, row
    assert rows["1gbit", "sdp4bit"]["bytes_agree"]
    for rate in ("500mbit", "1gbit"):
        sent = {name: rows[rate, name]["tx_bytes_per_node_per_step"] for _, name in rows}
        assert sent["sdp4bit"] * 5 < sent["hierarchical"] < 0.55 * sent["fair"]
        # A quarter of the values to each of two ranks of the other node, in fp32 and bf16, by each of two.
        assert sent["fair"] == pytest.approx(6 * result["parameters"], rel=0.05)

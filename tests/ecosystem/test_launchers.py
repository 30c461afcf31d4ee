"""Ray Train and torchft, with a process that is killed, and the Kubernetes example against its schema.

Layer: the examples' own programs; ranks on CPUs that represent a node each.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.ranks import run_ranks

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def losses(text: str) -> list[tuple[int, float]]:
    """Return steps and losses in the order of the lines; Ray repeats lines."""
    found = re.findall(r"step (\d+): loss ([\d.e-]+)", text)
    return list(dict.fromkeys((int(step), float(loss)) for step, loss in found))


def train_undisturbed() -> list[tuple[int, float]]:
    sys.path.insert(0, str(ROOT / "examples"))
    launched = importlib.import_module("launched")
    run = launched.Run(torch.device("cpu"), topology=1)
    return [(step, run.train_step()) for step in range(1, 13)]


@contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that is ended with the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT | environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(done: Callable[[], object], processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until something is so; fail with the logs if a process ends before or it takes too long."""
    deadline = time.monotonic() + 200
    while not done():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            raise AssertionError("\n".join(log.read_text()[-3000:] for log in folder.glob("*.log")))
        time.sleep(0.2)


def test_a_lost_worker_of_ray_train_changes_no_bit(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: make test-ecosystem")
    expected = run_ranks(train_undisturbed, 2)[0]
    log = tmp_path / "ray.log"
    program = [sys.executable, "examples/launch_ray.py", f"--storage={tmp_path}/ray"]
    with started(program, log, RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5") as ray:
        # Step 6: a checkpoint of step 4 is stored.
        wait_for(lambda: "step 6: loss" in log.read_text(), [ray], tmp_path)
        os.kill(int(re.findall(r"pid=(\d+)\) world_rank=1", log.read_text())[0]), signal.SIGKILL)
        assert ray.wait(timeout=200) == 0, log.read_text()[-4000:]
    before, resumed, after = log.read_text().partition("resumed at step ")
    assert resumed and losses(before) == expected[: len(losses(before))]
    stored = int(re.match(r"\d+", after)[0])  # type: ignore[index]
    assert stored in (4, 8)  # 8 if the worker lived that long
    assert losses(after) == expected[stored:]
    assert re.search(r"layers\.0 .* 2 x 1 ", after)


def steps(log: Path) -> list[tuple[int, int, float]]:
    """Return step, groups that took part, and the norm of the weights after it."""
    found = re.findall(r"step (\d+) of (\d+) groups: .*weights ([\d.]+),", log.read_text())
    return [(int(step), int(groups), float(norm)) for step, groups, norm in found]


def test_a_group_of_torchft_leaves_and_returns(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: make test-ecosystem")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    logs = [tmp_path / f"group{name}.log" for name in ("0", "1", "1-again")]
    lighthouse = [str(Path(sys.executable).parent / "torchft_lighthouse"), f"--bind=127.0.0.1:{port}"]
    lighthouse += ["--min_replicas=1", "--join_timeout_ms=10000"]
    found = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launch = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
    group = [*launch, "examples/launch_torchft.py", "--topology=1", "--steps=1000"]

    def alone() -> list[int]:
        return [step for step, groups, _ in steps(logs[0]) if groups == 1]

    with (
        started(lighthouse, tmp_path / "lighthouse.log"),
        started([*group, "--group=0"], logs[0], **found) as one,
    ):
        with started([*group, "--group=1"], logs[1], **found) as other:
            wait_for(lambda: len(steps(logs[1])) > 2, [one, other], tmp_path)
            worker = Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split()[-1]
            before = len(alone())
            os.kill(int(worker), signal.SIGKILL)
            assert other.wait(timeout=100) != 0
        wait_for(lambda: len(alone()) > before + 2, [one], tmp_path)
        with started([*group, "--group=1"], logs[2], **found) as other:
            wait_for(lambda: len(steps(logs[2])) > 2, [one, other], tmp_path)
            returned = steps(logs[2])
            wait_for(lambda: steps(logs[0])[-1][0] >= returned[-1][0], [one, other], tmp_path)
            ours = steps(logs[0])
    # It has returned to the step after the last one that the first group trained alone.
    assert returned[0][0] == 1 + max(step for step, groups, _ in ours if groups == 1)
    # A step is repeated if it was cut short by the loss of a group.
    assert len(ours) - len({step for step, _, _ in ours}) <= 1
    # Wherever both took part, their weights are equal, bit for bit.
    ours_of = {step: norm for step, groups, norm in ours if groups == 2}
    both = {step: norm for step, groups, norm in steps(logs[1]) + returned if groups == 2}
    assert len(both) >= 4 and both == {step: ours_of[step] for step in both}


def test_the_kubernetes_example_has_the_fields_of_kubeflow_trainer() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    import yaml

    job = yaml.safe_load((ROOT / "examples/cluster/kubeflow.yaml").read_text())
    # The models leave out fields that they do not know.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job

"""The files of examples/cluster as they are: on two nodes of Slurm, and on two machines without it.

Layer: network namespaces with a shaped link; Debian's Slurm; torchrun; the examples' own program on CPUs.
"""

from __future__ import annotations

import importlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.cluster_network import reason_to_skip
from sdp4bit_lab.common.machine import PASTE
from tests import ROOT
from tests.lab.common.launch.slurm_nodes import (
    NAMES,
    Machines,
    environment,
    reason_against_slurm,
    slurm_nodes,
)
from tests.ranks import run_ranks

STEPS = 24
RATE, MEGABITS = "200mbit", 200
SITE = {
    "RANKS_PER_NODE": "1",
    "SELFTEST": "--device cpu --only facts,collectives",
    "PROBE": "--megabytes 4 --rounds 3 --host-rounds 3",
    "PLAN": "--preset 125M --device-tflops 50",  # faster than this machine, so that the plan advises to train
}
"""Variables of a machine without GPUs, for small models."""


def losses(text: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", text, re.M)]


def train_undisturbed() -> list[tuple[int, float]]:
    sys.path.insert(0, str(ROOT / "examples"))
    run = importlib.import_module("launched").Run(torch.device("cpu"), topology=1)
    return [(step, run.train_step()) for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[int, float]]:
    return run_ranks(train_undisturbed, 2)[0]


def assert_steps(text: str) -> None:
    """The five steps have printed what first_hour.sh and the page lead a user to expect."""
    # Every machine plans by itself, and one may train, and wait, while another still plans.
    for steps in ((1, 2, 3, 4), (3, 5)):
        places = [text.index(f"== {number}. ") for number in steps]
        assert places == sorted(places)
    assert re.findall(r"^== 1\. network: (node\d) uses eth0 to (\S+)$", text, re.M)
    assert "2 ranks on 2 hosts" in text and "Result: all checks passed" in text
    (rate,) = set(re.findall(r"^inter-node, per node: ([\d.]+) MB/s per direction", text, re.M))
    # At most the link's rate; on a busy machine it may be any part of it.
    assert 0 < float(rate) < MEGABITS / 8
    assert re.search(r"^recommendation: enable: .* times as fast as", text, re.M)
    pasted = re.findall(rf"^{re.escape(PASTE)}-*$(.*?)^-+$", text, re.M | re.S)
    assert len(pasted) == 2 and not any(name in block for name in NAMES for block in pasted)
    assert re.search(r"^layers\.0 .* 2 x 1 ", text, re.M)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.skipif(reason_against_slurm() is not None, reason=str(reason_against_slurm()))
def test_a_job_of_slurm_goes_through_the_five_steps_and_survives_a_lost_node(
    undisturbed: list[tuple[int, float]], tmp_path: Path
) -> None:
    output, program = tmp_path / "slurm.out", ["examples/launched.py", f"--checkpoints={tmp_path}/saved"]
    with slurm_nodes(rate=RATE) as (slurm, machines):
        job = ["sbatch", f"--output={output}", "examples/cluster/slurm.sbatch", *program, f"--steps={STEPS}"]
        assert "Submitted batch job 1" in slurm.run(*job, OUT=str(tmp_path / "out"), **SITE)
        slurm.wait_for(lambda: output.exists() and "step 6: loss" in output.read_text(), seconds=900)
        machines.lose(1)
        slurm.wait_for(lambda: "down" in slurm.run("sinfo", "--noheader", "--format=%T", "--nodes=node1"))
        lost = output.read_text()
        slurm.start_node(1)
        slurm.wait_for(lambda: "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", "1"))
        assert "Restarts=1" in slurm.run("scontrol", "show", "job", "1")
    text = output.read_text()
    after = text.removeprefix(lost)
    assert_steps(lost + "".join(re.findall(r"^layers\.0 .*$", after, re.M)))
    # The job trains at once when it is queued again, from its last checkpoint.
    assert "== 2." not in after and "== 5. train" in after
    (resumed,) = map(int, re.findall(r"^resumed at step (\d+)$", after, re.M))
    assert 4 <= resumed < STEPS
    before, again = losses(lost), losses(after)
    assert before == undisturbed[: len(before)] and len(before) >= 6
    assert again == undisturbed[resumed:]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))
def test_two_machines_without_a_scheduler_go_through_the_five_steps(
    undisturbed: list[tuple[int, float]], tmp_path: Path
) -> None:
    program = ["examples/launched.py", f"--checkpoints={tmp_path}/saved", f"--steps={STEPS}"]
    outputs = [tmp_path / f"machine{number}.out" for number in range(2)]
    with Machines(rate=RATE) as machines:
        started = []
        for number, output in enumerate(outputs):
            variables = environment(HEAD="10.77.0.1", OUT=str(tmp_path / f"out{number}"), **SITE)
            with output.open("w") as file:
                pipes = {"stdout": file, "stderr": subprocess.STDOUT, "env": variables}
                started.append(machines.start(number, ["examples/cluster/first_hour.sh", *program], **pipes))
        codes = [process.wait(timeout=900) for process in started]
    texts = [output.read_text() for output in outputs]
    assert codes == [0, 0], "\n".join(text[-3000:] for text in texts)
    # The machine of rank 0, which either may be, prints the results; both plan, by the same measurements.
    first, other = sorted(texts, key=lambda text: "Result: " in text, reverse=True)
    assert_steps(first)
    assert losses(first) == undisturbed
    assert re.findall(r"^== (\d)", other, re.M) == ["1", "2", "3", "4", "5"]
    plans = [re.findall(r"^recommendation: .*", text, re.M) for text in texts]
    assert plans[0] == plans[1]


def with_stand_ins(
    folder: Path, program: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run first_hour.sh on the first machine, with stand-ins for the programs that it starts."""
    stand_ins = {
        "torchrun": "echo ran $*",
        "sdp4bit": 'case "$*" in *--wrong*) exit 2 ;; esac; echo "recommendation: $ADVICE"',
        "python": "test $OWN && echo $OWN",  # the address towards HEAD
    }
    for name, text in stand_ins.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    given = environment(
        **{"HEAD": "10.0.0.1", "OWN": "10.0.0.1", "INTERFACE": "lo", "OUT": str(folder), **variables}
    )
    return subprocess.run(
        ["examples/cluster/first_hour.sh", *program],
        cwd=ROOT,
        env={**given, "PATH": f"{folder}:{given['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("advice", "steps", "trains"),
    [
        ("do not enable: 0.97", "selftest probe plan train", False),
        ("do not enable: 0.97", "train", True),
        ("perhaps: 1.05", "probe plan train", True),
    ],
)
def test_nothing_is_trained_against_the_advice_of_the_plan(
    advice: str, steps: str, trains: bool, tmp_path: Path
) -> None:
    done = with_stand_ins(tmp_path, ["program.py"], ADVICE=advice, STEPS=steps, SLURM_NODEID="1")
    assert done.returncode == (0 if trains else 2), done.stderr
    assert ("program.py" in done.stdout) == trains
    assert (f"== done: {steps}" in done.stdout) == trains
    assert ("leave sdp4bit off, so nothing is trained" in done.stderr) == (not trains)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HEAD": ""}, "set HEAD to the address of the first machine, as the second one sees it"),
        ({"HEAD": "localhost"}, "on this machine, which the others cannot reach: set HEAD to its address"),
        ({"HEAD": "no.such.host.invalid"}, "the name no.such.host.invalid is not known here"),
        ({"OWN": ""}, "this machine has no route to HEAD=10.0.0.1"),
        ({"INTERFACE": "docker9"}, "there is no interface docker9 on this machine, but "),
        ({"STEPS": "selftest test"}, "test is no step"),
        ({"STEPS": "selftest train"}, "step 5 needs the training program"),
        ({"STEPS": "selftest plan", "PLAN": "--wrong"}, 'PLAN="--wrong" is not what sdp4bit plan takes'),
    ],
)
def test_values_that_cannot_work_end_before_a_rank_waits(
    variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = with_stand_ins(tmp_path, [], **variables)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert "ran" not in done.stdout


@pytest.mark.gloo
def test_the_second_machine_says_that_it_waits(tmp_path: Path) -> None:
    """Nothing listens at this address, and then something does."""
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        port = server.getsockname()[1]
        later = threading.Timer(3, server.listen)
        later.start()
        # An address of this machine that the script does not take for one, as it does 127.0.0.1.
        variables = {"HEAD": "0.0.0.0", "OWN": "10.0.0.2", "STEPS": "selftest", "PORT": str(port)}
        done = with_stand_ins(tmp_path, [], **variables)
        later.join()
    assert f"waiting for 0.0.0.0, port {port}: start this script there, too (0 s)" in done.stdout
    assert done.returncode == 0 and "ran " in done.stdout, done.stderr

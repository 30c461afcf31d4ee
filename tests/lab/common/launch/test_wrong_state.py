"""State that is wrong but well formed, and disks that are full: the real command loses and hides nothing.

Layer: the command line with 2 processes; torchrun; a tmpfs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdp4bit_lab.common.files import write_sums
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer
from tests.lab.common.launch.started_ranks import (
    COMMAND,
    PRETRAIN,
    TORCHRUN,
    options,
    outcome_of,
    wait_for_lines,
)
from tests.lab.pretrain.saved_runs import names
from tests.lab.pretrain.tiny_runs import losses

pytestmark = pytest.mark.gloo

STEPS = 12
FAULTY = str(Path(__file__).with_name("faulty_command.py"))
# Never imported here: it changes what trains in its process.
FAULTY_PRETRAIN = [sys.executable, FAULTY, "pretrain", "--nproc-per-node", "2", "--no-tensorboard"]
RESTARTED = [*TORCHRUN, "--max-restarts", "2", FAULTY, "pretrain", "--no-tensorboard"]


@pytest.fixture(scope="module")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], float]:
    """Return the losses of the run without faults."""
    out = tmp_path_factory.mktemp("undisturbed")
    code, output = outcome_of([*PRETRAIN, *options(text, out, steps=STEPS)])
    assert code == 0, output
    return losses(out)


def checkpoints(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


def saving(folder: Path, interval: int, keep_last: int = 2) -> tuple[str, ...]:
    return (
        *("--save", str(folder), "--save-interval", str(interval)),
        *("--keep-last", str(keep_last), "--auto-resume"),
    )


def errors(output: str) -> list[str]:
    """Return the errors of a run, none of which is a traceback."""
    assert "Traceback" not in output, output
    return [line for line in output.splitlines() if "error: " in line]


@pytest.mark.slow
def test_a_run_survives_a_clock_that_goes_back_a_damaged_record_and_a_nan(text, undisturbed, tmp_path):
    plan, saved, out = tmp_path / "plan", tmp_path / "saved", tmp_path / "run"

    def run(fault: str, keep_last: int = 2) -> tuple[int, str]:
        plan.write_text(fault)
        more = saving(saved, 3, keep_last)
        return outcome_of([*FAULTY_PRETRAIN, *options(text, out, *more, steps=STEPS)], plan=plan)

    # The weights are broken after the norm of step 6 was computed, and the only good checkpoint is kept.
    code, output = run("nan", keep_last=1)
    assert code == 3 and names(saved) == checkpoints(3), output
    (error,) = errors(output)
    assert error.startswith("sdp4bit: error: model.") and " on rank 1 is not finite at step 6: lower" in error
    code, output = run("clock")
    assert code == 0 and "resumed from step 3" in output and names(saved) == checkpoints(9, 12), output

    record = saved / "step-00000012" / "run.json"
    nested = f'"x": {"[" * 100_000}{"]" * 100_000}, "saved_at"'
    record.write_text(record.read_text().replace('"saved_at"', nested))
    (record.parent / "SHA256SUMS").unlink()
    write_sums(record.parent, known={})
    code, output = run("")
    assert code == 0 and "00012 is damaged: run.json" in output and "resumed from step 9" in output, output
    assert losses(out) == undisturbed


@pytest.mark.slow
def test_a_divergence_that_repeats_ends_the_restarts(text, tmp_path):
    plan, saved = tmp_path / "plan", tmp_path / "saved"
    plan.write_text("nan")
    run = options(text, tmp_path / "run", *saving(saved, 3, keep_last=1), steps=STEPS)
    code, output = outcome_of([*RESTARTED, *run], plan=plan)
    assert code == 1 and names(saved) == checkpoints(3), output
    assert output.count("resumed from step 3") == 1
    assert "error: this job has diverged twice: model." in output


@pytest.mark.slow
def test_a_replica_that_differs_is_never_saved(text, undisturbed, tmp_path):
    """A bit flips after step 7: the audits before and after are those of steps 5 and 10."""
    plan, saved, run = tmp_path / "plan", tmp_path / "saved", ("--audit-interval", "5")
    plan.write_text("flip")
    run = options(text, tmp_path / "run", *run, *saving(saved, 4), steps=STEPS)
    code, output = outcome_of([*RESTARTED, *run], plan=plan)
    assert code == 0, output
    assert "error: sdp4bit: copies of the same weights differ between ranks" in output
    assert "resumed from step 4" in output
    assert losses(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(text, tmp_path):
    folder, seen = tmp_path / "saved", []

    def start_another(first: subprocess.Popen[str]) -> None:
        wait_for_lines(first, tmp_path / "first")
        more = options(text, tmp_path / "second", *saving(folder, 1), steps=4)
        seen.append(outcome_of([*COMMAND, "pretrain", *more]))
        os.kill(first.pid, signal.SIGTERM)

    run = options(text, tmp_path / "first", *saving(folder, 1))
    code, output = outcome_of([*PRETRAIN, *run], start_another)
    assert code == 0 and "because of SIGTERM; saved in" in output, output
    ((code, output),) = seen
    (error,) = errors(output)
    assert code == 2 and f" on {socket.gethostname()}). End it, or give another folder" in error


@contextmanager
def small_disk(folder: Path, *, kilobytes: int) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line_with_the_file(text, tmp_path):
    with small_disk(tmp_path / "saved", kilobytes=2000) as saved:
        run = options(text, tmp_path / "run", *saving(saved, 3), steps=30)
        code, output = outcome_of([*PRETRAIN, *run])
        (error,) = errors(output)
        assert code == 2 and error.startswith("sdp4bit: error: the checkpoint of step 6 was not saved: rank ")
        free = int(error.partition(" bytes are free")[0].rpartition("; ")[2].replace(",", ""))
        assert free < 500_000 and names(saved) == checkpoints(3)
    with small_disk(tmp_path / "out", kilobytes=40) as out:
        run = [*COMMAND, "pretrain", "--nproc-per-node", "2", *options(text, out, steps=200)]
        code, output = outcome_of(run)
        (error,) = errors(output)
        assert code == 2 and error.startswith(f"sdp4bit: error: {out}/"), error
        assert " bytes are written, 0 are free" in error


@pytest.mark.slow
def test_a_panic_is_one_line(text, tmp_path):
    path = tmp_path / "tokenizer.json"
    BytePairTokenizer.train([text.read_text()], vocabulary_size=300).save(path)
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}
    path.write_text(json.dumps(content))
    run = ["--tokenizer-model", str(path), "--data-path", str(text), "--out", str(tmp_path / "run")]
    code, output = outcome_of([*PRETRAIN, *run, "--cache-dir", str(tmp_path)])
    assert code == 2 and errors(output)[0].startswith("sdp4bit: error: the tokenizer has failed"), output

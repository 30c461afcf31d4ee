"""Kill a training run repeatedly and check that it ends with the losses of an undisturbed run, bit for bit.

    python -m tests.lab.common.launch.soak --kills 50 --seed 1 --json soak.json

Trains a small model under torchrun with frequent checkpoints. Ranks are killed from outside at
random moments, and by themselves at chosen ones (see saboteur.py). Most signals are SIGKILL. After
SIGTERM the run saves and stops, and the command is started again. SIGSTOP is only noticed by the timeout of
the other ranks. All starts use the same command line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cluster_network import process_status
from tests.lab.common.launch.saboteur import FOLDER, PHASES, mark_of, next_fault

# Maximum number of calls of a phase between a start and its fault; a step has about 20 exchanges.
CALLS = {
    **{"exchange": 160, "checkpoint write": 60, "checkpoint copy": 2, "checkpoint publish": 2},
    **{"load": 1, "validation": 1},
}
STEPS_WITHOUT_FAULT = 12
"""Steps after which a fault that did not occur is sent from outside."""
SHUTDOWN = 30.0
"""Seconds that torchrun gives a rank after SIGTERM, which a stopped rank does not answer."""
START = 120.0
"""Seconds that a start may take on a busy machine."""
FIRST_RANK_ONLY = ("checkpoint publish", "log")


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Settings of a soak test."""

    kills: int = 50
    ranks: int = 4
    ranks_per_node: int = 2
    steps: int = 0
    save_interval: int = 4
    timeout_seconds: float = 30.0
    seed: int = 1

    @property
    def train_steps(self) -> int:
        return self.steps or max(30, 4 * self.kills)


class Doing(NamedTuple):
    """Activity of a rank."""

    pid: int
    step: int
    phase: str


@dataclass(kw_only=True)
class Kill:
    """A fault and the recovery from it."""

    number: int
    signal: str
    rank: int
    phase: str
    from_outside: bool
    step: int
    """Training step of the rank; 0 before the first."""
    at_seconds: float
    """Since the start of the soak test."""
    ended_after_seconds: float | None = None
    """Until all other ranks had exited."""
    recovered_after_seconds: float | None = None
    """Until the next step was logged."""
    resumed_from_step: int | None = None
    """0 without a checkpoint."""
    pids: list[int] = field(default_factory=list)


def plan(soak: Soak) -> list[dict[str, Any]]:
    """Return the faults: signals in fixed proportions, phases in equal shares, the rest at random."""
    chance = random.Random(soak.seed)
    stops, terms = round(0.1 * soak.kills), round(0.12 * soak.kills)
    signals = ["SIGSTOP"] * stops + ["SIGTERM"] * terms
    signals += ["SIGKILL"] * (soak.kills - len(signals))
    targets = [*PHASES, *["random"] * 7]
    phases = [targets[index % len(targets)] for index in range(soak.kills)]
    chance.shuffle(signals)
    chance.shuffle(phases)
    return [
        {
            "signal": name,
            "rank": 0 if phase in FIRST_RANK_ONLY else chance.randrange(soak.ranks),
            "phase": phase,
            # From outside: after this many steps; 0 is during the start.
            "call": chance.randint(1, CALLS.get(phase, 10)) if phase != "random" else chance.randrange(0, 9),
            "delay": chance.random(),
        }
        for name, phase in zip(signals, phases, strict=True)
    ]


def command(soak: Soak, folder: Path, *, out: str, module: str, more: list[str]) -> list[str]:
    """Return the command line, the same for every start."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        # A fault causes at most one restart; a program that fails by itself must not restart forever.
        *("--max-restarts", str(soak.kills)),
        *("--nproc-per-node", str(soak.ranks), "-m", module, "pretrain", "--seed", str(soak.seed)),
        *("--ranks-per-node", str(soak.ranks_per_node), "--num-layers", "2", "--hidden-size", "64"),
        *("--num-attention-heads", "2", "--dropout", "0.1", "--seq-length", "32", "--micro-batch-size", "1"),
        *("--train-iters", str(soak.train_steps), "--eval-interval", "7", "--eval-iters", "1"),
        *("--lr", "5e-3", "--data-path", str(folder / "text.txt"), "--vocab-size", "512"),
        *("--data-cache-path", str(folder / "cache"), "--no-tensorboard", "--out", str(folder / out)),
        *("--distributed-timeout-minutes", f"{soak.timeout_seconds / 60:.4f}", *more),
    ]


class SoakError(RuntimeError):
    """Report that the run did not recover."""


class Runner:
    """Start the run, disturb it and record the kills."""

    def __init__(self, soak: Soak, folder: Path) -> None:
        self.soak = soak
        self.folder = folder
        self.kills: list[Kill] = []
        self.starts_of_command = 0
        self._begin = time.time()
        self._log = folder / "output.txt"
        self._out = folder / "disturbed"
        saving = ["--save", str(folder / "checkpoints"), "--save-interval", str(soak.save_interval)]
        saving += ["--keep-last", "2", "--auto-resume"]
        module = "tests.lab.common.launch.saboteur"
        self._command = command(soak, folder, out="disturbed", module=module, more=saving)
        (folder / "plan.json").write_text(json.dumps(plan(soak)))
        self._environment = {**os.environ, FOLDER: str(folder), "OMP_NUM_THREADS": "1"}

    def run(self) -> None:
        """Run to the end through all faults."""
        while True:
            self.starts_of_command += 1
            with (
                self._log.open("ab") as log,
                subprocess.Popen(
                    self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment
                ) as process,
            ):
                try:
                    self._disturb(process)
                finally:
                    if process.poll() is None:
                        process.terminate()
            if process.returncode != 0:
                raise SoakError(f"torchrun exited with {process.returncode}: {self.tail()}")
            if last_step(self._out) == self.soak.train_steps:
                self._complete()
                return

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def _disturb(self, process: subprocess.Popen[bytes]) -> None:
        """Watch one start of the command until it exits; SoakError if it hangs."""
        seen, changed = None, time.time()
        while process.poll() is None:
            time.sleep(0.02)
            self._note_kills()
            now = (last_step(self._out), [self._doing(rank) for rank in range(self.soak.ranks)])
            if now != seen:
                seen, changed = now, time.time()
            if time.time() - changed > self.soak.timeout_seconds + SHUTDOWN + START:
                raise SoakError(f"no progress: {now[1]}: {self.tail()}")
            self._strike_from_outside(process)
        self._note_kills()

    def _strike_from_outside(self, process: subprocess.Popen[bytes]) -> None:
        found, first_rank = next_fault(self.folder), self._doing(0)
        if found is None or first_rank is None:
            return
        number, fault = found
        if self.kills and first_rank.pid in self.kills[-1].pids:
            return  # the run has not been restarted since
        if fault["phase"] == "random" and fault["call"] == 0:
            # During the start, at a random time within its usual duration.
            time.sleep(3 * fault["delay"])
        else:
            last_kill = self._begin + self.kills[-1].at_seconds if self.kills else self._begin
            first = next((step for moment, step in started_at(self.folder) if moment > last_kill), None)
            wanted = fault["call"] if fault["phase"] == "random" else STEPS_WITHOUT_FAULT
            if first is None or last_step(self._out) < first + wanted - 1:
                return
            time.sleep(0.2 * fault["delay"])
        doing = self._doing(fault["rank"])
        if doing is None or process.poll() is not None or not is_child(doing.pid, process.pid):
            return
        mark = mark_of(self.folder, number)
        if not mark.exists():
            words = {"time": time.time(), "step": doing.step, "phase": doing.phase, "from_outside": True}
            mark.write_text(json.dumps(words))
            os.kill(doing.pid, signal.Signals[fault["signal"]])

    def _note_kills(self) -> None:
        """Record new marks, and the exit of the other ranks after the last kill."""
        faults = json.loads((self.folder / "plan.json").read_text())
        while len(self.kills) < len(faults) and mark_of(self.folder, len(self.kills)).exists():
            number = len(self.kills)
            try:
                mark = json.loads(mark_of(self.folder, number).read_text())
            except ValueError:
                return  # being written
            fault = faults[number]
            doing = [self._doing(rank) for rank in range(self.soak.ranks)]
            kill = Kill(
                number=number,
                signal=fault["signal"],
                rank=fault["rank"],
                phase=mark["phase"],
                from_outside=mark.get("from_outside", False),
                step=mark["step"],
                at_seconds=mark["time"] - self._begin,
                pids=[each.pid for each in doing if each is not None],
            )
            self.kills.append(kill)
            print(
                f"{kill.number + 1}/{len(faults)}: {kill.signal} rank {kill.rank}, {kill.phase}, "
                f"step {kill.step}, after {kill.at_seconds:.0f} s",
                flush=True,
            )
        for kill in self.kills[-1:]:
            others = [pid for rank, pid in enumerate(kill.pids) if rank != kill.rank]
            if kill.ended_after_seconds is None and not any(map(is_running, others)):
                kill.ended_after_seconds = time.time() - self._begin - kill.at_seconds

    def _complete(self) -> None:
        for kill in self.kills:
            moment = self._begin + kill.at_seconds
            for start, step in started_at(self.folder):
                if start > moment:
                    kill.recovered_after_seconds, kill.resumed_from_step = start - moment, step - 1
                    break

    def _doing(self, rank: int) -> Doing | None:
        try:
            pid, step, phase = (self.folder / f"rank-{rank}").read_text().split(maxsplit=2)
        except (OSError, ValueError):
            return None
        return Doing(int(pid), int(step), phase.strip())


def last_step(out: Path) -> int:
    """Return the last logged training step; 0 if there is none."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut off at the start of the part read, or being written
        if values["event"] == "train":
            return int(values["step"])
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file; none if it is missing or being written."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []


def started_at(folder: Path) -> list[tuple[float, int]]:
    """Return time and number of the first step of every start."""
    return [(line["time"], line["step"]) for line in read_lines(folder / "started.jsonl")]


def is_running(pid: int) -> bool:
    status = process_status(pid)
    return bool(status) and status[0] != "Z"


def is_child(pid: int, parent: int) -> bool:
    return is_running(pid) and process_status(pid)[1:2] == [str(parent)]


def losses(out: Path) -> list[tuple[str, int, float, float | None]]:
    """Return event, step, loss and gradient norm of all steps and validations in log order.

    Excludes samples of telemetry, which are not part of a checkpoint.
    """
    return [
        (line["event"], line["step"], line["loss"], line.get("grad_norm"))
        for line in read_lines(out / "metrics.jsonl")
        if line["event"] in ("train", "validation")
    ]


def run_soak(soak: Soak, folder: Path) -> dict[str, Any]:
    """Return the record of a soak test; SoakError if the run hangs or does not recover.

    1. Run undisturbed, without checkpoints.
    2. Run to the end with faults.
    3. Compare loss and gradient norm of all logged steps and validations, bit for bit, in order.
    """
    begin = time.time()
    (folder / "text.txt").write_text(Path(random.__file__).read_text() + Path(argparse.__file__).read_text())
    undisturbed = command(soak, folder, out="undisturbed", module="sdp4bit_lab", more=[])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(undisturbed, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SoakError(done.stderr[-3000:])
    undisturbed_seconds = time.time() - begin
    runner = Runner(soak, folder)
    runner.run()
    expected, found = losses(folder / "undisturbed"), losses(folder / "disturbed")
    resumed = read_lines(folder / "resumed.jsonl")
    differing = (pair for pair in zip(expected, found, strict=False) if pair[0] != pair[1])
    recoveries = [k.recovered_after_seconds for k in runner.kills if k.recovered_after_seconds is not None]

    def longest_end(signal_name: str) -> float | None:
        ends = [k.ended_after_seconds for k in runner.kills if k.signal == signal_name]
        return max((end for end in ends if end), default=None)

    return {
        "settings": {**asdict(soak), "steps": soak.train_steps},
        "torch": str(torch.__version__),
        "kills": len(runner.kills),
        "signals": dict(Counter(kill.signal for kill in runner.kills)),
        "phases": dict(Counter(kill.phase for kill in runner.kills)),
        "from_outside": sum(kill.from_outside for kill in runner.kills),
        "starts_of_the_command": runner.starts_of_command,
        "lines": len(found),
        "equal": found == expected,
        "first_difference": next(differing, None),
        "loads": len(resumed),
        "every_load_took_the_latest": all(line["latest"] == line["loaded"] for line in resumed),
        "left_in_the_folder": sorted(path.name for path in (folder / "checkpoints").glob("*step-*")),
        "longest_recovery_seconds": max(recoveries, default=None),
        "others_ended_within_seconds": {name: longest_end(name) for name in ("SIGKILL", "SIGSTOP")},
        "undisturbed_seconds": undisturbed_seconds,
        "seconds": time.time() - begin,
        "each": [{k: v for k, v in asdict(kill).items() if k != "pids"} for kill in runner.kills],
        "resumed_from": [line["loaded"] for line in resumed],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="default: four per kill")
    parser.add_argument("--timeout-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="output file")
    parser.add_argument("--folder", type=Path, help="folder for logs and checkpoints")
    given = vars(parser.parse_args())
    path, folder = given.pop("json"), given.pop("folder")
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        account = run_soak(Soak(**given), folder)
    text = json.dumps(account, indent=1) + "\n"
    if path is not None:
        path.write_text(text)
    print(json.dumps({k: v for k, v in account.items() if k not in ("each", "resumed_from")}, indent=1))
    return 0 if account["equal"] and account["every_load_took_the_latest"] else 1


if __name__ == "__main__":
    sys.exit(main())

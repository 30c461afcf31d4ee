"""What a check of the self-test is: it runs on all ranks; the first failure on any of them ends the test."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sdp4bit_lab.common.ranks import Ranks, gather_over_ranks
from sdp4bit_lab.selftest.config import SelftestConfig


class CheckFailedError(Exception):
    """Something is not as it should be; the message says what, with the numbers."""

    def __init__(self, message: str, *, case: str) -> None:
        super().__init__(message)
        self.case = case
        """What was being done, to do it again."""


class OtherRankFailedError(Exception):
    """Another rank has raised what this check has failed with."""


class CheckSkippedError(Exception):
    """The check does not apply to these ranks; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What all checks are given."""

    config: SelftestConfig
    ranks: Ranks
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Findings of the checks before, by their names."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.ranks.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    @property
    def simulated_ranks(self) -> int | None:
        """Ranks that this process stands for; None for real ones."""
        return self.config.parallel.simulated_ranks

    def say(self, line: str) -> None:
        """Print progress, on rank 0."""
        if self.ranks.is_first:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def fail_together(self, failure: CheckFailedError | None) -> None:
        """Raise on all ranks if a rank has found a failure; called by all, so that none is left waiting.

        Raises:
            CheckFailedError: the failure that was given, on the rank that has found it.
            OtherRankFailedError: on the others.
        """
        failed = gather_over_ranks(failure is not None, what="what a check has found")
        if failure is not None:
            raise failure
        if any(failed):
            raise OtherRankFailedError


Check = Callable[[Context], dict[str, Any]]
"""Returns its findings, which JSON can hold; raises CheckFailedError or CheckSkippedError."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a check has failed on one rank."""

    rank: int
    message: str
    case: str
    details: str
    """The traceback where something was raised that no check raises; else nothing."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out of a check."""

    name: str
    result: str
    """passed, failed or skipped."""
    seconds: float
    findings: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    """Why it was skipped."""
    failure: Failure | None = None
    reproduce: str | None = None
    """Command that runs the check that has failed alone."""

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON is given."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}


def run_checks(checks: Sequence[tuple[str, Check]], context: Context) -> list[Outcome]:
    """Return the outcomes, the same on every rank, up to the first failure."""
    outcomes: list[Outcome] = []
    for number, (name, check) in enumerate(checks, start=1):
        context.say(f"[{number}/{len(checks)}] {name} ...")
        outcome = _run(name, check, context)
        outcomes.append(outcome)
        context.found[name] = outcome.findings
        context.say(f"      {outcome.result} in {outcome.seconds:.1f} s" + _why(outcome))
        if outcome.failure is not None:
            break
    return outcomes


def _run(name: str, check: Check, context: Context) -> Outcome:
    start = time.perf_counter()
    findings: dict[str, Any] = {}
    failure: Failure | None = None
    reason: str | None = None
    rank = context.ranks.rank
    try:
        findings = check(context)
        context.synchronize()
    except CheckSkippedError as skipped:
        reason = str(skipped)
    except OtherRankFailedError:
        pass
    except CheckFailedError as failed:
        failure = Failure(rank=rank, message=str(failed), case=failed.case, details="")
    except Exception as error:  # whatever it is, the others must not wait for this rank
        message = f"{type(error).__name__}: {error}"
        failure = Failure(rank=rank, message=message, case=name, details=traceback.format_exc())
    if failure is not None:
        # At once: ranks that wait for this one in an exchange learn of it when that times out.
        sys.stderr.write(f"rank {rank}: {name} failed: {failure.message}\n{failure.details}\n")
        sys.stderr.flush()
    failures = gather_over_ranks(failure, what=f"end of the check of {name}")
    failure = next((found for found in failures if found is not None), None)
    result = "failed" if failure else "skipped" if reason else "passed"
    return Outcome(
        name=name,
        result=result,
        seconds=time.perf_counter() - start,
        findings=findings,
        reason=reason,
        failure=failure,
        reproduce=None if failure is None else command_to_repeat(name, context),
    )


def command_to_repeat(name: str, context: Context) -> str:
    """Return the command that runs one check again, with as many ranks."""
    config, ranks = context.config, context.ranks
    options = [f"--only {name}", f"--seed {config.seed}"]
    if config.device != "auto":
        options.append(f"--device {config.device}")
    for flag, value in (
        ("--ranks-per-node", config.parallel.ranks_per_node),
        ("--simulated-ranks", config.parallel.simulated_ranks),
    ):
        if value is not None:
            options.append(f"{flag} {value}")
    start = "python" if ranks.world_size == 1 else f"torchrun --nproc-per-node {ranks.local_world_size}"
    nodes = ranks.world_size // ranks.local_world_size
    start += f" --nnodes {nodes} --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    return f"{start} -m sdp4bit_lab selftest {' '.join(options)}"


def _why(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f" on rank {outcome.failure.rank}: {outcome.failure.message}"
    return f": {outcome.reason}" if outcome.reason else ""

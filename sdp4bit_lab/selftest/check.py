"""Run checks on all ranks, up to the first failure on any of them."""

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
    """A result is wrong; the message has the numbers."""

    def __init__(self, message: str, *, case: str) -> None:
        super().__init__(message)
        self.case = case
        """Input that shows the failure."""


class OtherRankFailedError(Exception):
    """Another rank has raised CheckFailedError."""


class CheckSkippedError(Exception):
    """The check does not apply to these ranks; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Settings and ranks of a self-test."""

    config: SelftestConfig
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.ranks.device

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    def say(self, line: str) -> None:
        """Print progress on rank 0."""
        if self.ranks.is_first:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def fail_together(self, failure: CheckFailedError | None) -> None:
        """Raise on all ranks if one has a failure, so that none waits for another. All ranks call this.

        Raises:
            CheckFailedError: the failure of this rank.
            OtherRankFailedError: the failure of another rank.
        """
        failed = gather_over_ranks(failure is not None, what="failures of a check")
        if failure is not None:
            raise failure
        if any(failed):
            raise OtherRankFailedError

    def require(self, is_right: bool, message: str, *, case: str) -> None:
        """Raise on all ranks, as `fail_together` does, unless the result is right on all."""
        self.fail_together(None if is_right else CheckFailedError(message, case=case))


Check = Callable[[Context], dict[str, Any]]
"""Returns findings for JSON; raises CheckFailedError or CheckSkippedError."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of a check on one rank."""

    rank: int
    message: str
    case: str
    details: str
    """Traceback of an unexpected error; empty for a CheckFailedError."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a check on all ranks."""

    name: str
    result: str
    """passed, failed or skipped."""
    seconds: float
    findings: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    """Reason for skipping."""
    failure: Failure | None = None
    reproduce: str | None = None
    """Command that runs the failed check alone."""

    def as_dict(self) -> dict[str, Any]:
        """Return the members for JSON, without empty ones."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}


def run_checks(checks: Sequence[tuple[str, Check]], context: Context) -> list[Outcome]:
    """Return the outcomes up to the first failure; the same on every rank, findings aside."""
    outcomes: list[Outcome] = []
    for number, (name, check) in enumerate(checks, start=1):
        context.say(f"[{number}/{len(checks)}] {name} ...")
        outcome = _run(name, check, context)
        outcomes.append(outcome)
        context.say(f"      {outcome.result} in {outcome.seconds:.1f} s")
        if outcome.failure is not None:
            break
    return outcomes


def _run(name: str, check: Check, context: Context) -> Outcome:
    start, rank = time.perf_counter(), context.ranks.rank
    findings: dict[str, Any] = {}
    failure: Failure | None = None
    reason: str | None = None
    try:
        findings = check(context)
        # Errors of CUDA kernels are raised here, not in the next check.
        context.synchronize()
    except CheckSkippedError as skipped:
        reason = str(skipped)
    except OtherRankFailedError:
        pass
    except CheckFailedError as failed:
        failure = Failure(rank=rank, message=str(failed), case=failed.case, details="")
    except Exception as error:  # the other ranks must not wait for this one, whatever the error is
        message = f"{type(error).__name__}: {error}"
        failure = Failure(rank=rank, message=message, case=name, details=traceback.format_exc())
    if failure is not None:
        # Printed before the gather, because ranks inside an exchange arrive there only after its timeout.
        sys.stderr.write(f"rank {rank}: {name} failed: {failure.message}\n{failure.details}\n")
        sys.stderr.flush()
    failures = gather_over_ranks(failure, what=f"end of the check of {name}")
    failure = next((each for each in failures if each is not None), None)
    return Outcome(
        name=name,
        result="failed" if failure else "skipped" if reason else "passed",
        seconds=time.perf_counter() - start,
        findings=findings,
        reason=reason,
        failure=failure,
        reproduce=None if failure is None else command_to_repeat(name, context),
    )


def command_to_repeat(name: str, context: Context) -> str:
    """Return the command that runs one check again with as many ranks."""
    config, ranks = context.config, context.ranks
    command = "python" if ranks.world_size == 1 else f"torchrun --nproc-per-node {ranks.local_world_size}"
    nodes = ranks.world_size // ranks.local_world_size
    command += f" --nnodes {nodes} --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    command += f" -m sdp4bit_lab selftest --only {name} --seed {config.seed}"
    command += f" --device {config.device}" if config.device != "auto" else ""
    per_node = config.parallel.ranks_per_node
    return command if per_node is None else f"{command} --ranks-per-node {per_node}"

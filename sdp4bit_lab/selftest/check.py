"""Run checks on all ranks and stop at the first failure on any of them."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from sdp4bit_lab.common.progress import phase
from sdp4bit_lab.common.ranks import Ranks, gather_over_ranks
from sdp4bit_lab.selftest.config import SelftestConfig


class CheckFailedError(Exception):
    """Report a wrong result, with numbers."""

    def __init__(self, message: str, *, case: str) -> None:
        super().__init__(message)
        self.case = case
        """Input that reproduces the failure."""


class OtherRankFailedError(Exception):
    """Report that another rank raised CheckFailedError."""


class CheckSkippedError(Exception):
    """Report why a check does not apply to these ranks."""


ONE_RANK = (
    "one rank sends nothing: start several with torchrun or --nproc-per-node, or on one GPU with "
    "--share-gpu 4"
)
"""Reason for skipping a check that needs several ranks."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Settings and ranks of a self-test."""

    config: SelftestConfig
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, line: str) -> None:
        """Print progress on rank 0."""
        if self.ranks.is_first:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def fail_together(self, failure: CheckFailedError | None) -> None:
        """Raise on all ranks if any rank has a failure; a collective.

        Raises:
            CheckFailedError: this rank's failure.
            OtherRankFailedError: another rank failed.
        """
        failed = gather_over_ranks(failure is not None, what="failures of a check")
        if failure is not None:
            raise failure
        if any(failed):
            raise OtherRankFailedError

    def require(self, is_right: bool, message: str, *, case: str) -> None:
        """Raise on all ranks, like `fail_together`, unless the result is right on all."""
        self.fail_together(None if is_right else CheckFailedError(message, case=case))


Check = Callable[[Context], dict[str, Any]]
"""Return findings for JSON; raise CheckFailedError or CheckSkippedError."""


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a check on all ranks; fields that do not apply are empty."""

    name: str
    result: str = "passed"
    """passed, failed or skipped."""
    seconds: float = 0.0
    findings: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Reason for skipping."""
    failure: dict[str, Any] = field(default_factory=dict)
    """First failed rank: rank, message, case; details: traceback of an unexpected error."""
    reproduce: str = ""
    """Command that repeats the failed check alone."""

    def as_dict(self) -> dict[str, Any]:
        """Return the nonempty fields for JSON."""
        return {name: value for name, value in asdict(self).items() if value not in ("", {})}


def run_checks(checks: Sequence[tuple[str, Check]], context: Context) -> list[Outcome]:
    """Return the outcomes up to the first failure; identical on all ranks except for findings."""
    outcomes: list[Outcome] = []
    for number, (name, check) in enumerate(checks, start=1):
        context.say(f"[{number}/{len(checks)}] {name} ...")
        phase(f"checking {name}")
        outcomes.append(_run(name, check, context))
        context.say(f"      {outcomes[-1].result} in {outcomes[-1].seconds:.1f} s")
        if outcomes[-1].failure:
            break
    return outcomes


def _run(name: str, check: Check, context: Context) -> Outcome:
    start, outcome = time.perf_counter(), Outcome(name=name)
    failure: dict[str, Any] = {}
    try:
        outcome.findings = check(context)
        # Surface errors of CUDA kernels in this check instead of the next one.
        context.synchronize()
    except CheckSkippedError as skipped:
        outcome.result, outcome.reason = "skipped", str(skipped)
    except OtherRankFailedError:
        pass
    except CheckFailedError as failed:
        failure = {"message": str(failed), "case": failed.case, "details": ""}
    except Exception as error:  # the other ranks must not wait for this one
        message = f"{type(error).__name__}: {error}"
        failure = {"message": message, "case": name, "details": traceback.format_exc()}
    if failure:
        failure = {"rank": context.ranks.rank, **failure}
        # Printed before the gather, where ranks stuck in a collective arrive only after its timeout.
        sys.stderr.write("rank {rank}: {name} failed: {message}\n{details}\n".format(name=name, **failure))
        sys.stderr.flush()
    failures = gather_over_ranks(failure, what=f"end of the check of {name}")
    if any(failures):
        outcome.result, outcome.failure = "failed", next(filter(None, failures))
        outcome.reproduce = command_to_repeat(name, context)
    outcome.seconds = time.perf_counter() - start
    return outcome


def command_to_repeat(name: str, context: Context) -> str:
    """Return the command that repeats one check on as many ranks."""
    config, ranks = context.config, context.ranks
    alone = ranks.world_size == 1 or config.share_gpu is not None
    command = "python" if alone else f"torchrun --nproc-per-node {ranks.local_world_size}"
    nodes = ranks.world_size // ranks.local_world_size
    command += f" --nnodes {nodes} --rdzv-endpoint HOST:PORT" if nodes > 1 else ""
    command += f" -m sdp4bit_lab selftest --only {name} --seed {config.seed}"
    command += f" --device {config.device}" if config.device != "auto" else ""
    command += f" --share-gpu {config.share_gpu}" if config.share_gpu is not None else ""
    command += f" --mps {config.mps}" if config.mps != "auto" else ""
    per_node = config.parallel.ranks_per_node
    return command if per_node is None else f"{command} --ranks-per-node {per_node}"

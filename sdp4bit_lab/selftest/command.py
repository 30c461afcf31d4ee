"""`sdp4bit selftest`: run the checks, print the results and write a file for bug reports."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.machine import pasted, software
from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0
from sdp4bit_lab.common.settings import EXIT_FAILED
from sdp4bit_lab.selftest.check import Check, Context, Outcome, run_checks
from sdp4bit_lab.selftest.collectives import check_collectives
from sdp4bit_lab.selftest.config import CheckName, SelftestConfig
from sdp4bit_lab.selftest.exchanges import check_exchanges
from sdp4bit_lab.selftest.facts import check_facts
from sdp4bit_lab.selftest.kernels import check_kernels
from sdp4bit_lab.selftest.recommendation import check_recommendation
from sdp4bit_lab.selftest.streams import check_streams
from sdp4bit_lab.selftest.training import check_removal, check_training

FORMAT = "sdp4bit-selftest-1"
_WIDTH = 79
_CHECKS: dict[CheckName, Check] = {
    "facts": check_facts,
    "kernels": check_kernels,
    "collectives": check_collectives,
    "exchanges": check_exchanges,
    "streams": check_streams,
    "training": check_training,
    "removal": check_removal,
    "recommendation": check_recommendation,
}


def selftest(config: SelftestConfig, *, ranks: Ranks) -> dict[str, Any]:
    """Run the checks, print and write the results on rank 0, and return them.

    Exits with 1 on all ranks if a check failed.

    Raises:
        RunError: on all ranks, if the file cannot be written.
    """
    context = Context(config=config, ranks=ranks)
    outcomes = run_checks([(name, _CHECKS[name]) for name in config.checks], context)
    failed = any(outcome.failure for outcome in outcomes)
    result = {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "passed": not failed,
        "result": _result(outcomes),
        "ranks": ranks.world_size,
        "software": software(ranks.device),
        "checks": [outcome.as_dict() for outcome in outcomes],
    }
    broadcast_from_rank0(lambda: _report(config, outcomes, result))
    if failed:
        sys.exit(EXIT_FAILED)
    return result


def _result(outcomes: Sequence[Outcome]) -> str:
    if outcomes[-1].failure:
        return f"{outcomes[-1].name} failed: do not train with this installation, and report it"
    skipped = [outcome.name for outcome in outcomes if outcome.result == "skipped"]
    text = "all checks passed" + (f" ({', '.join(skipped)} skipped)" if skipped else "")
    recommendation = outcomes[-1].findings.get("recommendation")
    return f"{text}; {recommendation}" if recommendation else text


def _report(config: SelftestConfig, outcomes: Sequence[Outcome], result: dict[str, Any]) -> None:
    if config.json is not None:
        write_atomically(config.json, json.dumps(result, indent=2) + "\n")
    rule = "-" * _WIDTH
    lines = [rule, _row("check", "result", "seconds", ""), rule]
    for outcome in outcomes:
        about = outcome.failure.get("message", outcome.reason)
        lines.append(_row(outcome.name, outcome.result, f"{outcome.seconds:.1f}", about))
    lines.append(rule)
    if failure := outcomes[-1].failure:
        lines.append(f"Rank {failure['rank']}, {failure['case']}")
        lines.append(f"Repeat with: {outcomes[-1].reproduce}")
    lines.append(textwrap.fill(f"Result: {result['result']}.", _WIDTH))
    if config.json is not None:
        lines.append(f"Attach {config.json} to bug reports.")
    lines.append(pasted(_summary(outcomes, result)))
    sys.stdout.write("\n".join(lines) + "\n")


def _summary(outcomes: Sequence[Outcome], result: dict[str, Any]) -> list[str]:
    """Return the lines to paste. A failure's message may name a machine, so its check alone is given."""
    facts = next((outcome.findings for outcome in outcomes if outcome.name == "facts"), {})
    ranks = facts.get("ranks", [])
    hosts = f" on {len({rank['host'] for rank in ranks})} machines, {facts['backend']}" if ranks else ""
    checks = ", ".join(f"{outcome.name} {outcome.result}" for outcome in outcomes)
    return [
        result["software"],
        f"{result['ranks']} ranks{hosts}: {checks}",
        *([] if outcomes[-1].failure else [result["result"]]),
    ]


def _row(name: str, result: str, seconds: str, about: str) -> str:
    first = f"{name:<15} {result:<8} {seconds:>8}  "
    return textwrap.fill(f"{first}{about}", _WIDTH, subsequent_indent=" " * len(first)).rstrip()

"""Plan every training job that was measured, and compare the plan with the measurement.

A result joins by itself: all files of `benchmarks.cluster` below results/. Each job is planned with the
constants of its own machine: the compute rate of a run without communication, the rate of its link, and the
host's time of the code that ran.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.markdown import NOTICE, RATES, span, table
from benchmarks.plan_constants import HOST_TIME, host_constants, kernel_rate_of_cpus
from sdp4bit_lab.common.strategies import STRATEGIES, Strategy
from sdp4bit_lab.plan.config import ClusterConfig, PlanConfig
from sdp4bit_lab.plan.costs import Cluster, StepCost
from sdp4bit_lab.plan.host import HostTime
from sdp4bit_lab.plan.layout import ParallelLayout, Range
from sdp4bit_lab.plan.model import PlanModelConfig
from sdp4bit_lab.plan.step import MIN_GAIN_TO_CONSIDER, MIN_GAIN_TO_ENABLE, StepPlan

TOLERANCE = 0.25
"""Largest distance of the planned seconds from the measured ones, relative to the latter."""
NEAR = 0.1
"""Error of the planned seconds that the page counts as small."""
SAME_BYTES = 0.05
"""Rows whose planned bytes differ by more were measured with another algorithm than the planned one."""
LINK = {"100mbit": 1e8, "250mbit": 2.5e8, "1gbit": 1e9, "10gbit": 1e10, "25gbit": 2.5e10, "40gbit": 4e10}
"""Bits per second by the names of `benchmarks.cluster`; "unshaped" takes the rate of the sockets."""
SOCKETS = {2: "results/gpu/h100/nccl-first/smoke-lo.log", 4: "results/gpu/h100/nccl-collectives.json"}
"""All-gathers of 8 MB per rank over NCCL's sockets, by the number of ranks on one GPU."""
GLOO_SOCKETS = 1e9
"""Assumed bytes per second between the namespaces of one host with two cores, where no rate is set."""
_DEFAULT = {"layers": 6, "hidden": 384, "heads": 6, "vocabulary": 8192, "sequence_length": 128}
_DEFAULT |= {"micro_batch": 1, "micro_batches": 1}
"""Workload of the files that do not state it."""
BASELINES = {"fsdp2": "fp32", "fair": "fp32", "fsdp2-bf16": "bf16", "fair-bf16": "bf16"}
BASELINES |= {"ddp-bf16": "replicas", "hsdp-bf16": "replicas"}
"""Kinds of plain communication by strategy. Over gloo, stock FSDP2 sends twice the bytes, and this library's
exchange without quantizers (`fair`) is planned instead. Over NCCL it is the other way round, because `fair`
has the host's time of this library."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training step that was measured: a strategy at one rate of the link."""

    source: str
    transport: str
    gpu: str | None
    nodes: int
    ranks_per_node: int
    parameters: int
    strategy: str
    rate: str
    fastest: float
    median: float
    rounds: int
    sent_bytes: float
    """By a node, counted at its interface."""
    plan: StepPlan
    cost: StepCost

    @property
    def planned(self) -> Range:
        """Seconds of the plan, shortest first."""
        return min(self.cost.step_seconds), max(self.cost.step_seconds)

    @property
    def error(self) -> float:
        """Planned seconds over measured ones less 1, for the nearest of both ranges; 0 if they overlap."""
        shortest, longest = self.planned
        if longest < self.fastest:
            return longest / self.fastest - 1
        return shortest / self.median - 1 if shortest > self.median else 0.0

    @property
    def sends_as_planned(self) -> bool:
        return abs(self.cost.inter_bytes_per_node / self.sent_bytes - 1) <= SAME_BYTES


def unlimited(root: Path, *, ranks: int) -> float:
    """Return bytes per second of each rank over NCCL's sockets on one GPU."""
    name = SOCKETS[ranks]
    text = (root / name).read_text(encoding="utf-8")
    if name.endswith(".log"):
        (line,) = re.findall(r'^\{"bytes": 8388608.*\}$', text, re.MULTILINE)
        seconds = json.loads(line)["ms"]["all_gather"] / 1e3
    else:
        (found,) = (each["findings"] for each in json.loads(text)["checks"] if each["name"] == "collectives")
        seconds = found["seconds"]["8388608"]["all-gather"]
    # Each rank sends the rows of all others on.
    return 8388608 * (ranks - 1) / float(seconds)


def files_of(root: Path) -> Iterator[Path]:
    """Yield the results of `benchmarks.cluster`: those that have rows of strategies at rates."""
    for path in sorted((root / "results").rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content.get("rows") if isinstance(content, dict) else None
        is_cluster = isinstance(rows, list) and rows and "transport" in content
        if is_cluster and {"strategy", "rate", "fastest"} <= set(rows[0]):
            yield path


def jobs(root: Path, *, host: HostTime | None = None) -> list[Job]:
    """Return all measured jobs with their plans, but for those on CPUs of an unknown compute rate.

    Args:
        host: constants to plan GPUs with, instead of the measured ones of the code that ran.
    """
    results = {path: json.loads(path.read_text(encoding="utf-8")) for path in files_of(root)}
    compute: dict[tuple[Any, ...], float] = {}
    for result in results.values():
        for row in result["rows"]:
            if row["strategy"] == "compute":
                known = compute.get(_machine_of(result), math.inf)
                compute[_machine_of(result)] = min(known, row["fastest"])
    found = []
    for path, result in results.items():
        seconds = compute.get(_machine_of(result))
        if seconds is not None or result["transport"] == "nccl":
            found += jobs_of(root, str(path.relative_to(root)), result, compute=seconds, host=host)
    return found


def _machine_of(result: dict[str, Any]) -> tuple[Any, ...]:
    """Return the facts that decide the time of the arithmetic; on CPUs the run, because machines differ."""
    machine = result["machine"]
    gpu, run = machine.get("gpu"), machine["date"]
    layout = result["nodes"], result["ranks_per_node"]
    return gpu, None if gpu else run, layout, tuple(_workload_of(result).values())


def _workload_of(result: dict[str, Any]) -> dict[str, int]:
    stated = result.get("workload", {})
    return {name: stated.get(name, default) for name, default in _DEFAULT.items()}


def jobs_of(
    root: Path, source: str, result: dict[str, Any], *, compute: float | None, host: HostTime | None
) -> Iterator[Job]:
    """Yield the jobs of one result.

    Args:
        compute: seconds of the arithmetic of a step.
        host: constants to plan a GPU with; None takes those of the code that ran.
    """
    on_gpu = result["transport"] == "nccl"
    work = _workload_of(result)
    ranks = result["nodes"] * result["ranks_per_node"]
    shape = ("layers", "hidden", "heads", "vocabulary", "sequence_length")
    base = PlanConfig(model=PlanModelConfig(**{name: work[name] for name in shape}))
    flops = base.shape.flops_per_sample(work["sequence_length"]) * work["micro_batch"] * work["micro_batches"]
    sockets = unlimited(root, ranks=ranks) if on_gpu else GLOO_SOCKETS
    cluster = Cluster(
        name=source,
        nodes=result["nodes"],
        devices_per_node=result["ranks_per_node"],
        inter_bandwidth=sockets,
        intra_bandwidth=sockets,
        # Not measured for the small model on a GPU, whose arithmetic the host hides.
        device_flops=math.inf if compute is None else flops / compute,
        quantization_bandwidth=None if on_gpu else kernel_rate_of_cpus(root),
        host=(host or _host_then(root)) if on_gpu else _host_of_cpus(root),
    )
    if on_gpu:
        cluster = replace(cluster, **_kernels_of_gpu())
    for row in result["rows"]:
        strategy = row["strategy"]
        kind = BASELINES.get(strategy)
        if kind is None and strategy.removeprefix("hsdp-") not in STRATEGIES:
            continue  # not a strategy of the planner
        if strategy in (("fair", "fair-bf16") if on_gpu else ("fsdp2", "fsdp2-bf16")):
            continue
        chosen = "sdp4bit" if kind else strategy.removeprefix("hsdp-")
        config = replace(
            base,
            strategy=cast(Strategy, chosen),
            layout=ParallelLayout(
                micro_batch_size=work["micro_batch"],
                accumulation=work["micro_batches"],
                reshard_after_forward=False,
                # A CPU that computes does not send at the same time.
                overlap=None if on_gpu else 0.0,
            ),
        )
        rate = LINK[row["rate"]] / 8 if row["rate"] in LINK else sockets * result["ranks_per_node"]
        plan = config.plan(replace(cluster, inter_bandwidth=rate))
        cost = _cost(plan, kind=kind, replicated=strategy.startswith("hsdp-"))
        if cost is None:
            continue
        yield Job(
            source=source,
            transport=result["transport"],
            gpu=result["machine"].get("gpu"),
            **{name: result[name] for name in ("nodes", "ranks_per_node", "parameters")},
            **{name: row[name] for name in ("strategy", "rate", "fastest", "rounds")},
            median=row["seconds_per_step"],
            sent_bytes=row["tx_bytes_per_node_per_step"],
            plan=plan,
            cost=cost,
        )


def _cost(plan: StepPlan, *, kind: str | None, replicated: bool) -> StepCost | None:
    if kind == "fp32":
        return plan.baseline
    if kind == "bf16":
        return plan.bf16_baseline
    if kind == "replicas":
        return plan.hybrid and plan.hybrid.plain
    return (plan.hybrid and plan.hybrid.quantized) if replicated else plan.quantized


def _host_then(root: Path) -> HostTime:
    """Return the host's time of the code that ran over NCCL."""
    found = host_constants(root)
    return HostTime(plain=found["plain_seconds"], added=found["added_seconds_then"], source=found["source"])


def _host_of_cpus(root: Path) -> HostTime:
    """Return the time that the library added on CPUs when the emulated cluster was measured."""
    first = json.loads((root / HOST_TIME).read_text(encoding="utf-8"))[0]
    return HostTime(plain=0.0, added=first["added"] / 1e6, source=HOST_TIME, computes=True)


def _kernels_of_gpu() -> dict[str, Any]:
    config = ClusterConfig(device="h100", nodes=1, devices_per_node=1, inter_bandwidth=1.0, device_tflops=1.0)
    found = config.resolve(model="")
    return {"quantization_bandwidth": found.quantization_bandwidth, "kernels": found.kernels}


# -- the recommendation ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The advice of a plan of sdp4bit for a job, and the gain that was measured."""

    job: Job
    reference: Job
    advice: str
    measured: float
    """Seconds of the reference over those of sdp4bit, both the fastest round."""

    @property
    def planned(self) -> Range:
        plain, ours = self.reference.cost.step_seconds, self.job.cost.step_seconds
        gains = [before / after for before, after in zip(plain, ours, strict=True)]
        return min(gains), max(gains)

    @property
    def is_right(self) -> bool:
        """Whether nobody who follows the advice loses: who enables gains, and who does not misses little."""
        if self.advice.startswith("enable"):
            return self.measured >= 1 + MIN_GAIN_TO_CONSIDER
        if self.advice.startswith("do not enable"):
            return self.measured <= 1 + MIN_GAIN_TO_ENABLE
        return True


def verdicts(found: list[Job]) -> list[Verdict]:
    """Return the advice for each job of sdp4bit, beside the best plain strategy with bf16 gradients."""
    result = []
    for job in found:
        if job.strategy != "sdp4bit":
            continue
        plain = [
            each
            for each in found
            if (each.source, each.rate) == (job.source, job.rate)
            and BASELINES.get(each.strategy) in ("bf16", "replicas")
            and each.sends_as_planned
        ]
        if plain:
            best = min(plain, key=lambda each: each.fastest)
            advice = job.plan.recommendation.partition(":")[0]
            measured = best.fastest / job.fastest
            result.append(Verdict(job=job, reference=best, advice=advice, measured=measured))
    return result


# -- the page --------------------------------------------------------------------------------------------


def jobs_page(root: Path) -> str:
    """Return the page of all planned and measured jobs: the advice, and the seconds over NCCL."""
    found = jobs(root)
    rows = [
        [
            _where(each.job),
            RATES[each.job.rate],
            f"`{each.reference.strategy}`",
            span(each.planned, digits=2),
            f"{each.measured:.2f}",
            f"{each.reference.median / each.job.median:.2f}",
            each.advice + ("" if each.is_right else ", **wrong**"),
        ]
        for each in verdicts(found)
    ]
    text = (
        f"{NOTICE}# Planned and measured steps\n\nEvery job that was measured, planned by the model of "
        "[`sdp4bit plan`](../planning.md) with the constants of its own machine.\n\n"
        "## Advice\n\nTimes faster than the best plain strategy with bf16 gradients, by the fastest rounds "
        "and by the medians.\n\n"
        + table(["job", "link", "over", "planned", "fastest", "medians", "advice of the plan"], rows)
    )
    on_cpus = [job for job in found if job.transport == "gloo" and job.sends_as_planned]
    near = sum(abs(job.error) <= NEAR for job in on_cpus)
    text += (
        f"\n## CPUs\n\nOf {len(on_cpus)} steps over gloo with the planned bytes, {near} have an error of at "
        f"most {100 * NEAR:.0f} %, and all of at most {100 * max(abs(job.error) for job in on_cpus):.0f} %. "
        "[Seconds per step](speed.md) has the measurements.\n"
    )
    for source in dict.fromkeys(job.source for job in found if job.transport == "nccl"):
        of = [job for job in found if job.source == source]
        text += f"\n## {_where(of[0])}\n\n`{source}`, {of[0].parameters / 1e6:.1f} million parameters.\n\n"
        text += table(
            [
                "strategy",
                "link",
                "planned, ms",
                "fastest",
                "median",
                "rounds",
                "error",
                "MB planned",
                "MB sent",
            ],
            [_row(job) for job in of],
        )
    return text


def _where(job: Job) -> str:
    device = (job.gpu or "CPUs").removeprefix("NVIDIA ").partition(" ")[0]
    return f"{device}, {job.nodes} x {job.ranks_per_node}, {job.transport}"


def _row(job: Job) -> list[str]:
    error = f"{100 * job.error:+.0f} %" if abs(job.error) >= 0.005 else "0"
    return [
        f"`{job.strategy}`",
        RATES[job.rate],
        span([1e3 * each for each in job.planned], digits=0),
        f"{1e3 * job.fastest:,.0f}",
        f"{1e3 * job.median:,.0f}",
        str(job.rounds),
        error if job.sends_as_planned else "other bytes",
        f"{job.cost.inter_bytes_per_node / 1e6:.1f}",
        f"{job.sent_bytes / 1e6:.1f}",
    ]

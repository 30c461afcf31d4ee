"""Calculate the planner's tables of the documentation: gains, links, decisions, memory and ratios."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from sdp4bit.config import SDP4BitConfig
from sdp4bit.traffic import Grid
from sdp4bit_lab.common.strategies import Strategy
from sdp4bit_lab.plan.config import ClusterConfig, PlanConfig
from sdp4bit_lab.plan.costs import StepCost
from sdp4bit_lab.plan.layout import BF16_BYTES, FP32_BYTES, ParallelLayout
from sdp4bit_lab.plan.memory import parts
from sdp4bit_lab.plan.model import PlanModelConfig, ShardedGroup
from sdp4bit_lab.plan.step import BASELINE, MIN_GAIN_TO_CONSIDER, StepPlan
from sdp4bit_lab.plan.traffic import group_traffic
from sdp4bit_lab.pretrain.model.cards import CardName

MODELS: dict[str, dict[str, Any]] = {
    "1.3B": {"model_card": "1.3B"},
    "6.7B": {"model_card": "6.7B"},
    "13B": {"model_card": "13B"},
    "70B": {"layers": 80, "hidden": 8192, "heads": 64},
    "405B": {"layers": 126, "hidden": 16384, "heads": 128},
}
GPUS, TFLOPS, SEQUENCES = 8, 400.0, 4
"""GPUs per node, TFLOP/s of each, and sequences of 2,048 tokens per GPU and step."""
MICRO_BATCHES = 4
"""Times as many sequences per GPU and step in other tables of gains, in one micro-batch or in so many: more
computation hides more communication, and HSDP gathers inside nodes."""
GAIN_MODELS, GAIN_NODES, GAIN_GBITS = ("1.3B", "6.7B", "70B"), (2, 4, 8), (1, 10, 25, 100, 400, 800)
BOX_MODELS: tuple[CardName, ...] = ("1.3B", "2.7B", "6.7B")
BOX_LINKS: dict[str, dict[str, Any]] = {
    **{f"PCIe {version}": {"link": f"pcie{version}"} for version in (3, 4, 5)},
    "NVLink": {"intra_bandwidth": 300.0},
}
"""Settings of the link between two L40S. These cards have no NVLink; its rate is that of an H100."""
BOX_TFLOPS = 150.0
REPORTED = {"parameters": 1.2e9, "one_gpu": 1.4, "fp32": 6.4, "reported_bf16": 3.6}
"""Seconds of a step with DDP on 1 and on 8 A40: https://github.com/GaTech-RL2/EgoVerse/pull/667."""
BREAK_EVEN: dict[str, dict[str, Any]] = {
    "161M, 4,096 tokens": {
        **{"nodes": 2, "devices_per_node": 1},
        "model": {"layers": 12, "hidden": 1024, "heads": 16, "vocabulary": 8192, "sequence_length": 1024},
        "layout": {"micro_batch_size": 4, "reshard_after_forward": False},
    },
    "620M, 4,096 tokens": {
        **{"nodes": 2, "devices_per_node": 1},
        "model": {"layers": 12, "hidden": 2048, "heads": 16, "vocabulary": 8192, "sequence_length": 1024},
        "layout": {"micro_batch_size": 4, "reshard_after_forward": False},
    },
    **{
        f"{model}, {2048 * sequences:,} tokens": {
            **{"nodes": 2, "devices_per_node": GPUS},
            "model": MODELS[model],
            "layout": {"micro_batch_size": sequences},
        }
        for model in ("1.3B", "6.7B")
        for sequences in (SEQUENCES, MICRO_BATCHES * SEQUENCES)
    },
}
"""Jobs whose break-even is calculated; tokens are per GPU and step. The first was measured."""
LINK_MODELS, LINK_NODES, LINK_SEQUENCES = ("1.3B", "6.7B", "13B", "70B"), 4, (1, 4, 16)
STANDARD_GBITS = (1, 2.5, 5, 10, 25, 40, 50, 100, 200, 400, 800, 1600, 3200)
EFFICIENCY = 0.8
DECISION_NODES, DECISION_GBITS = (2, 8, 64), (10, 25, 100, 400, 800, 3200)
MEMORY_NODES = (2, 4, 8, 16, 64)
RATIO_GRIDS = ((2, 1), (2, 2), (2, 8), (8, 8), (64, 8))


def plan_of(
    model: str,
    *,
    nodes: int,
    gbit: float,
    sequences: int = SEQUENCES,
    accumulation: int = 1,
    strategy: Strategy = "sdp4bit",
) -> StepPlan:
    """Return the plan of nodes of H100, whose links have this rate.

    Args:
        sequences: per GPU and micro-batch.
        accumulation: micro-batches per step.
    """
    config = PlanConfig(
        strategy=strategy,
        model=PlanModelConfig(**MODELS[model]),
        cluster=ClusterConfig(
            device="h100",
            nodes=nodes,
            devices_per_node=GPUS,
            device_tflops=TFLOPS,
            inter_bandwidth=gbit / 8,
        ),
        layout=ParallelLayout(micro_batch_size=sequences, accumulation=accumulation),
    )
    return config.plan(config.cluster.resolve(model=config.model_name))


def gains(*, sequences: int = SEQUENCES, accumulation: int = 1) -> list[dict[str, Any]]:
    """Return the gains over three baselines by model, nodes and link.

    Args:
        sequences: per GPU and micro-batch.
        accumulation: micro-batches per step.
    """
    rows = []
    for model in GAIN_MODELS:
        for nodes in GAIN_NODES:
            for gbit in GAIN_GBITS:
                plan = plan_of(model, nodes=nodes, gbit=gbit, sequences=sequences, accumulation=accumulation)
                rows.append(
                    {
                        **{"model": model, "nodes": nodes, "gbit": gbit},
                        "over_fp32": plan.speedups(plan.baseline),
                        "over_bf16": plan.speedups(plan.bf16_baseline),
                        # None if no replica of the model fits a node.
                        "over_hsdp": plan.hybrid and plan.speedups(plan.hybrid.plain),
                        "step_seconds": plan.quantized.step_seconds,
                        "fits": plan.fits,
                        "memory_bytes": plan.quantized.total_memory,
                    }
                )
    return rows


def boxes() -> list[dict[str, Any]]:
    """Return the steps of one node of 8 GPUs, by model and by the link between the GPUs."""
    rows = []
    for model in BOX_MODELS:
        for link, settings in BOX_LINKS.items():
            config = PlanConfig(
                model=PlanModelConfig(model_card=model),
                cluster=ClusterConfig(
                    device="l40s", nodes=1, devices_per_node=GPUS, device_tflops=BOX_TFLOPS, **settings
                ),
                layout=ParallelLayout(micro_batch_size=SEQUENCES),
            )
            cluster = config.cluster.resolve(model=model)
            plan = config.plan(cluster)
            rows.append(
                {
                    **{"model": model, "link": link, "bandwidth": cluster.intra_bandwidth},
                    "over_bf16": plan.speedups(plan.bf16_baseline),
                    "hybrid": plan.hybrid and plan.hybrid.name,
                    "over_hybrid": plan.hybrid and plan.speedups(plan.hybrid.plain),
                    "recommendation": re.split(r" \(|:", plan.recommendation)[0],
                }
            )
    return rows


def reported_box() -> dict[str, float]:
    """Return the seconds of a step that DDP of a published report would take with sdp4bit.

    The rate of the links is fitted to the reported step with fp32 gradients, without overlap. The other two
    steps follow from it.
    """
    values, peers = REPORTED["parameters"], (GPUS - 1) / GPUS
    bandwidth = 2 * FP32_BYTES * values * peers / (REPORTED["fp32"] - REPORTED["one_gpu"])
    config = PlanConfig(
        model=PlanModelConfig(layers=22, hidden=2048, heads=16),
        cluster=ClusterConfig(
            device="a40",
            nodes=1,
            devices_per_node=GPUS,
            device_tflops=1.0,
            intra_bandwidth=bandwidth / 1e9,
        ),
        layout=ParallelLayout(overlap=0),
    )
    plan = config.plan(config.cluster.resolve(model=config.model_name))
    assert plan.hybrid is not None and abs(plan.parameters / values - 1) < 0.02
    compute = plan.quantized.compute_seconds - REPORTED["one_gpu"]

    def seconds(cost: StepCost) -> float:
        return cost.step_seconds[0] - compute

    return {
        "gigabytes": bandwidth / 1e9,
        "bf16": seconds(plan.hybrid.plain),
        "sdp4bit": seconds(plan.hybrid.quantized),
    }


def break_even() -> list[dict[str, Any]]:
    """Return the link rates, in Gbit/s per GPU, above which the best plain strategy is within 5 % of sdp4bit.

    The first of two rates holds if all communication is hidden that fits, the second if none is.
    """
    rows = []
    for name, job in BREAK_EVEN.items():
        settings = dict(job)
        nodes, per_node = settings.pop("nodes"), settings.pop("devices_per_node")
        config = PlanConfig(
            model=PlanModelConfig(**settings.pop("model")),
            cluster=ClusterConfig(
                device="h100",
                nodes=nodes,
                devices_per_node=per_node,
                inter_bandwidth=1.0,
                device_tflops=TFLOPS,
            ),
            layout=ParallelLayout(**settings.pop("layout")),
        )
        cluster = config.cluster.resolve(model=config.model_name)
        rates: list[float] = []
        for end in (1, 0):
            low, high = 0.1, 1600.0  # Gbit/s per GPU
            while high / low > 1.01:
                middle = math.sqrt(low * high)
                plan = config.plan(replace(cluster, inter_bandwidth=middle * per_node * 1e9 / 8))
                baselines = [plan.bf16_baseline, *([plan.hybrid.plain] if plan.hybrid else [])]
                best = min(cost.step_seconds[end] for cost in baselines)
                gains = best / plan.quantized.step_seconds[end] >= 1 + MIN_GAIN_TO_CONSIDER
                low, high = (middle, high) if gains else (low, middle)
            rates.append(low)
        rows.append({"job": name, "nodes": nodes, "gpus": per_node, "gbit_per_gpu": rates})
    return rows


def links() -> list[dict[str, Any]]:
    """Return the slowest standard link that keeps the GPUs busy, by model, tokens and kind of communication.

    All communication that fits is hidden. None if no link is fast enough.
    """
    rows = []
    for model in LINK_MODELS:
        for sequences in LINK_SEQUENCES:
            needed: dict[str, float | None] = {}
            for gbit in STANDARD_GBITS:
                plan = plan_of(model, nodes=LINK_NODES, gbit=gbit, sequences=sequences)
                for name, cost in _costs(plan).items():
                    is_enough = cost.compute_seconds >= EFFICIENCY * cost.step_seconds[1]
                    if needed.get(name) is None:
                        needed[name] = gbit if is_enough else None
            rows.append({"model": model, "tokens": 2048 * sequences, "gbit": needed})
    return rows


def _costs(plan: StepPlan) -> dict[str, StepCost]:
    """Return the costs by name, those first whose use changes least."""
    costs = {"FSDP2, fp32": plan.baseline, "FSDP2, bf16": plan.bf16_baseline}
    if plan.hybrid is not None:
        costs["HSDP, bf16"] = plan.hybrid.plain
    costs["sdp4bit"] = plan.quantized
    if plan.hybrid is not None:
        costs["HSDP with sdp4bit"] = plan.hybrid.quantized
    return costs


def decisions() -> list[dict[str, Any]]:
    """Return the first kind of communication within 5 % of the fastest that fits, with no and all overlap."""
    rows = []
    for model in MODELS:
        for nodes in DECISION_NODES:
            chosen = []
            for gbit in DECISION_GBITS:
                plan = plan_of(model, nodes=nodes, gbit=gbit)
                costs = _costs(plan)
                del costs["FSDP2, fp32"]
                if not plan.fits:
                    alone = plan_of(model, nodes=nodes, gbit=gbit, strategy="tlq-hs")
                    costs["sdp4bit, gradients only"] = alone.quantized
                memory = plan.device_memory
                assert memory is not None
                fitting = {name: cost for name, cost in costs.items() if cost.total_memory <= memory}
                chosen.append([_simplest(fitting, end=end) for end in (0, 1)] if fitting else [])
            rows.append({"model": model, "nodes": nodes, "chosen": chosen})
    return rows


def _simplest(costs: dict[str, StepCost], *, end: int) -> str:
    best = min(cost.step_seconds[end] for cost in costs.values())
    return next(
        name for name, cost in costs.items() if cost.step_seconds[end] <= (1 + MIN_GAIN_TO_CONSIDER) * best
    )


def memory() -> list[dict[str, Any]]:
    """Return the memory of a GPU by use, for plain FSDP2, HSDP and sdp4bit."""
    rows = []
    for model in MODELS:
        for nodes in MEMORY_NODES:
            plan = plan_of(model, nodes=nodes, gbit=100)
            rows.append(
                {
                    **{"model": model, "nodes": nodes, "fits": plan.fits},
                    "fsdp2": parts(plan.bf16_baseline.memory),
                    "hsdp": plan.hybrid and parts(plan.hybrid.plain.memory),
                    "hsdp_nodes": plan.hybrid and plan.hybrid.shards.nodes,
                    "sdp4bit": parts(plan.quantized.memory),
                    "remedies": {remedy.advice: remedy.memory for remedy in plan.remedies},
                }
            )
    return rows


def ratios() -> dict[str, Any]:
    """Return plain FSDP2's bytes between nodes over those of sdp4bit, for a matrix."""

    def sent(grid: Grid, config: SDP4BitConfig, *, gathers: int, row_bytes: int) -> float:
        traffic = group_traffic(
            ShardedGroup(name="matrix", shapes=((2**14, 2**14),), freed_after_forward=gathers > 1),
            grid=grid,
            config=config,
            accumulation=max(1, gathers // 2),
            dense_bytes=row_bytes,
        )
        return sum(exchange.inter_bytes for exchange in traffic.exchanges)

    rows = []
    for row_bytes in (FP32_BYTES, BF16_BYTES):
        for gathers in (1, 2, 4):
            found = []
            for nodes, ranks_per_node in RATIO_GRIDS:
                grid = Grid(nodes=nodes, ranks_per_node=ranks_per_node)
                plain, ours = (
                    sent(grid, config, gathers=gathers, row_bytes=row_bytes)
                    for config in (BASELINE, SDP4BitConfig())
                )
                found.append(plain / ours)
            rows.append({"gathers": gathers, "gradient_bytes": row_bytes, "ratios": found})
    return {"grids": RATIO_GRIDS, "rows": rows}


def everything() -> dict[str, Any]:
    """Return all tables, with the assumptions of the gains."""
    assumptions = (
        f"Nodes of {GPUS} H100 that sustain {TFLOPS:g} TFLOP/s each, {2048 * SEQUENCES:,} tokens per GPU and "
        "step. One end of a range hides no communication behind computation, the other end all that fits."
    )
    return {
        "assumptions": assumptions,
        "rows": gains(),
        "large_batch": {
            "tokens": 2048 * SEQUENCES * MICRO_BATCHES,
            "rows": gains(sequences=SEQUENCES * MICRO_BATCHES),
        },
        "accumulated": {"micro_batches": MICRO_BATCHES, "rows": gains(accumulation=MICRO_BATCHES)},
        "break_even": break_even(),
        "boxes": {"tflops": BOX_TFLOPS, "rows": boxes()},
        "reported_box": REPORTED | reported_box(),
        "links": {"nodes": LINK_NODES, "efficiency": EFFICIENCY, "rows": links()},
        "decisions": {"gbit": DECISION_GBITS, "rows": decisions()},
        "memory": memory(),
        "ratios": ratios(),
    }

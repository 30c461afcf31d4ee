"""Print a plan as text or JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import aligned, wrapped
from sdp4bit_lab.plan.config import MEMORY_SHARE, PlanConfig
from sdp4bit_lab.plan.memory import identifier
from sdp4bit_lab.plan.step import Cluster, Plan, Range

NOTABLE_PADDING = 1.05
SLOW_LINK = 0.125e9
"""Bytes per second and node, 1 Gbit/s."""
_OVERLAPS = {
    "fsdp2": "in FSDP2's default schedule",
    "megatron": "with --overlap-grad-reduce and --overlap-param-gather",
}


def run_plan(config: PlanConfig) -> int:
    """Print the plan; return 0."""
    cluster = config.cluster.resolve(model=config.model_name)
    plan = config.plan(cluster)
    if config.json:
        sys.stdout.write(json.dumps(plan_json(config, cluster, plan), indent=2, allow_nan=False) + "\n")
    else:
        Console().print(plan_text(config, cluster, plan), highlight=False, markup=False, soft_wrap=True)
    return 0


def plan_json(config: PlanConfig, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON; units: bytes, seconds, bytes per second."""
    costs = {}
    for name in ("baseline", "bf16_baseline", "quantized"):
        cost = getattr(plan, name)
        costs[name] = {
            **asdict(cost),
            "hidden_seconds": cost.hidden_seconds[0],
            "memory": {identifier(use): size for use, size in cost.memory.items()},
            "step_seconds": cost.step_seconds[0],
            "hidden_seconds_at_most": cost.hidden_seconds[1],
            "step_seconds_at_least": cost.step_seconds[1],
        }
    over_fp32, over_bf16 = plan.speedups(plan.baseline), plan.speedups(plan.bf16_baseline)
    return {
        "model": config.model_name,
        "parameters": config.parameters,
        "parameters_per_rank_group": plan.parameters,
        # Unused bandwidths are infinite, which JSON lacks.
        "cluster": {name: None if value == math.inf else value for name, value in vars(cluster).items()},
        "layout": asdict(config.resolved_layout),
        "data_parallel": asdict(plan.grid),
        "replicas": asdict(plan.replicas),
        "overlap": config.layout.overlaps,
        "strategy": config.strategy_name,
        **costs,
        "speedup": over_fp32[0],
        "speedup_over_bf16": over_bf16[0],
        "speedup_hidden": over_fp32[1],
        "speedup_over_bf16_hidden": over_bf16[1],
        "frozen_bytes_per_node": plan.frozen_bytes_per_node,
        "padding": plan.padding,
        "most_padded_group": plan.most_padded,
        "recommendation": plan.recommendation,
    }


def plan_text(config: PlanConfig, cluster: Cluster, plan: Plan) -> str:
    """Return a plan as text of 80 columns."""
    layout = config.resolved_layout
    least, most = layout.overlaps
    shared = layout.tensor_parallel > 1 and cluster.inter_bandwidth_shared
    overlap = (
        "times: longest without overlap, as in the paper's runs, shortest with all communication that fits "
        f"behind computation {_OVERLAPS[layout.engine]}"
    )
    if least == most:
        overlap = f"times: {100 * least:.0f} % of the communication overlaps, as far as it fits"
    placement, reductions = f"{plan.grid.nodes} nodes x {plan.grid.ranks_per_node}", "reduce-scatter"
    if plan.replicas.size > 1:
        shards, replicas = (f"{each.nodes} x {each.ranks_per_node}" for each in (plan.grid, plan.replicas))
        placement = f"nodes x ranks: shards {shards}, replicas {replicas}"
        reductions = "reduce-scatter and all-reduce"
    lines = [
        f"{config.model_name}: {config.parameters / 1e9:.3f} billion parameters, "
        f"{plan.parameters / 1e9:.3f} in a data-parallel group",
        f"{cluster.name}: {cluster.nodes} nodes of {cluster.devices_per_node} devices, "
        f"{_rate(shared or cluster.inter_bandwidth)} inter-node (per node and direction), "
        f"{_rate(cluster.intra_bandwidth)} intra-node (per device), "
        f"{cluster.device_flops / 1e12:.4g} TFLOP/s per device",
        f"tensor {layout.tensor_parallel} x pipeline {layout.pipeline_parallel} x "
        f"data {plan.grid.size * plan.replicas.size} ({placement}), micro batch "
        f"{layout.micro_batch_size}, accumulation {layout.accumulation}, {layout.engine}",
        f"baselines: fp32 or bf16 {reductions} of gradients, bf16 all-gather of weights, as rings",
        overlap,
        "",
        *_table(plan, strategy=config.strategy_name),
        "",
        f"rows with padding: {plan.padding:.3f} x the parameters",
        *_notes(config, cluster, plan),
        "",
        f"recommendation: {plan.recommendation}",
    ]
    if cluster.inter_bandwidth < SLOW_LINK and plan.quantized.inter_bytes:
        lines.append(
            "below 1 Gbit/s, consider local steps (DiLoCo): they send fewer bytes still, but change training"
        )
    return wrapped(lines)


def _notes(config: PlanConfig, cluster: Cluster, plan: Plan) -> list[str]:
    notes = []
    if plan.frozen_bytes_per_node:
        seconds = plan.frozen_bytes_per_node / cluster.inter_bandwidth
        notes.append(
            f"LoRA of rank {config.lora_rank}: frozen weights are sent once, before the first step: "
            f"{format_bytes(plan.frozen_bytes_per_node)} per node, {seconds:.1f} s"
        )
    if plan.padding > NOTABLE_PADDING:
        notes.append(
            f"padding: FSDP2 splits dimension 0 into {plan.grid.size} equal parts and pads the last ones "
            f"({plan.most_padded}); --least-padding, tensor parallelism or a flat buffer reduces it"
        )
    if cluster.quantization_bandwidth is None:
        notes.append(
            "quantization time is unknown and omitted: measure it with `sdp4bit probe`, or give --device"
        )
    elif config.cluster.device is not None and config.cluster.quantization_bandwidth is None:
        notes.append(
            f"assumed, not measured: quantization at {format_bytes(cluster.quantization_bandwidth)}/s, "
            f"{100 * MEMORY_SHARE:.0f} % of the data-sheet memory bandwidth of {config.cluster.device}"
        )
    return notes


def _milliseconds(seconds: Range | float) -> str:
    """Format one number, or a range if its ends look different; no decimals from 1,000 on."""
    values = sorted(1000 * each for each in (seconds if isinstance(seconds, tuple) else (seconds,)))
    digits = 0 if values[-1] >= 1000 else 1
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in values))


def _table(plan: Plan, *, strategy: str) -> list[str]:
    costs = (plan.baseline, plan.bf16_baseline, plan.quantized)
    ranks_per_node = plan.grid.ranks_per_node * plan.replicas.ranks_per_node
    rows = [
        ("per step", "fp32 gradients", "bf16 gradients", strategy),
        ("inter-node, per node", *(format_bytes(cost.inter_bytes_per_node) for cost in costs)),
        (
            "  bytes per parameter",
            *(f"{cost.inter_bytes * ranks_per_node / plan.parameters:.3g}" for cost in costs),
        ),
        ("inter-node, per rank", *(format_bytes(cost.inter_bytes) for cost in costs)),
        ("intra-node, per rank", *(format_bytes(cost.intra_bytes) for cost in costs)),
        ("collectives", *(f"{cost.collectives}" for cost in costs)),
        ("computation, ms", *(_milliseconds(cost.compute_seconds) for cost in costs)),
        ("communication, ms", *(_milliseconds(cost.communication_seconds) for cost in costs)),
        ("  of which hidden", *(_milliseconds(cost.hidden_seconds) for cost in costs)),
        ("quantization, ms", *(_milliseconds(cost.quantization_seconds) for cost in costs)),
        ("step, ms", *(_milliseconds(cost.step_seconds) for cost in costs)),
        ("memory, no activations", *(format_bytes(sum(cost.memory.values())) for cost in costs)),
    ]
    for use in dict.fromkeys(use for cost in costs for use in cost.memory):
        sizes = (format_bytes(cost.memory[use]) if use in cost.memory else "-" for cost in costs)
        rows.append((f"  {use}", *sizes))
    return aligned(rows)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s" if math.isfinite(bytes_per_second) else "unused"

"""Print a plan as text or JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sdp4bit.addresses import page
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import aligned, note, wrapped
from sdp4bit_lab.common.progress import console
from sdp4bit_lab.plan.config import ClusterConfig, PlanConfig
from sdp4bit_lab.plan.costs import Cluster, StepCost
from sdp4bit_lab.plan.devices import MEMORY_SHARE
from sdp4bit_lab.plan.host import measured
from sdp4bit_lab.plan.layout import Range
from sdp4bit_lab.plan.memory import identifier, parts
from sdp4bit_lab.plan.step import StepPlan

NOTABLE_PADDING = 1.05
SLOW_LINK = 0.125e9
"""Bytes per second and node, 1 Gbit/s."""
_OVERLAPS = {
    "fsdp2": "behind computation, as FSDP2 does",
    "megatron": "with --overlap-grad-reduce and --overlap-param-gather",
}


def run_plan(config: PlanConfig) -> int:
    """Print the plan, and draw it if asked; return 0."""
    cluster = config.cluster.resolve(model=config.model_name)
    plan = config.plan(cluster)
    if config.json:
        sys.stdout.write(json.dumps(plan_json(config, cluster, plan), indent=2, allow_nan=False) + "\n")
    else:
        recommendation, facts = plan_text(config, cluster, plan)
        console().print(recommendation, style="bold")
        console().print(f"\n{facts}")
    if config.plot is not None:
        from sdp4bit_lab.plan.chart import draw_gains  # imports matplotlib, which takes a second

        draw_gains(config, cluster, config.plot)
        note(f"drew the gain over the link rate into {config.plot}")
    return 0


def plan_json(config: PlanConfig, cluster: Cluster, plan: StepPlan) -> dict[str, Any]:
    """Return a plan as JSON; units: bytes, seconds, bytes per second."""
    hybrid = plan.hybrid and {
        "shards": asdict(plan.hybrid.shards),
        "replicas": plan.hybrid.replicas,
        "plain": _cost_json(plan.hybrid.plain),
        "quantized": _cost_json(plan.hybrid.quantized),
        "speedup": plan.speedups(plan.hybrid.plain),
    }
    three_levels = plan.three_levels and {
        "nodes_per_block": plan.three_levels.nodes_per_block,
        "quantized": _cost_json(plan.three_levels.quantized),
    }
    over_fp32, over_bf16 = plan.speedups(plan.baseline), plan.speedups(plan.bf16_baseline)
    return {
        "model": config.model_name,
        "parameters": config.parameters,
        "parameters_per_rank_group": plan.parameters,
        # Unused bandwidths are infinite, which JSON lacks.
        "cluster": {name: None if value == math.inf else value for name, value in asdict(cluster).items()},
        "layout": asdict(config.resolved_layout),
        "data_parallel": asdict(plan.grid),
        "replicas": asdict(plan.replicas),
        "topology": 1 if plan.is_split else None,
        "overlap": config.layout.overlaps,
        "strategy": config.strategy_name,
        "baseline": _cost_json(plan.baseline),
        "bf16_baseline": _cost_json(plan.bf16_baseline),
        "quantized": _cost_json(plan.quantized),
        "hsdp": hybrid,
        "three_levels": three_levels,
        "speedup": over_fp32[0],
        "speedup_over_bf16": over_bf16[0],
        "speedup_hidden": over_fp32[1],
        "speedup_over_bf16_hidden": over_bf16[1],
        "frozen_bytes_per_node": plan.frozen_bytes_per_node,
        "padding": plan.padding,
        "most_padded_group": plan.most_padded,
        "remedies": [asdict(remedy) for remedy in plan.remedies],
        "recommendation": plan.recommendation,
    }


def _cost_json(cost: StepCost) -> dict[str, Any]:
    return {
        **asdict(cost),
        "communication_seconds": cost.communication_seconds,
        "hidden_seconds": cost.hidden_seconds[0],
        "kernel_seconds": {identifier(name): seconds for name, seconds in cost.kernel_seconds.items()},
        "quantization_seconds": cost.quantization_seconds,
        "memory": {identifier(use): size for use, size in cost.memory.items()},
        "step_seconds": cost.step_seconds[0],
        "hidden_seconds_at_most": cost.hidden_seconds[1],
        "step_seconds_at_least": cost.step_seconds[1],
    }


def plan_text(config: PlanConfig, cluster: Cluster, plan: StepPlan) -> tuple[str, str]:
    """Return the recommendation, and the facts that it follows from, as text of 80 columns."""
    layout = config.resolved_layout
    least, most = layout.overlaps
    shared = layout.tensor_parallel > 1 and cluster.inter_bandwidth_shared
    hidden = f"all communication that fits is hidden {_OVERLAPS[layout.engine]}"
    overlap = f"times: shortest if {hidden}, longest if none is"
    if least == most:
        overlap = f"times: {100 * least:.0f} % of the communication overlaps, as far as it fits"
    placement = f"{plan.grid.nodes} nodes x {plan.grid.ranks_per_node}"
    if plan.grid.blocks > 1:
        placement += f", {plan.grid.blocks} blocks"
    if plan.is_split:
        placement = "topology=1: each device as a node"
    if plan.replicas.size > 1:
        shards, replicas = (each.describe() for each in (plan.grid, plan.replicas))
        placement = f"nodes x ranks: shards {shards}, replicas {replicas}"
    links = []
    if cluster.nodes > 1:
        links.append(f"{_rate(shared or cluster.inter_bandwidth)} inter-node (per node and direction)")
    if cluster.devices_per_node > 1:
        links.append(f"{_rate(cluster.intra_bandwidth)} intra-node (per device)")
    example = (
        "no cluster is given (--device, --nodes, --probe or --cluster): this is the paper's, as an example"
    )
    recommendation = [f"recommendation: {plan.recommendation}", *_advice(plan)]
    lines = [
        *([example] if config.cluster == ClusterConfig() else []),
        f"{config.model_name}: {config.parameters / 1e9:.3f} billion parameters, "
        f"{plan.parameters / 1e9:.3f} in a data-parallel group",
        f"{cluster.name}: {_plural(cluster.nodes, 'node')} of {_plural(cluster.devices_per_node, 'device')}, "
        f"{', '.join([*links, f'{cluster.device_flops / 1e12:.4g} TFLOP/s per device'])}",
        f"tensor {layout.tensor_parallel} x pipeline {layout.pipeline_parallel} x "
        f"data {plan.grid.size * plan.replicas.size} ({placement}), micro batch "
        f"{layout.micro_batch_size}, accumulation {layout.accumulation}, {layout.engine}",
        overlap,
        "",
        *_table(plan, strategy=config.strategy_name),
        "",
        *_notes(config, cluster, plan),
    ]
    if plan.quantized.inter_bytes:
        if cluster.inter_bandwidth < SLOW_LINK:
            recommendation.append(
                "below 1 Gbit/s, consider local steps (DiLoCo): they send fewer bytes still, but change "
                "training"
            )
        lines.append(f"other methods, by seconds and loss: {page('which-method')}")
    return wrapped(recommendation), wrapped(lines)


def _advice(plan: StepPlan) -> list[str]:
    """Return the remedies if the host is the limit."""
    if not plan.quantized.is_limited_by_host:
        return []
    saved = 100 * (1 - measured()["host"]["merged_share"])
    return [
        f"the host is the limit: its launches take {_time(plan.quantized.host_seconds)}, longer than the "
        "link and the devices need. More tokens per step help, and fewer, larger groups: "
        f"fully_shard([block1, block2, block3]) saved {saved:.0f} % of the host's time in a measurement, and "
        f"needs three times the memory for gathered weights: {page('fsdp2#size-of-a-group')}"
    ]


def _notes(config: PlanConfig, cluster: Cluster, plan: StepPlan) -> list[str]:
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
    if plan.hybrid is not None:
        notes.append(
            f"{plan.hybrid.name}: {plan.hybrid.replicas} replicas of {plan.hybrid.shards.size} "
            f"rank{'s' * (plan.hybrid.shards.size > 1)}; "
            f"{config.strategy_name} with --replicas {plan.hybrid.replicas} takes "
            f"{_time(plan.hybrid.quantized.step_seconds)} per step"
        )
    if plan.three_levels is not None:
        chosen = plan.three_levels.nodes_per_block
        notes.append(
            f"three levels: --nodes-per-block {chosen} takes "
            f"{_time(plan.three_levels.quantized.step_seconds)} per step, and rounds gradients "
            f"once more. In training pass topology=({cluster.devices_per_node}, {chosen})"
        )
    if cluster.quantization_bandwidth is None:
        notes.append(
            "quantization time is unknown and omitted: measure it with `sdp4bit probe`, or give --device"
        )
    assumed = [f"{1e6 * cluster.latency.peer:.0f} us per peer of an all-to-all"]
    if config.cluster.device is not None and config.cluster.quantization_bandwidth is None:
        assumed.insert(
            0,
            f"quantization at {format_bytes(cluster.quantization_bandwidth or 0)}/s, "
            f"{100 * MEMORY_SHARE:.0f} % of the data-sheet memory bandwidth of {config.cluster.device}, or "
            "the rate of its arithmetic",
        )
    if plan.quantized.agreement_seconds:
        assumed.append(f"{1e6 * cluster.latency.gloo_hop:.0f} us per hop of the agreement")
    host = cluster.host
    notes.append(f"assumed, not measured: {'; '.join(assumed)}")
    if plan.quantized.host_seconds:
        notes.append(
            f"host: {1e3 * host.plain:.2g} ms per parameter group, {1e3 * host.added:.2g} ms more with both "
            f"directions quantized ({host.source})"
        )
    return notes + _memory_notes(plan)


def _memory_notes(plan: StepPlan) -> list[str]:
    if plan.device_memory is None or plan.fits:
        return []
    replica = parts(plan.quantized.memory)["replica"]
    lines = [
        f"memory: {format_bytes(plan.quantized.total_memory)} do not fit a device of "
        f"{format_bytes(plan.device_memory)}"
    ]
    if replica:
        lines[0] += (
            f"; the replica takes {format_bytes(replica)} with {plan.grid.ranks_per_node} ranks per node, "
            "at any number of nodes"
        )
    lines += [f"  fits: {remedy.advice}: {format_bytes(remedy.memory)}" for remedy in plan.remedies]
    if not plan.remedies:
        lines.append("  use more devices, tensor or pipeline parallelism")
    return lines


def _time(seconds: Range | float) -> str:
    text = _milliseconds(seconds)
    return text if text.endswith(" s") else f"{text} ms"


def _milliseconds(seconds: Range | float) -> str:
    """Format one number, or a range if its ends look different; in seconds from 100 seconds on."""
    values = sorted(1000 * each for each in (seconds if isinstance(seconds, tuple) else (seconds,)))
    if values[-1] >= 1e5:
        return "-".join(dict.fromkeys(f"{value / 1000:.0f}" for value in values)) + " s"
    digits = 0 if values[-1] >= 1000 else 1
    return "-".join(dict.fromkeys(f"{value:.{digits}f}" for value in values))


def _table(plan: StepPlan, *, strategy: str) -> list[str]:
    hybrid = [plan.hybrid.plain] if plan.hybrid is not None else []
    names = [f"{plan.hybrid.name}, bf16"] if plan.hybrid is not None else []
    costs = (plan.baseline, plan.bf16_baseline, *hybrid, plan.quantized)
    ranks_per_node = plan.grid.ranks_per_node * plan.replicas.ranks_per_node

    def row(name: str, value: Callable[[StepCost], str]) -> tuple[str, ...]:
        return name, *(value(cost) for cost in costs)

    blank = ("",) * (1 + len(costs))
    rows = [
        ("gradients:", "fp32", "bf16", *names, strategy),
        row("step, ms", lambda cost: _milliseconds(cost.step_seconds)),
        row("  computation", lambda cost: _milliseconds(cost.compute_seconds)),
        row("  communication", lambda cost: _milliseconds(cost.communication_seconds)),
        row("    of it ring steps", lambda cost: _milliseconds(cost.ring_seconds)),
        row("    of it messages to peers", lambda cost: _milliseconds(cost.all_to_all_seconds)),
        row("    of it hidden", lambda cost: _milliseconds(cost.hidden_seconds)),
        row("  quantization", lambda cost: _milliseconds(cost.quantization_seconds)),
        row("  agreement", lambda cost: _milliseconds(cost.agreement_seconds)),
        row("host launches, ms", lambda cost: _milliseconds(cost.host_seconds)),
        blank,
        row(
            "between devices, each" if plan.is_split else "inter-node, per node",
            lambda cost: format_bytes(cost.inter_bytes_per_node),
        ),
        row(
            "  bytes per parameter", lambda cost: f"{cost.inter_bytes * ranks_per_node / plan.parameters:.3g}"
        ),
        row("intra-node, per rank", lambda cost: format_bytes(cost.intra_bytes)),
        row("collectives", lambda cost: f"{cost.collectives}"),
        blank,
        row("memory, no activations", lambda cost: format_bytes(cost.total_memory)),
    ]
    if plan.is_split:
        rows = [each for each in rows if not each[0].startswith("intra-node")]
    sizes = [parts(cost.memory) for cost in costs]
    for part in sizes[0]:
        if any(size[part] for size in sizes):
            rows.append((f"  {part}", *(format_bytes(size[part]) if size[part] else "-" for size in sizes)))
    return aligned(rows)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s" if math.isfinite(bytes_per_second) else "unused"

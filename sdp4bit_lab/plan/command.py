"""The plan command: a plan, or the paper's tables, as text or JSON, and sweeps as a picture."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from sdp4bit.traffic import format_bytes
from sdp4bit_lab.common.files import save_figure, wrapped
from sdp4bit_lab.plan.config import PlanConfig, reproduction
from sdp4bit_lab.plan.memory import identifier
from sdp4bit_lab.plan.paper import (
    FIGURE_8,
    FIGURE_8_MODEL,
    FIGURE_8_NODES,
    TABLE_4_QUANTIZED_MS,
    Reproduction,
)
from sdp4bit_lab.plan.step import Cluster, Plan, StepCost, at_bandwidth, verdict

NOTABLE_PADDING = 1.05
_OVERLAPS = {
    "fsdp2": "from nothing hidden, as in the paper's runs, to all that fits behind computation, where FSDP2 "
    "puts it by default",
    "megatron": "from nothing hidden, as in the paper's runs, to all that fits behind computation, where "
    "--overlap-grad-reduce and --overlap-param-gather put it",
}
BANDWIDTHS = 49
RANGE = 16
"""The bandwidths drawn reach from a part of the cluster's to as many times it."""
ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64)


def run_plan(config: PlanConfig) -> int:
    """Return 0 after the plan has been printed, and the sweep drawn if one is asked for."""
    if config.reproduce_table_2:
        _print(reproduction_json(reproduction()) if config.json else reproduction_text(reproduction()))
        return 0
    cluster = config.resolved_cluster()
    plan, hidden = (config.plan_on(cluster, overlap=overlap) for overlap in config.layout.overlaps)
    if config.json:
        _print(plan_json(config, cluster, plan, hidden))
    else:
        _print(plan_text(config, cluster, plan, hidden))
    if config.sweep is not None:
        draw_sweeps(config, cluster=cluster, path=config.sweep)
        if not config.json:
            _print(f"Sweep: {config.sweep}")
    return 0


def _print(content: str | dict[str, Any]) -> None:
    if isinstance(content, dict):
        sys.stdout.write(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
    else:
        Console().print(content, highlight=False, markup=False, soft_wrap=True)


def _finite(value: Any) -> Any:
    """Return the value with None for infinities: bandwidths that nothing depends on."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plan_json(config: PlanConfig, cluster: Cluster, plan: Plan, hidden: Plan) -> dict[str, Any]:
    """Return a plan as JSON has it: bytes, seconds, bytes per second.

    Args:
        plan, hidden: with the least and with the most overlap.
    """
    costs = {
        name: {
            **asdict(cost),
            "memory": {identifier(use): size for use, size in cost.memory.items()},
            "step_seconds": cost.step_seconds,
            "hidden_seconds_at_most": most.hidden_seconds,
            "step_seconds_at_least": most.step_seconds,
        }
        for name, cost, most in (
            ("baseline", plan.baseline, hidden.baseline),
            ("bf16_baseline", plan.bf16_baseline, hidden.bf16_baseline),
            ("quantized", plan.quantized, hidden.quantized),
        )
    }
    return {
        "model": config.size().name,
        "parameters": config.size().parameters,
        "parameters_per_rank_group": plan.parameters,
        "cluster": asdict(cluster),
        "layout": asdict(config.parallel_layout()),
        "data_parallel": asdict(plan.grid),
        "replicas": asdict(plan.replicas),
        "engine": config.layout.engine,
        "overlap": config.layout.overlaps,
        "strategy": config.strategy_name,
        **costs,
        "speedup": plan.speedup,
        "speedup_over_bf16": plan.speedup_over_bf16,
        "speedup_hidden": hidden.speedup,
        "speedup_over_bf16_hidden": hidden.speedup_over_bf16,
        "padding": plan.padding,
        "most_padded_group": plan.most_padded,
        "verdict": verdict(plan, hidden),
    }


def plan_text(config: PlanConfig, cluster: Cluster, plan: Plan, hidden: Plan) -> str:
    """Return a plan for people; see plan_json."""
    layout = config.parallel_layout()
    least, most = config.layout.overlaps
    shared = layout.tensor_parallel > 1 and cluster.inter_bandwidth_shared
    between = (shared or cluster.inter_bandwidth) * cluster.efficiency
    quantized = plan.quantized
    per_parameter = quantized.inter_bytes_per_node / (plan.parameters * layout.tensor_parallel)
    notes = []
    if plan.padding > NOTABLE_PADDING:
        notes.append(
            f"padding: FSDP2 cuts dimension 0 into {plan.grid.size} equal parts and fills up what is missing "
            f"({plan.most_padded}); --least-padding, tensor parallelism or a flat buffer send less"
        )
    if cluster.quantization_bandwidth is None:
        notes.append(
            "quantization time is not known and left out: measure it with `sdp4bit probe`, or give --device"
            if cluster.device is None
            else "quantization time follows from instructions and bytes, perfectly issued: a lower bound"
        )
    overlap = "times of a step: " + _OVERLAPS[config.layout.engine]
    if least == most:
        overlap = f"times of a step: {100 * least:.0f} % of the communication overlaps, as far as it fits"
    reductions = "reduce-scatter" if plan.replicas.size == 1 else "reduce-scatter and all-reduce"
    lines = [
        f"{config.size().name}: {config.size().parameters / 1e9:.3f} billion parameters, "
        f"{plan.parameters / 1e9:.3f} in a data-parallel group",
        f"{cluster.name}: {cluster.nodes} nodes of {cluster.devices_per_node} devices, "
        f"{_rate(between)} inter-node (per node and direction), "
        f"{_rate(cluster.intra_bandwidth * cluster.efficiency)} intra-node (per device), "
        f"{cluster.device_flops / 1e12:.4g} TFLOP/s per device",
        f"tensor {layout.tensor_parallel} x pipeline {layout.pipeline_parallel} x "
        f"data {plan.grid.size * plan.replicas.size} ({_placement(plan)}), micro batch "
        f"{layout.micro_batch_size}, accumulation {layout.accumulation}, {config.layout.engine}",
        f"baselines: fp32 or bf16 {reductions} of gradients, bf16 all-gather of weights, as rings",
        overlap,
        "",
        *_table(plan, hidden, strategy=config.strategy_name),
        "",
        f"inter-node: {per_parameter:.3f} bytes per parameter, node and step; "
        f"rows are {plan.padding:.3f} x the parameters",
        *notes,
        "",
        f"verdict: {verdict(plan, hidden)}",
    ]
    return wrapped(lines)


def _placement(plan: Plan) -> str:
    if plan.replicas.size == 1:
        return f"{plan.grid.nodes} nodes x {plan.grid.ranks_per_node}"
    shards, replicas = (f"{each.nodes} x {each.ranks_per_node}" for each in (plan.grid, plan.replicas))
    return f"nodes x ranks: shards {shards}, replicas {replicas}"


def _range(first: float, last: float) -> str:
    """Return two numbers as text, or one where they look the same; from 1,000 on without decimals."""
    digits = 0 if max(first, last) >= 1000 else 1
    texts = [f"{value:.{digits}f}" for value in (first, last)]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _table(plan: Plan, hidden: Plan, *, strategy: str) -> list[str]:
    costs, most = _costs(plan), _costs(hidden)

    def milliseconds(name: str) -> list[str]:
        both = ((1000 * getattr(cost, name) for cost in pair) for pair in zip(costs, most, strict=True))
        return [_range(first, last) for first, last in both]

    def sent(name: str) -> list[str]:
        return [format_bytes(getattr(cost, name)) for cost in costs]

    rows = [
        ("per step", ["fp32 gradients", "bf16 gradients", strategy]),
        ("inter-node, per node", sent("inter_bytes_per_node")),
        ("inter-node, per rank", sent("inter_bytes")),
        ("intra-node, per node", sent("intra_bytes_per_node")),
        ("intra-node, per rank", sent("intra_bytes")),
        ("collectives", [f"{cost.collectives}" for cost in costs]),
        ("computation, ms", milliseconds("compute_seconds")),
        ("communication, ms", milliseconds("communication_seconds")),
        ("  of it hidden", milliseconds("hidden_seconds")),
        ("quantization, ms", milliseconds("quantization_seconds")),
        ("step, ms", milliseconds("step_seconds")),
        ("memory, no activations", [format_bytes(sum(c.memory.values())) for c in costs]),
    ]
    for use in dict.fromkeys(use for cost in costs for use in cost.memory):
        rows.append((f"  {use}", [format_bytes(c.memory[use]) if use in c.memory else "-" for c in costs]))
    return _aligned([(name, *cells) for name, cells in rows])


def _costs(plan: Plan) -> tuple[StepCost, StepCost, StepCost]:
    return plan.baseline, plan.bf16_baseline, plan.quantized


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s" if math.isfinite(bytes_per_second) else "no exchange"


def reproduction_json(found: Reproduction) -> dict[str, Any]:
    """Return the paper's tables beside the planner's as JSON has them."""
    return {
        "rows": [
            {
                "cluster": p.row.cluster,
                "model": p.row.model,
                "published": p.row.speedup,
                "predicted": p.predicted,
                "predicted_from_baseline_rate": p.predicted_from_baseline,
                "tensor_parallel": p.row.tensor_parallel,
                "pipeline_parallel": p.row.pipeline_parallel,
                "device_flops": p.device_flops,
                "inter_bandwidth": p.bandwidth,
                "baseline_bytes_per_node": p.baseline_bytes,
                "quantized_bytes_per_node": p.quantized_bytes,
            }
            for p in found.rows
        ],
        "table_4_ms": found.table_4_ms,
        "table_4_ms_at_fitted_bandwidth": found.table_4_fitted_ms,
        "table_4_published_ms": TABLE_4_QUANTIZED_MS,
        "figure_8": {
            "published": {strategy: list(bounds) for strategy, bounds in FIGURE_8.items()},
            "predicted": found.figure_8,
        },
    }


def reproduction_text(found: Reproduction) -> str:
    """Return the paper's tables beside the planner's, for people."""
    rows = [("cluster", "model", "TP/PP", "published", "predicted", "error", "from baseline")]
    fitted = [("cluster", "model", "GB/s per node", "TFLOP/s per device", "sent per node, GB")]
    for p in found.rows:
        names = (p.row.cluster, p.row.model)
        rows.append(
            (
                *names,
                f"{p.row.tensor_parallel}/{p.row.pipeline_parallel}",
                f"{p.row.speedup:.2f} x",
                f"{p.predicted:.2f} x",
                f"{100 * p.error:+.1f} %",
                f"{p.predicted_from_baseline:.2f} x",
            )
        )
        fitted.append(
            (
                *names,
                f"{p.bandwidth / 1e9:.1f}",
                f"{p.device_flops / 1e12:.0f}",
                f"{p.baseline_bytes / 1e9:.2f} -> {p.quantized_bytes / 1e9:.2f}",
            )
        )
    lines = [
        "Table 2, speed-up over fp32 gradients and bf16 weights; no overlap, accumulation 1, fp32 scales. "
        "Fitted to the published step times: a compute rate per row, and two bandwidths per cluster (without "
        "and with tensor parallelism). 'From baseline': with the rate from the baseline alone, not fitted to "
        "the quantized step.",
        "",
        *_aligned(rows),
        "",
        *_aligned(fitted),
        "",
        f"Table 4, held out: gradient exchange of 1.3B on 32 A100, published {TABLE_4_QUANTIZED_MS} ms; "
        f"predicted {found.table_4_ms:.1f} ms at the bandwidth of its own fp32 exchange, "
        f"{found.table_4_fitted_ms:.1f} ms at the one fitted to table 2",
        f"Figure 8, held out: speed-up of {FIGURE_8_MODEL} (the text gives ranges over both clusters)",
    ]
    clusters = list(found.figure_8)
    header = [f"{cluster}, {FIGURE_8_NODES[cluster]} nodes" for cluster in clusters]
    lines += _aligned(
        [
            ("  ", "published", *header),
            *(
                (
                    f"  {strategy}",
                    f"{low:.1f} - {high:.1f} x",
                    *(f"{found.figure_8[c][strategy]:.2f} x" for c in clusters),
                )
                for strategy, (low, high) in FIGURE_8.items()
            ),
        ]
    )
    return wrapped(lines)


def draw_sweeps(config: PlanConfig, *, cluster: Cluster, path: Path) -> None:
    """Draw the speed-up over both baselines into a PNG file, with the least and with the most overlap."""
    from matplotlib.figure import Figure  # takes a second

    tensor_parallel = config.layout.tensor_parallel
    here = cluster.inter_bandwidth_per_rank(tensor_parallel=tensor_parallel) * cluster.devices_per_node
    here /= cluster.efficiency
    bandwidths = np.geomspace(here / RANGE, here * RANGE, BANDWIDTHS)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    least, most = config.layout.overlaps
    curves = {"nothing hidden": (least, "-"), "all hidden that can be": (most, "--")}
    if least == most:
        curves = {f"overlap {100 * least:.0f} %": (least, "-")}
    for name, (overlap, style) in curves.items():
        over_bandwidth = [
            config.plan_on(at_bandwidth(cluster, inter_bandwidth=float(b)), overlap=overlap)
            for b in bandwidths
        ]
        _draw(left, bandwidths / 1e9, over_bandwidth, style=style, name=name)
        over_accumulation = [config.plan_on(cluster, accumulation=a, overlap=overlap) for a in ACCUMULATIONS]
        _draw(right, np.array(ACCUMULATIONS), over_accumulation, style=style, name=name)
    left.axvline(here / 1e9, color="0.6", linewidth=1)
    left.set_xlabel("inter-node GB/s, per node and direction")
    right.axvline(config.layout.accumulation, color="0.6", linewidth=1)
    right.set_xlabel("micro batches per step")
    left.set_xscale("log")
    right.set_xscale("log", base=2)
    right.set_xticks(ACCUMULATIONS, [str(a) for a in ACCUMULATIONS])
    left.set_ylabel("speed-up of a step")
    for axes in (left, right):
        axes.axhline(1.0, color="0.3", linewidth=1)
        axes.grid(alpha=0.3)
    right.legend(frameon=False, fontsize=9)
    nodes = f"{cluster.nodes} nodes of {cluster.devices_per_node} devices"
    figure.suptitle(f"{config.strategy_name}, {config.size().name} on {cluster.name}, {nodes} (a model)")
    save_figure(figure, path, dpi=100)


def _draw(axes: Any, positions: Any, plans: list[Plan], *, style: str, name: str) -> None:
    for colour, baseline, speedups in (
        ("tab:blue", "fp32 gradients", [plan.speedup for plan in plans]),
        ("tab:orange", "bf16 gradients", [plan.speedup_over_bf16 for plan in plans]),
    ):
        axes.plot(positions, speedups, color=colour, linestyle=style, label=f"over {baseline}, {name}")

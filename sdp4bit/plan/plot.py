"""Speed-up over bandwidth and over accumulation, in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sdp4bit.plan.config import PlanConfig
from sdp4bit.plan.step import Cluster, Plan, at_bandwidth

BANDWIDTHS = 49
SPAN = 16
"""The bandwidths drawn reach from a part of the cluster's to as many times it."""
ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64)


def draw_sweeps(config: PlanConfig, *, cluster: Cluster, path: Path) -> None:
    """The PNG file shows the speed-up over both baselines, as planned and with all hidden that can be."""
    tensor_parallel = config.layout.tensor_parallel
    here = cluster.inter_bandwidth_per_rank(tensor_parallel=tensor_parallel) * cluster.devices_per_node
    here /= cluster.efficiency
    bandwidths = np.geomspace(here / SPAN, here * SPAN, BANDWIDTHS)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    curves = {"as planned": (config.layout.overlap, "-"), "all hidden that can be": (1.0, "--")}
    for name, (overlap, style) in curves.items():
        if name != "as planned" and overlap == config.layout.overlap:
            continue
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
    path.parent.mkdir(parents=True, exist_ok=True)
    working = path.with_name(f".{path.name}")
    figure.savefig(working, format="png", dpi=100)
    working.replace(path)


def _draw(axes: Any, positions: Any, plans: list[Plan], *, style: str, name: str) -> None:
    for colour, baseline, speedups in (
        ("tab:blue", "fp32 gradients", [plan.speedup for plan in plans]),
        ("tab:orange", "bf16 gradients", [plan.speedup_over_bf16 for plan in plans]),
    ):
        axes.plot(positions, speedups, color=colour, linestyle=style, label=f"over {baseline}, {name}")

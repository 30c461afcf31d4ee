"""Draw the gain of a plan over the rate of the link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from sdp4bit_lab.common.files import save_figure
from sdp4bit_lab.plan.config import PlanConfig
from sdp4bit_lab.plan.costs import Cluster
from sdp4bit_lab.plan.step import StepPlan

_BYTES_PER_GIGABIT = 0.125e9
_GIGABITS = np.geomspace(1, 1600, 40)
"""Rates of the drawn links, from Ethernet to four times the fastest InfiniBand of today."""
_COLOURS = ("#0072B2", "#D55E00")


def gains(config: PlanConfig, cluster: Cluster, rates: np.ndarray) -> dict[str, np.ndarray]:
    """Return the speed-ups over each baseline with bf16 gradients, [rates, 2], by its name.

    The two columns are those of full overlap and of none.

    Args:
        rates: bytes per second of a node's link; of a GPU's, if each GPU is a node.
    """
    rows = [dict(_gains(config.plan(_with_link(cluster, rate)))) for rate in rates.tolist()]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _gains(plan: StepPlan) -> Iterator[tuple[str, tuple[float, float]]]:
    yield "FSDP2", plan.speedups(plan.bf16_baseline)
    if plan.hybrid is not None:
        yield plan.hybrid.name, plan.speedups(plan.hybrid.plain)


def _with_link(cluster: Cluster, rate: float) -> Cluster:
    if cluster.nodes == 1:
        return replace(cluster, intra_bandwidth=rate)
    return replace(cluster, inter_bandwidth=rate, inter_bandwidth_shared=None)


def draw_gains(config: PlanConfig, cluster: Cluster, path: Path) -> None:
    """Write the chart as a PNG: bands from full overlap of the communication to none."""
    found = gains(config, cluster, _GIGABITS * _BYTES_PER_GIGABIT)
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (name, values), colour in zip(found.items(), _COLOURS, strict=False):
        axes.fill_between(_GIGABITS, values.min(1), values.max(1), color=colour, alpha=0.25, linewidth=0)
        label = f"over {name}, bf16 gradients"
        axes.plot(_GIGABITS, values.mean(1), color=colour, linewidth=1.8, label=label)
    axes.axhline(1, color="0.3", linewidth=1)
    own = cluster.intra_bandwidth if cluster.nodes == 1 else cluster.inter_bandwidth
    gigabits = own / _BYTES_PER_GIGABIT
    axes.axvline(gigabits, color="0.3", linewidth=1, linestyle=":", label=f"here: {gigabits:.4g} Gbit/s")
    axes.set_xscale("log")
    ticks = (1, 10, 25, 100, 400, 1600)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"Gbit/s per {'GPU' if cluster.nodes == 1 else 'node'} and direction")
    axes.set_ylabel("times as fast per step")
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} of {cluster.devices_per_node} devices"
    axes.set_title(
        f"{config.model_name} with {config.strategy_name}: {nodes} (calculated)\n"
        "bands: from all communication hidden that fits, to none",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path, dpi=130)

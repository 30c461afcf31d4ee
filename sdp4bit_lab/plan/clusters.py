"""The paper's two clusters, with speeds that its Table 2 implies.

The 4 bandwidths between nodes and the 10 compute rates are fitted to the 20 step times of that table
(`experiments/planner_fit`), so a plan that agrees with the table is no evidence for the planner.
"""

from __future__ import annotations

from statistics import median
from typing import Literal

from sdp4bit_lab.plan.costs import Cluster

ClusterName = Literal["a100", "h800"]

_DEVICES_PER_NODE: dict[ClusterName, int] = {"a100": 4, "h800": 8}
_INTER_BANDWIDTH: dict[ClusterName, tuple[float, float]] = {
    "a100": (14.4570e9, 21.2072e9),
    "h800": (68.2198e9, 55.2859e9),
}
"""Fitted bytes per second of a node: one ring over all ranks, and concurrent rings of tensor-parallel groups,
which use a node's links differently."""
_DEVICE_TFLOPS: dict[ClusterName, dict[str, float]] = {
    "a100": {"1.3B": 79.9270, "2.7B": 82.3317, "6.7B": 76.1649, "13B": 79.2312, "18B": 99.1257},
    "h800": {"1.3B": 119.501, "2.7B": 132.925, "6.7B": 135.811, "13B": 123.723, "18B": 164.778},
}
"""Fitted rate of a device without communication, by model."""
_NVLINK: dict[ClusterName, float] = {"a100": 200e9, "h800": 130e9}
"""Assumed bytes per second and direction of a device inside its node: two thirds of the nominal rate."""
_MEMORY: dict[ClusterName, float] = {"a100": 40e9, "h800": 80e9}
_QUANTIZATION_BANDWIDTH = 688e9
"""Table 5, large messages on an A100; its unit is not printed and assumed to be GB/s."""


def paper_cluster(name: ClusterName, *, model: str) -> Cluster:
    """Return one of the paper's clusters, with the compute rate of the model, or the median rate."""
    alone, shared = _INTER_BANDWIDTH[name]
    rates = _DEVICE_TFLOPS[name]
    return Cluster(
        name=name,
        nodes=16,
        devices_per_node=_DEVICES_PER_NODE[name],
        inter_bandwidth=alone,
        inter_bandwidth_shared=shared,
        intra_bandwidth=_NVLINK[name],
        device_flops=1e12 * rates.get(model, median(rates.values())),
        quantization_bandwidth=_QUANTIZATION_BANDWIDTH,
        device_memory=_MEMORY[name],
    )

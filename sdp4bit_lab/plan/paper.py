"""Compare the planner with the paper's measurements: Table 2 fitted, Table 4 and Figure 8 predicted.

Source: SDP4Bit (arXiv 2410.15526), section 5 and Tables 2, 4 and 8. The speed runs use micro batch 1, no
accumulation, no overlap. The reference implementation sends fp32 scales and gathers weight differences by one
ring over all ranks, so these bytes are counted here. The intra-node hop hides behind the inter-node one
(Table 4: an 8-bit hop costs as much as a 4-bit hop) and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal, NamedTuple, get_args

from sdp4bit.config import SDP4BitConfig
from sdp4bit_lab.plan.model import PlanModelConfig, gpt_groups
from sdp4bit_lab.plan.step import Cluster, ParallelLayout
from sdp4bit_lab.plan.traffic import GATHERED_BYTES, REDUCED_BYTES, RankGrid, ring
from sdp4bit_lab.pretrain.model.cards import CardName

ClusterName = Literal["a100", "h800"]
CLUSTERS: tuple[ClusterName, ...] = get_args(ClusterName)
NODES = 16
DEVICES_PER_NODE: dict[ClusterName, int] = {"a100": 4, "h800": 8}
REFERENCE_SCALE_BYTES = 4
NVLINK: dict[ClusterName, float] = {"a100": 200e9, "h800": 130e9}
"""Assumed bytes per second and direction of a device inside its node: two thirds of the nominal rate."""
QUANTIZATION_BANDWIDTH = 688e9
"""Table 5, large messages, measured on an A100; its unit is not printed and assumed to be GB/s."""


class Published(NamedTuple):
    """A row of Table 2, with its parallelism from Table 8; rates in TFLOP/s per device."""

    cluster: ClusterName
    model: CardName
    tensor_parallel: int
    pipeline_parallel: int
    baseline: float
    quantized: float

    @property
    def speedup(self) -> float:
        """Published rate of the quantized step relative to the baseline's."""
        return self.quantized / self.baseline


TABLE_2 = (
    Published("a100", "1.3B", 1, 1, 24.1, 57.6),
    Published("a100", "2.7B", 1, 1, 24.0, 58.4),
    Published("a100", "6.7B", 4, 1, 10.8, 37.1),
    Published("a100", "13B", 4, 2, 9.7, 26.0),
    Published("a100", "18B", 4, 2, 10.2, 29.8),
    Published("h800", "1.3B", 1, 1, 69.1, 106.0),
    Published("h800", "2.7B", 1, 1, 71.9, 116.9),
    Published("h800", "6.7B", 4, 1, 26.2, 77.9),
    Published("h800", "13B", 8, 1, 13.9, 53.5),
    Published("h800", "18B", 8, 1, 14.5, 59.2),
)
TABLE_4_NODES = 8
TABLE_4_BASELINE_MS, TABLE_4_QUANTIZED_MS = 379.3, 45.9
"""Gradient communication of 1.3B on 32 A100: fp32, and TLq-HS."""
FIGURE_8_MODEL = "2.7B"
FIGURE_8_NODES: dict[ClusterName, int] = {"a100": 8, "h800": 16}
FIGURE_8 = {"qwd": (1.1, 1.2), "tlq-hs": (1.4, 1.8), "sdp4bit": (1.6, 2.4)}
"""Ranges in the text over both clusters; the plotted numbers are not printed."""
_STRATEGIES = {
    "baseline": SDP4BitConfig(weights=None, gradients=None),
    "qwd": SDP4BitConfig(gradients=None),
    "tlq-hs": SDP4BitConfig(weights=None),
    "sdp4bit": SDP4BitConfig(),
}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A model on a cluster of the paper, without its bandwidth."""

    grid: RankGrid
    groups_per_node: int
    row_numel: int
    flops: float
    """Per device and step."""

    def node_bytes(self, strategy: str) -> tuple[float, float]:
        """Return the bytes that a node sends to others for gradients and for weights."""
        config, row, grid = _STRATEGIES[strategy], self.row_numel, self.grid
        gradients = ring(REDUCED_BYTES * row, grid=grid).inter_bytes
        if config.gradients is not None:
            bits, group_size = config.gradients.inter_bits, config.gradients.inter_group_size
            gradients = _message_bytes(row, bits=bits, group_size=group_size) * (grid.nodes - 1)
        weight_row: float = GATHERED_BYTES * row
        if config.weights is not None:
            weight_row = _message_bytes(row, bits=config.weights.bits, group_size=config.weights.group_size)
        ranks = self.groups_per_node * grid.ranks_per_node
        return gradients * ranks, ring(weight_row, grid=grid).inter_bytes * ranks


def _message_bytes(numel: int, *, bits: int | None, group_size: int) -> float:
    assert bits is not None
    return numel * (bits / 8 + REFERENCE_SCALE_BYTES / group_size)


def _run(row: Published, *, nodes: int = NODES) -> _Run:
    model = PlanModelConfig(model_card=row.model)
    shape = model.padded_shape(tensor_parallel=row.tensor_parallel)
    devices, parts = DEVICES_PER_NODE[row.cluster], row.tensor_parallel * row.pipeline_parallel
    layout = ParallelLayout(tensor_parallel=row.tensor_parallel, pipeline_parallel=row.pipeline_parallel)
    # Ranks are laid out whatever the speeds are.
    speeds = dict.fromkeys(("inter_bandwidth", "intra_bandwidth", "device_flops"), math.inf)
    grid, _ = layout.grids(Cluster(name=row.cluster, nodes=nodes, devices_per_node=devices, **speeds))
    parameters = sum(group.numel for group in gpt_groups(shape))
    if row.pipeline_parallel > 1:
        # Stages are assumed to be equal; the last one has an output embedding of its own.
        parameters += shape.vocabulary * shape.hidden
    return _Run(
        grid=grid,
        groups_per_node=devices // grid.ranks_per_node,
        row_numel=-(-parameters // (parts * grid.size)),
        flops=shape.flops_per_sample(model.tokens) / parts,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row of Table 2 as the planner predicts it."""

    row: Published
    predicted: float
    """Speed-up."""
    predicted_from_baseline: float
    """Speed-up with the compute rate of the published baseline alone, not fitted to the quantized step."""
    bandwidth: float
    """Bytes per second of a node, fitted to all rows of this cluster with this kind of parallelism."""
    device_flops: float
    """Rate of a device with this model while it does not communicate."""
    baseline_bytes: float
    quantized_bytes: float
    """Sent by a node to others in a step."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The paper's speed section as the planner predicts it."""

    rows: tuple[Prediction, ...]
    table_4_ms: float
    """Quantized gradient exchange, at the bandwidth of the table's own baseline."""
    table_4_fitted_ms: float
    """The same at the bandwidth fitted to Table 2."""
    figure_8: dict[ClusterName, dict[str, float]]
    """Speed-up of 2.7B by strategy."""

    def cluster(self, name: ClusterName, *, model: str) -> Cluster:
        """Return one of the paper's clusters with the bandwidths that its Table 2 implies.

        Args:
            model: whose compute rate the devices get; the median of all rates if it is not in the table.
        """
        rows = [p for p in self.rows if p.row.cluster == name]
        rates = [p.device_flops for p in rows if p.row.model == model] or [p.device_flops for p in rows]
        alone, shared = (
            next(p.bandwidth for p in rows if (p.row.tensor_parallel > 1) == split) for split in (False, True)
        )
        return Cluster(
            name=name,
            nodes=NODES,
            devices_per_node=DEVICES_PER_NODE[name],
            inter_bandwidth=alone,
            inter_bandwidth_shared=shared,
            intra_bandwidth=NVLINK[name],
            device_flops=median(rates),
            quantization_bandwidth=QUANTIZATION_BANDWIDTH,
        )


@cache
def reproduction() -> Reproduction:
    """Fit Table 2 with at most two bandwidths per cluster, and predict Table 4 and Figure 8 from them.

    A ring of one data-parallel group uses a node's links otherwise than the rings of several groups at once
    (tensor parallelism), so each gets a bandwidth. Each model on each cluster has one compute rate. Both
    minimize the squared relative errors of the published step times: 20 times, 10 rates, 4 bandwidths.
    """
    predictions: list[Prediction] = []
    for cluster in CLUSTERS:
        for is_split in (False, True):
            rows = [r for r in TABLE_2 if r.cluster == cluster and (r.tensor_parallel > 1) == is_split]
            runs = [_run(row) for row in rows]
            bandwidth = _fit(rows, runs)
            predictions += [
                _predict(row, run, bandwidth=bandwidth) for row, run in zip(rows, runs, strict=True)
            ]
    table_4, table_4_fitted = _table_4(predictions)
    return Reproduction(
        rows=tuple(sorted(predictions, key=lambda p: TABLE_2.index(p.row))),
        table_4_ms=table_4,
        table_4_fitted_ms=table_4_fitted,
        figure_8={cluster: _figure_8(predictions, cluster) for cluster in CLUSTERS},
    )


def _times(row: Published, run: _Run) -> tuple[float, float]:
    """Return the published seconds of a step, baseline and quantized."""
    return run.flops / (row.baseline * 1e12), run.flops / (row.quantized * 1e12)


def _communication(run: _Run, bandwidth: float) -> tuple[float, float]:
    return sum(run.node_bytes("baseline")) / bandwidth, sum(run.node_bytes("sdp4bit")) / bandwidth


def _compute_seconds(row: Published, run: _Run, bandwidth: float) -> float:
    """Return the computation with which both published times have the least squared relative errors.

    The minimum has a closed form: both times are linear in it.
    """
    pairs = list(zip(_times(row, run), _communication(run, bandwidth), strict=True))
    seconds = sum((total - sent) / total**2 for total, sent in pairs) / sum(total**-2 for total, _ in pairs)
    return max(seconds, 0.0)


def _predict(row: Published, run: _Run, *, bandwidth: float) -> Prediction:
    sent, sent_quantized = _communication(run, bandwidth)
    compute_seconds = _compute_seconds(row, run, bandwidth)
    published = _times(row, run)[0]
    return Prediction(
        row=row,
        predicted=(compute_seconds + sent) / (compute_seconds + sent_quantized),
        predicted_from_baseline=published / (published - sent + sent_quantized),
        bandwidth=bandwidth,
        # With one micro batch, a stage of a pipeline waits for the others as often as it computes.
        device_flops=run.flops * row.pipeline_parallel / compute_seconds,
        baseline_bytes=sent * bandwidth,
        quantized_bytes=sent_quantized * bandwidth,
    )


def _fit(rows: Sequence[Published], runs: Sequence[_Run]) -> float:
    """Return the bandwidth whose step times have the least squared relative errors."""
    from scipy.optimize import minimize_scalar  # help and plans of measured clusters do without

    def error(log_bandwidth: float) -> float:
        bandwidth, total = math.exp(log_bandwidth), 0.0
        for row, run in zip(rows, runs, strict=True):
            compute_seconds = _compute_seconds(row, run, bandwidth)
            for published, sent in zip(_times(row, run), _communication(run, bandwidth), strict=True):
                total += ((compute_seconds + sent) / published - 1) ** 2
        return total

    # At the least of these bandwidths, communication alone takes as long as a published step.
    exhausted = [
        sum(run.node_bytes("baseline")) / _times(row, run)[0] for row, run in zip(rows, runs, strict=True)
    ]
    low, high = math.log(min(exhausted)), math.log(100 * max(exhausted))
    fit = minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return math.exp(fit.x)


def _table_4(predictions: Sequence[Prediction]) -> tuple[float, float]:
    prediction = next(p for p in predictions if (p.row.cluster, p.row.model) == ("a100", "1.3B"))
    run = _run(prediction.row, nodes=TABLE_4_NODES)
    baseline, quantized = run.node_bytes("baseline")[0], run.node_bytes("tlq-hs")[0]
    return TABLE_4_BASELINE_MS * quantized / baseline, 1000 * quantized / prediction.bandwidth


def _figure_8(predictions: Sequence[Prediction], cluster: ClusterName) -> dict[str, float]:
    prediction = next(p for p in predictions if (p.row.cluster, p.row.model) == (cluster, FIGURE_8_MODEL))
    run = _run(prediction.row, nodes=FIGURE_8_NODES[cluster])
    compute_seconds = run.flops / prediction.device_flops

    def seconds(strategy: str) -> float:
        return compute_seconds + sum(run.node_bytes(strategy)) / prediction.bandwidth

    return {strategy: seconds("baseline") / seconds(strategy) for strategy in FIGURE_8}

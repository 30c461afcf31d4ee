"""The planner against the paper's measurements: table 2 fitted, table 4 and figure 8 predicted.

Source: SDP4Bit (arXiv 2410.15526), section 5 and tables 2, 4 and 8. The speed runs use micro batch 1, no
accumulation, no overlap. The reference implementation sends fp32 scales and gathers weight differences by one
ring over all ranks, so this is what is counted here. The intra-node hop hides behind the inter-node
one (table 4: an 8-bit hop costs what a 4-bit hop costs) and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from sdp4bit.config import SDP4BitConfig
from sdp4bit.quantization.layout import JointLayout, message_layout
from sdp4bit_lab.plan.model import GPTSize
from sdp4bit_lab.plan.step import Cluster, ParallelLayout
from sdp4bit_lab.plan.traffic import (
    GATHERED_BYTES,
    RankGrid,
    gradient_exchange,
    message_bytes,
    ring,
)

ClusterName = Literal["a100", "h800"]
CLUSTERS: tuple[ClusterName, ...] = get_args(ClusterName)
NODES = 16
DEVICES_PER_NODE: dict[ClusterName, int] = {"a100": 4, "h800": 8}
REFERENCE_SCALE_BYTES = 4
NVLINK: dict[ClusterName, float] = {"a100": 200e9, "h800": 130e9}
"""Assumed bytes per second and direction of a device inside its node: two thirds of the nominal rate."""
QUANTIZATION_BANDWIDTH = 688e9
"""Table 5, large messages, measured on an A100; its unit is not printed and taken to be GB/s."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of table 2, with its parallelism from table 8; rates in TFLOP/s per device."""

    cluster: ClusterName
    model: str
    tensor_parallel: int
    pipeline_parallel: int
    baseline: float
    quantized: float

    @property
    def speedup(self) -> float:
        """How much faster the quantized step was."""
        return self.quantized / self.baseline


def _row(cluster: ClusterName, model: str, cut: tuple[int, int], rates: tuple[float, float]) -> Published:
    return Published(
        cluster=cluster,
        model=model,
        tensor_parallel=cut[0],
        pipeline_parallel=cut[1],
        baseline=rates[0],
        quantized=rates[1],
    )


TABLE_2 = (
    _row("a100", "1.3B", (1, 1), (24.1, 57.6)),
    _row("a100", "2.7B", (1, 1), (24.0, 58.4)),
    _row("a100", "6.7B", (4, 1), (10.8, 37.1)),
    _row("a100", "13B", (4, 2), (9.7, 26.0)),
    _row("a100", "18B", (4, 2), (10.2, 29.8)),
    _row("h800", "1.3B", (1, 1), (69.1, 106.0)),
    _row("h800", "2.7B", (1, 1), (71.9, 116.9)),
    _row("h800", "6.7B", (4, 1), (26.2, 77.9)),
    _row("h800", "13B", (8, 1), (13.9, 53.5)),
    _row("h800", "18B", (8, 1), (14.5, 59.2)),
)
TABLE_4_NODES = 8
TABLE_4_BASELINE_MS, TABLE_4_QUANTIZED_MS = 379.3, 45.9
"""Gradient communication of 1.3B on 32 A100: fp32, and TLq-HS."""
FIGURE_8_MODEL = "2.7B"
FIGURE_8_NODES: dict[ClusterName, int] = {"a100": 8, "h800": 16}
FIGURE_8 = {"qwd": (1.1, 1.2), "tlq-hs": (1.4, 1.8), "sdp4bit": (1.6, 2.4)}
"""Ranges in the text over both clusters; the plotted numbers are not printed."""

SizeOf = Callable[[str, int], GPTSize]
"""The sizes of a model of the paper under so many tensor-parallel ranks, which pad its vocabulary."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A model on a cluster of the paper: what does not depend on the bandwidth."""

    grid: RankGrid
    groups_per_node: int
    row_numel: int
    flops: float
    """Per device and step."""

    def node_bytes(self, strategy: str) -> tuple[float, float]:
        """Return what a node sends to others for gradients and for weights."""
        config, row, grid = SDP4BitConfig.preset(strategy), self.row_numel, self.grid
        gradients = gradient_exchange(
            row, grid=grid, config=config.gradients, scale_bytes=REFERENCE_SCALE_BYTES
        )
        row_bytes = GATHERED_BYTES * row
        if config.weights is not None and config.weights.bits is not None:
            layout = message_layout(numel=row, bits=config.weights.bits, group_size=config.weights.group_size)
            row_bytes = message_bytes(JointLayout((layout,)), scale_bytes=REFERENCE_SCALE_BYTES)
        ranks = self.groups_per_node * grid.ranks_per_node
        return gradients.inter_bytes * ranks, ring(row_bytes, grid=grid).inter_bytes * ranks


def _run(size_of: SizeOf, row: Published, *, nodes: int = NODES) -> _Run:
    size = size_of(row.model, row.tensor_parallel)
    devices, parts = DEVICES_PER_NODE[row.cluster], row.tensor_parallel * row.pipeline_parallel
    cluster = paper_nodes(row.cluster, nodes=nodes)
    layout = ParallelLayout(tensor_parallel=row.tensor_parallel, pipeline_parallel=row.pipeline_parallel)
    grid, _ = layout.grids(cluster)
    # Stages are taken to be equal; the last one has an output embedding of its own.
    parameters = size.parameters + (size.vocabulary * size.hidden if row.pipeline_parallel > 1 else 0)
    return _Run(
        grid=grid,
        groups_per_node=devices // grid.ranks_per_node,
        row_numel=-(-parameters // (parts * grid.size)),
        flops=size.flops_per_sequence / parts,
    )


def paper_nodes(name: ClusterName, *, nodes: int) -> Cluster:
    """Return a cluster of this shape with placeholders for its speeds, to lay ranks out on."""
    return Cluster(
        name=name,
        nodes=nodes,
        devices_per_node=DEVICES_PER_NODE[name],
        inter_bandwidth=math.inf,
        intra_bandwidth=math.inf,
        device_flops=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row of table 2 as the planner has it."""

    row: Published
    predicted: float
    """Speed-up."""
    predicted_from_baseline: float
    """Speed-up if the compute rate is what the published baseline alone leaves after its communication."""
    bandwidth: float
    """Bytes per second of a node, fitted to all rows of this cluster with this kind of parallelism."""
    device_flops: float
    """What a device of this model computes per second when it does not communicate."""
    baseline_bytes: float
    quantized_bytes: float
    """What a node sends to others in a step."""

    @property
    def error(self) -> float:
        """Relative error of the speed-up."""
        return self.predicted / self.row.speedup - 1


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Everything of the paper's speed section that the planner can be held against."""

    rows: tuple[Prediction, ...]
    table_4_ms: float
    """Quantized gradient exchange, at the bandwidth that the table's own baseline shows."""
    table_4_fitted_ms: float
    """The same at the bandwidth fitted to table 2."""
    figure_8: dict[ClusterName, dict[str, float]]
    """Speed-up of 2.7B by strategy."""

    def bandwidth(self, cluster: ClusterName, *, tensor_parallel: bool) -> float:
        """Return the fitted bandwidth of a node."""
        return next(
            p.bandwidth
            for p in self.rows
            if p.row.cluster == cluster and (p.row.tensor_parallel > 1) == tensor_parallel
        )

    def device_flops(self, cluster: ClusterName, *, model: str | None = None) -> float:
        """Return the compute rate of a model, or the median of the cluster's for models the paper has not."""
        rates = {p.row.model: p.device_flops for p in self.rows if p.row.cluster == cluster}
        return rates[model] if model in rates else median(rates.values())

    def cluster(self, name: ClusterName, *, model: str | None = None) -> Cluster:
        """Return one of the paper's clusters with the bandwidths that its table implies."""
        return Cluster(
            name=name,
            nodes=NODES,
            devices_per_node=DEVICES_PER_NODE[name],
            inter_bandwidth=self.bandwidth(name, tensor_parallel=False),
            inter_bandwidth_shared=self.bandwidth(name, tensor_parallel=True),
            intra_bandwidth=NVLINK[name],
            device_flops=self.device_flops(name, model=model),
            quantization_bandwidth=QUANTIZATION_BANDWIDTH,
        )


def reproduce(size_of: SizeOf) -> Reproduction:
    """Return table 2 with at most two fitted bandwidths per cluster, and what follows from them elsewhere.

    A ring of one data-parallel group uses a node's links otherwise than the rings of several groups at once
    (tensor parallelism), so each gets a bandwidth. Each model on each cluster has one compute rate. Both are
    chosen to make the squared relative errors of the published step times least: 20 times, 10 rates, 4
    bandwidths.
    """
    predictions: list[Prediction] = []
    for cluster in CLUSTERS:
        for is_split in (False, True):
            rows = [r for r in TABLE_2 if r.cluster == cluster and (r.tensor_parallel > 1) == is_split]
            runs = [_run(size_of, row) for row in rows]
            bandwidth = _fit(rows, runs)
            predictions += [
                _predict(row, run, bandwidth=bandwidth) for row, run in zip(rows, runs, strict=True)
            ]
    table_4, table_4_fitted = _table_4(size_of, predictions)
    return Reproduction(
        rows=tuple(sorted(predictions, key=lambda p: TABLE_2.index(p.row))),
        table_4_ms=table_4,
        table_4_fitted_ms=table_4_fitted,
        figure_8={cluster: _figure_8(size_of, predictions, cluster) for cluster in CLUSTERS},
    )


def _times(row: Published, run: _Run) -> tuple[float, float]:
    """Return the published seconds of a step, baseline and quantized."""
    return run.flops / (row.baseline * 1e12), run.flops / (row.quantized * 1e12)


def _communication(run: _Run, bandwidth: float) -> tuple[float, float]:
    return sum(run.node_bytes("baseline")) / bandwidth, sum(run.node_bytes("sdp4bit")) / bandwidth


def _compute_seconds(row: Published, run: _Run, bandwidth: float) -> float:
    """Return the computation that, beside this communication, explains both published times best.

    The least squared relative errors have a closed form: both times are linear in it.
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
    found = minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return math.exp(found.x)


def _table_4(size_of: SizeOf, predictions: Sequence[Prediction]) -> tuple[float, float]:
    prediction = next(p for p in predictions if (p.row.cluster, p.row.model) == ("a100", "1.3B"))
    run = _run(size_of, prediction.row, nodes=TABLE_4_NODES)
    baseline, quantized = run.node_bytes("baseline")[0], run.node_bytes("tlq-hs")[0]
    return TABLE_4_BASELINE_MS * quantized / baseline, 1000 * quantized / prediction.bandwidth


def _figure_8(size_of: SizeOf, predictions: Sequence[Prediction], cluster: ClusterName) -> dict[str, float]:
    prediction = next(p for p in predictions if (p.row.cluster, p.row.model) == (cluster, FIGURE_8_MODEL))
    run = _run(size_of, prediction.row, nodes=FIGURE_8_NODES[cluster])
    compute_seconds = run.flops / prediction.device_flops

    def seconds(strategy: str) -> float:
        return compute_seconds + sum(run.node_bytes(strategy)) / prediction.bandwidth

    return {strategy: seconds("baseline") / seconds(strategy) for strategy in FIGURE_8}

"""Settings of the commands plan and probe, and what the planner needs of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from sdp4bit.config import SDP4BitConfig
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.marks import Switch
from sdp4bit_lab.common.settings import SettingError, option, require, require_at_least, require_positive
from sdp4bit_lab.plan.kernels import DEVICES, NVLINK_SHARE, DeviceName
from sdp4bit_lab.plan.model import GPTSize, ShardedGroup, flat_buffer, gpt_groups
from sdp4bit_lab.plan.paper import ClusterName, Reproduction, reproduce
from sdp4bit_lab.plan.step import Cluster, ParallelLayout, Plan, plan_step
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig, Strategy
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS, VOCABULARY_MULTIPLE, CardName, ModelShape

Engine = Literal["fsdp2", "megatron"]
DEFAULT_CLUSTER: ClusterName = "a100"
PROBE_FORMAT = "sdp4bit-probe-1"
_OWN = {"nodes", "devices_per_node", "inter_bandwidth", "intra_bandwidth", "device_flops"}
"""What makes a cluster another one than the paper's."""


@dataclass(frozen=True, kw_only=True)
class PlanModelConfig:
    """The GPT to plan for: a model card, with single sizes replaced."""

    model_card: Annotated[CardName, option("preset", "model-card")] = "1.3B"
    """Model card."""
    layers: Annotated[int | None, option("num-layers", "layers")] = None
    """Transformer blocks; the card's when not given."""
    hidden: Annotated[int | None, option("hidden-size", "hidden")] = None
    """Width of the residual stream; the card's when not given."""
    vocabulary: Annotated[int | None, option("vocab-size")] = None
    """Tokens of the tokenizer; the card's when not given."""
    sequence_length: Annotated[int | None, option("seq-length", "sequence-length")] = None
    """Tokens per sequence; the card's when not given."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "layers", "hidden", "vocabulary", "sequence_length")

    def size(self, *, tensor_parallel: int = 1) -> GPTSize:
        """Return the sizes; the vocabulary is padded to 128 rows on each tensor-parallel rank."""
        card = MODEL_CARDS[self.model_card]
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        length = self.sequence_length or card.sequence_length
        shape = ModelShape(
            layers=self.layers or card.layers,
            hidden=self.hidden or card.hidden,
            heads=card.heads,
            vocabulary=-(-(self.vocabulary or card.vocabulary) // multiple) * multiple,
            positions=length,
        )
        is_card = (self.layers, self.hidden) == (None, None)
        name = self.model_card if is_card else f"{shape.layers} x {shape.hidden}"
        return GPTSize.of(shape, name=name, sequence_length=length)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines: one of the paper's clusters or a measured one, with single values replaced."""

    cluster: ClusterName | None = None
    """16 nodes of the paper with the bandwidths that its table implies: a100 (4 devices each) or h800 (8).
    a100 when neither this nor --probe is given."""
    probe: Path | None = None
    """What `sdp4bit probe` has measured; instead of --cluster."""
    device: DeviceName | None = None
    """GPUs by their data sheet: kernels by instructions and bytes, NVLink at two thirds of its rate. Instead
    of --cluster; with --cluster or --probe, for the kernels only."""
    nodes: int | None = None
    """Nodes."""
    devices_per_node: int | None = None
    """Devices of each node."""
    inter_bandwidth: float | None = None
    """GB/s (1e9 bytes) of one node to the others, per direction: 100 Gbit/s are 12.5."""
    intra_bandwidth: float | None = None
    """GB/s of one device to the others of its node, per direction."""
    efficiency: float = 1.0
    """Share of the bandwidths that collectives reach; 1 for measured ones."""
    latency_us: float | None = None
    """Microseconds that a collective takes beside its bytes."""
    device_tflops: float | None = None
    """TFLOP/s that a device sustains on the model without communication."""
    quantization_bandwidth: float | None = None
    """GB/s that the quantization kernels were measured to read and write; goes before --device."""
    communicator_megabytes: float | None = None
    """MB of device memory that an NCCL communicator takes; 600 when not given, of which 544 and 688 were
    reported on A100 (NCCL#964)."""

    def __post_init__(self) -> None:
        require(
            self.cluster is None or self.probe is None,
            f"--cluster {self.cluster} and --probe {self.probe} both name a cluster: give one of the two",
        )
        require(0 < self.efficiency <= 1, f"--efficiency {self.efficiency} must be above 0 and at most 1")
        require_at_least(1, self, "nodes", "devices_per_node")
        require_at_least(0, self, "latency_us", "communicator_megabytes")
        require_positive(
            self, "inter_bandwidth", "intra_bandwidth", "device_tflops", "quantization_bandwidth"
        )

    def resolve(self, *, model: str) -> Cluster:
        """Return the cluster; SettingError if something is missing.

        Args:
            model: name of the model, whose compute rate the paper's clusters know.
        """
        base = self._base(model)
        values: dict[str, Any] = {"efficiency": self.efficiency}
        scales = {
            "nodes": ("nodes", None),
            "devices_per_node": ("devices_per_node", None),
            "inter_bandwidth": ("inter_bandwidth", 1e9),
            "intra_bandwidth": ("intra_bandwidth", 1e9),
            "latency_us": ("latency", 1e-6),
            "device_tflops": ("device_flops", 1e12),
            "quantization_bandwidth": ("quantization_bandwidth", 1e9),
            "communicator_megabytes": ("communicator_bytes", 1e6),
        }
        for ours, (theirs, scale) in scales.items():
            value = getattr(self, ours)
            if value is not None:
                values[theirs] = value if scale is None else value * scale
        if self.inter_bandwidth is not None:
            values["inter_bandwidth_shared"] = None
        if self.device is not None:
            # What was measured on other devices does not count any more.
            base = {**base, "device": DEVICES[self.device], "quantization_bandwidth": None}
        known = {**base, **values}
        for name, what, flag, needed in (
            ("inter_bandwidth", "how fast nodes are connected", "--inter-bandwidth", known["nodes"] > 1),
            (
                "intra_bandwidth",
                "how fast a node is inside",
                "--intra-bandwidth",
                known["devices_per_node"] > 1,
            ),
            ("device_flops", "how fast its devices compute", "--device-tflops", True),
        ):
            if known.get(name) is None:
                source = self.probe or f"--device {self.device}"
                require(not needed, f"{source} does not say {what}: give {flag}")
                known[name] = math.inf
        if values.keys() & _OWN and self.probe is None and (self.device is None or self.cluster is not None):
            known["name"] = f"your cluster, the paper's {known['name']} where nothing else is given"
        try:
            return Cluster(**known)
        except ValueError as error:
            source = f"--probe {self.probe}: " if self.probe else ""
            raise SettingError(f"{source}{error}") from error

    def _base(self, model: str) -> dict[str, Any]:
        """Return what is known before single values are replaced."""
        if self.probe is not None:
            return self._measured()
        if self.device is None or self.cluster is not None:
            return self._of_the_paper(model)
        require(
            self.nodes is not None and self.devices_per_node is not None,
            f"--device {self.device} names GPUs, not a cluster: give --nodes and --devices-per-node",
        )
        intra = NVLINK_SHARE * DEVICES[self.device].nvlink_bandwidth
        return {"name": self.device, "intra_bandwidth": intra, "inter_bandwidth": None}

    def _of_the_paper(self, model: str) -> dict[str, Any]:
        cluster = reproduction().cluster(self.cluster or DEFAULT_CLUSTER, model=model)
        return {name: getattr(cluster, name) for name in cluster.__dataclass_fields__}

    def _measured(self) -> dict[str, Any]:
        try:
            measured = json.loads(Path(self.probe or "").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingError(f"--probe {self.probe} cannot be read: {error}") from error
        if not isinstance(measured, dict) or measured.get("format") != PROBE_FORMAT:
            raise SettingError(
                f"--probe {self.probe} was not written by `sdp4bit probe` of this version: "
                f"it lacks format {PROBE_FORMAT}"
            )
        names = (
            "name",
            "nodes",
            "devices_per_node",
            "inter_bandwidth",
            "intra_bandwidth",
            "latency",
            "quantization_bandwidth",
        )
        missing = [name for name in names if name not in measured]
        require(not missing, f"--probe {self.probe} lacks {', '.join(missing)}")
        return {name: measured[name] for name in names}


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How a step is laid out over the devices."""

    tensor_parallel: Annotated[int, option("tensor-model-parallel-size", "tp")] = 1
    """Tensor-parallel ranks, intra-node."""
    pipeline_parallel: Annotated[int, option("pipeline-model-parallel-size", "pp")] = 1
    """Pipeline stages, over nodes."""
    replicas: int = 1
    """FSDP2 (HSDP): how many replicas of the sharded model; with as many as nodes, each node holds one."""
    micro_batch_size: int | None = None
    """Sequences per rank in one forward; the card's when not given."""
    accumulation: int = 1
    """Micro batches per step."""
    overlap: float | None = None
    """Share of the communication that runs beside computation, as far as it fits there. Not given: both ends,
    none and all."""
    engine: Engine = "fsdp2"
    """Which engine trains, fsdp2: a group per block, megatron: one flat buffer, gathered once a step and
    kept."""
    reshard_after_forward: bool = True
    """FSDP2 frees a block's weights after forward and gathers them again in backward; off: once a micro
    batch."""
    least_padding: Annotated[bool, Switch] = False
    """FSDP2 shards each parameter along the dimension that pads least (shard_placement_fn)."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "tensor_parallel", "pipeline_parallel", "replicas")
        require_at_least(1, self, "micro_batch_size", "accumulation")
        require(
            self.overlap is None or 0 <= self.overlap <= 1,
            f"--overlap {self.overlap} must be between 0 and 1",
        )
        for given, flag in (
            (not self.reshard_after_forward, "--no-reshard-after-forward"),
            (self.least_padding, "--least-padding"),
            (self.replicas > 1, "--replicas"),
        ):
            require(
                not given or self.engine == "fsdp2",
                f"{flag} has no effect with --engine {self.engine}: it is FSDP2's",
            )

    @property
    def overlaps(self) -> tuple[float, float]:
        """The least and the most that is hidden."""
        return (0.0, 1.0) if self.overlap is None else (self.overlap, self.overlap)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan, and how to show it."""

    strategy: Strategy | None = None
    """What is quantized, by the names of the paper's ablation; sdp4bit when neither this nor
    --quantized-weights nor --quantized-gradients is given."""
    json: Annotated[bool, Switch] = False
    """Print JSON instead of text."""
    sweep: Path | None = None
    """PNG file to draw the speed-up into, over bandwidth and over accumulation."""
    reproduce_table_2: Annotated[bool, Switch] = False
    """Print the paper's table 2 as the planner has it, and the checks against table 4 and figure 8."""
    model: PlanModelConfig = field(default_factory=PlanModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)

    def __post_init__(self) -> None:
        if self.reproduce_table_2:
            parts = (PlanModelConfig(), ClusterConfig(), LayoutConfig(), CommunicationConfig())
            given = (self.model, self.cluster, self.layout, self.communication, self.strategy, self.sweep)
            require(
                given == (*parts, None, None),
                "--reproduce-table-2 is about the paper's models and clusters: the only other option that it "
                "takes is --json",
            )
        _ = self.quantization

    @property
    def quantization(self) -> SDP4BitConfig:
        """The library's settings."""
        return self.communication.resolve(self.strategy, seed=0)

    @property
    def strategy_name(self) -> str:
        """The strategy, for people."""
        return self.communication.strategy_name(self.strategy)

    def derived(self) -> dict[str, object]:
        """Return what options that are not given come to, by field."""
        size, cluster = self.size(), self.resolved_cluster()
        return {
            "strategy": self.strategy_name,
            "layers": size.layers,
            "hidden": size.hidden,
            "vocabulary": size.vocabulary,
            "sequence_length": size.positions,
            "cluster": cluster.name,
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "inter_bandwidth": f"{cluster.inter_bandwidth / 1e9:.3g}",
            "intra_bandwidth": f"{cluster.intra_bandwidth / 1e9:.3g}",
            "latency_us": f"{1e6 * cluster.latency:g}",
            "device_tflops": f"{cluster.device_flops / 1e12:.3g}",
            "communicator_megabytes": f"{cluster.communicator_bytes / 1e6:g}",
            "micro_batch_size": self.parallel_layout().micro_batch_size,
            **self.communication.derived(self.quantization),
        }

    def resolved_cluster(self) -> Cluster:
        """Return the cluster; SettingError if something is missing."""
        return self.cluster.resolve(model=self.size().name)

    def size(self) -> GPTSize:
        """Return the sizes of the model under this layout."""
        return self.model.size(tensor_parallel=self.layout.tensor_parallel)

    def parallel_layout(self) -> ParallelLayout:
        """Return the layout, everything resolved."""
        layout = self.layout
        return ParallelLayout(
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
            micro_batch_size=layout.micro_batch_size or MODEL_CARDS[self.model.model_card].micro_batch_size,
            accumulation=layout.accumulation,
            replicas=layout.replicas,
        )

    def plan_on(self, cluster: Cluster, *, overlap: float, accumulation: int | None = None) -> Plan:
        """Return the plan on a cluster with so much overlap, maybe with another accumulation."""
        layout = self.parallel_layout()
        if accumulation is not None:
            layout = replace(layout, accumulation=accumulation)
        try:
            return plan_step(
                self.groups(),
                flops_per_sequence=self.size().flops_per_sequence,
                cluster=cluster,
                layout=layout,
                config=self.quantization,
                overlap=overlap,
                least_padding=self.layout.least_padding,
            )
        except ValueError as error:
            raise SettingError(str(error)) from error

    def groups(self) -> tuple[ShardedGroup, ...]:
        """Return the parameters of one model-parallel rank."""
        try:
            groups = gpt_groups(
                self.size(),
                tensor_parallel=self.layout.tensor_parallel,
                pipeline_parallel=self.layout.pipeline_parallel,
                freed_after_forward=self.layout.reshard_after_forward,
            )
        except ValueError as error:
            raise SettingError(str(error)) from error
        return flat_buffer(groups) if self.layout.engine == "megatron" else groups


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What the probe sends and computes, and where it writes what it finds."""

    out: Path = Path("runs/probe.json")
    """JSON file for `sdp4bit plan --probe`."""
    megabytes: float = 16.0
    """MB (1e6 bytes) that each rank sends in one exchange, over all peers of the level together."""
    rounds: int = 5
    """Timed exchanges of each level, after two that warm up; the median counts, the spread is shown."""
    quantized_values: int = 4 * 1024**2
    """Values of the tensor that the quantization kernels are timed on."""
    parallel: RanksConfig = field(default_factory=RanksConfig)

    def __post_init__(self) -> None:
        require_positive(self, "megabytes")
        require_at_least(1, self, "rounds")
        require_at_least(4096, self, "quantized_values")


@cache
def reproduction() -> Reproduction:
    """Return the paper's tables as the planner has them."""

    def size_of(model: str, tensor_parallel: int) -> GPTSize:
        card = next(name for name in MODEL_CARDS if name == model)
        return PlanModelConfig(model_card=card).size(tensor_parallel=tensor_parallel)

    return reproduce(size_of)

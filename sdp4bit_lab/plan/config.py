"""Settings of plan and probe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sdp4bit.config import SDP4BitConfig
from sdp4bit_lab.common.files import read_json_object
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.settings import SettingError, require, require_at_least, require_positive
from sdp4bit_lab.common.strategies import Strategy
from sdp4bit_lab.plan.clusters import ClusterName, paper_cluster
from sdp4bit_lab.plan.costs import Cluster
from sdp4bit_lab.plan.devices import (
    DEVICES,
    LINK_SHARE,
    MEMORY_SHARE,
    PCIE_BANDWIDTH,
    DeviceName,
    LinkName,
)
from sdp4bit_lab.plan.host import HostName, HostTime, host_time
from sdp4bit_lab.plan.latency import Latency
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.llama import LONGEST_DEFAULT, LlamaShape
from sdp4bit_lab.plan.model import PlanModelConfig, ShardedGroup, flat_buffer, gpt_groups, with_adapters
from sdp4bit_lab.plan.step import StepPlan, plan_step
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.model.cards import ModelShape

PROBE_FORMAT = "sdp4bit-probe-2"
_LINKS = ("nodes", "devices_per_node", "inter_bandwidth", "intra_bandwidth")
_PROBED = ("name", *_LINKS, "latency", "quantization_bandwidth", "host_seconds", "added_host_seconds")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """One of the paper's clusters, a measured one, or one with data-sheet speeds; values can be replaced."""

    cluster: ClusterName | None = None
    """The paper's cluster of 16 nodes, with the speeds fitted to its Table 2: a100 (4 GPUs per node) or
    h800 (8). Default: a100, unless --probe or --device is given."""
    probe: Path | None = None
    """Measurements from `sdp4bit probe`, instead of --cluster."""
    device: DeviceName | None = None
    """GPU model, with data-sheet speeds: quantization at the share of the memory bandwidth that an H200
    reached, or the limit of its arithmetic; links between GPUs at two thirds of their rate. With --cluster or
    --probe, it sets the speed of quantization and the memory only."""
    link: LinkName | None = None
    """Link between the GPUs of a node, as an alternative to --intra-bandwidth. Default: the device's: NVLink,
    or PCIe 4 for a40 and l40s."""
    nodes: int | None = None
    """Number of nodes. Default: the cluster's."""
    devices_per_node: int | None = None
    """GPUs per node. Default: the cluster's."""
    inter_bandwidth: float | None = None
    """GB/s from one node to the others, per direction; 100 Gbit/s is 12.5. Default: the cluster's."""
    intra_bandwidth: float | None = None
    """GB/s from one GPU to the others of its node, per direction. Default: the cluster's."""
    latency_us: float | None = None
    """Latency of a message between two nodes, or two GPUs of a single node, in microseconds, from which those
    of all collectives follow. Default: the probe's, or NCCL's table: 8.5, or 1.9 inside a node."""
    device_tflops: float | None = None
    """TFLOP/s that a GPU sustains on the model without communication, as measured by `sdp4bit pretrain
    --log-throughput` on one node. Default: the cluster's."""
    quantization_bandwidth: float | None = None
    """Memory traffic of the quantization kernels in GB/s. Default: the cluster's or --device's."""
    device_memory: float | None = None
    """Memory of a GPU in GB. Default: the cluster's or --device's, or unknown."""
    host: HostName | None = None
    """Host that launches the work: measured (a virtual machine with an H100, scaled to this version), or
    server (half of it, assumed for a bare server). Default: the probe's, or measured."""
    host_ms: float | None = None
    """Milliseconds of the host per parameter group and micro-batch of plain FSDP2, the model and the
    optimizer included. Default: the probe's, or --host's."""
    added_host_ms: float | None = None
    """Milliseconds of the host that sdp4bit adds per parameter group and step. Default: the probe's, or
    --host's."""

    def __post_init__(self) -> None:
        require(
            self.cluster is None or self.probe is None,
            f"--cluster {self.cluster} and --probe {self.probe} both name a cluster: give only one",
        )
        require_at_least(1, self, "nodes", "devices_per_node")
        require_at_least(0, self, "latency_us", "host_ms", "added_host_ms")
        require_positive(
            self,
            *("inter_bandwidth", "intra_bandwidth", "device_tflops"),
            *("quantization_bandwidth", "device_memory"),
        )
        require(
            self.link is None or self.intra_bandwidth is None,
            f"--link {self.link} and --intra-bandwidth {self.intra_bandwidth} set the same rate: "
            "give only one",
        )
        nvlink = self.device and DEVICES[self.device].nvlink_bandwidth
        require(
            self.link != "nvlink" or nvlink is not None,
            "--link nvlink needs a --device with NVLink (a100, h100, h200, b200): "
            "give --intra-bandwidth (GB/s per GPU) instead",
        )

    def resolve(self, *, model: str) -> Cluster:
        """Return the cluster with the compute rate of the model; SettingError if a value is missing."""
        scaled = {
            "nodes": (self.nodes, 1),
            "devices_per_node": (self.devices_per_node, 1),
            "inter_bandwidth": (self.inter_bandwidth, 1e9),
            "intra_bandwidth": (self.intra_bandwidth, 1e9),
            "device_flops": (self.device_tflops, 1e12),
            "quantization_bandwidth": (self.quantization_bandwidth, 1e9),
            "device_memory": (self.device_memory, 1e9),
        }
        given: dict[str, Any]
        given = {name: value * scale for name, (value, scale) in scaled.items() if value is not None}
        if self.link is not None:
            nvlink = self.device and DEVICES[self.device].nvlink_bandwidth
            given["intra_bandwidth"] = LINK_SHARE * (PCIE_BANDWIDTH.get(self.link) or nvlink or math.inf)
        if self.latency_us is not None:
            given["latency"] = Latency(message=self.latency_us * 1e-6)
        values: dict[str, Any]
        if self.probe is not None:
            values = _read_probe(self.probe)
        elif self.device is None or self.cluster is not None:
            values = {**vars(paper_cluster(self.cluster or "a100", model=model))}
            if given.keys() & {*_LINKS, "device_flops"}:
                values["name"] = f"your cluster, completed with values of the paper's {values['name']}"
        else:
            rate = LINK_SHARE * DEVICES[self.device].link_bandwidth
            values = {"name": self.device, "intra_bandwidth": rate}
        if self.device is not None:
            # A speed measured on other devices does not apply.
            device = DEVICES[self.device]
            values["quantization_bandwidth"] = MEMORY_SHARE * device.memory_bandwidth
            values["kernels"] = device.kernels if self.quantization_bandwidth is None else None
            values["device_memory"] = device.memory
        if self.inter_bandwidth is not None:
            values["inter_bandwidth_shared"] = None
        values |= given
        values["host"] = self._host(values.get("host"))
        if values.get("nodes") == 1 and (self.probe is not None or self.latency_us is not None):
            # The latency that was measured or given is that between the GPUs of the node.
            values["latency"] = replace(values["latency"], nvlink=values["latency"].message)
        missing = []
        for name, flag, is_needed in (
            ("nodes", "--nodes", True),
            ("devices_per_node", "--devices-per-node", True),
            (
                "inter_bandwidth",
                "--inter-bandwidth (GB/s per node; 100 Gbit/s is 12.5)",
                values.get("nodes") != 1,
            ),
            ("intra_bandwidth", "--intra-bandwidth (GB/s per GPU)", values.get("devices_per_node") != 1),
            ("device_flops", "--device-tflops (per GPU; `pretrain --log-throughput` measures it)", True),
        ):
            if values.get(name) is None:
                missing += [flag] * is_needed
                values[name] = math.inf
        source = f"--probe {self.probe}" if self.probe else f"--device {self.device}"
        require(not missing, f"{source} does not describe a whole cluster: give {', '.join(missing)}")
        return Cluster(**values)

    def _host(self, probed: HostTime | None) -> HostTime:
        host = host_time(self.host) if self.host is not None else probed or host_time("measured")
        if self.host_ms is None and self.added_host_ms is None:
            return host
        plain, added = (
            known if given is None else 1e-3 * given
            for known, given in ((host.plain, self.host_ms), (host.added, self.added_host_ms))
        )
        return replace(host, plain=plain, added=added, source="given by --host-ms and --added-host-ms")


def _read_probe(path: Path) -> dict[str, Any]:
    try:
        measured = read_json_object(path)
    except OSError as error:
        raise SettingError(f"--probe {path} cannot be read: {error}") from error
    if measured.get("format") != PROBE_FORMAT:
        raise SettingError(
            f"--probe {path} was not written by this version of `sdp4bit probe`: "
            f"its format is not {PROBE_FORMAT}"
        )
    missing = [name for name in _PROBED if name not in measured]
    require(not missing, f"--probe {path} lacks {', '.join(missing)}")
    for name in _PROBED[1:]:
        value = measured[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        require(
            value is None or is_number, f"--probe {path}: {name} is {value!r}, not a number of at least 0"
        )
    values = {name: measured[name] for name in _PROBED}
    plain, added = values.pop("host_seconds"), values.pop("added_host_seconds")
    host = None
    if plain is not None:
        # One rank quantizes nothing: the library's part is then as large as that of the measured host.
        default = host_time("measured")
        host = HostTime(
            plain=plain,
            added=plain * default.added / default.plain if added is None else added,
            source=f"measured by {path}" + ", the added time in proportion" * (added is None),
            computes=bool(measured.get("host_computes")),
        )
    return values | {"latency": Latency(message=measured["latency"]), "host": host}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Strategy and output of a plan."""

    strategy: Strategy | None = None
    """Communication strategy. Default: sdp4bit, unless --quantized-weights or --quantized-gradients is
    set."""
    hf_config: Path | None = None
    """The config.json of a Llama or Mistral model of Hugging Face's transformers, instead of --preset. The
    default batch is one sequence of 8192 tokens."""
    lora_rank: int | None = None
    """Freeze the model and train LoRA adapters of this rank on all matrices of the blocks (FSDP2)."""
    json: bool = False
    """Print JSON instead of text."""
    plot: Path | None = None
    """Also draw the gain over the rate of the link, as a PNG."""
    model: PlanModelConfig = field(default_factory=PlanModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)

    def __post_init__(self) -> None:
        require_at_least(1, self, "lora_rank")
        require(
            self.plot is None or self.plot.suffix == ".png",
            f"--plot {self.plot}: give a file whose name ends in .png",
        )
        require(
            self.lora_rank is None or (self.layout.engine == "fsdp2" and self.layout.tensor_parallel == 1),
            "--lora-rank supports FSDP2 without tensor parallelism: remove --tp and --engine",
        )
        layout = self.layout
        require(
            self.hf_config is None or layout.tensor_parallel == layout.pipeline_parallel == 1,
            "--hf-config supports data parallelism alone: remove --tp and --pp",
        )
        has_sizes = replace(self.model, sequence_length=None) != PlanModelConfig()
        require(
            self.hf_config is None or not has_sizes,
            "--hf-config has all sizes of the model: remove --preset, --num-layers and the like",
        )
        _ = self.quantization, self.llama

    @property
    def quantization(self) -> SDP4BitConfig:
        return self.communication.resolve(self.strategy, seed=0)

    @property
    def strategy_name(self) -> str:
        return self.communication.strategy_name(self.strategy)

    @cached_property
    def llama(self) -> LlamaShape | None:
        """Sizes in --hf-config."""
        return None if self.hf_config is None else LlamaShape.read(self.hf_config)

    @property
    def model_name(self) -> str:
        """Preset, or layers x hidden size if these are not the preset's."""
        if self.llama is not None:
            return self.llama.name
        shape = self.shape
        is_card = (shape.layers, shape.hidden) == (self.model.card.layers, self.model.card.hidden)
        return self.model.model_card if is_card else f"{shape.layers} x {shape.hidden}"

    @property
    def shape(self) -> ModelShape:
        return self.model.padded_shape(tensor_parallel=self.layout.tensor_parallel)

    @property
    def parameters(self) -> int:
        groups = gpt_groups(self.shape) if self.llama is None else self.llama.groups()
        return sum(group.numel for group in self._adapted(groups))

    @property
    def _flops_per_sequence(self) -> float:
        if self.llama is None:
            return self.shape.flops_per_sample(self.model.tokens)
        tokens = self.model.sequence_length or min(LONGEST_DEFAULT, self.llama.positions)
        return self.llama.flops_per_sample(tokens)

    def _groups(self) -> tuple[ShardedGroup, ...]:
        layout = self.layout
        if self.llama is not None:
            return self.llama.groups(freed_after_forward=layout.reshard_after_forward)
        return gpt_groups(
            self.shape,
            tensor_parallel=layout.tensor_parallel,
            pipeline_parallel=layout.pipeline_parallel,
            freed_after_forward=layout.reshard_after_forward,
        )

    def _adapted(self, groups: tuple[ShardedGroup, ...]) -> tuple[ShardedGroup, ...]:
        return groups if self.lora_rank is None else with_adapters(groups, rank=self.lora_rank)

    @property
    def resolved_layout(self) -> ParallelLayout:
        size = self.layout.micro_batch_size or (1 if self.llama else self.model.card.micro_batch_size)
        return replace(self.layout, micro_batch_size=size)

    def plan(self, cluster: Cluster) -> StepPlan:
        """Return the plan; SettingError if model, layout and cluster are incompatible."""
        layout, groups = self.resolved_layout, self._adapted(self._groups())
        return plan_step(
            flat_buffer(groups) if layout.engine == "megatron" else groups,
            flops_per_sequence=self._flops_per_sequence,
            cluster=cluster,
            layout=layout,
            config=self.quantization,
        )


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Sizes of the measurements, and the result file."""

    out: Path = Path("runs/probe.json")
    """JSON file to write, for `sdp4bit plan --probe`."""
    megabytes: float = 16.0
    """MB that each rank sends per all-to-all, summed over its peers."""
    rounds: int = 5
    """Timed all-to-alls per level, after two for warm-up. The median is used."""
    quantized_values: int = 4 * 1024**2
    """Number of values for timing the quantization kernels."""
    host_rounds: int = 15
    """Timed steps of a tiny model, each with plain FSDP2 and with sdp4bit, for the host's time. The median is
    used."""
    parallel: RanksConfig = field(default_factory=RanksConfig)

    def __post_init__(self) -> None:
        require_positive(self, "megabytes")
        require_at_least(1, self, "rounds", "host_rounds")
        require_at_least(4096, self, "quantized_values")

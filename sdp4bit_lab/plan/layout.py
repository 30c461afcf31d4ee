"""Layout of a training step over the devices of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from sdp4bit.traffic import Grid
from sdp4bit_lab.common.settings import option, require, require_at_least

BF16_BYTES, FP32_BYTES = 2, 4
Range = tuple[float, float]
"""Value with the least and with the most overlap."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Layout of a step over the devices."""

    tensor_parallel: Annotated[int, option("tensor-model-parallel-size", "tp")] = 1
    """Tensor-parallel ranks, inside a node."""
    pipeline_parallel: Annotated[int, option("pipeline-model-parallel-size", "pp")] = 1
    """Pipeline stages, across nodes."""
    replicas: int = 1
    """Replicas of the sharded model (HSDP), each on consecutive data-parallel ranks. FSDP2 only."""
    nodes_per_block: int | None = None
    """Consecutive nodes that form a block. Gradients then cross nodes in two hops, within blocks and between
    them. Default: one hop."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass. Default: the preset's."""
    accumulation: int = 1
    """Micro batches per step."""
    overlap: float | None = None
    """Fraction of the communication that overlaps with computation. Default: print the range from 0 to 1."""
    engine: Literal["fsdp2", "megatron"] = "fsdp2"
    """Training engine: fsdp2 (one group per block) or megatron (one flat buffer, gathered once per step)."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward and gather them again in backward (ZeRO-3). Off: gather once per
    micro batch. FSDP2 only."""
    least_padding: bool = False
    """Shard each parameter along the dimension with the least padding (shard_placement_fn). FSDP2 only."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the gradients that are quantized: reduce_dtype of FSDP2's mixed precision."""

    def __post_init__(self) -> None:
        require_at_least(
            *(1, self, "tensor_parallel", "pipeline_parallel", "replicas", "micro_batch_size"),
            *("accumulation", "nodes_per_block"),
        )
        require(
            self.overlap is None or 0 <= self.overlap <= 1,
            f"--overlap {self.overlap} must be between 0 and 1",
        )
        for is_given, flag in (
            (not self.reshard_after_forward, "--no-reshard-after-forward"),
            (self.least_padding, "--least-padding"),
            (self.replicas > 1, "--replicas"),
        ):
            require(
                not is_given or self.engine == "fsdp2",
                f"{flag} has no effect with --engine {self.engine}: it applies to FSDP2",
            )

    @property
    def row_bytes(self) -> int:
        """Bytes per gradient in the rows that are quantized."""
        return BF16_BYTES if self.reduce_dtype == "bfloat16" else FP32_BYTES

    @property
    def overlaps(self) -> Range:
        """Least and largest fraction of the communication that overlaps with computation."""
        return (0.0, 1.0) if self.overlap is None else (self.overlap, self.overlap)

    def grids(self, *, nodes: int, devices_per_node: int) -> tuple[Grid, Grid]:
        """Return the ranks that shard the model, and the ranks that hold the same shard.

        Raises:
            SettingError: model-parallel ranks do not divide the cluster or its nodes, or replicas do not
            divide its data-parallel ranks.
        """
        tensor, parts = self.tensor_parallel, self.tensor_parallel * self.pipeline_parallel
        devices = nodes * devices_per_node
        require(
            devices % parts == 0,
            f"--tp {tensor} times --pp {self.pipeline_parallel} is {parts}, which does not divide the "
            f"{devices} devices of {nodes} nodes",
        )
        require(
            max(tensor, devices_per_node) % min(tensor, devices_per_node) == 0,
            f"--tp {tensor} and the {devices_per_node} devices per node do not divide each other: "
            "data-parallel groups would be spread unevenly over nodes",
        )
        ranks = devices // parts
        per_node = min(ranks, max(1, devices_per_node // tensor))
        require(
            ranks % per_node == 0,
            f"the {ranks} ranks of a data-parallel group do not fill nodes of {per_node} ranks: "
            "choose --pp so that stages consist of complete nodes",
        )
        require(
            ranks % self.replicas == 0,
            f"--replicas {self.replicas} does not divide the {ranks} ranks of a data-parallel group",
        )
        shards = ranks // self.replicas
        inside = min(shards, per_node)
        require(
            max(shards, per_node) % inside == 0,
            f"--replicas {self.replicas} shards the model over {shards} ranks, which do not fill nodes of "
            f"{per_node} ranks evenly",
        )
        beside = per_node // inside
        require(
            self.nodes_per_block is None or nodes % self.nodes_per_block == 0,
            f"--nodes-per-block {self.nodes_per_block} does not divide the {nodes} nodes",
        )
        # Nodes of other tensor-parallel ranks are between those of a group, and shards between replicas.
        apart = max(1, tensor // devices_per_node)
        return (
            self._in_blocks(shards // inside, ranks_per_node=inside, apart=apart),
            self._in_blocks(self.replicas // beside, ranks_per_node=beside, apart=apart * (shards // inside)),
        )

    def _in_blocks(self, nodes: int, *, ranks_per_node: int, apart: int) -> Grid:
        """Return a group on every `apart`-th node, with its blocks."""
        grid, size = Grid(nodes=nodes, ranks_per_node=ranks_per_node), self.nodes_per_block
        if size is None or apart >= size or nodes * apart <= size:
            return grid
        inside = size // apart
        require(
            size % apart == 0 and nodes % inside == 0,
            f"--nodes-per-block {size} does not fit a group of {nodes} nodes, {apart} apart",
        )
        return replace(grid, blocks=nodes // inside) if inside > 1 else grid

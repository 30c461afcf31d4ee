"""Settings of processes, nodes and parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.settings import require, require_at_least
from sdp4bit_lab.pretrain.model.cards import Recompute


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(RanksConfig):
    """Processes, nodes and parallelism."""

    simulated_ranks: int | None = None
    """Simulate this many data-parallel ranks in one process, including the effect of their communication on
    weights and gradients. Needs --ranks-per-node."""
    nodes_per_block: int | None = None
    """Consecutive nodes that form a block. Gradients then cross nodes in two hops, within blocks and between
    them, with fewer messages; for more than 64 nodes. Default: one hop."""
    tensor_model_parallel_size: int = 1
    """Consecutive ranks that split the matrices of every block."""
    pipeline_model_parallel_size: int = 1
    """Ranks of a pipeline, with equally many blocks each; --accumulation sets the number of micro batches."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Blocks per stage if each rank has several interleaved stages. Default: one stage per rank."""
    recompute_granularity: Recompute = "none"
    """Activation checkpointing: selective recomputes the attention core in backward, full all of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "tensor_model_parallel_size", "pipeline_model_parallel_size")
        require_at_least(1, self, "num_layers_per_virtual_pipeline_stage", "simulated_ranks")
        require_at_least(1, self, "nodes_per_block")
        per_stage = self.num_layers_per_virtual_pipeline_stage
        require(
            per_stage is None or self.pipeline_model_parallel_size > 1,
            f"--num-layers-per-virtual-pipeline-stage {per_stage} has no effect without "
            "--pipeline-model-parallel-size",
        )
        if self.simulated_ranks is not None:
            self._check_simulated(self.simulated_ranks)

    def _check_simulated(self, ranks: int) -> None:
        flag = f"--simulated-ranks {ranks}"
        require(ranks > 1, f"{flag}: one rank sends nothing; give at least 2")
        require(
            self.nproc_per_node in (None, 1), f"{flag} runs all ranks in one process: remove --nproc-per-node"
        )
        require(
            self.ranks_per_node is not None,
            f"{flag} needs --ranks-per-node: simulated ranks have no host names",
        )
        self._check_nodes(ranks, kind="simulated ")
        require(
            self.model_parallel_size == 1,
            f"{flag} simulates data parallelism only: remove --tensor-model-parallel-size and "
            "--pipeline-model-parallel-size",
        )

    @property
    def topology(self) -> str | int | tuple[str | int, int]:
        """The nodes, and their blocks if there are any, as the library takes them."""
        nodes = "auto" if self.ranks_per_node is None else self.ranks_per_node
        return nodes if self.nodes_per_block is None else (nodes, self.nodes_per_block)

    def processes(self, devices: int) -> int:
        return super().processes(devices) if self.simulated_ranks is None else 1

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of ranks that read different data, real or simulated."""
        return self.simulated_ranks or world_size // self.model_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    def check_world(self, world_size: int) -> None:
        """Raise SettingError unless nodes and model-parallel ranks divide the world size."""
        if self.simulated_ranks is not None:
            require(
                world_size == 1,
                f"--simulated-ranks {self.simulated_ranks} needs one process, but {world_size} were started",
            )
            return
        super().check_world(world_size)
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        require(
            world_size % self.model_parallel_size == 0,
            f"--tensor-model-parallel-size {tensor} times --pipeline-model-parallel-size {pipeline} is "
            f"{self.model_parallel_size}, which does not divide the {world_size} ranks",
        )

    def check_model(self, *, layers: int, heads: int, vocabulary: int, micro_batches: int) -> None:
        """Raise SettingError unless the parallel sizes divide the model."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for what, size in (("attention heads", heads), ("rows of the vocabulary", vocabulary)):
            require(
                size % tensor == 0, f"--tensor-model-parallel-size {tensor} does not divide the {size} {what}"
            )
        require(
            layers % pipeline == 0,
            f"--pipeline-model-parallel-size {pipeline} does not divide the {layers} blocks",
        )
        per_stage = self.num_layers_per_virtual_pipeline_stage
        if per_stage is None:
            return
        require(
            layers // pipeline % per_stage == 0,
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {layers // pipeline} "
            f"blocks of each of the {pipeline} ranks",
        )
        require(
            micro_batches % pipeline == 0,
            f"{micro_batches} micro batches are not a multiple of --pipeline-model-parallel-size {pipeline}, "
            "as interleaved stages require: change --accumulation",
        )

    def stages(self, layers: int) -> list[range]:
        """Return the blocks of every stage; stage s is on rank s modulo the pipeline size."""
        pipeline = self.pipeline_model_parallel_size
        per_stage = self.num_layers_per_virtual_pipeline_stage or layers // pipeline
        return [range(start, start + per_stage) for start in range(0, layers, per_stage)]

"""A training engine of one's own, attached like FSDP2: ZeRO-2 over plain modules.

    torchrun --nproc-per-node 4 examples/engine.py

Every rank computes with complete weights and updates its fp32 shard of each block: gradients are
reduce-scattered, and weights are gathered after the optimizer step. `Block` describes the rows of a group,
`ZeRO2.install` takes a group into use, and the library agrees, builds the collectives, measures, reports and
removes.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp4bit import SDP4BitConfig
from sdp4bit.collectives.transport import all_gather_dense, reduce_scatter_dense
from sdp4bit.engines import EngineHandle, Group, agree_on_refreshes, attach_engine

SUM = dist.ReduceOp.SUM


class Block:
    """The parameters of a module in one row per rank; the `Rows` of its group."""

    value_ranges = None  # all values are numbers

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.parameters = name, list(module.parameters())
        self.process_group, self.ranks = dist.group.WORLD, tuple(range(dist.get_world_size()))
        self.device = self.parameters[0].device
        self.numels = [parameter.numel() for parameter in self.parameters]
        self.shard_numel = -(-sum(self.numels) // len(self.ranks))
        rows = self.flattened(parameter.detach() for parameter in self.parameters)
        self.main = nn.Parameter(rows.chunk(len(self.ranks))[dist.get_rank()].clone())

    def flattened(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the rows of all ranks [ranks * n], with zeros as padding."""
        values = torch.cat([each.flatten() for each in tensors])
        return nn.functional.pad(values, (0, len(self.ranks) * self.shard_numel - len(values)))

    def write(self, rows: Tensor) -> None:
        for parameter, values in zip(
            self.parameters, rows[: sum(self.numels)].split(self.numels), strict=True
        ):
            parameter.copy_(values.view_as(parameter))

    def sample_main(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([self.main.detach()[start:end] for start, end in ranges])


class ZeRO2:
    """The engine: gathers before a forward, reduces after a backward, and updates the shards."""

    def __init__(self, model: nn.Sequential) -> None:
        self.blocks = [Block(f"layers.{index}", module) for index, module in enumerate(model)]
        self.quantized: dict[int, Group] = {}
        self.optimizer = torch.optim.AdamW([block.main for block in self.blocks], lr=1e-3)

    def attach(self, config: SDP4BitConfig, *, topology: int) -> EngineHandle:
        return attach_engine(self.blocks, install=self.install, config=config, topology=topology)

    def install(self, group: Group) -> Callable[[], None]:
        self.quantized[group.index] = group
        return partial(self.quantized.pop, group.index, None)

    @torch.no_grad()
    def gather(self) -> None:
        # Once for all groups; each would ask the ranks otherwise.
        agree_on_refreshes([group.weights for group in self.quantized.values()])
        for index, block in enumerate(self.blocks):
            main, rows = block.main.detach(), torch.empty(len(block.ranks) * block.shard_numel)
            plain = partial(all_gather_dense, rows, main, block.process_group, what=block.name)
            if index in self.quantized:
                self.quantized[index].weights.gather(rows, main, plain=plain)
            else:
                plain()
            block.write(rows)

    @torch.no_grad()
    def reduce(self) -> None:
        for index, block in enumerate(self.blocks):
            rows = block.flattened(parameter.grad for parameter in block.parameters)
            row = block.main.grad = torch.empty_like(block.main)
            plain = partial(reduce_scatter_dense, row, rows, block.process_group, SUM, what=block.name)
            if index in self.quantized:
                self.quantized[index].gradients.reduce(row, rows, SUM, plain=plain)
            else:
                plain()
            row /= len(block.ranks)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))
    )
    engine = ZeRO2(model)
    config = None if "--plain" in sys.argv else SDP4BitConfig()
    topology = dist.get_world_size() // 2  # two nodes
    comm = None if config is None else engine.attach(config, topology=topology)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        engine.gather()
        x = torch.randn(16, 256)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        engine.reduce()
        engine.optimizer.step()
        model.zero_grad()
        if comm is not None:
            comm.mark_step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    if comm is not None:
        table, ratio = comm.explain(full=True), comm.stats()["compression_ratio"]
        assert comm.audit()  # all ranks hold the same replicas
        comm.remove()
        if dist.get_rank() == 0:
            print(table, f"{ratio:.2f}x fewer inter-node bytes than in full precision", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

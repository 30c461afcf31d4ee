"""A training engine of one's own, attached like FSDP2: ZeRO-2 over plain modules.

    torchrun --nproc-per-node 4 examples/engine.py

Every rank computes with complete weights and updates its fp32 shard of each block: gradients are
reduce-scattered, and weights are gathered after the optimizer step. `ZeRO2` has the three calls of
`sdp4bit.engines.protocol.Engine`; the library agrees, builds the collectives, measures, reports and removes.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp4bit import AuditConfig, SDP4BitConfig
from sdp4bit.collectives.group import Group
from sdp4bit.collectives.transport import all_gather_dense, reduce_scatter_dense
from sdp4bit.collectives.weights import Due, agree_on_refreshes
from sdp4bit.engines.agreement import ShardedRows, agree
from sdp4bit.engines.attach import build
from sdp4bit.engines.handle import CommHandle, StateDict, counters_of, load_counters
from sdp4bit.observe.explain import one_node_reason
from sdp4bit.observe.stats import ModelState

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
        self.state = ModelState([])

    def groups(self) -> Sequence[Group]:
        return self.state.groups

    def install(self, group: Group) -> Callable[[], None]:
        self.quantized[group.index] = group
        return partial(self.quantized.pop, group.index)

    def on_step(self, call: Callable[[int], None]) -> Callable[[], None]:
        with ExitStack() as undo:
            undo.callback(self.state.on_step(call))
            undo.callback(self.optimizer.register_step_post_hook(lambda *_: self.end_step()).remove)
            return undo.pop_all().close

    def end_step(self) -> None:
        for group in self.groups():
            group.weights.mark_changed()
        self.state.end_step()

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


class ZeRO2Handle(CommHandle):
    """Attaches an engine; its other methods are those that every engine has to define."""

    _engine: ZeRO2

    def __init__(self, engine: ZeRO2, *, config: SDP4BitConfig, topology: int | str = "auto") -> None:
        # 1. All ranks agree, or raise the same error, before anything is changed.
        rows = [
            ShardedRows(name=b.name, ranks=b.ranks, shard_numel=b.shard_numel, dtypes=("fp32",))
            for b in engine.blocks
        ]
        layouts = agree(rows, settings={"config": config}, topology=topology, failure=None)
        # 2. A group per block, with the reasons for full precision.
        groups = [Group(b, index=i, layout=layouts.shards[b.ranks]) for i, b in enumerate(engine.blocks)]
        for group in groups:
            nodes = group.layout.nodes
            group.weights.unquantized_reason = one_node_reason(config.weights, nodes=nodes)
            group.gradients.unquantized_reason = one_node_reason(config.gradients, nodes=nodes)
        engine.state = ModelState(groups, telemetry=config.telemetry)
        super().__init__(engine.state, config=config, layouts=layouts)
        # 3. Collectives, installation and steps; `remove()` undoes them in reverse.
        with self._attaching() as undo:
            build(groups, layouts=layouts, config=config, undo=undo)
            self._install(engine, undo=undo, watched=groups)

    def mark_step(self) -> None:
        self._engine.end_step()

    def resync(self) -> None:
        self._refresh_mismatched(self.groups, config=AuditConfig())

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        for group in wrong:
            group.weights.raise_to(Due.FULL)
        return wrong

    # Replicas start from the main weights after a load. For a bit-exact resume their rows must be saved, too.

    def state_dict(self) -> StateDict:
        return counters_of(self._state, version=1)

    def load_state_dict(self, state_dict: StateDict) -> None:
        load_counters(self._state, state_dict, owner="the example", version=1)
        self.resync()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))
    )
    engine = ZeRO2(model)
    config = None if "--plain" in sys.argv else SDP4BitConfig()
    topology = dist.get_world_size() // 2  # two nodes
    comm = None if config is None else ZeRO2Handle(engine, config=config, topology=topology)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        engine.gather()
        x = torch.randn(16, 256)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        engine.reduce()
        engine.optimizer.step()
        model.zero_grad()
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

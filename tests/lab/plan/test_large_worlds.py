"""The planner against the real FSDP2 integration in worlds of 64 to 4096 ranks. Layer: a fake process group.

One process poses as one rank. What it computes is garbage, but every collective is called with the buffers it
would have, so calls and bytes can be counted: by torch's dispatcher and by the library itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization import ops
from sdp4bit_lab.plan.memory import memory_per_rank
from sdp4bit_lab.plan.model import ShardedGroup, least_padded_dim
from sdp4bit_lab.plan.traffic import ONE_RANK, GroupTraffic, RankGrid, group_traffic
from tests.toy import POLICY

WIDTH = 512


@contextmanager
def fake_world(ranks: int, *, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with ops.use_backend("reference"):
            yield
    finally:
        dist.destroy_process_group()


@dataclass
class Sent:
    """Bytes and calls by level; collectives over all ranks count as a ring in rank order."""

    intra: float = 0.0
    inter: float = 0.0
    calls: int = 0


class CountCollectives(TorchDispatchMode):
    """Counts what c10d is asked to send, without the library's help."""

    def __init__(self, *, per_node: int) -> None:
        super().__init__()
        self.per_node, self.sent = per_node, Sent()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "allreduce_":
            nbytes, ranks = sum(tensor.nbytes for tensor in args[0]), self._ranks(args[1])
            # What has happened to the weights: a few bytes, which nothing counts.
            if args[0][0].dtype != torch.int32:
                self._add(2 * nbytes / len(ranks), ranks)
            return
        output, given = args[0], args[1]
        if name == "allgather_into_tensor_coalesced_":  # of several blocks, in one call
            name, given = "_allgather_base_", torch.cat([block.view(-1) for block in given])
        if name == "alltoall_base_":
            to_each_peer = given.nbytes / len(self._ranks(args[2]))
        elif name == "_allgather_base_":
            to_each_peer = given.nbytes
        elif name == "_reduce_scatter_base_":
            to_each_peer = output.nbytes
        else:
            raise AssertionError(f"unexpected collective {name}")
        self._add(to_each_peer, self._ranks(args[2]))

    def _ranks(self, group: Any) -> list[int]:
        return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))

    def _add(self, to_each_peer: float, ranks: list[int]) -> None:
        sent, nodes = to_each_peer * (len(ranks) - 1), len({rank // self.per_node for rank in ranks})
        self.sent.calls += 1
        if nodes == 1:
            self.sent.intra += sent
        else:
            # Of a ring in rank order only the last rank of a node sends to another one.
            inside = len(ranks) // nodes
            self.sent.intra += sent * (inside - 1) / inside
            self.sent.inter += sent / inside


class Blocks(nn.Module):
    """A matrix with a bias, one that is wide, and parameters with fewer rows than most worlds have ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH, bias=False)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.width = WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).float().square().mean()


@dataclass
class Measured:
    """One steady step of one rank, and what the planner says of it."""

    counted: Sent
    reported: dict[str, int]
    planned: list[GroupTraffic]
    planned_memory: dict[str, int]
    replica_bytes: int
    message_bytes: int

    def planned_total(self, name: str) -> float:
        return sum(getattr(exchange, name) for group in self.planned for exchange in group.exchanges)

    def assert_equal(self) -> None:
        reported, counted = self.reported, self.counted
        assert self.planned_total("collectives") == counted.calls == reported["collectives"]
        assert self.planned_total("inter_bytes") == pytest.approx(counted.inter, rel=1e-12)
        assert self.planned_total("intra_bytes") == pytest.approx(counted.intra, rel=1e-12)
        assert reported["inter_bytes"] == round(self.planned_total("inter_bytes"))
        assert reported["intra_bytes"] == round(self.planned_total("intra_bytes"))
        assert reported["padding_bytes"] == round(self.planned_total("padding_bytes"))
        assert self.planned_memory.get("weight replica, bf16", 0) == self.replica_bytes
        if not any(group.all_reduce.collectives for group in self.planned):
            assert self.planned_memory.get("message buffers", 0) == self.message_bytes


def measure(
    model: Blocks,
    *,
    grid: RankGrid,
    config: SDP4BitConfig,
    reshard: bool = True,
    accumulation: int = 1,
    least_padding: bool = False,
    replicas: RankGrid = ONE_RANK,
) -> Measured:
    world, per_node = grid.size * replicas.size, grid.ranks_per_node * replicas.ranks_per_node
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    placement = None
    if least_padding:

        def placement(parameter: nn.Parameter) -> Shard:
            return Shard(least_padded_dim(parameter.shape, ranks=world))

    with fake_world(world, rank=world - 1):
        mesh = init_device_mesh("cpu", (world,))
        if replicas.size > 1:
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", (replicas.size, grid.size), mesh_dim_names=names)
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": POLICY,
            "shard_placement_fn": placement,
        }
        for block in model.blocks:
            fully_shard(block, **options, reshard_after_forward=reshard)
        fully_shard(model, **options)
        comm = sdp4bit.quantize_communication(model, topology=per_node, config=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the first step sends replicas in full precision
            with CountCollectives(per_node=per_node) as counter:
                for micro in range(accumulation):
                    model.set_requires_gradient_sync(micro == accumulation - 1)
                    model(torch.randn(1, model.width)).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights = [group.replica for group in comm._state.groups if group.replica is not None]
        reductions = [g.reduction for g in comm._state.groups if g.reduction is not None]
        users = (
            *(replica._scratch for replica in weights),
            *(reduction._exchange._scratch for reduction in reductions),
            *(g.all_reduce._scratch for g in comm._state.groups if g.all_reduce is not None),
        )
        scratches = {id(scratch): scratch for scratch in users}
        reported = comm.stats()["last_step"]
    groups = [
        ShardedGroup(
            name=group,
            shapes=tuple(shape for name, shape in shapes.items() if group_of(name) == group),
            freed_after_forward=group != "" and reshard,
        )
        for group in dict.fromkeys(map(group_of, shapes))
    ]
    options = {"grid": grid, "replicas": replicas, "config": config, "accumulation": accumulation}
    planned = [group_traffic(group, **options, least_padding=least_padding) for group in groups]
    return Measured(
        counted=counter.sent,
        reported=reported,
        planned=planned,
        planned_memory=memory_per_rank(groups, planned, **options),
        replica_bytes=sum(replica.rows.nbytes for replica in weights if replica.rows is not None),
        message_bytes=sum(scratch.nbytes for scratch in scratches.values()),
    )


def group_of(parameter: str) -> str:
    return ".".join(parameter.split(".")[:2]) if parameter.startswith("blocks.") else ""


DEFAULT = SDP4BitConfig()
ALL_ROWS = replace(DEFAULT, gradients=GradientConfig(min_numel=0, pipeline_chunks=3, inside_one_node=True))


@pytest.mark.parametrize(
    "config",
    [
        DEFAULT,
        ALL_ROWS,
        replace(ALL_ROWS, weights=WeightConfig(replica="full")),
        replace(ALL_ROWS, weights=WeightConfig(bits=None)),
        replace(
            ALL_ROWS,
            gradients=replace(ALL_ROWS.gradients, pipeline_chunks=None, intra_bits=None, inter_bits=8),
        ),
        *(SDP4BitConfig.preset(name) for name in ("baseline", "qwd", "tlq-hs")),
    ],
)
@pytest.mark.parametrize(("nodes", "per_node"), [(8, 8), (16, 1), (1, 8)])
def test_bytes_and_calls_of_every_configuration_are_as_planned(
    nodes: int, per_node: int, config: SDP4BitConfig
) -> None:
    grid = RankGrid(nodes=nodes, ranks_per_node=per_node)
    measure(Blocks(), grid=grid, config=config).assert_equal()


@pytest.mark.parametrize("config", [DEFAULT, ALL_ROWS, SDP4BitConfig.preset("baseline")])
@pytest.mark.parametrize(("shards", "replicas"), [((1, 8), (4, 1)), ((1, 2), (2, 4)), ((2, 4), (4, 1))])
def test_replicas_send_what_is_planned(
    shards: tuple[int, int], replicas: tuple[int, int], config: SDP4BitConfig
) -> None:
    grid, over = (RankGrid(nodes=nodes, ranks_per_node=ranks) for nodes, ranks in (shards, replicas))
    measured = measure(Blocks(), grid=grid, replicas=over, config=config)
    measured.assert_equal()
    # What is planned for a GPU, where the all-reduce has a stream and so buffers of its own.
    held, planned = measured.message_bytes, measured.planned_memory.get("message buffers", 0)
    assert held <= planned <= 2 * held


@pytest.mark.parametrize(("reshard", "accumulation"), [(False, 1), (True, 3), (False, 2)])
def test_gathers_are_counted_per_micro_batch(reshard: bool, accumulation: int) -> None:
    grid = RankGrid(nodes=4, ranks_per_node=4)
    measured = measure(Blocks(), grid=grid, config=ALL_ROWS, reshard=reshard, accumulation=accumulation)
    measured.assert_equal()


@pytest.mark.parametrize(
    ("nodes", "per_node"),
    [
        (128, 8),
        pytest.param(64, 64, marks=pytest.mark.slow),
        pytest.param(512, 8, marks=pytest.mark.slow),
    ],
)
def test_thousands_of_ranks_send_what_is_planned(nodes: int, per_node: int) -> None:
    measured = measure(Blocks(), grid=RankGrid(nodes=nodes, ranks_per_node=per_node), config=ALL_ROWS)
    measured.assert_equal()


class Even(Blocks):
    """Half of the parameters have as many rows as a small world has ranks, half as many as a large one."""

    def __init__(self, *, small: int, large: int) -> None:
        super().__init__()
        pair = (nn.Linear(large, small, bias=False), nn.Linear(small, large, bias=False))
        self.blocks = nn.ModuleList([nn.Sequential(*pair)])
        self.norm = nn.Identity()
        self.width = large


def cost_per_parameter(model: Blocks, *, grid: RankGrid, least_padding: bool) -> float:
    """Return the bytes that a node sends per parameter, over the share of the values that others own."""
    config = replace(DEFAULT, gradients=GradientConfig(min_numel=0))
    measured = measure(model, grid=grid, config=config, least_padding=least_padding)
    measured.assert_equal()
    parameters = sum(group.numel for group in measured.planned)
    return measured.counted.inter * grid.ranks_per_node / parameters * grid.nodes / (grid.nodes - 1)


@pytest.mark.parametrize(
    ("small", "large", "per_node"),
    [(256, 1024, 16), pytest.param(1024, 4096, 64, marks=pytest.mark.slow)],
)
def test_cost_per_parameter_stays_flat_as_the_world_grows_unless_rows_are_padded(
    small: int, large: int, per_node: int
) -> None:
    """FSDP2's cut along dimension 0 is what grows: 1024 rows on 4096 ranks are sent as 4096."""
    cost: dict[tuple[int, bool], float] = {}
    for world in (small, large):
        grid = RankGrid(nodes=world // per_node, ranks_per_node=per_node)
        for least_padding in (False, True):
            model = Even(small=small, large=large)
            cost[world, least_padding] = cost_per_parameter(model, grid=grid, least_padding=least_padding)
    # Both sections of the two messages of a row (gradients, weights) may end in up to 15 bytes of padding.
    alignment = 2 * 2 * 15 / (2 * small)
    assert cost[small, False] == cost[small, True] == pytest.approx(1.02, abs=0.02)
    assert cost[large, True] == pytest.approx(cost[small, True], abs=alignment)
    # The half with few rows is sent as if it had large / small times as many.
    assert cost[large, False] == pytest.approx((1 + large / small) / 2 * cost[small, False], abs=alignment)

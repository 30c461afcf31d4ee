"""The planner against the real FSDP2 integration in worlds of 64 to 4096 ranks. Layer: a fake process group.

One process runs as one rank. Its values are meaningless, but every collective is called with the real
buffers, so torch's dispatcher and the library can count calls and bytes.
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
    """Traffic of one rank in a steady step: counted by torch, reported by the library, planned."""

    counted: Sent
    reported: dict[str, int]
    planned: list[GroupTraffic]

    def assert_equal(self) -> None:
        reported, counted = self.reported, self.counted
        planned = {
            name: sum(getattr(exchange, name) for group in self.planned for exchange in group.exchanges)
            for name in ("intra_bytes", "inter_bytes", "padding_bytes", "collectives")
        }
        assert {name: reported[name] for name in planned} == {name: round(n) for name, n in planned.items()}
        assert planned["collectives"] == counted.calls
        assert planned["inter_bytes"] == pytest.approx(counted.inter, rel=1e-12)
        assert planned["intra_bytes"] == pytest.approx(counted.intra, rel=1e-12)


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
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICY, "shard_placement_fn": placement}
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
        reported = comm.stats()["last_step"]
    groups = [
        ShardedGroup(
            name=group,
            shapes=tuple(shape for name, shape in shapes.items() if group_of(name) == group),
            freed_after_forward=group != "" and reshard,
        )
        for group in dict.fromkeys(map(group_of, shapes))
    ]
    planned = [
        group_traffic(
            group,
            grid=grid,
            replicas=replicas,
            config=config,
            accumulation=accumulation,
            least_padding=least_padding,
        )
        for group in groups
    ]
    return Measured(counted=counter.sent, reported=reported, planned=planned)


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
        SDP4BitConfig(weights=None, gradients=None),
        SDP4BitConfig(gradients=None),
    ],
)
@pytest.mark.parametrize(("nodes", "per_node"), [(8, 8), (16, 1), (1, 8)])
def test_bytes_and_calls_of_every_configuration_are_as_planned(
    nodes: int, per_node: int, config: SDP4BitConfig
) -> None:
    grid = RankGrid(nodes=nodes, ranks_per_node=per_node)
    measure(Blocks(), grid=grid, config=config).assert_equal()


@pytest.mark.parametrize("config", [DEFAULT, ALL_ROWS, SDP4BitConfig(weights=None, gradients=None)])
@pytest.mark.parametrize(("shards", "replicas"), [((1, 8), (4, 1)), ((1, 2), (2, 4)), ((2, 4), (4, 1))])
def test_hsdp_sends_the_planned_bytes(
    shards: tuple[int, int], replicas: tuple[int, int], config: SDP4BitConfig
) -> None:
    grid, over = (RankGrid(nodes=nodes, ranks_per_node=ranks) for nodes, ranks in (shards, replicas))
    measure(Blocks(), grid=grid, replicas=over, config=config).assert_equal()


@pytest.mark.parametrize(("reshard", "accumulation"), [(False, 1), (True, 3), (False, 2)])
def test_gathers_are_counted_per_micro_batch(reshard: bool, accumulation: int) -> None:
    grid = RankGrid(nodes=4, ranks_per_node=4)
    measured = measure(Blocks(), grid=grid, config=ALL_ROWS, reshard=reshard, accumulation=accumulation)
    measured.assert_equal()


@pytest.mark.parametrize(("nodes", "per_node"), [(128, 8), pytest.param(512, 8, marks=pytest.mark.slow)])
def test_thousands_of_ranks_send_the_planned_bytes(nodes: int, per_node: int) -> None:
    measure(Blocks(), grid=RankGrid(nodes=nodes, ranks_per_node=per_node), config=ALL_ROWS).assert_equal()


def test_a_cut_along_another_dimension_pads_less_and_sends_the_planned_bytes() -> None:
    """96 rows on 128 ranks are sent as 128; the 512 columns of the same matrix are divided evenly."""
    grid, padding = RankGrid(nodes=16, ranks_per_node=8), {}
    for least_padding in (False, True):
        measured = measure(Blocks(), grid=grid, config=ALL_ROWS, least_padding=least_padding)
        measured.assert_equal()
        rows = sum(group.row_numel for group in measured.planned)
        padding[least_padding] = rows * grid.size / sum(group.group.numel for group in measured.planned)
    assert padding[True] < 1.01 < 1.15 < padding[False]

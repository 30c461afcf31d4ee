"""The planner against the real FSDP2 integration in worlds of 64 to 4096 ranks. Layer: a fake process group.

One process runs as one rank. Its values are meaningless, but every collective is called with the real
buffers, so torch's dispatcher and the library can count calls and bytes.
"""

from __future__ import annotations

from dataclasses import replace
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
from sdp4bit.traffic import Grid
from sdp4bit_lab.plan.model import ShardedGroup, least_padded_dim
from sdp4bit_lab.plan.traffic import group_traffic
from tests.ranks import fake_world
from tests.toy import POLICY

WIDTH = 512


class CountCollectives(TorchDispatchMode):
    """Counts what c10d is asked to send, by level; a collective over all ranks is a ring in rank order."""

    def __init__(self, *, per_node: int) -> None:
        super().__init__()
        self.per_node = per_node
        self.sent = {"intra_bytes": 0.0, "inter_bytes": 0.0, "collectives": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.__name__.split(".")[0], *args[:3])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, output: Any, given: Any, group: Any) -> None:
        if name == "allreduce_":
            # What has happened to the weights: a few bytes, which nothing counts.
            if output[0].dtype != torch.int32:
                ranks = self._ranks(given)
                self._add(2 * sum(tensor.nbytes for tensor in output) / len(ranks), ranks)
            return
        ranks = self._ranks(group)
        to_each_peer = {
            "alltoall_base_": lambda: given.nbytes / len(ranks),
            "_allgather_base_": lambda: given.nbytes,
            "allgather_into_tensor_coalesced_": lambda: sum(block.nbytes for block in given),
            "_reduce_scatter_base_": lambda: output.nbytes,
        }
        self._add(to_each_peer[name](), ranks)

    def _ranks(self, group: Any) -> list[int]:
        return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))

    def _add(self, to_each_peer: float, ranks: list[int]) -> None:
        sent, nodes = to_each_peer * (len(ranks) - 1), len({rank // self.per_node for rank in ranks})
        # Of a ring in rank order only the last rank of a node sends to another one.
        between = sent * nodes / len(ranks) if nodes > 1 else 0.0
        self.sent["collectives"] += 1
        self.sent["intra_bytes"] += sent - between
        self.sent["inter_bytes"] += between


class Blocks(nn.Module):
    """A matrix with a bias, one that is wide, and parameters with fewer rows than most worlds have ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH, bias=False)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).float().square().mean()


def check_step(
    shards: tuple[int, int],
    *,
    config: SDP4BitConfig,
    replicas: tuple[int, int] = (1, 1),
    reshard: bool = True,
    accumulation: int = 1,
    least_padding: bool = False,
    blocks: int = 1,
) -> float:
    """Compare a steady step of one rank as torch counts it, the library reports it and the planner plans it.

    Args:
        shards, replicas: nodes and ranks per node.
        blocks: of the nodes of shards, or if these are one node, of replicas.

    Returns:
        Values in the rows relative to the parameters.
    """
    grid, over = (
        Grid(nodes=nodes, ranks_per_node=ranks, blocks=min(blocks, nodes))
        for nodes, ranks in (shards, replicas)
    )
    world, per_node = grid.size * over.size, grid.ranks_per_node * over.ranks_per_node
    topology = per_node if blocks == 1 else (per_node, world // per_node // blocks)
    model = Blocks()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(least_padded_dim(parameter.shape, ranks=world) if least_padding else 0)

    with fake_world(world, rank=world - 1):
        mesh = init_device_mesh("cpu", (world,))
        if over.size > 1:
            mesh = init_device_mesh("cpu", (over.size, grid.size), mesh_dim_names=("replicate", "shard"))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICY, "shard_placement_fn": placement}
        for block in model.blocks:
            fully_shard(block, **options, reshard_after_forward=reshard)
        fully_shard(model, **options)
        comm = sdp4bit.quantize_communication(model, topology=topology, config=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the first step sends replicas in full precision
            with CountCollectives(per_node=per_node) as counter:
                for micro in range(accumulation):
                    model.set_requires_gradient_sync(micro == accumulation - 1)
                    model(torch.randn(1, WIDTH)).backward()
                optimizer.step()
                optimizer.zero_grad()
        reported = comm.stats()["last_step"]
    planned = [
        group_traffic(
            ShardedGroup(
                name=prefix,
                shapes=tuple(shape for name, shape in shapes.items() if name.startswith(prefix)),
                freed_after_forward=prefix != "norm" and reshard,
            ),
            grid=grid,
            replicas=over,
            config=config,
            accumulation=accumulation,
            least_padding=least_padding,
        )
        for prefix in ("blocks.0", "blocks.1", "norm")
    ]
    names = ("intra_bytes", "inter_bytes", "padding_bytes", "collectives")
    exchanges = [exchange for group in planned for exchange in group.exchanges]
    total = {name: sum(getattr(exchange, name) for exchange in exchanges) for name in names}
    assert {name: reported[name] for name in names} == {name: round(total[name]) for name in names}
    assert counter.sent == pytest.approx({name: total[name] for name in counter.sent}, rel=1e-12)
    rows = sum(group.row_numel for group in planned)
    return rows * grid.size / sum(group.group.numel for group in planned)


DEFAULT, PLAIN = SDP4BitConfig(), SDP4BitConfig(weights=None, gradients=None)
ALL_ROWS = replace(DEFAULT, gradients=GradientConfig(min_numel=0, pipeline_chunks=3, inside_one_node=True))
FULL_REPLICA = replace(ALL_ROWS, weights=WeightConfig(replica="full"))
ELEVEN = replace(
    SDP4BitConfig.preset("sdp4bit-w3g3.5"), gradients=replace(ALL_ROWS.gradients, inter_bits=3.5)
)
ONLY_INTER = replace(
    ALL_ROWS, gradients=replace(ALL_ROWS.gradients, pipeline_chunks=None, intra_bits=None, inter_bits=8)
)


@pytest.mark.parametrize(
    ("shards", "config"),
    [
        *(((4, 4), config) for config in (DEFAULT, PLAIN, ALL_ROWS, FULL_REPLICA, ELEVEN, ONLY_INTER)),
        ((4, 4), replace(ALL_ROWS, weights=WeightConfig(bits=None))),
        *(
            (one_level, config)
            for one_level in ((8, 1), (1, 8))
            for config in (DEFAULT, ALL_ROWS, FULL_REPLICA)
        ),
        ((4, 4), SDP4BitConfig(gradients=None)),
        pytest.param((512, 8), ALL_ROWS, marks=pytest.mark.slow),
    ],
)
def test_bytes_and_calls_of_every_configuration_are_as_planned(
    shards: tuple[int, int], config: SDP4BitConfig
) -> None:
    check_step(shards, config=config)


@pytest.mark.parametrize("config", [DEFAULT, ALL_ROWS, ELEVEN, PLAIN])
@pytest.mark.parametrize(("shards", "replicas"), [((1, 2), (2, 4)), ((2, 4), (2, 1))])
def test_hsdp_sends_the_planned_bytes(
    shards: tuple[int, int], replicas: tuple[int, int], config: SDP4BitConfig
) -> None:
    check_step(shards, replicas=replicas, config=config)


@pytest.mark.parametrize("config", [DEFAULT, ALL_ROWS])
@pytest.mark.parametrize(
    ("shards", "replicas", "blocks"), [((16, 8), (1, 1), 4), ((6, 1), (1, 1), 2), ((1, 8), (8, 1), 4)]
)
def test_blocks_of_nodes_send_the_planned_bytes(
    shards: tuple[int, int], replicas: tuple[int, int], blocks: int, config: SDP4BitConfig
) -> None:
    check_step(shards, replicas=replicas, config=config, blocks=blocks)


@pytest.mark.parametrize(("reshard", "accumulation"), [(False, 1), (True, 3)])
def test_gathers_are_counted_per_micro_batch(reshard: bool, accumulation: int) -> None:
    check_step((2, 4), config=ALL_ROWS, reshard=reshard, accumulation=accumulation)


def test_a_cut_along_another_dimension_pads_less_and_sends_the_planned_bytes() -> None:
    """96 rows on 128 ranks are sent as 128; the 512 columns of the same matrix are divided evenly."""
    padded, even = (check_step((16, 8), config=ALL_ROWS, least_padding=least) for least in (False, True))
    assert even < 1.01 < 1.15 < padded

"""One box with a slow link between its devices, such as PCIe: `topology=1` makes every rank its own node.

Layer: 2 and 4 real processes of one host over gloo, with FSDP2, HSDP and DDP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sdp4bit import SDP4BitConfig
from sdp4bit.traffic import Grid, Traffic
from tests import mutations
from tests.engines.ddp.test_hook import DDPRun
from tests.engines.fsdp2.test_bytes import count_sent_bytes
from tests.oracles.traffic import all_reduce_exchange, gradient_exchange, weight_refresh
from tests.ranks import first_rank_warns, run_ranks
from tests.tables import flat
from tests.toy import QUANTIZED, Result, Run, assert_close_to_plain, build

pytestmark = pytest.mark.gloo


def run_of(engine: str, config: Any, topology: Any = 1) -> Any:
    """Return a run; plain ones add in the order of the exchange, except with topology="auto"."""
    if engine == "DDP":
        run = DDPRun(config, topology=topology)
        run.comm = run.state
        return run
    shape = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")) if engine == "HSDP" else None
    return Run(build(mesh=mesh), config, topology=topology, ordered=topology == 1 and engine == "FSDP2")


def training(config: Any, engine: str, topology: Any = 1) -> Result:
    result: Result = run_of(engine, config, topology).train(2).finish()
    return result


def check(engine: str) -> None:
    world = dist.get_world_size()
    shards, replicas = {
        "FSDP2": (Grid(nodes=world, ranks_per_node=1), None),
        "HSDP": (Grid(nodes=world // 2, ranks_per_node=1), Grid(nodes=2, ranks_per_node=1)),
        "DDP": (Grid(nodes=1, ranks_per_node=1), Grid(nodes=world, ranks_per_node=1)),
    }[engine]

    # 1. The host's name makes all ranks one node. Nothing changes, and the warning names the switch.
    with first_rank_warns(r"on one node.* PCIe, attach with topology=1: each rank is its own"):
        assert training(SDP4BitConfig(), engine, "auto") == training(None, engine, "auto")

    # 2. With the switch training is exact without quantizers, and close with them.
    harmless = mutations.WEIGHTS if shards.size == 1 else ()
    assert_close_to_plain(training, engine, harmless=harmless)

    # 3. All bytes cross to another rank in 4 bits, as the formulas say.
    config = replace(QUANTIZED, separate_parameters=False)
    run = run_of(engine, config).train(1)
    with count_sent_bytes(1) as sent:
        run.train(1)
    expected, gradients = Traffic(), config.gradients
    for row in (group.view.shard_numel for group in run.comm.groups):
        expected += gradient_exchange(row, grid=shards, config=gradients)
        expected += weight_refresh(row, grid=shards, config=config.weights)
        expected += all_reduce_exchange(row, grid=replicas, config=gradients) if replicas else Traffic()
    stats = run.comm.stats()
    assert sent["inter"] == stats["last_step"]["inter_bytes"] == expected.inter_bytes
    assert sent["intra"] == stats["last_step"]["intra_bytes"] == 0
    assert stats["compression_ratio"] > 4

    # 4. The table shows a node per rank.
    table, over = flat(run.comm.explain(full=True)), replicas if engine == "DDP" else shards
    other = ", replicated 2 x 1 " if engine == "HSDP" else " "
    assert table.count(f" {over.nodes} x 1{other}") == len(run.comm.groups)
    assert "inter int4/128" in table and "intra int" not in table and "one node" not in table


@pytest.mark.like_plain
@pytest.mark.parametrize("engine", ["FSDP2", pytest.param("HSDP", marks=pytest.mark.slow), "DDP"])
@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_every_rank_is_a_node(world: int, engine: str) -> None:
    run_ranks(check, world, engine, timeout=300.0)

"""Who attaches, and to what: ranks without a model, host names, very many groups.

Layer: gloo, up to 4 processes.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, quantize_communication
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.collectives.topology import Nodes
from sdp4bit.engines import agreement, arrival
from sdp4bit.engines.agreement import AgreedNodes
from sdp4bit.engines.fsdp2.checks import unquantized_reasons
from sdp4bit.quantization import random
from tests import toy
from tests.ranks import first_rank_warns, on_ranks, run_ranks

pytestmark = pytest.mark.gloo

LIMIT = 120.0
ALERTS = SDP4BitConfig(gradients=toy.QUANTIZED.gradients, alerts=AlertConfig())


# -- ranks without a model ----------------------------------------------------------------------------


def open_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def trained(model: nn.Module, comm: Any) -> list[float]:
    losses = toy.train(model, toy.adamw(model), toy.batches(), 2)
    assert comm.stats()["steps"] == 2 and comm.stats()["last_step"]["inter_bytes"] > 0
    return losses


def attach_alone() -> list[float]:
    model = toy.build()
    return trained(model, quantize_communication(model, topology=1, config=ALERTS))


def attach_with_empty_ranks() -> list[float]:
    """All ranks attach; ranks 2 and 3 have no roots."""
    rank = dist.get_rank()
    pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    model = toy.build(mesh=pair) if rank < 2 else None
    opened = open_groups()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        comm = quantize_communication(model or [], topology=1, config=ALERTS)
    losses = [] if model is None else trained(model, comm)
    if model is None:  # its handle answers everything, and changes nothing
        assert open_groups() == opened
        assert comm.explain(full=True).count("\n") == 2
        assert comm.stats()["steps"] == 0 and comm.group_stats() == [] and comm.alerts() == []
        assert comm.state_dict() == {} and comm.audit()
        assert comm.measure()["weight_drift"] is None
        comm.on_alert(print).remove()
        comm.load_state_dict({})
        comm.mark_step()
        comm.resync()
    comm.remove()
    assert open_groups() == opened
    # A mesh of the ranks that have a model says nothing of the others.
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("inter", "intra"))
    comm = quantize_communication(model or [], topology=mesh)
    assert ("2 x 1" in comm.explain(full=True)) == (rank < 2)
    comm.remove()
    outside = r"this rank is not in its \(inter, intra\) mesh .* \[rank 1\]"
    wrong = DeviceMesh("cpu", [[0], [2]], mesh_dim_names=("inter", "intra"))
    with pytest.raises(ValueError, match=outside):
        quantize_communication(model or [], topology=wrong)
    with pytest.raises(ValueError, match=r"no rank has passed an FSDP2 model, all passed \[\]"):
        quantize_communication([])
    with pytest.raises(ValueError, match=r"config.seed: 0 \[ranks 0, 1, 2\], 3 \[rank 3\]"):
        quantize_communication(model or [], config=SDP4BitConfig(seed=3 if rank == 3 else 0))
    return losses


def test_ranks_without_roots_take_part_in_agreeing_only() -> None:
    losses = run_ranks(attach_with_empty_ranks, 4, timeout=LIMIT)
    assert losses[2:] == [[], []]
    assert run_ranks(attach_alone, 2, timeout=LIMIT) == losses[:2]


# -- host names ---------------------------------------------------------------------------------------


@contextmanager
def hosts(names: str, machines: str) -> Iterator[None]:
    """Give each rank the host name and the machine of its letter."""
    rank = dist.get_rank()
    with mock.patch.multiple(
        agreement, host_name=lambda: names[rank], machine_id=lambda: machines[rank].strip()
    ):
        yield


def warnings_of_hosts(names: str, ranks_per_node: str, **options: Any) -> list[str]:
    """Attach with these host names, a letter for each rank, under what torchrun says; return warnings."""
    rank = dist.get_rank()
    with (
        hosts(names, names),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        patch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
        if not ranks_per_node:
            patch.delenv("LOCAL_WORLD_SIZE")
        quantize_communication(toy.build(), **options).remove()
    ours = [warning for warning in caught if "LOCAL_WORLD_SIZE" in str(warning.message)]
    assert {warning.filename for warning in ours} <= {__file__}
    assert rank == 0 or not ours
    texts = [str(warning.message) for warning in ours]
    dist.broadcast_object_list(texts_of_first := [texts])
    return texts_of_first[0]


@on_ranks(4, timeout=LIMIT)
def test_host_names_that_torchrun_contradicts_are_warned_of() -> None:
    (together,) = warnings_of_hosts("aaaa", "2")
    assert "4 ranks on 'a', but LOCAL_WORLD_SIZE is 2" in together and "several nodes are treated" in together
    assert "pass topology=2 or give every node its own host name. If 4 is right, pass topology=4" in together
    (apart,) = warnings_of_hosts("abcd", "4")
    assert "1 ranks on 'a' and 3 more, but LOCAL_WORLD_SIZE is 4" in apart and "keeps a full replica" in apart
    for fitting_or_odd in (("aabb", "2"), ("aaaa", "4"), ("aaaa", ""), ("aaaa", "two"), ("aaaa", "-2")):
        assert warnings_of_hosts(*fitting_or_odd) == []
    assert warnings_of_hosts("aaaa", "2", topology=2) == []


@on_ranks(4, timeout=LIMIT)
def test_nodes_are_found_by_host_name_and_machine() -> None:
    """Machines of one name are nodes; names of one machine are too, with a warning."""
    with hosts("aaaa", "1122"):
        comm = quantize_communication(toy.build())
    assert comm.groups[0].layout.describe() == "2 x 2"
    assert "2 nodes by host name: a (machine 1), a (machine 2)" in " ".join(comm.explain().split()), (
        comm.explain()
    )
    comm.remove()
    together = (
        r"2 nodes on one machine, .* \('a': ranks 0, 1; 'b': ranks 2, 3\).* topology=4\. .* topology=2$"
    )
    with hosts("aabb", "1111"), first_rank_warns(together):
        comm = quantize_communication(toy.build())
    assert comm.groups[0].layout.describe() == "2 x 2"
    comm.remove()
    for names, machines in (("aabb", "1122"), ("aabb", "    ")):
        with hosts(names, machines), first_rank_warns("on one machine", firsts=()):
            quantize_communication(toy.build()).remove()
    with hosts("aabb", "1111"), first_rank_warns("on one machine", firsts=()):
        quantize_communication(toy.build(), topology=2).remove()


@on_ranks(1)
def test_a_job_of_one_rank_among_the_processes_of_a_launcher_is_warned_of() -> None:
    model = toy.build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_STEP_NUM_TASKS", "16")
        patch.setenv("SLURM_PROCID", "3")
        with pytest.warns(
            UserWarning, match=r"one rank, but Slurm's srun \(SLURM_STEP_NUM_TASKS=16, .* announces 16"
        ):
            quantize_communication(model).remove()
        patch.setenv("SLURM_STEP_NUM_TASKS", "1")
        with first_rank_warns("announces", firsts=()):
            quantize_communication(model).remove()


# -- very many groups ---------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_more_than_4096_groups_have_random_bits() -> None:
    count = (1 << 12) + 3
    layers = [fully_shard(nn.Linear(2, 2, bias=False)) for _ in range(count)]
    config = SDP4BitConfig(gradients=GradientConfig(min_numel=0), telemetry=None)
    comm = quantize_communication(layers, topology=1, config=config)
    model = nn.Sequential(*layers[-5:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, 2))
    last = comm.group_stats()[-1]
    assert last["weight_bits"] == last["gradient_bits"] == 4 and last["inter_bytes"] > 0


@on_ranks(4, timeout=LIMIT)
def test_what_random_bits_cannot_tell_apart_is_refused() -> None:
    model = toy.build()
    for limit, message in (
        ("MAX_RANKS", "4 data-parallel ranks are"),
        ("MAX_BUCKETS", "4 parameter groups are"),
    ):
        with (
            mock.patch.object(random, limit, 3),
            pytest.raises(ValueError, match=rf"{message} more than the 3 .*\[ranks 0, 1, 2, 3\]"),
        ):
            quantize_communication(model, topology=2)


@on_ranks(2)
def test_groups_that_were_sharded_after_attaching_are_refused_and_named() -> None:
    torch.manual_seed(0)
    model: Any = toy.ToyGPT()
    for block in model.blocks:
        fully_shard(block, mesh=toy.data_mesh(), mp_policy=toy.POLICY)
    comm = quantize_communication(model, topology=1)
    fully_shard(model, mesh=toy.data_mesh(), mp_policy=toy.POLICY)
    tokens, _ = next(toy.batches())
    with pytest.raises(
        RuntimeError, match=r"embed\.weight, position\.weight.* and 3 more, which would be sent in full"
    ):
        model(tokens)
    comm.remove()


@on_ranks(2)
def test_a_sharded_root_whose_blocks_alone_were_attached_is_refused() -> None:
    model = toy.build()
    comm = quantize_communication(list(model.blocks), topology=1)
    tokens, _ = next(toy.batches())
    with pytest.raises(RuntimeError, match=r"did not see the FSDP modules of embed\.weight"):
        model(tokens)
    comm.remove()


@on_ranks(2)
def test_a_block_that_was_sharded_after_attaching_is_refused_without_a_sharded_root_too() -> None:
    torch.manual_seed(0)
    model: Any = toy.ToyGPT()
    first, *others = model.blocks
    fully_shard(first, mesh=toy.data_mesh(), mp_policy=toy.POLICY)
    comm = quantize_communication(model, topology=1)
    for block in others:
        fully_shard(block, mesh=toy.data_mesh(), mp_policy=toy.POLICY)
    tokens, _ = next(toy.batches())
    with pytest.raises(RuntimeError, match=r"modules of blocks\.1\.\S+, blocks\.1\.\S+, .*sent in full"):
        model(tokens)
    comm.remove()
    assert len(quantize_communication(model, topology=1).groups) == len(model.blocks)


@on_ranks(3)
def test_ranks_that_have_not_called_are_named_by_the_first_that_has() -> None:
    """Rank 1 comes late; the others wait for it without an error."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdp4bit").addHandler(handler)
    model = toy.build()
    dist.barrier()  # a busy machine starts ranks at different times
    with mock.patch.object(arrival, "_PATIENCE", 1.0):
        if dist.get_rank() == 1:
            time.sleep(2)
        quantize_communication(model, topology=1).remove()
        quantize_communication(model, topology=1).remove()  # all are in time
    all_records: list[list[str]] = [[]] * 3
    dist.all_gather_object(all_records, records)
    ((first,), *others) = all_records
    assert first.startswith(
        "sdp4bit.quantize_communication: rank 0 has waited 1 s for rank 1 to call it. Call"
    )
    assert others == [[], []]


def test_gradients_of_a_skipped_shard_are_summed_over_replicas_in_full_precision() -> None:
    """A shard on one rank is not reduced, but its replicas on two nodes are, unless it is skipped."""
    one, two = (Nodes(ranks=ranks, nodes=len(ranks), ranks_per_node=1) for ranks in ((0,), (0, 1)))
    layouts = AgreedNodes(shards={one.ranks: one}, replicate={two.ranks: two})
    view: Any = SimpleNamespace(name="a", ranks=one.ranks, sharing_ranks={0, 1}, is_hybrid=True)

    def reasons(**skipped: Unquantized) -> tuple[Unquantized | None, ...]:
        return unquantized_reasons(view, layouts, config=SDP4BitConfig(), skipped=skipped)

    alone, skipped = Unquantized(Cause.ONE_RANK), Unquantized(Cause.SKIPPED)
    assert reasons() == (alone, alone, None)
    assert reasons(a=skipped) == (alone, skipped, skipped)

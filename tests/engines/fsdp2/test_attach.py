"""Who attaches, and to what: ranks without a model, host names, very many groups.

Layer: gloo, up to 4 processes.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, WeightConfig, quantize_communication
from sdp4bit.quantization import random
from tests import toy
from tests.ranks import on_ranks, run_ranks

LIMIT = 120.0
ALERTS = SDP4BitConfig(gradients=toy.QUANTIZED.gradients, alerts=AlertConfig())


# -- ranks without a model ----------------------------------------------------------------------------


def sum_over(group: Any = None) -> float:
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total, group=group)
    return total.item()


def group_count() -> int:
    return dist.distributed_c10d._world.group_count


def open_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def trained(model: nn.Module, comm: Any) -> list[float]:
    losses = toy.train(model, toy.adamw(model), toy.batches(), 3)
    assert comm.stats()["steps"] == 3 and comm.stats()["last_step"]["inter_bytes"] > 0
    assert "int4/2048 difference" in comm.explain()
    return losses


def idle_handle(comm: Any) -> None:
    """A handle without a model answers everything, and changes nothing."""
    assert comm.explain().count("\n") == 2
    assert comm.stats()["steps"] == 0 and comm.group_stats() == [] and comm.alerts() == []
    assert comm.state_dict() == {} and comm.audit()
    assert comm.measure()["weight_drift"] is None
    comm.on_alert(print).remove()
    comm.load_state_dict({})
    comm.mark_step()
    comm.resync()


def model_on_ranks_0_and_1(trainers: Any) -> tuple[nn.Module | None, Any]:
    if dist.get_rank() > 1:
        return None, None
    # A mesh of the group itself: init_device_mesh would ask all ranks of the job.
    return toy.build(mesh=DeviceMesh.from_group(trainers, "cpu", mesh_dim_names=("dp",))), trainers


def attach_apart() -> list[float]:
    """Ranks 0 and 1 attach, several times, while the others work among themselves; then all go on."""
    rank = dist.get_rank()
    trainers, others = dist.new_group([0, 1]), dist.new_group([2, 3])
    groups, losses = open_groups(), []
    if rank < 2:
        model, _ = model_on_ranks_0_and_1(trainers)
        opened = open_groups()
        for _ in range(2):  # the names of groups that are gone are not used again
            comm = quantize_communication(model, topology=1, config=ALERTS, process_group=trainers)
            assert open_groups() == opened + 2  # between nodes, for weights and for gradients
            losses = trained(model, comm)
            comm.remove()
            assert open_groups() == opened
        comm = quantize_communication(model, topology=1, process_group=trainers)
    else:
        assert sum_over(others) == 7
        assert open_groups() == groups
    # Names of groups are counted alike on all ranks, whoever attached.
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, group_count())
    assert len(set(gathered)) == 1
    assert sum_over(dist.new_group([1, 2])) == (5 if rank in (1, 2) else 1 + rank)
    assert sum_over() == 10
    if rank < 2:
        trained_again = toy.train(model, toy.adamw(model), toy.batches(), 1)
        comm.remove()
        losses += trained_again
    else:
        with pytest.raises(ValueError, match=rf"rank {rank} is not in process_group"):
            quantize_communication([], process_group=trainers)
    refused_on_trainers(model if rank < 2 else None, trainers, others)
    return losses


def refused_on_trainers(model: nn.Module | None, trainers: Any, others: Any) -> None:
    """What does not fit is refused on the ranks that attach, alike."""
    with pytest.raises(TypeError, match=r"process_group='dp' must be a torch.distributed.ProcessGroup"):
        quantize_communication([], process_group="dp")  # type: ignore[arg-type]
    if model is None:
        return
    texts = []
    first = dist.get_rank() == 0
    for options in (
        {"topology": 1 if first else 4},
        {"topology": 3},
        {"config": "nothing" if first else None},
        {"skip": ["no.such"]},
    ):
        with pytest.raises(ValueError) as caught:
            quantize_communication(model, process_group=trainers, **options)
        texts.append(str(caught.value))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, texts, group=trainers)
    assert gathered == [texts, texts]
    parts = (
        "different topologies; pass the same to all: 1 [rank 0], 4 [rank 1]",
        "topology=3 ranks per node does not divide the 4 ranks",
        "unknown preset 'nothing': use one of baseline, qw, qwd, ulq, tlq, tlq-hs, sdp4bit-paper, "
        "sdp4bit, sdp4bit-w2g3, sdp4bit-w2g2 [rank 0]",
        "skip='no.such' matches no FSDP module; there are (root), blocks.0",
    )
    for part, text in zip(parts, texts, strict=True):
        assert part in text


def test_ranks_that_are_not_in_the_process_group_need_not_know() -> None:
    apart = run_ranks(attach_apart, 4, timeout=LIMIT)
    assert apart[2:] == [[], []]
    assert len(apart[0]) == 4 and apart[0] != apart[1]
    # The same as in a job of the two alone.
    assert run_ranks(attach_alone, 2, timeout=LIMIT) == [losses[:3] for losses in apart[:2]]


def attach_alone() -> list[float]:
    model = toy.build()
    for _ in range(2):
        comm = quantize_communication(model, topology=1, config=ALERTS)
        losses = trained(model, comm)
        comm.remove()
    return losses


def attach_with_empty_ranks() -> list[float]:
    """All ranks attach; ranks 2 and 3 have no roots, and pass a topology that nothing depends on."""
    rank, trainers = dist.get_rank(), dist.new_group([0, 1])
    groups = open_groups()
    model, _ = model_on_ranks_0_and_1(trainers)
    opened = open_groups()
    losses: list[float] = []
    for round_ in range(2):
        roots = model if model is not None else [[], ()][round_]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            topology = 1 if model is not None else "auto"
            comm = quantize_communication(roots, topology=topology, config=ALERTS)
        if model is not None:
            losses = trained(model, comm)
        else:
            assert open_groups() == groups
            idle_handle(comm)
        assert sum_over() == 10
        comm.remove()
        assert open_groups() == opened
        with pytest.raises(RuntimeError, match="has been removed"):
            comm.state_dict()
    # A mesh of the ranks that have a model says nothing of the others.
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("inter", "intra"))
    quantize_communication(model or [], topology=mesh).remove()
    if rank < 2:
        comm = quantize_communication(model, topology=mesh, process_group=trainers)
        assert "2 x 1" in comm.explain()
        comm.remove()
    with pytest.raises(ValueError, match=r"no rank has passed an FSDP2 model, all passed \[\]"):
        quantize_communication([])
    with pytest.raises(ValueError, match=r"config.seed: 3 \[rank 3\]|config.seed: 0 \[ranks 0, 1, 2\]"):
        quantize_communication(model or [], config=SDP4BitConfig(seed=3 if rank == 3 else 0))
    return losses


def test_ranks_without_roots_take_part_in_agreeing_only() -> None:
    losses = run_ranks(attach_with_empty_ranks, 4, timeout=LIMIT)
    assert losses[2:] == [[], []]
    assert run_ranks(attach_alone, 2, timeout=LIMIT) == losses[:2]


@on_ranks(4, timeout=LIMIT)
def test_a_process_group_must_hold_all_ranks_of_the_model() -> None:
    part = dist.new_group([0, 1, 2])
    model = toy.build()
    if dist.get_rank() < 3:
        outside = (
            r"\(root\) is sharded over 4 ranks, of which rank 3 are not in process_group \(ranks 0, 1, 2\)"
        )
        with pytest.raises(ValueError, match=outside):
            quantize_communication(model, process_group=part)
    quantize_communication(model, topology=2, process_group=dist.new_group(range(4))).remove()


# -- host names ---------------------------------------------------------------------------------------


def warnings_of_hosts(hosts: str, ranks_per_node: str, **options: Any) -> list[str]:
    """Attach with these host names, a letter for each rank, under what torchrun says; return warnings."""
    rank = dist.get_rank()
    host = mock.patch("sdp4bit.engines.agreement.host_name", return_value=hosts[rank])
    with host, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setenv("LOCAL_WORLD_SIZE", ranks_per_node)
        if not ranks_per_node:
            patch.delenv("LOCAL_WORLD_SIZE")
        quantize_communication(toy.build(), **options).remove()
    ours = [warning for warning in caught if "LOCAL_WORLD_SIZE" in str(warning.message)]
    assert {warning.filename for warning in ours} <= {__file__}
    return [str(warning.message) for warning in ours]


def misleading_hosts() -> list[list[str]]:
    part = dist.new_group([0, 1, 2, 3])
    return [
        warnings_of_hosts("aaaa", "2"),
        warnings_of_hosts("abcd", "4"),
        *(warnings_of_hosts(*fitting) for fitting in (("aabb", "2"), ("aaaa", "4"), ("aaaa", ""))),
        *(warnings_of_hosts("aaaa", odd) for odd in ("two", "-2")),
        warnings_of_hosts("aaaa", "2", topology=2),
        warnings_of_hosts("aaaa", "2", process_group=part),
    ]


def test_host_names_that_torchrun_contradicts_are_warned_of() -> None:
    results = run_ranks(misleading_hosts, 4, timeout=LIMIT)
    assert results.count(results[0]) == 4
    (together,), (apart,), *quiet, (with_group,) = results[0]
    assert not any(quiet)
    assert "4 on 'a'. LOCAL_WORLD_SIZE says 2" in together and "several nodes exchange as if" in together
    assert "pass topology=2, or give every node a host name of its own. If not, pass topology=4" in together
    assert "1 on 'a' and 3 more. LOCAL_WORLD_SIZE says 4" in apart and "keeps a whole replica" in apart
    assert with_group == together


@on_ranks(4, timeout=LIMIT)
def test_a_part_of_the_ranks_of_a_node_is_no_contradiction() -> None:
    """Of four ranks on a node, two hold the model: fewer than torchrun started is no contradiction."""
    trainers = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return
    mesh = DeviceMesh.from_group(trainers, "cpu", mesh_dim_names=("dp",))
    found = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for said in ("4", "1"):
            patch.setenv("LOCAL_WORLD_SIZE", said)
            quantize_communication(toy.build(mesh=mesh), process_group=trainers).remove()
            found.append(sum("LOCAL_WORLD_SIZE" in str(warning.message) for warning in caught))
    assert found == [0, 1]


# -- very many groups ---------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_more_than_4096_groups_have_random_bits() -> None:
    count = (1 << 12) + 3
    layers = [fully_shard(nn.Linear(2, 2, bias=False)) for _ in range(count)]
    config = SDP4BitConfig(
        weights=WeightConfig(rounding="stochastic"), gradients=GradientConfig(min_numel=0), telemetry=None
    )
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

"""FSDP2 integration, life of a handle: attach, convert, report, remove; FSDP2 set otherwise meanwhile.

Layer: real processes over gloo, 2 nodes x 2 ranks, or x 1 rank for what is the same on one level.
"""

from __future__ import annotations

import gc
import random
import resource
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from sdp4bit import AlertConfig, AuditConfig, SDP4BitConfig, quantize_communication
from sdp4bit.engines.fsdp2.events import StepObserver
from sdp4bit.engines.fsdp2.torch_internals import param_groups_of
from sdp4bit.traffic import format_bytes
from tests import toy
from tests.ranks import on_ranks, run_ranks
from tests.tables import explained
from tests.toy import LOSSLESS, QUANTIZED, Run, ToyGPT, adamw, assert_close_to_plain, build, shard

pytestmark = pytest.mark.gloo


def materializing(config: SDP4BitConfig | None) -> list[float]:
    """The model is attached while it has no storage; then its parameters get another type."""
    with torch.device("meta"):
        model = ToyGPT()
    run = Run(shard(model), config, topology=1)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            full = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
    model.to(torch.bfloat16)
    run.optimizer = adamw(model)
    return run.train(2).finish()


@pytest.mark.like_plain
@on_ranks(2)
def test_models_may_be_attached_without_storage_and_converted_later() -> None:
    assert_close_to_plain(materializing)


@on_ranks(2)
def test_a_removed_handle_keeps_its_statistics_and_refuses_the_rest() -> None:
    run = Run(build(), replace(QUANTIZED, alerts=AlertConfig(weight_drift=1e-9)), topology=1).train(2)
    comm = run.comm
    before = [comm.stats(), comm.group_stats(), comm.alerts()]
    assert comm.stats()["compression_ratio"] > 1 and comm.alerts()
    for _ in range(2):
        comm.remove()
        assert [comm.stats(), comm.group_stats(), comm.alerts()] == before
        assert comm.explain(full=True) == "removed: the model communicates as without sdp4bit"
    for act in (
        *(comm.measure, comm.audit, comm.resync, comm.mark_step, comm.state_dict),
        *(lambda: comm.load_state_dict({}), lambda: comm.on_alert(print), lambda: comm.time_steps(print)),
        lambda: comm.full_precision().__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"removed from its model: only stats\(\)"):
            act()


def optimizer_hooks() -> int:
    hooks = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    return sum(map(len, hooks))


def hooks_of(model: nn.Module) -> list[Any]:
    """Return everything that an attachment may leave behind."""
    fsdp = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = {id(group): group for module in fsdp for group in param_groups_of(module)}.values()
    return [
        optimizer_hooks(),
        [len(getattr(m, name)) for m in model.modules() for name in vars(m) if name.endswith("_hooks")],
        [
            (type(g._all_gather_comm), type(g._reduce_scatter_comm), g.force_sum_reduction_for_comms)
            for g in groups
        ],
    ]


def remove_after_the_process_groups(folder: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for starts_again in (False, True):
        run = Run(build(), None).train(1)
        hooks = hooks_of(run.model)
        comm = quantize_communication(run.model, topology=1, config=QUANTIZED)
        run.train(1)
        dist.barrier()
        dist.destroy_process_group()
        if not starts_again:
            comm.remove()
        name = f"file://{folder}/again-{starts_again}"
        dist.init_process_group("gloo", init_method=name, rank=rank, world_size=world)
        comm.remove()
        assert not comm.is_attached and hooks_of(run.model) == hooks


def test_a_handle_can_be_removed_after_the_process_groups_are_destroyed(tmp_path: Path) -> None:
    run_ranks(remove_after_the_process_groups, 2, str(tmp_path))


@on_ranks(2)
def test_a_refresh_that_has_failed_leaves_nothing_half_removed() -> None:
    run = Run(build(), None).train(1)
    hooks = hooks_of(run.model)
    comm = quantize_communication(run.model, topology=1, config=QUANTIZED)
    run.train(1)
    lost = mock.patch.object(comm.groups[0].weights.replica, "wait", side_effect=RuntimeError("lost"))
    with lost, pytest.raises(RuntimeError, match="lost"):
        comm.remove()
    assert not comm.is_attached and hooks_of(run.model) == hooks


@on_ranks(1)
def test_steps_are_counted_where_nothing_is_sent() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    optimizers = [adamw(run.model, params=[parameter]) for parameter in run.model.parameters()]
    for step in (1, 2):
        run.train(1)
        run.evaluate()
        assert run.comm.stats()["steps"] == step
    # Every parameter has an optimizer of its own: they take a step together.
    for step in (3, 4):
        run.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            assert run.comm.stats()["steps"] == step
    run.comm.mark_step()
    assert run.comm.stats()["steps"] == 5


@on_ranks(1)
def test_an_optimizer_of_another_model_is_looked_at_once() -> None:
    """Unless it is given other parameters: those of the model, too."""
    run = Run(build(), QUANTIZED, topology=1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1)) for _ in range(3)])
    table = StepObserver._table
    with mock.patch.object(StepObserver, "_table", autospec=True, side_effect=table) as tables:
        for _ in range(5):
            other.step()
        assert tables.call_count == 1
        run.train(1)
        for _ in range(5):
            other.step()
        assert tables.call_count == 1
        assert run.comm.stats()["steps"] == 1
        other.param_groups[0]["params"][1] = next(run.model.parameters())
        other.step()
        other.step()
        assert run.comm.stats()["steps"] == 3


@on_ranks(2)
def test_a_dropped_model_is_collected_with_its_handle_or_without_it_after_removal() -> None:
    gc.disable()
    collecting = register_optimizer_step_post_hook(lambda *_: gc.collect())
    dropped, removed, other = (Run(build(), QUANTIZED, topology=1).train(1) for _ in range(3))
    handle = removed.comm
    handle.remove()
    dead = [weakref.ref(each) for each in (dropped.comm, dropped.comm._state, dropped.model, removed.model)]
    del removed, dropped
    other.train(2)  # the dropped model is collected while the optimizer calls its hooks
    assert [reference() for reference in dead] == [None] * 4
    collecting.remove()
    gc.enable()
    hooks = optimizer_hooks()
    quantize_communication(build(), topology=1)
    assert optimizer_hooks() == hooks


def build_tiny() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for module in (*model, model):
        fully_shard(module, mesh=toy.data_mesh(), mp_policy=toy.POLICY)
    return model


def growth(config: SDP4BitConfig | None) -> float:
    """Return by how many MiB resident memory grows in 1,800 steps, after 200 others."""
    run = Run(build_tiny(), config, topology=1)
    x, sizes = torch.ones(4, 64), []
    for step in range(1, 2001):
        run.model(x).float().square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if config is not None and step % 100 == 0:
            run.comm.state_dict()
            run.comm.measure()
        if step in (200, 2000):
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]))
    return (sizes[1] - sizes[0]) * resource.getpagesize() / 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory of Linux")
@on_ranks(2, timeout=280)
def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    """1 MiB in 1,800 steps is 580 bytes a step: less than one small tensor with its Python object.

    The smallest row of the model takes 4 kB. The allocator's own growth is that of plain FSDP2.
    """
    attached = growth(replace(QUANTIZED, audit=AuditConfig(interval=50)))
    assert attached < growth(None) + 1.0


@on_ranks(2)
def test_the_global_random_state_is_not_touched() -> None:
    model = build()
    state, python_state = torch.get_rng_state(), random.getstate()
    run = Run(model, QUANTIZED, topology=1).train(2)
    run.evaluate()
    run.comm.resync()
    run.evaluate()
    run.comm.stats()
    run.comm.explain(full=True)
    run.comm.state_dict()
    run.comm.remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


@on_ranks(4)
def test_reports_add_up() -> None:
    run = Run(build(), None)
    comm = quantize_communication(run.model, topology=2, skip=["norm"])
    nothing = {"intra_bytes": 0, "inter_bytes": 0, "padding_bytes": 0, "collectives": 0}
    assert comm.stats() == {
        "steps": 0,
        "last_step": nothing,
        "total": nothing,
        "compression_ratio": None,
        "total_compression_ratio": None,
        "full_refreshes": 0,
        "sampled_step": None,
        "auto": None,
        "weight_drift": None,
        "weight_error": None,
        "gradient_error": None,
        "nonfinite_groups": None,
    }
    assert [group["compression_ratio"] for group in comm.group_stats()] == [None] * 4
    assert comm.log_values() == {}
    described = str(comm)
    assert described.startswith(
        "FSDPCommHandle: 4 parameter groups on 2 x 2 ranks (nodes x ranks per node); "
    )
    assert described.endswith(" are quantized")
    header, rule, *lines = comm.explain(full=True).splitlines()
    names = [group.view.name for group in comm.groups]
    numbers = [line for line in lines if not line.startswith(" ")]
    assert names == ["(root)", "blocks.0", "blocks.1", "norm"]
    assert [line.split()[0] for line in numbers] == [*names, "total"]
    assert all(line.split()[-2:] == ["-", "-"] for line in numbers)
    assert header.split()[0] == "group" and set(rule) == {"-"}
    assert max(map(len, [header, rule, *lines])) <= 80

    steps, plain_bytes = [], 0.0
    for _ in range(2):
        run.train(1)
        reported, table = comm.stats(), comm.explain(full=True)
        steps.append(reported["last_step"])
        plain_bytes += reported["compression_ratio"] * steps[-1]["inter_bytes"]
        *_, total, hint = [line for line in table.splitlines() if not line.startswith(" ")]
        numbers = [int(cell.replace(",", "")) for cell in total.split()[-2:]]
        assert hint.startswith("comm.time_steps(step) measures")
        assert numbers == [steps[-1]["intra_bytes"], steps[-1]["inter_bytes"]]
    assert reported["steps"] == 2
    for name in nothing:
        assert reported["total"][name] == pytest.approx(sum(step[name] for step in steps), abs=2)
    measured = comm.measure()
    assert 0 < measured["weight_drift"] < 0.1 and measured["gradient_error"] is None  # step 10 has not come
    assert 2 < reported["total_compression_ratio"] < reported["compression_ratio"] < 16
    assert reported["total_compression_ratio"] == pytest.approx(
        plain_bytes / reported["total"]["inter_bytes"]
    )
    logged = {
        "sdp4bit/inter_bytes": float(reported["last_step"]["inter_bytes"]),
        "sdp4bit/ratio": reported["compression_ratio"],
    }
    assert comm.log_values() == logged
    assert comm.log_values(full=True) == {
        **logged,
        "sdp4bit/intra_bytes": float(reported["last_step"]["intra_bytes"]),
        "sdp4bit/total_ratio": reported["total_compression_ratio"],
        "sdp4bit/full_refreshes": float(reported["full_refreshes"]),
    }
    sent = format_bytes(reported["last_step"]["inter_bytes"])
    assert f"; step 2: {sent} inter-node ({reported['compression_ratio']:.2f}x)" in str(comm)
    block, norm = (explained(table)[name] for name in ("blocks.0", "norm"))
    assert "2 x 2" in block and "int4/2048 difference, node replica" in block
    assert "intra int8/128, inter int4/128, Hadamard" in block
    assert norm.count("skipped by 'norm'") == 2
    rows = comm.groups[3].view.shard_numel
    # Two bf16 gathers and one fp32 reduction over the ring, half of it between nodes.
    sent = next(line for line in table.splitlines() if line.startswith("norm")).split()[-2:]
    assert [int(cell.replace(",", "")) for cell in sent] == [3 * rows * 4] * 2


def train_compiled(backend: str | None) -> list[float]:
    """Return losses of a run; every step is noticed as it is taken."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 64))
    comm = quantize_communication(model, topology=1)
    optimizer = adamw(model, fused=False, foreach=False)
    step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    data = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for number in range(1, 4):
        loss = model(data).pow(2).mean()
        loss.backward()
        step()
        assert comm.stats()["steps"] == number
        optimizer.zero_grad()
        losses.append(loss.item())
    comm.remove()
    return losses


@pytest.mark.slow
@on_ranks(2, timeout=180)
def test_steps_of_a_compiled_optimizer_are_noticed() -> None:
    # A compiled Adam rounds otherwise: without any quantization the third loss differs by 1.5e-5 of itself.
    assert train_compiled("aot_eager") == pytest.approx(train_compiled(None), rel=1e-4)


# -- removal ------------------------------------------------------------------------------------------


def remove_and_attach_again(reshard: bool) -> None:
    """Also where FSDP2 left parameters unsharded: the root, and blocks that are not resharded."""
    model, plain = (build(reshard_after_forward=reshard) for _ in range(2))
    hooks = hooks_of(model)
    comm = quantize_communication(model, topology=1)
    assert all(now != before for now, before in zip(hooks_of(model), hooks, strict=True))
    toy.train(model, adamw(model), toy.batches(), 1)
    plain.load_state_dict(model.state_dict())
    tokens, _ = batch = next(toy.batches(seed=1))
    with torch.no_grad():
        assert not torch.equal(model(tokens), plain(tokens))  # the replica is not the main weights
        comm.remove()
        assert torch.equal(model(tokens), plain(tokens))
    comm.remove()
    assert hooks_of(model) == hooks_of(plain)
    for each in (model, plain):
        toy.loss_of(each, batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    again = quantize_communication(model, topology=1, config=LOSSLESS)
    losses = [toy.train(each, adamw(each), toy.batches(), 2) for each in (model, plain)]
    assert losses[0] == losses[1]
    assert (comm.stats()["steps"], again.stats()["steps"]) == (1, 2)


@on_ranks(2)
def test_a_handle_can_be_removed_and_its_model_attached_again() -> None:
    remove_and_attach_again(True)
    remove_and_attach_again(False)


# -- settings of FSDP2 -------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    toy.loss_of(model, next(toy.batches())).backward()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def divide_later(config: SDP4BitConfig) -> None:
    models = [build(), build()]
    for model in models:
        quantize_communication(model, topology=1, config=config)
    fsdp = [module for module in models[1].modules() if isinstance(module, FSDPModule)]
    # A power of two, so that FSDP2 may divide the sum, or let the communication multiply it.
    for factor, forces_sum in ((1.0, False), (8.0, False), (8.0, True)):
        for module in fsdp:
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(forces_sum)
        for usual, divided in zip(*map(gradients_of, models), strict=True):
            assert torch.equal(usual * 2 / factor, divided)


def test_a_divide_factor_set_later_divides_gradients_quantized_or_not() -> None:
    exact = replace(QUANTIZED, gradients=replace(QUANTIZED.gradients, min_numel=1 << 30))
    for config in (QUANTIZED, exact):
        run_ranks(divide_later, 2, config)


@on_ranks(4)
def test_resharding_to_a_part_of_the_ranks_later_is_refused_when_it_matters() -> None:
    model = build()
    quantize_communication(model, topology=2)
    # Stands in for an FSDP2 whose set_reshard_after_forward accepts an int, as fully_shard does.
    like = build(reshard_after_forward=2)
    for block, other in zip(model.blocks, like.blocks, strict=True):
        (group,), (source,) = map(param_groups_of, (block, other))
        for part in (group, *group.fsdp_params):
            part.post_forward_mesh_info = source.post_forward_mesh_info
    with pytest.raises(ValueError, match=r"blocks\.1: gathered over 2 instead of 4 ranks"):
        gradients_of(model)

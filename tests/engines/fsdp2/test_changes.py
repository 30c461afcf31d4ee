"""What changes after attaching: the optimizer's step is compiled, the handle removed, FSDP2 set otherwise.

Layer: gloo, up to 4 processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sdp4bit import quantize_communication
from sdp4bit.engines.fsdp2.torch_internals import param_groups_of
from tests import toy
from tests.ranks import on_ranks, run_ranks

LIMIT = 150.0


# -- compiled steps -----------------------------------------------------------------------------------


def train_compiled(backend: str | None) -> list[float]:
    """Return losses of a run; every step is noticed as it is taken."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(64, 64))
    comm = quantize_communication(model, topology=1)
    optimizer = toy.adamw(model, fused=False, foreach=False)
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
    assert comm.stats()["last_step"]["inter_bytes"] > 0
    comm.remove()
    return losses


@on_ranks(2, timeout=180)
def test_steps_of_a_compiled_optimizer_are_noticed() -> None:
    expected = train_compiled(None)
    assert expected[-1] < expected[0]
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        assert train_compiled(backend) == expected


# -- removal ------------------------------------------------------------------------------------------


def outputs_after_removal(reshard: bool) -> None:
    """Also where FSDP2 left parameters unsharded: the root, and blocks that are not resharded."""
    model = toy.build(reshard_after_forward=reshard)
    comm = quantize_communication(model, topology=2)
    toy.train(model, toy.adamw(model), toy.batches(), 3)
    plain = toy.build(reshard_after_forward=reshard)
    plain.load_state_dict(model.state_dict())
    tokens, _ = batch = next(toy.batches(seed=1))
    with torch.no_grad():
        assert not torch.equal(model(tokens), plain(tokens))  # the replica is not the main weights
        comm.remove()
        assert torch.equal(model(tokens), plain(tokens))
    for each in (model, plain):
        toy.loss_of(each, batch).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


@on_ranks(4, timeout=LIMIT)
def test_outputs_after_removal_are_those_of_plain_fsdp2() -> None:
    outputs_after_removal(True)
    outputs_after_removal(False)


# -- settings of FSDP2 -------------------------------------------------------------------------------


def failure_of(action: Callable[[], Any]) -> list[str]:
    """Return what the action raises on each rank."""
    with pytest.raises(ValueError) as caught:
        action()
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    return texts


def change_after_attaching(change: str) -> list[str]:
    """Attach, take a step, change what FSDP2 does, and return the error of each rank in the next step."""
    model = toy.build()
    comm = quantize_communication(model, topology=2)
    optimizer, data = toy.adamw(model), toy.batches()
    toy.train(model, optimizer, data, 1)
    if change == "reshard to a part":
        with pytest.raises(ValueError, match="reshard_after_forward should be a bool"):
            model.set_reshard_after_forward(2)
        # Stands in for an FSDP2 that accepts an int here, as fully_shard does.
        like = toy.build(reshard_after_forward=2)
        for block, other in zip(model.blocks, like.blocks, strict=True):
            (group,), (source,) = map(param_groups_of, (block, other))
            for part in (group, *group.fsdp_params):
                part.post_forward_mesh_info = source.post_forward_mesh_info
    else:
        model.set_force_sum_reduction_for_comms(False)
        for block in model.blocks:
            block.set_force_sum_reduction_for_comms(False)
            block.set_gradient_divide_factor(2.0)
    assert comm.stats()["steps"] == 1
    return failure_of(lambda: toy.train(model, optimizer, data, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reshard to a part", "blocks.1: gathered over 2 instead of 4 ranks; an int reshard_after_forward"),
        ("divide before the sum", "blocks.1: FSDP2 asks for the reduction RedOpType.PREMUL_SUM"),
    ],
)
def test_changes_that_cannot_be_quantized_are_refused_when_they_matter(change: str, message: str) -> None:
    texts = run_ranks(change_after_attaching, 4, change, timeout=LIMIT)
    assert all(text.startswith(message) for text in texts[0])
    assert len(set(texts[0])) == 1

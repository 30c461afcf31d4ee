"""Gradients that are read in the backward pass, and inputs of a step that differ between ranks.

Layer: 4 real processes over gloo, 2 nodes x 2 ranks. Without quantizers results equal plain FSDP2's bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sdp4bit import SDP4BitConfig, quantize_communication
from sdp4bit.engines.fsdp2.torch_internals import param_groups_of
from tests.ranks import on_ranks
from tests.toy import IDENTITY, POLICY, VOCABULARY, Result, Run, assert_equal, build, data_mesh

WIDTH = 30


class Layer(nn.Module):
    """Three scales: one of four ranks holds none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)).unflatten(-1, (3, WIDTH // 3))
        return x + (y * self.scale[:, None]).flatten(-2)


class Scaled(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale[0]


# -- inputs that differ between ranks ---------------------------------------------------------------------


def scaled_run(config: SDP4BitConfig | None, skip: list[str]) -> Run:
    """Return a run whose optimizer has the parameters that its rank holds a part of."""
    torch.manual_seed(0)
    model = Scaled()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data_mesh(), mp_policy=POLICY)
    stock = {
        group: group._reduce_scatter_comm for m in skip for group in param_groups_of(model.get_submodule(m))
    }
    parameters = [p for p in model.parameters() if p.to_local().numel()]
    run = Run(model, None, ordered=config is None, params=parameters)
    if config is None:
        for group, reduce in stock.items():
            group._reduce_scatter_comm = reduce
    else:
        run.comm = quantize_communication(model, topology=2, config=config, skip=skip)
    return run


def hook_on_rank_1(run: Run) -> None:
    if dist.get_rank() == 1:
        weight = run.model.blocks[1].linear.weight
        weight.register_post_accumulate_grad_hook(
            lambda p: run.losses.append(p.grad.to_local().norm().item())
        )


def load_on_rank_2(run: Run) -> None:
    if dist.get_rank() == 2:
        state = run.model.state_dict()
        run.model.load_state_dict({name: value.detach() * 0.9 for name, value in state.items()})


def edit_on_rank_3(run: Run) -> None:
    if dist.get_rank() == 3:
        run.model.blocks[2].linear.weight.to_local().data.mul_(1.5)


def mark_on_rank_0(run: Run) -> None:
    if dist.get_rank() == 0 and run.comm is not None:
        run.comm.mark_step()


def gradient_on_rank_3(run: Run) -> None:
    """One rank has not cleared all gradients."""
    if dist.get_rank() == 3:
        weight = run.model.blocks[0].linear.weight
        weight.grad = torch.ones_like(weight)


def differing(config: SDP4BitConfig | None, skip: list[str]) -> Result:
    run = scaled_run(config, skip)
    run.train(2)  # gradients of empty shards are left over from the first step
    for differ in (hook_on_rank_1, load_on_rank_2, edit_on_rank_3, mark_on_rank_0, gradient_on_rank_3):
        run.model.reshard()
        differ(run)
        run.train(1)
    return run.finish()


@pytest.mark.parametrize(
    ("config", "skip"),
    [
        pytest.param(IDENTITY, [], id="usual"),
        pytest.param(replace(IDENTITY, weights=None), [], id="weights of FSDP2"),
        pytest.param(IDENTITY, ["blocks.1"], id="skipped"),
    ],
)
@on_ranks(4, timeout=60)
def test_inputs_may_differ_between_ranks(config: SDP4BitConfig, skip: list[str]) -> None:
    assert_equal(differing(config, skip), differing(None, skip))


# -- readers of gradients in the backward pass -------------------------------------------------------------


def read_in_module_hook(run: Run) -> None:
    """A hook of the first block reads gradients of the later ones."""
    later = [*run.model.blocks[1].parameters(), *run.model.norm.parameters(), *run.model.head.parameters()]

    def read(*_: object) -> None:
        run.losses.extend(p.grad.to_local().norm().item() for p in later)

    run.model.blocks[0].fc2.register_full_backward_hook(read)
    run.train(2)


def clip_at_the_end(run: Run) -> None:
    """A hook of the output queues a callback, which autograd calls after FSDP2's own."""

    def clip() -> None:
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.losses.append(norm.full_tensor().item())

    def queue(_: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(clip)

    for _ in range(2):
        tokens, targets = next(run.data)
        output = run.model(tokens)
        output.register_hook(queue)
        F.cross_entropy(output.float().flatten(0, 1), targets.flatten()).backward()
        run.step()


READERS: dict[str, Callable[[Run], None]] = {
    "a module's hook": read_in_module_hook,
    "a callback": clip_at_the_end,
}


def reading(config: SDP4BitConfig | None, reader: str) -> Result:
    run = Run(build(), config, ordered=True)
    READERS[reader](run)
    return run.finish()


@pytest.mark.parametrize("reader", READERS)
@on_ranks(4)
def test_gradients_are_complete_when_the_backward_pass_is_read(reader: str) -> None:
    assert_equal(reading(IDENTITY, reader), reading(None, reader))

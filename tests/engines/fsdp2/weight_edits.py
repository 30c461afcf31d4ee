"""Ways in which users edit or load the weights of a model that trains."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, update_bn

from tests.engines.fsdp2.edited_runs import EditedRun, way
from tests.toy import POLICY, SEQUENCE, VOCABULARY, ToyGPT, adamw, batches, build, data_mesh, shard


@way()
def averaged_model(run: EditedRun) -> None:
    average = AveragedModel(ToyGPT())
    averaged = run.another(shard(average.module))
    for _ in range(3):
        run.train(1)
        average.update_parameters(run.model)
        averaged.evaluate()
    run.model.load_state_dict(average.module.state_dict())


class Normed(nn.Module):
    """Batch normalization, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, 16), nn.BatchNorm1d(SEQUENCE)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens).float()))


def normed() -> nn.Module:
    torch.manual_seed(0)
    model = Normed()
    fully_shard(model.norm, mesh=data_mesh())
    fully_shard(model.head, mesh=data_mesh(), mp_policy=POLICY)
    return fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)


@way(normed)
def batch_norm_statistics(run: EditedRun) -> None:
    for parameter in run.params:
        parameter.data.mul_(0.5)
    loader = [next(batches(seed=seed))[0] for seed in range(2)]
    update_bn(loader, run.model)
    run.model.reshard()
    run.model.eval()
    run.evaluate()
    run.model.train()


@way()
def averages_copied_in_and_out(run: EditedRun) -> None:
    averages = [parameter.detach().clone() for parameter in run.params]
    for _ in range(2):
        run.train(1)
        for average, parameter in zip(averages, run.params, strict=True):
            average.mul_(0.5).add_(parameter.detach(), alpha=0.5)
    stored = [parameter.detach().clone() for parameter in run.params]
    for average, parameter in zip(averages, run.params, strict=True):
        parameter.data.copy_(average.data)
    run.evaluate()
    for kept, parameter in zip(stored, run.params, strict=True):
        parameter.data.copy_(kept.data)
    run.evaluate()
    run.train(1)


@way()
def lerp(run: EditedRun) -> None:
    for parameter in run.params:
        parameter.lerp_(torch.zeros_like(parameter), 0.25)


# -- target networks: roots of their own that no optimizer steps --------------------------------------


@way()
def soft_target_update(run: EditedRun) -> None:
    target = run.another(build())
    target.model.requires_grad_(False)
    for _ in range(3):
        run.train(1)
        for goal, source in zip(target.params, run.params, strict=True):
            goal.data.mul_(0.7).add_(source.data, alpha=0.3)
        target.evaluate()


def perturbations(run: EditedRun) -> list[DTensor]:
    return [parameter.grad * (0.01 / (parameter.grad.norm() + 1e-6)) for parameter in run.params]


@way()
def sharpness_aware_subtracted(run: EditedRun) -> None:
    for _ in range(2):
        run.backward()
        added = perturbations(run)
        for parameter, perturbation in zip(run.params, added, strict=True):
            parameter.add_(perturbation)
        run.optimizer.zero_grad()
        run.backward()
        for parameter, perturbation in zip(run.params, added, strict=True):
            parameter.sub_(perturbation)
        run.step()


@way()
def weight_decay_by_hand(run: EditedRun) -> None:
    for _ in range(2):
        run.train(1)
        for parameter in run.params:
            parameter.data.mul_(1 - 0.05)


@way()
def step_by_hand(run: EditedRun) -> None:
    for _ in range(2):
        run.backward()
        for parameter in run.params:
            parameter.data.add_(parameter.grad.data, alpha=-0.3)
        run.optimizer.zero_grad()


@way()
def frozen_between_backward_and_step(run: EditedRun) -> None:
    run.backward()
    run.model.blocks[0].requires_grad_(False)
    run.step()
    run.evaluate()
    run.model.blocks[0].requires_grad_(True)


# -- masks and adapters ---------------------------------------------------------------------------------


def mask_of(parameter: DTensor) -> Tensor:
    local = parameter.to_local()
    return (torch.arange(local.numel()) % 3 > 0).view(local.shape).to(local.dtype)


@way()
def pruning_mask(run: EditedRun) -> None:
    for _ in range(2):
        for parameter in run.params:
            placed = parameter.device_mesh, parameter.placements
            mask = DTensor.from_local(
                mask_of(parameter), *placed, shape=parameter.shape, stride=parameter.stride()
            )
            parameter.data.mul_(mask)
        run.evaluate()
        run.train(1)


class Adapted(nn.Module):
    """A frozen layer with a trainable product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / 8)
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.is_merged else y + F.linear(F.linear(x, self.down), self.up)

    def merge(self, sign: int) -> None:
        product = self.up.full_tensor() @ self.down.full_tensor()
        mine = product.chunk(dist.get_world_size())[dist.get_rank()]
        self.base.weight.to_local().data.add_(mine, alpha=sign)
        self.is_merged = sign > 0


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = ToyGPT(hidden=108)
    model.requires_grad_(False)
    for block in model.blocks:
        block.fc1 = Adapted(block.fc1)
    return shard(model)


@way(adapted)
def adapters_merged_and_unmerged(run: EditedRun) -> None:
    for sign in (1, -1):
        for block in run.model.blocks:
            block.fc1.merge(sign)
        run.evaluate()
        if sign < 0:
            run.train(1)


@way(adapted)
def frozen_weights(run: EditedRun) -> None:
    run.model.blocks[1].qkv.weight.data.mul_(0.5)
    run.evaluate()
    run.train(1)
    run.model.blocks[0].fc2.weight.data.mul_(0.5)


class Tied(ToyGPT):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = Tied()
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh(), mp_policy=POLICY)
    return fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)


@way(tied)
def tied_weights(run: EditedRun) -> None:
    run.model.head.weight.data.mul_(0.5)
    run.evaluate()
    run.model.embed.weight.to_local().data.mul_(0.5)


@way()
def local_tensors(run: EditedRun) -> None:
    for parameter in run.params:
        parameter.to_local().mul_(0.5)


@way()
def data_assigned(run: EditedRun) -> None:
    for parameter in run.params:
        parameter.data = parameter.data * 0.5


@way()
def foreach_operations(run: EditedRun) -> None:
    torch._foreach_mul_(run.params, 0.5)
    run.evaluate()
    torch._foreach_clamp_max_(run.params, 0.05)
    run.evaluate()
    shards = [parameter.to_local() for parameter in run.params]
    torch._foreach_copy_(shards, [each * 1.5 for each in shards])


@way()
def initialization(run: EditedRun) -> None:
    nn.init.zeros_(run.model.head.weight)
    run.evaluate()
    for block in run.model.blocks:
        nn.init.constant_(block.fc1.weight, 0.01)


@way()
def one_rank_alone(run: EditedRun) -> None:
    if dist.get_rank() == 1:
        run.model.embed.weight.to_local().data.mul_(0.5)


@way()
def between_micro_batches(run: EditedRun) -> None:
    run.backward()
    for parameter in run.params:
        parameter.data.clamp_(-0.05, 0.05)
    run.backward()
    run.step()


# -- loads --------------------------------------------------------------------------------------------


def halves(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach() * 0.5 for name, value in model.state_dict().items()}


@way()
def load_state_dict(run: EditedRun) -> None:
    run.model.load_state_dict(halves(run.model))


@way()
def load_state_dict_assign(run: EditedRun) -> None:
    run.model.load_state_dict(halves(run.model), assign=True)
    run.evaluate()
    run.optimizer = adamw(run.model)  # the parameters are others now
    run.train(1)


@way()
def set_state_dict_from_rank_0(run: EditedRun) -> None:
    full = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
    state = {name: value * 0.5 for name, value in full.items()} if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(run.model, state, options=options)


@way()
def checkpoint_in_place(run: EditedRun) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(run.model.state_dict(), checkpoint_id=folder[0])
    run.train(2)
    run.evaluate()
    dcp.load(run.model.state_dict(), checkpoint_id=folder[0])

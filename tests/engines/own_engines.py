"""Training engines of one's own, which use the public calls of groups alone."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.engine import ZeRO2
from sdp4bit import SDP4BitConfig
from sdp4bit.engines import EngineHandle, attach_engine
from tests.engines.test_events import EDIT, Engine


class Gathering(ZeRO2):
    """Asks the library for nothing but weights and gradients of one group after the other."""

    @torch.no_grad()
    def gather(self) -> None:
        for index, block in enumerate(self.blocks):
            main = block.main.detach()
            rows = torch.empty(len(block.ranks) * block.shard_numel)
            self.quantized[index].weights.gather(rows, main, plain=lambda: None)
            block.write(rows)


class AllReducing(Gathering):
    """All-reduces complete gradients in place, although the weights are sharded."""

    @torch.no_grad()
    def reduce(self) -> None:
        for index, block in enumerate(self.blocks):
            grads = [parameter.grad for parameter in block.parameters if parameter.grad is not None]
            values = block.flattened(grads)
            plain = partial(dist.all_reduce, values, op=dist.ReduceOp.AVG)
            gradients = self.quantized[index].gradients
            gradients.reduce_in_place(values, dist.ReduceOp.AVG, plain=plain, run=lambda reduce: reduce())
            block.main.grad = values.chunk(len(block.ranks))[dist.get_rank()].clone()


class Own(Engine):
    """A training run with the engine of `examples/engine.py`."""

    kind: type[ZeRO2] = ZeRO2

    def __init__(self, config: SDP4BitConfig, folder: Path) -> None:
        super().__init__(folder)
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2))
        self.model = nn.Sequential(*blocks)
        self.engine = self.kind(self.model)
        self.comm = self.attach(config)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def attach(self, config: SDP4BitConfig) -> EngineHandle:
        return self.engine.attach(config, topology=1)

    def loss(self) -> Tensor:
        self.engine.gather()
        x = torch.randn(8, 64, generator=self.data)
        return nn.functional.mse_loss(self.model(x), x.flip(1))

    def train(self) -> None:
        loss = self.loss()
        loss.backward()
        self.engine.reduce()
        self.engine.optimizer.step()
        self.comm.mark_step()
        self.model.zero_grad()
        self.losses.append(loss.item())

    @torch.no_grad()
    def evaluate(self) -> None:
        self.losses.append(self.loss().item())

    def edit(self) -> None:
        for block in self.engine.blocks:
            block.main.data.mul_(EDIT)
        self.comm.resync()

    def save(self) -> Any:
        mains = [block.main.detach() for block in self.engine.blocks]
        return copy.deepcopy([mains, self.engine.optimizer.state_dict(), self.comm.state_dict()])

    def load(self, saved: Any) -> None:
        mains, optimizer, comm = copy.deepcopy(saved)
        for block, main in zip(self.engine.blocks, mains, strict=True):
            block.main.data.copy_(main)
        self.engine.optimizer.load_state_dict(optimizer)
        self.comm.load_state_dict(comm)

    def layer(self) -> nn.Module:
        return self.model[1]

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def recover(self) -> None:
        self.model.zero_grad()


class OwnGathers(Own):
    kind = Gathering


class OwnAllReduces(Own):
    kind = AllReducing

    def attach(self, config: SDP4BitConfig) -> EngineHandle:
        blocks, install = self.engine.blocks, self.engine.install
        return attach_engine(blocks, install=install, config=config, topology=1, replicate=True)

"""All engines train like the plain engine, whatever happens between steps: one list of events for all.

With the identity for a quantizer every loss and every weight is that of the plain engine, bit for bit. An
engine that is added later is another class in `ENGINES`.

Layer: 2 and 4 processes over gloo; DeepSpeed with `make test-ecosystem`.
"""

from __future__ import annotations

import copy
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from sdp4bit import SDP4BitConfig, quantize_communication
from tests import toy
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

EDIT = 1 + 2**-10  # a factor for weights that bf16 hides


class Interrupted(Exception):
    """An error in the middle of a forward, which the loop catches."""


def interrupt(*_: object) -> None:
    raise Interrupted


class Engine(ABC):
    """A training run; `comm` is its handle, or None with the plain engine."""

    ranks = 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.comm: Any = None
        self.losses: list[float] = []

    @abstractmethod
    def train(self) -> None:
        """Take a step."""

    @abstractmethod
    def evaluate(self) -> None:
        """Compute a loss without gradients."""

    @abstractmethod
    def edit(self) -> None:
        """Multiply the main weights by `EDIT`, and make the next forward use them."""

    @abstractmethod
    def save(self) -> Any:
        """Return a checkpoint of weights, optimizer and communication."""

    @abstractmethod
    def load(self, saved: Any) -> None:
        """Go back to a checkpoint."""

    @abstractmethod
    def layer(self) -> nn.Module:
        """Return a module in the middle of the forward."""

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Return this rank's weights."""

    def recover(self) -> None:  # noqa: B027
        """Do what the engine asks for after an interrupted forward."""

    def switch(self) -> None:
        """Take a step with plain communication."""
        if self.comm is None:
            self.train()
        else:
            with self.comm.full_precision():
                self.train()

    def interrupt(self) -> None:
        hook = self.layer().register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupted):
            self.evaluate()
        hook.remove()
        self.recover()


class FSDP2(Engine):
    def __init__(self, config: SDP4BitConfig | None, folder: Path) -> None:
        super().__init__(folder)
        self.run = toy.Run(self.build(), config, topology=1)
        self.comm, self.losses = self.run.comm, self.run.losses

    def build(self) -> nn.Module:
        return toy.build()

    def train(self) -> None:
        self.run.train(1)

    def evaluate(self) -> None:
        self.losses.append(self.run.evaluate())

    @torch.no_grad()
    def edit(self) -> None:
        for parameter in self.run.model.parameters():
            parameter.mul_(EDIT)

    def save(self) -> Any:
        state = [*get_state_dict(self.run.model, self.run.optimizer), self.comm and self.comm.state_dict()]
        return tree_map_only(Tensor, lambda value: value.detach().clone(), state)

    def load(self, saved: Any) -> None:
        # Copied, because the optimizer takes the tensors.
        model, optimizer, comm = tree_map_only(Tensor, lambda value: value.clone(), saved)
        set_state_dict(self.run.model, self.run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        if self.comm is not None:
            self.comm.load_state_dict(comm)

    def layer(self) -> nn.Module:
        return self.run.model.blocks[0].ln2

    def recover(self) -> None:
        for module in self.run.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.run.model.reset_iter_state()

    def weights(self) -> list[Tensor]:
        for module in self.run.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return [p.to_local().detach() for p in self.run.model.parameters() if isinstance(p, DTensor)]


class HSDP(FSDP2):
    ranks = 4

    def build(self) -> nn.Module:
        return toy.build(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


class DDP(Engine):
    def __init__(self, config: SDP4BitConfig | None, folder: Path) -> None:
        from tests.engines.ddp.test_hook import DDPRun

        super().__init__(folder)
        self.run = DDPRun(config)
        self.comm, self.losses = self.run.state, self.run.losses

    def train(self) -> None:
        self.run.train(1)

    @torch.no_grad()
    def evaluate(self) -> None:
        batch = next(toy.batches(seed=1))
        self.losses.append(toy.loss_of(self.run.model, batch).item())

    @torch.no_grad()
    def edit(self) -> None:
        for parameter in self.run.model.parameters():
            parameter.mul_(EDIT)

    def save(self) -> Any:
        parts = [self.run.model, self.run.optimizer, *([] if self.comm is None else [self.comm])]
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, saved: Any) -> None:
        parts = [self.run.model, self.run.optimizer, *([] if self.comm is None else [self.comm])]
        for part, state in zip(parts, copy.deepcopy(saved), strict=True):
            part.load_state_dict(state)

    def layer(self) -> nn.Module:
        return self.run.model.module.blocks[0].ln2

    def weights(self) -> list[Tensor]:
        return self.run.weights()


class MegatronCore(Engine):
    def __init__(self, config: SDP4BitConfig | None, folder: Path) -> None:
        from tests.megatron import runs

        super().__init__(folder)
        self.runs, self.config, self.run = runs, config, runs.MegatronRun(config, topology=1)
        self.comm, self.losses = self.run.comm, self.run.losses

    def train(self) -> None:
        self.run.train(1)

    def evaluate(self) -> None:
        self.losses.append(self.run.evaluate())

    @torch.no_grad()
    def edit(self) -> None:
        for part in self.run.optimizer.chained_optimizers:
            for main in itertools.chain(*part.shard_fp32_from_float16_groups):
                main.mul_(EDIT)
            if self.comm is None:
                part._copy_main_params_to_model_params()
        if self.comm is not None:
            self.comm.resync()
            return
        for chunk in self.run.chunks:
            chunk.start_param_sync(force_sync=True)

    def save(self) -> Any:
        return self.runs.save(self.run)

    def load(self, saved: Any) -> None:
        self.runs.load(self.run, saved)

    def layer(self) -> nn.Module:
        return next(m for name, m in self.run.chunks[0].named_modules() if name.endswith("final_layernorm"))

    def switch(self) -> None:
        if self.comm is not None:
            self.comm.remove()
        self.train()
        if self.comm is not None:
            self.run.attach(self.config, topology=1)
            self.comm = self.run.comm

    def weights(self) -> list[Tensor]:
        return self.run.weights()


class DeepSpeed(Engine):
    def __init__(self, config: SDP4BitConfig | None, folder: Path) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        from tests.deepspeed.test_deepspeed import engine_of

        super().__init__(folder)
        self.config, self.numbers = config, itertools.count()
        self.run = engine_of(zero_optimization={"stage": 2}, gradient_accumulation_steps=1)
        self.attach()

    def attach(self) -> None:
        if self.config is not None:
            self.comm = quantize_communication(self.run, self.config, topology=1)

    def forward(self, number: int) -> Tensor:
        data = torch.Generator().manual_seed(2 * number + dist.get_rank())
        batch = torch.randn(8, 61, generator=data).to(self.run.module.unused.dtype)
        loss: Tensor = (self.run(batch) - batch.flip(1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def train(self) -> None:
        self.run.backward(self.forward(next(self.numbers)))
        self.run.step()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.forward(1000)

    @torch.no_grad()
    def edit(self) -> None:
        for main in self.run.optimizer.single_partition_of_fp32_groups:
            main.mul_(EDIT)
        if self.comm is None:
            self.run.optimizer.update_lp_params()
        else:
            self.comm.resync()

    def save(self) -> Any:
        self.run.save_checkpoint(str(self.folder / str(self.comm is None)))

    def load(self, saved: Any) -> None:
        self.run.load_checkpoint(str(self.folder / str(self.comm is None)))

    def layer(self) -> nn.Module:
        return self.run.module.layers[2]  # type: ignore[no-any-return]

    def switch(self) -> None:
        if self.comm is not None:
            self.comm.remove()
        self.train()
        self.attach()

    def weights(self) -> list[Tensor]:
        mains = self.run.optimizer.single_partition_of_fp32_groups
        return [*self.run.module.parameters(), *mains]


def go_back(run: Engine) -> None:
    saved = run.save()
    run.train()
    run.load(saved)


EVENTS: dict[str, Callable[[Engine], object]] = {
    "a step": lambda run: None,
    "silence": lambda run: [run.evaluate() for _ in range(2)],
    "an edit": lambda run: run.edit(),
    "an edit that an evaluation uses": lambda run: (run.edit(), run.evaluate()),
    "an exception": lambda run: run.interrupt(),
    "a save": lambda run: run.save(),
    "a load": go_back,
    "a load, and an evaluation": lambda run: (go_back(run), run.evaluate()),
    "a save after a load": lambda run: (go_back(run), run.save()),
    "an exception after a load": lambda run: (go_back(run), run.interrupt()),
    "an edit after an exception": lambda run: (run.interrupt(), run.edit()),
    "a switch": lambda run: run.switch(),
    "a load after a switch": lambda run: (run.switch(), go_back(run)),
}
"""Each happens after a step, and before the next one."""


def events(engine: type[Engine], config: SDP4BitConfig | None, folder: Path) -> dict[str, Any]:
    """Return the losses so far and the weights after each event and the step that follows."""
    run, found = engine(config, folder), {}
    run.train()
    for name, event in EVENTS.items():
        event(run)
        run.train()
        found[name] = [*run.losses, *(each.detach().double().abs().sum().item() for each in run.weights())]
    if run.comm is not None:
        assert run.comm.audit()
    return found


def compare(engine: type[Engine], folder: Path) -> None:
    plain, ours = events(engine, None, folder), events(engine, toy.IDENTITY, folder)
    for name, numbers in plain.items():
        assert ours[name] == numbers, name


ENGINES = [
    FSDP2,
    pytest.param(HSDP, marks=pytest.mark.slow),
    DDP,
    pytest.param(
        MegatronCore,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed"),
        ],
    ),
    pytest.param(
        DeepSpeed,
        marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="make test-ecosystem"),
    ),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_like_the_plain_one_whatever_happens(engine: type[Engine], tmp_path: Path) -> None:
    run_ranks(compare, engine.ranks, engine, tmp_path)

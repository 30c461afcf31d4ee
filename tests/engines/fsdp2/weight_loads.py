"""Ways in which users load the weights of a model that trains; `docs/fsdp2.md` lists them."""

from __future__ import annotations

import tempfile
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from tests.engines.fsdp2.edited_runs import EditedRun, way
from tests.toy import adamw


def halves(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach() * 0.5 for name, value in model.state_dict().items()}


@way()
def load_state_dict(run: EditedRun) -> None:
    run.model.load_state_dict(halves(run.model))


@way()
def load_state_dict_of_a_part(run: EditedRun) -> None:
    run.model.blocks[1].fc1.load_state_dict(halves(run.model.blocks[1].fc1))
    run.evaluate()
    some = {name: value for name, value in halves(run.model).items() if "ln" in name}
    run.model.load_state_dict(some, strict=False)


@way()
def load_state_dict_assign(run: EditedRun) -> None:
    run.model.load_state_dict(halves(run.model), assign=True)
    run.evaluate()
    run.optimizer = adamw(run.model)  # the parameters are others now
    run.train(1)


def full_halves(model: nn.Module) -> dict[str, Any]:
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value * 0.5 for name, value in full.items()}


@way()
def set_full_state_dict(run: EditedRun) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(run.model, full_halves(run.model), options=options)


@way()
def set_state_dict_from_rank_0(run: EditedRun) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = full_halves(run.model)
    set_model_state_dict(run.model, state if dist.get_rank() == 0 else {}, options=options)


@way()
def set_state_dict_from_host(run: EditedRun) -> None:
    state = get_model_state_dict(run.model, options=StateDictOptions(cpu_offload=True))
    halved = {name: value * 0.5 for name, value in state.items()}
    set_model_state_dict(run.model, halved, options=StateDictOptions(cpu_offload=True))


@way()
def checkpoint_in_place(run: EditedRun) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(run.model.state_dict(), checkpoint_id=folder[0])
    run.train(2)
    run.evaluate()
    dcp.load(run.model.state_dict(), checkpoint_id=folder[0])

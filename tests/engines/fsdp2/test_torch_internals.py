"""What the integration relies on of torch: that this torch has it, and that one without it is refused.

Layers: unit, a fake process group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit
from sdp4bit.config import TESTED_TORCH
from sdp4bit.engines.fsdp2 import torch_internals as fsdp_torch
from tests.ranks import fake_world


@pytest.fixture
def model() -> Iterator[Any]:
    with fake_world(4, rank=0):
        yield fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))


class Without:
    """An object of torch's that lacks one attribute."""

    def __init__(self, target: Any, hidden: str) -> None:
        self._target, self._hidden = target, hidden

    def __getattr__(self, name: str) -> Any:
        if name == self._hidden:
            raise AttributeError(name)
        return getattr(self._target, name)


def module_with(model: Any, *, hidden: str, of: str) -> Any:
    """Return a stand-in for an FSDP module whose group, mesh or parameter lacks an attribute."""
    (group,) = fsdp_torch.param_groups_of(model)
    if of == "module":
        return Without(model, hidden)
    changed = Without(group, hidden if of == "group" else "")
    if of == "mesh":
        changed.mesh_info = Without(group.mesh_info, hidden)
    if of == "param":
        changed.fsdp_params = [Without(group.fsdp_params[0], hidden)]
    module = Without(model, "")
    state = Without(model._get_fsdp_state(), "")
    state._fsdp_param_groups = [changed]
    module._get_fsdp_state = lambda: state
    return module


def test_a_torch_without_what_is_relied_on_is_refused(model: Any) -> None:
    kinds = {
        "module": fsdp_torch.Module,
        "group": fsdp_torch.ParamGroup,
        "mesh": fsdp_torch.MeshInfo,
        "param": fsdp_torch.Param,
    }
    for of, name in [(of, name) for of, kind in kinds.items() for name in fsdp_torch.relied_on(kind)]:
        assert fsdp_torch.param_groups_of(module_with(model, hidden="nothing", of=of))
        with pytest.raises(ValueError) as refusal:
            fsdp_torch.param_groups_of(module_with(model, hidden=name, of=of))
        text = str(refusal.value)
        assert f"lacks {name}." in text and f"torch {torch.__version__}:" in text and TESTED_TORCH in text


@pytest.mark.parametrize("name", ["_all_gather_comm", "_reduce_scatter_comm"])
def test_a_torch_that_communicates_with_other_arguments_is_refused(
    name: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = fsdp_torch.param_groups_of(model)
    kind = type(getattr(group, name))
    monkeypatch.setattr(kind, "__call__", lambda self, output, input_tensor, group: None)
    with pytest.raises(
        ValueError, match=rf"{kind.__name__} takes \(output, input_tensor, group\) instead of"
    ):
        sdp4bit.quantize_communication(model, topology=2)


def test_a_newer_torch_is_taken_if_it_keeps_what_is_relied_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.0a0+git1234567")
    sdp4bit.quantize_communication(model, topology=2).remove()
    groups = len(dist.distributed_c10d._world.pg_map)
    monkeypatch.delattr(type(fsdp_torch.param_groups_of(model)[0]), "_use_post_forward_mesh")
    lacking = "of torch 3.1.0a0+git1234567: FSDPParamGroup lacks _use_post_forward_mesh."
    with pytest.raises(ValueError, match=re.escape(lacking)):
        sdp4bit.quantize_communication(model, topology=2)
    assert len(dist.distributed_c10d._world.pg_map) == groups

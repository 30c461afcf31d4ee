"""Supported torch releases, and the private parts of FSDP2 that the integration uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from sdp4bit.config import TESTED_TORCH

_MINIMUM = (2, 9)


class Comm(Protocol):
    """FSDP2's all-gather or reduce-scatter; see `_ARGUMENTS`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an input or output tensor of the collective."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Gather or reduce."""


class RootContext(Protocol):
    """The context that the FSDP modules of one root share from the first forward on."""

    iter_forward_root: object | None
    all_states: list[ModuleState]  # of all FSDP modules below the root


class ModuleState(Protocol):
    """FSDP2's state of a module."""

    _state_ctx: RootContext


class Module(Protocol):
    """An FSDP module."""

    training: bool
    _get_fsdp_state: Callable[[], ModuleState]
    reshard: Callable[[], None]


class MeshInfo(Protocol):
    """The ranks of a parameter group."""

    mesh: DeviceMesh
    shard_process_group: ProcessGroup
    shard_mesh_rank: int
    shard_mesh_size: int


class HybridMeshInfo(MeshInfo, Protocol):
    """The ranks of a parameter group that is sharded and replicated (HSDP)."""

    replicate_mesh_dim: int | None
    replicate_mesh_rank: int
    replicate_mesh_size: int
    replicate_process_group: ProcessGroup  # gradients are all-reduced over it, by dist.all_reduce


class ParamModuleInfo(Protocol):
    """Where a parameter is registered."""

    module: nn.Module
    param_name: str


class Param(Protocol):
    """FSDP2's record of a parameter."""

    sharded_param: nn.Parameter  # a DTensor; may be replaced over time
    mp_policy: MixedPrecisionPolicy
    padded_sharded_param_size: torch.Size
    fsdp_placement: Shard
    mesh_info: MeshInfo
    _sharded_param_data: Tensor  # [n], this rank's padded shard in the dtype of the main weights
    _orig_size: torch.Size
    _module_info: ParamModuleInfo
    _param_fqn: str | None  # below FSDP2's root, from the first forward on


class ParamGroup(Protocol):
    """FSDP2's record of the parameters that are gathered and reduced together."""

    fsdp_params: list[Param]
    mesh_info: MeshInfo
    device: torch.device
    is_unsharded: bool
    reduce_grads: bool
    post_forward_mesh_info: MeshInfo
    _all_gather_comm: Comm
    _reduce_scatter_comm: Comm
    _is_hsdp: bool
    _training_state: Enum
    _use_post_forward_mesh: bool
    _partial_reduce_output: Tensor | None  # HSDP: gradients that were not all-reduced yet


# The arguments that FSDP2 passes to its communication objects.
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "_all_gather_comm": ("output_tensor", "input_tensor", "group", "async_op"),
    "_reduce_scatter_comm": ("output_tensor", "input_tensor", "group", "op", "async_op"),
}


def check_torch_version() -> None:
    """Raise ValueError if this torch is older than FSDP2's communication hooks."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < _MINIMUM:
        raise ValueError(
            f"sdp4bit needs torch 2.9 or newer for FSDP2's hooks, but this is torch {torch.__version__}. It "
            f"is tested with {TESTED_TORCH}"
        )


def relied_on(kind: type) -> tuple[str, ...]:
    """Return the attributes of an FSDP2 class that this library uses."""
    return tuple(kind.__annotations__)


def param_groups_of(module: Module) -> list[ParamGroup]:
    """Return FSDP2's parameter groups of a module.

    Raises:
        ValueError: an attribute that the integration uses is missing; lists the tested torch versions.
    """
    _check(module, relied_on(Module))
    state = module._get_fsdp_state()
    _check(state, relied_on(ModuleState))
    _check(state._state_ctx, relied_on(RootContext))
    groups = param_groups_of_state(state)
    for group in groups:
        _check(group, relied_on(ParamGroup))
        _refuse_replicated(group, module)
        _check(group.mesh_info, relied_on(MeshInfo))
        if group._is_hsdp:
            _check(group.mesh_info, relied_on(HybridMeshInfo))
        for param in group.fsdp_params[:1]:
            _check(param, relied_on(Param))
        for name, arguments in _ARGUMENTS.items():
            _check_call(getattr(group, name), arguments)
    return groups


def param_groups_of_state(state: ModuleState) -> list[ParamGroup]:
    """Return FSDP2's parameter groups of a module's state; see `param_groups_of`."""
    groups: Sequence[ParamGroup] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 a module has one group
        _check(state, ("_fsdp_param_group",))
        only: ParamGroup | None = getattr(state, "_fsdp_param_group")  # noqa: B009
        groups = [] if only is None else [only]
    return list(groups)


def reduced_in(param: Param) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces the gradient of a parameter."""
    policy, dtype = param.mp_policy, param.sharded_param.dtype
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype
    # torch 2.15 reduces in the dtype of the sharded gradient, which is the parameter's unless it was set.
    # Older releases reduce in the compute dtype.
    if hasattr(param, "sharded_grad_dtype"):
        return param.sharded_grad_dtype or dtype
    return policy.param_dtype or dtype


def _refuse_replicated(group: ParamGroup, module: Module) -> None:
    """Raise ValueError for a group of `replicate()`, which gathers and scatters nothing."""
    info = group.mesh_info
    if hasattr(info, "replicate_process_group") and not hasattr(info, "shard_process_group"):
        raise ValueError(
            f"{type(module).__name__} is replicated over {info.mesh.size()} ranks by replicate(), for whose "
            "all-reduce FSDP2 has no hook. Call fully_shard with a mesh of (ranks, 1), which takes the same "
            "memory, or use DistributedDataParallel with sdp4bit.ddp_comm_hook"
        )


def _check(target: object, names: Sequence[str]) -> None:
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise _unknown(f"{type(target).__name__} lacks {', '.join(missing)}")


def _check_call(comm: object, arguments: Sequence[str]) -> None:
    """Check the arguments of torch's own communication objects; others are reported by `check_group`."""
    if not type(comm).__module__.startswith("torch."):
        return
    _, *names = inspect.signature(type(comm).__call__).parameters
    if names != list(arguments):
        raise _unknown(
            f"{type(comm).__name__} takes ({', '.join(names)}) instead of ({', '.join(arguments)})"
        )


def _unknown(difference: str) -> ValueError:
    return ValueError(
        f"sdp4bit does not support FSDP2 of torch {torch.__version__}: {difference}. Install a tested "
        f"version: {TESTED_TORCH}"
    )

"""Which releases of torch the FSDP2 integration works with, and what it relies on that is not public API."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sdp4bit.config import TESTED_TORCH

_MINIMUM = (2, 9)
_SETTERS = (
    *("set_custom_all_gather", "set_custom_reduce_scatter", "set_force_sum_reduction_for_comms"),
    *("_get_fsdp_state", "reshard"),
)
_OF_GROUP = (
    *("fsdp_params", "mesh_info", "mp_policy", "device", "is_unsharded", "force_sum_reduction_for_comms"),
    *(
        "_all_gather_comm",
        "_reduce_scatter_comm",
        "_is_hsdp",
        "_training_state",
        "_use_post_forward_mesh",
        "post_forward_mesh_info",
    ),
)
_OF_MESH = ("shard_process_group", "shard_mesh_rank", "shard_mesh_size")
_OF_PARAM = (
    *("sharded_param", "padded_sharded_param_size", "fsdp_placement", "mesh_info"),
    *("_sharded_param_data", "_orig_size", "_module_info"),
)
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "_all_gather_comm": ("output_tensor", "input_tensor", "group", "async_op"),
    "_reduce_scatter_comm": ("output_tensor", "input_tensor", "group", "op", "async_op"),
}
"""What FSDP2 passes to the two objects that it communicates through."""


def check_torch_version() -> None:
    """Raise ValueError if this torch is older than FSDP2's communication hooks."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < _MINIMUM:
        raise ValueError(
            f"sdp4bit needs torch 2.9 or newer for FSDP2's hooks, this is {torch.__version__}; tested are "
            f"{TESTED_TORCH}"
        )


def param_groups_of(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a module.

    Raises:
        ValueError: they are not what the integration relies on; with the torch versions that are tested.
    """
    _check(module, _SETTERS)
    state = module._get_fsdp_state()
    _check(state, ("_state_ctx",))
    _check(state._state_ctx, ("iter_forward_root",))
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12
        _check(state, ("_fsdp_param_group",))
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    for group in groups:
        _check(group, _OF_GROUP)
        _check(group.mesh_info, _OF_MESH)
        for param in group.fsdp_params[:1]:
            _check(param, _OF_PARAM)
        for name, arguments in _ARGUMENTS.items():
            _check_call(getattr(group, name), arguments)
    return list(groups)


def _check(target: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise _unknown(f"{type(target).__name__} lacks {', '.join(missing)}")


def _check_call(comm: Any, arguments: Sequence[str]) -> None:
    """Compare the arguments that torch's own object takes; anybody else's is not known by them."""
    if not type(comm).__module__.startswith("torch."):
        return
    found = tuple(inspect.signature(comm.__call__).parameters)
    if found != tuple(arguments):
        raise _unknown(
            f"{type(comm).__name__} takes ({', '.join(found)}) instead of ({', '.join(arguments)})"
        )


def _unknown(difference: str) -> ValueError:
    return ValueError(
        f"sdp4bit does not know FSDP2 as it is in torch {torch.__version__}: {difference}. Tested are "
        f"{TESTED_TORCH}: install one of them"
    )

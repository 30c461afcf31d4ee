"""What FSDP2 parameter groups must be to be attached to, and what is said of a choice that saves little."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Collection, Sequence

import torch

from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import SDP4BitConfig
from sdp4bit.integrations.fsdp_groups import FSDPGroup
from sdp4bit.integrations.fsdp_hooks import AllGatherHook, ReduceScatterHook

QUANTIZED_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
"""Types of parameters and gradients that can be quantized."""
_HOOK_NAMES = (AllGatherHook.__name__, ReduceScatterHook.__name__)


def skip_patterns(skip: Collection[str] | Callable[[str], bool] | None) -> list[str]:
    """Return the patterns over names, none for a function; TypeError if it is neither."""
    if skip is None or callable(skip):
        return []
    patterns = [skip] if isinstance(skip, str) else skip
    if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"skip={skip!r} is unknown: use names of FSDP modules, as patterns, or a function of a name"
        )
    return sorted(patterns)


def match_skipped(
    groups: Sequence[FSDPGroup], skip: Sequence[str] | Callable[[str], bool]
) -> tuple[dict[str, str], list[str]]:
    """Return the names of the groups to leave dense, with the reason, and the patterns that match none."""
    names = [group.name for group in groups]
    if callable(skip):
        return {name: "skipped" for name in names if skip(name)}, []
    matched = {pattern: fnmatch.filter(names, pattern) for pattern in skip}
    reasons = {name: f"skipped by {pattern!r}" for pattern, found in matched.items() for name in found}
    return reasons, [pattern for pattern, found in matched.items() if not found]


def check_group(group: FSDPGroup, *, config: SDP4BitConfig, is_skipped: bool) -> None:
    """Raise ValueError if a group cannot be attached to."""
    if any(name in _HOOK_NAMES for name in group.custom_comms):
        raise ValueError(
            f"{group.name} is attached already: call remove() on the first handle before attaching again"
        )
    if group.custom_comms:
        raise ValueError(
            f"{group.name} has custom communication ({', '.join(group.custom_comms)}), for example by "
            "set_symm_mem_for_comm or set_custom_all_gather; sdp4bit cannot share it"
        )
    if group.reshards_to_smaller_mesh:
        raise ValueError(
            f"{group.name} uses an int reshard_after_forward, which gathers over a part of the ranks in "
            'backward; use reshard_after_forward=True with WeightConfig(replica="node"), which keeps '
            "gathers inside the node as well"
        )
    if is_skipped:
        return
    names = sorted(str(dtype) for dtype in group.param_dtypes)
    if len(names) > 1:
        raise ValueError(
            f"{group.name} gathers parameters of several types ({', '.join(names)}); give them one "
            f"(MixedPrecisionPolicy(param_dtype=...)), shard them as modules of their own, or pass "
            f"skip=[{group.name!r}]"
        )
    can_be_dense = config.weights is None and all(dtype.is_floating_point for dtype in group.param_dtypes)
    if not (can_be_dense or group.param_dtypes <= QUANTIZED_DTYPES):
        raise ValueError(
            f"{group.name} holds {names[0]} parameters; only fp32, bf16 and fp16 can be quantized: give "
            f"them such a type, also by MixedPrecisionPolicy(param_dtype=...), or pass skip=[{group.name!r}]"
        )
    if config.gradients is not None and group.reduce_dtype not in QUANTIZED_DTYPES:
        raise ValueError(
            f"{group.name} reduces gradients in {group.reduce_dtype}; only fp32, bf16 and fp16 can be "
            f"quantized: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or pass skip=[{group.name!r}]"
        )
    if group.extension_params:
        raise ValueError(
            f"{group.name}: {', '.join(group.extension_params[:3])} change what is gathered by a tensor "
            f"subclass (fsdp_pre_all_gather); pass skip=[{group.name!r}]"
        )


def warn_of_layout(groups: Sequence[FSDPGroup], layouts: dict[tuple[int, ...], NodeLayout]) -> None:
    """Warnings say where quantization does less than it could, at the line that asked for it."""
    if any(group.is_hybrid for group in groups):
        warnings.warn(
            "sdp4bit: with HSDP only the shard dimension is quantized; the all-reduce over replicas stays in "
            "full precision. One shard dimension over all data-parallel ranks sends less",
            stacklevel=3,
        )
    if groups and all(layouts[group.ranks].size == 1 for group in groups):
        warnings.warn(
            "sdp4bit: every group is sharded over one rank, so nothing is sent and nothing is quantized",
            stacklevel=3,
        )
    if any(group.reduce_dtype == torch.float16 for group in groups):
        warnings.warn(
            "sdp4bit: gradients are reduced in fp16 and may overflow before they are quantized; use "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
            stacklevel=3,
        )

"""What FSDP2 parameter groups must be to be attached to, and what is said of a choice that saves little."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from sdp4bit.collectives.work import has_one_queue
from sdp4bit.config import SDP4BitConfig
from sdp4bit.engines.agreement import Layouts
from sdp4bit.engines.explain import OFF, ONE_RANK, one_node_note, one_node_reason
from sdp4bit.engines.fsdp2.groups import FSDPGroup
from sdp4bit.engines.fsdp2.hooks import AllGatherHook, ReduceScatterHook
from sdp4bit.quantization.checks import VALUE_DTYPES

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
    reasons: dict[str, str] = {}
    used: set[str] = set()
    for group in groups:
        # A module with several groups is meant by its own name, and each of them by theirs.
        names = dict.fromkeys((group.module_name, group.name))
        if callable(skip):
            reasons |= {group.name: "skipped"} if any(map(skip, names)) else {}
            continue
        for pattern in skip:
            if fnmatch.filter(names, pattern):
                reasons[group.name] = f"skipped by {pattern!r}"
                used.add(pattern)
    return reasons, [] if callable(skip) else [pattern for pattern in skip if pattern not in used]


def check_group(group: FSDPGroup, *, config: SDP4BitConfig, is_skipped: bool) -> None:
    """Raise ValueError if a group cannot be attached to."""
    if any(name in _HOOK_NAMES for name in group.custom_comms):
        raise ValueError(
            f"{group.name} is attached already: call remove() on the first handle before attaching again"
        )
    if group.custom_comms:
        raise ValueError(
            f"{group.name} has custom communication ({', '.join(group.custom_comms)}), for example by "
            "set_custom_all_gather; sdp4bit cannot share it"
        )
    if is_skipped:
        return
    names = sorted(str(dtype) for dtype in group.param_dtypes)
    if any(dtype.is_complex for dtype in group.param_dtypes):
        raise ValueError(
            f"{group.name} holds {', '.join(names)} parameters; only floating-point gradients can be "
            f"quantized, pass skip=[{group.name!r}]"
        )
    are_quantized = config.weights is not None and not unquantizable_weights_reason(group)
    if are_quantized and group.row_dtype not in VALUE_DTYPES:
        raise ValueError(
            f"{group.name} holds {group.row_dtype} parameters; only fp32, bf16 and fp16 can be quantized: "
            "give them such a type, also by MixedPrecisionPolicy(param_dtype=...), or pass "
            f"skip=[{group.name!r}]"
        )
    reduced = group.reduce_dtype
    if config.gradients is not None and reduced.is_floating_point and reduced not in VALUE_DTYPES:
        raise ValueError(
            f"{group.name} reduces gradients in {reduced}; only fp32, bf16 and fp16 can be "
            f"quantized: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or pass skip=[{group.name!r}]"
        )


def check_staging(
    groups: Sequence[FSDPGroup],
    layouts: Layouts,
    *,
    config: SDP4BitConfig,
    skipped: Mapping[str, str],
) -> None:
    """Raise ValueError if FSDP2 was asked for other memory for a collective that is replaced."""
    for group in groups:
        staging = group.staging_comms
        weights, gradients = unquantized_reasons(group, layouts, config=config, skipped=skipped)
        if "weights" in staging and not weights:
            raise _staged(group, staging["weights"], "all-gather of its weights", "weights=None")
        if "gradients" in staging and not gradients:
            raise _staged(group, staging["gradients"], "reduce-scatter of its gradients", "gradients=None")


def _staged(group: FSDPGroup, setter: str, collective: str, off: str) -> ValueError:
    return ValueError(
        f"{group.name}: {setter} asks for other memory for FSDP2's {collective}, which quantization "
        f"replaces. Leave out {setter} there, or keep the collective by SDP4BitConfig({off}) or "
        f"skip=[{group.name!r}]"
    )


def unquantizable_weights_reason(group: FSDPGroup) -> str:
    """Return why a group's weights are left to FSDP2, whatever the settings; "" if they can be quantized."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in group.param_dtypes)
    if group.subclass_reason:
        return group.subclass_reason
    if group.row_dtype is None:
        return f"types {' and '.join(names)} in one group whose shards do not align"
    if not group.row_dtype.is_floating_point:
        return f"{names[0]} parameters"
    if group.ranks_after_forward:
        return f"reshard_after_forward={group.ranks_after_forward}"
    return ""


def unquantized_reasons(
    group: FSDPGroup, layouts: Layouts, *, config: SDP4BitConfig, skipped: Mapping[str, str]
) -> tuple[str, str]:
    """Return why a group's weights and its gradients are not quantized; "" for those that are.

    ONE_RANK is of the shards alone: gradients may still be summed over the replicas of HSDP.
    """
    layout, skip = layouts.shards[group.ranks], skipped.get(group.name, "")
    alone = ONE_RANK if layout.size == 1 else ""
    weights = (
        alone
        or ("" if config.weights else OFF)
        or skip
        or one_node_reason(config.weights, nodes=layout.nodes)
        or unquantizable_weights_reason(group)
    )
    gradients = alone or ("" if config.gradients else OFF) or skip
    if gradients in ("", ONE_RANK) and not skip and len(group.sharing_ranks) > 1:
        gradients = one_node_reason(config.gradients, nodes=_nodes_of(group, layouts)) or gradients
    return weights, gradients


def _nodes_of(group: FSDPGroup, layouts: Layouts) -> int:
    """Return 1 if all ranks that share the group's parameters are on one node, else more."""
    if not group.is_hybrid:
        return layouts.shards[group.ranks].nodes
    # The same on all these ranks: a rank of HSDP asks for the layouts of other shards and replicas too.
    sharing = group.sharing_ranks
    everything = [*layouts.shards.items(), *layouts.replicas.items()]
    return max(layout.nodes for ranks, layout in everything if sharing.issuperset(ranks))


def warn_of_layout(
    groups: Sequence[FSDPGroup],
    layouts: Layouts,
    *,
    config: SDP4BitConfig,
    skipped: Mapping[str, str],
) -> str:
    """Warn where quantization does less than it could, at the line that asked for it.

    Returns:
        The note that `explain()` repeats; "" for none.
    """
    reasons = [unquantized_reasons(group, layouts, config=config, skipped=skipped) for group in groups]
    # Replicas on other nodes are a reason to shard inside one.
    inside = [_nodes_of(group, layouts) == 1 for group in groups]
    note = one_node_note(
        [each if is_inside else ("", "") for each, is_inside in zip(reasons, inside, strict=True)]
    )
    messages = [note] if note else []
    dense = [
        f"{group.name} ({because})"
        for group, (because, _) in zip(groups, reasons, strict=True)
        if because and because == unquantizable_weights_reason(group)
    ]
    if dense:
        more = f" and {len(dense) - 3} more" if len(dense) > 3 else ""
        messages.append(f"weights are left to FSDP2 in {', '.join(dense[:3])}{more}; see explain()")
    if groups and not any(group.holds_values for group in groups):
        messages.append(
            "this rank holds no value of the model, only padding, so no optimizer of its own tells when a "
            "step is taken: call comm.mark_step() here whenever the other ranks step"
        )
    if groups and all(layouts.shards[g.ranks].size == 1 == len(g.replica_ranks) for g in groups):
        messages.append("every group is sharded over one rank, so nothing is sent and nothing is quantized")
    if any(group.reduce_dtype == torch.float16 for group in groups):
        messages.append(
            "gradients are reduced in fp16 and may overflow before they are quantized; use "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    if any(has_one_queue(group.device) for group in groups):
        messages.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 has all streams of a GPU take turns, so that FSDP2's collectives, "
            "and these, keep computation from starting: unset it before CUDA is initialized. It serves "
            "Megatron-Core's tensor parallelism, and harms here"
        )
    for message in messages:
        warnings.warn(f"sdp4bit: {message}", stacklevel=3)
    return note

"""Requirements on FSDP2 parameter groups, and warnings about layouts that save little traffic."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from sdp4bit.addresses import page
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.collectives.streams import has_one_queue
from sdp4bit.config import SDP4BitConfig
from sdp4bit.engines.agreement import AgreedNodes
from sdp4bit.engines.fsdp2.group import check_dtypes
from sdp4bit.engines.fsdp2.view import FSDPView, named_fsdp_modules
from sdp4bit.observe.explain import layout_reason, one_hop_note, one_node_note, one_node_reason
from sdp4bit.warn import warn_user

Skipped = Mapping[str, Unquantized]
"""Groups that the caller leaves in full precision, by name."""
PARTIAL_GRADIENTS = (
    "holds gradients that FSDP2 has not all-reduced over the replicate dimension: finish the accumulation "
    "first, by a backward with set_requires_all_reduce(True), or discard them with model.reset_iter_state()"
)
_OTHER_ENGINES = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": (
        "Shard with FSDP2 instead, torch.distributed.fsdp.fully_shard (fsdp_version: 2 in Accelerate)"
    ),
    "torch.nn.parallel.distributed": (
        f"Register sdp4bit.ddp_comm_hook with it, which quantizes gradients ({page('ddp')})"
    ),
    "deepspeed.": (
        f"Pass the engine that deepspeed.initialize returned ({page('deepspeed')}). If this is the engine, "
        "sdp4bit's metadata lack the entry point of its adapter: install sdp4bit again"
    ),
    "megatron_fsdp.": "sdp4bit does not support Megatron-FSDP: shard with fully_shard of PyTorch",
    "megatron.core.distributed.fsdp.": (
        "sdp4bit does not support Megatron-FSDP: use Megatron-Core's distributed optimizer "
        f"({page('megatron')})"
    ),
    "olmo_core.nn.parallel.": "sdp4bit does not support OLMo-core's own DDP: use its TransformerTrainModule",
    "torchtitan.experiments.graph_trainer.": (
        "sdp4bit does not support SimpleFSDP: train with torchtitan's own Trainer, which shards with FSDP2"
    ),
    "megatron.core.distributed.": f"Call sdp4bit_megatron.quantize_communication ({page('megatron')})",
}
"""Ways out for models that another engine wraps, by the beginning of its module's name, first match."""


def local_roots(model: object) -> list[nn.Module]:
    """Return the roots among the arguments of `quantize_communication`.

    Raises:
        TypeError: not a module or a sequence of modules.
        ValueError: a root has no FSDP2 modules.
    """
    roots = [model] if isinstance(model, nn.Module) else model
    if not isinstance(roots, Sequence) or not all(isinstance(root, nn.Module) for root in roots):
        found = type(model).__name__ if model is not None else None
        raise TypeError(f"model={found}: pass the root of fully_shard, or a list of local roots")
    for root in roots:
        if not any(named_fsdp_modules(root)):
            raise ValueError(_unsharded_reason(root))
    return list(roots)


def other_engine(root: nn.Module) -> str:
    """Return which wrapper of another engine communicates for a model, and the way out; "" if none does."""
    for path, module in root.named_modules():
        for cls in type(module).__mro__:
            for prefix, way_out in _OTHER_ENGINES.items():
                if f"{cls.__module__}.".startswith(prefix):
                    name = f"{cls.__module__}.{cls.__qualname__}" + (f", `model.{path}`," if path else "")
                    return f"{name} communicates for this model, not FSDP2. {way_out}"
    return ""


def _unsharded_reason(root: nn.Module) -> str:
    return other_engine(root) or (
        f"{type(root).__name__} has no FSDP2 modules: call torch.distributed.fsdp.fully_shard on its "
        "blocks and on itself before sdp4bit.quantize_communication. For DistributedDataParallel and "
        "replicate() use sdp4bit.ddp_comm_hook"
    )


def skip_patterns(skip: Collection[str] | Callable[[str], bool] | None) -> list[str]:
    """Return the patterns over names, none for a predicate; raise TypeError for other types."""
    if skip is None or callable(skip):
        return []
    patterns = [skip] if isinstance(skip, str) else skip
    if not isinstance(patterns, Collection) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"skip={skip!r} has an unsupported type: use patterns over the names of FSDP modules, or a "
            "predicate"
        )
    return sorted(patterns)


def match_skipped(
    views: Sequence[FSDPView], skip: Sequence[str] | Callable[[str], bool]
) -> tuple[dict[str, Unquantized], list[str]]:
    """Return the groups to leave in full precision, with the reason, and the patterns without a match."""
    reasons: dict[str, Unquantized] = {}
    used: set[str] = set()
    for view in views:
        # The name of a module selects all of its groups.
        names = dict.fromkeys((view.module_name, view.name))
        if callable(skip):
            if any(map(skip, names)):
                reasons[view.name] = Unquantized(Cause.SKIPPED)
            continue
        for pattern in skip:
            if fnmatch.filter(names, pattern):
                reasons[view.name] = Unquantized(Cause.SKIPPED, f" by {pattern!r}")
                used.add(pattern)
    return reasons, [] if callable(skip) else [pattern for pattern in skip if pattern not in used]


def check_group(view: FSDPView, *, config: SDP4BitConfig, is_skipped: bool) -> None:
    """Raise ValueError for a group that is not supported."""
    if view.is_attached:
        raise ValueError(
            f"{view.name} is attached already: call remove() on the first handle before attaching again"
        )
    if view.has_partial_gradients:
        raise ValueError(f"{view.name} {PARTIAL_GRADIENTS}")
    if view.custom_comms:
        raise ValueError(
            f"{view.name} has custom communication ({', '.join(view.custom_comms)}), which sdp4bit cannot "
            "combine with its own: remove the call of set_custom_all_gather or set_custom_reduce_scatter"
        )
    if is_skipped:
        return
    names = sorted(str(dtype) for dtype in view.param_dtypes)
    if any(dtype.is_complex for dtype in view.param_dtypes):
        raise ValueError(
            f"{view.name} holds {', '.join(names)} parameters, but only real gradients can be quantized: "
            f"pass skip=[{view.name!r}]"
        )
    are_quantized = config.weights is not None and not unquantizable_weights_reason(view)
    check_dtypes(view, weights=are_quantized, gradients=config.gradients is not None)


def check_staging(
    views: Sequence[FSDPView],
    layouts: AgreedNodes,
    *,
    config: SDP4BitConfig,
    skipped: Skipped,
) -> None:
    """Raise ValueError if special memory was requested for a collective that quantization replaces."""
    collectives = {"weights": "all-gather of its weights", "gradients": "reduce-scatter of its gradients"}
    for view in views:
        reasons = unquantized_reasons(view, layouts, config=config, skipped=skipped)[:2]
        for (kind, collective), reason in zip(collectives.items(), reasons, strict=True):
            setter = view.staging_comms.get(kind)
            if setter and not reason:
                raise ValueError(
                    f"{view.name}: {setter} applies to FSDP2's {collective}, which quantization replaces. "
                    f"Leave out {setter}, or keep the collective with SDP4BitConfig({kind}=None) or "
                    f"skip=[{view.name!r}]"
                )


def unquantizable_weights_reason(view: FSDPView) -> str:
    """Return why a group's weights cannot be quantized with any settings; "" if they can."""
    names = sorted(str(dtype).removeprefix("torch.") for dtype in view.param_dtypes)
    if view.subclass_reason:
        return view.subclass_reason
    if view.row_dtype is None:
        return f"types {' and '.join(names)} in one group whose shards do not align"
    if not view.row_dtype.is_floating_point:
        return f"{names[0]} parameters"
    if view.ranks_after_forward:
        return f"reshard_after_forward={view.ranks_after_forward}"
    return ""


def unquantized_reasons(
    view: FSDPView, layouts: AgreedNodes, *, config: SDP4BitConfig, skipped: Skipped
) -> tuple[Unquantized | None, Unquantized | None, Unquantized | None]:
    """Return why weights, gradients, and their sum over replicas are not quantized; None if they are."""
    layout, skip = layouts.shards[view.ranks], skipped.get(view.name)
    off, alone = Unquantized(Cause.OFF), Unquantized(Cause.ONE_RANK) if layout.size == 1 else None
    weights = alone or (None if config.weights else off) or skip or layout_reason(config.weights, layout)
    if weights is None and (unquantizable := unquantizable_weights_reason(view)):
        weights = Unquantized(Cause.UNSUPPORTED, unquantizable)
    # Gradients of a shard on one rank may still be summed over the replicate dimension.
    summed = (None if config.gradients else off) or skip
    if summed is None and len(view.sharing_ranks) > 1:
        summed = one_node_reason(config.gradients, nodes=_nodes_of(view, layouts))
    return weights, summed or alone, summed


def _nodes_of(view: FSDPView, layouts: AgreedNodes) -> int:
    """Return 1 if all ranks that share the group's parameters are on one node, else more."""
    if not view.is_hybrid:
        return layouts.shards[view.ranks].nodes
    # Includes the layouts of the other ranks, so that all of these ranks get the same result.
    sharing = view.sharing_ranks
    everything = [*layouts.shards.items(), *layouts.replicate.items()]
    return max(layout.nodes for ranks, layout in everything if sharing.issuperset(ranks))


def warn_of_layout(
    views: Sequence[FSDPView],
    layouts: AgreedNodes,
    *,
    config: SDP4BitConfig,
    skipped: Skipped,
) -> str:
    """Warn about groups that are not quantized and settings that harm; return the note for `explain()`."""
    reasons = [unquantized_reasons(view, layouts, config=config, skipped=skipped) for view in views]
    # Sharding inside a node is sensible if HSDP's replicate dimension crosses nodes.
    inside = [_nodes_of(view, layouts) == 1 for view in views]
    note = one_node_note(
        [each[:2] if is_inside else (None, None) for each, is_inside in zip(reasons, inside, strict=True)]
    )
    messages = [note] if note else []
    reduced = [view for view, (_, _, why) in zip(views, reasons, strict=True) if not why]
    over = [layouts.shards[view.ranks] for view in reduced]
    over += [layouts.replicate[view.replicate_ranks] for view in reduced if len(view.replicate_ranks) > 1]
    messages += filter(None, [one_hop_note(over)])
    dense = [
        f"{view.name} ({because})"
        for view, (because, *_) in zip(views, reasons, strict=True)
        if because is not None and because.cause is Cause.UNSUPPORTED
    ]
    if dense:
        more = f" and {len(dense) - 3} more" if len(dense) > 3 else ""
        messages.append(f"weights are left to FSDP2 in {', '.join(dense[:3])}{more}; see explain()")
    if views and not any(param.local.numel() for view in views for param in view.params):
        warn_user(
            "this rank holds only padding, so its optimizer cannot show when a step is taken: call "
            "comm.mark_step() here whenever the other ranks step"
        )
    if views and all(layouts.shards[g.ranks].size == 1 == len(g.replicate_ranks) for g in views):
        messages.append("every group is sharded over one rank, so nothing is sent or quantized")
    if any(view.reduce_dtype == torch.float16 for view in views):
        messages.append(
            "gradients are reduced in fp16 and may overflow before they are quantized; use "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )
    if any(has_one_queue(view.device) for view in views):
        messages.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 serializes all streams of a GPU, so FSDP2's collectives delay "
            "computation. Unset it before CUDA is initialized, because only tensor parallelism in "
            "Megatron-Core needs it"
        )
    for message in messages:
        # Stages of a pipeline have other groups, so the first rank of each stage warns.
        warn_user(message, views[0].sharing_ranks)
    return note

"""Attachment to an engine of `deepspeed.initialize`, and its handle."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sdp4bit.collectives.group import Group
from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import AuditConfig, SDP4BitConfig, as_config
from sdp4bit.engines.agreement import ShardedRows, agree
from sdp4bit.engines.attach import build
from sdp4bit.engines.deepspeed.zero import FlatGroup, FlatGroupState, ZeRO
from sdp4bit.engines.handle import CommHandle, StateDict, check_state
from sdp4bit.observe.explain import ONE_RANK, one_node_note, one_node_reason
from sdp4bit.observe.stats import ModelState
from sdp4bit.quantization.random import check_numbers

_VERSION = 1


def is_engine(model: object) -> bool:
    """Return whether DeepSpeed communicates for a model; DeepSpeed is recognized without an import."""
    names = (f"{cls.__module__}.{cls.__name__}" for cls in type(model).__mro__)
    return "deepspeed.runtime.engine.DeepSpeedEngine" in names


def attach(
    engine: Any, *, topology: TopologySpec, config: SDP4BitConfig | str | None, skip: object
) -> DeepSpeedCommHandle:
    """Quantize the communication of a DeepSpeed engine; see `sdp4bit.quantize_communication`."""
    settings, failure = SDP4BitConfig(), None
    flats: list[FlatGroup] = []
    try:
        settings = as_config(config)
        if skip is not None:
            raise ValueError(f"skip={skip!r} names FSDP modules, which DeepSpeed does not have")
        check_engine(engine)
        for index in range(len(engine.optimizer.bit16_groups)):
            flats.append(FlatGroup(engine.optimizer, index, start=sum(each.numel for each in flats)))
        check_numbers(buckets=len(flats), ranks=max(len(each.ranks) for each in flats))
    except Exception as caught:  # raising here would leave the other ranks waiting
        failure, flats = caught, []
    rows = [
        ShardedRows(name=f.name, ranks=f.ranks, shard_numel=f.shard_numel, dtypes=(str(f.weights.dtype),))
        for f in flats
    ]
    layouts = agree(
        rows, settings={"engine": "DeepSpeed", "config": settings}, topology=topology, failure=failure
    )
    groups = [FlatGroupState(f, index=i, layout=layouts.shards[f.ranks]) for i, f in enumerate(flats)]
    for group in groups:
        alone, nodes = ONE_RANK if group.layout.size == 1 else "", group.layout.nodes
        group.weights_unquantized_reason = alone or one_node_reason(settings.weights, nodes=nodes)
        group.gradients_unquantized_reason = alone or one_node_reason(settings.gradients, nodes=nodes)
    note = one_node_note([(g.weights_unquantized_reason, g.gradients_unquantized_reason) for g in groups])
    if note:
        warnings.warn(f"sdp4bit: {note}", stacklevel=3)
    if settings.weights is not None:  # every rank holds all weights
        settings = replace(settings, weights=replace(settings.weights, replica="full"))
    handle = DeepSpeedCommHandle(ModelState(groups, telemetry=settings.telemetry), config=settings, note=note)
    zero = ZeRO(engine.optimizer, handle._state, save=handle.state_dict, load=handle.load_state_dict)
    with handle._attaching() as undo:
        build(groups, layouts=layouts, config=settings, undo=undo)
        undo.callback(zero.send_main_weights)
        handle._install(zero, undo=undo, watched=groups)
    handle._log_attached()
    return handle


def check_engine(engine: Any) -> None:
    """Raise ValueError for an engine that is not supported."""
    zero, kind = engine.optimizer, type(engine.optimizer).__name__
    if kind != "DeepSpeedZeroOptimizer":
        raise ValueError(
            f"DeepSpeed's optimizer is {kind} (ZeRO stage {engine.zero_optimization_stage()}), but only the "
            "DeepSpeedZeroOptimizer of stages 1 and 2 has the methods that are replaced. Stage 3 keeps no "
            'weights to add differences to. For stage 1 in bf16, set data_types={"grad_accum_dtype": "bf16"}'
        )
    inner = type(zero.optimizer).__name__
    unsupported = {
        f"{inner}, which communicates itself": inner.startswith(("Onebit", "ZeroOne")),
        f"{inner}, which needs complete gradients of matrices": "Muon" in inner,
        "offload_optimizer, which updates weights on the host": zero.cpu_offload,
        "mixture-of-experts layers, whose groups have other ranks": zero.has_moe_layers,
        "pipeline parallelism, which reduces gradients elsewhere": engine.pipeline_parallelism,
        "tensor or sequence parallelism, whose copies would drift apart": zero.model_parallel_world_size > 1
        or zero.sequence_parallel_size > 1,
        "overlap_comm=true, because gradients are reduced at the end of backward": zero.overlap_comm,
        "contiguous_gradients=false, because a row is contiguous": not zero.contiguous_gradients,
        "torch_autocast, which sends gradients in several dtypes": len(zero.ipg_buckets) > 1,
        "an attached handle: call its remove() first": "step" in vars(zero),
    }
    found = [reason for reason, applies in unsupported.items() if applies]
    if found:
        raise ValueError(f"sdp4bit does not support DeepSpeed with {'; '.join(found)}")


class DeepSpeedCommHandle(CommHandle):
    """Quantized communication of a DeepSpeed engine, whose checkpoints include its state."""

    _engine: ZeRO

    def mark_step(self) -> None:
        """Send a change of the main weights that `engine.step()` did not make; call it on all ranks."""
        self.resync()

    def resync(self) -> None:
        self._check_attached()
        self._refresh_mismatched(self.groups, config=AuditConfig())

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        if wrong:
            self._engine.send_main_weights()
        for group in wrong:
            group.count_full_refresh("weights were changed or differed")
        return wrong

    def state_dict(self) -> StateDict:
        """Return the counters of the rounding bits, equal on all ranks; the parameters are the replica."""
        self._check_attached()
        calls = [group.reductions for group in self.groups]
        return {"format_version": _VERSION, "steps": self._state.steps, "reductions": calls}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; `engine.load_checkpoint` calls it.

        Raises:
            ValueError: the argument is no state of this library or not of this model; nothing is changed.
        """
        self._check_attached()
        keys, groups = ("steps", "reductions"), self.groups
        check_state(state_dict, owner="sdp4bit on DeepSpeed", version=_VERSION, keys=keys)
        if len(state_dict["reductions"]) != len(groups):
            raise ValueError(
                f"the state is not of {len(groups)} parameter groups: {state_dict['reductions']}"
            )
        self._state.steps = state_dict["steps"]
        for group, calls in zip(groups, state_dict["reductions"], strict=True):
            group.reductions = calls

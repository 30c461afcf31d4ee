"""SDP4Bit on PyTorch FSDP2: one call after `fully_shard`.

Replaces the objects that FSDP2 communicates through (`set_custom_all_gather`, `set_custom_reduce_scatter`).
Parameters, gradients, optimizer states and state dicts are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.group import Group
from sdp4bit.collectives.reasons import Unquantized
from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import AuditConfig, SDP4BitConfig, as_config
from sdp4bit.engines.agreement import AgreedNodes, ShardedRows, agree
from sdp4bit.engines.attach import build
from sdp4bit.engines.fsdp2.checks import (
    PARTIAL_GRADIENTS,
    check_group,
    check_staging,
    local_roots,
    match_skipped,
    skip_patterns,
    unquantizable_weights_reason,
    unquantized_reasons,
    warn_of_layout,
)
from sdp4bit.engines.fsdp2.events import FSDPModelState, in_backward
from sdp4bit.engines.fsdp2.group import FSDPGroup
from sdp4bit.engines.fsdp2.hooks import AllGatherHook, ReduceScatterHook, ReplicateGroup
from sdp4bit.engines.fsdp2.state import check_saved, load_state, save_state
from sdp4bit.engines.fsdp2.torch_internals import check_torch_version
from sdp4bit.engines.fsdp2.view import (
    CommObjects,
    FSDPView,
    find_groups,
    named_fsdp_modules,
)
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.quantization.random import check_numbers

Skip = Collection[str] | Callable[[str], bool] | None
"""FSDP modules to leave in full precision: shell-style patterns over their names, or a predicate."""


def quantize_communication(
    model: nn.Module | Sequence[nn.Module],
    config: SDP4BitConfig | str | None = None,
    *,
    topology: TopologySpec = "auto",
    skip: Skip = None,
) -> FSDPCommHandle:
    """Quantize the FSDP2 communication of a model; see `sdp4bit.quantize_communication`."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "sdp4bit.quantize_communication needs torch.distributed: call init_process_group first"
        )
    # 1. Inspect this rank's model and settings. An error is raised below, on all ranks.
    settings, failure = SDP4BitConfig(), None
    roots: list[nn.Module] = []
    views: list[FSDPView] = []
    rows: list[ShardedRows] = []
    skipped: dict[str, Unquantized] = {}
    patterns: list[str] = []
    unmatched: list[str] = []
    try:
        check_torch_version()
        settings = as_config(config)
        roots = local_roots(model)
        views = find_groups(roots)
        patterns = skip_patterns(skip)
        skipped, unmatched = match_skipped(views, skip if callable(skip) else patterns)
        for view in views:
            check_group(view, config=settings, is_skipped=view.name in skipped)
        # All-reduces over the replicate dimension are numbered after the views.
        are_replicated = any(view.is_hybrid for view in views)
        check_numbers(
            buckets=len(views) * (2 if are_replicated else 1),
            ranks=max((view.data_ranks for view in views), default=0),
        )
        rows = [
            ShardedRows(
                name=g.name,
                ranks=g.ranks,
                shard_numel=g.shard_numel,
                dtypes=tuple(sorted(map(str, g.param_dtypes))),
                skipped=g.name in skipped,
                parameters=tuple((s.end - s.start, s.sharded.dim()) for s in g.params),
                unquantizable_weights=unquantizable_weights_reason(g),
            )
            for g in views
        ]
        rows += [
            ShardedRows(
                name=g.name,
                ranks=g.replicate_ranks,
                shard_numel=g.shard_numel,
                dtypes=(str(g.reduce_dtype),),
                skipped=g.name in skipped,
                replicate=True,
            )
            for g in views
            if len(g.replicate_ranks) > 1
        ]
    except Exception as caught:  # raising here would leave the other ranks waiting
        failure, views, rows = caught, [], []
    # 2. Agree with the other ranks, or raise on all of them, before anything is changed.
    is_staged = any(view.staging_comms for view in views)
    layouts = agree(
        rows,
        settings={"config": settings, "skip": "a function" if callable(skip) else patterns},
        topology=topology,
        unmatched=unmatched,
        failure=failure,
        check=partial(check_staging, views, config=settings, skipped=skipped) if is_staged else None,
    )
    if not layouts.shards:
        raise ValueError("sdp4bit.quantize_communication: no rank has passed an FSDP2 model, all passed []")
    # 3. Attach, which creates process views in the same order on all ranks.
    note = warn_of_layout(views, layouts, config=settings, skipped=skipped)
    return FSDPCommHandle(roots, views=views, layouts=layouts, config=settings, skipped=skipped, note=note)


class FSDP2:
    """FSDP2 as an engine, for the roots of one model."""

    def __init__(self, roots: Sequence[nn.Module], state: FSDPModelState) -> None:
        self._roots = roots
        self._state = state

    def groups(self) -> Sequence[Group]:
        return self._state.groups

    def install(self, group: Group) -> Undo:
        """Replace the objects through which FSDP2 communicates for a group."""
        assert isinstance(group, FSDPGroup)
        stock = group.view.comms
        # A quantizer needs sums, because Python cannot read the factor of PREMUL_SUM. Without a quantizer the
        # operation stays, for identical results.
        previous = group.view.install(
            CommObjects(
                all_gather=AllGatherHook(group, self._state, stock=stock.all_gather),
                reduce_scatter=ReduceScatterHook(group, self._state, stock=stock.reduce_scatter),
                force_sum=stock.force_sum or bool(group.gradients.quantizers),
                replicate=stock.replicate
                if stock.replicate is None or group.replicate_layout is None
                else cast(ProcessGroup, ReplicateGroup(group, self._state, stock=stock.replicate)),
            )
        )
        return partial(_restore, group, previous)

    def on_step(self, call: Callable[[int], None]) -> Undo:
        with ExitStack() as undo:
            undo.callback(self._state.on_step(call))
            for hook in self._hooks():
                undo.callback(hook.remove)
            return undo.pop_all().close

    def _hooks(self) -> Iterator[RemovableHandle]:
        """Watch optimizers, loads and forwards, which together show the boundary of a step."""
        state = self._state
        if state.groups:
            yield from state.step_observer.watch_optimizers()
        for group in state.groups:
            yield from map(state.aliases.watch, group.view.params)
        for root in self._roots:
            fsdp_modules = [module for _, module in named_fsdp_modules(root)]
            # On FSDP modules too, because a user may load only a part of the model.
            for module in {root, *fsdp_modules}:
                yield module.register_load_state_dict_post_hook(state.note_load)
            for module in fsdp_modules:
                # Before FSDP2's own hook, which gathers.
                yield module.register_forward_pre_hook(state.note_forward, prepend=True)


def _restore(group: FSDPGroup, previous: CommObjects) -> None:
    try:
        # A failed forward may have left transfers that read and write the replica.
        if group.weights.replica is not None:
            group.weights.replica.wait()
    finally:
        group.view.install(previous)


class FSDPCommHandle(CommHandle):
    """Quantized communication of an FSDP2 model; a Stateful for torch.distributed.checkpoint."""

    _state: FSDPModelState
    _hint = "comm.time_steps(step) measures your steps with and without quantization."

    def __init__(
        self,
        roots: Sequence[nn.Module],
        *,
        views: Sequence[FSDPView],
        layouts: AgreedNodes,
        config: SDP4BitConfig,
        skipped: dict[str, Unquantized],
        note: str,
    ) -> None:
        groups = [
            FSDPGroup(
                view,
                index=index,
                layout=layouts.shards[view.ranks],
                replicate=layouts.replicate.get(view.replicate_ranks) if view.is_hybrid else None,
                separate_parameters=config.separate_parameters,
            )
            for index, view in enumerate(views)
        ]
        for group in groups:
            reasons = unquantized_reasons(group.view, layouts, config=config, skipped=skipped)
            group.weights.unquantized_reason, group.gradients.unquantized_reason, _ = reasons
            group.gradients.unquantized_sum_reason = reasons[-1]
            if config.weights is not None and not group.weights.unquantized_reason:
                sections = group.view.weight_sections(
                    unit=config.weights.group_size, separate=config.separate_parameters
                )
                group.weights.make_replica = partial(
                    WeightReplica, sections=sections, values=group.view.value_ranges
                )
        state = FSDPModelState(groups, roots=roots, telemetry=config.telemetry)
        super().__init__(state, config=config, note=note, layouts=layouts)
        with self._attaching() as undo:
            state.decision_group = build(groups, layouts=layouts, config=config, undo=undo)
            undo.callback(setattr, state, "decision_group", None)
            # Without sdp4bit, FSDP2 gathers the main weights again.
            undo.callback(state.reshard, groups)
            for group in groups:
                undo.callback(setattr, group.view, "is_attached", False)
                group.view.is_attached = True
            self._install(FSDP2(roots, state), undo=undo, watched=groups)
        self._log_attached()

    def mark_step(self) -> None:
        """Report a step of an optimizer that is not a `torch.optim.Optimizer`.

        Its changes are then sent as differences of any size. Without this call they are detected as edits.
        """
        self._check_attached()
        self._state.step_observer.note_step()

    def resync(self) -> None:
        """Refresh the replicas in full precision at the next forward; call it on all ranks.

        Most weight edits are detected automatically (docs/fsdp2.md, "Weight edits that are detected"). Call
        it if weights are replaced between an optimizer step and the next forward, in training mode.
        """
        self._check_attached()
        self._state.request_resync()

    def _check_switch(self) -> None:
        groups = [group.view for group in self._state.groups]
        if in_backward() or any(group.forward_leader or not group.is_idle for group in groups):
            raise RuntimeError(
                "full_precision or time_steps was called during forward or backward: call it between steps"
            )
        self._check_left()

    def _check_left(self) -> None:
        # Quantized sums and FSDP2's means must not be added.
        for group in self._state.groups:
            if group.view.has_partial_gradients:
                raise RuntimeError(f"{group.view.name} {PARTIAL_GRADIENTS}")

    def _audited(self) -> list[ReplicaCopy]:
        mains = [group.main_copy() for group in self._state.groups]
        return [*super()._audited(), *(copy for copy in mains if copy is not None)]

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        state = self._state
        # Tensor-parallel ranks must refresh their copies of a parameter identically.
        if config.on_mismatch == "resync" and state.groups:
            flags = torch.tensor([int(group in wrong) for group in state.groups])
            flags = state.over_copies(flags, state.groups)
            wrong = [group for group, flag in zip(state.groups, flags.tolist(), strict=True) if flag]
        mismatched = [group for group in state.groups if group in wrong]
        state.request_resync(mismatched)
        return mismatched

    def state_dict(self) -> StateDict:
        """Return the state for a bit-exact resume: replica shards as DTensors, counters as tensors."""
        self._check_attached()
        return save_state(self._state) if self._state.groups else {}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; call it on all ranks, before or after the model's own state is loaded.

        If the layout, the weights or the saving rank differ, the replicas are refreshed in full precision
        instead, with a warning.

        Raises:
            ValueError: the argument is no state of this library; nothing is changed.
        """
        self._check_attached()
        with self._on_all_ranks("load_state_dict"):
            if self._state.groups:
                check_saved(state_dict)
        if self._state.groups:
            load_state(self._state, state_dict)
        self._state.forget_warnings()

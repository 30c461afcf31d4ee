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
from sdp4bit.config import AuditConfig, Auto, SDP4BitConfig, Settings, as_settings, settings_in
from sdp4bit.engines.agreement import AgreedNodes, ShardedRows, agree
from sdp4bit.engines.attach import connect, equip
from sdp4bit.engines.auto import check_choice
from sdp4bit.engines.choosing import ChoosingHandle
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
from sdp4bit.engines.handle import StateDict
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.quantization.random import check_numbers

Skip = Collection[str] | Callable[[str], bool] | None
"""FSDP modules to leave in full precision: shell-style patterns over their names, or a predicate."""


def quantize_communication(
    model: nn.Module | Sequence[nn.Module],
    config: Settings = None,
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
    settings, failure = as_settings(None), None
    roots: list[nn.Module] = []
    views: list[FSDPView] = []
    rows: list[ShardedRows] = []
    skipped: dict[str, Unquantized] = {}
    patterns: list[str] = []
    unmatched: list[str] = []
    try:
        check_torch_version()
        settings = as_settings(config)
        roots = local_roots(model)
        views = find_groups(roots)
        patterns = skip_patterns(skip)
        skipped, unmatched = match_skipped(views, skip if callable(skip) else patterns)
        for view in views:
            for each in settings_in(settings):
                check_group(view, config=each, is_skipped=view.name in skipped)
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

    def check(layouts: AgreedNodes) -> None:
        for each in settings_in(settings):
            check_staging(views, layouts, config=each, skipped=skipped)

    layouts = agree(
        rows,
        settings={"config": settings, "skip": "a function" if callable(skip) else patterns},
        topology=topology,
        unmatched=unmatched,
        failure=failure,
        check=check if is_staged else None,
    )
    if not layouts.shards:
        raise ValueError("sdp4bit.quantize_communication: no rank has passed an FSDP2 model, all passed []")
    # 3. Attach, which creates process views in the same order on all ranks.
    return FSDPCommHandle(roots, views=views, layouts=layouts, settings=settings, skipped=skipped)


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
        previous = group.view.install(
            CommObjects(
                all_gather=AllGatherHook(group, self._state, stock=stock.all_gather),
                reduce_scatter=ReduceScatterHook(group, self._state, stock=stock.reduce_scatter),
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


class FSDPCommHandle(ChoosingHandle):
    """Quantized communication of an FSDP2 model; a Stateful for torch.distributed.checkpoint."""

    _state: FSDPModelState
    _hint = "comm.time_steps(step) measures your steps with and without quantization."

    def __init__(
        self,
        roots: Sequence[nn.Module],
        *,
        views: Sequence[FSDPView],
        layouts: AgreedNodes,
        settings: SDP4BitConfig | Auto,
        skipped: dict[str, Unquantized],
    ) -> None:
        configs = settings_in(settings)
        groups = [
            FSDPGroup(
                view,
                index=index,
                layout=layouts.shards[view.ranks],
                replicate=layouts.replicate.get(view.replicate_ranks) if view.is_hybrid else None,
            )
            for index, view in enumerate(views)
        ]
        # Of the settings that quantize most.
        note = warn_of_layout(views, layouts, config=configs[-1], skipped=skipped)
        state = FSDPModelState(groups, roots=roots, telemetry=configs[-1].telemetry)
        super().__init__(state, config=configs[-1], note=note, layouts=layouts)
        self._skipped = skipped
        with self._attaching() as undo:
            self._connections = connect(layouts, configs, undo=undo)
            state.decision_group = self._connections.host
            undo.callback(setattr, state, "decision_group", None)
            # Without sdp4bit, FSDP2 gathers the main weights again.
            undo.callback(state.reshard, groups)
            for group in groups:
                undo.callback(setattr, group.view, "is_attached", False)
                group.view.is_attached = True
            if isinstance(settings, Auto):
                state.search = self._search_among(settings, host=self._connections.host)
            self._equip()
            self._install(FSDP2(roots, state), undo=undo, watched=groups)
        self._log_attached()

    def _quantizes(self, config: SDP4BitConfig) -> bool:
        reasons = (self._reasons(group, config) for group in self._state.groups)
        return any(None in each for each in reasons)

    def _reasons(
        self, group: FSDPGroup, config: SDP4BitConfig
    ) -> tuple[Unquantized | None, Unquantized | None, Unquantized | None]:
        assert self._layouts is not None
        return unquantized_reasons(group.view, self._layouts, config=config, skipped=self._skipped)

    def _copied_over(self) -> list[tuple[int, ...]]:
        # Tensor-parallel ranks.
        params = (param for group in self._state.groups for param in group.view.params)
        return [*dict.fromkeys(tuple(ranks) for param in params for ranks in param.split_over)]

    def _equip(self) -> None:
        """Give the groups the collectives of the settings."""
        config, groups = self.config, self._state.groups
        for group in groups:
            weights, gradients = group.weights, group.gradients
            weights.unquantized_reason, gradients.unquantized_reason, gradients.unquantized_sum_reason = (
                self._reasons(group, config)
            )
            group.separate_parameters = gradients.separate_parameters = config.separate_parameters
            if config.weights is not None and not weights.unquantized_reason:
                sections = group.view.weight_sections(
                    unit=config.weights.group_size, separate=config.separate_parameters
                )
                weights.make_replica = partial(
                    WeightReplica, sections=sections, values=group.view.value_ranges
                )
        equip(groups, self._connections, config=config)

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
        if in_backward() or not self._is_idle():
            raise RuntimeError(
                "full_precision or time_steps was called during forward or backward: call it between steps"
            )
        self._check_left()

    def _is_idle(self) -> bool:
        views = [group.view for group in self._state.groups]
        return all(view.is_idle and not view.forward_leader for view in views)

    def _refusal(self) -> str:
        if not self._is_idle():
            return "a pass has begun during another"
        partial_in = [group.view.name for group in self._state.groups if group.view.has_partial_gradients]
        return f"{partial_in[0]} {PARTIAL_GRADIENTS}" if partial_in else ""

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
        return save_state(self._state) | self._saved_search() if self._state.groups else {}

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
                check_choice(state_dict)
        self._load_search(state_dict)
        if self._state.groups:
            load_state(self._state, state_dict)
        self._state.forget_warnings()

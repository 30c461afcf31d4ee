"""The handle of an attached Megatron-Core model, which owns its replicas, reductions and patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist

from sdp4bit.collectives.group import Group
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.collectives.streams import SideStream, has_one_queue
from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import AuditConfig, SDP4BitConfig
from sdp4bit.engines.agreement import AgreedNodes
from sdp4bit.engines.attach import build
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.explain import (
    layout_reason,
    one_hop_note,
    one_node_note,
)
from sdp4bit.warn import warn_user
from sdp4bit_megatron.buckets import (
    REPLICATED_DTYPES,
    MegatronBucket,
    pipeline_group,
    replicated_ranges,
)
from sdp4bit_megatron.communication import BucketReplica, BucketState, MegatronModelState
from sdp4bit_megatron.objects import Chunk, Optimizer
from sdp4bit_megatron.patches import GroupPatch, OptimizerPatch
from sdp4bit_megatron.staged import StagedCollectives
from sdp4bit_megatron.state import checked, load_counters, save_counters
from sdp4bit_megatron.tensor_parallel import TensorParallelCopies

EXPERTS_SPLIT = Unquantized(Cause.UNSUPPORTED, "experts under tensor parallelism")


class MegatronCore:
    """Megatron-Core as an engine: replaces methods of bucket groups and distributed optimizers."""

    def __init__(
        self,
        handle: MegatronCommHandle,
        state: MegatronModelState,
        *,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._handle = handle
        self._state = state
        self._optimizers = optimizers
        self.group_patches: list[GroupPatch] = []
        self.optimizer_patches: list[OptimizerPatch] = []
        device = state.device or torch.device("cpu")
        self._weight_stream, self._gradient_stream = SideStream(device), SideStream(device)
        self.staged: StagedCollectives | None = None
        if has_one_queue(device):
            self.staged = StagedCollectives(device, self._gradient_stream)
            for group in state.groups:
                group.is_staged = group.view.bucket_group.ddp_config.overlap_grad_reduce

    def groups(self) -> Sequence[Group]:
        return self._state.groups

    def install(self, group: Group) -> Undo:
        """Replace the collectives of a bucket's bucket group, together with those of its other buckets."""
        assert isinstance(group, BucketState)
        bucket_group = group.view.bucket_group
        groups = [each for each in self._state.groups if each.view.bucket_group is bucket_group]
        if group.layout.size == 1 or group is not groups[0]:
            return lambda: None
        patch = GroupPatch(
            bucket_group,
            groups,
            state=self._state,
            weight_stream=self._weight_stream,
            gradient_stream=self._gradient_stream,
            staged=self.staged,
        )
        patch.install(self._handle)
        self.group_patches.append(patch)
        return patch.remove

    def on_step(self, call: Callable[[int], None]) -> Undo:
        """Replace the optimizers' copy of main weights into model weights, which ends a step."""
        with ExitStack() as undo:
            undo.callback(self._state.on_step(call))
            counted = _counted(self._optimizers, self._state.groups)
            for optimizer in self._optimizers:
                patch = OptimizerPatch(
                    optimizer,
                    [group for group in self._state.groups if group.view.optimizer is optimizer],
                    state=self._state if any(optimizer is each for each in counted) else None,
                    save=self._handle.state_dict,
                    load=self._handle.load_state_dict,
                )
                patch.install(self._handle)
                undo.callback(patch.remove)
                self.optimizer_patches.append(patch)
            return undo.pop_all().close

    def finish_pending(self) -> None:
        """Wait for transfers in flight."""
        if self.staged is not None:
            self.staged.finish()
        for patch in self.group_patches:
            patch.finish_pending()


def _counted(optimizers: Sequence[Optimizer], groups: Sequence[BucketState]) -> Sequence[Optimizer]:
    """Return the optimizers whose steps make up one step."""
    # A step ends when the buckets without experts have new weights. The optimizer of experts steps later,
    # when the other weights may have been sent.
    dense = [
        optimizer
        for optimizer in optimizers
        if any(group.view.optimizer is optimizer and not group.view.is_expert for group in groups)
    ]
    return dense or optimizers


class MegatronCommHandle(CommHandle):
    """Quantized communication of a Megatron-Core model.

    Megatron's checkpoints include its state in the optimizer's part. `state_dict` and `load_state_dict` are
    for other checkpoints. A step ends when the optimizer has updated the main weights; the optimizer of
    experts steps afterwards.
    """

    _state: MegatronModelState
    _engine: MegatronCore

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[MegatronBucket],
        layouts: AgreedNodes,
        config: SDP4BitConfig,
        topology: TopologySpec,
    ) -> None:
        groups = [
            BucketState(bucket, index=index, layout=layouts.shards[bucket.ranks])
            for index, bucket in enumerate(buckets)
        ]
        state = MegatronModelState(
            groups, telemetry=config.telemetry, optimizers=len(_counted(optimizers, groups))
        )
        copies = TensorParallelCopies(chunks, buckets)
        for group in groups:
            _choose(group, copies, config=config)
        note = one_node_note(
            [(group.weights.unquantized_reason, group.gradients.unquantized_reason) for group in groups]
        )
        super().__init__(state, config=config, note=note, layouts=layouts)
        self.topology = topology
        quantized = [group.layout for group in groups if not group.gradients.unquantized_reason]
        for each in filter(None, (note, one_hop_note(quantized))):
            warn_user(each, groups[0].layout.ranks)
        with self._attaching() as undo:
            build(groups, layouts=layouts, config=config, undo=undo)
            for group in groups:
                replica = group.weights.replica
                if replica is not None:
                    # Ranks may start from different random weights, which Megatron's first gather would
                    # equalize. The replica is written to, and so its own row is copied.
                    group.weights.refresh(replica.own_shard.clone())
            undo.callback(copies.remove)
            copies.install(gradients_quantized=any(group.gradients.reduction is not None for group in groups))
            stages = pipeline_group(chunks)
            self._install(
                MegatronCore(self, state, optimizers=optimizers),
                undo=undo,
                # Experts step later.
                watched=[
                    c for c in groups if (c.weights.replica or c.gradients.reduction) and not c.view.is_expert
                ],
                where="" if stages is None else f"pipeline stage {stages.rank()}",
            )
            undo.callback(self._send_main_weights)
        self._log_attached()

    def mark_step(self) -> None:
        """Report a change of the main weights outside optimizer.step(); the next parameter sync sends it.

        Call it on all ranks.
        """
        self._check_attached()
        self._wait_for_ranks("mark_step")
        for optimizer_patch in self._engine.optimizer_patches:
            optimizer_patch.mark_changed()
        for patch in self._engine.group_patches:
            patch.group.param_gather_dispatched = False

    def resync(self) -> None:
        """Refresh the replicas in full precision; call it on all ranks."""
        self._check_attached()
        self._wait_for_ranks("resync")
        self._refresh_all()

    def _refresh_all(self) -> None:
        self._engine.finish_pending()
        for group in self._state.groups:
            if group.weights.replica is not None:
                group.refresh_in_full()

    def _audit(self, config: AuditConfig) -> bool:
        self._engine.finish_pending()
        for group in self._state.groups:
            if group.weights.replica is not None:
                group.weights.replica.attach_rows()
        return super()._audit(config)

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        for group in self._state.groups:
            if group in wrong:
                group.refresh_in_full()
        return wrong

    def state_dict(self) -> StateDict:
        """Return the state for a bit-exact resume, in addition to Megatron's parameters and optimizer state.

        It consists of counters that are equal on every rank. Megatron's parameters are the replica.
        """
        self._check_attached()
        return save_counters(self._state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; call it on all ranks, before or after Megatron's own is loaded.

        Raises:
            ValueError: the argument is no state of this library; nothing is changed.
        """
        self._check_attached()
        with self._on_all_ranks("load_state_dict"):
            counters = checked(state_dict, self._state)
        for patch in self._engine.optimizer_patches:
            patch.steps = counters["steps"]
        load_counters(self._state, counters)

    def _send_main_weights(self) -> None:
        """Let Megatron-Core start from the main weights after the removal."""
        if dist.is_initialized():
            self._refresh_all()


def _choose(group: BucketState, copies: TensorParallelCopies, *, config: SDP4BitConfig) -> None:
    """Set the reasons why a bucket is not quantized, and its kind of replica."""
    bucket = group.view
    reason = _unquantized_reason(group, is_split=copies.are_sought)
    group.weights.unquantized_reason = reason or layout_reason(config.weights, group.layout)
    group.gradients.unquantized_reason = reason or layout_reason(config.gradients, group.layout)
    if config.gradients is not None and not group.gradients.unquantized_reason:
        exempt = config.gradients.exempts(numel=bucket.shard_numel)
        group.gradients.unquantized_reason = Unquantized(Cause.UNSUPPORTED, exempt) if exempt else None
    if not group.weights.unquantized_reason:
        exact_ranges = replicated_ranges(bucket, copies.parameters)
        group.weights.make_replica = partial(BucketReplica, bucket=bucket, exact_ranges=exact_ranges)


def _unquantized_reason(group: BucketState, *, is_split: bool) -> Unquantized | None:
    """Return why neither weights nor gradients of a bucket are quantized; None if they can be.

    Args:
        is_split: whether tensor parallelism is used, which may split experts or copy them.
    """
    bucket = group.view
    if group.layout.size == 1:
        return Unquantized(Cause.ONE_RANK)
    if bucket.is_expert and is_split:
        return EXPERTS_SPLIT
    if bucket.param_dtype not in REPLICATED_DTYPES:
        dtype = str(bucket.param_dtype).removeprefix("torch.")
        return Unquantized(Cause.UNSUPPORTED, f"{dtype} parameters")
    return None

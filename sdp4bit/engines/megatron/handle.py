"""The handle of an attached Megatron-Core model, which owns its replicas, reductions and patches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import (
    NodeLayout,
    Topology,
    TopologySpec,
    create_topologies,
    destroy_topology,
)
from sdp4bit.collectives.work import SideStream, has_one_queue
from sdp4bit.config import AlertConfig, AuditConfig, SDP4BitConfig
from sdp4bit.engines.group import GroupState
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.engines.megatron.buckets import (
    REPLICATED_DTYPES,
    MegatronBucket,
    pipeline_group,
    replicated_ranges,
)
from sdp4bit.engines.megatron.communication import BucketReplica, BucketState, MegatronModelState
from sdp4bit.engines.megatron.objects import Chunk, Optimizer
from sdp4bit.engines.megatron.patches import GroupPatch, OptimizerPatch
from sdp4bit.engines.megatron.staged import StagedCollectives
from sdp4bit.engines.megatron.state import checked, load_counters, save_counters
from sdp4bit.engines.megatron.tensor_parallel import TensorParallelCopies
from sdp4bit.observe.alerts import Alerts
from sdp4bit.observe.explain import ONE_RANK, describe_gradients, one_node_note, one_node_reason
from sdp4bit.observe.measures import Telemetry

EXPERTS_SPLIT = "experts under tensor parallelism"  # reason why a bucket of experts is not quantized


class MegatronCommHandle(CommHandle):
    """Quantized communication of a Megatron-Core model.

    Megatron's checkpoints include its state in the optimizer's part. `state_dict` and `load_state_dict` are
    for other checkpoints. A step ends when the optimizer has updated the main weights; the optimizer of
    experts steps afterwards.
    """

    _state: MegatronModelState

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[MegatronBucket],
        layouts: dict[tuple[int, ...], NodeLayout],
        config: SDP4BitConfig,
        topology: TopologySpec,
    ) -> None:
        comms = [
            BucketState(bucket, index=index, layout=layouts[bucket.ranks])
            for index, bucket in enumerate(buckets)
        ]
        # A step ends when the buckets without experts have new weights. The optimizer of experts steps later,
        # when the other weights may have been sent.
        counted = [
            optimizer
            for optimizer in optimizers
            if any(bucket.optimizer is optimizer and not bucket.is_expert for bucket in buckets)
        ] or optimizers
        state = MegatronModelState(comms, telemetry=config.telemetry, optimizers=len(counted))
        super().__init__(state, config=config)
        self.topology = topology
        self._copies = TensorParallelCopies(chunks, buckets)
        self._staged: StagedCollectives | None = None
        self._choose(list(layouts.values()))
        self._note = one_node_note(
            [(comm.weights_unquantized_reason, comm.gradients_unquantized_reason) for comm in comms]
        )
        if self._note:
            warnings.warn(f"sdp4bit: {self._note}", stacklevel=3)
        self._groups = self._group_patches()
        self._optimizers = [
            OptimizerPatch(
                optimizer,
                [comm for comm in comms if comm.group.optimizer is optimizer],
                state=state if any(optimizer is each for each in counted) else None,
                save=self.state_dict,
                load=self.load_state_dict,
            )
            for optimizer in optimizers
        ]
        if config.alerts is not None:
            self._watch(_alerts(chunks, comms, telemetry=state.telemetry, config=config.alerts))
        for comm in comms:
            if comm.replica is not None:
                # Ranks may start from different random weights, which Megatron's first gather would equalize.
                comm.replica.equalize()
                comm.count_full_refresh()
        for patch in (*self._groups, *self._optimizers):
            patch.install(self)
        self._copies.install(gradients_quantized=any(comm.reduction is not None for comm in comms))
        self._log_attached()

    def _choose(self, layouts: Sequence[NodeLayout]) -> None:
        """Create each bucket's replica and reduction, or set the reason why it has none."""
        config = self.config
        # Separate process groups, because one communicator would serialize gathers and reductions.
        weights = create_topologies(layouts) if config.weights is not None else {}
        gradients = create_topologies(layouts) if config.gradients is not None else {}
        self._topologies: list[Topology] = [*weights.values(), *gradients.values()]
        weight_scratch, gradient_scratch = Scratch(), Scratch()
        for comm in self._state.groups:
            bucket = comm.group
            reason, nodes = _unquantized_reason(comm, is_split=self._copies.are_sought), comm.layout.nodes
            comm.weights_unquantized_reason = reason or one_node_reason(config.weights, nodes=nodes)
            comm.gradients_unquantized_reason = reason or one_node_reason(config.gradients, nodes=nodes)
            if config.weights is not None and not comm.weights_unquantized_reason:
                comm.replica = BucketReplica(
                    bucket,
                    weights[bucket.ranks],
                    config=config.weights,
                    scratch=weight_scratch,
                    exact_ranges=replicated_ranges(bucket, self._copies.parameters),
                    traffic=comm.weight_traffic,
                )
            if config.gradients is None or comm.gradients_unquantized_reason:
                continue
            if bucket.shard_numel < config.gradients.min_numel:
                comm.gradients_unquantized_reason = describe_gradients(
                    config.gradients, comm.layout, bucket.shard_numel
                )
                continue
            topology = gradients[bucket.ranks]
            comm.reduction = QuantizedReduceScatter(
                topology,
                config=config.gradients,
                seed=config.seed,
                rank=topology.row,
                bucket=comm.index,
                traffic=comm.gradient_traffic,
                scratch=gradient_scratch,
                name=bucket.name,
            )

    def _group_patches(self) -> list[GroupPatch]:
        comms_of: dict[int, list[BucketState]] = {}
        for comm in self._state.groups:
            if comm.layout.size > 1:
                comms_of.setdefault(id(comm.group.bucket_group), []).append(comm)
        if not comms_of:
            return []
        device = next(iter(comms_of.values()))[0].group.device
        weight_stream, gradient_stream = SideStream(device), SideStream(device)
        if has_one_queue(device):
            self._staged = StagedCollectives(device, gradient_stream)
            for comm in self._state.groups:
                comm.is_staged = comm.group.bucket_group.ddp_config.overlap_grad_reduce
        return [
            GroupPatch(
                comms[0].group.bucket_group,
                comms,
                state=self._state,
                weight_stream=weight_stream,
                gradient_stream=gradient_stream,
                staged=self._staged,
            )
            for comms in comms_of.values()
        ]

    def mark_step(self) -> None:
        """Report a change of the main weights outside optimizer.step(); the next parameter sync sends it."""
        self._check_attached()
        for patch in self._optimizers:
            patch.mark_changed()
        for group in self._groups:
            group.group.param_gather_dispatched = False

    def resync(self) -> None:
        """Refresh the replicas in full precision; call it on all ranks."""
        self._check_attached()
        self._finish_pending()
        for comm in self._state.groups:
            if comm.replica is not None:
                comm.refresh_fully()

    def _finish_pending(self) -> None:
        if self._staged is not None:
            self._staged.finish()
        for group in self._groups:
            group.finish_pending()

    def _audit(self, config: AuditConfig) -> bool:
        self._finish_pending()
        return super()._audit(config)

    def _refresh_mismatched(
        self, wrong: Sequence[GroupState], *, config: AuditConfig
    ) -> Sequence[GroupState]:
        for comm in self._state.groups:
            if comm in wrong:
                comm.refresh_fully()
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
        counters = checked(state_dict)
        for patch in self._optimizers:
            patch.steps = counters["steps"]
        load_counters(self._state, counters)

    def remove(self) -> None:
        """Restore Megatron-Core's own communication, starting from the main weights; call it on all ranks.

        After `destroy_process_group` the parameters stay unchanged, because nothing can be sent.
        """
        try:
            if not self._removed and dist.is_initialized():
                self.resync()
        finally:
            self._remove()

    def _remove(self) -> None:
        for patch in (*self._groups, *self._optimizers):
            patch.remove()
        self._copies.remove()
        for topology in self._topologies:
            destroy_topology(topology)
        self._end()
        self._groups, self._optimizers, self._topologies = [], [], []


def _alerts(
    chunks: Sequence[Chunk], comms: Sequence[BucketState], *, telemetry: Telemetry, config: AlertConfig
) -> Alerts:
    """Return the alerts of the quantized buckets without experts, which step later."""
    watched = [
        comm.watched(config, process_group=comm.group.process_group)
        for comm in comms
        if (comm.replica is not None or comm.reduction is not None) and not comm.group.is_expert
    ]
    stages = pipeline_group(chunks)
    return Alerts(
        watched,
        telemetry=telemetry,
        where="" if stages is None else f"pipeline stage {stages.rank()}",
    )


def _unquantized_reason(comm: BucketState, *, is_split: bool) -> str:
    """Return why neither weights nor gradients of a bucket are quantized; "" if they can be.

    Args:
        is_split: whether tensor parallelism is used, which may split experts or copy them.
    """
    bucket = comm.group
    if comm.layout.size == 1:
        return ONE_RANK
    if bucket.is_expert and is_split:
        return EXPERTS_SPLIT
    if bucket.param_dtype not in REPLICATED_DTYPES:
        return f"{str(bucket.param_dtype).removeprefix('torch.')} parameters"
    return ""

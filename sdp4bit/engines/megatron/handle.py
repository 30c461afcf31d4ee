"""The handle of an attached Megatron-Core model, which owns all that replaces its communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import NodeLayout, TopologySpec, create_topologies, destroy_topology
from sdp4bit.collectives.work import SideStream
from sdp4bit.config import AuditConfig, SDP4BitConfig
from sdp4bit.engines.alert_log import AlertCallback
from sdp4bit.engines.audit import ReplicaCopy, audit_replicas
from sdp4bit.engines.fallback import Alert
from sdp4bit.engines.measures import SQUARES, SampledMeasures, group_stats, total_measures
from sdp4bit.engines.megatron.alerts import BucketAlerts
from sdp4bit.engines.megatron.buckets import REPLICATED_DTYPES, MegatronBucket, replicated_spans
from sdp4bit.engines.megatron.comm import (
    BucketComm,
    BucketGradients,
    BucketWeights,
    Channel,
    weight_number,
)
from sdp4bit.engines.megatron.explain import explain_buckets
from sdp4bit.engines.megatron.measures import bucket_squares
from sdp4bit.engines.megatron.patches import Clock, GroupPatch, OptimizerPatch
from sdp4bit.engines.megatron.state import checked, load_counters, save_counters
from sdp4bit.engines.megatron.tensor_parallel import TensorParallelCopies
from sdp4bit.traffic import Traffic


class MegatronCommHandle:
    """Quantized communication of a Megatron-Core model, with the methods of the FSDP2 handle.

    Made by :func:`sdp4bit.megatron.quantize_communication`. Its state travels in the optimizer's part of
    Megatron's own checkpoints; `state_dict` and `load_state_dict` are for programs that save otherwise.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        *,
        optimizers: Sequence[Any],
        buckets: Sequence[MegatronBucket],
        layouts: dict[tuple[int, ...], NodeLayout],
        config: SDP4BitConfig,
        topology: TopologySpec,
        process_group: ProcessGroup | None,
    ) -> None:
        self.config = config
        self._process_group = process_group
        self.topology = topology
        sampled = SampledMeasures(config.telemetry, [bucket.name for bucket in buckets])
        # A step border is when the buckets that are quantized have new weights. The optimizer of expert
        # buckets steps later, when the others' may have been sent.
        counted = [
            optimizer
            for optimizer in optimizers
            if any(bucket.optimizer is optimizer and not bucket.is_expert for bucket in buckets)
        ] or optimizers
        self._clock = Clock(sampled, optimizers=len(counted))
        self._clock.step_listeners.append(self._at_step_border)
        self._copies = TensorParallelCopies(chunks, buckets)
        self._topologies: list[Any] = []
        self._comms = [
            BucketComm(bucket, layout=None if bucket.is_expert else layouts[bucket.ranks])
            for bucket in buckets
        ]
        self._choose(list(layouts.values()))
        self._groups = self._group_patches()
        self._optimizers = [
            OptimizerPatch(
                optimizer,
                [comm for comm in self._comms if comm.bucket.optimizer is optimizer],
                clock=self._clock if any(optimizer is each for each in counted) else None,
                save=self.state_dict,
                load=self.load_state_dict,
            )
            for optimizer in optimizers
        ]
        self._alerts: BucketAlerts | None = None
        if config.alerts is not None:
            self._alerts = BucketAlerts(
                chunks,
                self._comms,
                sampled=sampled,
                config=config.alerts,
                takes_steps=bool(optimizers),
            )
        self._refresh_all(equalize=True)
        self._patches: list[GroupPatch | OptimizerPatch] = [*self._groups, *self._optimizers]
        for patch in self._patches:
            patch.install(self)
        self._copies.install(gradients_quantized=config.gradients is not None)
        if config.audit is not None:
            self._clock.step_listeners.append(self._audit_if_due)

    def _choose(self, layouts: Sequence[NodeLayout]) -> None:
        """Give every bucket what quantizes its weights and its gradients, or the reason why nothing does."""
        # Separate process groups: one communicator would run gathers and reductions one after the other.
        weights = self._channels(layouts) if self.config.weights is not None else {}
        gradients = self._channels(layouts) if self.config.gradients is not None else {}
        for index, comm in enumerate(self._comms):
            bucket, numel = comm.bucket, comm.bucket.row_numel
            reason = _dense_because(comm)
            comm.weights_dense_because = reason or ("" if self.config.weights else "off in the configuration")
            comm.gradients_dense_because = reason or (
                "" if self.config.gradients else "off in the configuration"
            )
            if self.config.weights is not None and not reason:
                comm.weights = BucketWeights(
                    bucket,
                    weights[bucket.ranks],
                    config=self.config.weights,
                    number=weight_number(bucket, index),
                    exact_spans=replicated_spans(bucket, self._copies.parameters),
                    traffic=comm.traffic,
                )
            if self.config.gradients is not None and not reason and numel >= self.config.gradients.min_numel:
                comm.gradients = BucketGradients(
                    gradients[bucket.ranks],
                    config=self.config.gradients,
                    number=index,
                    traffic=comm.traffic,
                    name=bucket.name,
                )

    def _channels(self, layouts: Sequence[NodeLayout]) -> dict[tuple[int, ...], Channel]:
        topologies = create_topologies(layouts, within=self._process_group)
        self._topologies += topologies.values()
        scratch = Scratch()
        return {
            ranks: Channel(topology=topology, seed=self.config.seed, scratch=scratch)
            for ranks, topology in topologies.items()
        }

    def _group_patches(self) -> list[GroupPatch]:
        comms_of: dict[int, list[BucketComm]] = {}
        for comm in self._comms:
            if comm.layout is not None and comm.layout.size > 1:
                comms_of.setdefault(id(comm.bucket.group), []).append(comm)
        if not comms_of:
            return []
        device = next(iter(comms_of.values()))[0].bucket.gradients.device
        weight_stream, gradient_stream = SideStream(device), SideStream(device)
        return [
            GroupPatch(
                comms[0].bucket.group,
                comms,
                clock=self._clock,
                gradients=self.config.gradients,
                weight_stream=weight_stream,
                gradient_stream=gradient_stream,
            )
            for comms in comms_of.values()
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _refresh_all(self, *, equalize: bool = False) -> None:
        for comm in self._comms:
            if comm.weights is not None:
                # Ranks may start from different random weights; Megatron's first gather would level them.
                comm.weights.equalize() if equalize else comm.weights.refresh_full()

    def mark_step(self) -> None:
        """The main weights have changed outside optimizer.step(); the next parameter sync sends that."""
        for patch in self._optimizers:
            patch.mark_changed()
        for group in self._groups:
            group.group.param_gather_dispatched = False

    def resync(self) -> None:
        """The replicas are the main weights again, sent in full precision; call it on all ranks."""
        for group in self._groups:
            group.finish_pending()
        self._refresh_all()

    def _audit_if_due(self, step: int) -> None:
        if self.config.audit is not None and step % self.config.audit.interval == 0:
            self.audit()

    def alerts(self) -> list[Alert]:
        """Return the alerts so far, oldest first, at most the last thousand; those of this pipeline stage."""
        return [] if self._alerts is None else self._alerts.log.all()

    def on_alert(self, callback: AlertCallback) -> RemovableHandle:
        """The callback is called with every :class:`Alert` of this stage, on all its ranks, until removed.

        Raises:
            ValueError: the configuration has no alerts.
        """
        if self._alerts is None:
            raise ValueError("there will be no alerts: attach with SDP4BitConfig(alerts=AlertConfig(...))")
        return self._alerts.log.listen(callback)

    @torch.inference_mode(False)
    @torch.no_grad()
    def audit(self) -> bool:
        """Return whether all ranks hold the same parameters bit for bit; call it on all ranks, between steps.

        Raises:
            ReplicaMismatchError: on all ranks of the group, unless the configuration asks for a resync.
        """
        self._check_attached()
        for group in self._groups:
            group.finish_pending()
        copies = [
            ReplicaCopy(
                name=comm.bucket.name,
                rows=comm.bucket.weights,
                layout=comm.layout,
                process_group=comm.bucket.process_group,
                is_full=True,
                traffic=comm.traffic,
            )
            for comm in self._comms
            if comm.weights is not None and comm.layout is not None
        ]
        names = audit_replicas(copies, self.config.audit or AuditConfig())
        for comm in self._comms:
            if comm.weights is not None and comm.bucket.name in names:
                comm.weights.refresh_full()
        return not names

    def explain(self) -> str:
        """Return a table: per bucket what is quantized, how, bytes of the last step, or why it is not."""
        return explain_buckets(self._comms, self.config)

    def stats(self) -> dict[str, Any]:
        """Return what this rank sent and what quantization cost; cheap, and waits for nothing.

        Returns:
            "steps": optimizer steps so far. "last_step", "total": bytes this rank sent inside its node
            ("intra_bytes") and to other nodes ("inter_bytes"), how much of both is padding, and the number of
            collectives; a step ends when the optimizer has updated the main weights. "compression_ratio":
            bytes of plain Megatron-Core over bytes sent between nodes in the last step. As on FSDP2:
            "exchange_seconds"; and of samples, at the "sampled_step", "weight_drift", "weight_error",
            "gradient_error" and "nonfinite_groups". Expert buckets do not count.
        """
        last = sum((comm.traffic.last_step for comm in self._comms), Traffic())
        return {
            "steps": self._clock.steps,
            "last_step": last.as_dict(),
            "total": sum((comm.traffic.total for comm in self._comms), Traffic()).as_dict(),
            "compression_ratio": last.compression_ratio,
            "exchange_seconds": last.exchange_seconds,
            **self._clock.sampled.totals(),
        }

    def group_stats(self) -> list[dict[str, Any]]:
        """Return one dictionary per bucket about this rank; cheap, and waits for nothing.

        Returns:
            "name"; of the last step "intra_bytes", "inter_bytes", "compression_ratio", "exchange_seconds" and
            its parts "intra_seconds" and "inter_seconds"; of the last measured step "gradient_error",
            "weight_error", "weight_drift" and "nonfinite_groups", as in `stats()`; "weight_bits" and
            "gradient_bits" (on the last hop) as they are now, None for full precision.
        """
        measured = {measures.name: measures for measures in self._clock.sampled.by_group()}
        return [
            group_stats(
                comm.bucket.name,
                comm.traffic.last_step,
                measures=measured.get(comm.bucket.name),
                weight_bits=None if comm.weights is None else comm.weights.replica.bits,
                gradient_bits=comm.gradient_bits,
            )
            for comm in self._comms
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Return what quantization costs now, over whole shards; waits for the device.

        Returns:
            "weight_drift", "weight_error": of the weights and replicas as they are. "gradient_error",
            "nonfinite_groups": of the gradients that were sampled last. As in `stats()`.
        """
        rows = [bucket_squares(comm, sample_numel=None) for comm in self._comms]
        squares = torch.stack(rows) if rows else torch.empty(0, SQUARES)
        return total_measures(self._clock.sampled.with_last_gradients(squares))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _at_step_border(self, step: int) -> None:
        sampled = self._clock.sampled
        if sampled.is_due(step):
            rows = [bucket_squares(comm, sample_numel=sampled.sample_numel) for comm in self._comms]
            sampled.publish(torch.stack(rows), step=step)
            if self._alerts is not None:
                self._alerts.at_step_border(step)
        for comm in self._comms:
            if comm.gradients is not None:
                # A bucket without a gradient in the next measured step is not to report this one again.
                comm.gradients.sample = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-exact resume needs beside Megatron's parameters and optimizer state.

        The replica is Megatron's parameters themselves; what is added are counters and the places of all
        stages' buckets on the ladder, the same on every rank.
        """
        self._check_attached()
        ladder = {} if self._alerts is None else self._alerts.save()
        counters = save_counters(self._comms, steps=self._clock.steps)
        return {**counters, **({"ladder": ladder} if ladder else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; call it on all ranks, before or after Megatron's own is loaded.

        Raises:
            ValueError: not a state of this library; nothing is changed.
        """
        self._check_attached()
        counters, ladder = checked(state_dict)
        self._clock.steps = counters["steps"]
        for patch in self._optimizers:
            patch.set_steps(counters["steps"])
        load_counters(self._comms, counters)
        if self._alerts is not None:
            self._alerts.load(ladder)

    def _check_attached(self) -> None:
        if not self._comms:
            raise RuntimeError("this handle has been removed from its model and has no state any more")

    def remove(self) -> None:
        """Megatron-Core communicates as before, from the main weights; call it on all ranks."""
        if self._comms:
            self.resync()
        for patch in self._patches:
            patch.remove()
        self._copies.remove()
        for topology in self._topologies:
            destroy_topology(topology)
        if self._alerts is not None:
            self._alerts.detach()
        self._comms, self._groups, self._optimizers = [], [], []
        self._patches, self._topologies = [], []


def _dense_because(comm: BucketComm) -> str:
    if comm.bucket.is_expert:
        return "expert parallel"
    if comm.layout is not None and comm.layout.size == 1:
        return "one rank"
    if comm.bucket.param_dtype not in REPLICATED_DTYPES:
        return f"{str(comm.bucket.param_dtype).removeprefix('torch.')} parameters"
    return ""

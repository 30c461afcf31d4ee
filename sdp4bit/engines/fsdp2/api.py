"""SDP4Bit on PyTorch FSDP2: one call after `fully_shard`.

Uses FSDP2's communication hooks (`set_custom_all_gather`, `set_custom_reduce_scatter`) and changes nothing
else of it: parameters, gradients, optimizer states and state dicts stay what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import (
    NodeLayout,
    Topology,
    TopologySpec,
    create_topologies,
    destroy_topology,
)
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import AuditConfig, SDP4BitConfig, as_config
from sdp4bit.engines.agreement import ShardedRows, agree, participants
from sdp4bit.engines.alert_log import AlertCallback
from sdp4bit.engines.fallback import Alert
from sdp4bit.engines.fsdp2.alerts import watch_groups
from sdp4bit.engines.fsdp2.audit import audit_at_step_borders, audit_state
from sdp4bit.engines.fsdp2.checks import (
    check_group,
    match_skipped,
    note_reasons,
    skip_patterns,
    warn_of_layout,
    weights_whole_because,
)
from sdp4bit.engines.fsdp2.comm_state import CommState
from sdp4bit.engines.fsdp2.explain import explain_groups
from sdp4bit.engines.fsdp2.group_comm import GroupComm
from sdp4bit.engines.fsdp2.groups import (
    FSDPGroup,
    find_groups,
    named_fsdp_modules,
)
from sdp4bit.engines.fsdp2.hooks import AllGatherHook, ReduceScatterHook
from sdp4bit.engines.fsdp2.state import load_state, save_state
from sdp4bit.engines.fsdp2.steps import watch_optimizers
from sdp4bit.engines.fsdp2.torch_internals import check_torch_version
from sdp4bit.engines.measures import group_stats, total_measures
from sdp4bit.quantization.checksum import prepare_checksums
from sdp4bit.quantization.random import check_numbers
from sdp4bit.traffic import Traffic

Skip = Collection[str] | Callable[[str], bool] | None
"""Names of FSDP modules to leave in full precision (shell-style patterns), or a function that says so."""


def quantize_communication(
    model: nn.Module | Sequence[nn.Module],
    *,
    topology: TopologySpec = "auto",
    config: SDP4BitConfig | str | None = None,
    skip: Skip = None,
    process_group: ProcessGroup | None = None,
) -> CommHandle:
    """The model's FSDP2 communication is quantized from the next forward on.

    Call it on every rank, once, after the last `fully_shard` and before the first forward. The optimizer may
    be built before or after; steps of any `torch.optim.Optimizer` over the model's parameters are noticed.

    Args:
        model: the root FSDP module, or all local roots (the stages of a pipeline); `[]` on a rank without.
        topology: which ranks share a node: "auto" (by host name), ranks per node, or an (inter, intra) mesh.
        config: what to quantize, or the name of a preset; the default is the paper's method.
        skip: FSDP modules to leave in full precision, as patterns over their names or a predicate.
        process_group: the ranks that have parts of the model, if other ranks of the job have none. These
            alone then make this call; the others need not know of it.

    Raises:
        ValueError: the model, the topology or the settings don't allow it; the same on every rank, and
            nothing has been changed.
        TypeError: likewise, an argument of another type.
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "sdp4bit.quantize_communication needs torch.distributed: call init_process_group first"
        )
    within = participants(process_group)
    settings = SDP4BitConfig()
    roots: list[nn.Module] = []
    groups: list[FSDPGroup] = []
    skipped: dict[str, str] = {}
    patterns: list[str] = []
    unmatched: list[str] = []
    failure = None
    try:
        check_torch_version()
        settings = as_config(config)
        roots = [model] if isinstance(model, nn.Module) else list(model)
        groups = find_groups(roots)
        patterns = skip_patterns(skip)
        skipped, unmatched = match_skipped(groups, skip if callable(skip) else patterns)
        for group in groups:
            check_group(group, config=settings, is_skipped=group.name in skipped)
        check_numbers(buckets=len(groups), ranks=max((group.data_ranks for group in groups), default=0))
    except Exception as caught:  # whatever happens on one rank, the others must not wait for it
        failure, groups = caught, []
    rows = [
        ShardedRows(
            name=g.name,
            ranks=g.ranks,
            row_numel=g.row_numel,
            dtypes=tuple(sorted(map(str, g.param_dtypes))),
            skipped=g.name in skipped,
            parts=tuple(map(tuple, g.part_spans)),
            whole=weights_whole_because(g),
        )
        for g in groups
    ]
    layouts = agree(
        rows,
        settings={"config": settings, "skip": "a function" if callable(skip) else patterns},
        topology=topology,
        unmatched=unmatched,
        failure=failure,
        within=within,
    )
    if not layouts:
        raise ValueError("sdp4bit.quantize_communication: no rank has passed an FSDP2 model, all passed []")
    note = warn_of_layout(groups, layouts, config=settings, skipped=skipped)
    return CommHandle(
        roots,
        groups=groups,
        layouts=layouts,
        config=settings,
        skipped=skipped,
        note=note,
        process_group=within,
    )


class CommHandle:
    """Quantized communication of a model; a Stateful for torch.distributed.checkpoint.

    Made by :func:`quantize_communication`.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        *,
        groups: Sequence[FSDPGroup],
        layouts: dict[tuple[int, ...], NodeLayout],
        config: SDP4BitConfig,
        skipped: dict[str, str],
        note: str,
        process_group: ProcessGroup | None,
    ) -> None:
        self.config = config
        self._note = note
        self._removed = False
        # Separate process groups: one communicator would run gathers and reductions one after the other.
        ordered = list(layouts.values())
        weight_topologies: dict[tuple[int, ...], Topology] = {}
        gradient_topologies: dict[tuple[int, ...], Topology] = {}
        if config.weights:
            weight_topologies = create_topologies(ordered, purpose="weights", within=process_group)
        if config.gradients:
            gradient_topologies = create_topologies(ordered, purpose="gradients", within=process_group)
        self._topologies = [*weight_topologies.values(), *gradient_topologies.values()]
        weight_scratch, gradient_scratch = Scratch(), Scratch()
        comms = [
            GroupComm(group, index=index, layout=layouts[group.ranks]) for index, group in enumerate(groups)
        ]
        self._state = CommState(comms, telemetry=config.telemetry)
        for comm in comms:
            note_reasons(comm, config=config, skipped=skipped)
            prepare_checksums(comm.group.device)
            self._choose_weights(comm, weight_topologies, weight_scratch)
            self._choose_gradients(comm, gradient_topologies, gradient_scratch)
        if config.audit is not None:
            self._state.step_listeners.append(audit_at_step_borders(self._state, config.audit))
        self._alerts = None if config.alerts is None else watch_groups(self._state, config.alerts)
        if self._alerts is not None:
            self._state.step_listeners.append(self._alerts.at_step_border)
        self._previous = [self._install(comm) for comm in comms]
        self._hooks = [watch_optimizers(self._state)] if groups else []
        for group in groups:
            self._hooks += self._state.aliases.watch(group)
        for root in roots:
            watched = {root, *(module for _, module in named_fsdp_modules(root))}
            after_load = _resync_after_load(self._state)
            self._hooks += [module.register_load_state_dict_post_hook(after_load) for module in watched]

    def _choose_weights(
        self, comm: GroupComm, topologies: dict[tuple[int, ...], Topology], scratch: Scratch
    ) -> None:
        if self.config.weights is not None and not comm.weights_dense_because:
            comm.replica = WeightReplica(
                topologies[comm.group.ranks],
                config=self.config.weights,
                seed=self.config.seed,
                rank=comm.group.shard_rank,
                bucket=comm.index,
                traffic=comm.weight_traffic,
                scratch=scratch,
                parts=comm.group.part_spans,
                name=comm.group.name,
            )

    def _choose_gradients(
        self, comm: GroupComm, topologies: dict[tuple[int, ...], Topology], scratch: Scratch
    ) -> None:
        if self.config.gradients is not None and not comm.gradients_dense_because:
            comm.reduce_scatter = QuantizedReduceScatter(
                topologies[comm.group.ranks],
                config=self.config.gradients,
                seed=self.config.seed,
                rank=comm.group.data_rank,
                bucket=comm.index,
                traffic=comm.gradient_traffic,
                scratch=scratch,
                name=comm.group.name,
            )

    def _install(self, comm: GroupComm) -> tuple[Any, Any, bool]:
        # Without a quantizer the operation FSDP2 chooses stays, so that its results do too.
        return comm.group.install(
            all_gather=AllGatherHook(comm, self._state),
            reduce_scatter=ReduceScatterHook(comm, self._state, config=self.config.gradients),
            force_sum=comm.reduce_scatter is not None,
        )

    def mark_step(self) -> None:
        """The weights have changed; only needed after optimizers that are not `torch.optim.Optimizer`s."""
        self._state.mark_changed()

    def resync(self) -> None:
        """Refresh the replicas in full precision at the next forward; call it on all ranks.

        Edits of the weights are found without it (docs/fsdp2.md, "What we follow"). It makes the next
        weights exact where they would be sent as a quantized difference: those that replace the weights
        right after an optimizer step, before any forward.
        """
        self._state.reshard()
        self._state.request_resync()

    def audit(self) -> bool:
        """Return whether all copies of each replica are equal bit for bit; call it on all ranks.

        Raises:
            ReplicaMismatchError: on all ranks of the group, unless the configuration asks for a resync.
        """
        self._check_attached()
        return audit_state(self._state, self.config.audit or AuditConfig())

    def explain(self) -> str:
        """Return a table: per FSDP group what is quantized, how, bytes of the last step, or why it is not."""
        return explain_groups(self._state) + (f"\n{self._note}" if self._note else "")

    def alerts(self) -> list[Alert]:
        """Return the alerts so far, oldest first, at most the last thousand; the same on all ranks."""
        return [] if self._alerts is None else self._alerts.log.all()

    def on_alert(self, callback: AlertCallback) -> RemovableHandle:
        """The callback is called with every :class:`Alert`, on all ranks, until the handle is removed.

        Raises:
            ValueError: the configuration has no alerts.
        """
        if self._alerts is None:
            raise ValueError("there will be no alerts: attach with SDP4BitConfig(alerts=AlertConfig(...))")
        return self._alerts.log.listen(callback)

    def stats(self) -> dict[str, Any]:
        """Return what this rank sent and what quantization cost; cheap, and waits for nothing.

        Returns:
            "steps": optimizer steps so far. "last_step", "total": bytes this rank sent inside its node
            ("intra_bytes") and to other nodes ("inter_bytes"), how much of both is padding, and the number of
            collectives. "compression_ratio": bytes of plain FSDP2 over bytes sent between nodes in the last
            step. "exchange_seconds": from the start of each transfer of that step to the end of the wait for
            it, summed; transfers overlap. "full_refreshes": how often a group's weights were sent in full
            precision, after loads and large edits, summed over groups; the first time does not count.
            What quantization cost is measured every `TelemetryConfig.interval` steps, in samples of this
            rank's shards. "sampled_step": the step that the following are of, None before the first.
            "weight_drift": |main - replica| / |main| once the step's differences have been sent.
            "weight_error": relative error of quantizing these; "gradient_error": that of the gradients; None
            where they do not apply. "nonfinite_groups": quantization groups of the gradients that reached
            this rank with a NaN or an infinity.
        """
        state = self._state
        last = sum((state.last_traffic(comm) for comm in state.groups), Traffic())
        return {
            "steps": state.steps + int(state.step_pending),
            "last_step": last.as_dict(),
            "total": sum((comm.total_traffic for comm in state.groups), Traffic()).as_dict(),
            "compression_ratio": last.compression_ratio,
            "exchange_seconds": last.exchange_seconds,
            "full_refreshes": sum(comm.full_refreshes for comm in state.groups),
            **state.sampled.totals(),
        }

    def group_stats(self) -> list[dict[str, Any]]:
        """Return one dictionary per FSDP group about this rank; cheap, and waits for nothing.

        Returns:
            "name"; of the last step "intra_bytes", "inter_bytes", "compression_ratio", "exchange_seconds" and
            its parts "intra_seconds" and "inter_seconds"; of the last measured step "gradient_error",
            "weight_error", "weight_drift" and "nonfinite_groups", as in `stats()`; "weight_bits" and
            "gradient_bits" (on the last hop) as they are now, None for full precision.
        """
        state = self._state
        measured = {measures.name: measures for measures in state.sampled.by_group()}
        return [
            group_stats(
                comm.group.name,
                state.last_traffic(comm),
                measures=measured.get(comm.group.name),
                weight_bits=None if comm.replica is None else comm.replica.bits,
                gradient_bits=comm.gradient_bits,
            )
            for comm in state.groups
        ]

    def measure(self) -> dict[str, Any]:
        """Return what quantization costs now, over whole shards; waits for the device. Call it on all ranks.

        Returns:
            "weight_drift", "weight_error": of the weights and replicas as they are. "gradient_error",
            "nonfinite_groups": of the gradients that were sampled last. As in `stats()`.
        """
        return total_measures(self._state.measure())

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-exact resume needs: replica rows as DTensors, counters as tensors."""
        self._check_attached()
        if not self._state.groups:
            return {}
        ladder = {} if self._alerts is None else self._alerts.save()
        return {**save_state(self._state), **({"ladder": ladder} if ladder else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state; call it on all ranks, before or after the model's own state is loaded.

        State of another layout, of other weights, or saved by another rank is not used: the replicas are then
        refreshed in full precision, with a warning.

        Raises:
            ValueError: not a state of this library; nothing is changed.
        """
        self._check_attached()
        if not self._state.groups:
            return
        load_state(self._state, state_dict)
        if self._alerts is not None:
            self._alerts.load(state_dict.get("ladder"))

    def _check_attached(self) -> None:
        if self._removed:
            raise RuntimeError("this handle has been removed from its model and has no state any more")

    def remove(self) -> None:
        """The model communicates as before; all hooks and process groups are gone. Call it on all ranks.

        Between two steps: parameters that stayed unsharded since a forward are freed, so that the next one
        gathers the main weights.
        """
        for hook in self._hooks:
            hook.remove()
        for comm in self._state.groups:
            if comm.replica is not None:
                comm.replica.settle()
        for comm, (all_gather, reduce_scatter, force_sum) in zip(
            self._state.groups, self._previous, strict=True
        ):
            comm.group.install(all_gather=all_gather, reduce_scatter=reduce_scatter, force_sum=force_sum)
            if comm.group.is_unsharded and comm.group.is_idle:
                comm.group.module.reshard()
        for topology in self._topologies:
            destroy_topology(topology)
        self._hooks, self._previous, self._topologies = [], [], []
        if self._alerts is not None:
            self._alerts.detach()
        self._state.detach()
        self._removed = True


def _resync_after_load(state: CommState) -> Callable[..., None]:
    def after_load(*_: Any) -> None:
        state.reshard()
        state.request_resync(keep_loaded=True)

    return after_load

"""The handle of an attached model, and what its parameter groups share, whatever engine trains it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sdp4bit.config import AuditConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit.engines.alerts import Alert, AlertCallback, Alerts
from sdp4bit.engines.audit import audit_replicas
from sdp4bit.engines.explain import render, wrapped
from sdp4bit.engines.group import GroupState, GroupStats
from sdp4bit.engines.measures import SQUARES, Measures, Telemetry, total_measures
from sdp4bit.engines.time_steps import StepTimes, time_steps
from sdp4bit.traffic import Traffic


class Stats(Measures):
    """What is reported of an attached model on this rank; see `CommHandle.stats`."""

    steps: int
    last_step: dict[str, int]
    total: dict[str, int]
    compression_ratio: float
    full_refreshes: int
    sampled_step: int | None


class ModelState:
    """What the parameter groups of one attached model share: the step count and the measures."""

    def __init__(self, groups: Sequence[GroupState], *, telemetry: TelemetryConfig | None = None) -> None:
        self.groups: Sequence[GroupState] = groups
        self.telemetry = Telemetry(telemetry, [comm.group.name for comm in groups])
        self.step_listeners: list[Callable[[int], None]] = []
        """Called once per step, with its number, on all ranks alike: when the step's measures are
        available, and before anything that follows it is sent. The ranks may communicate in it."""
        self.steps = 0
        """Steps that have reached their boundary."""
        self.step_pending = False
        """An optimizer has stepped, and the step has not reached its boundary, which FSDP2 shows at the next
        forward only."""

    @property
    def gradient_sample_numel(self) -> int | None:
        """Size of the samples to be kept of gradients that are reduced now; None for no samples."""
        return self.telemetry.sample_numel if self.telemetry.is_due(self.steps + 1) else None

    def end_traffic(self) -> None:
        """Let what was sent until now be the last step's."""
        for comm in self.groups:
            for counter in comm.counters:
                counter.end_step()

    @torch.no_grad()
    @torch.inference_mode(False)  # the first forward after a step may be one of inference
    def measure_step(self) -> None:
        """Measure the step that has just reached its boundary, if it is due, and tell the listeners."""
        is_due = self.telemetry.is_due(self.steps)
        if is_due:
            self.telemetry.publish(self._squares(self.telemetry.sample_numel), step=self.steps)
        for listener in self.step_listeners:
            listener(self.steps)
        if is_due:
            for comm in self.groups:
                # A group without a gradient in the next measured step is not to report this one again.
                comm.gradient_sample = None

    @torch.no_grad()
    @torch.inference_mode(False)
    def measure(self) -> Tensor:
        """Return the present squares [groups, SQUARES]: whole shards of weights, the last gradients."""
        return self.telemetry.with_last_gradients(self._squares(None))

    def _squares(self, sample_numel: int | None) -> Tensor:
        # Group after group: over whole shards each takes the memory of several.
        rows = [comm.squares(sample_numel=sample_numel) for comm in self.groups]
        return torch.stack(rows) if rows else torch.empty(0, SQUARES, dtype=torch.float64)

    @property
    def device(self) -> torch.device | None:
        """Where the groups compute; None on a rank without any."""
        return self.groups[0].group.device if self.groups else None

    def last_traffic(self, comm: GroupState) -> Traffic:
        """Return the traffic of a group in the last step, which ends with its optimizer step."""
        return sum((c.current_step if self.step_pending else c.last_step for c in comm.counters), Traffic())

    def detach(self) -> None:
        """Refer to nothing of the model any more; the step count stays."""
        self.groups, self.step_listeners = [], []


logger = logging.getLogger("sdp4bit")

StateDict = dict[str, Any]
"""What checkpoints keep of a model's communication."""


class CommHandle(ABC):
    """Quantized communication of a model, and what is known of it."""

    _state: ModelState
    _hint = ""
    """Last line of `explain()`."""

    def __init__(self, state: ModelState, *, config: SDP4BitConfig, note: str = "") -> None:
        """Take over an attached model.

        Args:
            note: what `explain` says below the table.
        """
        self.config = config
        self._state = state
        self._note = note
        self._alerts: Alerts | None = None
        self._removed = False
        self._is_quantized = True
        if config.audit is not None:
            state.step_listeners.append(self._audit_if_due)

    def _log_attached(self) -> None:
        """Log one line on rank 0, when all groups have what quantizes them."""
        if dist.get_rank() == 0:
            groups = self.groups
            shapes = dict.fromkeys(f"{g.layout.nodes} x {g.layout.ranks_per_node}" for g in groups)
            logger.info(
                "%s: %d parameter groups on %s ranks (nodes x ranks per node); weights of %d and gradients "
                "of %d are quantized, comm.explain() lists them",
                type(self).__name__,
                len(groups),
                ", ".join(shapes) or "no",
                sum(group.replica is not None for group in groups),
                sum(bool(group.gradient_quantizers) for group in groups),
            )

    def _watch(self, alerts: Alerts) -> None:
        """Let these alerts see every step, after the audit."""
        self._alerts = alerts
        self._state.step_listeners.append(alerts.at_step_boundary)

    @abstractmethod
    def mark_step(self) -> None:
        """Note a change of the main weights outside of the optimizers that are watched."""

    @abstractmethod
    def resync(self) -> None:
        """Refresh the replicas in full precision; call it on all ranks."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """Return the state that a bit-exact resume needs."""

    @abstractmethod
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; call it on all ranks."""

    @abstractmethod
    def remove(self) -> None:
        """Communicate as before; call it on all ranks."""

    @property
    def is_attached(self) -> bool:
        """Whether the model communicates through this handle: until `remove`."""
        return not self._removed

    @property
    def groups(self) -> Sequence[GroupState]:
        """Communication of each parameter group: `replica`, `reduction`, `refreshes`, counters."""
        return self._state.groups

    # -- reports ---------------------------------------------------------------------------------------

    def explain(self) -> str:
        """Return a table: per group what is quantized, how, bytes of the last step, or why it is not.

        Once a step has been taken it also names `time_steps`, as bytes are not time.
        """
        if not self._is_quantized:
            return "inside full_precision(): the model communicates as without sdp4bit"
        state = self._state
        table = render([comm.explain(state.last_traffic(comm)) for comm in state.groups])
        hint = self._hint if state.groups and (state.steps or state.step_pending) else ""
        return "\n".join([table, *(wrapped(text) for text in (self._note, hint) if text)])

    def stats(self) -> Stats:
        """Return the bytes that this rank sent and the cost of quantization; cheap, and waits for nothing.

        Returns:
            "steps": so far; on FSDP2, backward passes whose gradients were reduced. "last_step", "total":
            bytes this rank sent inside its node ("intra_bytes") and to other nodes ("inter_bytes"), how much
            of both is padding, and the number of
            collectives. "compression_ratio": bytes of the engine without sdp4bit over bytes sent between
            nodes in the last step.
            "full_refreshes": how often a group's weights were sent in full precision, after loads and large
            edits, summed over groups; the first time does not count.
            What quantization cost is measured every `TelemetryConfig.interval` steps, in samples of this
            rank's shards. "sampled_step": the step that the following are of, None before the first.
            "weight_drift": |main - replica| / |main| once the step's differences have been sent.
            "weight_error": relative error of quantizing these; "gradient_error": that of the gradients; None
            where they do not apply. "nonfinite_groups": quantization groups of the gradients that reached
            this rank with a NaN or an infinity.
        """
        state = self._state
        last = sum((state.last_traffic(comm) for comm in state.groups), Traffic())
        total = sum((counter.total for comm in state.groups for counter in comm.counters), Traffic())
        return {
            "steps": state.steps + int(state.step_pending),
            "last_step": self._reported(last),
            "total": self._reported(total),
            "compression_ratio": last.compression_ratio,
            "full_refreshes": sum(comm.full_refreshes for comm in state.groups),
            "sampled_step": state.telemetry.step,
            **total_measures(state.telemetry.squares),
        }

    def _reported(self, traffic: Traffic) -> dict[str, int]:
        """Return the bytes of `stats()`."""
        return traffic.as_dict()

    def group_stats(self) -> list[GroupStats]:
        """Return one dictionary per group about this rank; cheap, and waits for nothing.

        Returns:
            "name"; of the last step "intra_bytes", "inter_bytes" and "compression_ratio"; of the last
            measured step "gradient_error", "weight_error", "weight_drift" and "nonfinite_groups", as in
            `stats()`; "weight_bits" and "gradient_bits" (on the last hop) as they are now, None for full
            precision.
        """
        state = self._state
        measured = state.telemetry.by_group()
        return [comm.stats(state.last_traffic(comm), measured[comm.group.name]) for comm in state.groups]

    def measure(self) -> Measures:
        """Measure the error of quantization now, over whole shards; waits for the device. All ranks call it.

        Returns:
            "weight_drift", "weight_error": of the weights and replicas as they are. "gradient_error",
            "nonfinite_groups": of the gradients that were sampled last. As in `stats()`.
        """
        return total_measures(self._state.measure())

    def time_steps(self, step: Callable[[], object], *, repeats: int = 10) -> StepTimes:
        """Measure training steps with and without quantization, on this model, network and data.

        Takes 6 x `repeats` steps, three with quantization and three without in turn. The first of each three
        is not timed: it gathers weights in full precision. Every one is a step of the training that it
        interrupts, half of them with plain communication, and nothing has to be restored. FSDP2 only.
        Call it on all ranks, between two steps.

        Args:
            step: takes one training step: forward, backward, optimizer.
            repeats: blocks of steps of each kind, at least 1.

        Returns:
            Seconds of the slowest rank, both medians, their ratio and its spread; printed as one line.

        Raises:
            TypeError: `step` is not callable.
            ValueError: `repeats` is less than 1.
            RuntimeError: the handle has been removed, forward or backward is running, or the engine
                cannot switch.
            Exception: what `step` raises. The model then communicates quantized again.
        """
        self._check_attached()
        if not callable(step):
            raise TypeError(f"time_steps needs a function that takes a training step, got {step!r}")
        if repeats < 1:
            raise ValueError(f"time_steps needs at least 1 repeat, got repeats={repeats}")
        self._check_switch()
        if not self._is_quantized:
            raise RuntimeError("time_steps was called inside full_precision(): call it outside")
        return time_steps(
            step, repeats=repeats, full_precision=self.full_precision, device=self._state.device
        )

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Communicate in full precision inside a `with` block, exactly as without sdp4bit.

        For a warm-up, a comparison or a debugging session of any number of steps. Enter and leave it on all
        ranks, between two steps; neither sends anything. The first forward after the block refreshes the
        replicas in full precision. Steps inside are not counted by `stats()`, telemetry, audits and
        `start_step`. A block inside another changes nothing. FSDP2 only.

        Raises:
            RuntimeError: the handle has been removed, forward or backward is running, or the engine cannot
                switch.
        """
        self._check_attached()
        self._check_switch()
        if not self._is_quantized:
            yield
            return
        self._switch()
        try:
            yield
        finally:
            if self.is_attached:
                self._switch()

    def _check_switch(self) -> None:
        """Raise RuntimeError unless `_switch` can be called now; engines that can switch override both."""
        raise RuntimeError(
            f"{type(self).__name__} cannot switch quantization off and on during training, which "
            "full_precision and time_steps do: they are for FSDP2. Compare a run with sdp4bit to one without "
            "it"
        )

    def _switch(self) -> None:
        """Communicate in full precision if quantized, and the other way round; sends nothing."""
        self._check_switch()

    def alerts(self) -> list[Alert]:
        """Return the alerts so far, oldest first, at most the last thousand.

        They are the same on all ranks that decide together: with pipeline parallelism, those of a stage.
        """
        return [] if self._alerts is None else self._alerts.all()

    def on_alert(self, callback: AlertCallback) -> RemovableHandle:
        """Call the callback with every :class:`Alert`, on all ranks that decide together, until removed.

        Raises:
            ValueError: the configuration has no alerts.
        """
        if self._alerts is None:
            raise ValueError("there will be no alerts: attach with SDP4BitConfig(alerts=AlertConfig(...))")
        return self._alerts.listen(callback)

    def audit(self) -> bool:
        """Return whether all copies of each replica are equal bit for bit; call it on all ranks.

        Outside of forward and backward; those that differ are refreshed in full precision.

        Raises:
            ReplicaMismatchError: on all ranks of the group, unless the configuration asks for a resync.
        """
        self._check_attached()
        return self._audit(self.config.audit or AuditConfig())

    @torch.no_grad()
    @torch.inference_mode(False)
    def _audit(self, config: AuditConfig) -> bool:
        groups = self._state.groups
        copies = [copy for comm in groups for copy in comm.copies()]
        names = audit_replicas(copies, config)
        wrong = [comm for comm in groups if comm.group.name in names]
        return not self._refresh_mismatched(wrong, config=config)

    def _audit_if_due(self, step: int) -> None:
        config = self.config.audit
        if config is not None and step % config.interval == 0:
            self._audit(config)

    @abstractmethod
    def _refresh_mismatched(
        self, wrong: Sequence[GroupState], *, config: AuditConfig
    ) -> Sequence[GroupState]:
        """Have the replicas of these groups refreshed in full precision.

        Returns:
            The groups that are refreshed: also those that other ranks know to differ.
        """

    def _check_attached(self) -> None:
        if self._removed:
            raise RuntimeError("this handle has been removed from its model and has no state any more")

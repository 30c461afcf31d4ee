"""Steps of an attached model: their bytes, bits and measures."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from sdp4bit.collectives.group import Group
from sdp4bit.config import TelemetryConfig
from sdp4bit.observe.explain import last_full_refresh
from sdp4bit.observe.measures import (
    SQUARES,
    Measurement,
    Measures,
    Telemetry,
    group_squares,
    pending_squares,
    total_error,
    total_measures,
)
from sdp4bit.quantization.formats import Bits
from sdp4bit.traffic import Traffic
from sdp4bit.warn import warn_user


class Choosing(TypedDict):
    """State of `config="auto"`, the same on all ranks."""

    candidate: str
    """Name of the candidate that communicates now."""
    is_chosen: bool
    seconds: Mapping[str, float]
    """Median seconds of a step with each candidate, of those measured in the latest search."""


class Stats(Measures):
    """Statistics of an attached model on this rank; see `CommHandle.stats`."""

    steps: int
    last_step: dict[str, int]
    total: dict[str, int]
    compression_ratio: float | None
    total_compression_ratio: float | None
    full_refreshes: int
    sampled_step: int | None
    auto: Choosing | None


class GroupStats(Measures):
    """Statistics of one parameter group on this rank."""

    name: str
    intra_bytes: int
    """Bytes sent inside the node in the last step."""
    inter_bytes: int
    """Bytes sent to other nodes in the last step."""
    compression_ratio: float | None
    """Bytes between nodes without sdp4bit over those with it; None before the first step."""
    weight_bits: Bits
    """Configured bits of differences; None for full precision."""
    gradient_bits: Bits
    """Bits on the last hop of the last reduction; None for full precision."""
    full_refreshes: int
    """Refreshes in full precision so far, without the first."""
    full_refresh_reason: str | None
    """Reason of the last one; None before."""


class ModelState:
    """Step count and measures, which all parameter groups of one attached model share."""

    def __init__(self, groups: Sequence[Group], *, telemetry: TelemetryConfig | None = None) -> None:
        self.groups: Sequence[Group] = groups
        self.telemetry = Telemetry(telemetry, [group.view.name for group in groups])
        for group in groups:
            self.watch(group)
        self.step_listeners: list[Callable[[int], None]] = []
        """Called with the step number on every rank, once per step. The step's measures are available and
        the next step has sent nothing yet, so listeners may communicate."""
        self.retired = Traffic()  # of groups that the engine has dropped
        self.reporting_ranks = 1  # ranks whose bytes `stats` adds up
        self.steps = 0  # steps that have reached their boundary
        self.counts_steps = True  # False inside `full_precision()`
        self.step_pending = False
        """An optimizer has stepped but the step has not reached its boundary, which is the next forward on
        FSDP2."""
        self.is_silent = False
        """An optimizer has stepped twice and nothing was sent in between. No last step is reported then."""
        self.expects_silence = False
        self.silence, self.silence_reasons = "", ""  # of one that was not expected
        self._has_warned_of_silence = False
        # Collectives before the last step of each optimizer, or of the engine.
        self._sent_before: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def watch(self, group: Group) -> None:
        """Let a group's gradients follow the steps of this model."""
        # Weak, because a dropped model must not wait for the garbage collector.
        group.gradients.progress = weakref.proxy(self)
        group.gradients.counts_nonfinite = self.telemetry.is_on

    def on_step(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Call with the number of steps after each; see `Engine.on_step`."""
        self.step_listeners.append(call)
        return partial(self.step_listeners.remove, call)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the model; engines override it."""
        # Without an override `end_step` notes the engine's own steps.
        return False

    def note_step_of(self, optimizer: object) -> None:
        """Record whether anything was sent since this optimizer's step before; warn once if not."""
        # For each optimizer, because several may step one after the other.
        sent = self.retired.collectives
        for group in self.groups:
            for counter in group.counters:
                sent += counter.collectives
        self.is_silent, self.silence = 0 < sent == self._sent_before.get(optimizer), ""
        self._sent_before[optimizer] = sent
        if not self.is_silent or self.expects_silence:
            return
        step = self.steps + int(self.step_pending)
        self.silence = f"an optimizer steps, but nothing was sent since step {step}: {self.silence_reasons}"
        if not self._has_warned_of_silence:
            self._has_warned_of_silence = True
            warn_user(f"{self.silence}. Reports have no last step now", self.groups[0].view.ranks)

    @property
    def gradient_sample_numel(self) -> int | None:
        """Sample size for gradients that are reduced now; None keeps no samples."""
        return self.telemetry.sample_numel if self.telemetry.is_due(self.steps + 1) else None

    def end_traffic(self) -> None:
        """Assign the bytes sent so far to the last step."""
        for group in self.groups:
            for counter in group.counters:
                counter.end_step()

    def end_step(self) -> None:
        """Count and measure a step that has reached its boundary.

        An engine calls it after its optimizer. The next gather and reduction count for the next step.
        """
        self.step_pending = False
        if not self.counts_steps:
            return
        self.steps += 1
        self.end_traffic()
        self.note_step_of(self)
        self.measure_step()

    @torch.no_grad()
    @torch.inference_mode(False)  # the first forward after a step may be one of inference
    def measure_step(self) -> None:
        """Measure the step that has just reached its boundary, if due, and call the listeners."""
        is_due = self.telemetry.is_due(self.steps)
        if is_due:
            self.telemetry.publish(self._squares(self.telemetry.sample_numel), step=self.steps)
        for listener in self.step_listeners:
            listener(self.steps)
        if is_due:
            for group in self.groups:
                group.gradients.end_sample()

    @torch.no_grad()
    @torch.inference_mode(False)
    def measure(self) -> Measurement:
        """Measure entire weight shards, the changes not sent yet, and the last gradients."""
        squares = self.telemetry.with_last_gradients(self._squares(None))
        pending = [pending_squares(group) for group in self.groups]
        unsent = torch.stack(pending) if pending else torch.empty(0, 2, dtype=torch.float64)
        return {**total_measures(squares), "pending": total_error(unsent)}

    def _squares(self, sample_numel: int | None) -> Tensor:
        # One group at a time: measuring an entire shard takes several times its memory.
        rows = [group_squares(group, sample_numel=sample_numel) for group in self.groups]
        return torch.stack(rows) if rows else torch.empty(0, SQUARES, dtype=torch.float64)

    @property
    def device(self) -> torch.device | None:
        """The device of the groups; None on a rank without any."""
        return self.groups[0].view.device if self.groups else None

    def traffic_of(self, group: Group) -> Traffic:
        """Return the traffic of a group in the last step, which ends with its optimizer step."""
        if self.is_silent:
            return Traffic()
        return sum((c.current_step if self.step_pending else c.last_step for c in group.counters), Traffic())

    def stats(self) -> Stats:
        """Return the statistics of the last step; see `CommHandle.stats`."""
        last = sum((self.traffic_of(group) for group in self.groups), Traffic())
        total = sum((counter.total for group in self.groups for counter in group.counters), self.retired)
        steps = self.steps + int(self.step_pending)
        return {
            "steps": steps,
            "last_step": self._reported(last),
            "total": self._reported(total),
            "compression_ratio": last.compression_ratio if steps and not self.is_silent else None,
            "total_compression_ratio": total.compression_ratio if steps else None,
            "full_refreshes": sum(group.weights.full_refreshes for group in self.groups),
            "sampled_step": self.telemetry.step,
            "auto": None,
            **total_measures(self.telemetry.squares),
        }

    def _reported(self, traffic: Traffic) -> dict[str, int]:
        return {name: count * self.reporting_ranks for name, count in traffic.as_dict().items()}

    def group_stats(self) -> list[GroupStats]:
        """Return the statistics of each group in the last step."""
        measured = self.telemetry.by_group()
        has_stepped = (self.steps or self.step_pending) and not self.is_silent
        found = list[GroupStats]()
        for group in self.groups:
            traffic, name = self.traffic_of(group), group.view.name
            found.append(
                {
                    "name": name,
                    "intra_bytes": round(traffic.intra_bytes),
                    "inter_bytes": round(traffic.inter_bytes),
                    "compression_ratio": traffic.compression_ratio if has_stepped else None,
                    **measured[name],
                    "weight_bits": None if group.weights.replica is None else group.weights.replica.bits,
                    "gradient_bits": group.gradients.bits,
                    "full_refreshes": group.weights.full_refreshes,
                    "full_refresh_reason": last_full_refresh(group.weights),
                }
            )
        return found

    def detach(self) -> None:
        """Drop all references to the model; keep the step count."""
        self.groups, self.step_listeners = [], []

"""The handle of an attached model and the state its parameter groups share, for all engines."""

from __future__ import annotations

import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.group import Group
from sdp4bit.config import AuditConfig, SDP4BitConfig
from sdp4bit.engines.agreement import AgreedNodes
from sdp4bit.engines.arrival import checked_on_all_ranks
from sdp4bit.engines.auto import Search
from sdp4bit.engines.loading import load_checkpoint
from sdp4bit.engines.misuse import Misused
from sdp4bit.engines.muon import is_muon, muon_warning
from sdp4bit.engines.owned_hooks import end_with
from sdp4bit.engines.protocol import Engine
from sdp4bit.log import logger
from sdp4bit.observe.alerts import Alert, AlertCallback, Alerts
from sdp4bit.observe.audit import ReplicaCopy, audit_replicas, replica_copy
from sdp4bit.observe.explain import render, row_of, wrapped
from sdp4bit.observe.measures import Measurement
from sdp4bit.observe.stats import GroupStats, ModelState, Stats
from sdp4bit.observe.timing import StepTimes, time_steps
from sdp4bit.traffic import format_bytes
from sdp4bit.warn import warn_user

StateDict = dict[str, Any]  # checkpoint state of a model's communication


class CommHandle(Misused, ABC):
    """Quantized communication of a model, and reports about it."""

    _state: ModelState
    _engine: Engine
    _sent: Sequence[str] = ("weights", "gradients")
    _hint = ""  # last line of `explain()`
    _process_group: ProcessGroup | None = None  # of the ranks with the model; None for all
    _silence_reasons = "the engine communicates without this handle, or not at all"

    def __init__(
        self, state: ModelState, *, config: SDP4BitConfig, note: str = "", layouts: AgreedNodes | None = None
    ) -> None:
        """Create the handle of an attached model.

        Args:
            note: `explain` prints it below its table.
            layouts: those that the ranks have agreed on; None for none yet.
        """
        self.config = config
        self._alert_config = config.alerts
        self._state = state
        state.silence_reasons = self._silence_reasons
        self._optimizers = self._watch_optimizers()
        self._note = note
        self._layouts = layouts
        self._alerts: Alerts | None = None
        self._removed = False
        self._last_stats: tuple[Stats, list[GroupStats]] | None = None
        """The statistics at the removal."""
        self._is_quantized = True  # not inside `full_precision()`, nor with the candidate "plain"
        self._search: Search | None = None  # with config="auto"
        self._awaits_muon = True
        self._without_advice: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._installed = ExitStack()  # undoes the installation of the groups
        self._undo = ExitStack()  # undoes the attachment

    def _watch_optimizers(self) -> RemovableHandle:
        """Watch the steps of every torch optimizer, so that no report outlives its source."""
        reference = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            handle = reference()
            if handle is None or not changes_weights(optimizer):
                return
            if handle._state.trains(optimizer):
                handle._state.note_step_of(optimizer)
            if handle._awaits_muon and optimizer not in handle._without_advice:
                handle._advise(optimizer)

        # Disabled, because `torch.compile(optimizer.step)` would otherwise run it only while tracing.
        hook = register_optimizer_step_post_hook(torch.compiler.disable(after_step))
        end_with(self, [hook])
        return hook

    def _advise(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if a Muon steps with gradients of few bits."""
        if not is_muon(optimizer):
            self._without_advice.add(optimizer)
            return
        text = muon_warning(optimizer, self._state.groups)
        self._awaits_muon = text is None
        if text:
            warn_user(text, range(dist.get_world_size()) if dist.is_initialized() else None)

    @contextmanager
    def _attaching(self) -> Iterator[ExitStack]:
        """Collect the undo of everything that attaches, for `remove`; run it if the block fails."""
        with ExitStack() as undo:
            undo.callback(self._end)
            yield undo
            self._undo = undo.pop_all()

    def _install(self, engine: Engine, *, undo: ExitStack, watched: Sequence[Group], where: str = "") -> None:
        """Make the engine communicate through its groups, and audit and alert after its steps.

        Args:
            watched: the groups with alerts.
            where: see `Alerts`.
        """
        self._engine, config = engine, self._alert_config
        if config is not None:
            self._alerts = Alerts(watched, config=config, telemetry=self._state.telemetry, where=where)
        undo.callback(self._installed.close)
        if self._is_quantized:
            self._install_groups()
        undo.callback(engine.on_step(self._after_step))

    def _install_groups(self) -> None:
        for group in self._engine.groups():
            self._installed.callback(self._engine.install(group))

    def _after_step(self, step: int) -> None:
        config = self.config.audit
        if config is not None and step % config.interval == 0:
            self._audit(config)
        if self._alerts is not None:
            self._alerts.at_step_boundary(step)

    def _log_attached(self) -> None:
        """Log one line on rank 0; called once all quantizers are set."""
        if dist.get_rank() == 0:
            logger.info("%r, comm.explain() lists them", self)

    @abstractmethod
    def mark_step(self) -> None:
        """Report a change of the main weights that no watched optimizer made."""

    @abstractmethod
    def resync(self) -> None:
        """Refresh the replicas in full precision; call it on all ranks."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """Return the state for a bit-exact resume.

        Keys and shapes depend on the model alone. For torch.distributed.checkpoint, a tensor that differs
        between ranks is a DTensor, and numbers are tensors, because it stores others as pickles.
        """

    @abstractmethod
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; call it on all ranks."""

    def load(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        storage_reader: Any = None,
        key: str = "comm",
    ) -> bool:
        """Load the state from a checkpoint of torch.distributed.checkpoint, if it has one.

        Unlike `dcp.load({"comm": comm}, ...)` it takes checkpoints that were saved without this handle, or
        with only a part of its parameters: the other replicas start from the main weights in full precision.
        Call it on all ranks of the job, before or after the model's own state is loaded.

        Args:
            checkpoint_id: folder of the checkpoint.
            storage_reader: its reader, instead of a folder.
            key: name under which the handle was saved.

        Returns:
            Whether the checkpoint has the state. If not, rank 0 warns.

        Raises:
            ValueError: a rank cannot read the checkpoint; the same on every rank, and nothing is changed.
        """
        self._check_attached()
        return load_checkpoint(self, checkpoint_id, storage_reader=storage_reader, key=key)

    def remove(self) -> None:
        """Restore the engine's own communication; remove all hooks and process groups. Call it on all ranks.

        Call it between two steps. The model then continues from the main weights. It also works after
        `destroy_process_group`, except that Megatron-Core's parameters keep their rounding errors, because
        nothing can be sent.

        Raises:
            RuntimeError: FSDP2 holds gradients of HSDP that it has not all-reduced; nothing is changed.
            ExchangeError: another rank did not call it; nothing is changed. Ranks that handle an error, as in
                a `finally` block, do not wait for others.
        """
        if self._removed:
            return
        if dist.is_initialized() and sys.exc_info()[0] is None:
            with self._on_all_ranks("remove"):
                self._check_left()
        else:
            self._check_left()
        self._undo.close()

    def _on_all_ranks(self, call: str) -> AbstractContextManager[list[str]]:
        """Wait for all ranks after a block with everything in a call that may fail on some of them.

        For calls that send something or change the rounding; see `checked_on_all_ranks`.
        """
        ranks = [] if self._layouts is None else self._layouts.connected()
        return checked_on_all_ranks(ranks, call=f"comm.{call}")

    def _wait_for_ranks(self, call: str) -> None:
        with self._on_all_ranks(call):
            pass

    @property
    def is_attached(self) -> bool:
        """Whether the model communicates through this handle, that is, until `remove`."""
        return not self._removed

    @property
    def groups(self) -> Sequence[Group]:
        """Communication of each parameter group: `replica`, `reduction`, `refreshes`, counters."""
        return self._state.groups

    def __repr__(self) -> str:
        """Describe the model's communication in one line."""
        if self._removed:
            return f"{type(self).__name__}: removed"
        groups, stats = self.groups, self.stats()
        shapes = dict.fromkeys(g.layout.describe() for g in groups)
        quantized = {
            "weights": sum(g.weights.replica is not None for g in groups),
            "gradients": sum(bool(g.gradients.quantizers) for g in groups),
        }
        text = (
            f"{type(self).__name__}: {len(groups)} parameter group{'s' * (len(groups) != 1)} on "
            f"{', '.join(shapes) or 'no'} ranks (nodes x ranks per node); "
        )
        if self._search is not None and not self._is_quantized:
            return text + str(self._search)
        text += f"{' and '.join(f'{part} of {quantized[part]}' for part in self._sent)} are quantized"
        ratio, sent = stats["compression_ratio"], format_bytes(stats["last_step"]["inter_bytes"])
        return text if ratio is None else f"{text}; step {stats['steps']}: {sent} inter-node ({ratio:.2f}x)"

    def explain(self, *, full: bool = False) -> str:
        """Return a table with each group's quantization (or the reason for none) and bytes of the last step.

        Groups that differ only in their names are one row, with the numbers of each, unless `full`. After the
        first step it also mentions `time_steps`, because fewer bytes may not save time.
        """
        if self._removed:
            return "removed: the model communicates as without sdp4bit"
        if not self._is_quantized:
            why = "inside full_precision()" if self._search is None else str(self._search)
            return wrapped(f"{why}: the model communicates as without sdp4bit")
        state = self._state
        table = render([row_of(group, state.traffic_of(group)) for group in state.groups], full=full)
        hint = self._hint if state.groups and (state.steps or state.step_pending) else ""
        hint = state.silence or hint
        found = self._layouts.found if self._layouts is not None else ""
        choice = "" if self._search is None else str(self._search)
        return "\n".join([table, *(wrapped(text) for text in (found, self._note, choice, hint) if text)])

    def stats(self) -> Stats:
        """Return the bytes that this rank sent and the error of quantization; cheap, never waits.

        After `remove()` it returns the last values, as `group_stats()` and `alerts()` do.

        Returns:
            "steps": optimizer steps so far, after gradients were reduced.
            "last_step", "total": bytes this rank sent inside its node ("intra_bytes") and to other nodes
            ("inter_bytes"), the padding in both, and the number of collectives.
            "compression_ratio": bytes between nodes without sdp4bit over those with it, in the last step;
            None before the first, and 0 bytes and None if optimizer steps have followed that sent nothing.
            "total_compression_ratio": since attaching, full refreshes included.
            "full_refreshes": refreshes in full precision, summed over groups; the first one of a group does
            not count. `group_stats()` and the logger "sdp4bit" (level INFO) give their reasons.
            "sampled_step": the last measured step, None before the first. Every `TelemetryConfig.interval`
            steps the following are measured on samples of this rank's shards; None if not applicable.
            "weight_drift": |main - replica| / |main| after the step's differences have been sent.
            "weight_error", "gradient_error": relative errors of quantizing these differences and the
            gradients.
            "nonfinite_groups": quantization groups of the gradients that reached this rank with a NaN or an
            infinity, in all steps since the measured one before; None if no step was measured.
            "auto": with `config="auto"` the candidate that communicates, whether it is chosen, and the median
            seconds of a step with each; otherwise None.
        """
        if self._last_stats is not None:
            return self._last_stats[0]
        stats = self._state.stats()
        stats["auto"] = None if self._search is None else self._search.choosing()
        return stats

    def log_values(self, *, full: bool = False) -> dict[str, float]:
        """Return this rank's statistics as a flat dictionary for a log; cheap, never waits.

        Empty if there is no last step: before the first one, after `remove()`, and after optimizer steps that
        sent nothing through this handle.

        Returns:
            "sdp4bit/inter_bytes", "sdp4bit/ratio": bytes between nodes and `compression_ratio` of the last
            step. "sdp4bit/weight_drift", "sdp4bit/weight_error", "sdp4bit/gradient_error": of the last
            measured step, if any.
            If `full`, also "sdp4bit/intra_bytes" of the last step, "sdp4bit/total_ratio" and
            "sdp4bit/full_refreshes" so far.
        """
        stats: Mapping[str, Any] = self.stats()
        last = stats["last_step"]
        if self._removed or not last["collectives"]:
            return {}
        values = {"inter_bytes": last["inter_bytes"], "ratio": stats["compression_ratio"]}
        if full:
            values |= {"intra_bytes": last["intra_bytes"], "total_ratio": stats["total_compression_ratio"]}
            values |= {"full_refreshes": stats["full_refreshes"]}
        values |= {name: stats[name] for name in ("weight_drift", "weight_error", "gradient_error")}
        return {f"sdp4bit/{name}": float(value) for name, value in values.items() if value is not None}

    def group_stats(self) -> list[GroupStats]:
        """Return one dictionary per group with this rank's statistics; cheap, never waits.

        Returns:
            "name": of the group.
            "intra_bytes", "inter_bytes", "compression_ratio": of the last step, as in `stats()`.
            "gradient_error", "weight_error", "weight_drift", "nonfinite_groups": of the last measured step,
            as in `stats()`.
            "weight_bits", "gradient_bits": configured bits of differences, and bits on the last hop of the
            last reduction; None for full precision.
            "full_refreshes", "full_refresh_reason": refreshes in full precision so far, without the first,
            and the reason of the last.
        """
        if self._last_stats is not None:
            return self._last_stats[1]
        return self._state.group_stats()

    def measure(self) -> Measurement:
        """Measure the error of quantization now, over entire shards; call it on all ranks.

        Waits for the device.

        Returns:
            "weight_drift", "weight_error": of the current weights and replicas, as in `stats()`. Between a
            step and the next forward, the drift is the one that the forward will leave.
            "pending": |main - replica| / |main|, the size of a step that was not sent; 0 after the forward.
            "gradient_error", "nonfinite_groups": of the gradients that were sampled last.
        """
        self._check_attached()
        self._wait_for_ranks("measure")
        return self._state.measure()

    def time_steps(self, step: Callable[[], object], *, repeats: int = 10) -> StepTimes:
        """Measure training steps with and without quantization, on this model, network and data.

        Takes 6 x `repeats` steps, alternating between three with quantization and three without. The first
        of each three is not timed because it gathers weights in full precision. The steps are part of the
        training, half of them with plain communication; nothing has to be restored. FSDP2 and DDP. Call it on
        all ranks, between two steps.

        Args:
            step: takes one training step: forward, backward, optimizer.
            repeats: blocks of three steps of each kind, at least 1.

        Returns:
            Seconds of the slowest rank: both medians, their ratio and its spread. Prints as one line.

        Raises:
            TypeError: `step` is not callable.
            ValueError: `repeats` is less than 1.
            RuntimeError: the handle has been removed, forward or backward is running, or the engine
                cannot switch.
            Exception: any error of `step`; quantization is then on again.
        """
        self._check_attached()
        with self._on_all_ranks("time_steps") as same:
            same.append(f"repeats={repeats!r}")
            if not callable(step):
                raise TypeError(f"time_steps needs a function that runs one training step, got {step!r}")
            if repeats < 1:
                raise ValueError(f"time_steps needs at least 1 repeat, got repeats={repeats}")
            self._check_switch()
            if self._search is not None and not self._search.is_chosen:
                raise RuntimeError('time_steps was called while config="auto" measures: read explain() later')
            if not self._is_quantized:
                where = "inside full_precision()" if self._search is None else "while quantization is off"
                raise RuntimeError(f"time_steps was called {where}: call it outside")
        return time_steps(
            step, repeats=repeats, full_precision=self.full_precision, device=self._state.device
        )

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Communicate in full precision inside a `with` block, exactly as without sdp4bit.

        For a warm-up, a comparison or debugging, of any number of steps. Enter and leave it on all ranks,
        between two steps; neither communicates. The first forward after the block refreshes the replicas in
        full precision. `stats()`, telemetry, audits and `start_step` do not count steps inside. A nested
        block has no effect. FSDP2 and DDP.

        Raises:
            RuntimeError: the handle has been removed, forward or backward is running, or the engine cannot
                switch.
        """
        self._check_attached()
        self._check_switch()
        with nullcontext() if self._search is None else self._search.paused():
            if not self._is_quantized:
                yield
                return
            self._switch()
            try:
                yield
            finally:
                if self.is_attached:
                    self._switch()
        if self.is_attached:
            self._check_left()

    def _check_left(self) -> None:
        """Raise RuntimeError if quantization must not be turned off or on now."""

    def _check_switch(self) -> None:
        """Raise RuntimeError unless `_switch` can be called now; engines that can switch override it."""
        raise RuntimeError(
            f"{type(self).__name__} cannot turn quantization off and on during training; full_precision and "
            "time_steps need FSDP2 or DDP. Compare a run with sdp4bit to one without it"
        )

    def _switch(self) -> None:
        """Turn quantization off or on again; sends nothing."""
        if self._is_quantized:
            self._installed.close()
        else:
            self._install_groups()
        self._set_quantized(not self._is_quantized)
        self.resync()  # plain steps have changed the main weights

    def _set_quantized(self, is_quantized: bool) -> None:
        self._is_quantized = self._state.counts_steps = is_quantized
        self._state.expects_silence = not is_quantized

    def alerts(self) -> list[Alert]:
        """Return the last thousand alerts, oldest first.

        They are the same on all ranks, or on all ranks of a stage with pipeline parallelism.
        """
        return [] if self._alerts is None else self._alerts.all()

    def on_alert(self, callback: AlertCallback) -> RemovableHandle:
        """Call the callback with every new :class:`Alert`, on the ranks that `alerts` names, until removed.

        An exception of the callback is logged and does not end the step.

        Raises:
            ValueError: the configuration has no alerts.
            RuntimeError: the handle has been removed.
        """
        self._check_attached()
        if self._alerts is None:
            raise ValueError("alerts are off: attach with SDP4BitConfig(alerts=AlertConfig(...))")
        return self._alerts.listen(callback)

    def audit(self) -> bool:
        """Return whether all copies of each replica are bit-identical; call it on all ranks.

        Call it outside of forward and backward. Copies that differ are refreshed in full precision.

        Raises:
            ReplicaMismatchError: on all ranks of the group, unless the configuration asks for a resync.
        """
        self._check_attached()
        self._wait_for_ranks("audit")
        return self._audit(self.config.audit or AuditConfig())

    @torch.no_grad()
    @torch.inference_mode(False)
    def _audit(self, config: AuditConfig) -> bool:
        names = audit_replicas(self._audited(), config)
        wrong = [group for group in self._state.groups if group.view.name in names]
        return not self._refresh_mismatched(wrong, config=config)

    def _audited(self) -> list[ReplicaCopy]:
        """Return this rank's copies of weights that other ranks hold too."""
        copies = map(replica_copy, self._state.groups)
        return [copy for copy in copies if copy is not None]

    @abstractmethod
    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        """Request a full-precision refresh of these groups; return also the groups other ranks found."""

    def _check_attached(self) -> None:
        if self._removed:
            raise RuntimeError(
                "this handle has been removed from its model: only stats(), group_stats(), alerts() and "
                "explain() still answer"
            )

    def _end(self) -> None:
        """Drop all references to the model; keep the last statistics."""
        self._optimizers.remove()
        self._last_stats = self.stats(), self.group_stats()
        if self._alerts is not None:
            self._alerts.detach()
        self._state.detach()
        self._removed = True
        vars(self).pop("_engine", None)  # not set if attaching has failed


def changes_weights(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a learning rate of an optimizer is not zero."""
    # torch.distributed.checkpoint steps with a rate of zero to create optimizer states, for stateless
    # optimizers at every save.
    rates = [group.get("lr") for group in optimizer.param_groups]
    # One on the device is not read, because the host would have to wait for it.
    return any((isinstance(rate, Tensor) and not rate.is_cpu) or rate != 0 for rate in rates)

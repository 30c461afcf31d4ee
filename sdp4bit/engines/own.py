"""Quantized communication of a training engine of one's own: rows go in, a handle comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sdp4bit.collectives.group import Group, Rows
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.collectives.weights import Due
from sdp4bit.config import AuditConfig, SDP4BitConfig, as_config
from sdp4bit.engines.agreement import AgreedNodes, ShardedRows, agree
from sdp4bit.engines.attach import build
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.engines.loading import check_counters, counters_of, load_counters
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.explain import layout_reason
from sdp4bit.observe.stats import ModelState

_FORMAT_VERSION = 1


def attach_engine(
    rows: Sequence[Rows],
    *,
    install: Callable[[Group], Undo],
    config: SDP4BitConfig | str | None = None,
    topology: TopologySpec = "auto",
    replicate: bool = False,
) -> EngineHandle:
    """Quantize the communication of an engine; call it on all ranks of the job.

    The engine gathers and reduces through the groups that `install` gets, and calls `mark_step()` of the
    returned handle after each optimizer step. `examples/engine.py` is an engine of one file.

    Args:
        rows: this rank's parameter groups, in the same order on all ranks that share them.
        install: makes the engine communicate through a group, which has its quantizers, and returns the
            undo, which does nothing the second time. It is called again after `full_precision()`.
        config: settings or the name of a preset; None uses the default.
        topology: the ranks of each node: "auto", ranks per node, or an (inter, intra) mesh.
        replicate: whether every rank of a row computes complete gradients and sums them in place
            (`group.gradients.reduce_in_place`), instead of reducing them to shards (`reduce`).

    Raises:
        ValueError: the arguments are not supported, or differ between ranks; the same on every rank.
        TypeError: an argument has an unsupported type; the same on every rank.
    """
    # 1. Look at this rank's arguments. An error is raised below, on all ranks.
    settings, failure, sharded = SDP4BitConfig(), None, list[ShardedRows]()
    try:
        settings = as_config(config)
        sharded = [
            ShardedRows(
                name=row.name,
                ranks=row.ranks,
                shard_numel=row.shard_numel,
                dtypes=(),
                replicate=is_replicated,
            )
            for is_replicated in (False, True)[: 1 + replicate]
            for row in rows
        ]
    except Exception as caught:  # raising here would leave the other ranks waiting
        failure = caught
    # 2. Agree with the other ranks, or raise on all of them, before anything is changed.
    layouts = agree(
        sharded,
        settings={"config": settings, "replicate": replicate},
        topology=topology,
        failure=failure,
        call="engines.attach_engine",
    )
    groups = [
        Group(
            row,
            index=index,
            layout=layouts.shards[row.ranks],
            replicate=layouts.replicate[row.ranks] if replicate else None,
        )
        for index, row in enumerate(rows)
    ]
    for group in groups:
        reduced = layout_reason(settings.gradients, group.layout)
        group.weights.unquantized_reason = layout_reason(settings.weights, group.layout)
        group.gradients.unquantized_reason = Unquantized(Cause.SUMMED_IN_PLACE) if replicate else reduced
        group.gradients.unquantized_sum_reason = reduced
        group.replicate_data_ranks = range(group.layout.size) if replicate else range(0)
    # 3. Build the collectives and install them.
    return EngineHandle(groups, install=install, config=settings, layouts=layouts)


class OwnEngine:
    """The three calls of an `Engine` for groups that their engine reports itself."""

    def __init__(self, state: ModelState, install: Callable[[Group], Undo]) -> None:
        self._state = state
        self.install = install

    def groups(self) -> Sequence[Group]:
        return self._state.groups

    def on_step(self, call: Callable[[int], None]) -> Undo:
        return self._state.on_step(call)


class EngineHandle(CommHandle):
    """Handle of an engine of one's own; see `attach_engine`."""

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        install: Callable[[Group], Undo],
        config: SDP4BitConfig,
        layouts: AgreedNodes,
    ) -> None:
        state = ModelState(groups, telemetry=config.telemetry)
        super().__init__(state, config=config, layouts=layouts)
        with self._attaching() as undo:
            build(groups, layouts=layouts, config=config, undo=undo)
            self._install(OwnEngine(state, install), undo=undo, watched=groups)
        self._log_attached()

    def mark_step(self) -> None:
        """Report an optimizer step; call it on all ranks after each, before the next gather."""
        self._check_attached()
        for group in self._state.groups:
            group.weights.mark_changed()
        self._state.end_step()

    def resync(self) -> None:
        """Refresh the replicas in full precision at the next gather; call it on all ranks."""
        self._check_attached()
        self._refresh_mismatched(self._state.groups, config=AuditConfig())

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        for group in wrong:
            group.weights.raise_to(Due.FULL)
        return wrong

    def _check_switch(self) -> None:
        """Do nothing: only the engine knows whether a forward or backward is running."""

    def state_dict(self) -> StateDict:
        """Return the counters of the rounding bits; the same on all ranks.

        Replicas are not saved: after a load they start from the main weights, in full precision.
        """
        self._check_attached()
        saved = counters_of(self._state, version=_FORMAT_VERSION)
        # Tensors, because torch.distributed.checkpoint stores other values as pickles.
        groups = [{name: torch.tensor(value) for name, value in each.items()} for each in saved["groups"]]
        numbers = {name: torch.tensor(saved[name]) for name in ("format_version", "steps")}
        return {**numbers, "groups": groups}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; call it on all ranks.

        Raises:
            ValueError: the argument is no state of this class and model; nothing is changed.
        """
        self._check_attached()
        owner, version = "an engine of sdp4bit.engines.attach_engine", _FORMAT_VERSION
        with self._on_all_ranks("load_state_dict"):
            check_counters(self._state, state_dict, owner=owner, version=version)
        load_counters(self._state, state_dict, owner=owner, version=version)
        self.resync()

"""Step boundaries of an attached FSDP2 model: steps of torch optimizers, edits and loads of the weights."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.work import SideStream
from sdp4bit.config import TelemetryConfig
from sdp4bit.engines.fsdp2.communication import FSDPCommunication, reduce_over_copies
from sdp4bit.engines.fsdp2.edits import SMALL_EDIT, EditDetector, StateDictAliases
from sdp4bit.engines.fsdp2.groups import ParamSegment
from sdp4bit.engines.handle import ModelCommunication

_FULL_REFRESHES_IN_A_ROW = 3
"""So many are said to be a habit."""


def in_backward() -> bool:
    """Return whether autograd is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class FSDPModelCommunication(ModelCommunication[FSDPCommunication]):
    """What the groups of one attached model share: step boundaries, and what happened to the weights."""

    def __init__(
        self, groups: Sequence[FSDPCommunication], *, telemetry: TelemetryConfig | None = None
    ) -> None:
        super().__init__(groups, telemetry=telemetry)
        self.reductions_since_step = 0
        self.aliases = StateDictAliases()
        self._edits = EditDetector()
        self._segments: dict[int, ParamSegment] = {}
        self._stepping_in = -1
        self._communicates = any(comm.layout.size > 1 for comm in groups)
        self._stepped: set[int] = set()
        """Ids of the parameters stepped since the last step boundary, where nothing is sent."""
        self._warned: set[str] = set()

    @cached_property
    def unshard_stream(self) -> SideStream:
        """Where weights are sent that somebody asks for beside the computation, `unshard(async_op=True)`."""
        return SideStream(self.groups[0].group.device)

    # -- what changes weights ------------------------------------------------------------------------

    def mark_changed(self, params: Iterable[object] | None = None) -> bool:
        """Note an optimizer step over these parameters (None: the user's own); False if none is ours.

        Whose parameters they are tells that a step was taken, and no more: what has to be sent must not
        depend on this rank's optimizer (:meth:`FSDPCommunication.note_step`).
        """
        params = None if params is None else list(params)
        if params is not None and not self._holds_any(params):
            return False
        if not self._communicates:
            self._count_step_alone(params)
        self.step_pending = True
        self.reductions_since_step = 0
        if not in_backward():
            self._after_step(by_hand=params is None)
        elif self._stepping_in != torch._C._current_graph_task_id():
            # Optimizers that step in backward come once per parameter.
            self._stepping_in = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(
                partial(self._after_step, by_hand=params is None)
            )
        return True

    def _after_step(self, *, by_hand: bool) -> None:
        self.aliases.take_written()  # some optimizers write parameters in ways that look like a load
        for comm in self.groups:
            comm.note_step(by_hand=by_hand)
            if comm.has_unsummed_gradients():
                self.warn_once(
                    "sdp4bit: an optimizer has stepped with gradients that were reduced over shards, and not "
                    f"over replicas since ({comm.group.name}): either the last backward before it had "
                    "set_requires_all_reduce(False), or FSDP2 has all-reduced them by itself, in full "
                    "precision, over another process group than when sdp4bit attached"
                )
        self._reshard_changed()

    def _count_step_alone(self, params: Sequence[object] | None) -> None:
        """Count steps where FSDP2 gathers nothing, so that no hook sees the next forward.

        A second step over the same parameter is the next one: optimizers that share a model's parameters, or
        step each in backward, take one together.
        """
        every = [segment.sharded for comm in self.groups for segment in comm.group.segments]
        stepped = {id(param) for param in (every if params is None else params)}
        if not self.step_pending:
            self._stepped.clear()
        elif not self._stepped.isdisjoint(stepped):
            self.steps += 1
            self._stepped.clear()
        self._stepped |= stepped

    def _reshard_changed(self) -> None:
        """Free parameters that stayed unsharded: they would hide the step from the next forward."""
        for comm in self.groups:
            if comm.changed and comm.group.is_unsharded:
                comm.group.module.reshard()

    def reshard(self) -> None:
        """Free parameters that stayed unsharded: they would hide a refresh from the next forward."""
        for comm in self.groups:
            if comm.group.is_unsharded:
                comm.group.module.reshard()

    def _holds_any(self, params: Sequence[object]) -> bool:
        """Whether any of these is a parameter of ours.

        Optimizers that step in backward ask once for every parameter, so the answer comes from a table.
        """
        if not any(map(self._is_ours, params)):
            # FSDP2 may have replaced parameters since.
            self._segments = {id(s.sharded): s for comm in self.groups for s in comm.group.segments}
        return any(map(self._is_ours, params))

    def _is_ours(self, param: object) -> bool:
        segment = self._segments.get(id(param))
        return segment is not None and segment.sharded is param

    def request_resync(
        self, *, keep_loaded: bool = False, only: Collection[FSDPCommunication] | None = None
    ) -> None:
        """Have all replicas, or only these groups', refreshed in full precision at their next unshard.

        Args:
            keep_loaded: rows from a checkpoint stay candidates, so that the order in which a model's and the
                communication's state are loaded does not matter.
        """
        for comm in self.groups if only is None else only:
            comm.resync_wanted = True
            if keep_loaded:
                # Rows that were found to fit may not fit what has just been loaded.
                comm.load_undecided = comm.load_undecided or comm.loaded_shard is not None
            else:
                comm.loaded_shard = None
                comm.load_undecided = False
                comm.changed.clear()

    def before_unshard(self, comm: FSDPCommunication) -> None:
        """Notice step boundaries and edits of the weights that no optimizer made; called outside backward."""
        ended, self.step_pending = self.step_pending, False
        if ended:
            self.steps += 1
            self.end_traffic()
        if self._was_loaded_in_place():
            self.request_resync(keep_loaded=True)
        self._edits.look(comm, self.groups)
        if self._edits.take_late():
            self.warn_once(
                "sdp4bit: weights were edited in place between micro-batches, or frozen weights between "
                "steps, and have been used as they were before. On a GPU a training step does not wait to "
                "find such edits first: call comm.resync() on all ranks after them"
            )
        if ended:
            self.measure_step()

    def before_all_reduce(self) -> None:
        """Notice a step boundary where no shard is gathered, so that the gradients of replicas come first."""
        if self.step_pending and not self._communicates:
            self.step_pending = False
            self.steps += 1
            self.end_traffic()
            self.measure_step()

    def _was_loaded_in_place(self) -> bool:
        """Whether every parameter that all ranks hold a part of was written to through a state dict.

        A checkpoint load does that, on all ranks alike.
        """
        written = self.aliases.take_written()
        if not written:
            return False
        common = [s.name for comm in self.groups for s in comm.group.segments if s.is_on_all_ranks]
        return bool(common) and written.issuperset(common)

    def warn_of_full_refreshes(self, comm: FSDPCommunication) -> None:
        """Say once that a group's weights travel in full precision again and again."""
        if comm.full_in_a_row == _FULL_REFRESHES_IN_A_ROW:
            self.warn_once(
                f"sdp4bit: weights ({comm.group.name} first) were sent in full precision "
                f"{_FULL_REFRESHES_IN_A_ROW} times in a row: they were loaded, or edited by more than "
                f"1/{round(1 / SMALL_EDIT)} of their size, with no optimizer step since. If an optimizer "
                "made these edits, call comm.mark_step() after each: then differences are sent. "
                "comm.explain() counts full refreshes per group"
            )

    def detach(self) -> None:
        """See ModelCommunication."""
        super().detach()
        self._segments, self.aliases = {}, StateDictAliases()

    # -- checkpoints ---------------------------------------------------------------------------------

    def agree_on_loaded_shards(self, comm: FSDPCommunication) -> None:
        """Use the rows of a loaded checkpoint, or drop them on all ranks if they are not these weights'.

        One reduction over the group's ranks per load makes the decision common.
        """
        peers = [c for c in self.groups if c.layout == comm.layout and c.replica is not None]
        for peer in peers:
            peer.load_undecided = False
        fits = all(peer.loaded_shard_fits() for peer in peers)
        verdict = torch.tensor([int(fits)], device=comm.group.device)
        with comm_error_context("agreement on loaded replicas", group=comm.group.process_group):
            dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=comm.group.process_group)
        verdicts = verdict.repeat(len(peers))
        reduce_over_copies(verdicts, peers, op=dist.ReduceOp.MIN)
        if not verdicts.all():
            warnings.warn(
                "sdp4bit: the loaded communication state was not saved with these weights, or not by each "
                "rank for itself; all replicas are refreshed in full precision instead",
                stacklevel=2,
            )
            for peer in peers:
                peer.loaded_shard = None
                peer.changed.clear()

    def warn_once(self, message: str) -> None:
        """Warn, but not again for the same message."""
        key = message.partition("(")[0]
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)


def watch_optimizers(state: FSDPModelCommunication) -> RemovableHandle:
    """Note the steps of every torch optimizer; the hook does not keep the model alive.

    `torch.compile(optimizer.step)` calls it as it is, between two graphs: compiled, it would run once,
    while it is traced.
    """
    reference = weakref.ref(state)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        alive = reference()
        if alive is not None and not _only_creates_state(optimizer, alive):
            alive.mark_changed(p for group in optimizer.param_groups for p in group["params"])

    return register_optimizer_step_post_hook(torch.compiler.disable(after_step))


def _only_creates_state(optimizer: torch.optim.Optimizer, state: FSDPModelCommunication) -> bool:
    """Whether a step cannot change weights: no gradients from a reduction, a learning rate of zero.

    torch.distributed.checkpoint takes such steps to create optimizer states; with stateless optimizers, at
    every save.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    on_host = [float(r) for r in rates if isinstance(r, float | int | torch.Tensor) and not _on_device(r)]
    return state.reductions_since_step == 0 and on_host == [0.0] * len(rates)


def _on_device(rate: float | torch.Tensor) -> bool:
    return isinstance(rate, torch.Tensor) and rate.device.type != "cpu"

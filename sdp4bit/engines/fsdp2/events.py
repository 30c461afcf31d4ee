"""Events of a model: optimizer steps and loads on this rank, agreement of the ranks, and step boundaries.

Because ranks see different events, one all-reduce of a few flags per group and forward combines them.
`collectives/weights.py` decides from the result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sdp4bit.collectives.host import all_reduce_on_host
from sdp4bit.collectives.reasons import FullReason
from sdp4bit.collectives.streams import SideStream
from sdp4bit.collectives.weights import Due, Events, is_large_change
from sdp4bit.config import TelemetryConfig
from sdp4bit.engines.auto import Search
from sdp4bit.engines.fsdp2.group import FSDPGroup, check_dtypes
from sdp4bit.engines.fsdp2.torch_internals import RootContext
from sdp4bit.engines.fsdp2.view import FSDPView, ParamView, reduce_over_copies, tensor_version
from sdp4bit.engines.handle import changes_weights
from sdp4bit.engines.owned_hooks import end_with
from sdp4bit.log import logger
from sdp4bit.observe.explain import describe_full_refresh
from sdp4bit.observe.stats import ModelState
from sdp4bit.warn import warn_user

FULL_REFRESHES_IN_A_ROW = 3  # consecutive ones that cause a warning


def in_backward() -> bool:
    """Return whether autograd is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class StepObserver:
    """Detects optimizer steps over a model's parameters."""

    def __init__(
        self,
        params: Sequence[ParamView],
        *,
        count: Callable[[Sequence[object]], None],
        after_step: Callable[..., None],
        aliases: StateDictAliases,
    ) -> None:
        """Call `count` with the parameters of each step, `after_step` once per step or backward.

        Args:
            aliases: the tensors in which a step that only creates optimizer states must not be taken for a
                load.
        """
        self._params, self._count, self._after_step, self._aliases = params, count, after_step, aliases
        self._known: dict[int, ParamView] = {}
        # Optimizers of other models, with the ids of their parameters.
        self._foreign: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]]
        self._foreign = weakref.WeakKeyDictionary()
        self._stepping_in = -1
        self.is_reduced = False  # gradients have been reduced since the last optimizer step

    def watch_optimizers(self) -> Sequence[RemovableHandle]:
        """Watch the steps of every torch optimizer; the hooks do not keep the model alive."""
        reference = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            observer = reference()
            if observer is not None and observer._only_creates_state(optimizer):
                observer._aliases.note_writes()

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            observer = reference()
            if observer is not None and observer._only_creates_state(optimizer):
                observer._aliases.ignore_writes()
            elif observer is not None:
                observer.note_step(optimizer)

        # Disabled, because `torch.compile(optimizer.step)` would otherwise run them only while tracing.
        hooks = [
            register_optimizer_step_pre_hook(torch.compiler.disable(before_step)),
            register_optimizer_step_post_hook(torch.compiler.disable(after_step)),
        ]
        end_with(self, hooks)
        return hooks

    def _only_creates_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step cannot change weights: no reduced gradients and a learning rate of zero."""
        return not (self.is_reduced or changes_weights(optimizer))

    def note_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Record an optimizer step if it includes a parameter of the model (None: reported by the user)."""
        params: list[object] = []
        if optimizer is None:
            params += (param.sharded for param in self._params)
        else:
            params += (param for group in optimizer.param_groups for param in group["params"])
            if self._is_foreign(optimizer, params):
                return
        self._count(params)
        self.is_reduced = False
        after_step = partial(self._after_step, by_hand=optimizer is None)
        if not in_backward():
            after_step()
        elif self._stepping_in != torch._C._current_graph_task_id():
            # Optimizers in backward step once per parameter. FSDP2 ends its backward with the same callback.
            self._stepping_in = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(after_step)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer holds a parameter of the model."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return not self._is_foreign(optimizer, params)

    def _is_foreign(self, optimizer: torch.optim.Optimizer, params: Sequence[object]) -> bool:
        """Return whether an optimizer holds no parameter of the model."""
        # Remembered, because looking for new parameters of the model takes longer than a step over one
        # parameter. By their ids, because optimizers may be given other parameters later.
        ids = [*map(id, params)]
        if self._foreign.get(optimizer) == ids:
            return True
        if self._holds_any(params):
            return False
        self._foreign[optimizer] = ids
        return True

    def _holds_any(self, params: Sequence[object]) -> bool:
        # A table, because optimizers in backward call this for every parameter. FSDP2 may have replaced
        # parameters since it was made.
        if not any(map(self._is_ours, params)):
            self._known = self._table()
        return any(map(self._is_ours, params))

    def _table(self) -> dict[int, ParamView]:
        return {id(param.sharded): param for param in self._params}

    def _is_ours(self, param: object) -> bool:
        known = self._known.get(id(param))
        return known is not None and known.sharded is param

    def detach(self) -> None:
        """Drop all references to the model."""
        self._params, self._known = (), {}


Version = tuple[int, int, int]


class StateDictAliases:
    """Detects loads by torch.distributed.checkpoint, which fills the tensors of a state dict in place.

    These tensors share memory with the parameters but not their version counters. After an optimizer step
    nothing else distinguishes a load from the step.
    """

    def __init__(self) -> None:
        # Kept alive until `_look`, because a state dict may be freed before its versions are read.
        self._latest: dict[str, tuple[DTensor, Version]] = {}
        # Tensors that the user keeps.
        self._kept: dict[str, list[tuple[weakref.ref[DTensor], Version]]] = {}
        self._written: set[str] = set()

    def watch(self, param: ParamView) -> RemovableHandle:
        """Watch state dicts with this parameter until the hook is removed."""
        owner, own_name = param.owner

        def after_state_dict(_: nn.Module, state_dict: dict[str, DTensor], prefix: str, *__: object) -> None:
            value = state_dict.get(prefix + own_name)
            if value is not None and hasattr(value, "_local_tensor"):
                self._look(param.name)
                self._latest[param.name] = value, tensor_version(value)

        hook: RemovableHandle = owner.register_state_dict_post_hook(after_state_dict)
        return hook

    def _look(self, name: str) -> None:
        """Record writes to the state-dict tensors of a parameter; forget freed tensors."""
        handed_out = [(ref(), before) for ref, before in self._kept.pop(name, [])]
        if name in self._latest:
            handed_out.append(self._latest.pop(name))
        alive = [(value, before, tensor_version(value)) for value, before in handed_out if value is not None]
        if any(now != before for _, before, now in alive):
            self._written.add(name)
        if alive:
            self._kept[name] = [(weakref.ref(value), now) for value, _, now in alive]

    def note_writes(self) -> None:
        """Record the writes since the last call, which may be loads."""
        for name in {*self._kept, *self._latest}:
            self._look(name)

    def ignore_writes(self) -> None:
        """Attribute the writes since `note_writes` to a step that changes no weights."""
        written = set(self._written)
        self.note_writes()
        self._written = written

    def forget_writes(self) -> None:
        """Attribute all writes so far to an optimizer."""
        self.note_writes()
        self._written.clear()

    def take_loads(self, names: Iterable[str]) -> bool:
        """Return whether all of these parameters were written to since the last call or optimizer step."""
        self.note_writes()
        expected = set(names)
        is_loaded = bool(expected) and self._written >= expected
        self._written -= expected
        return is_loaded

    def detach(self) -> None:
        """Drop all references to tensors."""
        self._latest, self._kept = {}, {}


class FSDPModelState(ModelState):
    """The groups of one attached model, their step count, and the events their ranks agree on."""

    groups: Sequence[FSDPGroup]

    def __init__(
        self,
        groups: Sequence[FSDPGroup],
        *,
        roots: Sequence[nn.Module],
        telemetry: TelemetryConfig | None = None,
    ) -> None:
        super().__init__(groups, telemetry=telemetry)
        self.aliases = StateDictAliases()
        # Weak references, because a dropped model must not wait for the garbage collector.
        self._roots = [weakref.ref(root) for root in roots]
        model = weakref.proxy(self)
        self.step_observer = StepObserver(
            [param for group in groups for param in group.view.params],
            count=partial(FSDPModelState._count_step, model),
            after_step=partial(FSDPModelState.after_step, model),
            aliases=self.aliases,
        )
        self._stepped: set[int] = set()  # see `_count_step`
        self._leader: weakref.ref[object] | None = None
        self._gathered: set[int] = set()
        # Their groups all have a handle and supported dtypes, which FSDP2 reads at the first forward.
        self._contexts: weakref.WeakSet[RootContext] = weakref.WeakSet()
        # The job's process group for CPU tensors, if FSDP2's own takes none.
        self.decision_group: ProcessGroup | None = None
        # FSDP2 gathers parameters, so a hook sees each forward.
        self.communicates = any(group.layout.size > 1 for group in groups)
        self.counts_reductions = self.communicates or any(
            group.replicate_layout is not None for group in groups
        )
        # Gradients were reduced on this rank since the last step boundary.
        self._is_reduced = False
        self._has_gradients = True
        self._most_ranks = max((group.layout.size for group in groups), default=1)
        self._warned: set[str] = set()
        for group in groups:
            group.gradients.warn_once = partial(FSDPModelState.warn_once, model, group.view)
        self._has_logged = False  # a load of weights without the state
        self.search: Search | None = None  # of the fastest settings, with config="auto"
        self._first: weakref.ref[nn.Module] | None = None  # module of the first forward

    @cached_property
    def unshard_stream(self) -> SideStream:
        """The stream for refreshes and gathers of `unshard(async_op=True)`."""
        return SideStream(self.groups[0].view.device)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.step_observer.holds(optimizer)

    def note_reduction(self, group: FSDPGroup) -> None:
        """Record that gradients of a group are being reduced."""
        group.edits.note_reduction()
        self.step_observer.is_reduced = True
        # The next gather outside of backward begins a new forward.
        self._is_reduced, self._leader = True, None

    def _count_step(self, params: Sequence[object]) -> None:
        """Count the step of an optimizer if FSDP2 sends nothing and therefore calls no hook."""
        if self.counts_reductions:
            return
        # A second step over the same parameter begins the next step, because several optimizers may share
        # the model's parameters or step in backward.
        stepped = {id(param) for param in params}
        if not self.step_pending:
            self._stepped.clear()
        elif not self._stepped.isdisjoint(stepped):
            self.steps += 1
            self._stepped.clear()
        self._stepped |= stepped
        self.step_pending = True

    def after_step(self, *, by_hand: bool) -> None:
        """Record a step of any optimizer, or one that the user has reported (`by_hand`)."""
        self.aliases.forget_writes()  # some optimizers' writes look like a load
        if self.counts_reductions and self._is_reduced:
            self.step_pending = True
        for group in self.groups:
            group.edits.note_step(by_hand=by_hand)
            if group.has_unsummed_gradients():
                self.warn_once(
                    group.view,
                    "an optimizer has stepped with gradients that were reduced over shards but not "
                    f"over the replicate dimension since ({group.view.name}). Either the last backward had "
                    "set_requires_all_reduce(False), or FSDP2 all-reduced them in full precision over a "
                    "process group that was set after sdp4bit attached",
                )
        self.reshard([group for group in self.groups if group.edits.seen.has_stepped])
        if self.search is not None:
            self.search.note_step()

    def before_all_reduce(self, group: FSDPGroup) -> None:
        """Detect step boundaries if nothing is gathered, because no hook then sees a forward."""
        if self.communicates:
            return
        # The first reduction after an optimizer step ends that step. The ranks need not agree: each of them
        # holds all parameters, so its optimizers see every step.
        if self.step_pending:
            self.end_step()
        self.step_observer.is_reduced = self._is_reduced = True

    def end_step(self) -> None:
        self._is_reduced = False
        super().end_step()

    def forget_events(self) -> None:
        """Forget the step that this rank has seen; a loaded state replaces it."""
        self.step_pending = self._is_reduced = self.step_observer.is_reduced = False

    def note_forward(self, module: nn.Module, *_: object) -> None:
        """Record whether a forward that begins has gradients; FSDP2 gathers without them in any case."""
        self._has_gradients = torch.is_grad_enabled()
        # A recomputation is no pass. The first module of a forward is the same on all ranks.
        if self.search is not None and self._has_gradients and not in_backward():
            self._first = self._first or weakref.ref(module)
            if self._first() is module:
                self.search.begin_pass()

    def note_load(self, *_: object) -> None:
        """Record that a state dict was loaded on this rank; a hook of torch.nn modules."""
        for group in self.groups:
            group.edits.seen.was_loaded = True

    def request_resync(self, groups: Collection[FSDPGroup] | None = None) -> None:
        """Request a full-precision refresh of these groups (None: all); called on all ranks."""
        groups = self.groups if groups is None else groups
        self.reshard(groups)
        for group in groups:
            group.weights.raise_to(Due.FULL)

    def reshard(self, groups: Iterable[FSDPGroup]) -> None:
        """Free unsharded parameters that are not in use, so that the next forward gathers them again."""
        for group in groups:
            # A group that is in use by a forward or backward is resharded by FSDP2 afterwards.
            if group.view.is_unsharded and group.view.is_idle:
                group.view.module.reshard()

    def before_unshard(self, group: FSDPGroup) -> None:
        """Make the ranks agree on changes of the weights; called outside of backward."""
        # The first gather of a forward reduces the flags of all groups of its root. A gather outside of
        # forward reduces those of its own group.
        leader = group.view.forward_leader
        if leader is not None and group.view.context not in self._contexts:
            names = group.view.find_unattached(filter(None, (root() for root in self._roots)))
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise RuntimeError(
                    f"sdp4bit.quantize_communication did not see the FSDP modules of {', '.join(names[:3])}"
                    f"{more}, which would be sent in full precision: call it after the last fully_shard, "
                    "with the root of the model. skip= leaves modules in full precision"
                )
            for each in self.groups:
                if each.view.context is group.view.context and each.view.note_dtypes():
                    gradients, replica = each.gradients.quantizers, each.weights.replica
                    check_dtypes(each.view, weights=replica is not None, gradients=bool(gradients))
            self._contexts.add(group.view.context)
        if leader is None:
            self._agree([group])
        else:
            # FSDP2 does not announce a forward. It begins with the leader's group, unless that stayed
            # unsharded. Then a new leader, or a group that was already gathered, shows a new forward.
            is_known = self._leader is not None and self._leader() is leader
            if group.view.leads(leader) or not is_known or group.index in self._gathered:
                self._leader = weakref.ref(leader)
                self._gathered.clear()
                self._agree([each for each in self.groups if each.view.context is group.view.context])
            self._gathered.add(group.index)

    @torch.no_grad()
    @torch.inference_mode(False)
    def _agree(self, groups: Sequence[FSDPGroup]) -> None:
        """Combine the events of all ranks of these groups, and end the step if their weights have changed."""
        # 1. Loads into the tensors of a state dict, for each group because they are reported once.
        names = (s.name for group in groups for s in group.view.params if s.is_on_all_ranks)
        if self.aliases.take_loads(names):
            for group in groups:
                group.edits.seen.was_loaded = True
        self._log_stateless_load(groups)
        # 2. All that this rank has seen, before anything is reduced, because ranks of every layout must end
        # the step, also if only the last one holds the weights that were edited.
        seen = self._seen([group for group in groups if group.layout.size > 1])
        changed = self.step_pending or any(events.edited for events in seen.values())
        reduced = self._is_reduced
        # 3. One reduction for the groups of the same ranks. All of these ranks come here, and reduce in the
        # same order, whatever each of them has seen. Layouts are dimensions of one mesh or contain each
        # other, so an event reaches the ranks of all.
        asked: dict[int, list[FSDPGroup]] = {}
        for group in groups:  # by their layout, which groups share; its ranks would take long to hash
            asked.setdefault(id(group.layout), []).append(group)
        for together in asked.values():
            if together[0].layout.size > 1:
                (changed, reduced), agreed = self._agreed(together, seen, (changed, reduced))
                self._decide(agreed)
        # 4. The step ends with the first forward after its optimizer step, on all ranks of the largest
        # layout. The forward of other groups leaves its end to that.
        if changed and reduced:
            if any(group.layout.size == self._most_ranks for group in groups):
                self.end_step()
            else:
                self.step_pending = self._is_reduced = True

    def _decide(self, agreed: Mapping[FSDPGroup, Events]) -> None:
        """Let the events of all ranks raise the levels of groups with a replica."""
        # Rows of a checkpoint are used for all groups or for none.
        has_misfit = any(events.misfit for events in agreed.values())
        measured: list[FSDPGroup] = []
        for group, events in agreed.items():
            group.edits.note_agreement()
            if group.weights.agree(events._replace(misfit=has_misfit)):
                self.warn_once(
                    group.view,
                    "the loaded communication state was not saved with these weights, by these "
                    "ranks and with this layout, or the weights were edited after the last forward. "
                    f"Replicas are refreshed in full precision instead ({group.view.name} first)",
                )
            if group.weights.needs_size(events):
                measured.append(group)
        if not measured:
            return
        # The host waits for the device because its next collective depends on the result; edits are rare.
        squares = torch.stack([group.change_squares() for group in measured]).cpu()
        self._reduce(squares, measured[0], op=dist.ReduceOp.SUM, what="agreement on the size of edits")
        is_large = self.over_copies(is_large_change(squares).to(torch.int32), measured).tolist()
        for group, large in zip(measured, is_large, strict=True):
            group.weights.agree_on_size(agreed[group], is_large=bool(large))

    def _log_stateless_load(self, groups: Sequence[FSDPGroup]) -> None:
        """Log once, on rank 0, if training starts with loaded weights but without the state of a handle."""
        loaded = (
            c.edits.seen.was_loaded and c.weights.replica is not None and not c.weights.is_from_checkpoint
            for c in groups
        )
        if not self.steps and not self._has_logged and dist.get_rank() == 0 and any(loaded):
            self._has_logged = True
            logger.warning(
                "weights were loaded without this handle's state, so replicas start from the loaded "
                "weights. If this resumes a run, it is not bit-exact: save the handle with the model"
            )

    def _seen(self, groups: Sequence[FSDPGroup]) -> dict[FSDPGroup, Events]:
        """Return the events that this rank has seen, for the groups with a replica."""
        groups = [group for group in groups if group.weights.replica is not None]
        found = {group: group.edits.find_edits() for group in groups}
        edits = {group: edit for group, edit in found.items() if edit is not None}
        edited = dict(zip(edits, torch.stack(list(edits.values())).tolist(), strict=True)) if edits else {}
        return {
            group: group.edits.events(edited=edited.get(group, False), has_gradients=self._has_gradients)
            for group in groups
        }

    def _agreed(
        self, groups: Sequence[FSDPGroup], seen: Mapping[FSDPGroup, Events], own: tuple[bool, bool]
    ) -> tuple[tuple[bool, bool], dict[FSDPGroup, Events]]:
        """Return the events that any rank has seen, for the groups with a replica.

        Args:
            groups: groups of the same ranks.
            own: whether weights have changed and gradients were reduced on this rank; returned for all.
        """
        nothing = [False] * len(Events._fields)
        rows = [[*own, *seen.get(group, nothing)] for group in groups]
        # On the CPU: apart from the checksums, the flags do not depend on the GPU, so a step need not wait
        # for it.
        flags = torch.tensor(rows, dtype=torch.int32)
        self._reduce(flags, groups[0], op=dist.ReduceOp.MAX, what="agreement on changed weights")
        rows = self.over_copies(flags, groups).tolist()
        changed, reduced, *_ = (any(column) for column in zip(*rows, strict=True))
        agreed = {group: row[2:] for group, row in zip(groups, rows, strict=True) if group in seen}
        return (changed, reduced), {g: Events(due, *map(bool, row)) for g, (due, *row) in agreed.items()}

    def _reduce(self, values: Tensor, over: FSDPGroup, *, op: dist.ReduceOp.RedOpType, what: str) -> None:
        group = self.decision_group or over.view.process_group
        all_reduce_on_host(values, group, ranks=over.layout.ranks, op=op, what=what)

    def over_copies(self, flags: Tensor, groups: Sequence[FSDPGroup]) -> Tensor:
        """Return the maximum over tensor-parallel ranks, because one may see an edit that others do not."""
        views = [group.view for group in groups]
        reduce_over_copies(flags, views, host=self.decision_group, op=dist.ReduceOp.MAX)
        return flags

    def report_full_refresh(self, group: FSDPGroup) -> None:
        """Log a refresh in full precision; warn of NaN, and of repetitions."""
        weights = group.weights
        reason = describe_full_refresh(weights.reason, in_evaluation=weights.in_evaluation)
        logger.info("step %d, %s in full precision: %s", self.steps, group.view.name, reason)
        if group.weights.reason is FullReason.NONFINITE:
            self.warn_once(
                group.view,
                f"the gathered weights hold NaN or infinity ({group.view.name} first, noticed after step "
                f"{self.steps}) and are sent in full precision until they are finite. Look for the first "
                "step whose loss or gradient norm is not finite, and load a checkpoint from before it",
            )
        elif group.edits.full_in_a_row == FULL_REFRESHES_IN_A_ROW:
            self.warn_once(
                group.view,
                f"weights were sent in full precision {FULL_REFRESHES_IN_A_ROW} times in a row, now because: "
                f"{reason} ({group.view.name} first). If an optimizer makes these edits, call "
                "comm.mark_step() after each to send differences. If averages (EMA) are swapped in, call "
                "model.eval() before you evaluate them. comm.group_stats() counts full refreshes per group, "
                "with the last reason",
            )

    def warn_once(self, view: FSDPView, message: str) -> None:
        """Warn on the first of the view's ranks, unless the text before the first parenthesis has."""
        key = message.partition("(")[0]
        if key not in self._warned:
            self._warned.add(key)
            warn_user(message, view.sharing_ranks)

    def forget_warnings(self) -> None:
        """Warn again from now on: a loaded state continues another run."""
        self._warned.clear()

    def detach(self) -> None:
        super().detach()
        self.aliases.detach()
        self.step_observer.detach()

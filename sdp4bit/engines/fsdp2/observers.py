"""Detection of optimizer steps and loads on this rank; `refresh.py` combines the events of all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from sdp4bit.engines.fsdp2.groups import ParamSegment, tensor_version

if TYPE_CHECKING:
    from sdp4bit.engines.fsdp2.refresh import FSDPModelState


_dropped: list[RemovableHandle] = []
"""Hooks of models that were freed while attached."""


def in_backward() -> bool:
    """Return whether autograd is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class StepObserver:
    """Detects optimizer steps over a model's parameters."""

    def __init__(self, model: FSDPModelState) -> None:
        self._model = weakref.proxy(model)
        self._segments: dict[int, ParamSegment] = {}
        # Optimizers of other models, by id, with the ids of their parameters.
        self._foreign: dict[int, tuple[weakref.ref[torch.optim.Optimizer], list[int]]] = {}
        self._stepping_in = -1
        # If nothing is sent: ids of the parameters stepped since the last step boundary.
        self._stepped: set[int] = set()
        self.is_reduced = False  # gradients have been reduced since the last optimizer step

    def watch_optimizers(self) -> RemovableHandle:
        """Watch the steps of every torch optimizer; the hook does not keep the model alive."""
        # Removed here and not by the finalizer below: a garbage collection may come while an optimizer
        # iterates over its hooks.
        while _dropped:
            _dropped.pop().remove()
        reference = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            observer = reference()
            if observer is not None and not observer._only_creates_state(optimizer):
                observer.note_step(optimizer)

        # Disabled, because `torch.compile(optimizer.step)` would otherwise run it only while tracing.
        hook = register_optimizer_step_post_hook(torch.compiler.disable(after_step))
        weakref.finalize(self, _dropped.append, hook)
        return hook

    def _only_creates_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step cannot change weights: no reduced gradients and a learning rate of zero."""
        # torch.distributed.checkpoint takes such steps to create optimizer states, for stateless optimizers
        # at every save. A rate on the device is not read, because the host would have to wait for it.
        rates = [group.get("lr") for group in optimizer.param_groups]
        on_host = [float(r) for r in rates if isinstance(r, float | int | Tensor) and not _on_device(r)]
        return not self.is_reduced and on_host == [0.0] * len(rates)

    def note_step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Record an optimizer step if it includes a parameter of the model (None: reported by the user)."""
        params = None
        if optimizer is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if self._is_foreign(optimizer, params):
                return
        if not self._model.counts_reductions:
            self._count_step(params)
        self.is_reduced = False
        after_step = partial(self._model.after_step, by_hand=optimizer is None)
        if not in_backward():
            after_step()
        elif self._stepping_in != torch._C._current_graph_task_id():
            # Optimizers in backward step once per parameter. FSDP2 ends its backward with the same callback.
            self._stepping_in = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(after_step)

    def _count_step(self, params: Sequence[object] | None) -> None:
        """Count steps if FSDP2 sends nothing and therefore calls no hook."""
        # A second step over the same parameter begins the next step, because several optimizers may share
        # the model's parameters or step in backward.
        every = [segment.sharded for comm in self._model.groups for segment in comm.group.segments]
        stepped = {id(param) for param in (every if params is None else params)}
        if not self._model.step_pending:
            self._stepped.clear()
        elif not self._stepped.isdisjoint(stepped):
            self._model.steps += 1
            self._stepped.clear()
        self._stepped |= stepped
        self._model.step_pending = True

    def _is_foreign(self, optimizer: torch.optim.Optimizer, params: Sequence[object]) -> bool:
        """Return whether an optimizer holds no parameter of the model."""
        # Remembered, because looking for new parameters of the model takes longer than a step over one
        # parameter. By their ids, because optimizers may be given other parameters later.
        ids = [*map(id, params)]
        reference, known = self._foreign.get(id(optimizer), (None, None))
        if reference is not None and reference() is optimizer and known == ids:
            return True
        if self._holds_any(params):
            return False
        self._foreign[id(optimizer)] = weakref.ref(optimizer), ids
        return True

    def _holds_any(self, params: Sequence[object]) -> bool:
        # A table, because optimizers in backward call this for every parameter. FSDP2 may have replaced
        # parameters since it was made.
        if not any(map(self._is_ours, params)):
            self._segments = self._table()
        return any(map(self._is_ours, params))

    def _table(self) -> dict[int, ParamSegment]:
        return {id(s.sharded): s for comm in self._model.groups for s in comm.group.segments}

    def _is_ours(self, param: object) -> bool:
        segment = self._segments.get(id(param))
        return segment is not None and segment.sharded is param


def _on_device(rate: float | Tensor) -> bool:
    return isinstance(rate, Tensor) and rate.device.type != "cpu"


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

    def watch(self, segment: ParamSegment) -> RemovableHandle:
        """Watch state dicts with this parameter until the hook is removed."""
        owner, own_name = segment.owner

        def after_state_dict(_: nn.Module, state_dict: dict[str, DTensor], prefix: str, *__: object) -> None:
            value = state_dict.get(prefix + own_name)
            if value is not None and hasattr(value, "_local_tensor"):
                self._look(segment.name)
                self._latest[segment.name] = value, tensor_version(value)

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

    def forget_writes(self) -> None:
        """Attribute all writes so far to an optimizer."""
        for name in {*self._kept, *self._latest}:
            self._look(name)
        self._written.clear()

    def take_loads(self, names: Iterable[str]) -> bool:
        """Return whether all of these parameters were written to since the last call or optimizer step."""
        for name in {*self._kept, *self._latest}:
            self._look(name)
        expected = set(names)
        is_loaded = bool(expected) and self._written >= expected
        self._written -= expected
        return is_loaded

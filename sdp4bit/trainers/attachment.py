"""Attachment, checkpoints and logs, which all trainers share."""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import DDP as ReplicatedModule
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from sdp4bit.addresses import install
from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import Settings
from sdp4bit.engines.arrival import checked_on_all_ranks
from sdp4bit.engines.ddp.hook import DDPCommState, ddp_comm_hook
from sdp4bit.engines.fsdp2.api import Skip, quantize_communication
from sdp4bit.engines.fsdp2.checks import other_engine
from sdp4bit.engines.handle import CommHandle
from sdp4bit.engines.owned_hooks import end_with
from sdp4bit.warn import warn_user

FOLDER = "sdp4bit"  # folder of the communication state in a trainer's checkpoint


def missing(extra: str, cause: ImportError) -> ImportError:
    """Return the error for a trainer's package that cannot be imported, with the extra to install."""
    return ImportError(f"sdp4bit.trainers.{extra} cannot import its trainer ({cause}): {install(extra)}")


def attach(
    model: nn.Module | list[nn.Module],
    *,
    caller: str,
    switch: str,
    is_ddp: bool = False,
    config: Settings = None,
    topology: TopologySpec = "auto",
    skip: Skip = None,
) -> CommHandle:
    """Quantize the communication of a model that a trainer has prepared; call it on all ranks.

    Args:
        caller: name of the public class or function, for errors.
        switch: instructions for FSDP2 and DDP with this trainer, for errors.
        is_ddp: whether the trainer wraps the model in DistributedDataParallel without showing it here. The
            hook is then registered at the wrapper's first forward, as it is with later wrappers.
        config, topology, skip: as in `quantize_communication`; DDP takes no `skip`.

    Raises:
        ValueError: the trainer uses neither FSDP2 nor DDP, or an error of `quantize_communication` or
            `DDPCommState`.
    """
    roots = [model] if isinstance(model, nn.Module) else model
    modules = [module for root in roots for module in root.modules()]
    if any(isinstance(module, FSDPModule) for module in modules):
        return quantize_communication(model, topology=topology, config=config, skip=skip)
    wrappers = [m for m in modules if isinstance(m, DistributedDataParallel | ReplicatedModule)]
    other = None if wrappers else next(filter(None, map(other_engine, roots)), None)
    if other is not None:
        reason = other
    elif len(wrappers) > 1:
        reason = f"{len(wrappers)} DistributedDataParallel modules were passed: attach each of them"
    elif any(isinstance(m, ReplicatedModule) and replicate.state(m).has_initialized for m in wrappers):
        reason = "replicate() takes a hook only before the first forward, which has passed"
    elif (wrappers or is_ddp) and skip is not None:
        reason = f"DDP, which it uses, takes no skip={skip!r}"
    elif wrappers or is_ddp:
        group = _group_of(wrappers[0]) if wrappers else None
        state = DDPCommState(group, topology=topology, config=config)
        if not wrappers:
            Wrappers(roots[0], state)
        elif isinstance(wrappers[0], DistributedDataParallel):
            Wrappers(wrappers[0].module, state, wrapper=wrappers[0])
        else:
            wrappers[0].register_comm_hook(state, ddp_comm_hook)
        return state
    elif not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        reason = "there is one process, which does not communicate"
    else:
        reason = "no module of the model is sharded or wrapped"
    raise ValueError(
        f"{caller} needs a model that the trainer has prepared with FSDP2 or DDP, but {reason}. {switch}"
    )


def _group_of(wrapper: nn.Module) -> dist.ProcessGroup | None:
    """Return the ranks that average gradients; `replicate()` keeps its arguments until the first forward."""
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper.process_group
    given = replicate.state(wrapper)._init_kwargs
    mesh = given.get("device_mesh")
    group: dist.ProcessGroup | None = given.get("process_group") if mesh is None else mesh.get_group()
    return group


class Wrappers:
    """Registers the hook with every DistributedDataParallel that a trainer makes of a model.

    Trainers replace it, for example after an out-of-memory error or in another `prepare`, and show the
    model alone. The hook is registered when a wrapper's first forward begins.
    """

    _latest: ClassVar[weakref.WeakKeyDictionary[nn.Module, Wrappers]] = weakref.WeakKeyDictionary()
    """The latest one of each model."""

    def __init__(
        self, model: nn.Module, state: DDPCommState, *, wrapper: DistributedDataParallel | None = None
    ) -> None:
        """Register with the wrapper; None if the trainer has made one without showing it."""
        # Weak, because hooks of all modules must keep neither alive.
        model = uncompiled(model)
        self._model, self._state = weakref.ref(model), weakref.ref(state)
        self._registered: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._at_forward: RemovableHandle | None = None
        if wrapper is None:
            self._wait()
        else:
            self._register(wrapper, state)
        # The state of an earlier trainer, whose wrapper is no longer used.
        earlier, self._latest[model] = self._latest.get(model), self
        before = None if earlier is None else earlier._state()
        if before is not None and before.is_attached:
            before.remove()
        made = register_module_module_registration_hook(self._note_child)
        end_with(state, [made])
        state._undo.callback(made.remove)
        state._undo.callback(self._stop_waiting)

    def _register(self, wrapper: DistributedDataParallel, state: DDPCommState) -> None:
        self._registered.add(wrapper)
        wrapper.register_comm_hook(state, ddp_comm_hook)

    def _note_child(self, parent: nn.Module, _: str, child: nn.Module | None) -> None:
        """Wait for the first forward of a wrapper that is being made."""
        if isinstance(parent, DistributedDataParallel) and self._is_ours(child):
            self._wait()

    def _is_ours(self, module: nn.Module | None) -> bool:
        return module is not None and uncompiled(module) is self._model()

    def _wait(self) -> None:
        if self._at_forward is None:
            self._at_forward = register_module_forward_pre_hook(self._before_forward)

    def _stop_waiting(self) -> None:
        if self._at_forward is not None:
            self._at_forward.remove()
            self._at_forward = None

    def _before_forward(self, module: nn.Module, _: object) -> None:
        wrapper, state = uncompiled(module), self._state()
        if state is None:
            self._stop_waiting()
        elif (
            isinstance(wrapper, DistributedDataParallel)
            and self._is_ours(wrapper.module)
            and wrapper not in self._registered
        ):
            self._stop_waiting()
            self._register(wrapper, state)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module below that of `torch.compile`."""
    return getattr(module, "_orig_mod", module)


def save(comm: CommHandle, checkpoint: str | os.PathLike[str]) -> None:
    """Save the communication state into a folder of the trainer's checkpoint; call it on all ranks."""
    with warnings.catch_warnings():
        # A trainer that resumes writes its checkpoints again.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        save_state(comm.state_dict(), storage_writer=FileSystemWriter(Path(checkpoint) / FOLDER))


def load(comm: CommHandle, checkpoint: str | os.PathLike[str]) -> None:
    """Load the state of `save`; call it on all ranks, after model and optimizer are loaded.

    If the state is missing or does not fit, it warns and quantization starts as in a new run. Training
    continues, but not bit-identically to an uninterrupted run.
    """
    folder = Path(checkpoint) / FOLDER
    has_file: list[bool] = [False] * dist.get_world_size()
    # A rank may lack the permission.
    with checked_on_all_ranks(range(len(has_file)), call="load of the communication state"):
        is_file, state = (folder / ".metadata").is_file(), comm.state_dict()
    dist.all_gather_object(has_file, is_file)
    if not all(has_file):
        missing = [rank for rank, has in enumerate(has_file) if not has]
        where = f" for ranks {missing}" if any(has_file) else ""
        warn_of_missing_state(folder, where)
        return
    # Parts that another configuration did not save keep the loaded weights.
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load_state(state, storage_reader=FileSystemReader(folder), planner=planner)
    comm.load_state_dict(state)


def warn_of_missing_state(checkpoint: object, where: str = "") -> None:
    """Warn that a checkpoint was saved without the communication state; on the first rank."""
    if dist.get_rank() == 0:
        warn_user(
            f"{checkpoint} holds no communication state{where}. Replicas, if any, start from the loaded "
            "weights in full precision, and the run is not bit-identical to an uninterrupted one"
        )

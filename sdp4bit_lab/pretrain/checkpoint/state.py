"""What a checkpoint holds of a run, as a flat dictionary of tensors.

    model.NAME               a parameter, by its global name: DTensors of any mesh, or plain tensors
    optimizer.NAME.SLOT      what the optimizer keeps of it, such as exp_avg
    shared.PART...           state that all ranks have alike, such as a loss scale
    rank3.PART...            state that rank 3 has for itself: random generators, communication

Names do not depend on how the model is laid out over ranks, except for `rank` ones, which are used only where
the same ranks hold the same pieces again. Values that are not tensors are JSON, in a tensor of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from sdp4bit_lab.common.ranks import Ranks

Saved = Mapping[str, TensorStorageMetadata]
"""Names and sizes of the tensors of a checkpoint."""
COMMUNICATION = "communication"
_VALUES = "values"


class RandomState:
    """The random generators of this rank, as a Stateful."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the generators of the CPU and of the device."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Continue from the state."""
        torch.set_rng_state(state_dict["cpu"])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(state_dict["cuda"], self._device)


@dataclass(kw_only=True)
class TrainingState:
    """The parts of a run that a checkpoint holds.

    Made before the first forward: while weights are gathered, a module has other parameters.
    """

    models: Sequence[nn.Module]
    """What this rank has of the model: all of it, sharded, or stages of a pipeline. Names are global."""
    optimizers: Sequence[torch.optim.Optimizer]
    communication: Stateful
    """The handle of sdp4bit.quantize_communication."""
    ranks: Ranks
    shared: Mapping[str, Stateful] = field(default_factory=dict)
    """Small parts that are the same on all ranks and fit any number of them."""
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    """Further parts that each rank has for itself, such as generators of its own."""

    def __post_init__(self) -> None:
        self._names = {
            parameter: name for model in self.models for name, parameter in model.named_parameters()
        }
        self._own: dict[str, Stateful] = {
            "random": RandomState(self.ranks.device),
            COMMUNICATION: self.communication,
            **self.per_rank,
        }

    @property
    def own_names(self) -> list[str]:
        """Names of the parts that each rank has for itself."""
        return list(self._own)

    def to_save(self) -> dict[str, Tensor]:
        """Return everything; the tensors are those of training, not copies."""
        tensors = self.model()
        for optimizer in self.optimizers:
            for parameter, name in self._parameters(optimizer):
                for slot, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer.{name}.{slot}"] = torch.as_tensor(value)
        for part, stateful in self.shared.items():
            tensors.update(_flat(stateful.state_dict(), prefix=f"shared.{part}"))
        for part, stateful in self._own.items():
            tensors.update(_flat(stateful.state_dict(), prefix=f"rank{self.ranks.rank}.{part}"))
        return tensors

    def model(self) -> dict[str, Tensor]:
        """Return the tensors to load weights into: the model's own memory."""
        return {
            f"model.{name}": value.detach()
            for model in self.models
            for name, value in model.state_dict().items()
        }

    def optimizer(self, saved: Saved) -> dict[str, Tensor]:
        """Return tensors to load the optimizers' state into: what the checkpoint has, sharded as here."""
        slots = _slots(saved)
        tensors: dict[str, Tensor] = {}
        if not slots and "shared.loss_scale.values" in saved:
            # Saved before the first step that was not skipped.
            return tensors
        for optimizer in self.optimizers:
            for parameter, name in self._parameters(optimizer):
                if name not in slots:
                    raise ValueError(f"it has no optimizer state of {name}")
                for slot in slots[name]:
                    key = f"optimizer.{name}.{slot}"
                    size, dtype = saved[key].size, saved[key].properties.dtype
                    if len(size) and size == parameter.shape:
                        tensors[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    else:
                        tensors[key] = torch.zeros(size, dtype=dtype)
        return tensors

    def shared_parts(self, saved: Saved) -> dict[str, Tensor]:
        """Return tensors to load the shared parts into, as far as the checkpoint has them."""
        tensors: dict[str, Tensor] = {}
        for part, stateful in self.shared.items():
            tensors.update(_template(stateful.state_dict(), prefix=f"shared.{part}", saved=saved) or {})
        return tensors

    def has_own(self, part: str, *, saved: Saved) -> bool:
        """Return whether the checkpoint has this part of this rank, in whatever sizes."""
        prefix = f"rank{self.ranks.rank}.{part}."
        return any(name.startswith(prefix) for name in saved)

    def own_tensors(self, saved: Saved, *, parts: Sequence[str]) -> dict[str, Tensor] | None:
        """Return tensors to load these parts of this rank into; None if the checkpoint has other sizes."""
        tensors: dict[str, Tensor] = {}
        for part in parts:
            prefix = f"rank{self.ranks.rank}.{part}"
            found = _template(self._own[part].state_dict(), prefix=prefix, saved=saved)
            if found is None:
                return None
            tensors.update(found)
        return tensors

    def apply_common(self, loaded: Mapping[str, Tensor]) -> None:
        """Load models, optimizers and shared parts, as far as there is something for them."""
        for model in self.models:
            model.load_state_dict({name: loaded[f"model.{name}"] for name in model.state_dict()})
        slots = _slots(loaded)
        for optimizer in self.optimizers if slots else ():
            state = {
                index: {slot: loaded[f"optimizer.{name}.{slot}"] for slot in slots[name]}
                for index, (_, name) in enumerate(self._parameters(optimizer))
            }
            # Learning rate, betas and decay are settings of this run, not of the one that was saved.
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        for part, stateful in self.shared.items():
            prefix = f"shared.{part}"
            if any(key.startswith(f"{prefix}.") for key in loaded):
                stateful.load_state_dict(_nested(stateful.state_dict(), prefix=prefix, loaded=loaded))

    def apply_own(self, loaded: Mapping[str, Tensor], *, parts: Sequence[str]) -> None:
        """Load these parts of this rank; to be called after the weights have been applied."""
        for part in parts:
            stateful, prefix = self._own[part], f"rank{self.ranks.rank}.{part}"
            stateful.load_state_dict(_nested(stateful.state_dict(), prefix=prefix, loaded=loaded))

    def start_communication(self, *, step: int) -> None:
        """Resume communication at a step, with a refresh of its replicas in full precision first."""
        state = self.communication.state_dict()
        state["steps"] = step
        self.communication.load_state_dict(state)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield the optimizer's parameters in the order of its state, with their global names."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._names[parameter]


def _slots(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return what an optimizer keeps, by the names of the parameters."""
    slots: dict[str, list[str]] = {}
    for key in keys:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            slots.setdefault(name, []).append(slot)
    return slots


def _leaves(state: Mapping[str, object], *, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in state.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, prefix=name)
        else:
            yield name, value


def _flat(state: Mapping[str, object], *, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a part, what this rank holds of them, and one tensor of all other values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, object] = {}
    for name, value in _leaves(state, prefix=prefix):
        if isinstance(value, Tensor):
            tensors[name] = _local(value)
        else:
            values[name] = value
    if values:
        content = bytearray(json.dumps(values).encode())
        tensors[f"{prefix}.{_VALUES}"] = torch.frombuffer(content, dtype=torch.uint8)
    return tensors


def _template(state: Mapping[str, object], *, prefix: str, saved: Saved) -> dict[str, Tensor] | None:
    """Return tensors to load a part into, or None if the checkpoint has it in other sizes, or not at all."""
    tensors: dict[str, Tensor] = {}
    for name, value in _flat(state, prefix=prefix).items():
        found = saved.get(name)
        if found is None:
            return None
        if name == f"{prefix}.{_VALUES}":
            tensors[name] = torch.empty(found.size, dtype=torch.uint8)
        elif found.size == value.shape and found.properties.dtype == value.dtype:
            tensors[name] = torch.empty_like(value)
        else:
            return None
    return tensors


def _nested(state: Mapping[str, object], *, prefix: str, loaded: Mapping[str, Tensor]) -> dict[str, object]:
    """Return a part's state with the loaded values in place of its own; ValueError if one is missing."""
    content = loaded.get(f"{prefix}.{_VALUES}")
    values: dict[str, object] = {**loaded, **({} if content is None else json.loads(bytes(content.tolist())))}

    def filled(part: Mapping[str, object], name: str) -> dict[str, object]:
        return {
            key: filled(value, f"{name}.{key}") if isinstance(value, Mapping) else values[f"{name}.{key}"]
            for key, value in part.items()
        }

    try:
        return filled(state, prefix)
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None


def _local(value: Tensor) -> Tensor:
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()

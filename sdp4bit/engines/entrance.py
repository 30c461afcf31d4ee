"""The function that attaches to FSDP2, or to the engine of another package that has an adapter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.metadata import entry_points
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import Settings
from sdp4bit.engines.fsdp2 import api as fsdp2
from sdp4bit.engines.handle import CommHandle

ADAPTERS = "sdp4bit.engines"
"""Entry points of adapters: the class of an engine, and a function with our arguments that attaches to it."""


def quantize_communication(
    model: nn.Module | Sequence[nn.Module] | Any,
    config: Settings = None,
    *,
    topology: TopologySpec = "auto",
    skip: Collection[str] | Callable[[str], bool] | None = None,
) -> CommHandle:
    """Quantize the communication of an FSDP2 model or a DeepSpeed engine from the next step on.

    Call it once on every rank of the job, after the last `fully_shard` or after `deepspeed.initialize`, and
    before the first forward. With FSDP2 the optimizer may be created before or after it; steps of any
    `torch.optim.Optimizer` over the model's parameters are detected.

    Args:
        model: the root FSDP module, or all local roots (pipeline stages); `[]` on a rank without a model. Or
            the engine of `deepspeed.initialize`, with ZeRO stage 1 or 2.
        config: settings or the name of a preset; None uses the default.
        topology: the ranks of each node: "auto" (by host name), ranks per node, or an (inter, intra) mesh. A
            tuple of one of the first two and the nodes per block, such as (8, 32), reduces gradients in three
            levels.
        skip: FSDP modules to leave in full precision, as patterns over their names or a predicate.

    Raises:
        ValueError: the model, topology or settings are not supported, or differ between ranks. All ranks
            raise the same error, and nothing has been changed.
        TypeError: an argument has an unsupported type; the same on every rank.
        RuntimeError: torch.distributed is not initialized.
    """
    attach = _adapter_of(model) or fsdp2.quantize_communication
    return attach(model, config=config, topology=topology, skip=skip)


def _adapter_of(model: object) -> Callable[..., CommHandle] | None:
    """Return the function that attaches to an engine of another package; None if no adapter declares one.

    The names of the object's classes are compared, so that neither adapters nor engines are imported.
    """
    if isinstance(model, FSDPModule | Sequence):
        return None  # without the metadata of all installed packages, which takes 30 ms to read
    declared = {entry.name: entry for entry in entry_points(group=ADAPTERS)}
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(model).__mro__)
    entry = next((declared[name] for name in names if name in declared), None)
    return entry and cast(Callable[..., CommHandle], entry.load())

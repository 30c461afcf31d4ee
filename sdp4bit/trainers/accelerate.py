"""Quantized communication of FSDP2 and DDP models prepared by `accelerate.Accelerator`."""

from __future__ import annotations

from typing import Any

from torch import nn

from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import Settings
from sdp4bit.engines.fsdp2.api import Skip
from sdp4bit.engines.handle import CommHandle
from sdp4bit.trainers import attachment

try:
    from accelerate import Accelerator
except ImportError as error:
    raise attachment.missing("accelerate", error) from error

_SWITCH = (
    "On several processes Accelerate uses DDP, and FSDP2 with "
    "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), or with `fsdp_version: 2` in "
    "the file of `accelerate launch`. Pass the model that accelerator.prepare(model, optimizer) returns"
)


def quantize_communication(
    accelerator: Accelerator,
    *,
    model: nn.Module,
    config: Settings = None,
    topology: TopologySpec = "auto",
    skip: Skip = None,
) -> CommHandle:
    """Quantize the communication of a prepared model; save_state and load_state include its state.

    Call it on every rank, directly after `model, optimizer = accelerator.prepare(model, optimizer)`. To log
    statistics, call `accelerator.log({"loss": loss, **comm.log_values()})`.

    Args:
        model: the model that `accelerator.prepare` returned.
        config, topology, skip: as in `sdp4bit.quantize_communication`; DDP takes no `skip`.

    Raises:
        ValueError: the model uses neither FSDP2 nor DDP, or an error of `sdp4bit.quantize_communication`.
    """
    comm = attachment.attach(
        model,
        caller="sdp4bit.trainers.accelerate.quantize_communication",
        switch=_SWITCH,
        config=config,
        topology=topology,
        skip=skip,
    )

    def after_saving(_: list[Any], __: list[Any], folder: str) -> None:
        if comm.is_attached:
            attachment.save(comm, folder)

    def after_loading(_: list[Any], folder: str) -> None:
        if comm.is_attached:
            attachment.load(comm, folder)

    # Accelerate calls "pre" hooks on all ranks after it has written or read FSDP2's model and optimizer.
    accelerator.register_save_state_pre_hook(after_saving)
    accelerator.register_load_state_pre_hook(after_loading)
    return comm

"""A callback for transformers' Trainer and its subclasses, such as TRL's trainers, with FSDP2 or DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import Settings, as_settings
from sdp4bit.engines.fsdp2.api import Skip
from sdp4bit.engines.handle import CommHandle
from sdp4bit.trainers import attachment

try:
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
    from transformers.training_args import TrainingArguments
except ImportError as error:
    raise attachment.missing("hf", error) from error

_SWITCH = (
    "On several processes Trainer uses DDP, and FSDP2 with "
    "TrainingArguments(fsdp=True, fsdp_config={'version': 2}), or with `fsdp_version: 2` in the file of "
    "`accelerate launch`"
)
_UNSHARDED = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU)
"""Accelerate's names for DistributedDataParallel."""


class SDP4BitCallback(TrainerCallback):
    """Quantize a Trainer's FSDP2 or DDP communication: `Trainer(..., callbacks=[SDP4BitCallback()])`.

    Attaches when training begins, after the model was prepared and checkpoints were loaded. Adds the
    communication state to the Trainer's checkpoints, and bytes and compression to its logs.
    """

    comm: CommHandle | None = None
    """The handle, once training has begun."""

    def __init__(
        self,
        config: Settings = None,
        *,
        topology: TopologySpec = "auto",
        skip: Skip = None,
        resume_from_checkpoint: str | Path | None = None,
        log_all: bool = False,
    ) -> None:
        """Store the arguments of `quantize_communication`; DDP takes no `skip`.

        Args:
            resume_from_checkpoint: the checkpoint passed to `train`, if it is not in `output_dir`.
            log_all: log all values of `CommHandle.log_values`.

        Raises:
            ValueError: the preset is unknown.
            TypeError: the configuration has an unsupported type.
        """
        self._config = as_settings(config)
        self._topology, self._skip = topology, skip
        self._resume_from, self._log_all = resume_from_checkpoint, log_all
        self._model: nn.Module | None = None

    def add_to(self, trainer: Any) -> SDP4BitCallback:
        """Insert this callback before the Trainer's other callbacks, and return it.

        Callbacks that report to TensorBoard, Weights & Biases and others run before `callbacks=[...]`. They
        include the values logged here only if this callback is added with `add_to`.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        """Attach to the model and load the communication state; Trainer has loaded its checkpoint."""
        assert model is not None
        model = attachment.uncompiled(model)
        if self.comm is None or not self.comm.is_attached or model is not self._model:
            if self.comm is not None and self.comm.is_attached:
                self.comm.remove()
            engine = AcceleratorState().distributed_type
            self.comm = attachment.attach(
                model,
                caller="SDP4BitCallback",
                # The model is shown without the wrapper of DeepSpeed, for example.
                switch=f"{_SWITCH}. This run uses {engine.value}",
                is_ddp=engine in _UNSHARDED,
                config=self._config,
                topology=self._topology,
                skip=self._skip,
            )
            self._model = model
        if state.global_step:
            given = self._resume_from or args.resume_from_checkpoint
            if given is None or not Path(given).is_dir():
                given = _checkpoint(args, state)
            attachment.load(self.comm, given)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Save the communication state into the Trainer's new checkpoint."""
        if self.comm is not None and self.comm.is_attached and not args.save_only_model:
            attachment.save(self.comm, _checkpoint(args, state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add this rank's statistics to the training log and to the Trainer's log history."""
        if self.comm is None or logs is None or "loss" not in logs:
            return
        values = self.comm.log_values(full=self._log_all)
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"

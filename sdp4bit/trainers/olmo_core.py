"""A callback for OLMo-core's Trainer with FSDP2, HSDP or DDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import Settings, as_settings
from sdp4bit.engines.fsdp2.api import Skip
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.trainers import attachment

try:
    from olmo_core.train.callbacks import Callback
except ImportError as error:
    raise attachment.missing("olmo-core", error) from error

_SWITCH = "OLMo-core uses FSDP2 with TransformerDataParallelConfig(name='fsdp' or 'hsdp'), and DDP with 'ddp'"


@dataclass
class SDP4BitCallback(Callback):
    """Quantize a Trainer's communication: `trainer_config.with_callback("sdp4bit", SDP4BitCallback())`.

    Attaches when the trainer is built. Adds the communication state to each rank's file of a checkpoint, and
    bytes and compression to the metrics.
    """

    config: Settings = None
    topology: TopologySpec = "auto"
    skip: Skip = None
    log_all: bool = False
    """Log all values of `CommHandle.log_values`."""
    comm: CommHandle | None = field(default=None, init=False, repr=False)
    """The handle, once the trainer is built."""
    _loaded: StateDict | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        as_settings(self.config)  # raises for an unknown preset or type

    def post_attach(self) -> None:
        """Attach to the model, which the train module has prepared."""
        module: Any = self.trainer.train_module
        self.comm = attachment.attach(
            getattr(module, "model_parts", None) or module.model,
            caller="SDP4BitCallback",
            switch=_SWITCH,
            config=self.config,
            topology=self.topology,
            skip=self.skip,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; OLMo-core writes it at once, also for asynchronous saves."""
        assert self.comm is not None
        return {attachment.FOLDER: tree_map(_on_the_host, self.comm.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; model and optimizer are loaded."""
        assert self.comm is not None
        self._loaded = state_dict.get(attachment.FOLDER)
        if self._loaded is not None:
            self.comm.load_state_dict(self._loaded)

    def post_checkpoint_loaded(self, path: Any) -> None:
        """Warn if a run continues without the state."""
        if self.step and self._loaded is None:
            attachment.warn_of_missing_state(path)

    def pre_epoch(self) -> None:
        """Load the state again: the trainer's dry run has used up random numbers of the next step."""
        if self._loaded is not None and self.comm is not None:
            self.comm.load_state_dict(self._loaded)
        self._loaded = None

    def post_train_batch(self) -> None:
        """Record this rank's statistics of the step."""
        assert self.comm is not None
        for name, value in self.comm.log_values(full=self.log_all).items():
            self.trainer.record_metric(name, value)


def _on_the_host(value: Any) -> Any:
    """Return this rank's part of a DTensor: OLMo-core pickles it, and ranks of another mesh may load it."""
    return value.to_local().cpu() if isinstance(value, DTensor) else value

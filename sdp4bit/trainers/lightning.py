"""A callback for Lightning's Trainer with ModelParallelStrategy, that is, FSDP2, or with DDPStrategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdp4bit.collectives.topology import TopologySpec
from sdp4bit.config import Settings, as_settings
from sdp4bit.engines.ddp.hook import DDPCommState
from sdp4bit.engines.fsdp2.api import Skip
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.trainers import attachment
from sdp4bit.warn import warn_user

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise attachment.missing("lightning", error) from error

_SWITCH = (
    "Lightning uses DDP with Trainer(strategy='ddp'), and FSDP2 with "
    "Trainer(strategy=ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1)) and a "
    "LightningModule that calls fully_shard in configure_model. FSDPStrategy is FSDP1"
)


class SDP4BitCallback(Callback):
    """Quantize a Trainer's FSDP2 or DDP communication: `Trainer(..., callbacks=[SDP4BitCallback()])`.

    Attaches when fitting begins, after configure_model. Adds the communication state to checkpoints (with
    FSDP2 to distributed ones), and logs bytes and compression with `self.log_dict`.
    """

    comm: CommHandle | None = None
    """The handle, once fitting has begun."""

    def __init__(
        self,
        config: Settings = None,
        *,
        topology: TopologySpec = "auto",
        skip: Skip = None,
        log_all: bool = False,
    ) -> None:
        """Store the arguments of `quantize_communication`; DDP takes no `skip`.

        Args:
            log_all: log all values of `CommHandle.log_values`.

        Raises:
            ValueError: the preset is unknown.
            TypeError: the configuration has an unsupported type.
        """
        self._config = as_settings(config)
        self._topology, self._skip, self._log_all = topology, skip, log_all
        self._was_loaded = False
        self._loaded_state: StateDict | None = None  # of DDP

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._was_loaded, self._loaded_state = False, None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model that the strategy has prepared, and add the state to checkpoints."""
        if self.comm is not None and self.comm.is_attached:
            self.comm.remove()
        self.comm = attachment.attach(
            trainer.strategy.model,
            caller="SDP4BitCallback",
            switch=_SWITCH,
            config=self._config,
            topology=self._topology,
            skip=self._skip,
        )
        if not isinstance(self.comm, DDPCommState):
            _save_with(trainer, self.comm)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the state of DDP, a few numbers, into Lightning's file."""
        if isinstance(self.comm, DDPCommState) and self.comm.is_attached:
            checkpoint[attachment.FOLDER] = self.comm.state_dict()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._was_loaded, self._loaded_state = True, checkpoint.get(attachment.FOLDER)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the communication state if the run resumes; model and optimizer are loaded."""
        if not self._was_loaded or self.comm is None or trainer.ckpt_path is None:
            return
        if not isinstance(self.comm, DDPCommState):
            attachment.load(self.comm, trainer.ckpt_path)
        elif self._loaded_state is None:
            attachment.warn_of_missing_state(trainer.ckpt_path)
        else:
            self.comm.load_state_dict(self._loaded_state)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.comm is not None:
            pl_module.log_dict(self.comm.log_values(full=self._log_all))


def _save_with(trainer: Trainer, comm: CommHandle) -> None:
    """Make the strategy save the communication state too, because callbacks do not get the path."""
    strategy = trainer.strategy
    # From the class, so that a second fit does not wrap the first one's wrapper.
    own = type(strategy).save_checkpoint.__get__(strategy)
    has_warned = False

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        nonlocal has_warned
        own(checkpoint, filepath, storage_options)
        path = Path(strategy.broadcast(filepath))
        if not comm.is_attached:
            return
        if strategy.broadcast(path.is_dir()):
            attachment.save(comm, path)
        elif strategy.is_global_zero and not has_warned:
            has_warned = True
            warn_user(
                f"{path} is a single file without the communication state, so a run that resumes from it "
                "starts its replicas in full precision. For a bit-exact resume use "
                "ModelParallelStrategy(save_distributed_checkpoint=True)"
            )

    strategy.save_checkpoint = save_checkpoint

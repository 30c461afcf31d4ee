"""torchtitan's Trainer with quantized FSDP2 communication: a line in a function of a config registry."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from sdp4bit.config import SDP4BitConfig
from sdp4bit.engines.handle import CommHandle
from sdp4bit.trainers import attachment

try:
    import tyro
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise attachment.missing("torchtitan", error) from error

_SWITCH = "torchtitan uses FSDP2 where parallelism.data_parallel_shard_degree is not 1, on several processes"
_STATE = attachment.FOLDER
"""Of the communication, among what checkpoints hold."""


@dataclass(kw_only=True, slots=True)
class CommunicationOptions:
    """What is quantized; on the command line `--sdp4bit.preset sdp4bit-w2g3` and so on."""

    preset: str = "sdp4bit"
    """Name of a preset, unless `config` is set."""
    ranks_per_node: int | None = None
    """Ranks that share a node; found by host names when not given."""
    skip: list[str] = field(default_factory=list)
    """Names of FSDP modules to leave in full precision, as shell patterns."""
    config: Annotated[SDP4BitConfig | None, tyro.conf.Suppress] = None
    """All settings; set in Python."""


class SDP4BitTrainer(Trainer):
    """torchtitan's Trainer; attaches before a checkpoint is loaded, and keeps its state in checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Trainer.Config with the communication's options."""

        sdp4bit: CommunicationOptions = field(default_factory=CommunicationOptions)
        """What is quantized."""

    config: Config
    comm: CommHandle
    """The handle: `explain()`, `stats()` and more."""

    def __init__(self, config: Config) -> None:
        """Build the trainer, and quantize the communication of its model parts.

        Raises:
            ValueError: the model is not sharded by FSDP2; also as `sdp4bit.quantize_communication`.
        """
        super().__init__(config)
        options = config.sdp4bit
        self.comm = attachment.attach(
            self.model_parts,
            caller="SDP4BitTrainer",
            switch=_SWITCH,
            config=options.preset if options.config is None else options.config,
            topology="auto" if options.ranks_per_node is None else options.ranks_per_node,
            skip=options.skip or None,
        )
        if self.checkpointer.enable:  # otherwise it holds no states
            self.checkpointer.states[_STATE] = self.comm
        self._log_with(self.metrics_processor)

    def _log_with(self, processor: Any) -> None:
        """Have the metrics processor log this rank's bytes beside what training gives it."""
        own = processor.log

        def log(*args: Any, extra_metrics: dict[str, Any] | None = None, **options: Any) -> None:
            own(*args, extra_metrics={**(extra_metrics or {}), **attachment.log_values(self.comm)}, **options)

        processor.log = log


def quantize(
    config: Trainer.Config,
    *,
    preset: str = "sdp4bit",
    ranks_per_node: int | None = None,
    skip: list[str] | None = None,
    communication: SDP4BitConfig | None = None,
) -> SDP4BitTrainer.Config:
    """Return the config of the same training with quantized communication, for a config registry.

    Args:
        config: what a function of a config registry returns, such as torchtitan's own ones.
        preset, ranks_per_node, skip: defaults of the options `--sdp4bit.preset` and so on.
        communication: all settings, instead of a preset.

    Raises:
        TypeError: the config of another trainer than torchtitan's Trainer itself.
    """
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"{type(config).__qualname__} belongs to another trainer, which this would replace: derive "
            "from it as sdp4bit.trainers.torchtitan.SDP4BitTrainer derives from Trainer"
        )
    options = CommunicationOptions(
        preset=preset, ranks_per_node=ranks_per_node, skip=list(skip or []), config=communication
    )
    return SDP4BitTrainer.Config(**{f.name: getattr(config, f.name) for f in fields(config)}, sdp4bit=options)

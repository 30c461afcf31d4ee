"""torchtitan's Trainer with quantized FSDP2 communication, enabled by one line in a config registry."""

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

_SWITCH = "torchtitan uses FSDP2 on several processes if parallelism.data_parallel_shard_degree is not 1"


@dataclass(kw_only=True, slots=True)
class CommunicationOptions:
    """Command-line options, such as `--sdp4bit.preset sdp4bit-w2g3`."""

    preset: str = "sdp4bit"
    """Name of a preset, unless `config` is set."""
    ranks_per_node: int | None = None
    """Ranks per node; detected by host names by default."""
    nodes_per_block: int | None = None
    """Nodes per block, for gradients in three levels; two levels by default."""
    skip: list[str] = field(default_factory=list)
    """FSDP modules to leave in full precision, as shell patterns over their names."""
    log_all: bool = False
    """Log all values of `CommHandle.log_values`."""
    config: Annotated[SDP4BitConfig | None, tyro.conf.Suppress] = None
    """All settings; only available in Python."""


class SDP4BitTrainer(Trainer):
    """torchtitan's Trainer with quantized communication, whose state is part of its checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Trainer.Config with options of the communication."""

        sdp4bit: CommunicationOptions = field(default_factory=CommunicationOptions)
        """Options of the quantized communication."""

    config: Config
    comm: CommHandle
    """The handle of the attached model parts."""

    def __init__(self, config: Config) -> None:
        """Create the trainer, and quantize the communication of its model parts.

        Raises:
            ValueError: the model is not sharded by FSDP2, or an error of `sdp4bit.quantize_communication`.
        """
        super().__init__(config)
        options = config.sdp4bit
        nodes: str | int = "auto" if options.ranks_per_node is None else options.ranks_per_node
        self.comm = attachment.attach(
            self.model_parts,
            caller="SDP4BitTrainer",
            switch=_SWITCH,
            config=options.preset if options.config is None else options.config,
            topology=nodes if options.nodes_per_block is None else (nodes, options.nodes_per_block),
            skip=options.skip or None,
        )
        if self.checkpointer.enable:  # otherwise it has no states
            self.checkpointer.states[attachment.FOLDER] = self.comm
        self._log_with(self.metrics_processor)

    def _log_with(self, processor: Any) -> None:
        """Add this rank's statistics to the metrics that the processor logs."""
        own, log_all = processor.log, self.config.sdp4bit.log_all

        def log(*args: Any, extra_metrics: dict[str, Any] | None = None, **options: Any) -> None:
            values = self.comm.log_values(full=log_all)
            own(*args, extra_metrics={**(extra_metrics or {}), **values}, **options)

        processor.log = log


def quantize(
    config: Trainer.Config,
    *,
    preset: str = "sdp4bit",
    ranks_per_node: int | None = None,
    skip: list[str] | None = None,
    communication: SDP4BitConfig | None = None,
) -> SDP4BitTrainer.Config:
    """Return a training config with quantized communication, for a config registry.

    Args:
        config: a config from a function of a config registry, such as torchtitan's own.
        preset, ranks_per_node, skip: defaults of the options `--sdp4bit.preset` and so on.
        communication: all settings, instead of a preset.

    Raises:
        TypeError: the config belongs to a subclass of torchtitan's Trainer.
    """
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"{type(config).__qualname__} belongs to a trainer that quantize() would replace: derive a class "
            "from that trainer like sdp4bit.trainers.torchtitan.SDP4BitTrainer derives from Trainer"
        )
    options = CommunicationOptions(
        preset=preset, ranks_per_node=ranks_per_node, skip=list(skip or []), config=communication
    )
    return SDP4BitTrainer.Config(**{f.name: getattr(config, f.name) for f in fields(config)}, sdp4bit=options)

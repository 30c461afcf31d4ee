"""Settings of pretraining: frozen dataclasses that check themselves.

Every field is a command-line option, and the docstring below it is the help text.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from sdp4bit.config import PLAIN, Auto, SDP4BitConfig, TelemetryConfig
from sdp4bit_lab.common.settings import (
    SettingError,
    option,
    option_flags,
    require,
    require_at_least,
    require_positive,
)
from sdp4bit_lab.common.strategies import AUTO, STRATEGIES, StrategyOrAuto
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig, ReliabilityConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.schedule import DecayStyle, Schedule
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS, VOCABULARY_MULTIPLE, CardName, ModelCard, ModelShape

DEFAULT_OUT = Path("runs/pretrain")
LOWEST_SHARE = 0.1
"""Default learning rate at the end of the decay relative to the peak, as in the paper."""
WARMUP_SHARE = 0.01
"""Default warm-up relative to the decay steps, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT to train: a preset, with single sizes replaced."""

    model_card: Annotated[CardName, option("preset", "model-card")] = "tiny"
    """Model sizes, and defaults for sequence length, micro batch size, learning rate and vocabulary."""
    layers: Annotated[int | None, option("num-layers", "layers")] = None
    """Transformer blocks. Default: the preset's."""
    hidden: Annotated[int | None, option("hidden-size", "hidden")] = None
    """Width of the residual stream. Default: the preset's."""
    heads: Annotated[int | None, option("num-attention-heads", "heads")] = None
    """Attention heads. Default: the preset's."""
    positions: Annotated[int | None, option("max-position-embeddings")] = None
    """Learned positions. Default: the sequence length."""
    dropout: float = 0.0
    """Dropout probability for the embedding, the attention weights and both branches of a block."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "layers", "hidden", "heads", "positions")
        require(0 <= self.dropout < 1, f"--dropout {self.dropout} must be at least 0 and below 1")
        shape = self.shape(vocabulary=1, sequence_length=1)
        require(
            shape.hidden % shape.heads == 0,
            f"--hidden-size {shape.hidden} is not divisible by --num-attention-heads {shape.heads}: "
            f"use a hidden size of {-(-shape.hidden // shape.heads) * shape.heads} or other heads",
        )

    @property
    def card(self) -> ModelCard:
        return MODEL_CARDS[self.model_card]

    def shape(self, *, vocabulary: int, sequence_length: int) -> ModelShape:
        """Return the sizes of the model, with the vocabulary rounded up to a multiple of 128."""
        positions = self.positions or sequence_length
        require(
            positions >= sequence_length,
            f"--max-position-embeddings {positions} is less than the {sequence_length} tokens of a sequence: "
            "give more positions or a smaller --seq-length",
        )
        return ModelShape(
            layers=self.layers or self.card.layers,
            hidden=self.hidden or self.card.hidden,
            heads=self.heads or self.card.heads,
            vocabulary=-(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
            positions=positions,
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay; the defaults are the paper's."""

    learning_rate: Annotated[float | None, option("lr", "learning-rate")] = None
    """Peak learning rate. Default: the preset's."""
    min_lr: float | None = None
    """Learning rate at the end of the decay. Default: a tenth of the peak."""
    decay_style: Annotated[DecayStyle, option("lr-decay-style")] = "cosine"
    """Shape of the decay from --lr to --min-lr."""
    warmup_fraction: Annotated[float | None, option("lr-warmup-fraction", "warmup-fraction")] = None
    """Fraction of the decay steps for warm-up. Default: --lr-warmup-iters, the preset's steps, or 0.01."""
    warmup_steps: Annotated[int | None, option("lr-warmup-iters")] = None
    """Steps with linear warm-up, instead of --lr-warmup-fraction."""
    decay_steps: Annotated[int | None, option("lr-decay-iters", "decay-steps")] = None
    """Steps of warm-up and decay; the learning rate is constant afterwards. Default: all steps."""
    beta1: Annotated[float, option("adam-beta1", "beta1")] = 0.9
    """AdamW's decay of the gradient average."""
    beta2: Annotated[float, option("adam-beta2", "beta2")] = 0.95
    """AdamW's decay of the squared gradient average."""
    eps: Annotated[float, option("adam-eps", "eps")] = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings. Biases and norms are not decayed."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "eps")
        require_at_least(0, self, "min_lr", "weight_decay", "clip_grad", "warmup_steps")
        require_at_least(1, self, "decay_steps")
        require(
            self.warmup_fraction is None or 0 <= self.warmup_fraction <= 1,
            f"--lr-warmup-fraction {self.warmup_fraction} must be between 0 and 1",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"--adam-{name} {value} must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Output during training."""

    out: Path | None = None
    """Folder for config.json, metrics.jsonl and TensorBoard events. A new run needs a new folder. Default:
    runs/pretrain, then runs/pretrain-2 and so on."""
    jsonl: bool = True
    """Write metrics.jsonl, one JSON object per line."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    tensorboard_dir: Path | None = None
    """Folder for TensorBoard events. Default: tensorboard in the run's folder."""
    log_interval: int = 10
    """Steps between printed lines."""
    log_throughput: bool = False
    """Print TFLOP/s per device, by the paper's formula."""
    telemetry_interval: int = 10
    """Steps between measurements of the quantization error; 0 disables them."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "log_interval")
        require_at_least(0, self, "telemetry_interval")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.out or DEFAULT_OUT


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of one training run."""

    strategy: StrategyOrAuto | None = None
    """Communication strategy; baseline is plain FSDP2. auto measures plain FSDP2, bf16-wire and sdp4bit in
    the first steps, and continues with the fastest. The paper trained 125M to 6.7B parameters with 4 bits, as
    sdp4bit has; fewer bits (w2, w3, g2, g3) are not tested at these sizes. Default: sdp4bit, unless
    --quantized-weights or --quantized-gradients is given."""
    seed: int = 1234
    """Seed of initial weights, sample order, dropout and random rounding."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        require_at_least(0, self, "seed")
        if self.strategy == AUTO:
            named = self.communication.names_parts
            require(not named, "--strategy auto conflicts with --quantized-weights and --quantized-gradients")
            simulated = self.parallel.simulated_ranks
            require(not simulated, "--strategy auto measures real ranks: leave out --simulated-ranks")
        rate, lowest = self.learning_rate, self.optimizer.min_lr
        require(lowest is None or lowest <= rate, f"--min-lr {lowest} is above the peak {rate}: see --lr")
        _ = self.model_shape, self.quantization

    def check_layout(self, world_size: int) -> None:
        """Raise SettingError unless ranks, model and batch are compatible."""
        self.parallel.check_world(world_size)
        shape = self.model_shape
        self.parallel.check_model(
            layers=shape.layers,
            heads=shape.heads,
            vocabulary=shape.vocabulary,
            micro_batches=self.micro_batches(self.parallel.data_parallel_size(world_size)),
        )

    @property
    def quantization(self) -> SDP4BitConfig:
        """Settings of the strategy; with auto those of its last candidate, sdp4bit."""
        strategy = None if self.strategy == AUTO else self.strategy
        return self._observed(self.communication.resolve(strategy, seed=self.seed))

    @property
    def settings(self) -> SDP4BitConfig | Auto:
        """Settings of the strategy, or the choice between some."""
        if self.strategy != AUTO:
            return self.quantization
        between = self._observed(replace(STRATEGIES["bf16-wire"], seed=self.seed))
        return Auto(candidates=(PLAIN, between, self.quantization))

    def _observed(self, config: SDP4BitConfig) -> SDP4BitConfig:
        interval = self.logging.telemetry_interval
        measured = replace(config, telemetry=TelemetryConfig(interval=interval) if interval else None)
        return self.reliability.applied_to(measured)

    @property
    def strategy_name(self) -> str:
        """Strategy, or the strategy that the reference implementation's flags amount to."""
        return AUTO if self.strategy == AUTO else self.communication.strategy_name(self.strategy)

    @property
    def learning_rate(self) -> float:
        """Peak learning rate; SettingError if neither the options nor the preset define it."""
        rate = self.optimizer.learning_rate or self.model.card.learning_rate
        if rate is None:
            raise SettingError(
                f"the paper gives no learning rate for the {self.model.model_card} model: set --lr"
            )
        return rate

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        optimizer, steps = self.optimizer, self.optimizer.warmup_steps
        if steps is None and optimizer.warmup_fraction is None:
            steps = self.model.card.warmup_steps
        if steps is not None:
            return steps
        share = WARMUP_SHARE if optimizer.warmup_fraction is None else optimizer.warmup_fraction
        return math.ceil(share * (optimizer.decay_steps or self.training.steps))

    @property
    def schedule(self) -> Schedule:
        """Learning rate by step."""
        optimizer, peak = self.optimizer, self.learning_rate
        return Schedule(
            lr=peak,
            min_lr=peak * LOWEST_SHARE if optimizer.min_lr is None else optimizer.min_lr,
            lr_warmup_iters=self.warmup_steps,
            lr_decay_iters=optimizer.decay_steps or self.training.steps,
            lr_decay_style=optimizer.decay_style,
        )

    def recorded(self, *, global_batch_size: int) -> dict[str, Any]:
        """Return the settings that change the numbers of a run, by the names of their options."""
        optimizer, training = self.optimizer, self.training
        values: dict[str, Any] = {
            **asdict(self.schedule),
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "adam_eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "clip_grad": optimizer.clip_grad,
            "global_batch_size": global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "seq_length": self.sequence_length,
            "dropout": self.model.dropout,
            "param_dtype": training.param_dtype,
            "compute_dtype": training.compute_dtype,
        }
        details = replace(self.communication, pipeline_chunks=None)  # slicing changes no value
        flags = option_flags(type(details))
        return values | {flags[name][0].removeprefix("--"): getattr(details, name) for name in flags}

    @property
    def sequence_length(self) -> int:
        return self.training.sequence_length or self.model.card.sequence_length

    @property
    def micro_batch_size(self) -> int:
        return self.training.micro_batch_size or self.model.card.micro_batch_size

    @property
    def model_shape(self) -> ModelShape:
        return self.model.shape(
            vocabulary=self.resolved_data.vocabulary, sequence_length=self.sequence_length
        )

    @property
    def resolved_data(self) -> DataConfig:
        """Data settings, with the preset's vocabulary for text tokenized at the start and for mock data."""
        data = self.data
        if data.vocabulary_size is not None or data.source == "indexed" or data.has_tokenizer:
            return data
        return replace(data, vocabulary_size=self.model.card.vocabulary)

    def resolved_sections(self) -> dict[str, dict[str, Any]]:
        """Return the training and optimizer settings with the preset's defaults resolved."""
        batch = {"sequence_length": self.sequence_length, "micro_batch_size": self.micro_batch_size}
        rates = {"learning_rate": self.learning_rate, "warmup_steps": self.warmup_steps}
        return {"training": asdict(self.training) | batch, "optimizer": asdict(self.optimizer) | rates}

    def micro_batches(self, data_parallel_size: int) -> int:
        """Return the micro batches per step; SettingError if the global batch does not divide."""
        if self.training.global_batch_size is None:
            return self.training.accumulation or 1
        at_once = self.micro_batch_size * data_parallel_size
        if self.training.global_batch_size % at_once:
            raise SettingError(
                f"--global-batch-size {self.training.global_batch_size} is not a multiple of {at_once}, "
                f"--micro-batch-size {self.micro_batch_size} on {data_parallel_size} data-parallel ranks"
            )
        return self.training.global_batch_size // at_once

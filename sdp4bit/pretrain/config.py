"""Settings of the pretraining program: frozen dataclasses that check themselves, and the model cards.

Every field is a command-line option; the docstring below it is what `--help` shows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from sdp4bit.pretrain.checkpoint_config import CheckpointConfig
from sdp4bit.pretrain.parallel_config import ParallelConfig, Strategy
from sdp4bit.pretrain.settings import SettingError
from sdp4bit.pretrain.settings import require as _require
from sdp4bit.pretrain.settings import require_at_least as _require_at_least

# Type checkers take what else is defined here to be public anyway.
__all__ = ["CheckpointConfig", "ParallelConfig", "SettingError", "Strategy"]

CardName = Literal["tiny", "125M", "350M", "1.3B", "2.7B", "6.7B", "13B", "18B"]
Precision = Literal["bf16", "fp16", "fp32"]
Arithmetic = Literal["auto", "bf16", "fp16", "fp32"]

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
VOCABULARY_MULTIPLE = 128
"""The embedding has a multiple of this many rows, as in the paper; the extra rows are never a target."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Size and training defaults of a named model."""

    layers: int
    hidden: int
    heads: int
    sequence_length: int = 2048
    micro_batch_size: int
    learning_rate: float | None
    """None where the paper timed the model but did not train it."""


MODEL_CARDS: dict[CardName, ModelCard] = {
    "tiny": ModelCard(
        layers=4, hidden=256, heads=4, sequence_length=128, micro_batch_size=4, learning_rate=2e-3
    ),
    "125M": ModelCard(layers=12, hidden=768, heads=12, micro_batch_size=8, learning_rate=6e-4),
    "350M": ModelCard(layers=24, hidden=1024, heads=16, micro_batch_size=8, learning_rate=3e-4),
    "1.3B": ModelCard(layers=24, hidden=2048, heads=16, micro_batch_size=4, learning_rate=2e-4),
    "2.7B": ModelCard(layers=32, hidden=2560, heads=32, micro_batch_size=1, learning_rate=None),
    "6.7B": ModelCard(layers=32, hidden=4096, heads=32, micro_batch_size=2, learning_rate=1.2e-4),
    "13B": ModelCard(layers=40, hidden=5120, heads=40, micro_batch_size=1, learning_rate=None),
    "18B": ModelCard(layers=40, hidden=6144, heads=48, micro_batch_size=1, learning_rate=None),
}
"""The paper's models (appendix D and table 8), and one of 4 million parameters that a laptop trains."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes a GPT is built from, everything resolved."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT to train: a model card, with single sizes replaced."""

    model_card: CardName = "tiny"
    """Model card: sizes, and the defaults of sequence length, micro batch and learning rate."""
    layers: int | None = None
    """Transformer blocks; the card's when not given."""
    hidden: int | None = None
    """Width of the residual stream; the card's when not given."""
    heads: int | None = None
    """Attention heads; the card's when not given."""
    dropout: float = 0.0
    """Dropout of the embedding, the attention weights and both branches of a block."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads"):
            _require_at_least(f"--{name}", getattr(self, name), 1)
        _require(0 <= self.dropout < 1, f"--dropout {self.dropout} must be at least 0 and below 1")
        shape = self.shape(vocabulary=1, positions=1)
        _require(
            shape.hidden % shape.heads == 0,
            f"--hidden {shape.hidden} is not divisible by --heads {shape.heads}: "
            f"use a hidden size of {-(-shape.hidden // shape.heads) * shape.heads} or other heads",
        )

    def shape(self, *, vocabulary: int, positions: int) -> ModelShape:
        """Return the sizes of the model; the vocabulary is rounded up to a multiple of 128."""
        card = MODEL_CARDS[self.model_card]
        return ModelShape(
            layers=self.layers or card.layers,
            hidden=self.hidden or card.hidden,
            heads=self.heads or card.heads,
            vocabulary=-(-vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
            positions=positions,
            dropout=self.dropout,
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from, and its tokenizer."""

    data_path: tuple[Path, ...] = ()
    """Text files: .jsonl (one object with "text" a line) or plain text (one document a file; documents may be
    separated by <|endoftext|>). Without: the sources of the running Python's standard library."""
    vocabulary_size: int = 4096
    """Tokens of the byte-level BPE tokenizer that is trained on the text."""
    validation_fraction: float = 0.05
    """Share of the text, in whole documents, that is held out for validation."""
    cache_dir: Path | None = None
    """Where tokenized text is kept between runs; $XDG_CACHE_HOME/sdp4bit or ~/.cache/sdp4bit otherwise."""

    def __post_init__(self) -> None:
        _require(
            257 <= self.vocabulary_size <= 1 << 20,
            f"--vocabulary-size {self.vocabulary_size} must be between 257 (256 bytes and the end of text) "
            f"and {1 << 20}",
        )
        _require(
            0 < self.validation_fraction < 1,
            f"--validation-fraction {self.validation_fraction} must be between 0 and 1, both excluded",
        )
        for path in self.data_path:
            _require(
                path.suffix != ".bin",
                f"{path}: .bin/.idx data is not supported; give .jsonl or text",
            )

    def cache_folder(self) -> Path:
        """Return the folder of the cache, whether it exists or not."""
        if self.cache_dir is not None:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "sdp4bit"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length and size of the training run, and its precision."""

    steps: int = 200
    """Optimizer steps."""
    micro_batch_size: int | None = None
    """Sequences per rank in one forward; the card's when not given."""
    accumulation: int = 1
    """Micro batches per optimizer step; gradients are reduced once, after the last."""
    sequence_length: int | None = None
    """Tokens per sequence, also the number of learned positions; the card's when not given."""
    eval_interval: int = 100
    """Steps between validations; the last step is always followed by one."""
    eval_batches: int = 4
    """Global batches per validation, always the same ones."""
    precision: Precision = "bf16"
    """dtype in which FSDP2 gathers the weights; gradients are reduced in fp32, masters are fp32 always."""
    arithmetic: Arithmetic = "auto"
    """dtype of the activations. auto: that of the weights, except on CPUs without instructions for it, where
    weights are multiplied in fp32, several times faster."""
    loss_scale: float | None = None
    """fp16: multiply the loss by this always; found and adapted while training when not given."""
    initial_loss_scale: float = 2.0**32
    """fp16: first scale of the loss."""
    loss_scale_window: int = 1000
    """fp16: steps without an overflow after which the scale is doubled."""
    hysteresis: int = 2
    """fp16: overflows until the scale is halved."""
    min_loss_scale: float = 1.0
    """fp16: smallest scale of the loss; an overflow at it ends the run."""
    compile: bool = False
    """Compile every block with torch.compile."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward and gather them again in backward (ZeRO-3); off: once a step."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "micro_batch_size",
            "accumulation",
            "sequence_length",
            "eval_interval",
        ):
            _require_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        for name in ("eval_batches", "loss_scale_window", "hysteresis"):
            _require_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)
        _require(
            self.arithmetic in ("auto", "fp32", self.precision),
            f"--arithmetic {self.arithmetic} needs --precision {self.arithmetic}: {self.precision} weights "
            f"are multiplied in {self.precision} or fp32",
        )
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            _require(value is None or value > 0, f"{option} {value} must be positive")
        _require(
            self.loss_scale is None or self.precision == "fp16",
            f"--loss-scale {self.loss_scale} has no effect with --precision {self.precision}: leave it out, "
            "or use --precision fp16",
        )
        _require(
            self.initial_loss_scale >= self.min_loss_scale,
            f"--initial-loss-scale {self.initial_loss_scale} is below --min-loss-scale {self.min_loss_scale}",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay; the defaults are the paper's."""

    learning_rate: float | None = None
    """Peak learning rate; the card's when not given."""
    min_learning_rate_fraction: float = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    warmup_fraction: float = 0.01
    """Share of the decay steps in which the learning rate rises linearly."""
    decay_steps: int | None = None
    """Steps until the learning rate has decayed; all steps when not given."""
    beta1: float = 0.9
    """Decay of the gradient's average."""
    beta2: float = 0.95
    """Decay of the squared gradient's average."""
    eps: float = 1e-8
    """Term that keeps the division finite."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; biases and norms are not decayed."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""

    def __post_init__(self) -> None:
        _require(
            self.learning_rate is None or self.learning_rate > 0,
            f"--learning-rate {self.learning_rate} must be positive",
        )
        for name in ("min_learning_rate_fraction", "warmup_fraction"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"--{name.replace('_', '-')} {value} must be between 0 and 1")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"--{name} {value} must be at least 0 and below 1")
        _require(self.eps > 0, f"--eps {self.eps} must be positive")
        _require_at_least("--weight-decay", self.weight_decay, 0)
        _require_at_least("--clip-grad", self.clip_grad, 0)
        _require_at_least("--decay-steps", self.decay_steps, 1)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written while training."""

    out: Path = Path("runs/pretrain")
    """Folder of the run: config.json, metrics.jsonl, TensorBoard events."""
    jsonl: bool = True
    """Write metrics.jsonl, one object a line."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    log_interval: int = 10
    """Steps between printed lines when the output is not a terminal."""

    def __post_init__(self) -> None:
        _require_at_least("--log-interval", self.log_interval, 1)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Everything one training run depends on."""

    strategy: Strategy = "sdp4bit"
    """What is quantized, by the names of the paper's ablation; baseline is plain FSDP2."""
    seed: int = 1234
    """Seed of the initial weights, the sample order, dropout and stochastic rounding."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _require_at_least("--seed", self.seed, 0)
        _ = self.learning_rate
        self.parallel.communication(self.strategy, seed=self.seed)
        shape = self.model_shape
        self.parallel.check_model(
            layers=shape.layers,
            heads=shape.heads,
            vocabulary=shape.vocabulary,
            micro_batches=self.training.accumulation,
        )

    @property
    def learning_rate(self) -> float:
        """Peak learning rate; SettingError if the card has none and none is given."""
        rate = self.optimizer.learning_rate or MODEL_CARDS[self.model.model_card].learning_rate
        if rate is None:
            raise SettingError(
                f"the paper gives no learning rate for the {self.model.model_card} model: set --learning-rate"
            )
        return rate

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return self.training.sequence_length or MODEL_CARDS[self.model.model_card].sequence_length

    @property
    def micro_batch_size(self) -> int:
        """Sequences per rank in one forward."""
        return self.training.micro_batch_size or MODEL_CARDS[self.model.model_card].micro_batch_size

    @property
    def model_shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.model.shape(vocabulary=self.data.vocabulary_size, positions=self.sequence_length)

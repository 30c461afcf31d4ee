"""Presets: the paper's models (appendix D and Table 8), and one that a laptop can train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CardName = Literal["tiny", "125M", "350M", "1.3B", "2.7B", "6.7B", "13B", "18B"]

Recompute = Literal["none", "selective", "full"]

GPT2_VOCABULARY = 50257
VOCABULARY_MULTIPLE = 128
"""The embedding is padded to a multiple of this many rows, as in the paper; extra rows are never targets."""


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Size and training defaults of a preset."""

    layers: int
    hidden: int
    heads: int
    sequence_length: int = 2048
    micro_batch_size: int
    learning_rate: float | None
    """None if the paper timed the model without training it."""
    warmup_steps: int | None = None
    """None for the paper's fraction of all steps."""
    vocabulary: int = GPT2_VOCABULARY
    """Tokens of the tokenizer, before padding."""


MODEL_CARDS: dict[CardName, ModelCard] = {
    "tiny": ModelCard(
        layers=4,
        hidden=256,
        heads=4,
        sequence_length=128,
        micro_batch_size=4,
        learning_rate=1e-3,
        warmup_steps=60,
        vocabulary=4096,
    ),
    "125M": ModelCard(layers=12, hidden=768, heads=12, micro_batch_size=8, learning_rate=6e-4),
    "350M": ModelCard(layers=24, hidden=1024, heads=16, micro_batch_size=8, learning_rate=3e-4),
    "1.3B": ModelCard(layers=24, hidden=2048, heads=16, micro_batch_size=4, learning_rate=2e-4),
    "2.7B": ModelCard(layers=32, hidden=2560, heads=32, micro_batch_size=1, learning_rate=None),
    "6.7B": ModelCard(layers=32, hidden=4096, heads=32, micro_batch_size=2, learning_rate=1.2e-4),
    "13B": ModelCard(layers=40, hidden=5120, heads=40, micro_batch_size=1, learning_rate=None),
    "18B": ModelCard(layers=40, hidden=6144, heads=48, micro_batch_size=1, learning_rate=None),
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Resolved sizes of a GPT."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    dropout: float = 0.0

    def flops_per_sample(self, sequence_length: int) -> float:
        """Return the floating-point operations of forward and backward for one sequence.

        The paper's count, without recomputation: 72 s L h^2 (1 + s / 6h + V / 12Lh). Divided by step time and
        number of devices, it gives the rates of its Table 2.
        """
        h, layers, s = self.hidden, self.layers, sequence_length
        return 72 * s * layers * h**2 * (1 + s / (6 * h) + self.vocabulary / (12 * layers * h))

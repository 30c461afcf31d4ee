"""Models of the Llama family, read from the config.json of Hugging Face's transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp4bit_lab.common.files import read_json_object
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.plan.model import Shape, ShardedGroup

FAMILY = ("llama", "mistral")
"""Values of `model_type` whose blocks have these matrices."""
LONGEST_DEFAULT = 8192
"""Tokens per sequence, if the model takes as many and no other number is given."""
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a model with grouped queries, a gated MLP and rotary positions."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    queries: int
    """Width of all query heads."""
    keys: int
    """Width of all key heads, and of all value heads."""
    vocabulary: int
    positions: int
    is_tied: bool
    """Whether the output layer is the embedding."""

    @classmethod
    def read(cls, path: Path) -> LlamaShape:
        """Return the sizes in a config.json, or in that of a folder; SettingError if it has others."""
        file = path / "config.json" if path.is_dir() else path
        try:
            found: dict[str, Any] = read_json_object(file)
        except OSError as error:
            raise SettingError(f"--hf-config {path} cannot be read: {error}") from error
        kind = found.get("model_type")
        require(kind in FAMILY, f"--hf-config {path}: model_type is {kind!r}, not one of {', '.join(FAMILY)}")
        for name in _SIZES:
            value = found.get(name)
            require(
                isinstance(value, int) and value > 0,
                f"--hf-config {path}: {name} is {value!r}, not a positive number",
            )
        has_bias = any(found.get(name) for name in ("attention_bias", "mlp_bias"))
        require(not has_bias, f"--hf-config {path}: blocks with biases cannot be planned")
        layers, hidden, intermediate, heads, vocabulary = (found[name] for name in _SIZES)
        head = found.get("head_dim") or hidden // heads
        return cls(
            name=f"{kind}, {layers} x {hidden}",
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            queries=heads * head,
            keys=(found.get("num_key_value_heads") or heads) * head,
            vocabulary=vocabulary,
            positions=found.get("max_position_embeddings") or LONGEST_DEFAULT,
            is_tied=bool(found.get("tie_word_embeddings", False)),
        )

    def flops_per_sample(self, sequence_length: int) -> float:
        """Return the operations of forward and backward for one sequence, counted as for a GPT.

        6 per token and value of a matrix that multiplies, and 12 per token, layer, width and key.
        """
        s = sequence_length
        matrices = sum(rows * columns for rows, columns in self._matrices)
        return 6.0 * s * (self.layers * matrices + self.vocabulary * self.hidden) + (
            12.0 * self.layers * self.queries * s**2
        )

    @property
    def _matrices(self) -> tuple[tuple[int, int], ...]:
        h, wide = self.hidden, self.intermediate
        attention = ((self.queries, h), (self.keys, h), (self.keys, h), (h, self.queries))
        return (*attention, (wide, h), (wide, h), (h, wide))

    def groups(self, *, freed_after_forward: bool = True) -> tuple[ShardedGroup, ...]:
        """Return the FSDP2 groups of Accelerate and torchtitan.

        They shard each block, the embedding, and the last norm with the output layer. If the output layer is
        the embedding, it is in the last group.
        """
        h = self.hidden
        shapes: tuple[Shape, ...] = (*self._matrices, (h,), (h,))
        tokens: Shape = (self.vocabulary, h)
        parts = [(f"blocks.{layer}", shapes) for layer in range(self.layers)]
        if not self.is_tied:
            parts.insert(0, ("embedding", (tokens,)))
        freed = [
            ShardedGroup(name=name, shapes=each, freed_after_forward=freed_after_forward)
            for name, each in parts
        ]
        return (*freed, ShardedGroup(name="output", shapes=((h,), tokens), freed_after_forward=False))

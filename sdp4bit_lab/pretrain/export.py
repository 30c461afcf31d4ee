"""Export a checkpoint as a Hugging Face GPT-2: config.json, model.safetensors and tokenizer files.

Both models compute the same function: pre-norm, learned positions, tanh GELU, epsilon 1e-5, tied embeddings.
Hugging Face's layout differs in three ways:

* matrices are transposed, [inputs, outputs];
* rows of the packed attention weight are ordered [query/key/value, head, channel] instead of [head,
  query/key/value, channel];
* the embedding has one row per token, without padding to a multiple of 128.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sdp4bit_lab.common.files import sync
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint_files import TOKENIZER, open_checkpoint, read_tensors
from sdp4bit_lab.pretrain.config.checkpoint import ExportConfig
from sdp4bit_lab.pretrain.data.documents import END_OF_TEXT
from sdp4bit_lab.pretrain.model.cards import ModelShape

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LAYER_NORM_EPSILON = 1e-5
_TOKEN_EMBEDDING, _POSITION_EMBEDDING = "token_embedding.weight", "position_embedding.weight"
Layout = Literal["plain", "transposed", "packed"]

_BLOCK: tuple[tuple[str, str, Layout], ...] = (
    ("attention_norm", "ln_1", "plain"),
    ("attention.query_key_value", "attn.c_attn", "packed"),
    ("attention.projection", "attn.c_proj", "transposed"),
    ("feed_forward_norm", "ln_2", "plain"),
    ("feed_forward.expand", "mlp.c_fc", "transposed"),
    ("feed_forward.projection", "mlp.c_proj", "transposed"),
)
_MODEL: dict[str, object] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def export_model(config: ExportConfig) -> Path:
    """Write a checkpoint's model and tokenizer, and return the folder; SettingError if it exists."""
    out = config.out
    if out.exists():
        raise SettingError(f"--out {out} exists: give a new folder")
    path, record, reader = open_checkpoint(config.load)
    tensors = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in reader.tensors.items()
        if name.startswith("model.")
    }
    read_tensors(tensors, path=path, reader=reader)
    shape = ModelShape(**record.shape)
    weights = to_huggingface(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        shape=shape,
        vocabulary_size=record.vocabulary_size,
    )
    working = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        tokenizer = path / TOKENIZER
        end_of_text = _write_tokenizer(working, tokenizer, shape=shape) if tokenizer.is_file() else None
        settings = _settings(shape, vocabulary_size=record.vocabulary_size, end_of_text=end_of_text)
        _write_json(working / CONFIG, settings)
        save_file(weights, working / WEIGHTS, metadata={"format": "pt"})
        working.rename(out)
        sync(out.parent)
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in weights.values())
        shutil.rmtree(working, ignore_errors=True)
        raise SettingError(f"cannot write {out}, which takes {size:,} bytes ({error})") from error
    return out


def to_huggingface(
    weights: Mapping[str, Tensor], *, shape: ModelShape, vocabulary_size: int
) -> dict[str, Tensor]:
    """Return the weights with Hugging Face's names and layouts; SettingError if one is missing."""
    converted: dict[str, Tensor] = {}
    for ours, theirs, layout in _names(shape.layers):
        if ours not in weights:
            raise SettingError(f"the checkpoint has no weight {ours}")
        tensor = weights[ours].float()
        if ours == _TOKEN_EMBEDDING:
            tensor = tensor[:vocabulary_size]
        if layout == "packed":
            tensor = tensor.unflatten(0, (shape.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        converted[f"transformer.{theirs}"] = (tensor if layout == "plain" else tensor.t()).contiguous()
    return converted


def _names(layers: int) -> Iterator[tuple[str, str, Layout]]:
    """Yield both names of every parameter, and how its layout differs."""
    yield _TOKEN_EMBEDDING, "wte.weight", "plain"
    yield _POSITION_EMBEDDING, "wpe.weight", "plain"
    for layer in range(layers):
        for ours, theirs, layout in _BLOCK:
            yield f"blocks.{layer}.{ours}.weight", f"h.{layer}.{theirs}.weight", layout
            # Transposing a bias has no effect.
            yield f"blocks.{layer}.{ours}.bias", f"h.{layer}.{theirs}.bias", layout
    for kind in ("weight", "bias"):
        yield f"final_norm.{kind}", f"ln_f.{kind}", "plain"


def _settings(shape: ModelShape, *, vocabulary_size: int, end_of_text: int | None) -> dict[str, object]:
    return {
        **_MODEL,
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocabulary_size,
        "n_positions": shape.positions,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": None,
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "attn_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, tokenizer: Path, *, shape: ModelShape) -> int | None:
    """Write the tokenizer's files; return the end-of-text token, if any."""
    content = json.loads(tokenizer.read_bytes())
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    model = content.get("model", {})
    vocabulary: dict[str, int] = dict(model.get("vocab", {})) if model.get("type") == "BPE" else {}
    if vocabulary:
        pairs = [" ".join(pair) if isinstance(pair, list) else str(pair) for pair in model["merges"]]
        _write_json(folder / "vocab.json", vocabulary)
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]), encoding="utf-8")
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    end_of_text = {**vocabulary, **added}.get(END_OF_TEXT)
    special = (
        {} if end_of_text is None else dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.positions,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )
    return end_of_text


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""GPT-2 in Hugging Face's format: a folder with config.json, model.safetensors and tokenizer files.

The models are the same function: pre-norm, learned positions, GELU by tanh, epsilon 1e-5, output tied to the
token embedding. The layouts differ in three ways:

* their matrices are transposed, [inputs, outputs];
* rows of the packed attention weight are ordered [query/key/value, head, channel] there, [head,
  query/key/value, channel] here;
* their embedding has a row for each token; here it is padded to a multiple of 128 rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.config import ExportConfig, ImportConfig
from sdp4bit_lab.pretrain.checkpoint.folder import LATEST, TOKENIZER, RunRecord
from sdp4bit_lab.pretrain.checkpoint.load import open_checkpoint
from sdp4bit_lab.pretrain.checkpoint.save import write_checkpoint
from sdp4bit_lab.pretrain.data.corpus import END_OF_TEXT
from sdp4bit_lab.pretrain.data.indexed_writer import sync_folder
from sdp4bit_lab.pretrain.model.cards import VOCABULARY_MULTIPLE, ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
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
_REQUIRED: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Settings under which their model is this program's; the first value is what a missing one means."""


def export_model(config: ExportConfig) -> Path:
    """Return the folder, which holds the checkpoint's model and tokenizer; needs one process and no GPU.

    Raises:
        SettingError: no complete checkpoint there, or the folder exists or cannot be written.
    """
    out = config.out
    if out.exists():
        raise SettingError(f"--out {out} is there already: name a folder that is not")
    with _alone():
        checkpoint = open_checkpoint(config.load)
        tensors = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in checkpoint.saved.items()
            if name.startswith("model.")
        }
        checkpoint.read_into(tensors)
    record = checkpoint.record
    shape = _shape_of(record, path=checkpoint.path)
    weights = to_huggingface(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        shape=shape,
        vocabulary_size=record.vocabulary_size,
    )
    working = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir(parents=True)
        tokenizer = checkpoint.path / TOKENIZER
        end_of_text = _write_tokenizer(working, tokenizer, shape=shape) if tokenizer.is_file() else None
        settings = _settings(shape, vocabulary_size=record.vocabulary_size, end_of_text=end_of_text)
        _write_json(working / CONFIG, settings)
        _save_file(weights, working / WEIGHTS)
        working.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        size = sum(tensor.nbytes for tensor in weights.values())
        shutil.rmtree(working, ignore_errors=True)
        raise SettingError(f"cannot write {out}, which takes {size:,} bytes ({error})") from error
    return out


def import_model(config: ImportConfig) -> Path:
    """Return the checkpoint that holds the model of the folder; training continues from it at step 0.

    Raises:
        SettingError: no GPT-2 model there, or one that this program has no model for.
    """
    if (config.save / LATEST).exists() or any(config.save.glob("step-*")):
        raise SettingError(f"--save {config.save} holds checkpoints already: name another folder")
    settings = _read_json(config.hf / CONFIG)
    shape, vocabulary_size = _read_settings(settings, path=config.hf / CONFIG)
    weights = from_huggingface(_read_weights(config.hf), shape=shape, vocabulary_size=vocabulary_size)
    record = RunRecord(shape=asdict(shape), vocabulary_size=vocabulary_size, world_size=1)

    def attach(folder: Path) -> None:
        if (config.hf / TOKENIZER).is_file():
            shutil.copyfile(config.hf / TOKENIZER, folder / TOKENIZER)

    with _alone() as group:
        return write_checkpoint(
            {f"model.{name}": tensor for name, tensor in weights.items()},
            folder=config.save,
            record=record,
            attach=attach,
            group=group,
        )


def to_huggingface(
    weights: Mapping[str, Tensor], *, shape: ModelShape, vocabulary_size: int
) -> dict[str, Tensor]:
    """Return the weights in their names and layouts, without the rows that pad the embedding.

    Raises:
        SettingError: a weight is missing.
    """
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


def from_huggingface(
    weights: Mapping[str, Tensor], *, shape: ModelShape, vocabulary_size: int
) -> dict[str, Tensor]:
    """Return the weights in this program's names and layouts, in fp32; padding rows are zero.

    Raises:
        SettingError: a weight is missing, has another shape, or has no place in the model.
    """
    # The models published first have no prefix.
    left = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    with torch.device("meta"):
        needed = to_huggingface(GPT(shape).state_dict(), shape=shape, vocabulary_size=vocabulary_size)
    converted: dict[str, Tensor] = {}
    for ours, theirs, layout in _names(shape.layers):
        if theirs not in left:
            raise SettingError(f"{WEIGHTS} has no weight {theirs}")
        tensor = left.pop(theirs).float()
        found, expected = tuple(tensor.shape), tuple(needed[f"transformer.{theirs}"].shape)
        if found != expected:
            raise SettingError(f"{WEIGHTS}: {theirs} has the shape {found}, not {expected}")
        if layout != "plain":
            tensor = tensor.t()
        if layout == "packed":
            tensor = tensor.unflatten(0, (3, shape.heads, -1)).transpose(0, 1).flatten(0, 2)
        if ours == _TOKEN_EMBEDDING:
            output = left.pop("lm_head.weight", None)
            if output is not None and not torch.equal(output.float(), tensor):
                raise SettingError(f"{WEIGHTS}: lm_head.weight is not tied to wte.weight")
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, shape.vocabulary - vocabulary_size))
        converted[ours] = tensor.contiguous()
    # Masks that old versions saved beside the weights.
    unknown = [name for name in left if not name.endswith((".attn.bias", ".attn.masked_bias"))]
    if unknown:
        raise SettingError(f"{WEIGHTS} has weights that a GPT-2 does not: {', '.join(sorted(unknown)[:5])}")
    return converted


def _names(layers: int) -> Iterator[tuple[str, str, Layout]]:
    """Yield the name of every parameter here and there, and how its layout differs."""
    yield _TOKEN_EMBEDDING, "wte.weight", "plain"
    yield _POSITION_EMBEDDING, "wpe.weight", "plain"
    for layer in range(layers):
        for ours, theirs, layout in _BLOCK:
            yield f"blocks.{layer}.{ours}.weight", f"h.{layer}.{theirs}.weight", layout
            # A bias is a vector: transposing leaves it as it is.
            yield f"blocks.{layer}.{ours}.bias", f"h.{layer}.{theirs}.bias", layout
    for kind in ("weight", "bias"):
        yield f"final_norm.{kind}", f"ln_f.{kind}", "plain"


def _settings(shape: ModelShape, *, vocabulary_size: int, end_of_text: int | None) -> dict[str, object]:
    return {
        **{name: values[0] for name, values in _REQUIRED.items()},
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


def _read_settings(settings: Mapping[str, object], *, path: Path) -> tuple[ModelShape, int]:
    """Return the sizes of the model, and how many tokens it has."""
    for name, values in _REQUIRED.items():
        value = settings.get(name, values[0])
        if value not in values:
            expected = " or ".join(map(repr, values))
            raise SettingError(f"{path}: {name} is {value!r}, this program's model needs {expected}")
    epsilon = settings.get("layer_norm_epsilon", LAYER_NORM_EPSILON)
    if epsilon != LAYER_NORM_EPSILON:
        raise SettingError(f"{path}: layer_norm_epsilon is {epsilon}, this program's is {LAYER_NORM_EPSILON}")
    sizes = {}
    for name in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"):
        value = settings.get(name)
        if type(value) is not int or value < 1:
            raise SettingError(f"{path}: {name} is {value!r}, it must be a positive number")
        sizes[name] = value
    hidden, heads, tokens = sizes["n_embd"], sizes["n_head"], sizes["vocab_size"]
    if hidden % heads:
        raise SettingError(f"{path}: n_embd {hidden} is not divisible by n_head {heads}")
    if settings.get("n_inner") not in (None, 4 * hidden):
        raise SettingError(f"{path}: n_inner is {settings['n_inner']}, this program's is {4 * hidden}")
    dropout = settings.get("resid_pdrop", 0.0)
    shape = ModelShape(
        layers=sizes["n_layer"],
        hidden=hidden,
        heads=heads,
        vocabulary=-(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        positions=sizes["n_positions"],
        dropout=dropout if isinstance(dropout, float) else 0.0,
    )
    return shape, tokens


def _shape_of(record: RunRecord, *, path: Path) -> ModelShape:
    names = ("layers", "hidden", "heads", "vocabulary", "positions", "dropout")
    try:
        return ModelShape(**{name: record.shape[name] for name in names})
    except KeyError as error:
        raise SettingError(f"{path} does not say its {error.args[0]}") from None


def _write_tokenizer(folder: Path, tokenizer: Path, *, shape: ModelShape) -> int | None:
    """Write the tokenizer's files; return the number of the end-of-text token, if it has one."""
    content = _read_json(tokenizer)
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


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the folder, which may be spread over several files."""
    names = {WEIGHTS}
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        names = set(_read_json(folder / INDEX).get("weight_map", {}).values())
    weights: dict[str, Tensor] = {}
    for name in sorted(names):
        if not isinstance(name, str) or Path(name).name != name:
            raise SettingError(f"{folder / INDEX} names {name!r}, which is not a file beside it")
        weights.update(_load_file(folder / name))
    return weights


def _load_file(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise SettingError(f"{path} cannot be read ({error})") from error


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SettingError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise SettingError(f"{path} does not hold a JSON object")
    return content


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _alone() -> Iterator[dist.ProcessGroup]:
    """Make this process a world of its own inside the block, on the CPU, whatever started it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.GroupMember.WORLD  # type: ignore[misc]
    finally:
        dist.destroy_process_group()

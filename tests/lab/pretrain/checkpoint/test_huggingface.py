"""Export to and import from Hugging Face's GPT-2 format, against the model of `transformers`.

Layer: one process, nothing is downloaded: models are built from a small random configuration.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.config import CheckpointConfig, ExportConfig, ImportConfig
from sdp4bit_lab.pretrain.checkpoint.folder import Progress, RunRecord
from sdp4bit_lab.pretrain.checkpoint.huggingface import (
    export_model,
    from_huggingface,
    import_model,
    to_huggingface,
)
from sdp4bit_lab.pretrain.checkpoint.load import open_checkpoint
from sdp4bit_lab.pretrain.checkpoint.save import write_checkpoint
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from tests.lab.pretrain.checkpoint.saved_runs import one_rank
from tests.lab.pretrain.tiny_runs import small, train_here, write_text
from tests.ranks import run_ranks

TOKENS = 300
SHAPE = ModelShape(layers=3, hidden=48, heads=4, vocabulary=384, positions=40)


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return pytest.importorskip(
        "transformers", reason="transformers, which is compared with, is not installed"
    )


def perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Make biases and norms other than 0 and 1, so that none can be lost or exchanged unnoticed."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def our_model(weights: dict[str, torch.Tensor], *, dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(SHAPE, compute_dtype=dtype).to(dtype)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
    return model.eval()


def our_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tokens that exist."""
    with torch.no_grad():
        logits: torch.Tensor = model(tokens)
    return logits[..., :TOKENS]


def their_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def assert_equal_functions(ours: dict[str, torch.Tensor], theirs: torch.nn.Module) -> None:
    """Compare logits: in double precision to its rounding, in fp32 to what rounding makes of theirs alone.

    The bound for fp32 is four times the distance of their fp32 logits to their own in double precision: both
    models round as often, in another order, so that either is about that far from the exact value.
    """
    tokens = torch.randint(0, TOKENS, (2, 40), generator=torch.Generator().manual_seed(1))
    single = their_logits(theirs, tokens)
    exact = their_logits(theirs.double(), tokens)
    rounding = (single.double() - exact).abs().max().item()
    assert 0 < rounding < 1e-4
    double = our_logits(our_model(ours, dtype=torch.float64), tokens)
    assert (double - exact).abs().max().item() < 1e-12 * exact.abs().max().item()
    assert (our_logits(our_model(ours), tokens) - single).abs().max().item() <= 4 * rounding


def save_ours(folder: Path, *, text: Path | None = None) -> dict[str, torch.Tensor]:
    """Save a checkpoint of a model with weights of no initialization; return the weights."""
    model = GPT(SHAPE)
    model.reset_parameters(seed=3)
    weights = {name: value.clone() for name, value in perturbed(model).state_dict().items()}

    def attach(working: Path) -> None:
        if text is not None:
            tokenizer = BytePairTokenizer.train([text.read_text()], vocabulary_size=TOKENS)
            tokenizer.save(working / "tokenizer.json")

    with one_rank() as group:
        write_checkpoint(
            {f"model.{name}": value for name, value in weights.items()},
            folder=folder,
            record=RunRecord(
                shape=asdict(SHAPE), vocabulary_size=TOKENS, world_size=4, progress=Progress(step=5)
            ),
            attach=attach,
            group=group,
        )
    return weights


def test_an_exported_model_is_theirs(transformers, tmp_path):
    text = write_text(tmp_path / "text.txt")
    ours = save_ours(tmp_path / "saved", text=text)
    out = export_model(ExportConfig(load=tmp_path / "saved", out=tmp_path / "out" / "hf"))
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.json", "merges.txt", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.json"),
    ]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    model, report = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == TOKENS and model.config.n_positions == 40
    assert model.transformer.wte.weight.shape == (TOKENS, 48)
    assert_equal_functions(ours, model.eval())

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    own = BytePairTokenizer.load(out / "tokenizer.json")
    sentence = "def export(self, path):\n    return  'naïve – 中文'\n"
    assert tokenizer(sentence)["input_ids"] == own.encode_documents([sentence])[0][:-1]
    assert tokenizer.decode(tokenizer(sentence)["input_ids"]) == sentence
    assert tokenizer.eos_token_id == own.end_of_text == model.config.eos_token_id
    again = transformers.GPT2TokenizerFast(vocab=str(out / "vocab.json"), merges=str(out / "merges.txt"))
    assert again(sentence)["input_ids"] == tokenizer(sentence)["input_ids"]


def test_their_model_is_imported(transformers, tmp_path):
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=40, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    theirs = perturbed(transformers.GPT2LMHeadModel(config))
    theirs.save_pretrained(tmp_path / "hf")
    import_model(ImportConfig(hf=tmp_path / "hf", save=tmp_path / "saved"))
    with one_rank():
        checkpoint = open_checkpoint(tmp_path / "saved")
        weights = {name: torch.full(found.size, torch.nan) for name, found in checkpoint.saved.items()}
        checkpoint.read_into(weights)
    assert checkpoint.record.shape == {**asdict(SHAPE), "dropout": 0.1}
    assert checkpoint.record.progress == Progress() and checkpoint.record.parts == ("model",)
    ours = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    assert set(ours) == set(GPT(SHAPE).state_dict())
    assert ours["token_embedding.weight"].shape == (384, 48)
    assert not ours["token_embedding.weight"][TOKENS:].any()
    assert_equal_functions(ours, theirs)

    # Exported again, every bit is as it was.
    export_model(ExportConfig(load=tmp_path / "saved", out=tmp_path / "again"))
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def random_weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(value.shape) for name, value in GPT(SHAPE).state_dict().items()}


def test_both_directions_undo_each_other_to_the_bit():
    weights = random_weights()
    weights["token_embedding.weight"][TOKENS:] = 0
    there = to_huggingface(weights, shape=SHAPE, vocabulary_size=TOKENS)
    assert all(tensor.is_contiguous() for tensor in there.values())
    for prefix in ("transformer.", ""):
        published = {name.replace("transformer.", prefix): tensor for name, tensor in there.items()}
        masks = {f"{prefix}h.0.attn.bias": torch.ones(1), f"{prefix}h.0.attn.masked_bias": torch.ones(1)}
        tied = {"lm_head.weight": there["transformer.wte.weight"]}
        back = from_huggingface({**published, **masks, **tied}, shape=SHAPE, vocabulary_size=TOKENS)
        assert back.keys() == weights.keys()
        assert all(torch.equal(back[name], weights[name]) for name in weights)


def write_hf(folder: Path, **settings: object) -> Path:
    folder.mkdir()
    save_file(
        to_huggingface(random_weights(), shape=SHAPE, vocabulary_size=TOKENS), folder / "model.safetensors"
    )
    sizes = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 40, "vocab_size": TOKENS}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', this program's model needs 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, this program's is 1e-05"),
        ({"n_inner": 100}, "n_inner is 100, this program's is 192"),
        ({"n_head": 5}, "n_embd 48 is not divisible by n_head 5"),
        ({"n_layer": "3"}, "n_layer is '3', it must be a positive number"),
        ({"n_layer": 4}, "has no weight h.3.ln_1.weight"),
        ({"n_layer": 2}, "has weights that a GPT-2 does not: h.2.attn.c_attn.bias"),
        ({"vocab_size": 301}, r"wte.weight has the shape \(300, 48\), not \(301, 48\)"),
    ],
)
def test_what_is_another_model_is_refused(settings, message, tmp_path):
    folder = write_hf(tmp_path / "hf", **settings)
    with pytest.raises(SettingError, match=message):
        import_model(ImportConfig(hf=folder, save=tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_files_that_are_missing_damaged_or_in_the_way_are_named(tmp_path):
    folder = write_hf(tmp_path / "hf")
    ours = save_ours(tmp_path / "ours")
    with pytest.raises(SettingError, match=r"--save .*ours holds checkpoints already"):
        import_model(ImportConfig(hf=folder, save=tmp_path / "ours"))
    with pytest.raises(SettingError, match=r"--out .*hf is there already"):
        export_model(ExportConfig(load=tmp_path / "ours", out=folder))
    with pytest.raises(SettingError, match="nowhere: no checkpoint there"):
        export_model(ExportConfig(load=tmp_path / "nowhere", out=tmp_path / "out"))
    untied = to_huggingface(ours, shape=SHAPE, vocabulary_size=TOKENS)
    with pytest.raises(SettingError, match=r"lm_head.weight is not tied"):
        from_huggingface(
            {**untied, "lm_head.weight": torch.zeros(TOKENS, 48)}, shape=SHAPE, vocabulary_size=TOKENS
        )
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(SettingError, match=r"model.safetensors cannot be read"):
        import_model(ImportConfig(hf=folder, save=tmp_path / "saved"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": "../x"}}))
    with pytest.raises(SettingError, match=r"names '../x', which is not a file beside it"):
        import_model(ImportConfig(hf=folder, save=tmp_path / "saved"))
    (folder / "config.json").unlink()
    with pytest.raises(SettingError, match=r"config.json cannot be read"):
        import_model(ImportConfig(hf=folder, save=tmp_path / "saved"))


def test_weights_may_be_spread_over_files(tmp_path):
    folder = write_hf(tmp_path / "hf")
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    placed = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    import_model(ImportConfig(hf=folder, save=tmp_path / "saved"))
    export_model(ExportConfig(load=tmp_path / "saved", out=tmp_path / "out"))
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_the_commands_export_what_was_trained_and_training_goes_on_from_what_was_imported(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt")
    first = small(text, tmp_path / "first", parallel=ParallelConfig())
    saving = replace(first, checkpoint=CheckpointConfig(save=tmp_path / "saved"))
    ((trained,),) = run_ranks(train_here, 1, saving)
    saved, hf, back = (str(tmp_path / name) for name in ("saved", "hf", "back"))
    assert main(["export", "--load", saved, "--out", hf]) == 0
    assert main(["import", "--hf", hf, "--save", back]) == 0
    assert capsys.readouterr().out == f"sdp4bit: written {hf}\nsdp4bit: written {back}/step-00000000\n"
    assert main(["export", "--load", saved, "--out", hf]) == 2
    assert (
        capsys.readouterr().err == f"sdp4bit: error: --out {hf} is there already: name a folder that is not\n"
    )

    second = replace(first, logging=replace(first.logging, out=tmp_path / "second"))
    imported = replace(second, checkpoint=CheckpointConfig(load=Path(back)))
    ((went_on,),) = run_ranks(train_here, 1, imported)
    losses = [step.loss for step in trained.steps]
    assert [step.step for step in went_on.steps] == list(range(1, 9))
    # The same samples, by the weights that were trained on them.
    assert went_on.steps[0].loss < losses[-1] < losses[0] - 0.3

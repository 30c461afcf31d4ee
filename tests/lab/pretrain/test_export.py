"""Export to Hugging Face's GPT-2 format, compared with the model of `transformers`.

Layer: one process, nothing is downloaded: models are built from a small random configuration.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("safetensors")


from sdp4bit_lab.cli import main
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint import Checkpointer
from sdp4bit_lab.pretrain.checkpoint_files import Progress, RunRecord
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig, ExportConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer
from sdp4bit_lab.pretrain.export import export_model
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from tests.lab.pretrain.saved_runs import Communication
from tests.lab.pretrain.tiny_runs import small, train_here, write_text
from tests.ranks import one_rank, run_ranks

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

    with one_rank():
        checkpointer = Checkpointer(
            models=[model],
            optimizer=torch.optim.AdamW(model.parameters()),
            communication=Communication(5),
            per_rank={},
            config=CheckpointConfig(save=folder, async_save=False),
            record=RunRecord(
                shape=asdict(SHAPE),
                vocabulary_size=TOKENS,
                world_size=1,
                strategy="",
                dataset="",
                seed=1,
                layout="",
            ),
            ranks=Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu")),
            attach=attach,
        )
        checkpointer.save(progress=Progress(step=5))
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


@pytest.mark.gloo
def test_the_command_exports_a_trained_model_and_names_what_is_in_the_way(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt")
    run = small(text, tmp_path / "run", parallel=ParallelConfig())
    run = replace(run, training=replace(run.training, steps=1))
    saving = replace(run, checkpoint=CheckpointConfig(save=tmp_path / "saved"))
    run_ranks(train_here, 1, saving)
    saved, hf = str(tmp_path / "saved"), str(tmp_path / "hf")
    assert main(["export", "--load", saved, "--out", hf]) == 0
    assert capsys.readouterr().out == f"sdp4bit: wrote {hf}\n"
    assert main(["export", "--load", saved, "--out", hf]) == 2
    assert capsys.readouterr().err.endswith(f"sdp4bit: error: --out {hf} exists: give a new folder\n")
    with pytest.raises(SettingError, match="nowhere: no such folder"):
        export_model(ExportConfig(load=tmp_path / "nowhere", out=tmp_path / "out"))

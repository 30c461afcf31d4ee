"""The fine-tuning benchmark: pairs of functions and their summaries, runs, and the table of them.

Layer: 2 gloo processes that the program starts; a GPT-2 of 0.1 million random parameters, made in place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

for package in ("trl", "peft", "scipy"):
    pytest.importorskip(package, reason=f"{package} is not installed: make test-ecosystem")

from benchmarks.finetuning import VARIANTS, Run, pairs_of, table  # noqa: E402
from tests import ROOT  # noqa: E402

MEASURED = [name for name in VARIANTS if name != "full-lossless"]  # which takes numba
STEPS = 3


def tiny_gpt2(folder: Path) -> None:
    """Write a model as `sdp4bit export` does, with a tokenizer of bytes and a few words."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel as Split
    from tokenizers.trainers import BpeTrainer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    end = "<|endoftext|>"
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = Split(add_prefix_space=False), ByteLevel()
    trainer = BpeTrainer(vocab_size=512, special_tokens=[end], initial_alphabet=Split.alphabet())
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, unk_token=end).save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=128,
        n_embd=64,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        eos_token_id=tokenizer.token_to_id(end),
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Run]]:
    folder = tmp_path_factory.mktemp("finetuning")
    tiny_gpt2(folder / "model")
    command = [sys.executable, "-m", "benchmarks.finetuning", "--model", str(folder / "model")]
    command += ["--out", str(folder), "--seeds", "1", "--steps", str(STEPS), "--validation-pairs", "32"]
    command += ["--full-rate", "1e-2", "--lora-rate", "1e-2"]
    done = subprocess.run(
        [*command, "--variants", *MEASURED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = {name: Run(**json.loads((folder / f"{name}-seed1.json").read_text())) for name in MEASURED}
    return folder, runs


def test_variants_start_alike_and_differ_by_what_quantization_does(measured: Any) -> None:
    _, runs = measured
    assert len({run.train_losses[0] for run in runs.values()}) == 1  # new adapters change nothing
    for kind in ("full", "lora"):
        plain, quantized = runs[f"{kind}-plain"], runs[f"{kind}-sdp4bit"]
        assert len(plain.train_losses) == STEPS
        assert quantized.loss != plain.loss == pytest.approx(quantized.loss, rel=0.02)
        assert plain.loss < plain.train_losses[0]


def test_bytes_are_those_of_what_is_trained(measured: Any) -> None:
    folder, runs = measured
    full, lora = runs["full-sdp4bit"], runs["lora-sdp4bit"]
    # Two gathers (one of the embeddings) and a reduction of 16 bits each, against 8.13 bits in all.
    assert 32 / 8.13 < full.plain_bytes / full.later_bytes < 48 / 8.13
    assert runs["full-plain"].later_bytes is None
    # Frozen weights are sent in the first step only.
    assert lora.first_bytes > 10 * lora.later_bytes and lora.later_bytes < full.later_bytes / 3
    explained = (folder / "explain-lora-sdp4bit.txt").read_text()
    assert "frozen not sent" in explained and "inter int4/128, Hadamard" in explained
    assert "min_numel" not in explained


def test_the_table_pairs_the_seeds(measured: Any) -> None:
    folder, runs = measured
    rows = [line.split(" | ") for line in (folder / "table.md").read_text().splitlines() if "| " in line[:2]]
    assert [row[0].removeprefix("| ") for row in rows[2:]] == MEASURED
    plain, quantized = (replace(runs[f"full-{name}"], loss=2.0) for name in ("plain", "sdp4bit"))
    both = [
        replace(run, seed=seed, loss=loss)
        for seed in (1, 2, 3)
        for run, loss in ((plain, 2.0 + seed), (quantized, (2.0 + seed) * (1 + seed / 1000)))
    ]
    # Of 0.1, 0.2 and 0.3 %: t = 4.303 with two degrees of freedom, times 0.1 % over the root of 3.
    assert "+0.200 % | -0.048 to +0.448 %" in table(both)
    with pytest.raises(ValueError, match="full-sdp4bit with seed 3 began at a loss"):
        table([*both[:-1], replace(both[-1], train_losses=[0.5])])


def test_pairs_are_names_and_first_sentences() -> None:
    docstring = '"""Return x\n        twice. And more.\n\n        Long."""'
    method = f"class A:\n    def f(self, x=1, *y):\n        {docstring}\n"
    (pair,) = pairs_of(method + "def undocumented(): pass\n")
    assert "def f(self, x=1, *y)" in pair["prompt"] and pair["completion"] == " Return x twice."

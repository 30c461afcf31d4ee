"""`sdp4bit tokenizer`: what it learns is read by pretrain and preprocess. Layer: no process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sdp4bit_lab.cli import COMMANDS, main
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer, TokenizerFiles
from tests.lab.pretrain.data.indexed_corpora import library_texts

TEXTS = library_texts(3)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Return the names of three files, one of each kind."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"content": TEXTS[0]}) + "\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"content": [TEXTS[1]]}) + "\n")
    (tmp_path / "c.txt").write_text(TEXTS[2])
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.txt")]


def test_what_is_learned_is_read_in_both_formats(texts, tmp_path, capsys):
    out = tmp_path / "new" / "tokenizer"
    command = [
        "tokenizer",
        "--input",
        *texts,
        "--json-key",
        "content",
        "--out",
        str(out),
        "--vocab-size",
        "400",
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"400 tokens from {sum(map(len, TEXTS)):,} characters")
    assert f"next: sdp4bit pretrain --data-path ... --tokenizer-model {out}" in said

    expected = BytePairTokenizer.train(TEXTS, vocabulary_size=400)
    model = TokenizerFiles(tokenizer_model=out).load()
    gpt2 = TokenizerFiles(vocab_file=out / "vocab.json", merge_file=out / "merges.txt").load()
    assert model.digest() == expected.digest()
    for tokenizer in (model, gpt2):
        assert tokenizer.vocabulary_size == 400
        assert tokenizer.encode_documents(TEXTS) == expected.encode_documents(TEXTS)
    config = COMMANDS["pretrain"].parse(["--tokenizer-model", str(out), "--data-path", texts[2]])
    assert config.resolved_data.vocabulary == 400

    assert main(command) == 2
    assert "holds tokenizer.json, vocab.json, merges.txt: choose another folder" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--characters", "300"]) == 0
    said = capsys.readouterr().out
    assert "from 300 characters" in said and "fewer than --vocab-size 400" in said


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"text": 3}\n', [], "line 1"),
        ("", [], "the documents hold no text"),
        ("{}\n", ["--vocab-size", "256"], "--vocab-size 256 must be at least 257"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_and_leaves_nothing(
    tmp_path, capsys, content, options, message
):
    (tmp_path / "x.jsonl").write_text(content)
    out = tmp_path / "out"
    assert main(["tokenizer", "--input", str(tmp_path / "x.jsonl"), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()

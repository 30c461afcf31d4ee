"""Settings of the data: the vocabulary of every source, and what does not fit together. Layer: no process."""

from __future__ import annotations

import pytest

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.data.blend import parse_blend
from sdp4bit_lab.pretrain.data.config import DataConfig
from tests.lab.pretrain.data.indexed_corpora import write_corpus, write_vocabulary


def test_the_model_gets_the_vocabulary_of_every_source(tmp_path):
    prefix = write_corpus(tmp_path / "x", [[1, 2]])
    vocab, merges = write_vocabulary(tmp_path, size=700)
    files = {"vocab_file": vocab, "merge_file": merges}

    def vocabulary(**options: object) -> int:
        return PretrainConfig(data=DataConfig(**options)).model_shape.vocabulary

    assert vocabulary() == 4096
    assert vocabulary(vocabulary_size=500) == 512
    assert vocabulary(mock_data=True) == 4096
    large = PretrainConfig(model=ModelConfig(model_card="125M"), data=DataConfig(mock_data=True))
    assert large.model_shape.vocabulary == 50304
    assert vocabulary(mock_data=True, vocabulary_size=256) == 256
    assert vocabulary(data_path=(prefix,), vocabulary_size=129) == 256
    assert vocabulary(data_path=(prefix,), **files) == 768
    assert vocabulary(**files) == 768
    null = {"tokenizer_type": "NullTokenizer", "vocabulary_size": 256}
    assert vocabulary(data_path=(prefix,), **null) == 384


def test_a_corpus_may_have_the_name_of_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("2024", "0.5"):
        write_corpus(tmp_path / name, [[1, 2]])
    for paths, weights in (
        (("2024",), [None]),
        (("0.5", "2024"), [None, None]),
        (("1e0", "0.5", "1_0", "2024"), [1, 10]),
    ):
        data = DataConfig(data_path=paths, vocabulary_size=9, split="1,1,0")
        assert data.source == "indexed"
        assert [part.weight for part in parse_blend(data.data_path, option="--data-path")] == weights
    with pytest.raises(SettingError, match="weights apply to"):
        DataConfig(data_path=("2025", "3"))


def test_wrong_data_settings_are_refused(tmp_path):
    prefix = write_corpus(tmp_path / "x", [[1, 2]])
    (tmp_path / "t.txt").write_text("text")
    vocab, merges = write_vocabulary(tmp_path, size=300)
    files = {"vocab_file": vocab, "merge_file": merges}
    for options, message in (
        ({"data_path": (prefix, tmp_path / "t.txt")}, r"mixes \.bin/\.idx prefixes with text .*t\.txt"),
        ({"data_path": ("0.5", tmp_path / "t.txt")}, r"weights apply to \.bin/\.idx prefixes"),
        ({"data_path": (tmp_path / "t.txt",), "split": "9,1"}, "--validation-fraction splits text"),
        ({"data_path": (prefix,), "validation_fraction": 0.1}, r"--validation-fraction 0.1 applies to text"),
        ({"mock_data": True, "data_path": (prefix,)}, "--mock-data reads no files"),
        ({"mock_data": True, "eod_mask_loss": True}, "--mock-data has no documents"),
        ({"data_path": (prefix,), "train_data_path": (prefix,)}, "give one or the others"),
        ({"train_data_path": (prefix,)}, "must be given together"),
        ({"test_data_path": (prefix,)}, "must be given together"),
        ({"vocab_file": vocab}, "--vocab-file and --merge-file form one tokenizer"),
        ({**files, "tokenizer_model": vocab}, "two tokenizers"),
        ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
        ({"tokenizer_type": "NullTokenizer", **files}, "reads no files"),
        ({"tokenizer_type": "NullTokenizer"}, "give a tokenizer for text"),
        ({"tokenizer_type": "NullTokenizer", "data_path": (prefix,)}, "needs --vocab-size"),
        ({"eod_token": "</s>"}, "--eod-token names a token of"),
        ({"vocabulary_size": 0}, "--vocab-size 0 must be between 1"),
        ({"vocabulary_size": 256}, "--vocab-size 256 must be between 257"),
        ({"validation_fraction": 0.0}, "--validation-fraction 0.0"),
        *(
            ({"data_path": (prefix,), "split": split}, "give two or three comma-separated numbers")
            for split in ("1", "1,2,3,4", "a,b", "1,0,0", "0,1", "1,-1,1", "nan,1", "")
        ),
    ):
        with pytest.raises(SettingError, match=message):
            DataConfig(**options)
    for options, message in (
        (
            {"data_path": (prefix,)},
            "give --vocab-file and --merge-file, --tokenizer-model, or --vocab-size",
        ),
        ({**files, "vocabulary_size": 299}, "--vocab-size 299 differs from the 300 tokens"),
        ({**files, "eod_token": "<none>"}, "--eod-token <none> is not among the tokenizer"),
        ({"vocab_file": merges, "merge_file": vocab}, "are not GPT-2's"),
        ({"tokenizer_model": vocab}, r"vocab\.json is not a tokenizer\.json"),
        ({"tokenizer_model": tmp_path / "no.json"}, r"no\.json: no such file"),
    ):
        with pytest.raises(SettingError, match=message):
            _ = DataConfig(**options).vocabulary


def test_other_formats_of_tokenizers_are_named_with_a_way_out(tmp_path):
    piece = b"\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
    for name, content, kind in (
        ("tokenizer.model", b"\n" + bytes([len(piece)]) + piece, "a SentencePiece model"),
        ("tekken.json", b'{"config": {}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}', "Mistral's tekken"),
        ("cl100k_base.tiktoken", b"IQ== 0\nIg== 1\n", "a tiktoken file"),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / name).write_bytes(content)
        for given in (folder / name, folder):
            message = rf"{name} is {kind}, not a tokenizer\.json\. Give .*AutoTokenizer.from_pretrained"
            with pytest.raises(SettingError, match=message):
                _ = DataConfig(tokenizer_model=given).tokenizer

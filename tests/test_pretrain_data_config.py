"""Settings of the data: sources, tokenizers, splits, and what contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("tyro")
pytest.importorskip("tokenizers")

from sdp4bit.pretrain.config import ModelConfig, PretrainConfig
from sdp4bit.pretrain.data import Dataset, check_indexed, open_indexed, prepare_dataset
from sdp4bit.pretrain.data_config import DataConfig
from sdp4bit.pretrain.settings import SettingError
from tests.indexed_corpora import counting_corpus, write_corpus, write_vocabulary
from tests.ranks import run_ranks
from tests.tiny_runs import this_rank

VOCABULARY = 1 << 20


def dataset(*paths: object, **options: Any) -> Dataset:
    options.setdefault("vocabulary_size", VOCABULARY)
    config = DataConfig(data_path=tuple(map(str, paths)), **options)
    return open_indexed(config, key=check_indexed(config))


class TestConfig:
    def test_the_model_gets_the_vocabulary_of_every_source(self, tmp_path):
        prefix = write_corpus(tmp_path / "x", [[1, 2]])
        vocab, merges = write_vocabulary(tmp_path, size=700)
        files = {"vocab_file": vocab, "merge_file": merges}

        def vocabulary(**options: Any) -> int:
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

    def test_wrong_data_settings_are_refused(self, tmp_path):
        prefix = write_corpus(tmp_path / "x", [[1, 2]])
        (tmp_path / "t.txt").write_text("text")
        vocab, merges = write_vocabulary(tmp_path, size=300)
        files = {"vocab_file": vocab, "merge_file": merges}
        for options, message in (
            ({"data_path": (prefix, tmp_path / "t.txt")}, r"mixes \.bin/\.idx prefixes with text .*t\.txt"),
            ({"data_path": ("0.5", tmp_path / "t.txt")}, r"weights are for \.bin/\.idx prefixes"),
            ({"data_path": (tmp_path / "t.txt",), "split": "9,1"}, "text is split by --validation-fraction"),
            ({"data_path": (prefix,), "validation_fraction": 0.1}, r"--validation-fraction 0.1 divides text"),
            ({"mock_data": True, "data_path": (prefix,)}, "--mock-data reads no files"),
            ({"mock_data": True, "eod_mask_loss": True}, "--mock-data has no ends of documents"),
            ({"data_path": (prefix,), "train_data_path": (prefix,)}, "give one or the others"),
            ({"train_data_path": (prefix,)}, "belong together"),
            ({"test_data_path": (prefix,)}, "belong together"),
            ({"reset_position_ids": True}, "--reset-position-ids is not supported"),
            ({"reset_attention_mask": True}, "--reset-attention-mask is not supported"),
            ({"vocab_file": vocab}, "--vocab-file and --merge-file are one tokenizer"),
            ({**files, "tokenizer_model": vocab}, "two tokenizers"),
            ({"tokenizer_type": "GPT2BPETokenizer"}, "needs --vocab-file and --merge-file"),
            ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
            ({"tokenizer_type": "NullTokenizer", **files}, "reads no files"),
            ({"tokenizer_type": "NullTokenizer"}, "text has to be tokenized"),
            ({"tokenizer_type": "NullTokenizer", "data_path": (prefix,)}, "needs --vocab-size"),
            ({"eod_token": "</s>"}, "--eod-token names a token of"),
            ({"vocabulary_size": 0}, "--vocab-size 0 must be between 1"),
        ):
            with pytest.raises(SettingError, match=message):
                DataConfig(**options)
        for options, message in (
            (
                {"data_path": (prefix,)},
                "give --vocab-file and --merge-file, --tokenizer-model, or --vocab-size",
            ),
            ({**files, "vocabulary_size": 299}, "--vocab-size 299 differs from the 300 tokens"),
            ({**files, "eod_token": "<none>"}, "--eod-token <none>: the tokenizer has no such token"),
            ({"vocab_file": merges, "merge_file": vocab}, "are not GPT-2's"),
            ({"tokenizer_model": vocab}, r"vocab\.json is not a tokenizer\.json"),
            ({"tokenizer_model": tmp_path / "no.json"}, r"no\.json: there is no such file"),
        ):
            with pytest.raises(SettingError, match=message):
                _ = DataConfig(**options).vocabulary


def open_and_report(config: DataConfig, other: DataConfig) -> list[str]:
    """Return what both ranks say about a corpus, and about one that the second rank reads elsewhere."""
    ranks = this_rank()
    # Each rank stands for a node of its own.
    ranks = replace(ranks, local_rank=0, local_world_size=1)
    found = [prepare_dataset(config, ranks=ranks).key]
    try:
        prepare_dataset(other if ranks.rank else config, ranks=ranks)
    except SettingError as error:
        found.append(str(error))
    return found


def test_nodes_that_read_other_files_are_an_error_on_all_ranks(tmp_path):
    a = counting_corpus(tmp_path / "a", documents=50, seed=1)
    b = counting_corpus(tmp_path / "b", documents=50, seed=2)
    configs = [DataConfig(data_path=(str(p),), vocabulary_size=VOCABULARY) for p in (a, b)]
    first, second = run_ranks(open_and_report, 2, *configs)
    assert first == second
    assert "rank 1 reads other data than rank 0" in first[1]
    (tmp_path / "b.idx").write_bytes((tmp_path / "b.idx").read_bytes()[:60])
    first, second = run_ranks(open_and_report, 2, *configs)
    assert first == second
    assert "b.idx: arrays: " in first[1]

"""Text that a run tokenizes at its start: documents, split, tokenizer, cache, order. Layer: no process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from sdp4bit_lab.common.ranks import run_on_all_ranks
from sdp4bit_lab.common.settings import RunError, SettingError
from sdp4bit_lab.pretrain.data import token_cache
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.data.corpus import read_corpus, split_corpus
from sdp4bit_lab.pretrain.data.documents import END_OF_TEXT
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.token_cache import fill_cache, open_cache
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer, load_tokenizer
from tests.lab.pretrain.saved_runs import flip_bit

DOCUMENTS = [f"def function_{i}(x):\n    return x + {i}  # μ and 漢字 {i}\n" * (1 + i % 5) for i in range(60)]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def load(path: Path) -> BytePairTokenizer:
    return load_tokenizer(vocab_file=None, merge_file=None, tokenizer_model=path, eod_token=None)


def config(path: Path, cache: Path, **options) -> DataConfig:
    return DataConfig(data_path=(path,), cache_dir=cache, vocabulary_size=300, **options)


class TestCorpus:
    def test_documents_are_those_of_the_files_and_a_missing_one_is_named(self, text_file, tmp_path):
        (tmp_path / "a.txt").write_text(f"one{END_OF_TEXT}two{END_OF_TEXT}")
        assert list(read_corpus((tmp_path / "a.txt", text_file))) == ["one", "two", *DOCUMENTS]
        with pytest.raises(SettingError, match=r"missing\.txt is no file, and has no"):
            list(read_corpus((tmp_path / "missing.txt",)))
        with pytest.raises(SettingError, match="is a folder: name its files"):
            list(read_corpus((tmp_path,)))
        (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
        with pytest.raises(SettingError, match=r"line 2: .*`sdp4bit preprocess --skip-invalid` leaves such"):
            list(read_corpus((tmp_path / "b.jsonl",)))

    def test_the_standard_library_is_there_without_a_download(self):
        texts = list(read_corpus(()))
        assert len(texts) > 50 and 5_000_000 < sum(map(len, texts)) <= 6_000_000
        assert any("def " in text for text in texts)


class TestSplit:
    def test_whole_documents_are_held_out_by_their_content(self, text_file):
        read = list(split_corpus((text_file,), validation_fraction=0.1).read())
        assert [text for text, _ in read] == DOCUMENTS
        held_out = [text for text, is_held_out in read if is_held_out]
        size, total = sum(map(len, held_out)), sum(map(len, DOCUMENTS))
        assert 0.1 <= size / total < 0.15

    def test_few_documents_leave_something_to_train_on_and_the_only_one_is_cut(self, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text(f"a{END_OF_TEXT}b")
        assert len(split_corpus((text,), validation_fraction=0.99).held_out) == 1
        text.write_text("abcdefghij" * 10)
        split = split_corpus((text,), validation_fraction=0.1)
        assert [(len(part), held_out) for part, held_out in split.read()] == [(90, False), (10, True)]
        text.write_text("")
        with pytest.raises(SettingError, match="no text"):
            split_corpus((text,), validation_fraction=0.1)


class TestTokenizer:
    def test_any_text_comes_back_and_training_is_deterministic(self, tmp_path):
        tokenizer = BytePairTokenizer.train(DOCUMENTS, vocabulary_size=300)
        assert tokenizer.vocabulary_size <= 300
        strange = "tabs\t\r\n  😀 \x00 ünï " + DOCUMENTS[3]
        (tokens,) = tokenizer.encode_documents([strange])
        assert tokens[-1] == tokenizer.end_of_text
        assert tokenizer.decode(tokens[:-1]) == strange
        assert max(tokens) < 300
        BytePairTokenizer.train(DOCUMENTS, vocabulary_size=300).save(tmp_path / "t.json")
        again = BytePairTokenizer.load(tmp_path / "t.json")
        assert again.encode_documents([strange]) == [tokens] and again.digest() == tokenizer.digest()

    def test_a_file_that_asks_for_it_neither_cuts_nor_pads_documents(self, tmp_path):
        path = tmp_path / "tokenizer.json"
        BytePairTokenizer.train(DOCUMENTS, vocabulary_size=300).save(path)
        plain = load(path).encode(DOCUMENTS)
        limited = Tokenizer.from_file(str(path))
        limited.enable_truncation(max_length=5)
        limited.enable_padding(length=5000)
        limited.save(str(path))
        assert '"max_length": 5' in path.read_text()
        assert load(path).encode(DOCUMENTS) == plain

    def test_a_package_that_panics_or_a_token_without_sense_is_a_wrong_setting(self, tmp_path):
        path = tmp_path / "tokenizer.json"
        BytePairTokenizer.train(DOCUMENTS, vocabulary_size=300).save(path)
        content = json.loads(path.read_text())
        content["model"]["vocab"]["new"] = 4_000_000_000
        path.write_text(json.dumps(content))
        with pytest.raises(SettingError, match="largest token is 4,000,000,000"):
            load(path)
        del content["model"]["vocab"]["new"]
        content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}
        path.write_text(json.dumps(content))
        tokenizer = load(path)
        with pytest.raises(SettingError, match="has failed on a document: index out of bounds"):
            tokenizer.encode(DOCUMENTS)
        with pytest.raises(RunError, match="rank 0: a package written in Rust has failed"):
            run_on_all_ranks(lambda: tokenizer._tokenizer.encode("a"))
        path.write_text("{}")
        with pytest.raises(SettingError, match=r"tokenizer\.json is not a tokenizer\.json: "):
            BytePairTokenizer.load(path)


class TestCache:
    def test_it_holds_the_documents_of_both_splits_as_bin_and_idx(self, text_file, tmp_path):
        settings = config(text_file, tmp_path / "cache", eod_mask_loss=True)
        folder = fill_cache(settings)
        dataset = open_cache(folder, config=settings)
        assert dataset.key == folder.name.removeprefix("text-")
        tokenizer = BytePairTokenizer.load(folder / "tokenizer.json")
        read = list(split_corpus((text_file,), validation_fraction=0.05).read())
        for name, split in (("train", dataset.train), ("validation", dataset.validation)):
            files = IndexedTokens(folder / name)
            files.check()
            starts = files.starts(np.arange(files.documents + 1)).tolist()
            documents = [files.read(start, end - start).tolist() for start, end in pairwise(starts)]
            expected = [text for text, held_out in read if held_out == (name == "validation")]
            assert documents == tokenizer.encode_documents(expected)
            assert split.tokens == files.tokens == sum(map(len, documents))
            assert {document[-1] for document in documents} == {dataset.masked_token}

    def test_training_shuffles_samples_and_validation_follows_the_text(self, text_file, tmp_path):
        settings = config(text_file, tmp_path / "cache")
        dataset = open_cache(fill_cache(settings), config=settings)
        for split, seed in ((dataset.train, 3), (dataset.validation, None)):
            samples = split.samples(sequence_length=7, seed=seed)
            stream = split.corpus.read(0, split.tokens).tolist()
            for epoch in (0, 1):
                order = list(range(samples.count))
                if seed is not None:
                    order = np.random.default_rng([seed, epoch]).permutation(samples.count)
                numbers = range(epoch * samples.count, (epoch + 1) * samples.count)
                assert samples.rows(numbers).tolist() == [stream[7 * n : 7 * n + 8] for n in order]

    def test_only_other_text_or_settings_write_another_folder(self, text_file, tmp_path, monkeypatch):
        cache = tmp_path / "cache"
        folders = {
            fill_cache(config(text_file, cache)),
            fill_cache(config(text_file, cache, validation_fraction=0.2)),
        }
        text_file.write_text(text_file.read_text() + '{"text": "more"}\n')
        folders.add(fill_cache(config(text_file, cache)))
        assert len(folders) == 3
        monkeypatch.setattr(token_cache, "_tokenize", None)
        assert fill_cache(config(text_file, cache)) in folders

    @pytest.mark.parametrize("name", ["train.bin", "train.idx", "tokenizer.json", "SHA256SUMS"])
    def test_a_damaged_folder_is_written_again(self, name, text_file, tmp_path):
        settings = config(text_file, tmp_path / "cache")
        folder = fill_cache(settings)
        intact = (folder / name).read_bytes()
        flip_bit(folder / name)
        with pytest.warns(UserWarning, match=f"text-.* is damaged and written again: .*{name}"):
            assert fill_cache(settings) == folder
        assert (folder / name).read_bytes() == intact

    def test_a_failure_leaves_nothing_behind(self, text_file, tmp_path, monkeypatch):
        def fail_late(split, *, config, folder):
            (folder / "train.bin").write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(token_cache, "_tokenize", fail_late)
        with pytest.raises(SettingError, match=r"text-.* \(disk full\): set --data-cache-path"):
            fill_cache(config(text_file, tmp_path / "cache"))
        assert list((tmp_path / "cache").iterdir()) == []
        with pytest.raises(SettingError, match="set --data-cache-path"):
            fill_cache(config(text_file, text_file))

    def test_writers_that_start_at_once_agree(self, text_file, tmp_path):
        settings = config(text_file, tmp_path / "cache")
        with ThreadPoolExecutor(3) as pool:
            folders = list(pool.map(fill_cache, [settings] * 3, timeout=60))
        assert len(set(folders)) == 1
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [folders[0].name]
        assert open_cache(folders[0], config=settings).train.tokens > 0

    def test_default_folder_follows_xdg(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert DataConfig().cache_folder() == tmp_path / "sdp4bit"
        assert DataConfig(cache_dir=Path("x")).cache_folder() == Path("x")

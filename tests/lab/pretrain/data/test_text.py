"""Text that a run tokenizes at its start: documents, split, tokenizer, cache, order. Layer: no process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data import token_cache
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.data.corpus import FileCorpus, StandardLibraryCorpus, split_corpus
from sdp4bit_lab.pretrain.data.documents import END_OF_TEXT
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.sample_index import shuffle_samples
from sdp4bit_lab.pretrain.data.token_cache import fill_cache, open_cache
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer

DOCUMENTS = [f"def function_{i}(x):\n    return x + {i}  # μ and 漢字 {i}\n" * (1 + i % 5) for i in range(60)]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def config(path: Path, cache: Path, **options) -> DataConfig:
    return DataConfig(data_path=(path,), cache_dir=cache, vocabulary_size=300, **options)


class TestCorpus:
    def test_text_files_are_split_at_the_end_of_text(self, tmp_path):
        (tmp_path / "a.txt").write_text(f"one{END_OF_TEXT}two{END_OF_TEXT}")
        (tmp_path / "b.py").write_text("three")
        corpus = FileCorpus((tmp_path / "a.txt", tmp_path / "b.py"))
        assert list(corpus.documents()) == ["one", "two", "three"] == list(corpus.documents())

    def test_jsonl_gives_its_text(self, text_file):
        assert list(FileCorpus((text_file,)).documents()) == DOCUMENTS

    @pytest.mark.parametrize("line", ["{", '{"words": "x"}', "[1]", '{"text": 3}'])
    def test_a_line_that_is_no_document_is_named(self, tmp_path, line):
        path = tmp_path / "x.jsonl"
        path.write_text('{"text": "fine"}\n\n' + line + "\n")
        with pytest.raises(SettingError, match=r"x\.jsonl, line 3"):
            list(FileCorpus((path,)).documents())

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(SettingError, match=r"missing\.txt: there is no such file"):
            FileCorpus((tmp_path / "missing.txt",))

    def test_other_encodings_are_refused(self, tmp_path):
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
        with pytest.raises(SettingError, match=r"latin\.txt is not UTF-8"):
            list(FileCorpus((tmp_path / "latin.txt",)).documents())

    def test_the_standard_library_is_there_without_a_download(self):
        corpus = StandardLibraryCorpus(limit=300_000)
        texts = list(corpus.documents())
        assert 5 < len(texts) == len(list(corpus.documents()))
        assert 50_000 < sum(map(len, texts)) <= 300_000
        assert any("def " in text for text in texts)


class TestSplit:
    def test_whole_documents_are_held_out_by_their_content(self, text_file):
        corpus = FileCorpus((text_file,))
        split = split_corpus(corpus, validation_fraction=0.1)
        read = list(split.read(corpus))
        assert [text for text, _ in read] == DOCUMENTS
        held_out = [text for text, is_held_out in read if is_held_out]
        size, total = sum(map(len, held_out)), sum(map(len, DOCUMENTS))
        assert 0.1 <= size / total < 0.15

    def test_the_only_document_is_cut(self, tmp_path):
        (tmp_path / "one.txt").write_text("abcdefghij" * 10)
        corpus = FileCorpus((tmp_path / "one.txt",))
        split = split_corpus(corpus, validation_fraction=0.1)
        assert [(len(text), held_out) for text, held_out in split.read(corpus)] == [(90, False), (10, True)]

    def test_something_is_left_to_train_on(self, tmp_path):
        (tmp_path / "two.txt").write_text(f"a{END_OF_TEXT}b")
        split = split_corpus(FileCorpus((tmp_path / "two.txt",)), validation_fraction=0.99)
        assert len(split.held_out) == 1

    def test_no_text_is_an_error(self, tmp_path):
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(SettingError, match="no text"):
            split_corpus(FileCorpus((tmp_path / "empty.txt",)), validation_fraction=0.1)


class TestTokenizer:
    def test_any_text_comes_back(self):
        tokenizer = BytePairTokenizer.train(DOCUMENTS, vocabulary_size=300)
        assert tokenizer.vocabulary_size <= 300
        strange = "tabs\t\r\n  😀 \x00 ünï " + DOCUMENTS[3]
        (tokens,) = tokenizer.encode_documents([strange])
        assert tokens[-1] == tokenizer.end_of_text
        assert tokenizer.decode(tokens[:-1]) == strange
        assert max(tokens) < 300

    def test_training_is_deterministic_and_survives_the_disk(self, tmp_path):
        first = BytePairTokenizer.train(DOCUMENTS, vocabulary_size=320)
        second = BytePairTokenizer.train(DOCUMENTS, vocabulary_size=320)
        first.save(tmp_path / "t.json")
        loaded = BytePairTokenizer.load(tmp_path / "t.json")
        expected = first.encode_documents(DOCUMENTS)
        assert second.encode_documents(DOCUMENTS) == expected == loaded.encode_documents(DOCUMENTS)
        assert loaded.end_of_text == first.end_of_text


class TestCache:
    def test_it_holds_the_documents_of_both_splits_as_bin_and_idx(self, text_file, tmp_path):
        settings = config(text_file, tmp_path / "cache", eod_mask_loss=True)
        folder = fill_cache(settings)
        dataset = open_cache(folder, config=settings)
        assert dataset.key == folder.name.removeprefix("text-")
        corpus = FileCorpus((text_file,))
        read = list(split_corpus(corpus, validation_fraction=0.05).read(corpus))
        for name, split in (("train", dataset.train), ("validation", dataset.validation)):
            files = IndexedTokens(folder / name)
            files.check()
            starts = files.starts(np.arange(files.documents + 1)).tolist()
            documents = [files.read(start, end - start).tolist() for start, end in pairwise(starts)]
            expected = [text for text, held_out in read if held_out == (name == "validation")]
            assert documents == dataset.tokenizer.encode_documents(expected)
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
                    _, order = shuffle_samples(0, samples=samples.count, seed=seed, epoch=epoch)
                numbers = range(epoch * samples.count, (epoch + 1) * samples.count)
                assert samples.rows(numbers).tolist() == [stream[7 * n : 7 * n + 8] for n in order]

    def test_the_second_time_nothing_is_written(self, text_file, tmp_path, monkeypatch):
        first = fill_cache(config(text_file, tmp_path / "cache"))
        monkeypatch.setattr(token_cache, "_tokenize", None)
        assert fill_cache(config(text_file, tmp_path / "cache")) == first

    def test_other_text_or_settings_have_another_folder(self, text_file, tmp_path):
        cache = tmp_path / "cache"
        folders = {
            fill_cache(config(text_file, cache)),
            fill_cache(config(text_file, cache, validation_fraction=0.2)),
        }
        text_file.write_text(text_file.read_text() + '{"text": "more"}\n')
        folders.add(fill_cache(config(text_file, cache)))
        assert len(folders) == 3

    def test_a_failure_leaves_nothing_behind(self, text_file, tmp_path, monkeypatch):
        def fail_late(corpus, *, split, config, folder):
            (folder / "train.bin").write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(token_cache, "_tokenize", fail_late)
        with pytest.raises(SettingError, match=r"text-.* \(disk full\): set --data-cache-path"):
            fill_cache(config(text_file, tmp_path / "cache"))
        assert list((tmp_path / "cache").iterdir()) == []

    def test_writers_that_start_at_once_agree(self, text_file, tmp_path):
        settings = config(text_file, tmp_path / "cache")
        with ThreadPoolExecutor(3) as pool:
            folders = list(pool.map(fill_cache, [settings] * 3, timeout=60))
        assert len(set(folders)) == 1
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [folders[0].name]
        assert open_cache(folders[0], config=settings).train.tokens > 0

    def test_an_unwritable_cache_says_so(self, text_file, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SettingError, match="set --data-cache-path"):
            fill_cache(config(text_file, tmp_path / "file"))

    def test_default_folder_follows_xdg(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert DataConfig().cache_folder() == tmp_path / "sdp4bit"
        assert DataConfig(cache_dir=Path("x")).cache_folder() == Path("x")

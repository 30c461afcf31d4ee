"""Megatron's .bin/.idx files: bytes as documented, damage found and named. Layer: no process."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens, token_dtype
from sdp4bit_lab.pretrain.data.indexed_writer import IndexedWriter
from tests.lab.pretrain.data.indexed_corpora import layout, write_corpus

DOCUMENTS = [[[5, 6, 7]], [], [[1], [2, 3]], [[9, 8]], []]
"""Documents of one, no and two sequences; the last one empty."""


SMALL = np.dtype("<u2")


def write(prefix: Path, documents: list[list[list[int]]], *, dtype: np.dtype = SMALL) -> None:
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.add(document)
        writer.finish()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The prefix of files that hold the documents."""
    write(tmp_path / "x", DOCUMENTS)
    return tmp_path / "x"


def random_documents(count: int, *, vocabulary: int, seed: int) -> list[list[list[int]]]:
    random = np.random.default_rng(seed)
    return [
        [
            random.integers(0, vocabulary, random.integers(1, 30)).tolist()
            for _ in range(random.integers(0, 4))
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocabulary", [300, 65499, 65500, 200_000])
def test_the_bytes_are_those_of_the_layout(tmp_path, vocabulary):
    dtype = token_dtype(vocabulary)
    assert dtype == (np.uint16 if vocabulary < 65500 else np.int32)
    for documents in (DOCUMENTS, random_documents(50, vocabulary=vocabulary, seed=vocabulary), []):
        prefix = tmp_path / f"corpus{len(documents)}"
        write(prefix, documents, dtype=dtype)
        data, index = layout(documents, code=8 if dtype == np.uint16 else 4)
        assert Path(f"{prefix}.bin").read_bytes() == data
        assert Path(f"{prefix}.idx").read_bytes() == index


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_bytes_are_megatrons(tmp_path):
    megatron = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is missing"
    )
    import torch

    for vocabulary in (300, 65499, 65500):
        documents = random_documents(40, vocabulary=vocabulary, seed=vocabulary)
        theirs, ours = tmp_path / f"theirs{vocabulary}", tmp_path / f"ours{vocabulary}"
        builder = megatron.IndexedDatasetBuilder(
            f"{theirs}.bin", dtype=megatron.DType.optimal_dtype(vocabulary)
        )
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            builder.add_document(torch.tensor(tokens), [len(sequence) for sequence in document])
        builder.finalize(f"{theirs}.idx")
        write(ours, documents, dtype=token_dtype(vocabulary))
        for suffix in (".bin", ".idx"):
            assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
        read = megatron.IndexedDataset(str(ours))
        assert [read[i].tolist() for i in range(len(read))] == [s for d in documents for s in d]


def test_documents_are_read_back(corpus):
    corpus = IndexedTokens(corpus)
    corpus.check()
    assert (corpus.documents, corpus.sequences, corpus.tokens) == (5, 4, 8)
    assert corpus.lengths(0, 5).tolist() == [3, 0, 3, 2, 0]
    starts = corpus.starts(np.arange(6)).tolist()
    read = [corpus.read(a, b - a).tolist() for a, b in pairwise(starts)]
    assert read == [[5, 6, 7], [], [1, 2, 3], [9, 8], []]


class TestWriter:
    def test_nothing_loads_before_the_end_and_nothing_is_left_of_a_failure(self, tmp_path):
        def write_and_fail() -> None:
            with IndexedWriter(tmp_path / "x", dtype=SMALL) as writer:
                writer.add([[1]])
                assert [path.name for path in tmp_path.iterdir()] == ["x.bin.partial"]
                raise RuntimeError("stop")

        with pytest.raises(RuntimeError, match="stop"):
            write_and_fail()
        assert list(tmp_path.iterdir()) == []

    def test_what_a_killed_writer_left_is_overwritten(self, tmp_path):
        (tmp_path / "x.bin.partial").write_bytes(b"half a token")
        write(tmp_path / "x", DOCUMENTS)
        assert IndexedTokens(tmp_path / "x").tokens == 8
        assert not list(tmp_path.glob("*.partial"))

    def test_two_writers_do_not_mix(self, tmp_path):
        with IndexedWriter(tmp_path / "x", dtype=SMALL) as writer:
            with pytest.raises(SettingError, match=r"x\.bin\.partial is being written by another process"):
                IndexedWriter(tmp_path / "x", dtype=SMALL)
            writer.finish()

    def test_files_are_replaced_if_asked_for_and_never_a_mix(self, tmp_path, monkeypatch):
        """Killed between any two renames, the prefix holds the new pair or does not load."""
        renames = []

        def record(self: Path, target: Path) -> Path:
            renames.append((self.name, target.name, (tmp_path / "x.idx").exists()))
            os.rename(self, target)
            return target

        prefix = write_corpus(tmp_path / "x", [[1, 2]])
        with pytest.raises(SettingError, match=r"x\.bin exists: remove it, or give --overwrite"):
            IndexedWriter(prefix, dtype=SMALL)
        monkeypatch.setattr(Path, "rename", record)
        with IndexedWriter(prefix, dtype=SMALL, overwrite=True) as writer:
            writer.finish()
        assert renames == [("x.bin.partial", "x.bin", False), ("x.idx.partial", "x.idx", False)]
        assert IndexedTokens(prefix).tokens == 0

    def test_an_unwritable_place_and_a_full_disk_are_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SettingError, match=r"cannot write .*file/x\.bin\.partial"):
            IndexedWriter(tmp_path / "file" / "x", dtype=SMALL)
        writer = IndexedWriter(tmp_path / "x", dtype=SMALL)
        writer._file.close()
        writer._file = Path("/dev/full").open("ab")  # noqa: SIM115
        writer.add([[1]])
        with pytest.raises(SettingError, match=r"cannot write .*No space left"):
            writer.finish()
        assert not (tmp_path / "x.idx").exists()


def number(index: bytearray, offset: int, form: str, value: int) -> None:
    struct.pack_into(form, index, offset, value)


# Four sequences and six boundaries: lengths from 34, pointers from 50, boundaries from 82, end at 130.
DAMAGE = {
    "magic": (lambda b: b.__setitem__(slice(0, 3), b"XYZ"), r"magic: the file starts with b'XYZDIDX"),
    "version": (lambda b: number(b, 9, "<Q", 7), r"version: 7 instead of 1"),
    "unknown dtype": (lambda b: number(b, 17, "<B", 77), r"dtype: code 77 is not an integer type"),
    "float dtype": (lambda b: number(b, 17, "<B", 6), r"dtype: code 6 is not"),
    "sequence count": (lambda b: number(b, 18, "<Q", 1 << 60), r"arrays: 1152921504606846976 sequences"),
    "no boundaries": (lambda b: number(b, 26, "<Q", 0), r"document count: 0 boundaries"),
    "cut header": (lambda b: b.__delitem__(slice(20, None)), r"header: the file has only 20 of 34"),
    "cut arrays": (lambda b: b.__delitem__(slice(100, None)), r"need 130 bytes .* the file has 100"),
    "length": (lambda b: number(b, 38, "<i", 2), r"sequence pointers: number 2 is 8; it must be the bytes"),
    "negative": (lambda b: number(b, 34, "<i", -3), r"sequence lengths: number 0 is -3; it must be at lea"),
    "boundary": (lambda b: number(b, 98, "<q", 9), r"document indices: number 2 is 9; it must be ascending"),
    "first boundary": (lambda b: number(b, 82, "<q", 1), r"document indices: number 0 is 1, not 0"),
    "last boundary": (lambda b: number(b, 122, "<q", 5), r"document indices: number 5 is 5"),
}


class TestDamage:
    @pytest.mark.parametrize("name", DAMAGE)
    def test_the_file_and_the_field_are_named(self, corpus, tmp_path, name):
        edit, message = DAMAGE[name]
        index = bytearray((tmp_path / "x.idx").read_bytes())
        assert len(index) == 130
        edit(index)
        (tmp_path / "x.idx").write_bytes(index)
        with pytest.raises(SettingError, match=message) as error:
            IndexedTokens(tmp_path / "x").check()
        assert str(tmp_path / "x.") in str(error.value)

    def test_every_flipped_bit_of_an_index_is_found(self, corpus, tmp_path):
        index = (tmp_path / "x.idx").read_bytes()
        unnoticed = []
        for bit in range(8 * len(index)):
            damaged = bytearray(index)
            damaged[bit // 8] ^= 1 << bit % 8
            (tmp_path / "x.idx").write_bytes(damaged)
            try:
                IndexedTokens(tmp_path / "x").check()
            except SettingError:
                continue
            unnoticed.append(bit)
        # The boundaries 0, 1, 1, 3, 4, 4 may move where they stay ascending: nothing else tells them.
        assert unnoticed == [8 * 90, 8 * 98 + 1, 8 * 106, 8 * 106 + 1]

    def test_tokens_that_are_cut_off_or_too_many(self, corpus, tmp_path):
        for size in (0, 1, 15, 17, 4096):
            (tmp_path / "x.bin").write_bytes(bytes(size))
            with pytest.raises(SettingError, match=rf"x\.bin: size: the file has {size} bytes, .* 8 tokens"):
                IndexedTokens(tmp_path / "x")

    def test_a_legal_index_in_another_order_or_with_gaps_is_named(self, tmp_path):
        data, index = layout([[[1, 2]], [[3]], [[4, 5, 6]]])
        for lengths, pointers in (([1, 3, 2], [4, 6, 0]), ([3, 2, 1], [6, 0, 4]), ([2, 0, 3], [0, 0, 6])):
            (tmp_path / "x.bin").write_bytes(data)
            changed = bytearray(index)
            struct.pack_into("<3i3q", changed, 34, *lengths, *pointers)
            (tmp_path / "x.idx").write_bytes(changed)
            with pytest.raises(
                SettingError, match=r"x\.idx: sequence pointers: .* in another order or with gaps"
            ):
                IndexedTokens(tmp_path / "x").check()

    def test_missing_files_and_full_names(self, tmp_path):
        write_corpus(tmp_path / "x", [[1, 2]])
        with pytest.raises(SettingError, match=r"x\.idx: remove \.idx"):
            IndexedTokens(tmp_path / "x.idx")
        (tmp_path / "x.idx").unlink()
        with pytest.raises(SettingError, match=r"x\.idx: no such file, but .*x\.bin exists"):
            IndexedTokens(tmp_path / "x")
        with pytest.raises(SettingError, match=r"y\.idx: no such file$"):
            IndexedTokens(tmp_path / "y")

    def test_modes_of_multimodal_data_are_let_pass(self, corpus, tmp_path):
        with (tmp_path / "x.idx").open("ab") as index:
            index.write(bytes(4))
        IndexedTokens(corpus).check()


def test_a_fingerprint_changes_with_any_byte_of_small_files(tmp_path):
    prefix = write_corpus(tmp_path / "x", [[1, 2, 3], [4]])
    before = IndexedTokens(prefix).fingerprint()
    copy = write_corpus(tmp_path / "copy", [[1, 2, 3], [4]])
    assert IndexedTokens(copy).fingerprint() == before
    write_corpus(prefix, [[1, 2, 3], [5]])
    assert IndexedTokens(prefix).fingerprint() != before

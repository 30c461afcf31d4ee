"""Recognized inputs: contents, names and compressions, each read or refused by name. Layer: no process."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import sqlite3
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.documents import find_files, read_documents
from tests.lab.pretrain.data.indexed_corpora import layout

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

JSON_NAMES = ("c.jsonl", "c.json", "c.ndjson", "c.jsonlines", "c.JSONL", "c.jsonl.1")
OTHER_NAMES = ("part-00000", "c.txt", "c.bin", "xaa")
NAMES_OF_BINARIES = ("c.parquet", "c.gz", "c.zst", "c.xz")
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.compress,
}
LINES = b'{"text": "one"}\n\n{"text": "two", "id": 3}\n'
PAGE = Path(__file__).parents[4] / "docs/data.md"


def table(texts: list[object]) -> pyarrow.Table:
    return pyarrow.table({"text": texts})


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def archive(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())


def zipped(file: io.BytesIO) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")


def arrow_stream(file: io.BytesIO) -> None:
    with pyarrow.ipc.new_stream(file, table(["a"]).schema) as stream:
        stream.write_table(table(["a"]))


def arrow_file(file: io.BytesIO) -> None:
    with pyarrow.ipc.new_file(file, table(["a"]).schema) as stream:
        stream.write_table(table(["a"]))


def database() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (x)")
    return connection.serialize() if sys.version_info >= (3, 11) else b"SQLite format 3\0"


TOKENS = np.array([464, 2068, 13, 50256], np.uint16).tobytes()
# Content -> its bytes and the outcome, which is the same for every name and compression.
CONTENTS: dict[str, tuple[bytes, int | str]] = {
    "JSON lines": (LINES, 2),
    "JSON lines after a byte order mark": (b"\xef\xbb\xbf" + LINES, 2),
    "JSON lines after a cut line": (b'e": "zero"}\n' + LINES * 2, r"line 1: not JSON"),
    "a JSON array": (b'[{"text": "one"}]', "Each line must be one object; `jq"),
    "JSON over several lines": (b'{\n  "text": "one"\n}\n', "Each line must be one object; `jq"),
    "nothing": (b"", 0),
    "a tar archive": (written(archive), "is a tar archive"),
    "a zip archive": (written(zipped), "is a zip archive, as torch.save and numpy.savez write"),
    "a NumPy array": (written(lambda file: np.save(file, np.arange(9))), "is a NumPy array"),
    "Arrow's stream": (written(arrow_stream), r"is an Arrow file.*to_parquet"),
    "Arrow's file": (written(arrow_file), r"is an Arrow file.*to_parquet"),
    "an SQLite database": (database(), "is an SQLite database"),
    "tokens of llm.c": (
        struct.pack("<256i", 20240520, 1, 4, *[0] * 253) + TOKENS,
        "is a token file of llm.c",
    ),
    "tokens of nanoGPT": (TOKENS, "is not text, because byte 5 is NUL: give the texts"),
    "tokens of Megatron": (layout([[[1, 2]]])[0], "is not text.*the name without .bin"),
    "an index of Megatron": (layout([[[1, 2]]])[1], "is an index of Megatron's tokens"),
    "safetensors": (safetensors.numpy.save({"x": np.zeros(3)}), "is a safetensors file"),
    "a pickle": (pickle.dumps([1, 2]), "is a pickle"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a picture, sound or film"),
    "JSON lines with NUL": (LINES + b'\0\0{"text": "three"}\n', "line 4: a NUL byte, so the file is damaged"),
    "UTF-16 text": ("text".encode("utf-16"), "is UTF-16 or UTF-32 text.*iconv"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
}


def outcome(path: Path) -> int | str:
    try:
        find_files([str(path)])
        return len(list(read_documents(path)))
    except SettingError as error:
        message = str(error)
    assert str(path) in message and "\n" not in message
    return message


def assert_outcome(path: Path, expected: int | str) -> None:
    found = outcome(path)
    if isinstance(expected, int):
        assert found == expected, path
    else:
        assert isinstance(found, str) and re.search(expected, found), (path, found)


@pytest.mark.parametrize("content", CONTENTS)
def test_a_content_is_the_same_by_every_name_and_compression(content: str, tmp_path: Path) -> None:
    data, expected = CONTENTS[content]
    for compression, compress in COMPRESSIONS.items():
        for name in (*JSON_NAMES, *OTHER_NAMES, *NAMES_OF_BINARIES):
            (tmp_path / name).write_bytes(compress(data))
            assert_outcome(tmp_path / name, expected)
            inside = f" inside {compression}: "
            if compression and isinstance(expected, str) and expected.startswith("is a"):
                assert inside in str(outcome(tmp_path / name))


@pytest.mark.parametrize("name", [*JSON_NAMES, *OTHER_NAMES, *NAMES_OF_BINARIES])
def test_text_and_parquet_by_every_name_and_compression(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    for compression, compress in COMPRESSIONS.items():
        expected: int | str = 2
        if name in JSON_NAMES:
            expected = "line 1: not JSON"
        elif name == "c.parquet" or (name in NAMES_OF_BINARIES and not compression):
            expected = f"is text{f' inside {compression}' * bool(compression)}, in spite of its name"
        path.write_bytes(compress(b"[[Wiki]] text<|endoftext|>another\n"))
        assert_outcome(path, expected)
        path.write_bytes(compress("caf\xe9".encode("latin-1")))
        is_refused = expected == 2
        assert_outcome(path, "is not UTF-8 text" if is_refused else expected)
        path.write_bytes(compress(written(lambda file: parquet.write_table(table(["one", "two"]), file))))
        assert_outcome(path, f"is Parquet inside {compression}: decompress it" if compression else 2)
        if compression:
            path.write_bytes(gzip.compress(compress(LINES)))
            assert_outcome(path, f"is {compression} inside gzip: decompress it once")


def test_the_page_lists_every_content() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", page, re.MULTILINE))
    missing = {*CONTENTS, "text", "Parquet"} - rows.keys()
    assert not missing
    for content, (_, expected) in CONTENTS.items():
        if isinstance(expected, str):
            assert "refused" in rows[content]


def test_tables_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("c.csv", "c.TSV", "c.csv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"id,text\n") if name.endswith("gz") else b"id,text\n")
        assert_outcome(tmp_path / name, "is a table.*: convert it to JSON lines or Parquet")


def test_a_nul_behind_the_head_is_found(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_bytes(b"words " * 20_000 + b"\0")
    assert_outcome(tmp_path / "c.txt", "byte 120000 is NUL")


def test_the_same_documents_are_skipped_with_the_same_numbers(tmp_path: Path) -> None:
    texts: list[object] = ["one", None, "a", ["b", "c"], "\ud800", "two"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for line in ('{"text": "a\tb"}', '{"text": "cut', '{"text": 3}', '{"text": "first", "text": "last"}'):
        lines += f"{line}\n"
    found = []
    for number, compress in enumerate(COMPRESSIONS.values()):
        path = tmp_path / f"{number}"
        path.write_bytes(compress(lines.encode()))
        skipped: list[str] = []
        documents = list(read_documents(path, skip=lambda error, to=skipped: to.append(str(error))))
        found.append((documents, [text.removeprefix(str(path)) for text in skipped]))
    assert all(each == found[0] for each in found)
    assert found[0][0] == [[["one"]], [["a"]], [["b", "c"]], [["two"]], [["last"]]]
    numbers = [int(re.match(r", line (\d+): ", text)[1]) for text in found[0][1]]
    assert numbers == [2, 5, 7, 8, 9]


def test_rows_of_parquet_are_read_like_lines(tmp_path: Path) -> None:
    path, skipped = tmp_path / "c", []
    invalid = pyarrow.array([b"one", b"\xff", None, b"two"]).view(pyarrow.string())
    lists = pyarrow.array([["a", "b"], [], ["c"], ["d"]])
    parquet.write_table(pyarrow.table([lists, invalid, invalid], names=["l", "text", "id"]), path)
    documents = list(read_documents(path, keys=("text", "l"), skip=lambda error: skipped.append(str(error))))
    assert documents == [[["one"], ["a", "b"]], [["two"], ["d"]]]
    assert [text.removeprefix(str(path)).split(":")[0] for text in skipped] == [", row 2", ", row 3"]
    assert "is not valid text" in skipped[0] and "NoneType, not a string" in skipped[1]
    with pytest.raises(SettingError, match=r"row 1: no \"words\" among 'l', 'text', 'id'"):
        list(read_documents(path, keys=("words",)))
    # Two columns or members of one name: the last one.
    parquet.write_table(pyarrow.table([["first"], ["last"]], names=["text", "text"]), path)
    assert list(read_documents(path)) == [[["last"]]]
    parquet.write_table(table([]), path)
    assert list(read_documents(path)) == []


def test_several_frames_are_read_and_a_cut_one_is_an_error(tmp_path: Path) -> None:
    for compression, compress in COMPRESSIONS.items():
        path = tmp_path / (compression or "plain")
        path.write_bytes(compress(LINES) + compress(LINES))
        assert outcome(path) == 4, compression
        if compression:
            # The cut is between two lines, so that no line is invalid.
            path.write_bytes(compress(LINES) + compress(LINES * 999)[:-3])
            found: list[SettingError] = []
            with pytest.raises(SettingError, match="cannot be read: "):
                list(read_documents(path, skip=found.append))
            assert not found


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(table(["a"]), tmp_path / "a")
    (tmp_path / "b").write_bytes(zstandard.compress(LINES))
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    for name in "ab":
        assert_outcome(
            tmp_path / name, r'needs the package pyarrow: pip install "\.\[data\]" in the checkout'
        )

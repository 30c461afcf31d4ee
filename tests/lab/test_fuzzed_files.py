"""Damaged input files of every kind: data, or an error that names the file, in seconds. Layer: no process."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("rich")

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.plan.config import PROBE_FORMAT, ClusterConfig
from sdp4bit_lab.pretrain.data.corpus import read_corpus
from sdp4bit_lab.pretrain.data.documents import read_documents
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer, load_tokenizer
from sdp4bit_lab.report.runs import read_run
from tests.lab.compare.synthetic_runs import finished
from tests.lab.pretrain.data.indexed_corpora import layout, write_vocabulary

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
fuzzed = settings(
    deadline=5000,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return the content with bytes replaced, removed or inserted, cut off, or other content."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=50)) or b"[" * 200_000
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.sampled_from([0, 1, 2, 8, len(content)])))
        content = content[:start] + draw(st.binary(max_size=8)) + content[stop:]
    return content


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """Return a JSON value with one member at any depth replaced or removed."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(ANY_JSON)
    if isinstance(value, list):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(changed(value[place])), *value[place + 1 :]]
    name = draw(st.sampled_from(sorted(value)))
    rest = {key: member for key, member in value.items() if key != name}
    return rest if draw(st.integers(0, 5)) == 0 else {**rest, name: draw(changed(value[name]))}


def damaged_json(value: Any) -> st.SearchStrategy[bytes]:
    return damaged(json.dumps(value).encode()) | changed(value).map(lambda other: json.dumps(other).encode())


def read_or_named(read: Callable[[], object], *names: object) -> None:
    """Call a reader; the only error is SettingError, in one line with the name of one of the files."""
    message = str(names[0])
    try:
        read()
    except SettingError as error:
        message = str(error)
    assert any(str(name) in message for name in names), message
    assert "\n" not in message


LINES = b'{"text": "one two"}\n{"text": ["a", "b"], "id": 3}\n\n{"text": ""}\n'


@fuzzed
@given(content=damaged(LINES), suffix=st.sampled_from(["jsonl", "json", "txt"]))
def test_documents(content: bytes, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    read_or_named(lambda: list(read_documents(path)), path)
    read_or_named(lambda: list(read_corpus([path])), path)
    skipped: list[SettingError] = []
    read_or_named(lambda: list(read_documents(path, skip=skipped.append)), path)
    assert all(f"{path}, line " in str(error) for error in skipped)


@fuzzed
@given(data=st.data())
def test_tokens_and_their_index(data: st.DataObject, tmp_path: Path) -> None:
    tokens, index = layout([[[1, 2], [3]], [], [[4, 5, 6]]])
    if data.draw(st.booleans()):
        tokens = data.draw(damaged(tokens))
    place = data.draw(st.integers(0, (len(index) - 8) // 8)) * 8 + 2
    number = data.draw(st.sampled_from([0, 1, 3, 9, -1, 1 << 31, 1 << 62]))
    index = data.draw(
        st.just(index[:place] + struct.pack("<q", number) + index[place + 8 :]) | damaged(index)
    )
    (tmp_path / "x.bin").write_bytes(tokens)
    (tmp_path / "x.idx").write_bytes(index)

    def read() -> None:
        corpus = IndexedTokens(tmp_path / "x")
        corpus.check()
        starts = corpus.starts(np.arange(corpus.documents + 1))
        assert len(corpus.read(0, corpus.tokens)) == corpus.tokens == starts[-1]

    read_or_named(read, tmp_path / "x.idx", tmp_path / "x.bin")


TOKENIZER = BytePairTokenizer.train(["some words to learn from"] * 3, vocabulary_size=270)


@fuzzed
@given(data=st.data())
def test_a_tokenizer_json_and_its_configuration(data: st.DataObject, tmp_path: Path) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    TOKENIZER.save(path)
    config.write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged_json(json.loads(path.read_text()))))
    else:
        config.write_bytes(data.draw(damaged_json(json.loads(config.read_text()))))

    def read() -> None:
        tokenizer = load_tokenizer(vocab_file=None, merge_file=None, tokenizer_model=path, eod_token=None)
        tokenizer.encode(["some words"])
        tokenizer.count_spelled("some words")

    read_or_named(read, path, config, "the tokenizer")


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return [path.read_bytes() for path in write_vocabulary(tmp_path_factory.mktemp("gpt2"), size=300)]


@fuzzed
@given(data=st.data())
def test_a_vocabulary_and_merges(data: st.DataObject, gpt2_files: list[bytes], tmp_path: Path) -> None:
    vocabulary, merges = gpt2_files
    paths = tmp_path / "vocab.json", tmp_path / "merges.txt"
    paths[0].write_bytes(data.draw(st.just(vocabulary) | damaged(vocabulary)))
    paths[1].write_bytes(data.draw(st.just(merges) | damaged(merges)))

    def read() -> None:
        tokenizer = load_tokenizer(
            vocab_file=paths[0], merge_file=paths[1], tokenizer_model=None, eod_token=None
        )
        tokenizer.encode(["some words"])

    read_or_named(read, paths[0], "the tokenizer")


PROBE = {
    "format": PROBE_FORMAT, "name": "measured", "nodes": 2, "devices_per_node": 4,
    "inter_bandwidth": 1e10, "intra_bandwidth": 1e11, "latency": 1e-5, "quantization_bandwidth": 1e12,
}  # fmt: skip


@fuzzed
@given(content=damaged_json(PROBE))
def test_a_probe(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    read_or_named(lambda: ClusterConfig(probe=path, device_tflops=10.0).resolve(model="125M"), path)


@fuzzed
@given(data=st.data())
def test_the_files_of_runs(data: st.DataObject, tmp_path: Path) -> None:
    events = [{"event": "train", "step": 1, "loss": 2.0}, {"event": "validation", "step": 1, "loss": None}]
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    (tmp_path / "metrics.jsonl").write_bytes(data.draw(damaged(lines)))
    (tmp_path / "config.json").write_bytes(
        data.draw(damaged_json({"seed": 1, "parallel": {"ranks_per_node": 2}}))
    )

    def read() -> None:
        run = read_run(tmp_path, name="run")
        assert run.ranks and run.label != "" and run.spikes() is not None and run.seed != ""

    read_or_named(read, tmp_path)
    finished("baseline", 1, 2.0).write(tmp_path)
    result = tmp_path / "result.json"
    result.write_bytes(data.draw(damaged_json(json.loads(result.read_bytes()))))
    read_or_named(lambda: FinishedRun.read(tmp_path), result)

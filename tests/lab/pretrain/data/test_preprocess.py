"""`sdp4bit preprocess`: the reference's command, inputs, errors and kills."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data import preprocess as command
from sdp4bit_lab.pretrain.data.config import DataConfig, TokenizerConfig
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.preprocess import PreprocessConfig, preprocess
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer
from tests.lab.common.launch.started_ranks import COMMAND, outcome_of, wait_until
from tests.lab.pretrain.data.indexed_corpora import layout, library_texts, write_vocabulary
from tests.lab.pretrain.tiny_runs import small, train_here
from tests.ranks import run_ranks

TEXTS = [*library_texts(6), "", "<|endoftext|> is text", "Ünïcode, 漢字 and 😀\u3000!", "  \n\n x"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def reference(vocabulary: tuple[Path, Path]) -> tokenizers.Tokenizer:
    """Return the tokenizer as the library builds it, nothing of ours."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*map(str, vocabulary)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def expected(reference: tokenizers.Tokenizer, documents: Sequence[Sequence[str]]) -> tuple[bytes, bytes]:
    """Return the two files for documents of sentences, with the end of each document."""
    end = reference.token_to_id("<|endoftext|>")
    encoded = []
    for sentences in documents:
        ids = [reference.encode(sentence, add_special_tokens=False).ids for sentence in sentences]
        ids = [tokens for tokens in ids if tokens]
        encoded.append([*ids[:-1], [*ids[-1], end]] if ids else [])
    return layout(encoded)


def write_lines(path: Path, texts: Sequence[object], *, key: str = "text") -> Path:
    content = "".join(json.dumps({key: text, "id": number}) + "\n" for number, text in enumerate(texts))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    elif path.suffix == ".zst":
        path.write_bytes(pytest.importorskip("zstandard").compress(content.encode()))
    elif path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({key: list(texts)}), path, row_group_size=3)
    else:
        path.write_text(content)
    return path


def run(vocabulary: tuple[Path, Path], *inputs: Path | str, to: Path, **options: object) -> None:
    preprocess(
        PreprocessConfig(
            input=tuple(map(str, inputs)),
            output_prefix=to,
            vocab_file=vocabulary[0],
            merge_file=vocabulary[1],
            append_eod=True,
            **options,
        )
    )


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


class TestCommand:
    def test_the_command_of_the_reference_works(self, vocabulary, reference, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        write_lines(tmp_path / "pile.jsonl", TEXTS)
        arguments = f"""preprocess
            --input  pile.jsonl
            --split  train
            --columns  text
            --output-prefix  pile
            --vocab-file  {vocabulary[0]}
            --merge-file  {vocabulary[1]}
            --dataset-impl  mmap
            --tokenizer-type  GPT2BPETokenizer
            --append-eod
            --torch-backend  mpi
            --workers 1"""
        assert main(arguments.split()) == 0
        assert files(tmp_path / "pile_text_document") == expected(reference, [[text] for text in TEXTS])
        said = capsys.readouterr().err
        assert "--split train has no effect here" in said and "--torch-backend mpi has no effect" in said
        assert re.search(r"^[\d,]+ tokens in .* tokens/s", said, re.MULTILINE)
        # Of 10 documents, one is empty.
        assert said.splitlines()[-1] == (
            "10 documents, 0 invalid and left out; <|endoftext|> ends 9 of them; "
            "1 spelled special tokens stayed text (--parse-special-tokens)"
        )

    def test_batches_keep_the_order(self, vocabulary, reference, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(command, "_ENCODED_AT_ONCE", 20_000)
        texts = TEXTS * 4
        source = write_lines(tmp_path / "x.jsonl", texts)
        run(vocabulary, source, to=tmp_path / "x", log_interval=16)
        assert files(tmp_path / "x_text_document") == expected(reference, [[text] for text in texts])
        lines = re.findall(r"^(\d+) documents, .* tokens, .*/s$", capsys.readouterr().err, re.M)
        assert [int(count) // 16 for count in lines] == [1, 2]

    @pytest.mark.gloo
    def test_training_reads_what_it_wrote(self, vocabulary, tmp_path):
        run(vocabulary, write_lines(tmp_path / "x.jsonl", library_texts(20)), to=tmp_path / "x")
        data = DataConfig(
            data_path=(tmp_path / "x_text_document",),
            split="8,1,1",
            vocab_file=vocabulary[0],
            merge_file=vocabulary[1],
            eod_mask_loss=True,
        )
        config = small(tmp_path, tmp_path / "run", data=data)
        first, second = run_ranks(train_here, 2, config)
        losses = [[step.loss for step in result.steps] for (result,) in (first, second)]
        assert losses[0] == losses[1]
        assert len(losses[0]) == config.training.steps
        assert np.mean(losses[0][-2:]) < losses[0][0]
        assert first[0].test_loss == second[0].test_loss < losses[0][0]
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert (lines[-1]["event"], lines[-1]["loss"]) == ("test", first[0].test_loss)

    def test_a_tokenizer_json_and_its_end_of_text(self, tmp_path):
        tokenizer = BytePairTokenizer.train(TEXTS, vocabulary_size=300)
        tokenizer.save(tmp_path / "tokenizer.json")
        named = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).id_to_token(270)
        for eos in (named, {"content": named}):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
            assert TokenizerConfig(tokenizer_model=tmp_path).tokenizer.end_of_text == 270
        (tmp_path / "tokenizer_config.json").unlink()
        assert TokenizerConfig(tokenizer_model=tmp_path, eod_token=named).tokenizer.end_of_text == 270
        source = write_lines(tmp_path / "x.jsonl", TEXTS[:3])
        config = PreprocessConfig(
            input=(str(source),),
            output_prefix=tmp_path / "x",
            tokenizer_model=tmp_path,
            append_eod=True,
        )
        preprocess(config)
        data, _ = layout([[tokens] for tokens in tokenizer.encode_documents(TEXTS[:3])])
        assert files(tmp_path / "x_text_document")[0] == data


class TestSpecialTokens:
    TEXT = "was <s>10</s>, now <|im_end|> 8"

    def write_tokenizer(self, folder: Path, *, named: str, is_special: bool) -> tokenizers.Tokenizer:
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(
            special_tokens=["<s>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(["a"], trainer)
        tokenizer.add_tokens([tokenizers.AddedToken("</s>", special=is_special)])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        return tokenizer

    def last_line(self, folder: Path, capsys, **options: bool) -> tuple[list[int], str]:
        source = write_lines(folder / "x.jsonl", [self.TEXT])
        preprocess(
            PreprocessConfig(
                input=(str(source),),
                output_prefix=folder / "x",
                tokenizer_model=folder,
                overwrite=True,
                **options,
            )
        )
        corpus = IndexedTokens(folder / "x_text_document")
        return corpus.read(0, corpus.tokens).tolist(), capsys.readouterr().err.splitlines()[-1]

    @pytest.mark.parametrize(("named", "is_special"), [("</s>", True), ("</s>", False), ("<|im_end|>", True)])
    def test_a_corpus_cannot_spell_them(self, tmp_path, capsys, named, is_special):
        tokenizer = self.write_tokenizer(tmp_path, named=named, is_special=is_special)
        tokens, line = self.last_line(tmp_path, capsys, append_eod=True)
        control = {tokenizer.token_to_id(name) for name in ("<s>", "</s>", "<|im_end|>")}
        assert not control & set(tokens[:-1]) and tokens[-1] == tokenizer.token_to_id(named)
        assert len(tokens) == len(self.TEXT) + 1  # nothing is merged
        assert line == (
            f"1 documents, 0 invalid and left out; {named} ends 1 of them; "
            "3 spelled special tokens stayed text (--parse-special-tokens)"
        )

    def test_they_are_parsed_if_asked(self, tmp_path, capsys):
        tokenizer = self.write_tokenizer(tmp_path, named="</s>", is_special=True)
        tokens, line = self.last_line(tmp_path, capsys, parse_special_tokens=True)
        assert tokens == tokenizer.encode(self.TEXT, add_special_tokens=False).ids
        assert tokenizer.token_to_id("</s>") in tokens
        assert "</s> ends 0 of them; 3 spelled special tokens became tokens" in line


class TestTrainedTokenizer:
    def test_it_is_written_beside_the_tokens_and_is_the_one_that_wrote_them(self, tmp_path, capsys):
        source = write_lines(tmp_path / "x.jsonl", TEXTS)
        arguments = [
            "preprocess",
            "--input",
            str(source),
            "--output-prefix",
            str(tmp_path / "x"),
            "--append-eod",
        ]
        assert main([*arguments, "--train-tokenizer", "400"]) == 0
        trained = BytePairTokenizer.train(TEXTS, vocabulary_size=400)
        path = tmp_path / "x_tokenizer.json"
        assert BytePairTokenizer.load(path).digest() == trained.digest()
        before = files(tmp_path / "x_text_document")
        assert main([*arguments, "--tokenizer-model", str(path), "--overwrite"]) == 0
        assert files(tmp_path / "x_text_document") == before
        assert DataConfig(data_path=(tmp_path / "x_text_document",), tokenizer_model=path).vocabulary == 400
        capsys.readouterr()
        assert main([*arguments, "--train-tokenizer", "400"]) == 2
        assert "x_tokenizer.json exists: remove it" in capsys.readouterr().err

    def test_a_wrong_size_is_named_and_a_failure_leaves_no_tokenizer(self, tmp_path):
        source = write_lines(tmp_path / "x.jsonl", [*TEXTS, 3])
        options = {"input": (str(source),), "output_prefix": tmp_path / "x"}
        with pytest.raises(SettingError, match="--train-tokenizer 256 must be between 257 and"):
            PreprocessConfig(**options, train_tokenizer=256)
        with pytest.raises(SettingError, match=r"give a tokenizer: .* --train-tokenizer"):
            PreprocessConfig(**options)
        with pytest.raises(SettingError, match=r"line 11: .* is int"):
            preprocess(PreprocessConfig(**options, train_tokenizer=300))
        assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


class TestInputs:
    def test_invalid_documents_are_skipped_with_their_lines(self, vocabulary, reference, tmp_path, capsys):
        lines = ['{"text": "one"}', "{", '{"text": 3}', "", '{"no": ""}', '{"text": "two"}', *["["] * 20]
        (tmp_path / "x.jsonl").write_text("\n".join(lines))
        with pytest.raises(
            SettingError, match=r"line 2: not JSON: .*Nothing is written; --skip-invalid leaves"
        ):
            run(vocabulary, tmp_path / "x.jsonl", to=tmp_path / "x")
        run(vocabulary, tmp_path / "x.jsonl", to=tmp_path / "x", skip_invalid=True)
        assert files(tmp_path / "x_text_document") == expected(reference, [["one"], ["two"]])
        said = capsys.readouterr().err
        assert re.findall(r"^skipped .*x\.jsonl, line (\d+): ", said, re.MULTILINE) == [
            *("2", "3", "5"), *map(str, range(7, 14))
        ]  # fmt: skip
        assert "2 documents, 23 invalid and left out; " in said

    def test_an_interrupted_or_failed_command_keeps_the_files_before_it(self, vocabulary, tmp_path):
        run(vocabulary, write_lines(tmp_path / "x.jsonl", TEXTS), to=tmp_path / "x")
        before = files(tmp_path / "x_text_document")
        (tmp_path / "x.jsonl").write_text('{"text": "new"}\n[')
        with pytest.raises(SettingError, match="line 2"):
            run(vocabulary, tmp_path / "x.jsonl", to=tmp_path / "x", overwrite=True)
        assert files(tmp_path / "x_text_document") == before

    def test_a_byte_order_mark_is_no_text(self, vocabulary, reference, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
        (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
        run(vocabulary, tmp_path / "a.txt", tmp_path / "b.jsonl", to=tmp_path / "x")
        assert files(tmp_path / "x_text_document") == expected(reference, [["one"], ["two"]])

    def test_an_array_is_explained_and_any_legal_json_is_read(self, vocabulary, reference, tmp_path):
        hint = r"Each line must be one object; `jq -c '\.\[\]' FILE"
        for content in ('[\n  {"text": "x"}\n]', '[{"text": "x"}]', '{\n  "text": "x"\n}'):
            (tmp_path / "a.json").write_text(content)
            with pytest.raises(SettingError, match=rf"a\.json, line 1: .*{hint}"):
                run(vocabulary, tmp_path / "a.json", to=tmp_path / "a")
        (tmp_path / "a.json").write_text(f'{{"id": {"9" * 5000}, "x": NaN, "text": "one"}}\n')
        run(vocabulary, tmp_path / "a.json", to=tmp_path / "a")
        assert files(tmp_path / "a_text_document") == expected(reference, [["one"]])

    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".parquet"])
    def test_every_format_gives_the_same_files(self, vocabulary, reference, tmp_path, suffix):
        path = write_lines(tmp_path / f"x{suffix}", TEXTS)
        run(vocabulary, path, to=tmp_path / "out" / "x")
        assert files(tmp_path / "out" / "x_text_document") == expected(reference, [[t] for t in TEXTS])

    def test_plain_text_is_divided_at_the_end_of_text(self, vocabulary, reference, tmp_path):
        (tmp_path / "a.txt").write_text("one<|endoftext|>two\n<|endoftext|>")
        (tmp_path / "b.py").write_text("three")
        run(vocabulary, tmp_path / "a.txt", tmp_path / "b.py", to=tmp_path / "x")
        assert files(tmp_path / "x_text_document") == expected(reference, [["one"], ["two\n"], ["three"]])
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
        with pytest.raises(SettingError, match=r"latin\.txt is not UTF-8"):
            run(vocabulary, tmp_path / "latin.txt", to=tmp_path / "y")

    def test_several_inputs_in_the_order_given_patterns_by_name(self, vocabulary, reference, tmp_path):
        for name, text in (("b1", "b one"), ("b0", "b zero"), ("a", "a")):
            write_lines(tmp_path / f"{name}.jsonl", [text])
        run(vocabulary, str(tmp_path / "b*.jsonl"), tmp_path / "a.jsonl", to=tmp_path / "x")
        assert files(tmp_path / "x_text_document") == expected(reference, [["b zero"], ["b one"], ["a"]])

    def test_several_keys_and_lists_of_sentences(self, vocabulary, reference, tmp_path):
        lines = [{"a": ["One.", "", " Two."], "b": "x y"}, {"a": [], "b": ""}, {"a": "z", "b": "w"}]
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
        run(vocabulary, tmp_path / "x.jsonl", to=tmp_path / "x", json_keys=("a", "b"))
        assert files(tmp_path / "x_a_document") == expected(reference, [["One.", "", " Two."], [], ["z"]])
        assert files(tmp_path / "x_b_document") == expected(reference, [["x y"], [""], ["w"]])

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "not JSON"),
            (b'"text"', "expected a JSON object, not str"),
            (
                b'{"words": "x"}',
                "no \"text\" among 'words'. If all documents are like that, `sdp4bit preprocess",
            ),
            (b'{"text": 3}', '"text" is int, not a string'),
            (b'{"text": ["a", null]}', '"text" is NoneType, not a string'),
            (b'{"text": "\\ud800"}', '"text" is not valid text: .*surrogates'),
            (b'{"text": "caf\xe9"}', "not JSON: .*utf-8"),
            (b'{"text": "", "x": ' + b"[" * 99999 + b"]" * 99999 + b"}", "the JSON is nested too deeply"),
        ],
    )
    def test_a_bad_line_is_named_and_nothing_is_left(self, vocabulary, tmp_path, line, message):
        (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
        with pytest.raises(SettingError, match=rf"x\.jsonl, line 3: {message}"):
            run(vocabulary, tmp_path / "x.jsonl", to=tmp_path / "x")
        assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]

    @pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
    def test_a_file_that_is_cut_off_or_foreign_is_named(self, vocabulary, tmp_path, suffix):
        path = write_lines(tmp_path / f"x{suffix}", TEXTS)
        content = path.read_bytes()
        for damaged, problem in (
            (content[: len(content) * 9 // 10], "cannot be read: ."),
            (b"not what the name says" * 9, "is text, in spite of its name"),
        ):
            path.write_bytes(damaged)
            with pytest.raises(SettingError, match=rf"x{re.escape(suffix)} {problem}"):
                run(vocabulary, path, to=tmp_path / "x")
            assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    def test_every_file_is_inspected_before_anything_is_read(self, vocabulary, tmp_path):
        (tmp_path / "x.jsonl").write_text("{")
        (tmp_path / "y.jsonl").write_bytes(b"\x93NUMPY")
        with pytest.raises(SettingError, match=r"y\.jsonl is a NumPy array: write its texts as JSON lines"):
            run(vocabulary, tmp_path / "x.jsonl", tmp_path / "y.jsonl", to=tmp_path / "x")

    def test_nothing_to_do_is_an_error(self, vocabulary, tmp_path):
        with pytest.raises(SettingError, match=r"--input .*none\*\.jsonl matches no file"):
            run(vocabulary, str(tmp_path / "none*.jsonl"), to=tmp_path / "x")
        with pytest.raises(SettingError, match="no text in 1 documents"):
            run(vocabulary, write_lines(tmp_path / "x.jsonl", [""]), to=tmp_path / "x")
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.jsonl"]

    def test_a_folder_is_neither_an_input_nor_a_prefix(self, vocabulary, tmp_path):
        with pytest.raises(SettingError, match=r"--input .* is a folder: give its files, as in '.*/\*'"):
            run(vocabulary, str(tmp_path), to=tmp_path / "x")
        with pytest.raises(SettingError, match=r"--output-prefix .* is a folder: add a name, as in"):
            run(vocabulary, write_lines(tmp_path / "x.jsonl", ["a"]), to=tmp_path)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("signal_number", "code"),
    [(signal.SIGKILL, -9), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_killed_run_leaves_nothing_that_loads(vocabulary, tmp_path, signal_number, code):
    with (tmp_path / "x.jsonl").open("w") as file:
        for number in range(2000):
            file.write(json.dumps({"text": f"{number} {TEXTS[number % 6]} " * 3}) + "\n")
    partial = tmp_path / "x_text_document.bin.partial"

    def kill(process: subprocess.Popen[str]) -> None:
        wait_until(lambda: partial.exists() and partial.stat().st_size, process=process)
        os.kill(process.pid, signal_number)
        process.wait(timeout=30)

    arguments = [*COMMAND, "preprocess", "--input", str(tmp_path / "x.jsonl"), "--workers", "1"]
    files = ["--vocab-file", str(vocabulary[0]), "--merge-file", str(vocabulary[1])]
    assert outcome_of([*arguments, *files, "--output-prefix", str(tmp_path / "x")], kill)[0] == code
    assert partial.exists() == (signal_number == signal.SIGKILL)
    assert not any((tmp_path / f"x_text_document.{end}").exists() for end in ("bin", "idx"))
    with pytest.raises(SettingError, match="no such file"):
        IndexedTokens(tmp_path / "x_text_document")

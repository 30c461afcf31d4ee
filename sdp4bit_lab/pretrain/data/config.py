"""Settings of the data, its splits and its tokenizer."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from sdp4bit_lab.common.settings import SettingError, option, require
from sdp4bit_lab.pretrain.data.corpus import SMALLEST_VOCABULARY
from sdp4bit_lab.pretrain.data.indexed import is_indexed, is_weight

if TYPE_CHECKING:
    from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer

Source = Literal["standard library", "text", "indexed", "mock"]
"""text: files that are tokenized at the start; indexed: Megatron's .bin/.idx files."""
TokenizerType = Literal["GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"]

DEFAULT_TRAINED_VOCABULARY = 4096
DEFAULT_MOCK_VOCABULARY = 50257
DEFAULT_VALIDATION_FRACTION = 0.05
DEFAULT_SPLIT = "969,30,1"

CacheFolder = Annotated[Path | None, option("data-cache-path", "cache-dir")]
_VocabularySize = Annotated[int | None, option("vocab-size", "vocabulary-size")]


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer: GPT-2's two files, or one tokenizer.json."""

    tokenizer_type: TokenizerType | None = None
    """Tokenizer: GPT2BPETokenizer (--vocab-file and --merge-file), HuggingFaceTokenizer (--tokenizer-model)
    or NullTokenizer (tokens 0 to --vocab-size, of which the last ends a document). Default: inferred from the
    files."""
    vocab_file: Path | None = None
    """GPT-2's vocab.json."""
    merge_file: Path | None = None
    """GPT-2's merges.txt."""
    tokenizer_model: Path | None = None
    """tokenizer.json of the tokenizers library, or its folder."""
    eod_token: str | None = None
    """Token that ends a document. Default: <|endoftext|>, </s> or a similar token of the tokenizer."""

    def __post_init__(self) -> None:
        require(
            (self.vocab_file is None) == (self.merge_file is None),
            "--vocab-file and --merge-file form one tokenizer: give both or neither",
        )
        require(
            self.vocab_file is None or self.tokenizer_model is None,
            "--vocab-file and --tokenizer-model are two tokenizers: give only one",
        )
        kind = self.tokenizer_type
        require(
            kind != "GPT2BPETokenizer" or self.vocab_file is not None,
            "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
        )
        require(
            kind != "HuggingFaceTokenizer" or self.tokenizer_model is not None,
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model with a tokenizer.json",
        )
        require(
            kind != "NullTokenizer" or not self.has_tokenizer,
            "--tokenizer-type NullTokenizer reads no files: remove --vocab-file, --merge-file and "
            "--tokenizer-model",
        )
        require(
            self.eod_token is None or self.has_tokenizer,
            "--eod-token names a token of --vocab-file or --tokenizer-model: give one of them",
        )

    @property
    def has_tokenizer(self) -> bool:
        return self.vocab_file is not None or self.tokenizer_model is not None

    @cached_property
    def tokenizer(self) -> BytePairTokenizer | None:
        """Tokenizer of the given files; None without files."""
        if not self.has_tokenizer:
            return None
        # The self-test uses these settings without the package `tokenizers`.
        from sdp4bit_lab.pretrain.data.tokenizer import load_tokenizer

        return load_tokenizer(
            vocab_file=self.vocab_file,
            merge_file=self.merge_file,
            tokenizer_model=self.tokenizer_model,
            eod_token=self.eod_token,
            parses_special_tokens=self.parses_special_tokens,
        )

    @property
    def parses_special_tokens(self) -> bool:
        """Whether a text that spells a special token becomes this token."""
        return False


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerConfig):
    """Source of the tokens, and their tokenizer."""

    data_path: tuple[str | Path, ...] = ()
    """Files: JSON lines (an object with "text" per line), Parquet or plain text, as `sdp4bit preprocess
    --input` reads them. Or prefixes of .bin/.idx files from `sdp4bit preprocess` or Megatron, each after an
    optional weight. Default: the source code of Python's standard library."""
    split: str | None = None
    """Proportions of training, validation and test documents in the .bin/.idx files of --data-path. A test
    split that is too small is skipped with a warning. Default: 969,30,1."""
    train_data_path: tuple[str | Path, ...] = ()
    """.bin/.idx prefixes for training, with optional weights, instead of --data-path and --split."""
    valid_data_path: tuple[str | Path, ...] = ()
    """.bin/.idx prefixes for validation, with --train-data-path."""
    test_data_path: tuple[str | Path, ...] = ()
    """.bin/.idx prefixes for a test after training, with --train-data-path."""
    mock_data: bool = False
    """Train on synthetic tokens that depend only on the seed, for speed measurements."""
    vocabulary_size: _VocabularySize = None
    """Vocabulary size. Required for .bin/.idx files without a tokenizer; for text it is the size of the
    byte-level BPE tokenizer to train. Default: the preset's."""
    validation_fraction: float | None = None
    """Fraction of the text held out for validation, in complete documents. Default: 0.05."""
    eod_mask_loss: bool = False
    """Exclude the token after each end of document from the loss."""
    cache_dir: CacheFolder = None
    """Cache of tokenized text and sample orders. Default: $XDG_CACHE_HOME/sdp4bit or ~/.cache/sdp4bit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.vocabulary_size
        require(size is None or 1 <= size <= 1 << 20, f"--vocab-size {size} must be between 1 and {1 << 20}")
        require(
            self.validation_fraction is None or 0 < self.validation_fraction < 1,
            f"--validation-fraction {self.validation_fraction} must be above 0 and below 1",
        )
        _ = self.split_shares
        self._check_source()

    def _check_source(self) -> None:
        source = self.source
        apart = bool(self.train_data_path or self.valid_data_path or self.test_data_path)
        if self.mock_data:
            require(not self.data_path and not apart, "--mock-data reads no files: remove --data-path")
            require(not self.eod_mask_loss, "--mock-data has no documents: remove --eod-mask-loss")
        require(
            not (self.data_path and apart),
            "--data-path conflicts with --train-data-path and --valid-data-path: give one or the others",
        )
        require(
            not apart or bool(self.train_data_path and self.valid_data_path),
            "--train-data-path and --valid-data-path must be given together",
        )
        absent = [path for path in self.data_path if not is_weight(path) and not Path(path).exists()]
        require(
            self.split is None or source == "indexed" or not absent,
            f"--data-path {absent[0] if absent else ''}: no .bin and .idx files with this prefix",
        )
        require(
            self.split is None or (source == "indexed" and not apart),
            f"--split {self.split} applies to .bin/.idx files of --data-path: remove it"
            + ("" if source == "indexed" else "; --validation-fraction splits text"),
        )
        require(
            self.validation_fraction is None or source in ("text", "standard library"),
            f"--validation-fraction {self.validation_fraction} applies to text tokenized at the start: "
            "remove it" + ("; --split divides .bin/.idx files" if source == "indexed" else ""),
        )
        if source in ("text", "standard library"):
            size = self.vocabulary_size
            require(
                size is None or self.has_tokenizer or size >= SMALLEST_VOCABULARY,
                f"--vocab-size {size} must be between {SMALLEST_VOCABULARY} (256 bytes and the end of text) "
                f"and {1 << 20}",
            )
            require(
                self.tokenizer_type != "NullTokenizer",
                "--tokenizer-type NullTokenizer applies to .bin/.idx files: give a tokenizer for text",
            )
        require(
            self.tokenizer_type != "NullTokenizer" or self.vocabulary_size is not None,
            "--tokenizer-type NullTokenizer needs --vocab-size",
        )

    @cached_property
    def source(self) -> Source:
        """Kind of data; SettingError if text and .bin/.idx files are mixed."""
        if self.mock_data:
            return "mock"
        if self.train_data_path or self.valid_data_path or self.test_data_path:
            return "indexed"
        if not self.data_path:
            return "standard library"
        numbers = {path for path in self.data_path if is_weight(path)}
        kinds = {path: is_indexed(path) for path in self.data_path if path not in numbers}
        if any(kinds.values()):
            text = [str(path) for path, indexed in kinds.items() if not indexed and Path(path).exists()]
            require(
                not text,
                f"--data-path mixes .bin/.idx prefixes with text ({', '.join(text)}): preprocess the text",
            )
            return "indexed"
        require(
            not numbers,
            f"--data-path {' '.join(map(str, self.data_path))}: weights apply to .bin/.idx prefixes, which "
            "`sdp4bit preprocess` makes from text",
        )
        return "text"

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens that the model must know; SettingError if it is unknown."""
        size = self.vocabulary_size
        if self.tokenizer is not None:
            known = self.tokenizer.vocabulary_size
            require(
                size in (None, known), f"--vocab-size {size} differs from the {known} tokens of the tokenizer"
            )
            return known
        if size is not None:
            return size + 1 if self.tokenizer_type == "NullTokenizer" else size
        if self.source == "mock":
            return DEFAULT_MOCK_VOCABULARY
        if self.source == "indexed":
            raise SettingError(
                ".bin/.idx files do not contain the vocabulary size: give --vocab-file and --merge-file, "
                "--tokenizer-model, or --vocab-size"
            )
        return DEFAULT_TRAINED_VOCABULARY

    @property
    def end_of_document(self) -> int | None:
        """End-of-document token, if the settings define it."""
        if self.tokenizer is not None:
            return self.tokenizer.end_of_text
        return self.vocabulary_size if self.tokenizer_type == "NullTokenizer" else None

    @property
    def held_out(self) -> float:
        return self.validation_fraction or DEFAULT_VALIDATION_FRACTION

    @property
    def split_shares(self) -> tuple[float, float, float]:
        """Shares of the documents for training, validation and test, which sum to 1."""
        text = DEFAULT_SPLIT if self.split is None else self.split
        try:
            shares = [float(part) for part in text.split(",")]
        except ValueError:
            shares = []
        require(
            2 <= len(shares) <= 3
            and all(math.isfinite(share) and share >= 0 for share in shares)
            and min(shares[:2]) > 0,
            f"--split {text!r}: give two or three comma-separated numbers for training, validation and test, "
            f"such as {DEFAULT_SPLIT}; the first two must be positive, the third at least 0",
        )
        train, validation, test = [share / sum(shares) for share in (*shares, 0.0)[:3]]
        return train, validation, test

    def cache_folder(self) -> Path:
        if self.cache_dir is not None:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "sdp4bit"

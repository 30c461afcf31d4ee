"""Train or load byte-level BPE tokenizers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sdp4bit_lab.common.failures import is_failure, one_line
from sdp4bit_lab.common.files import read_json_object
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.pretrain.data.documents import END_OF_TEXT

_TRAINING_CHARACTERS = 64 << 20
"""Characters from which the vocabulary is learned; more changes little and takes minutes."""
_ENDS_OF_DOCUMENTS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
_OTHER_FILES = ("tokenizer.model", "tekken.json", "*.tiktoken")
_OTHER_FORMATS = {
    # A message whose first field is a message whose first field is text.
    "a SentencePiece model": rb"(?s)\A\n.\n.",
    "Mistral's tekken": rb'"token_bytes"',
    "a tiktoken file": rb"\A[A-Za-z0-9+/]+=* \d+\r?\n",
}


class BytePairTokenizer:
    """Convert text to tokens and back."""

    def __init__(
        self, tokenizer: Tokenizer, *, end_of_text: int | None = None, parses_special_tokens: bool = False
    ) -> None:
        """Wrap a tokenizer.

        Args:
            end_of_text: token that ends a document.
            parses_special_tokens: whether a text that spells a special token becomes this token. Then a web
                page with the text </s> ends a document.
        """
        added = tokenizer.get_added_tokens_decoder()
        if end_of_text in added and not added[end_of_text].special:
            # It ends documents, although the file does not declare it to be special.
            tokenizer.add_special_tokens([AddedToken(added[end_of_text].content, special=True)])
        tokenizer.encode_special_tokens = not parses_special_tokens
        self._tokenizer = tokenizer
        # Some files ask to cut and pad every text to a model's length; a corpus needs all of it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.end_of_text = end_of_text
        """Token that ends a document, if there is one."""
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        special |= set() if end_of_text is None else {str(tokenizer.id_to_token(end_of_text))}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

    @classmethod
    def train(cls, documents: Iterable[str], *, vocabulary_size: int) -> BytePairTokenizer:
        """Train a tokenizer with at most `vocabulary_size` tokens, fewer for short text.

        Only the first 64 million characters of the documents are read.
        """
        tokenizer = _gpt2_tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first_characters(documents, _TRAINING_CHARACTERS), trainer)
        return cls(tokenizer, end_of_text=tokenizer.token_to_id(END_OF_TEXT))

    @classmethod
    def load(cls, path: Path) -> BytePairTokenizer:
        """Load a tokenizer written by `save`; SettingError if it is damaged."""
        with _failing_as(f"{path} is not a tokenizer.json"):
            tokenizer = Tokenizer.from_file(str(path))
        return cls(tokenizer, end_of_text=tokenizer.token_to_id(END_OF_TEXT))

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))

    @property
    def vocabulary_size(self) -> int:
        """Largest token plus one."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def digest(self) -> str:
        """Return a hash of everything that tokenization depends on."""
        return hashlib.sha256(f"{self.end_of_text} {self._tokenizer.to_str()}".encode()).hexdigest()

    @property
    def end_of_text_name(self) -> str:
        """Spelling of the token that ends a document; SettingError if there is none."""
        return str(self._tokenizer.id_to_token(self.require_end_of_text()))

    def count_spelled(self, text: str) -> int:
        """Return the number of special tokens that a text spells."""
        return len(self._special.findall(text)) if self._special.pattern else 0

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each document, without an end-of-text token."""
        with _failing_as("the tokenizer has failed on a document"):
            encodings = self._tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(self, documents: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each document, with an end-of-text token."""
        end = self.require_end_of_text()
        return [[*tokens, end] for tokens in self.encode(documents)]

    def require_end_of_text(self) -> int:
        """Return the end-of-text token; SettingError if there is none."""
        if self.end_of_text is None:
            raise SettingError(
                f"the tokenizer has none of the tokens {', '.join(_ENDS_OF_DOCUMENTS)}: name its "
                "end-of-document token with --eod-token"
            )
        return self.end_of_text

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def load_tokenizer(
    *,
    vocab_file: Path | None,
    merge_file: Path | None,
    tokenizer_model: Path | None,
    eod_token: str | None,
    parses_special_tokens: bool = False,
) -> BytePairTokenizer:
    """Load GPT-2's two files, or a tokenizer.json or its folder; SettingError if it is damaged."""
    if tokenizer_model is not None:
        path = tokenizer_model / "tokenizer.json" if tokenizer_model.is_dir() else tokenizer_model
        if path != tokenizer_model and not path.is_file():
            path = next(
                (found for name in _OTHER_FILES for found in sorted(tokenizer_model.glob(name))), path
            )
        _require_file("--tokenizer-model", path)
        _require_tokenizer_json(path)
        with _failing_as(f"--tokenizer-model {path} is not a tokenizer.json"):
            tokenizer = Tokenizer.from_file(str(path))
        ends = (*_named_end(path.with_name("tokenizer_config.json")), *_ENDS_OF_DOCUMENTS)
    else:
        assert vocab_file is not None and merge_file is not None
        _require_file("--vocab-file", vocab_file)
        _require_file("--merge-file", merge_file)
        with _failing_as(f"--vocab-file {vocab_file} and --merge-file {merge_file} are not GPT-2's"):
            # As in Megatron, <|endoftext|> inside a text is not a special token.
            tokenizer = _gpt2_tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
        ends = _ENDS_OF_DOCUMENTS
    numbers = [tokenizer.token_to_id(name) for name in ((eod_token,) if eod_token else ends)]
    end_of_text = next((number for number in numbers if number is not None), None)
    if eod_token and end_of_text is None:
        raise SettingError(
            f"--eod-token {eod_token} is not among the tokenizer's {tokenizer.get_vocab_size()} tokens"
        )
    loaded = BytePairTokenizer(
        tokenizer, end_of_text=end_of_text, parses_special_tokens=parses_special_tokens
    )
    size = loaded.vocabulary_size
    require(size <= 1 << 20, f"the tokenizer's largest token is {size - 1:,}; at most 2**20 - 1 is supported")
    return loaded


def _require_tokenizer_json(path: Path) -> None:
    """Refuse the other formats of tokenizers by name."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    name = next((name for name, content in _OTHER_FORMATS.items() if re.search(content, head)), None)
    require(
        name is None,
        f"--tokenizer-model {path} is {name}, not a tokenizer.json. Give the tokenizer.json of this model, "
        "or write it by transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OUT)",
    )


@contextmanager
def _failing_as(message: str) -> Iterator[None]:
    """Turn errors of the package `tokenizers`, which raises Exception or panics, into a SettingError."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise SettingError(f"{message}: {one_line(error)}") from error


def _named_end(config: Path) -> tuple[str, ...]:
    """Read the end-of-text token from tokenizer_config.json."""
    try:
        named = read_json_object(config).get("eos_token")
    except FileNotFoundError:
        return ()
    named = named.get("content") if isinstance(named, dict) else named
    return (named,) if isinstance(named, str) else ()


def _require_file(option: str, path: Path) -> None:
    if not path.is_file():
        raise SettingError(f"{option} {path}: no such file")


def _gpt2_tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _first_characters(documents: Iterable[str], left: int) -> Iterator[str]:
    for text in documents:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return

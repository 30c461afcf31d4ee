"""Byte-level BPE, trained on the text at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sdp4bit.pretrain.corpus import END_OF_TEXT

TRAINING_CHARACTERS = 64 << 20
"""The vocabulary is learned from this much text; more changes little and takes minutes."""


class BytePairTokenizer:
    """Text to token numbers and back, without loss; every document ends with the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_of_text = int(tokenizer.token_to_id(END_OF_TEXT) or 0)

    @classmethod
    def train(cls, documents: Iterable[str], *, vocabulary_size: int) -> BytePairTokenizer:
        """Return a tokenizer of at most `vocabulary_size` tokens: less if the text repeats too little."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first_characters(documents), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> BytePairTokenizer:
        """Return the tokenizer saved in a file."""
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """The file holds the tokenizer, as JSON."""
        self._tokenizer.save(str(path))

    @property
    def vocabulary_size(self) -> int:
        """Tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    def encode_documents(self, documents: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each document, the end of text included."""
        encodings = self._tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
        return [[*encoding.ids, self.end_of_text] for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token numbers."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def _first_characters(documents: Iterable[str]) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for text in documents:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return

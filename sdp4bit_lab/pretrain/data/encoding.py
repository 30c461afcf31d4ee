"""Documents to tokens in several processes, in order and with bounded memory."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from sdp4bit_lab.common.launch.child_processes import end_with_parent, start_from_one_import
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.document_files import Piece
from sdp4bit_lab.pretrain.data.indexed import token_dtype
from sdp4bit_lab.pretrain.data.indexed_writer import EncodedDocuments, sequence_length
from sdp4bit_lab.pretrain.data.tokenizer import TokenizerFiles
from sdp4bit_lab.pretrain.data.word_encoder import DocumentEncoder


class PieceEncoder:
    """An encoder of the texts of each key; the same in every process."""

    def __init__(self, files: TokenizerFiles, *, keys: Sequence[str], append_eod: bool) -> None:
        """Read the tokenizer; SettingError if it cannot be read, or has no token to append."""
        tokenizer = files.load()
        self.dtype = token_dtype(tokenizer.vocabulary_size)
        self._encoder = DocumentEncoder(tokenizer, dtype=self.dtype)
        self._keys = keys
        self._end = b""
        if append_eod:
            if tokenizer.end_of_text is None:
                raise SettingError(
                    "--append-eod: the tokenizer has none of the usual tokens for the end of a document: "
                    "name it with --eod-token"
                )
            self._end = np.array([tokenizer.end_of_text], self.dtype).tobytes()

    def encode(self, piece: Piece) -> list[EncodedDocuments]:
        """Return the documents of each key.

        As in Megatron: sentences without tokens are left out, a document without any stays as an empty one
        and has no end-of-document token.
        """
        documents = list(piece.documents(self._keys))
        return [
            self._encode_texts([texts[index] for texts in documents], where=piece.path)
            for index in range(len(self._keys))
        ]

    def _encode_texts(self, documents: Sequence[Sequence[str]], *, where: str) -> EncodedDocuments:
        item = self.dtype.itemsize
        encoded = iter(self._encoder.encode([text for texts in documents for text in texts]))
        tokens: list[bytes] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for texts in documents:
            sentences = [sentence for sentence in (next(encoded) for _ in texts) if sentence]
            if sentences:
                sentences[-1] += self._end
            tokens += sentences
            lengths += [sequence_length(len(sentence) // item, where=where) for sentence in sentences]
            sequences.append(len(sentences))
        return EncodedDocuments(
            tokens=b"".join(tokens),
            lengths=np.array(lengths, np.int32),
            sequences=np.array(sequences, np.int32),
        )


def encode_in_order(
    pieces: Iterable[Piece], *, files: TokenizerFiles, keys: Sequence[str], append_eod: bool, workers: int
) -> Iterator[tuple[Piece, list[EncodedDocuments]]]:
    """Yield every piece with its documents, in the order of the pieces; one worker is this process.

    Raises:
        SettingError: a document that cannot be read; the first one in order.
        RuntimeError: a worker has been killed.
    """
    if workers == 1:
        encoder = PieceEncoder(files, keys=keys, append_eod=append_eod)
        for piece in pieces:
            yield piece, encoder.encode(piece)
        return
    executor = ProcessPoolExecutor(
        workers,
        mp_context=start_from_one_import([__name__]),
        initializer=_start_worker,
        initargs=(files, keys, append_eod),
    )
    pending: deque[tuple[Piece, Future[list[EncodedDocuments]]]] = deque()
    try:
        for piece in pieces:
            pending.append((piece, executor.submit(_encode_in_worker, piece)))
            # Every worker has one piece at hand and one waiting; no more text is held in memory.
            while len(pending) > 2 * workers:
                piece, future = pending.popleft()
                yield piece, future.result()
        while pending:
            piece, future = pending.popleft()
            yield piece, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process has been killed: use fewer --workers if memory ran out"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


_encoder: PieceEncoder | None = None
"""The encoder of a worker process."""


def _start_worker(files: TokenizerFiles, keys: Sequence[str], append_eod: bool) -> None:
    global _encoder
    # As many processes as cores: threads of the tokenizers library would only be in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # An interrupt from the keyboard reaches every process; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A killed parent does not close the queue that its workers wait at.
    end_with_parent()
    _encoder = PieceEncoder(files, keys=keys, append_eod=append_eod)


def _encode_in_worker(piece: Piece) -> list[EncodedDocuments]:
    assert _encoder is not None
    return _encoder.encode(piece)

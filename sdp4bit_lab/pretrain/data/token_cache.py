"""Cache text that is tokenized at the start of a run.

CACHE/text-KEY/
    train.bin, train.idx            training documents, in the order of the text
    validation.bin, validation.idx  held-out documents
    tokenizer.json                  their tokenizer
    settings.json                   hashed to KEY
    SHA256SUMS                      checksums of all files above
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from itertools import islice
from pathlib import Path

import tokenizers

from sdp4bit_lab.common.files import check_sums, write_sums
from sdp4bit_lab.common.progress import phase
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.data.corpus import CorpusSplit, split_corpus
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens, token_dtype
from sdp4bit_lab.pretrain.data.indexed_writer import IndexedWriter
from sdp4bit_lab.pretrain.data.sample_index import IndexedSplit, Shuffled, complete_folder
from sdp4bit_lab.pretrain.data.samples import Dataset
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer

FORMAT_VERSION = 3
"""Version of the tokens and their order; if equal, checkpoints and compared runs are compatible."""
TRAIN, VALIDATION = "train", "validation"
_ENCODE_DOCUMENTS = 256


def fill_cache(config: DataConfig) -> Path:
    """Return the cache folder of the tokenized text, written if necessary, or again if it is damaged.

    The folder appears atomically, even with concurrent writers.

    Raises:
        SettingError: unreadable text, or a folder that cannot be written.
    """
    phase("reading the text")
    split = split_corpus(list(map(Path, config.data_path)), validation_fraction=config.held_out)
    settings = {
        "format": FORMAT_VERSION,
        "corpus": split.digest,
        "vocabulary_size": config.vocabulary,
        "validation_fraction": config.held_out,
        "tokenizers": tokenizers.__version__,
    }
    if config.tokenizer is not None:
        settings["tokenizer"] = config.tokenizer.digest()
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:20]
    folder = config.cache_folder() / f"text-{key}"
    try:
        if folder.is_dir():
            if is_intact(folder):
                return folder
            shutil.rmtree(folder)
        with complete_folder(folder) as working:
            _tokenize(split, config=config, folder=working)
            (working / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")
            write_sums(working, known={})
    except OSError as error:
        raise SettingError(
            f"cannot write the cache folder {folder} ({error}): set --data-cache-path"
        ) from error
    return folder


def is_intact(folder: Path) -> bool:
    """Return whether a cache folder exists with its checksums; warn of damage."""
    try:
        check_sums(folder, needed=(f"{TRAIN}.bin", f"{VALIDATION}.bin"))
    except ValueError as error:
        if folder.is_dir():
            warnings.warn(f"sdp4bit: {folder} is damaged and written again: {error}", stacklevel=2)
        return False
    return True


def open_cache(folder: Path, *, config: DataConfig) -> Dataset:
    """Open the dataset of a cache folder; SettingError if a file is damaged."""
    tokenizer = config.tokenizer or BytePairTokenizer.load(folder / "tokenizer.json")
    key = folder.name.removeprefix("text-")

    def split(name: str, shuffled: Shuffled) -> IndexedSplit:
        corpus = IndexedTokens(folder / name)
        return IndexedSplit(
            corpus=corpus,
            first=0,
            last=corpus.documents,
            vocabulary=config.vocabulary,
            fingerprint=f"{key}/{name}",
            cache=folder.parent,
            shuffled=shuffled,
        )

    return Dataset(
        key=key,
        train=split(TRAIN, "samples"),
        validation=split(VALIDATION, "nothing"),
        masked_token=tokenizer.end_of_text if config.eod_mask_loss else None,
    )


def _tokenize(split: CorpusSplit, *, config: DataConfig, folder: Path) -> None:
    training_text = (text for text, held_out in split.read() if not held_out)
    if config.tokenizer is None:
        phase(f"training a tokenizer with {config.vocabulary:,} tokens")
    tokenizer = config.tokenizer or BytePairTokenizer.train(training_text, vocabulary_size=config.vocabulary)
    tokenizer.save(folder / "tokenizer.json")
    dtype = token_dtype(config.vocabulary)
    with (
        IndexedWriter(folder / TRAIN, dtype=dtype) as train,
        IndexedWriter(folder / VALIDATION, dtype=dtype) as validation,
    ):
        remaining, done = split.read(), 0
        while documents := list(islice(remaining, _ENCODE_DOCUMENTS)):
            phase("tokenizing documents for the cache", total=split.documents, done=done)
            encoded = tokenizer.encode_documents([text for text, _ in documents])
            for (_, held_out), tokens in zip(documents, encoded, strict=True):
                (validation if held_out else train).add([tokens])
            done += len(documents)
        for writer in (train, validation):
            writer.finish()

"""Small .bin/.idx corpora, written from the layout alone, and a GPT-2 style tokenizer in files."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LIBRARY = Path(json.__file__).parent.parent


def library_texts(count: int) -> list[str]:
    """Return the sources of some modules of the standard library."""
    return [path.read_text("utf-8") for path in sorted(LIBRARY.glob("*.py"))[:count]]


def write_vocabulary(folder: Path, *, size: int = 700) -> tuple[Path, Path]:
    """Write vocab.json and merges.txt into the folder, in GPT-2's form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_texts(12), trainer)
    tokenizer.model.save(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def layout(documents: Sequence[Sequence[Sequence[int]]], *, code: int = 8) -> tuple[bytes, bytes]:
    """Return the bytes of .bin and .idx for documents of sequences of tokens, number by number."""
    form = {4: "<i", 8: "<H"}[code]
    item = struct.calcsize(form)
    data = b""
    lengths, pointers, boundaries = b"", b"", struct.pack("<q", 0)
    sequences = 0
    for document in documents:
        for sequence in document:
            lengths += struct.pack("<i", len(sequence))
            pointers += struct.pack("<q", len(data))
            for token in sequence:
                data += struct.pack(form, token)
            sequences += 1
        boundaries += struct.pack("<q", sequences)
    assert len(data) % item == 0
    header = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code)
    header += struct.pack("<Q", sequences) + struct.pack("<Q", len(documents) + 1)
    return data, header + lengths + pointers + boundaries


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], *, code: int = 8) -> Path:
    """Write documents of one sequence each at the prefix; [] is an empty document."""
    data, index = layout([[document] if len(document) else [] for document in documents], code=code)
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(index)
    return prefix


def counting_corpus(prefix: Path, *, documents: int, seed: int = 0, longest: int = 40) -> Path:
    """Write a corpus in which every token is there once, so that a sample shows where it comes from."""
    lengths = np.random.default_rng(seed).integers(0, longest, documents)
    boundaries = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    return write_corpus(prefix, [range(a, b) for a, b in pairwise(boundaries)], code=4)

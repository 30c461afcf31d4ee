"""Open the dataset of a run and form the micro batches of a rank.

The order depends only on the seed and the global sample number, so any number of ranks with the same global
batch sees the same samples in every step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from sdp4bit_lab.common.ranks import Ranks, broadcast_from_rank0, run_on_all_ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data.blend import BlendedSplit, Part, parse_blend
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.sample_index import IndexedSplit
from sdp4bit_lab.pretrain.data.samples import Dataset, MockSplit, Samples, Split
from sdp4bit_lab.pretrain.data.token_cache import fill_cache, is_intact, open_cache
from sdp4bit_lab.pretrain.model.tensor_parallel import IGNORED_TARGET

T = TypeVar("T")


def prepare_dataset(config: DataConfig, *, ranks: Ranks) -> Dataset:
    """Return the dataset on every rank.

    1. Rank 0 tokenizes the text, unless it is cached, or checks the .bin/.idx files.
    2. Local rank 0 of every other node does the same unless the cache is shared, and compares.
    3. All ranks open the files.

    Raises:
        SettingError: on all ranks: unreadable text, damaged files, or nodes that read different data.
    """
    if config.source == "mock":
        train, validation, test = (MockSplit(vocabulary=config.vocabulary, number=n) for n in range(3))
        return Dataset(key=f"mock-{config.vocabulary}", train=train, validation=validation, test=test)
    if config.source == "indexed":
        key = _on_every_node(lambda: check_indexed(config), known=lambda key: False, ranks=ranks)
        return run_on_all_ranks(lambda: open_indexed(config, key=key))
    folder = _on_every_node(lambda: fill_cache(config), known=is_intact, ranks=ranks)
    return run_on_all_ranks(lambda: open_cache(folder, config=config))


def _on_every_node(work: Callable[[], T], *, known: Callable[[T], bool], ranks: Ranks) -> T:
    """Return rank 0's result, after local rank 0 of every other node has reproduced it unless known."""
    expected = broadcast_from_rank0(work)

    def repeat() -> None:
        if ranks.local_rank == 0 and ranks.rank > 0 and not known(expected):
            found = work()
            if found != expected:
                raise SettingError(
                    f"rank {ranks.rank} reads different data than rank 0 ({found}, {expected}): use the same "
                    "files, Python and tokenizers versions on all nodes, or a shared --data-cache-path"
                )

    run_on_all_ranks(repeat)
    return expected


def check_indexed(config: DataConfig) -> str:
    """Return the dataset's key; SettingError names the file and field that are missing or damaged."""
    corpora = {part.prefix: IndexedTokens(part.prefix) for _, parts in _blends(config) for part in parts}
    for corpus in corpora.values():
        corpus.check()
    description = {
        "corpora": [
            [option, str(part.weight), corpora[part.prefix].fingerprint()]
            for option, parts in _blends(config)
            for part in parts
        ],
        "split": config.split_shares if config.data_path else None,
        "vocabulary": config.vocabulary,
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:20]


def open_indexed(config: DataConfig, *, key: str) -> Dataset:
    """Open checked .bin/.idx files; SettingError if a split has no documents."""
    masked = config.end_of_document if config.eod_mask_loss else None
    if config.eod_mask_loss and masked is None:
        raise SettingError(
            "--eod-mask-loss needs the end-of-document token: give the tokenizer (--vocab-file and "
            "--merge-file, or --tokenizer-model) and --eod-token if it is unusual"
        )
    splits: list[Split | None]
    blends = dict(_blends(config))
    if config.data_path:
        splits = [
            _open_blend(blends["--data-path"], config, shares=shares)
            for shares in _ranges(config.split_shares)
        ]
    else:
        splits = [
            _open_blend(blends[option], config, shares=(0.0, 1.0)) if option in blends else None
            for option in ("--train-data-path", "--valid-data-path", "--test-data-path")
        ]
    train, validation, test = splits
    assert train is not None and validation is not None
    return Dataset(
        key=key,
        train=train,
        validation=validation,
        test=test,
        needs_test=bool(config.test_data_path),
        masked_token=masked,
    )


def _blends(config: DataConfig) -> list[tuple[str, list[Part]]]:
    """Return the corpora of each data option that is given."""
    options = {
        "--data-path": config.data_path,
        "--train-data-path": config.train_data_path,
        "--valid-data-path": config.valid_data_path,
        "--test-data-path": config.test_data_path,
    }
    return [(option, parse_blend(paths, option=option)) for option, paths in options.items() if paths]


def _ranges(shares: Sequence[float]) -> list[tuple[float, float]]:
    """Return the start and end of each share, between 0 and 1."""
    ends = [sum(shares[: index + 1]) for index in range(len(shares))]
    return list(zip([0.0, *ends[:-1]], ends, strict=True))


def _open_blend(parts: Sequence[Part], config: DataConfig, *, shares: tuple[float, float]) -> Split | None:
    """Return a share of the documents of each corpus; None for an empty share."""
    if shares[0] >= shares[1]:
        return None
    splits = []
    for part in parts:
        corpus = IndexedTokens(part.prefix)
        first, last = (round(share * corpus.documents) for share in shares)
        splits.append(
            IndexedSplit(
                corpus=corpus,
                first=first,
                last=last,
                vocabulary=config.vocabulary,
                fingerprint=corpus.fingerprint(),
                cache=config.cache_folder(),
            )
        )
    if len(splits) == 1:
        return splits[0]
    weights = [part.weight for part in parts if part.weight is not None]
    return BlendedSplit(
        names=[f"{split.corpus.prefix}, documents {split.first} to {split.last}," for split in splits],
        splits=splits,
        weights=weights or None,
    )


class Batches:
    """Micro batches of one data-parallel rank."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        sequence_length: int,
        micro_batch_size: int,
        accumulation: int,
        eval_batches: int,
        seed: int,
        rank: int | None,
        world_size: int,
        device: torch.device,
    ) -> None:
        """Check that the splits are long enough; SettingError otherwise.

        Args:
            rank: index among the data-parallel ranks, shared by the ranks of a model replica; None if this
            process computes for all ranks.
            world_size: number of data-parallel ranks.
        """
        self._micro_batch_size = micro_batch_size
        self._accumulation = accumulation
        self._ranks = range(world_size) if rank is None else (rank,)
        self._world_size = world_size
        self._device = device
        self._masked_token = dataset.masked_token
        self._train = dataset.train.samples(sequence_length=sequence_length, seed=seed)
        if self._train.count == 0:
            raise SettingError(
                f"the training text has {dataset.train.tokens} tokens, fewer than one sequence of "
                f"{sequence_length} plus the next token: give more text or a smaller --seq-length"
            )
        self._validation = dataset.validation.samples(sequence_length=sequence_length, seed=None)
        self._eval_micro_batches = self._available(
            self._validation, dataset.validation, eval_batches, name="validation", length=sequence_length
        )
        self._test: Samples | None = None
        self.notes: list[str] = []
        """Lines to print at the start of the run."""
        try:
            if dataset.test is not None:
                test = dataset.test.samples(sequence_length=sequence_length, seed=None)
                self._test_micro_batches = self._available(
                    test, dataset.test, eval_batches, name="test", length=sequence_length
                )
                self._test = test
        except SettingError as error:
            if dataset.needs_test:
                raise
            self.notes.append(f"no test after training: {error}")

    def _available(self, samples: Samples, split: Split, batches: int, *, name: str, length: int) -> int:
        across = self._world_size * self._micro_batch_size
        available = samples.count // across
        if available == 0:
            raise SettingError(
                f"the {name} text has {split.tokens} tokens, fewer than {across} sequences of {length} for "
                f"{self._world_size} ranks: give more text, a larger share (--validation-fraction, --split), "
                "or a smaller --micro-batch-size or --seq-length"
            )
        return min(batches * self._accumulation, available)

    @property
    def global_batch_size(self) -> int:
        return self._world_size * self._micro_batch_size * self._accumulation

    @property
    def has_test(self) -> bool:
        return self._test is not None

    def training(self, first_sample: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's (or all ranks') micro batches of the global batch that starts at a sample."""
        for rank in self._ranks:
            for micro in range(self._accumulation):
                yield self._batch(self._train, self._share(micro, rank=rank, first_sample=first_sample))

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's validation samples, the same every time; for all ranks, interleaved."""
        yield from self._first(self._eval_micro_batches, samples=self._validation)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's test samples, the same every time, if there are any."""
        if self._test is not None:
            yield from self._first(self._test_micro_batches, samples=self._test)

    def _first(self, count: int, *, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        for micro in range(count):
            for rank in self._ranks:
                yield self._batch(samples, self._share(micro, rank=rank, first_sample=0))

    def _share(self, micro: int, *, rank: int, first_sample: int) -> range:
        start = first_sample + (micro * self._world_size + rank) * self._micro_batch_size
        return range(start, start + self._micro_batch_size)

    def _batch(self, samples: Samples, numbers: range) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, [samples, length]; masked targets are ignored by the loss."""
        tokens = torch.from_numpy(samples.rows(numbers))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self._masked_token is not None:
            # As in Megatron, the token after the end of a document is not a target.
            targets[inputs == self._masked_token] = IGNORED_TARGET
        return inputs.to(self._device), targets.to(self._device)

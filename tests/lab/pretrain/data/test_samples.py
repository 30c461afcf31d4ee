"""What training reads of .bin/.idx files, blends and synthetic tokens. Layer: no process, then gloo."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.data import sample_index
from sdp4bit_lab.pretrain.data.batches import Batches, check_indexed, open_indexed, prepare_dataset
from sdp4bit_lab.pretrain.data.blend import BlendedSamples, parse_blend
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.data.indexed import IndexedTokens
from sdp4bit_lab.pretrain.data.sample_index import IndexedSplit, make_epoch
from sdp4bit_lab.pretrain.data.samples import Dataset, MockSplit
from sdp4bit_lab.pretrain.model.tensor_parallel import IGNORED_TARGET
from tests.lab.pretrain.data.indexed_corpora import counting_corpus, write_corpus
from tests.lab.pretrain.tiny_runs import this_rank
from tests.ranks import run_ranks

VOCABULARY = 1 << 20


def rows_by_kept_order(prefix: Path) -> np.ndarray:
    """Return 200 samples, read by an order that is kept on disk, by the first who needs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_index, "CACHED_FROM", 1)
        return open_split(prefix).samples(sequence_length=7, seed=5).rows(range(200))


def open_split(prefix: Path, **changes: object) -> IndexedSplit:
    corpus = IndexedTokens(prefix)
    split = IndexedSplit(
        corpus=corpus,
        first=0,
        last=corpus.documents,
        vocabulary=VOCABULARY,
        fingerprint=corpus.fingerprint(),
        cache=prefix.parent / "cache",
    )
    return replace(split, **changes)


def dataset(*paths: object, **options: object) -> Dataset:
    options.setdefault("vocabulary_size", VOCABULARY)
    config = DataConfig(data_path=tuple(map(str, paths)), **options)
    return open_indexed(config, key=check_indexed(config))


def batches(
    data: Dataset, *, rank: int, world_size: int, micro: int, accumulation: int, **changes: int
) -> Batches:
    return Batches(
        data,
        **{"sequence_length": 10, "eval_batches": 2, "seed": 3, **changes},
        micro_batch_size=micro,
        accumulation=accumulation,
        rank=rank,
        world_size=world_size,
        device=torch.device("cpu"),
    )


class TestSampleIndex:
    @pytest.mark.parametrize("shuffled", ["documents and samples", "samples", "nothing"])
    def test_an_epoch_is_every_document_once_cut_into_samples(self, tmp_path, shuffled):
        """The samples, put back in their order, are a range of documents in the order of the epoch."""
        prefix = counting_corpus(tmp_path / "x", documents=60)
        split = open_split(prefix, shuffled=shuffled, first=15, last=50)
        for epoch_number in (0, 1):
            samples = split.samples(sequence_length=7, seed=5)
            lengths = split.corpus.lengths(15, 50)
            epoch = make_epoch(
                lengths, first=15, sequence_length=7, seed=5, epoch=epoch_number, shuffled=shuffled
            )
            starts = split.corpus.starts(np.arange(61))
            stream = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in epoch.documents])
            assert sorted(epoch.documents) == list(range(15, 50))
            assert len(stream) == split.tokens
            assert sorted(epoch.samples) == list(range(samples.count)) == list(range((len(stream) - 1) // 7))
            rows = samples.rows(range(epoch_number * samples.count, (epoch_number + 1) * samples.count))
            for row, place in zip(rows, epoch.samples, strict=True):
                assert row.tolist() == stream[place * 7 : place * 7 + 8].tolist()

    @pytest.mark.parametrize("shuffled", ["documents and samples", "samples"])
    def test_orders_differ_by_seed_and_epoch_and_not_by_what_was_read_before(self, tmp_path, shuffled):
        split = open_split(counting_corpus(tmp_path / "x", documents=60), shuffled=shuffled)
        samples = split.samples(sequence_length=7, seed=5)
        count = samples.count
        first, second = samples.rows(range(count)), samples.rows(range(count, 2 * count))
        assert not np.array_equal(first, second)
        assert not np.array_equal(first, split.samples(sequence_length=7, seed=6).rows(range(count)))
        resumed = split.samples(sequence_length=7, seed=5)
        assert np.array_equal(resumed.rows(range(count + 3, count + 9)), second[3:9])
        assert np.array_equal(resumed.rows(range(count - 2, count + 2)), [*first[-2:], *second[:2]])

    @pytest.mark.parametrize(
        ("shuffled", "documents", "samples"),
        [
            ("documents and samples", [14, 12, 16, 10, 13, 15, 11, 17], [3, 1, 5, 2, 0, 4]),
            ("samples", list(range(10, 18)), [3, 4, 0, 2, 5, 1]),
        ],
    )
    def test_the_order_is_frozen(self, shuffled, documents, samples):
        """A run resumes under another NumPy, on another machine: the numbers themselves are pinned."""
        epoch = make_epoch(np.arange(8), first=10, sequence_length=4, seed=1234, epoch=2, shuffled=shuffled)
        assert (epoch.documents.tolist(), epoch.samples.tolist()) == (documents, samples)

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_samples_are_megatrons_for_the_same_document_order(self):
        helpers = pytest.importorskip("megatron.core.datasets.helpers", reason="megatron-core is missing")
        for seed in range(20):
            lengths = np.random.default_rng(seed).integers(0, 30, 40)
            epoch = make_epoch(lengths, first=0, sequence_length=9, seed=seed, epoch=0)
            theirs = helpers.build_sample_idx(
                lengths.astype(np.int32),
                epoch.documents.astype(np.int32),
                9,
                1,
                int(lengths.sum()),
                True,
                True,
            )
            positions = epoch.starts[theirs[:, 0]] + theirs[:, 1]
            assert positions.tolist() == [9 * number for number in range(len(epoch.samples) + 1)]

    @pytest.mark.gloo
    def test_an_order_kept_on_disk_is_the_same(self, tmp_path, monkeypatch):
        split = open_split(counting_corpus(tmp_path / "x", documents=60))
        in_memory = split.samples(sequence_length=7, seed=5).rows(range(200))
        for rows in run_ranks(rows_by_kept_order, 2, tmp_path / "x", timeout=60):
            assert np.array_equal(rows, in_memory)
        epochs = -(-200 // split.samples(sequence_length=7, seed=5).count)
        kept = sorted((tmp_path / "cache").iterdir())
        assert len(kept) == epochs and all(path.is_dir() for path in kept)
        monkeypatch.setattr(sample_index, "make_epoch", None)
        assert np.array_equal(rows_by_kept_order(tmp_path / "x"), in_memory)
        # A rank that saw no folder may open the lock file after its maker has removed it.
        split.samples(sequence_length=7, seed=5)._keep(0, kept[0])
        assert sorted((tmp_path / "cache").iterdir()) == kept

    def test_a_token_outside_the_vocabulary_is_named(self, tmp_path):
        split = open_split(write_corpus(tmp_path / "x", [[1, 2, 3, 90, 5]]), vocabulary=90)
        with pytest.raises(SettingError, match=r"x\.bin has token 90, but the vocabulary ends at 89"):
            split.samples(sequence_length=4, seed=0).rows([0])


class _Numbers:
    """Samples that are their source and number."""

    def __init__(self, source: int, count: int) -> None:
        self.source, self.count = source, count

    def rows(self, numbers: Iterable[int]) -> np.ndarray:
        return np.array([[self.source, number] for number in numbers])


class TestBlend:
    @pytest.mark.parametrize("weights", [("0.3", "0.7"), ("30", "50", "20"), ("1e-3", "5", "2", "0.25")])
    def test_shares_hold_in_every_prefix_and_no_sample_is_left_out(self, weights):
        shares = [Fraction(weight) for weight in weights]
        blend = BlendedSamples([_Numbers(i, 100) for i in range(len(shares))], weights=shares)
        counts = [0] * len(shares)
        for number in range(3000):
            ((source, sample),) = blend.rows([number]).tolist()
            assert sample == counts[source]
            counts[source] += 1
            for count, share in zip(counts, shares, strict=True):
                assert abs(count - (number + 1) * share / sum(shares)) < len(shares)

    def test_a_late_sample_needs_no_counting(self):
        blend = BlendedSamples([_Numbers(0, 9), _Numbers(1, 9)], weights=[Fraction(1), Fraction(2)])
        number = 3 * 10**15
        late = blend.rows(range(number, number + 3)).tolist()
        assert late == [[1, 2 * 10**15], [0, 10**15], [1, 2 * 10**15 + 1]]

    def test_without_weights_all_corpora_end_together(self, tmp_path):
        sizes = (40, 90)
        prefixes = [counting_corpus(tmp_path / str(n), documents=n, seed=n) for n in sizes]
        data = dataset(*prefixes, split="1,1")
        samples = data.train.samples(sequence_length=5, seed=2)
        counts = [part.count for part in samples._parts]
        turns = [samples.turn(number)[0] for number in range(samples.count)]
        assert [turns.count(0), turns.count(1)] == counts
        assert samples.count == sum(counts)

    def test_weights_are_read_as_megatron_writes_them(self, tmp_path):
        a, b = (str(write_corpus(tmp_path / name, [[1]])) for name in "ab")
        assert [part.weight for part in parse_blend([a, b], option="--data-path")] == [None, None]
        parts = parse_blend(["0.3", a, "0.7", b], option="--data-path")
        assert [(str(part.prefix), part.weight) for part in parts] == [
            (a, Fraction(3, 10)),
            (b, Fraction(7, 10)),
        ]
        for wrong in (["0.3", a, b], [a, "0.3", b, "0.7"], ["0.3", "0.7", a, b], ["1"]):
            with pytest.raises(SettingError, match=r"--data-path .*: give a weight before every prefix"):
                parse_blend(wrong, option="--data-path")
        for wrong in ("0", "-1", "inf", "nan"):
            with pytest.raises(SettingError, match=f"weight {wrong} must be above 0"):
                parse_blend([wrong, a], option="--data-path")

    def test_a_corpus_without_a_sample_is_named(self, tmp_path):
        big = counting_corpus(tmp_path / "big", documents=60)
        small = write_corpus(tmp_path / "small", [[1, 2], [3]], code=4)
        with pytest.raises(
            SettingError, match=r"small, documents 0 to 1, has 2 tokens, fewer than one sequence"
        ):
            batches(dataset(big, small, split="1,1"), rank=0, world_size=1, micro=1, accumulation=1)


class TestSplit:
    def test_documents_are_divided_as_megatron_divides_them(self, tmp_path):
        prefix = counting_corpus(tmp_path / "x", documents=1000)
        data = dataset(prefix)
        assert [(split.first, split.last) for split in (data.train, data.validation, data.test)] == [
            (0, 969),
            (969, 999),
            (999, 1000),
        ]
        data = dataset(prefix, split="99,1")
        assert (data.train.last, data.validation.last, data.test) == (990, 1000, None)

    def test_paths_of_their_own(self, tmp_path):
        train, valid, test = (
            counting_corpus(tmp_path / n, documents=50, seed=i) for i, n in enumerate("abc")
        )
        options = {"train_data_path": ("2", train, "1", valid), "valid_data_path": (valid,)}
        data = dataset(**options, test_data_path=(test,))
        assert (data.validation.first, data.validation.last) == (0, 50)
        assert data.test is not None and data.test.corpus.prefix == test
        assert data.train.weights == [2, 1]
        assert data.key != dataset(**options).key
        reader = batches(data, rank=0, world_size=2, micro=2, accumulation=2)
        assert reader.has_test and len(list(reader.test())) == 4
        assert not batches(dataset(**options), rank=0, world_size=1, micro=1, accumulation=1).has_test

    def test_the_key_tells_data_and_splits_apart(self, tmp_path):
        a, b = (counting_corpus(tmp_path / n, documents=50, seed=i) for i, n in enumerate("ab"))
        keys = [
            dataset(*paths, **options).key
            for paths, options in (
                ((a,), {}),
                ((b,), {}),
                ((a, b), {}),
                (("1", a, "2", b), {}),
                ((a,), {"split": "9,1"}),
                ((a,), {"vocabulary_size": VOCABULARY - 1}),
            )
        ]
        assert len(set(keys)) == len(keys)
        assert dataset(a).key == keys[0]


class TestBatches:
    @pytest.mark.parametrize("paths", [["a"], ["a", "b"], ["0.2", "a", "0.8", "b"]])
    def test_a_step_reads_the_same_samples_on_any_world(self, tmp_path, paths):
        for seed, name in enumerate("ab"):
            counting_corpus(tmp_path / name, documents=100, seed=seed)
        data = dataset(*(tmp_path / p if p in ("a", "b") else p for p in paths), split="8,2")

        def step(world_size: int, micro: int, accumulation: int, first: int) -> list[list[int]]:
            rows = []
            for rank in range(world_size):
                reader = batches(
                    data, rank=rank, world_size=world_size, micro=micro, accumulation=accumulation
                )
                for inputs, targets in reader.training(first):
                    assert torch.equal(inputs[:, 1:], targets[:, :-1])
                    rows += torch.cat([inputs, targets[:, -1:]], 1).tolist()
            return sorted(rows)

        for first in (0, 8, 160, 800):
            assert (
                step(1, 8, 1, first) == step(2, 2, 2, first) == step(4, 1, 2, first) == step(8, 1, 1, first)
            )

    def test_validation_is_the_same_on_any_world_for_every_seed_and_time(self, tmp_path):
        data = dataset(counting_corpus(tmp_path / "a", documents=300), split="5,5")

        def read(world_size: int, *, seed: int) -> list[list[int]]:
            readers = [
                batches(data, rank=r, world_size=world_size, micro=8 // world_size, accumulation=1, seed=seed)
                for r in range(world_size)
            ]
            rows = [row for reader in readers for inputs, _ in reader.validation() for row in inputs.tolist()]
            assert rows == [row for reader in readers for x, _ in reader.validation() for row in x.tolist()]
            return sorted(rows)

        assert len(read(1, seed=1)) == 16
        assert read(1, seed=1) == read(2, seed=1) == read(4, seed=2)
        few = dataset(write_corpus(tmp_path / "few", [range(401)] * 2), split="1,1")
        reader = batches(few, rank=0, world_size=2, micro=4, accumulation=1, eval_batches=100)
        assert len(list(reader.validation())) == 40 // 8

    def test_too_little_text_says_what_to_change(self, tmp_path):
        data = dataset(write_corpus(tmp_path / "a", [range(1003), range(400)]), split="1,1")
        with pytest.raises(SettingError, match=r"1003 tokens, fewer than one sequence of 2000"):
            batches(data, rank=0, world_size=1, micro=1, accumulation=1, sequence_length=2000)
        with pytest.raises(SettingError, match=r"400 tokens, fewer than 8 sequences of 100 for 2 ranks"):
            batches(data, rank=0, world_size=2, micro=4, accumulation=1, sequence_length=100)

    def test_a_test_set_that_nobody_asked_for_may_be_empty(self, tmp_path):
        prefix = counting_corpus(tmp_path / "x", documents=40)
        for split in (None, "39,1,0.1"):
            data = dataset(prefix, split=split, cache_dir=tmp_path)
            assert data.test is not None and not data.needs_test
            reader = batches(data, rank=0, world_size=1, micro=1, accumulation=1, eval_batches=1)
            assert not reader.has_test and list(reader.test()) == []
            (note,) = reader.notes
            assert note.startswith(
                "no test after training: the test text has 0 tokens, fewer than 1 sequences"
            )
        # Of several corpora, too.
        others = [counting_corpus(tmp_path / n, documents=100, seed=i) for i, n in enumerate("yw")]
        blend = dataset(*others, cache_dir=tmp_path)
        assert len(batches(blend, rank=0, world_size=1, micro=1, accumulation=1).notes) == 1
        paths = {"train_data_path": (prefix,), "valid_data_path": (prefix,)}
        tiny = dataset(**paths, test_data_path=(write_corpus(tmp_path / "z", [[1, 2]]),))
        with pytest.raises(SettingError, match="the test text has 2 tokens"):
            batches(tiny, rank=0, world_size=1, micro=1, accumulation=1)

    def test_the_loss_after_an_end_of_document_does_not_count(self, tmp_path):
        end = 7
        prefix = write_corpus(tmp_path / "a", [[1, 2, 3, end], [4, end], [5, 6, 1, 2, end]] * 20)
        options = {"vocabulary_size": end, "tokenizer_type": "NullTokenizer", "split": "1,1"}
        plain, masked = dataset(prefix, **options), dataset(prefix, eod_mask_loss=True, **options)
        assert masked.masked_token == end
        pairs = [
            next(batches(data, rank=0, world_size=1, micro=4, accumulation=1).training(0))
            for data in (plain, masked)
        ]
        assert torch.equal(pairs[0][0], pairs[1][0])
        after_end = pairs[0][0] == end
        assert after_end.any()
        assert torch.equal(pairs[1][1], torch.where(after_end, IGNORED_TARGET, pairs[0][1]))

    def test_masking_needs_to_know_the_end(self, tmp_path):
        prefix = write_corpus(tmp_path / "a", [[1, 2, 3]] * 10)
        with pytest.raises(SettingError, match="--eod-mask-loss needs the end-of-document token"):
            dataset(prefix, eod_mask_loss=True)


class TestMockData:
    def test_training_validation_and_test_differ(self):
        alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
        data = prepare_dataset(DataConfig(mock_data=True), ranks=alone)
        seeds = (None, 0, (1 << 64) - 1)
        rows = [
            split.samples(sequence_length=20, seed=seed).rows(range(8))
            for split in (data.train, data.validation, data.test)
            for seed in seeds
        ]
        assert len(np.unique(np.concatenate(rows), axis=0)) == 8 * (9 - 3)  # None is the last of the seeds

    def test_the_tokens_are_frozen(self):
        rows = MockSplit(vocabulary=50257).samples(sequence_length=4, seed=1).rows([0, 10**9])
        assert rows.tolist() == [[35593, 35594, 35595, 35596, 35597], [26854, 26855, 26856, 26857, 26858]]
        # A jump about every 64 tokens.
        rows = MockSplit(vocabulary=1000).samples(sequence_length=200, seed=3).rows(range(50))
        assert 0.9 < (np.diff(rows, axis=1) % 1000 == 1).mean() < 1


def open_and_report(config: DataConfig, other: DataConfig) -> list[str]:
    """Return what both ranks say about a corpus, and about one that the second rank reads elsewhere."""
    ranks = this_rank()
    # Each rank stands for a node of its own.
    ranks = replace(ranks, local_rank=0, local_world_size=1)
    found = [prepare_dataset(config, ranks=ranks).key]
    try:
        prepare_dataset(other if ranks.rank else config, ranks=ranks)
    except SettingError as error:
        found.append(str(error))
    return found


@pytest.mark.gloo
def test_nodes_that_read_other_files_are_an_error_on_all_ranks(tmp_path):
    a = counting_corpus(tmp_path / "a", documents=50, seed=1)
    b = counting_corpus(tmp_path / "b", documents=50, seed=2)
    configs = [DataConfig(data_path=(str(p),), vocabulary_size=VOCABULARY) for p in (a, b)]
    first, second = run_ranks(open_and_report, 2, *configs)
    assert first == second
    assert "rank 1 reads different data than rank 0" in first[1]
    (tmp_path / "b.idx").write_bytes((tmp_path / "b.idx").read_bytes()[:60])
    first, second = run_ranks(open_and_report, 2, *configs)
    assert first == second
    assert "b.idx: arrays: " in first[1]

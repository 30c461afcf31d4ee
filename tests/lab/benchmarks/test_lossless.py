"""What lossless weights cost, measured while a model trains, and how fast they are. Layer: one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import lossless_speed, weight_entropy
from benchmarks.weight_entropy import COLUMNS, entropy, table
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from tests.lab.pretrain.tiny_runs import small, this_rank, write_text
from tests.ranks import run_ranks


def config(tmp_path: Path) -> PretrainConfig:
    plain = small(write_text(tmp_path / "text"), tmp_path / "run", strategy="baseline")
    training = TrainingConfig(steps=4, sequence_length=32, micro_batch_size=2, eval_batches=2)
    return replace(plain, training=training, parallel=ParallelConfig(simulated_ranks=2, ranks_per_node=1))


def measured(config: PretrainConfig) -> None:
    weight_entropy.train_and_measure(config, ranks=this_rank(), every=1, parts=2)


@pytest.mark.slow
def test_entropy_and_bits_of_a_run(tmp_path: Path) -> None:
    run_ranks(measured, 1, config(tmp_path), backend="numba")
    records = [json.loads(line) for line in (tmp_path / "run" / "entropy.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert 0.3 < record["entropy"] < record["sent"] < 16.1
        assert record["sent"] < record["sent with capacity"] < 17
        assert 0 < record["unchanged"] < 0.9
        assert 4 < record["4-bit differences"] < 4.5
    # The first step of Adam moves all weights alike, which no table knows. Blocks are few here, and so the
    # coders' states weigh more than in a model of a million weights.
    assert all(record["sent"] < record["entropy"] + 2 for record in records[1:])
    assert records[-1]["sent with capacity"] < records[0]["sent with capacity"]
    assert (tmp_path / "run" / "table.md").read_text() == table(records, parts=2)


def test_entropy_of_known_changes() -> None:
    """Half of the numbers of one exponent change by one unit, those of the other always: half a bit."""
    before = torch.tensor([1.0, 1.0, 4.0, 4.0]).bfloat16()
    after = torch.tensor([1.0, 1.0 + 2**-7, 4.0 + 2**-5, 4.0 + 2**-5]).bfloat16()
    assert entropy(before, after) == pytest.approx(2.0)
    assert entropy(before, before) == 0


def test_table_has_the_first_step_parts_and_all() -> None:
    records = [
        {"step": step, "lr": 1e-4 * step, **dict.fromkeys(COLUMNS, float(step))} for step in (1, 2, 3, 4, 5)
    ]
    lines = table(records, parts=2).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        ["| 1", "0.0001", "1.000"],
        ["| 2 to 3", "0.0002 to 0.0003", "2.500"],
        ["| 4 to 5", "0.0004 to 0.0005", "4.500"],
        ["| 2 to 5", "0.0002 to 0.0005", "3.500"],
    ]


def test_real_ranks_are_refused(tmp_path: Path) -> None:
    real = replace(config(tmp_path), parallel=ParallelConfig())
    with pytest.raises(SettingError, match="give --simulated-ranks"):
        weight_entropy.train_and_measure(real, ranks=None, every=1)  # type: ignore[arg-type]


def test_speed() -> None:
    found = lossless_speed.measure(40_000, 1e-4, rounds=2)
    assert 2.5 < found["bits"] < 4
    assert min(found["encode"], found["decode"], found["copy"]) > 0

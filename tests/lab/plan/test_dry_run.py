"""`pretrain --dry-run` against the model cards, the sharded model, and arithmetic done by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.tensor import DTensor

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.plan.dry_run import dry_run
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS
from sdp4bit_lab.pretrain.step.parallelize import lay_out, shard_chunks
from tests.ranks import fake_world


def dry_run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["pretrain", "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def parameters_of(card: str) -> int:
    """Return 12 L h^2 + 13 L h + V h + s h, and the 2 h of the last norm, which the paper leaves out."""
    sizes = MODEL_CARDS[card]
    h, padded = sizes.hidden, -(-sizes.vocabulary // 128) * 128
    return sizes.layers * (12 * h**2 + 13 * h) + (padded + sizes.sequence_length + 2) * h


def test_parameter_counts_are_the_model_cards(capsys):
    for card in MODEL_CARDS:
        needs = dry_run_json(capsys, "--preset", card)
        assert needs["parameters"] == parameters_of(card) == needs["parameters_per_rank"]
        used = needs["bytes_per_rank"]
        assert used["main_weights_fp32"] == 4 * needs["parameters"]
        assert used["adam_fp32"] == 8 * needs["parameters"]
        assert used["total"] == sum(size for use, size in used.items() if use != "total")


def test_shards_replica_and_operations_of_a_cluster(capsys):
    needs = dry_run_json(capsys, "--preset", "1.3B", "--world-size", "64", "--ranks-per-node", "4")
    parameters = needs["parameters"]
    # Every dimension 0 but those of the norms and the vocabulary is a multiple of 64; rank 0 has the padding.
    assert parameters / 64 <= needs["parameters_per_rank"] < 1.01 * parameters / 64
    used = needs["bytes_per_rank"]
    assert used["main_weights_fp32"] == 4 * needs["parameters_per_rank"]
    assert used["weight_replica_bf16"] == 2 * 16 * needs["parameters_per_rank"]
    assert needs["data_parallel_size"] == 64
    # Table 2's 18.58e12 per sample, 4 samples on each of 64 ranks.
    assert needs["flops_per_step"] == pytest.approx(256 * 18.58e12, rel=1e-3)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (1, 2), (4, 2)])
def test_a_rank_has_the_shards_of_the_training_program(tensor, pipeline):
    parallel = ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, ranks_per_node=8
    )
    config = PretrainConfig(
        dry_run=True, world_size=32, model=ModelConfig(model_card="6.7B", layers=4), parallel=parallel
    )
    needs = dry_run(config)
    with fake_world(32, rank=0):
        ranks = Ranks(rank=0, world_size=32, local_rank=0, local_world_size=8, device=torch.device("cpu"))
        chunks = shard_chunks(config, layout=lay_out(config, ranks=ranks))
        shards = [p.to_local() if isinstance(p, DTensor) else p for c in chunks for p in c.parameters()]
    assert needs["parameters_per_rank"] == sum(shard.numel() for shard in shards)
    assert needs["bytes_per_rank"]["main weights, fp32"] == 4 * needs["parameters_per_rank"]
    assert needs["data_parallel_size"] == 32 // tensor // pipeline


def test_under_torchrun_one_rank_prints_a_table_for_all(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert main(["pretrain", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert dry_run_json(capsys)["world_size"] == 4
    assert main(["pretrain", "--dry-run", "--preset", "13B", "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("12,853,626,880 parameters, at most 1,606,7") and "main weights, fp32" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "4"], "--world-size has no effect without --dry-run"),
        (["--dry-run", "--world-size", "6", "--ranks-per-node", "4"], "4 does not divide the 6 ranks"),
        (["--dry-run", "--world-size", "2", "--global-batch-size", "9"], "9 is not a multiple of 8"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(arguments, message, capsys):
    assert main(["pretrain", *arguments]) == 2
    assert message in capsys.readouterr().err

"""What --dry-run says of every preset and layout, against the model cards and arithmetic done by hand."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from sdp4bit_lab.cli import main
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["pretrain", "--dry-run", "--json", *arguments]) == 0
    assert not dist.is_initialized()
    return json.loads(capsys.readouterr().out)


def parameters_of(card: str) -> int:
    """Return 12 L h^2 + 13 L h + V h + s h, and the 2 h of the last norm, which the paper leaves out."""
    sizes = MODEL_CARDS[card]
    h, padded = sizes.hidden, -(-sizes.vocabulary // 128) * 128
    return sizes.layers * (12 * h**2 + 13 * h) + (padded + sizes.sequence_length + 2) * h


@pytest.mark.parametrize("card", MODEL_CARDS)
def test_parameter_counts_are_the_model_cards(card, capsys):
    found = said(capsys, "--preset", card)
    assert found["parameters"] == parameters_of(card) == found["parameters_per_rank"]
    used = found["bytes_per_rank"]
    assert used["main_weights_fp32"] == 4 * found["parameters"]
    assert used["adam_fp32"] == 8 * found["parameters"]
    assert all(key.isidentifier() for key in (*found, *used))
    assert used["total"] == sum(size for use, size in used.items() if use != "total")


def test_shards_replica_and_operations_of_a_cluster(capsys):
    found = said(capsys, "--preset", "1.3B", "--world-size", "64", "--ranks-per-node", "4")
    parameters = found["parameters"]
    # Every dimension 0 but those of the norms and the vocabulary is a multiple of 64; rank 0 has the padding.
    assert parameters / 64 <= found["parameters_per_rank"] < 1.01 * parameters / 64
    used = found["bytes_per_rank"]
    assert used["main_weights_fp32"] == 4 * found["parameters_per_rank"]
    assert used["weight_replica_bf16"] == 2 * 16 * found["parameters_per_rank"]
    assert found["data_parallel_size"] == 64
    # Table 2's 18.58e12 per sample, 4 samples on each of 64 ranks.
    assert found["flops_per_step"] == pytest.approx(256 * 18.58e12, rel=1e-3)


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (1, 2), (4, 2), (8, 1)])
def test_model_parallelism_divides_the_parameters(tensor, pipeline, capsys):
    found = said(
        capsys, "--preset", "6.7B", "--world-size", "32", "--ranks-per-node", "8",
        "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline),
    )  # fmt: skip
    assert found["data_parallel_size"] == 32 // tensor // pipeline
    # Embeddings are on the first stage only, and on the last; what tensor ranks have alike is not divided.
    share = found["parameters_per_rank"] * 32 / found["parameters"]
    assert 1 <= share < (1.01 if pipeline == 1 else 1.05)
    assert found["bytes_per_rank"]["main_weights_fp32"] == 4 * found["parameters_per_rank"]


def test_under_torchrun_one_rank_says_it_for_all(capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert main(["pretrain", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert said(capsys)["world_size"] == 4
    assert said(capsys, "--world-size", "8")["world_size"] == 8


def test_the_table_names_every_use(capsys):
    assert main(["pretrain", "--dry-run", "--preset", "13B", "--world-size", "8"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("12,853,626,880 parameters, at most 1,606,7")
    assert "main weights, fp32" in text
    assert "Activations are not counted." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "--json has no effect without --dry-run"),
        (["--world-size", "4"], "--world-size has no effect without --dry-run"),
        (["--dry-run", "--tensor-model-parallel-size", "2"], "does not divide the 1 ranks"),
        (["--dry-run", "--world-size", "6", "--ranks-per-node", "4"], "4 does not divide the 6 ranks"),
        (["--dry-run", "--world-size", "2", "--global-batch-size", "9"], "9 is not a multiple of 8"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message, capsys):
    assert main(["pretrain", *arguments]) == 2
    assert message in capsys.readouterr().err

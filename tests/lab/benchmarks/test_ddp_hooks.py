"""Training with DDP and its hooks, as benchmarks.ddp_hooks does. Layer: processes over gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.ddp_hooks import AllReduceCounter, parse_hook, train
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.trainer import pretrain
from sdp4bit_lab.report.runs import find_runs
from tests.lab.pretrain.tiny_runs import small, this_rank, write_text
from tests.ranks import on_ranks, run_ranks

HOOKS = ("ddp", "ddp-bf16", "ddp-sdp4bit")


def losses(folder: Path, text: Path) -> dict[str, float]:
    """Return the validation loss of FSDP2 in full precision, and of every hook."""
    training = TrainingConfig(
        steps=4,
        sequence_length=32,
        micro_batch_size=2,
        eval_batches=2,
        compute_dtype="fp32",
        precision="fp32",
    )
    config = replace(
        small(text, folder / "fsdp2", strategy="baseline"),
        training=training,
        parallel=ParallelConfig(ranks_per_node=1),
    )
    found = {"fsdp2": pretrain(config, ranks=this_rank()).validation_loss}
    for hook in HOOKS:
        logging = replace(config.logging, out=folder / hook)
        found[hook] = train(replace(config, logging=logging), hook, ranks=this_rank())
    return found


def first_step(folder: Path) -> tuple[float, float]:
    """Return the loss and the gradient norm of the first step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    step = json.loads(lines[0])
    return step["loss"], step["grad_norm"]


def test_hooks_train_the_model_of_pretrain_and_leave_its_files(tmp_path):
    found, other = run_ranks(losses, 2, tmp_path, write_text(tmp_path / "text"))
    assert found == other
    # The sums of gradients are of another order.
    assert found["ddp"] == pytest.approx(found["fsdp2"], abs=2e-5)
    assert found["ddp-bf16"] != found["ddp"] and found["ddp-sdp4bit"] != found["ddp"]
    assert found["ddp-bf16"] == pytest.approx(found["ddp"], abs=2e-3)
    # Before the first step weights are equal. The noise of rounding is independent of the gradient, so that
    # their squares add up: two roundings (of each rank's gradient, and of the sum), each of at most 0.16 of
    # the norm on bell-shaped values. Twice the sum of 0.051 allows for groups with outliers.
    first = {hook: first_step(tmp_path / hook) for hook in HOOKS}
    (loss, norm), (same_loss, noisy_norm) = first["ddp"], first["ddp-sdp4bit"]
    assert same_loss == loss
    assert 1 < (noisy_norm / norm) ** 2 < 1 + 2 * 0.051
    assert max(found.values()) < loss
    runs = {run.label: run for run in find_runs([tmp_path / hook for hook in HOOKS])}
    sent = {label: run.column("inter_bytes")[-1] for label, run in runs.items()}
    assert sent["ddp"] == 2 * sent["ddp-bf16"] > 7 * sent["ddp-sdp4bit"] > 0
    assert json.loads((tmp_path / "ddp" / "config.json").read_text())["ranks"] == 2


@on_ranks(2)
def test_a_ring_of_two_sends_every_value_once():
    counter = AllReduceCounter()
    with counter.counting():
        dist.all_reduce(torch.zeros(1000))
    dist.all_reduce(torch.zeros(1000))
    assert counter.sent_bytes == 4000


def test_hooks_have_names():
    assert parse_hook("ddp") == (None, {})
    assert parse_hook("ddp-powersgd-2")[1]["matrix_approximation_rank"] == 2
    for name in ("powersgd", "ddp-powersgd", "ddp-powersgd-0", "fsdp2"):
        with pytest.raises(SettingError, match=name):
            parse_hook(name)

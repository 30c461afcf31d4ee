"""Weights, masks, tied and replicated parameters in every layout, held against the model in one piece.

Layer: 4 real processes over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.lab.pretrain.step.parallel_runs import (
    LAYOUTS,
    ROUNDING,
    Job,
    laid_out,
    random_batches,
    reference_step,
    whole_model,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo


def check_weights_and_masks(text: Path, folder: Path) -> None:
    for name, layout in LAYOUTS.items():
        config = laid_out(text, **layout)
        initial = dict(whole_model(config).named_parameters())
        batches = random_batches(config, masked=True)
        expected = reference_step(config, batches)
        job = Job(config)
        assert all(torch.equal(value, initial[name]) for name, value in job.parameters().items())
        loss, outcome = job.train(batches)
        assert outcome.tokens == sum(int((targets != -100).sum()) for _, targets in batches)
        assert (loss, outcome.grad_norm) == pytest.approx(expected, rel=ROUNDING), name
        if name == "TP2 x PP2":
            check_load_into_another_layout(job, folder)
        job.comm.remove()


def check_load_into_another_layout(job: Job, folder: Path) -> None:
    """Load the weights by their names into plain data parallelism."""
    trained = job.parameters()
    state = {name: value for chunk in job.model.chunks for name, value in get_model_state_dict(chunk).items()}
    save(state, checkpoint_id=folder)
    other = Job(laid_out(job.config.data.data_path[0], data=4))
    (whole,) = other.model.chunks
    loaded = get_model_state_dict(whole)
    load(loaded, checkpoint_id=folder)
    set_model_state_dict(whole, loaded)
    values = other.parameters()
    assert all(torch.equal(values[name], value) for name, value in trained.items())
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(trained))
    assert set.union(*names) == set(values)
    other.comm.remove()


def check_equal_parameters_stay_equal(text: Path) -> None:
    """Check that quantization does not take apart what two ranks hold alike."""
    for name in ("TP2 x DP2", "PP2 x DP2"):
        options = {**LAYOUTS[name], "param_dtype": "bf16", "strategy": "sdp4bit"}
        # Tensor ranks share a node, which the data ranks, neighbours under PP, must not: on one node weights
        # are not quantized.
        job = Job(laid_out(text, ranks_per_node=2 if name.startswith("TP") else 1, **options))
        assert {group.layout.nodes for group in job.comm.groups} == {2}
        for _ in range(2):
            job.train(random_batches(job.config))
        assert job.comm.stats()["steps"] == 2
        everybody: list[Any] = [None] * 4
        dist.all_gather_object(everybody, (held(job), replicas(job)))
        if name.startswith("TP"):
            for (first, _), (second, _) in (everybody[:2], everybody[2:]):
                alike = [key for key in first if "norm" in key or "position" in key]
                assert len(alike) == 4 * 4 + 2 + 1
                assert all(torch.equal(first[key], second[key]) for key in alike)
        else:
            for (first, rows), (last, rows_of_last) in zip(everybody[:2], everybody[2:], strict=True):
                assert torch.equal(first["token_embedding.weight"], last["token_embedding.weight"])
                assert torch.equal(rows["stage0"], rows_of_last["stage1"])
            assert "stage1.blocks.3" in job.comm.explain(full=True) or "stage0.blocks.1" in job.comm.explain(
                full=True
            )
        job.comm.remove()


def held(job: Job) -> dict[str, torch.Tensor]:
    named = [item for chunk in job.model.chunks for item in chunk.named_parameters()]
    return {name: parameter.to_local().detach() for name, parameter in named}


def replicas(job: Job) -> dict[str, torch.Tensor]:
    return {group.view.name: group.weights.replica.rows for group in job.comm.groups}


def check_every_layout(text: Path, folder: Path) -> None:
    check_weights_and_masks(text, folder)
    check_equal_parameters_stay_equal(text)


def test_weights_masked_means_and_equal_parameters_in_every_layout(text, tmp_path):
    run_ranks(check_every_layout, 4, text, tmp_path, timeout=140)

"""Runs that save, fail while they save, and are resumed: bit for bit, or close.

Layer: gloo, 2 processes that represent 2 nodes.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint_files import CheckpointError, CheckpointWriter
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.trainer import pretrain
from tests.lab.pretrain.saved_runs import names
from tests.lab.pretrain.tiny_runs import losses, small, this_rank, train_here, write_text
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

LIMIT = 200.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    """Return settings of 8 steps on 2 nodes, with dropout."""
    folder = tmp_path_factory.mktemp("runs")
    text = write_text(folder / "text.txt")
    return small(text, folder / "straight", parallel=ParallelConfig(ranks_per_node=1))


def but(
    run: PretrainConfig, name: str, *, save: str = "", load: str = "", **options: object
) -> PretrainConfig:
    """Return the run with a log and checkpoints of its own, beside those of the straight run."""
    base = run.logging.out.parent
    return replace(
        run,
        logging=replace(run.logging, out=base / name),
        checkpoint=CheckpointConfig(
            save=base / save if save else None, load=base / load if load else None, **options
        ),
    )


def fill_disk(run: PretrainConfig) -> tuple[str, int]:
    """Return the error of rank 1's full disk at the save of step 4, and the number of steps trained."""
    limits, is_due, steps = resource.getrlimit(resource.RLIMIT_FSIZE), CheckpointConfig.is_due, list[int]()

    def fill(self: CheckpointConfig, step: int, **options: bool) -> bool:
        steps.append(step)
        if step == 3 and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        return is_due(self, step, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointConfig, "is_due", fill)
        with pytest.raises(CheckpointError) as error:
            train_here(run)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(error.value), steps[-1]


def save_in_every_way(run: PretrainConfig) -> tuple[str, int]:
    """Train the whole run, one that saves, and one whose disk is full."""
    train_here(run, but(run, "saving", save="saved", save_interval=4))
    return fill_disk(but(run, "full", save="full-saved", save_interval=2))


def kill_one_that_saves(run: PretrainConfig) -> None:
    """Kill rank 1 with its part of the checkpoint of step 6 written."""
    write = CheckpointWriter.write_data

    def write_and_die(self: CheckpointWriter, plan: SavePlan, planner: SavePlanner) -> object:
        result = write(self, plan, planner)
        if "step-00000006" in str(self.working):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(CheckpointWriter, "write_data", write_and_die)
        train_here(run)


def resume_and_refuse(run: PretrainConfig) -> list[str]:
    """Resume every run from its last checkpoint before the failure; refuse others."""
    train_here(
        but(run, "saving", load="saved/step-00000004"),
        but(run, "full", load="full-saved"),
        but(run, "killed", load="killed-saved", save="killed-saved"),
    )
    messages = []
    for changed in (
        but(run, "x", load="nowhere"),
        but(run, "x", load="saved"),
        replace(but(run, "x", load="full-saved"), model=ModelConfig(layers=1, hidden=64, heads=2)),
    ):
        with pytest.raises(SettingError) as error:
            pretrain(changed, ranks=this_rank())
        messages.append(str(error.value))
    return messages


def test_saves_and_those_of_a_full_disk_and_a_killed_rank_resume_bit_for_bit(run):
    base = run.logging.out.parent
    outcomes = run_ranks(save_in_every_way, 2, run, timeout=LIMIT)
    straight = losses(run.logging.out)
    assert losses(base / "saving") == straight
    assert names(base / "saved") == ["step-00000004", "step-00000008"]
    # A full disk on one rank ends the run on all, with one error.
    assert outcomes[0] == outcomes[1]
    message, steps = outcomes[0]
    assert steps == 4
    assert message.startswith("the checkpoint of step 4 was not saved: rank 1: "), message
    assert " bytes are free in " in message and message.endswith("Older checkpoints are unchanged")
    assert names(base / "full-saved") == ["step-00000002"]

    with pytest.raises(AssertionError, match="rank 1: ended without a result"):
        run_ranks(
            kill_one_that_saves,
            2,
            but(run, "killed", save="killed-saved", save_interval=2),
            timeout=LIMIT,
        )
    assert names(base / "killed-saved") == [".step-00000006.partial", "step-00000002", "step-00000004"]

    first, second = run_ranks(resume_and_refuse, 2, run, timeout=LIMIT)
    for name in ("saving", "full", "killed"):
        assert losses(base / name) == straight
    assert names(base / "killed-saved") == ["step-00000002", "step-00000004", "step-00000008"]
    assert first == second
    nowhere, finished, other_model = first
    assert "nowhere: no checkpoint found" in nowhere
    assert "has completed 8 steps: set --train-iters to more" in finished
    assert "full-saved/step-00000002 is a checkpoint of a different model: layers 2 (now 1)" in other_model


def resume_as(run: PretrainConfig, *strategies: str) -> dict[str, tuple[list[float], list[str]]]:
    """Return losses from step 5 on, and warnings, by the strategy with which the run continues."""
    results = {}
    for strategy in strategies:
        config = replace(but(run, f"as-{strategy}", load="from/step-00000004"), strategy=strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (result,) = train_here(config)
        texts = [str(w.message) for w in caught if "was saved" in str(w.message)]
        results[strategy] = [step.loss for step in result.steps], texts
    return results


def save_and_resume(run: PretrainConfig) -> dict[str, tuple[list[float], list[str]]]:
    (result,) = train_here(but(run, "from-run", save="from", save_interval=4))
    return {
        "straight": ([s.loss for s in result.steps[4:]], []),
        **resume_as(run, "sdp4bit", "baseline", "tlq"),
    }


@pytest.mark.slow
def test_resuming_elsewhere_or_with_other_quantization_continues_the_loss(run):
    """To other strategies and from 2 ranks to 1, with the same global batch and without dropout.

    Only rounding differs; the bound is that of the FSDP2 tests for a refresh in full precision.
    """
    run = replace(run, model=replace(run.model, dropout=0.0))
    first, _ = run_ranks(save_and_resume, 2, run, timeout=LIMIT)
    expected = first["straight"][0]
    assert first["sdp4bit"] == (expected, [])
    for strategy in ("baseline", "tlq"):
        curve, (text,) = first[strategy]
        assert curve == pytest.approx(expected, abs=0.05) and curve != expected
        assert f"was saved with strategy sdp4bit and continues with {strategy}" in text
    alone = replace(run, training=replace(run.training, micro_batch_size=4))
    (result,) = run_ranks(resume_as, 1, alone, "sdp4bit", timeout=LIMIT)
    curve, (text,) = result["sdp4bit"]
    assert curve == pytest.approx(expected, abs=0.05)
    assert "was saved with world size 2" in text and "not bit-exact" in text

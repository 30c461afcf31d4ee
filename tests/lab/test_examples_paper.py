"""The scripts of the paper's tables: what they ask torchrun and `sdp4bit pretrain` for."""

from __future__ import annotations

import os
import re
import stat
import subprocess

import pytest

from tests import ROOT

pytest.importorskip("rich")

from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from tests.lab.pretrain.data.indexed_corpora import write_corpus, write_vocabulary

pytestmark = pytest.mark.gloo

SCRIPT = ROOT / "examples" / "paper" / "run.sh"
ACCURACY = {"125M": (8, 6e-4), "350M": (8, 3e-4), "1.3B": (4, 2e-4), "6.7B": (2, 1.2e-4)}
# Tensor and pipeline parallel size (table 8) and slices of the gradient exchange.
SPEED = {
    ("a100", "1.3B"): (1, 1, 8), ("a100", "2.7B"): (1, 1, 8), ("a100", "6.7B"): (4, 1, 8),
    ("a100", "13B"): (4, 2, 1), ("a100", "18B"): (4, 2, 1),
    ("h800", "1.3B"): (1, 1, 8), ("h800", "2.7B"): (1, 1, 8), ("h800", "6.7B"): (4, 1, 8),
    ("h800", "13B"): (8, 1, 1), ("h800", "18B"): (8, 1, 1),
}  # fmt: skip


@pytest.fixture
def run_script(tmp_path):
    """Runs a script with a torchrun that only writes down its arguments."""
    vocabulary, merges = write_vocabulary(tmp_path, size=700)
    data = {
        "DATA": str(write_corpus(tmp_path / "corpus", [[1, 2]])),
        "VOCAB": str(vocabulary),
        "MERGES": str(merges),
    }
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(torchrun.stat().st_mode | stat.S_IXUSR)

    def run(*arguments: str, **environment: str) -> tuple[list[str], PretrainConfig]:
        done = subprocess.run(
            [SCRIPT, *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            cwd=tmp_path,
            env={**os.environ, **data, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment},
        )
        arguments = done.stdout.splitlines()
        start = arguments.index("pretrain")
        config = COMMANDS["pretrain"].parse(arguments[start + 1 :])
        assert isinstance(config, PretrainConfig)
        return arguments[:start], config

    return run


@pytest.mark.parametrize("model", ACCURACY)
def test_accuracy_scripts_have_the_settings_of_the_model_cards(model, run_script):
    _, config = run_script("accuracy", model, "--strategy", "tlq-hs")
    micro_batch_size, learning_rate = ACCURACY[model]
    assert config.model.model_card == model
    assert config.strategy_name == "tlq-hs"
    assert (config.micro_batch_size, config.learning_rate) == (micro_batch_size, learning_rate)
    training, optimizer = config.training, config.optimizer
    assert (training.steps, training.global_batch_size, config.sequence_length) == (80000, 256, 2048)
    assert (optimizer.decay_steps, optimizer.warmup_fraction, optimizer.clip_grad) == (70000, 0.01, 1.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert (training.eval_interval, training.eval_batches) == (100, 10)
    assert config.micro_batches(256 // micro_batch_size) == 1
    assert config.checkpoint.load is None


def test_accuracy_scripts_continue_from_the_last_checkpoint(run_script, tmp_path):
    _, config = run_script("accuracy", "125M", RUN=str(tmp_path / "run"))
    assert config.strategy_name == "sdp4bit-paper"
    folder = tmp_path / "run" / "checkpoints"
    assert (config.checkpoint.save, config.checkpoint.auto_resume) == (folder, True)


@pytest.mark.parametrize(("cluster", "model"), SPEED)
def test_speed_scripts_have_the_layouts_of_table_8(cluster, model, run_script):
    torchrun, config = run_script(f"speed-{cluster}", model, NNODES="16", MASTER_ADDR="first")
    tensor, pipeline, chunks = SPEED[cluster, model]
    per_node = torchrun[torchrun.index("--nproc-per-node") + 1]
    assert per_node == {"a100": "4", "h800": "8"}[cluster]
    assert torchrun[torchrun.index("--nnodes") + 1] == "16"
    assert torchrun[torchrun.index("--rdzv-endpoint") + 1] == "first:29500"
    # The paper's method, not the library's default, which adds dither.
    assert config.strategy_name == "sdp4bit-paper"
    assert config.quantization.gradients.inter_rounding == "stochastic"
    assert config.parallel.tensor_model_parallel_size == tensor
    assert config.parallel.pipeline_model_parallel_size == pipeline
    assert config.quantization.gradients.pipeline_chunks == chunks
    assert (config.micro_batch_size, config.micro_batches(16), config.sequence_length) == (1, 1, 2048)
    assert config.data.mock_data


def test_speed_scripts_run_the_baseline_too(run_script):
    for strategy in (["--strategy", "baseline"], ["--strategy=baseline"]):
        _, config = run_script("speed-a100", "6.7B", *strategy)
        # A run refuses the folder of an earlier one.
        assert re.fullmatch(r"runs/speed-a100_6\.7B-\d{8}-\d{6}", str(config.logging.out))
        assert config.quantization.gradients is None
        assert config.quantization.weights is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a table: accuracy, speed-a100 or speed-h800"),
        (["accuracy"], "name a model, such as 125M"),
        (["accuracy", "13B"], "there is no accuracy 13B"),
        (["speed-a100", "125M"], "speed-a100 has no model 125M: use 1.3B"),
    ],
)
def test_a_row_that_the_paper_does_not_have_is_an_error(arguments, message):
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0 and message in done.stderr

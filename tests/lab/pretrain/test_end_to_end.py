"""From text to a resumed run by the commands alone: preprocess, pretrain, SIGKILL, pretrain again.

Layer: 4 real processes over gloo, the `tiny` preset.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest

from tests.lab.common.launch.started_ranks import ranks_of
from tests.lab.pretrain.data.indexed_corpora import library_texts, write_vocabulary
from tests.lab.pretrain.tiny_runs import command_after, command_line, losses

STEPS = 16
SAVE_INTERVAL = 4


def make_corpus(folder: Path) -> list[str]:
    """Return the options that read a corpus of real text, made by `sdp4bit preprocess`."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in library_texts(400)))
    vocabulary, merges = write_vocabulary(folder, size=1000)
    tokenizer = ["--vocab-file", str(vocabulary), "--merge-file", str(merges)]
    done = command_line(
        *("preprocess", "--input", str(text), "--output-prefix", str(folder / "corpus")),
        *("--tokenizer-type", "GPT2BPETokenizer", *tokenizer),
        *("--append-eod", "--workers", "2"),
    )
    assert done.returncode == 0, done.stderr
    return ["--data-path", str(folder / "corpus_text_document"), "--split", "90,10", *tokenizer]


def kill_a_rank(arguments: list[str], *, log: Path, step: int) -> None:
    """Run a command and kill one of its ranks some time after the step."""
    with command_after(step, *arguments, log=log) as process:
        os.kill(random.choice(ranks_of(process.pid)), signal.SIGKILL)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "killed by SIGKILL" in error


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_from_preprocessed_text_resumes_to_the_same_losses(tmp_path):
    data = make_corpus(tmp_path)
    options = [
        *("pretrain", "--preset", "tiny", "--nproc-per-node", "4", "--ranks-per-node", "2", *data),
        *("--train-iters", str(STEPS), "--seq-length", "64", "--micro-batch-size", "1"),
        *("--eval-interval", "8", "--eval-iters", "1", "--no-tensorboard"),
        *("--cache-dir", str(tmp_path / "cache")),
    ]
    whole = command_line(*options, "--out", str(tmp_path / "whole"), timeout=400)
    assert whole.returncode == 0, whole.stderr

    saved = ["--save", str(tmp_path / "checkpoints"), "--save-interval", str(SAVE_INTERVAL)]
    broken = [*options, *saved, "--out", str(tmp_path / "broken")]
    step = random.randint(SAVE_INTERVAL + 2, STEPS - 2)
    kill_a_rank(broken, log=tmp_path / "broken" / "metrics.jsonl", step=step)
    resumed = command_line(*broken, "--load", str(tmp_path / "checkpoints"), timeout=400)
    assert resumed.returncode == 0, resumed.stderr

    expected = losses(tmp_path / "whole")
    assert len(expected) == STEPS + 2
    assert losses(tmp_path / "broken") == expected, f"killed after step {step}"

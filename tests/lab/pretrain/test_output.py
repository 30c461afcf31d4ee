"""Lines of a run on the console. Layer: gloo."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.trainer import pretrain
from tests.lab.pretrain.tiny_runs import small, this_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo


def outputs(configs, parts):
    """Collect the lines of each run, on the first rank."""
    lines = []
    for config, part in zip(configs, parts, strict=True):
        console = Console(file=io.StringIO())
        pretrain(config, ranks=this_rank(), console=console, part=part)
        lines.append(console.file.getvalue().splitlines())
    return lines


def test_a_run_ends_with_what_it_has_measured_and_how_to_go_on(text, tmp_path):
    run = small(text, tmp_path / "out")
    run = replace(run, training=replace(run.training, steps=2), parallel=ParallelConfig(ranks_per_node=1))
    saving = replace(run, checkpoint=CheckpointConfig(save=tmp_path / "saved"), strategy="baseline")
    saving = replace(saving, logging=replace(run.logging, out=tmp_path / "baseline", tensorboard=True))
    flags = CommunicationConfig(quantized_weights=True)
    measured = replace(run.logging, telemetry_interval=1)
    flagged = replace(run, strategy=None, communication=flags, logging=measured)
    alone, saved, one = run_ranks(outputs, 2, [run, saving, flagged], [None, None, "run 1 of 6"])[0]
    lines = (line.removeprefix("sdp4bit: ") for line in alone[-6:])
    steps, sent, inside, why, checkpoint, following = lines
    assert steps.startswith("2 steps in ") and ", training loss " not in steps.partition(";")[0]
    assert "; training loss " in steps and ", validation loss " in steps
    assert re.fullmatch(
        r"inter-node: [\d.]+ kB per step, [\d.]+ [kM]B in total \([\d.]+x fewer than plain FSDP2\)", sent
    )
    assert why == "about the ratio: docs/telemetry.md#why-your-ratio-differs"
    assert inside == "intra-node: 0 B per step"
    assert checkpoint == "checkpoint: none (--save was not given)"
    assert following == f"next: sdp4bit report {tmp_path / 'out'}"
    assert saved[-1] == f"baseline: next: tensorboard --logdir {tmp_path / 'baseline/tensorboard'}"
    assert saved[-3] == f"baseline: checkpoint: {tmp_path / 'saved'}, step 2"
    assert "fewer than plain" not in saved[-5]
    # One of several leaves that to the command that trains them, and every line names the run.
    assert all(line.startswith(f"[qwd {run.seed}] ") for line in one)
    assert one[0].endswith("] run 1 of 6")
    assert one[1].endswith(", same as strategy qwd") and "same as" not in alone[1]
    assert "intra-node" in one[-1]
    assert alone[0] == f"sdp4bit: writes to {tmp_path / 'out'}"
    assert max(map(len, alone[1:-2])) <= 100

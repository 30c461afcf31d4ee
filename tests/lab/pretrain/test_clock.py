"""The clock of a run does not count the compilation of kernels. Layer: 2 processes."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from sdp4bit_lab.pretrain import loop
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.trainer import pretrain
from tests.lab.pretrain.tiny_runs import small, this_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

COMPILED = 1e6
"""Seconds that one rank claims to have compiled in its first step."""


def seconds_of_steps(config: PretrainConfig) -> tuple[list[float], float]:
    calls = itertools.count()
    if dist.get_rank() == 1:
        # At the start of a step and after its backward pass.
        loop.compile_seconds = lambda: COMPILED * min(next(calls), 1)
    result = pretrain(config, ranks=this_rank())
    return [step.step_seconds for step in result.steps], result.step_seconds


def test_all_ranks_leave_out_the_longest_compilation(text, tmp_path):
    config = small(text, tmp_path / "run", parallel=ParallelConfig(ranks_per_node=1))
    for seconds, median in run_ranks(seconds_of_steps, 2, config, timeout=240):
        assert seconds[0] < 0
        assert all(each > 0 for each in seconds[1:])
        assert min(seconds[1:]) <= median <= max(seconds[1:])

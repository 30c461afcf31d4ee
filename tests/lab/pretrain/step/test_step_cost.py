"""Collectives and waits of the host that a training step of `pretrain` adds to those of FSDP2 and sdp4bit.

Layer: two processes over gloo.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.lab.pretrain.tiny_runs import small, train_here
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list")
READS = ("item", "tolist", "__bool__", "__float__", "__int__")


def _is_pretrain_s(depth: int) -> bool:
    return "/sdp4bit_lab/pretrain/" in sys._getframe(depth).f_code.co_filename


def counted(text: Path, out: Path, steps: int) -> Counter[str]:
    """Count the collectives and reads that a run of so many steps calls in the files of `pretrain`."""
    counts: Counter[str] = Counter()

    def counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[kind] += _is_pretrain_s(2)
            return function(*args, **options)

        return call

    config = small(text, out)
    training = replace(config.training, steps=steps, eval_interval=1000)
    config = replace(config, training=training, logging=replace(config.logging, log_interval=1000))
    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, counting("collectives", getattr(dist, name))))
        for name in READS:
            read = counting("reads", getattr(torch.Tensor, name))
            patches.enter_context(mock.patch.object(torch.Tensor, name, read))
        train_here(config)
    return counts


def counted_twice(text: Path, folder: Path) -> list[Counter[str]]:
    return [counted(text, folder / str(steps), steps) for steps in (1, 3)]


def test_a_step_has_two_collectives_and_one_wait_of_its_own(text: Path, tmp_path: Path) -> None:
    """The number of tokens before the backward pass; everything else in one exchange, which is read once."""
    for few, many in run_ranks(counted_twice, 2, text, tmp_path):
        assert many["collectives"] - few["collectives"] == 2 * 2
        assert many["reads"] - few["reads"] == 2 * 1

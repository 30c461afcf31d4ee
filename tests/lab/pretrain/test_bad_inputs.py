"""Settings, versions and files that cannot work: one error on every rank, which names value and place.

Layer: 2 processes over gloo, the pretraining program; one world for all cases, as it goes on after each.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sdp4bit.config import VERSION
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.trainer import pretrain
from tests.lab.pretrain.saved_runs import TENSORS, flip_bit
from tests.lab.pretrain.tiny_runs import small, this_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

Case = Callable[[PretrainConfig, Path], PretrainConfig]


def other_settings(run: PretrainConfig, folder: Path) -> PretrainConfig:
    if dist.get_rank() == 0:
        return replace(run, logging=replace(run.logging, out=folder / "elsewhere"))
    return replace(run, seed=7, training=replace(run.training, steps=9))


def damaged(run: PretrainConfig, folder: Path) -> PretrainConfig:
    path = folder / "damaged" / "step-00000002"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "saved" / "step-00000002", path)
        flip_bit(path / TENSORS.format(2))
    dist.barrier()
    return replace(run, checkpoint=CheckpointConfig(load=path))


CASES: dict[Case, str] = {
    other_settings: "the ranks differ: --seed is 5 on rank 0, 7 on rank 1; --train-iters is 2 "
    "on rank 0, 9 on rank 1. Use the same command line and versions",
    damaged: f"the checksum of {TENSORS.format(2)} differs from SHA256SUMS",
}


def errors_of(run: PretrainConfig, folder: Path) -> dict[str, str]:
    saving = replace(run, checkpoint=CheckpointConfig(save=folder / "saved"))
    saving = replace(saving, logging=replace(run.logging, out=folder / "first"))
    pretrain(saving, ranks=this_rank())
    messages = {}
    for case in CASES:
        changed = case(run, folder)
        with pytest.raises(SettingError) as error:
            pretrain(changed, ranks=this_rank())
        messages[case.__name__] = str(error.value)
    for where in ("sdp4bit_lab.pretrain.config.same_settings", "sdp4bit.engines.agreement"):
        version = "0.0.9" if dist.get_rank() else VERSION
        with mock.patch(f"{where}.VERSION", version), pytest.raises(SettingError) as error:
            pretrain(run, ranks=this_rank())
        messages[where] = str(error.value)
    return messages


def test_what_cannot_work_is_one_error_on_every_rank(text: Path, tmp_path: Path) -> None:
    run = small(text, tmp_path / "run", parallel=ParallelConfig(ranks_per_node=1))
    run = replace(run, training=replace(run.training, steps=2))
    first, second = run_ranks(errors_of, 2, run, tmp_path, timeout=120)
    assert first == second
    for case, message in CASES.items():
        assert message in first[case.__name__], case
        assert "\n" not in first[case.__name__]
    assert (
        f"sdp4bit is {VERSION} on rank 0, 0.0.9 on rank 1"
        in first["sdp4bit_lab.pretrain.config.same_settings"]
    )
    attached: Any = first["sdp4bit.engines.agreement"]
    assert f"sdp4bit: {VERSION} [rank 0], 0.0.9 [rank 1]" in attached

"""Errors of the trainers' modules without a trainer, or with one process. Layer: no process."""

from __future__ import annotations

import importlib
import sys

import pytest
from torch import nn

from sdp4bit.trainers import attachment


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("hf", ["accelerate", "transformers"]),
        ("accelerate", ["accelerate"]),
        ("lightning", ["lightning"]),
        ("torchtitan", ["torchtitan"]),
        ("olmo-core", ["olmo_core"]),
        ("axolotl", ["axolotl"]),
    ],
)
def test_a_missing_trainer_is_an_error_that_names_the_extra(
    extra: str, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"sdp4bit.trainers.{extra.replace('-', '_')}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as error:
        importlib.import_module(module)
    assert f'pip install ".[{extra}]"' in str(error.value)


def test_one_process_is_told_that_it_has_nobody_to_communicate_with() -> None:
    with pytest.raises(ValueError, match=r"Switch needs .* or DDP, but there is one process.*Set it so\."):
        attachment.attach(nn.Linear(2, 2), caller="Switch", switch="Set it so.")

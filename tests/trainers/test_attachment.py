"""What the trainers share, where none is installed. Layer: fresh processes, plain modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

from sdp4bit.trainers import attachment
from tests import ROOT

WITHOUT = """
import sys
for name in {packages}:
    sys.modules[name] = None
try:
    import sdp4bit.trainers.{extra}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("hf", ["accelerate", "transformers"]),
        pytest.param("accelerate", ["accelerate"], marks=pytest.mark.slow),
        pytest.param("lightning", ["lightning"], marks=pytest.mark.slow),
        pytest.param("torchtitan", ["torchtitan"], marks=pytest.mark.slow),
    ],
)
def test_a_missing_trainer_is_an_error_that_names_the_extra(extra: str, packages: list[str]) -> None:
    code = WITHOUT.format(packages=packages, extra=extra)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    assert f"pip install 'sdp4bit[{extra}]'" in done.stdout


def test_one_process_is_told_that_it_has_nobody_to_communicate_with() -> None:
    with pytest.raises(ValueError, match=r"Switch needs .* FSDP2, but there is one process.*Set it so\."):
        attachment.attach(nn.Linear(2, 2), caller="Switch", switch="Set it so.")

"""Every test that claims to train like plain FSDP2 notices when the communication is broken.

Layer: pytest in a process of its own for each file of claims; 2 gloo processes.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from functools import partial

import pytest

from sdp4bit import SDP4BitConfig
from tests import ROOT, mutations
from tests.ranks import on_ranks
from tests.toy import IDENTITY, QUANTIZED, Run, assert_close, assert_close_to_plain, assert_equal, build

ORACLES = ("assert_close_to_plain(", "assert_variants_equal(", "check_way(")
CLAIMS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
    if any(oracle in path.read_text() for oracle in ORACLES) and path.name != "test_mutations.py"
)


@pytest.mark.parametrize("file", CLAIMS)
def test_every_claim_is_marked(file: str) -> None:
    """`--mutations` selects tests by their mark."""
    for test in ast.parse((ROOT / file).read_text()).body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            text = ast.unparse(test)
            assert "mark.like_plain" in text or not any(oracle in text for oracle in ORACLES), test.name


def assert_no_mutation_survives(file: str) -> None:
    """Break the communication of every claim in the file in every way."""
    options = [
        "-q",
        "-rs",
        "--mutations",
        "-m",
        "slow or not slow",
        "--timeout",
        "1500",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # All claims of a file may be for a newer torch, whose tests run this test, too.
    assert " passed" in done.stdout or ": since torch " in done.stdout, done.stdout


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", [file for file in CLAIMS if not file.startswith("tests/megatron/")])
def test_no_mutation_survives(file: str) -> None:
    assert_no_mutation_survives(file)


def training(config: SDP4BitConfig | None) -> list[float]:
    return Run(build(), config, topology=1).train(2).finish()


@on_ranks(2)
def test_both_halves_of_the_oracle_notice_what_adamw_hides() -> None:
    for check in ((IDENTITY, assert_equal), (QUANTIZED, assert_close)):
        for name in ("the rank's own row only", "times 4", mutations.PREVIOUS):
            with mutations.broken(name) as fired, pytest.raises(AssertionError):
                assert_close_to_plain(training, checks=[check])
            assert fired


@pytest.mark.slow
@on_ranks(2)
def test_a_claim_that_notices_too_little_is_found() -> None:
    mutations.search()
    loose = partial(assert_close, loss=0.03, gradient=math.inf)
    survivors = "does not notice: the rank's own row only, .*times 4"
    with pytest.raises(AssertionError, match=survivors):
        assert_close_to_plain(training, checks=[(QUANTIZED, loose)])
    with pytest.raises(AssertionError, match=r"does not notice: rank 0's main weights \(listed"):
        assert_close_to_plain(training, harmless=[mutations.FIRST_RANK])

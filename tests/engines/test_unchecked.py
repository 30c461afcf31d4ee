"""Exactness, sections, edits, checkpoints, DDP and HSDP with the operators of a training.

Other tests of the engines use the reference and operators that check their arguments. Here the same scenarios
choose the back end as users do, which is that of the CPU kernels, and check nothing.

Layer: 2 and 4 real processes over gloo.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sdp4bit.quantization import ops
from tests.engines.ddp import test_hook
from tests.engines.fsdp2 import (
    test_checkpoint,
    test_edits,
    test_exactness,
    test_hybrid,
    test_load,
    test_sections,
)
from tests.ranks import run_ranks

pytest.importorskip("numba", reason="needs numba")

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(1800)]

PRELOAD = ["sdp4bit.kernels.cpu.backend", *test_edits.PRELOAD]
Test = Callable[..., None]
SCENARIOS: dict[int, list[Test]] = {
    2: [
        test_exactness.test_two_ranks_with_the_identity_equal_plain_fsdp2_bit_for_bit,
        test_edits.test_edits_are_sent_by_their_size_and_steps_hold_them,
        test_checkpoint.test_a_run_that_goes_back_in_its_own_process_repeats_itself,
        test_hook.test_gradients_are_averaged_as_by_plain_ddp,
    ],
    4: [
        test_sections.test_no_value_is_changed_through_a_neighbour,
        test_hybrid.test_communication_does_not_change_within_an_accumulation,
    ],
}
"""One or two of each file, by the number of ranks."""
MODULES = (test_checkpoint, test_edits, test_exactness, test_hook, test_hybrid, test_load, test_sections)


SLOW = {
    ranks: [
        test
        for module in MODULES
        for test in vars(module).values()
        if hasattr(test, "in_rank")
        and test.ranks == ranks
        and {*inspect.signature(test).parameters} <= {"tmp_path"}
    ]
    for ranks in (2, 4)
}
"""All tests of these files that each rank calls without parameters."""


def run_all(tests: Sequence[Test], folder: Path) -> None:
    """Run tests in this rank, one after the other, with unchecked kernels."""
    for number, test in enumerate(tests):
        arguments = [folder / str(number)] * len(inspect.signature(test).parameters)
        test.in_rank(*arguments)  # type: ignore[attr-defined]
    assert ops.backend_name("cpu") == "numba" and "auto:cpu" in ops._loaded and not ops._is_checked


@pytest.mark.parametrize("ranks", SCENARIOS)
def test_scenarios_of_each_file_pass_with_unchecked_kernels(ranks: int, tmp_path: Path) -> None:
    run_ranks(run_all, ranks, SCENARIOS[ranks], tmp_path, timeout=400.0, backend="auto", checked=False)


@pytest.mark.slow
@pytest.mark.parametrize("test", [*SLOW[2], *SLOW[4]], ids=lambda test: f"{test.__module__}::{test.__name__}")
def test_all_scenarios_pass_with_unchecked_kernels(test: Any, tmp_path: Path) -> None:
    run_ranks(run_all, test.ranks, [test], tmp_path, timeout=400.0, backend="auto", checked=False)

"""Exactness, sections, edits, checkpoints, DDP and HSDP with the operators of a training.

Other tests of the engines use the reference and operators that check their arguments. Here the same scenarios
choose the back end as users do, which is that of the CPU kernels, and check nothing.

Layer: 2 and 4 real processes over gloo.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.tables import Table
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
from tests.toy import Run, ToyGPT, shard

pytest.importorskip("numba", reason="needs numba")

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(1800)]

PRELOAD = ["sdp4bit.kernels.cpu.backend", *test_edits.PRELOAD]
Test = Callable[..., None]
OPERATORS = (
    *("subtract_quantize", "dequantize_add", "hadamard_quantize"),
    *("dequantize_reduce_quantize", "dequantize_reduce_hadamard"),
)
"""Those of FSDP2 on several nodes with several ranks each."""
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
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        arguments = [own] * len(inspect.signature(test).parameters)
        test.in_rank(*arguments)  # type: ignore[attr-defined]
    assert ops.backend_name("cpu") == "numba" and "auto:cpu" in ops._loaded and not ops._is_checked


@pytest.mark.parametrize("ranks", SCENARIOS)
def test_scenarios_of_each_file_pass_with_unchecked_kernels(ranks: int, tmp_path: Path) -> None:
    run_ranks(run_all, ranks, SCENARIOS[ranks], tmp_path, timeout=400.0, backend="auto", checked=False)


@pytest.mark.slow
@pytest.mark.parametrize("test", [*SLOW[2], *SLOW[4]], ids=lambda test: f"{test.__module__}::{test.__name__}")
def test_all_scenarios_pass_with_unchecked_kernels(test: Any, tmp_path: Path) -> None:
    run_ranks(run_all, test.ranks, [test], tmp_path, timeout=400.0, backend="auto", checked=False)


def run_steady_step() -> None:
    run = Run(shard(ToyGPT()), SDP4BitConfig(gradients=GradientConfig(min_numel=0)), topology=2)
    run.train(4)
    ran: Counter[str] = Counter()
    real = Table.run

    def noted(table: Table, call: int, *tensors: Tensor) -> None:
        ran[table.calls[0].operator] += 1
        real(table, call, *tensors)

    one_by_one = mock.Mock(side_effect=AssertionError("a table is not packed"))
    with (
        mock.patch.object(Table, "run", noted),
        mock.patch.object(Table, "_run_one_by_one", one_by_one),
    ):
        run.train(1)
    assert ran == dict.fromkeys(OPERATORS, len(run.comm.groups)), ran


def test_a_steady_step_takes_one_call_of_the_host_per_operator_and_group() -> None:
    run_ranks(run_steady_step, 4, timeout=400.0, backend="auto", checked=False)

"""Lossless weights on Megatron-Core: equal to plain Megatron bit for bit. Layer: processes over gloo."""

from __future__ import annotations

import pytest

from sdp4bit import SDP4BitConfig, WeightConfig
from tests.engines.megatron.runs import MegatronRun
from tests.engines.megatron.test_training import OVERLAP, SYNC
from tests.ranks import run_ranks

EXACT = SDP4BitConfig(weights=WeightConfig(mode="lossless"), gradients=None)


def train(tp: int, steps: int) -> None:
    for options in (SYNC, OVERLAP):
        plain = MegatronRun(None, tp=tp, **options).train(steps).finish()
        run = MegatronRun(EXACT, tp=tp, topology=1, **options).train(steps)
        assert run.finish() == plain
        assert run.comm.stats()["lossless_bits"] > 0.5
        table = run.comm.explain()
        assert "lossless, in the parameter buffer, " in table
        # Nothing is rounded: what tensor-parallel ranks hold alike needs no way of its own.
        assert "exact (equal under TP)" not in table


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_equal_to_plain_megatron_bit_for_bit(tp: int) -> None:
    run_ranks(train, 2 * tp, tp, 6, backend="numba")

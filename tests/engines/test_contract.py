"""What no engine may break: ranks hold equal weights after an exception, and no rounding key is used twice.

The rules hold in the library and not in the engines, so engines of one's own are tested with the others. An
engine that is added later is another class in `ENGINES`.

Layer: 2 and 4 processes over gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.quantization import ops
from tests.engines.own_engines import Own, OwnAllReduces, OwnGathers
from tests.engines.test_events import DDP, FSDP2, HSDP, DeepSpeed, Engine, MegatronCore
from tests.ranks import run_ranks
from tests.rounding_keys import check_unique, drawn_keys

pytestmark = pytest.mark.gloo

CONFIG = SDP4BitConfig(
    weights=WeightConfig(group_size=32), gradients=GradientConfig(min_numel=0, inter_rounding="dither")
)
OPERATORS = (
    *("subtract_quantize", "dequantize_add", "hadamard_quantize", "dequantize_reduce_quantize"),
    *("dequantize_reduce_hadamard", "dequantize_reduce_pieces"),
)


@contextmanager
def counted(*, failing: str = "", at: int = 1) -> Iterator[Counter[str]]:
    """Count the calls of operators; the given call of one of them fails, as for a lack of memory."""
    calls: Counter[str] = Counter()

    def wrapped(name: str) -> Any:
        real = getattr(ops, name)

        @wraps(real)  # with the name and the arguments by which it is recorded
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            if name == failing and calls[name] == at:
                raise torch.OutOfMemoryError("on purpose")
            return real(*args, **options)

        return call

    with mock.patch.multiple(ops, **{name: wrapped(name) for name in OPERATORS}):
        yield calls


def tear(engine: Any, folder: Path) -> None:
    run = engine(CONFIG, folder)
    # Megatron-Core and DeepSpeed gather weights in the optimizer step, and the others in the next forward.
    refresh = run.train if engine in (MegatronCore, DeepSpeed) else run.evaluate
    run.train()
    with counted() as calls:
        refresh()
    run.train()
    # The last group, because the other ranks would wait for a rank that leaves the others out.
    is_failing = dist.get_rank() == 1
    raised = pytest.raises(torch.OutOfMemoryError) if is_failing else nullcontext()
    with counted(failing="dequantize_add" if is_failing else "", at=calls["dequantize_add"]), raised:
        refresh()
    run.recover()
    for _ in range(2):
        run.train()
    assert run.comm.audit()
    # HSDP shards over pairs of ranks, and the other pair was not torn.
    assert (run.comm.stats()["full_refreshes"] > 0) == (dist.get_rank() < 2)


def counters_of(run: Engine) -> list[dict[str, int]]:
    """Return all that groups save, except for the level: an engine may begin with full precision."""
    return [{**group.state(), "due": 0} for group in run.comm.groups]


def resume(engine: Any, folder: Path) -> None:
    with drawn_keys() as keys:
        run = engine(CONFIG, folder)
        for _ in range(2):
            run.train()
        run.evaluate()
        saved, counters = run.save(), counters_of(run)
        resumed = engine(CONFIG, folder)
        resumed.load(saved)
        assert engine is DDP or counters_of(resumed) == counters  # a bucket of DDP has none
        for _ in range(2):
            resumed.train()
    check_unique(keys, at_least=4)


def fail_everywhere(engine: Any, folder: Path) -> None:
    """One operator after the other fails once on all ranks, and the loop takes the next batch."""
    run, failed = engine(CONFIG, folder), 0
    with drawn_keys() as keys:
        run.train()
        for operator in OPERATORS:
            with counted(failing=operator) as calls:
                try:
                    run.train()
                except torch.OutOfMemoryError:
                    run.recover()
            failed += calls[operator] > 0
            run.train()
    check_unique(keys, at_least=4)
    assert run.comm.audit() and failed >= 2  # DDP on two ranks needs two


SENDS_WEIGHTS = [
    FSDP2,
    pytest.param(HSDP, marks=pytest.mark.slow),
    Own,
    OwnGathers,
    OwnAllReduces,
    pytest.param(
        MegatronCore,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed"),
        ],
    ),
    pytest.param(
        DeepSpeed,
        marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="make test-ecosystem"),
    ),
]
ENGINES = [*SENDS_WEIGHTS, DDP]


@pytest.mark.parametrize("engine", SENDS_WEIGHTS)
def test_a_refresh_that_failed_on_one_rank_is_repeated_by_all(engine: Any, tmp_path: Path) -> None:
    run_ranks(tear, engine.ranks, engine, tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_continues_all_counters(engine: Any, tmp_path: Path) -> None:
    run_ranks(resume, engine.ranks, engine, tmp_path)


@pytest.mark.parametrize("engine", [Own, OwnGathers, OwnAllReduces, DDP])
def test_an_exception_in_any_operator_costs_a_batch(engine: Any, tmp_path: Path) -> None:
    run_ranks(fail_everywhere, engine.ranks, engine, tmp_path)

"""The Triton kernels write the bytes of the reference, and nothing else.

On a GPU if there is one, and in Triton's interpreter otherwise. Triton decides at its import whether it
interprets, so without a GPU this file runs itself in a process of its own, and the rest of the test session
never sees an interpreted kernel. No two programs of a launch may store to one address, as a GPU runs them in
any order.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import ROOT

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

from sdp4bit.kernels.triton import backend as cuda
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit_lab.selftest.cases import BY_SHAPE, SHAPES, KernelCase, Shape
from tests.kernels.byte_tests import ByteTests, compare
from tests.quantization.property_cases import CALLS, hold

IS_INTERPRETED = not cuda._IS_COMPILED
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU and not IS_INTERPRETED else "cpu")
RUNS_HERE = IS_INTERPRETED or HAS_GPU

DEFAULT_TESTS = "not gpu and not slow"
SOME = settings(
    deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)


def run_in_interpreter(marker: str) -> None:
    added = f"{ROOT / 'tests/kernels/test_new_formats.py'}::test_kernels_write_the_bytes_of_the_reference"
    options = ["-q", "-x", "-m", marker, "-k", "not numba", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, __file__, added]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850 if marker == DEFAULT_TESTS else 1750,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    assert " passed" in result.stdout, result.stdout[-6000:]


@pytest.mark.timeout(900)
@pytest.mark.skipif(RUNS_HERE, reason="the kernels are tested in this process")
def test_bytes_in_interpreter():
    run_in_interpreter(DEFAULT_TESTS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(RUNS_HERE, reason="the kernels are tested in this process")
def test_random_configurations_in_interpreter():
    run_in_interpreter("slow")


@pytest.mark.skipif(IS_INTERPRETED, reason="interpreted kernels take CPU tensors")
def test_cpu_tensors_are_refused_with_the_way_out():
    layout = MessageLayout(numel=64, bits=4, group_size=32)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    with ops.use_backend("triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        ops.subtract_quantize(torch.zeros(64), replica=None, out=out, layout=layout)


INTERPRETED_BY_DEFAULT = {(128, 0), (160, 160 * 2 + 96 + 7)}
"""Shapes of the quick tests; the slow tests add the others."""


@pytest.fixture(
    params=[
        pytest.param(shape, marks=[] if shape[1:3] in INTERPRETED_BY_DEFAULT else [pytest.mark.slow])
        for shape in SHAPES
    ],
    ids=str,
)
def shape(request: pytest.FixtureRequest) -> Shape:
    chosen: Shape = request.param
    return chosen


@contextmanager
def no_shared_stores() -> Iterator[None]:
    """Raise AssertionError if two programs of an interpreted launch store to one address."""
    builder, launches = interpreter_builder, 0
    set_grid_dim, create_masked_store = builder.set_grid_dim, builder.create_masked_store
    stored: dict[object, list[npt.NDArray[np.uint64]]] = {}

    def check() -> None:
        if launches:
            addresses = np.concatenate([np.unique(np.concatenate(each)) for each in stored.values()])
            assert len(addresses) == len(np.unique(addresses)), "two programs store to one address"
        stored.clear()

    def start(*grid: int) -> None:
        nonlocal launches
        check()
        launches += 1
        set_grid_dim(*grid)

    def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        stored.setdefault(builder.grid_idx, []).append(addresses.ravel())
        return create_masked_store(pointers, value, mask, *rest)

    with (
        patch.object(builder, "set_grid_dim", start),
        patch.object(builder, "create_masked_store", store),
    ):
        yield
        assert launches and len(stored) > 1
        check()


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """Few programs with several tiles each, in the interpreter."""
    if not IS_INTERPRETED:  # a GPU compares the grid that users run
        yield
        return
    with patch.multiple(cuda, _resident_warps=lambda _: 3, _WAVES=1):
        yield


@pytest.mark.skipif(not IS_INTERPRETED, reason="the interpreter shows what programs store")
@pytest.mark.parametrize("make", BY_SHAPE)
def test_no_two_programs_store_to_one_address(make: Callable[[Shape], Iterator[KernelCase]]) -> None:
    case = next(make(Shape(0, 128, 2500, False)))
    with patch.object(cuda, "_resident_warps", lambda _: 24), no_shared_stores():  # several programs
        compare_unless_too_old(case.operator, case.first, **case.named)


def compare_unless_too_old(*args: Any, **named: Any) -> None:
    with skipped_if_too_old():
        compare(*args, backend="triton", device=DEVICE, **named)


@contextmanager
def skipped_if_too_old() -> Iterator[None]:
    """Skip if this is Triton before 3.7 and NumPy since 2.4: no interpreted loop to a bound at run time."""
    try:
        yield
    except InterpreterError as error:
        if "only 0-dimensional arrays can be converted to Python scalars" in str(error):
            pytest.skip("this Triton cannot interpret a loop to a bound at run time with this NumPy")
        raise


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the overflows that are meant
class TestBytes(ByteTests):
    __test__ = RUNS_HERE
    backend, device = "triton", DEVICE
    running = staticmethod(skipped_if_too_old)

    def compare(self, *args: Any, **named: Any) -> None:
        compare_unless_too_old(*args, **named)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", CALLS)
    def test_any_call(self, name):
        def check(call: tuple[Any, dict[str, Any]]) -> None:
            compare_unless_too_old(getattr(ops, name), call[0], **call[1])

        hold(SOME, CALLS[name](), check, name=name)

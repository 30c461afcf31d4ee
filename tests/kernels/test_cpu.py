"""The numba kernels write the bytes of the reference, and nothing else, on any number of threads.

Layer: no process, except for the tests of the start of a process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from tests import ROOT

pytest.importorskip("numba", reason="needs numba")

import numba

from sdp4bit.kernels.cpu import compilation, kernels, programs
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit_lab.selftest.cases import KEY, SHAPES, Shape, guarded_messages, make_values, whole
from tests.kernels import compiled_once
from tests.kernels.byte_tests import ByteTests
from tests.kernels.compiled_once import compile_one
from tests.quantization.table_cases import quantizing


@pytest.fixture
def two_threads() -> Iterator[None]:
    """The least of work is divided among two threads; test_properties.py of quantization draws one or two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_VALUES_PER_THREAD", 1)
        previous = torch.get_num_threads()
        torch.set_num_threads(2)
        yield
        torch.set_num_threads(previous)


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    chosen: Shape = request.param
    return chosen


@pytest.mark.usefixtures("two_threads")
class TestBytes(ByteTests):
    backend = "numba"


def quantize_long(main: Tensor, out: Tensor) -> None:
    """Divided among all threads, whatever the least of work for one."""
    ops.hadamard_quantize(main.view(1, 1, -1), out=out, layout=LONG_LAYOUT, hadamard=True, rounding=KEY)


LONG = 1 << 18
LONG_LAYOUT = MessageLayout(numel=LONG, bits=8, group_size=128)


class TestCalls:
    def test_output_and_working_memory_are_reused(self):
        resource = pytest.importorskip("resource", reason="counts page faults")
        main, out = make_values(LONG, seed=1), guarded_messages(1, LONG_LAYOUT)
        pointer, calls = out.data_ptr(), 20
        with ops.use_backend("numba"):
            quantize_long(main, out)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(calls):
                quantize_long(main, out)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert out.data_ptr() == pointer
        assert faults < calls * LONG_LAYOUT.nbytes // 4096 // 4, "fresh pages on every call"

    def test_calls_from_several_python_threads(self):
        """Some find the parallel region taken and run on their own thread: the bytes are the same."""
        inputs = [make_values(LONG, seed=seed) for seed in range(4)]
        expected = [guarded_messages(1, LONG_LAYOUT) for _ in inputs]
        with ops.use_backend("reference"):
            for x, out in zip(inputs, expected, strict=True):
                quantize_long(x, out)
        start = threading.Barrier(len(inputs))

        def call(index: int) -> bool:
            start.wait()
            same = True
            for _ in range(10):
                out = guarded_messages(1, LONG_LAYOUT)
                quantize_long(inputs[index], out)
                same &= torch.equal(whole(out), whole(expected[index]))
            return same

        with ops.use_backend("numba"), ThreadPoolExecutor(len(inputs)) as pool:
            assert all(pool.map(call, range(len(inputs))))

    def test_taken_parallel_region_is_not_waited_for(self, monkeypatch):
        main, out = make_values(LONG, seed=1), guarded_messages(1, LONG_LAYOUT)
        monkeypatch.setattr(kernels, "run_parallel", None)
        assert programs.parallel.enter()
        try:
            with ops.use_backend("numba"):
                quantize_long(main, out)
        finally:
            programs.parallel.leave()

    def test_a_stale_address_in_a_packed_table_is_found(self):
        values = torch.randn(1, 1, 160)
        with ops.use_backend("numba"), ops.checked():
            table, parts = quantizing((64, 96), values.device)
            for call in range(2):
                table.run(call, values)
            elsewhere = torch.zeros_like(parts[0])
            packed = table._packed["numba"]._table
            packed[packed == parts[0].data_ptr()] = elsewhere.data_ptr()
            with pytest.raises(AssertionError, match="hadamard_quantize: packed"):
                table.run(2, values)

    @pytest.mark.parametrize("missing", ["cache", "lock"])
    def test_kernels_compile_without_a_cache_or_a_lock(self, missing, monkeypatch, caplog, tmp_path):
        """numba finds no folder to write to; the file system has no locks."""

        def refuse(*_: object, **__: object) -> NoReturn:
            raise RuntimeError("no locator available") if missing == "cache" else OSError

        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(compilation, "_is_announced", False)
        attempt = (compilation, "njit") if missing == "cache" else (compilation.fcntl, "lockf")
        monkeypatch.setattr(*attempt, refuse)
        signature = numba.types.int64(numba.types.int64)
        assert compilation._compile(numba.njit, compiled_once.doubled, signature)(4) == 8
        where = "in every process, because numba cannot" if missing == "cache" else "not in the cache"
        assert caplog.text.count("compiling CPU kernels") == 1 and where in caplog.text
        assert list(tmp_path.rglob("*.nbi")) == [] or missing == "lock"


OTHER_VERSION = pickle.dumps(numba.__version__) + b"\x80\x04\x8c\x03sys\x8c\x04Gone\x93."
"""Names a class that does not exist."""


class TestCompilation:
    """Processes of one machine that need the same kernel at once."""

    def test_one_process_compiles_and_says_so(self, tmp_path):
        processes = [compile_one(tmp_path, seconds=1) for _ in range(3)]
        assert [ended(process) for process in processes] == [0, 0, 0], (tmp_path / "errors").read_text()
        assert (tmp_path / "log").read_text().count("\n") == 1
        errors = (tmp_path / "errors").read_text()
        assert errors.count("\n") == 1
        assert errors.startswith("sdp4bit: compiling CPU kernels that are not in the cache (3 to ")

    def test_a_damaged_index_of_the_cache_is_replaced(self, tmp_path):
        indices = {1: b"", 2: b"garbage", 3: OTHER_VERSION}  # by the number of compilations before
        for expected in (1, 2, 3, 4, 4):
            assert ended(compile_one(tmp_path, seconds=0)) == 0, (tmp_path / "errors").read_text()
            compiled = (tmp_path / "log").read_text().count("\n")
            assert compiled == expected
            if compiled in indices:
                (path,) = (tmp_path / "cache").rglob("*.nbi")
                path.write_bytes(indices.pop(compiled))

    def test_the_others_continue_if_it_is_killed(self, tmp_path):
        log = tmp_path / "log"
        killed = compile_one(tmp_path, seconds=1000)
        while not log.exists():
            assert killed.is_alive()
            time.sleep(0.05)
        waiting = compile_one(tmp_path, seconds=0)
        while not waits_for_a_lock(waiting):
            assert waiting.is_alive()
            time.sleep(0.05)
        killed.kill()
        killed.join()
        assert ended(waiting) == 0
        assert log.read_text().split() == [str(killed.pid), str(waiting.pid)]


def ended(process: ForkServerProcess) -> int | None:
    """Return the exit code of a process; None if it does not end."""
    process.join(timeout=120)
    return process.exitcode


def waits_for_a_lock(process: ForkServerProcess) -> bool:
    locks = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {process.pid} " in line for line in locks)


def run_python(code: str, *, timeout: float = 280, **environment: str) -> str:
    """Return the output of the code in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "NUMBA_"))}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


CHECK = """
import torch
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
main = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
layout = MessageLayout(numel=main.numel(), bits=4, group_size=128)
def quantize(backend):
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    with ops.use_backend(backend):
        ops.subtract_quantize(main, replica=None, out=out, layout=layout)
    return out
def check():
    assert torch.equal(quantize("numba"), quantize("reference"))
"""


class TestProcess:
    def test_without_numba_the_reference_serves_with_one_warning(self):
        code = """
import sys, warnings
sys.modules["numba"] = None  # what an import finds as missing
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    quantize("auto"), quantize("auto")
ours = [str(warning.message) for warning in caught if "sdp4bit" in str(warning.message)]
assert len(ours) == 1 and 'pip install ".[cpu]"' in ours[0], ours
assert torch.equal(quantize("auto"), quantize("reference"))
print(ops.backend_name("cpu"), "sdp4bit.kernels.cpu.backend" in sys.modules)
"""
        assert run_python(CHECK + code).split() == ["reference", "False"]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_threads_of_torch_and_of_a_forked_child_are_left_alone(self):
        """Both may use one OpenMP, of which numba would set the number of threads."""
        code = """
import os
torch.set_num_threads(3)
check()
print(torch.get_num_threads())
expected = quantize("numba").numpy().tobytes()
child = os.fork()
if not child:  # in which torch's own operators may wait for threads that are gone
    os._exit(int(quantize("numba").numpy().tobytes() != expected))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        printed = run_python(CHECK + code.lstrip(), OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2")
        assert printed.split() == ["3", "0"]

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_processes_that_compile_into_one_cache_at_once(self, tmp_path):
        variables = {"NUMBA_CACHE_DIR": str(tmp_path)}
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(run_python, CHECK + "check()", timeout=850, **variables) for _ in range(4)]
            assert [run.result() for run in runs] == [""] * 4
        assert list(tmp_path.rglob("*.nbi"))

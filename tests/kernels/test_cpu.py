"""The numba kernels write the bytes of the reference, and nothing else, on any number of threads.

Layer: no process, save for the tests of what happens when a process starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import ROOT

pytest.importorskip("numba", reason="needs numba")

from sdp4bit.kernels.cpu import backend as cpu
from sdp4bit.kernels.cpu import kernels as cpu_kernels
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import derive_keys
from tests.kernels.kernel_buffers import (
    DTYPES,
    bits_of,
    guarded_messages,
    guarded_values,
    make_messages,
    make_special_values,
    make_values,
    whole,
)

KEYS = derive_keys(1234, 7)

# Group sizes: the defaults, the smallest, halves that begin within a block (32, 96, 160), more than a tile
# (2048, 5120). Lengths: none, below, at and above a block; a tail of an odd and an even number of blocks;
# more than a tile.
SHAPES = [
    (128, 0),
    (128, 1),
    (128, 31),
    (128, 32),
    (128, 33),
    (128, 128 * 3 + 96),
    (128, 128 * 17 + 64),
    (128, 4096 + 16),
    (32, 1024 + 100),
    (64, 64 * 5 + 32),
    (96, 96 * 25 + 50),
    (160, 160 * 8 + 96 + 7),
    (512, 512 + 480),
    (2048, 2048 * 2),
    (2048, 2048 + 96 + 5),
    (2048, 1000),
    (5120, 5120 + 160),
]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The least of work is divided among this number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_VALUES_PER_THREAD", 1)
        previous = torch.get_num_threads()
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(previous)


def copy_of(tensor: Tensor) -> Tensor:
    """The same view of a copy of the whole storage."""
    return whole(tensor).clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def apply(backend: str, operator: Callable[..., None], tensors: list[Tensor | None], *rest: object) -> Tensor:
    """Return all of the storage of the last tensor after the operator has changed it, or a copy of it."""
    copies = [None if tensor is None else copy_of(tensor) for tensor in tensors]
    with ops.use_backend(backend):
        operator(*copies, *rest)
    assert copies[-1] is not None
    return whole(copies[-1])


def compare(
    operator: Callable[..., None], tensors: list[Tensor | None], *rest: object, bits: int = 0
) -> None:
    """numba changes the last tensor, and what surrounds it, as the reference does: bit for bit.

    Args:
        bits: of a message that is the output; 32 says that it holds fp32.
    """
    results = (apply(backend, operator, tensors, *rest) for backend in ("reference", "numba"))
    expected, actual = ((x.view(torch.float32) if bits == 32 else x) for x in results)
    different = bits_of(actual) != bits_of(expected)
    assert not different.any(), f"{int(different.sum())} differ, first at {different.nonzero()[:8].tolist()}"


def variants(*columns: tuple) -> list[tuple]:
    """One row per shape, whose other columns run through their values at different paces."""
    return [
        (*shape, *(column[index // pace % len(column)] for pace, column in enumerate(columns, start=1)))
        for index, shape in enumerate(SHAPES)
    ]


@pytest.mark.usefixtures("threads")
class TestBytes:
    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "stochastic", "dtype", "replica_dtype"),
        variants((False, True), DTYPES, (torch.bfloat16, None, torch.float16, torch.float32)),
    )
    def test_subtract_quantize(self, bits, group_size, numel, stochastic, dtype, replica_dtype):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        main = guarded_values(make_values(numel, seed=1, dtype=dtype), offset=numel % 3)
        replica = None if replica_dtype is None else make_values(numel, seed=2, dtype=replica_dtype)
        tensors = [main, replica, guarded_messages(1, layout)[0]]
        compare(ops.subtract_quantize, tensors, bits, group_size, stochastic, *KEYS, bits=bits)

    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "accumulate", "dtype", "rows"),
        variants((True, False), (torch.bfloat16, torch.float32, torch.float16), (1, 3)),
    )
    def test_dequantize_add(self, bits, group_size, numel, accumulate, dtype, rows):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        messages = make_messages(rows, layout, seed=3)
        replica = guarded_values(make_values(rows, numel, seed=4, dtype=dtype), offset=numel % 3)
        compare(ops.dequantize_add, [messages, replica], bits, group_size, accumulate)

    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "hadamard", "dtype", "stochastic", "signs"),
        variants((True, False), DTYPES, (True, False), (0, 0xDEADBEEF)),
    )
    def test_hadamard_quantize(self, bits, group_size, numel, hadamard, dtype, stochastic, signs):
        """From a transposed view: gradients lie as [parts, destinations, numel]."""
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=2)
        values = guarded_values(make_values(2, 3, numel, seed=5, dtype=dtype), offset=numel % 3)
        tensors = [values.transpose(0, 1), guarded_messages(3, layout)]
        rest = (bits, group_size, hadamard, stochastic, *KEYS, 32 * 3, 32 * 1000, signs * hadamard)
        compare(ops.hadamard_quantize, tensors, *rest, bits=bits)

    @pytest.mark.parametrize(("bits_in", "bits_out"), [(8, 4), (4, 8), (4, 4), (32, 8), (8, 32)])
    @pytest.mark.parametrize(
        ("group_size", "numel", "group_size_in", "count", "stochastic"),
        variants((None, 96, 32, None, 160, 2048), (1, 2, 4, 16, 17, 0), (True, False)),
    )
    def test_dequantize_reduce_quantize(
        self, bits_in, bits_out, group_size, numel, group_size_in, count, stochastic
    ):
        group_size_in = group_size if group_size_in is None else group_size_in
        received = MessageLayout(numel=numel, bits=bits_in, group_size=group_size_in, parts=2)
        sent = MessageLayout(numel=numel, bits=bits_out, group_size=group_size)
        compare(
            ops.dequantize_reduce_quantize,
            [make_messages(count, received, seed=6), guarded_messages(2, sent)],
            *(numel, bits_in, group_size_in, bits_out, group_size, stochastic, *KEYS, 64, 32 * 777),
            bits=bits_out,
        )

    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "hadamard", "dtype", "count", "signs"),
        variants((True, False), DTYPES, (2, 1, 4, 0, 16, 33), (0, 0xDEADBEEF)),
    )
    def test_dequantize_reduce_hadamard(self, bits, group_size, numel, hadamard, dtype, count, signs):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        messages = make_messages(count, layout, seed=7)
        out = guarded_values(torch.full((numel,), float("nan"), dtype=dtype), offset=numel % 3)
        rest = (bits, group_size, hadamard, 1 / 96, signs * hadamard)
        compare(ops.dequantize_reduce_hadamard, [messages, out], *rest)


class TestSpecialValues:
    """Zeros of both signs, NaN, infinities, subnormals, ties and the ends of the range."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("group_size", [64, 96])
    @pytest.mark.parametrize("bits", [4, 8, 32])
    def test_quantize(self, bits, group_size, dtype):
        main = make_special_values(group_size, seed=8, dtype=dtype)
        layout = MessageLayout(numel=main.numel(), bits=bits, group_size=group_size)
        out = guarded_messages(1, layout)
        for flag in (False, True):
            tensors = [main, torch.zeros_like(main), out[0]]
            compare(ops.subtract_quantize, tensors, bits, group_size, flag, *KEYS, bits=bits)
            tensors, signs = [main[None, None], out], 0x99999999 * flag
            rest = (bits, group_size, flag, True, *KEYS, 0, 0, signs)
            compare(ops.hadamard_quantize, tensors, *rest, bits=bits)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bits", [4, 8, 32])
    def test_dequantize(self, bits, dtype):
        replica = make_special_values(64, seed=9, dtype=dtype)
        layout = MessageLayout(numel=replica.numel(), bits=bits, group_size=64)
        messages = make_messages(3, layout, seed=10, special=True)
        for flag in (False, True):
            compare(ops.dequantize_add, [messages[:1], replica[None]], bits, 64, flag)
            for multiplier in (1.0, 0.1):
                tensors = [messages, torch.empty_like(replica)]
                rest = (bits, 64, flag, multiplier, flag * 0x99999999)
                compare(ops.dequantize_reduce_hadamard, tensors, *rest)

    @pytest.mark.parametrize(("bits_in", "bits_out"), [(8, 4), (4, 8), (32, 8)])
    def test_reduce(self, bits_in, bits_out):
        received = MessageLayout(numel=1280, bits=bits_in, group_size=32)
        sent = MessageLayout(numel=1280, bits=bits_out, group_size=64)
        tensors = [make_messages(2, received, seed=11, special=True), guarded_messages(1, sent)]
        rest = (1280, bits_in, 32, bits_out, 64, True, *KEYS, 0, 0)
        compare(ops.dequantize_reduce_quantize, tensors, *rest)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_random_numbers_at_the_ends_of_their_range(self, bits):
        tensors = [
            make_values(1, 2, 64, seed=12),
            guarded_messages(1, MessageLayout(numel=64, bits=bits, group_size=64, parts=2)),
        ]
        for keys in ((0xFFFFFFFF, 0x80000000), (0, 1)):
            for numbering in ((0, 0), ((1 << 32) - 64, (1 << 32) - 32)):
                compare(ops.hadamard_quantize, tensors, bits, 64, True, True, *keys, *numbering)


GROUP_SIZES = st.integers(1, 12).map(lambda blocks: 32 * blocks) | st.sampled_from([128, 512, 1056, 2048])
LENGTHS = st.integers(0, 70) | st.integers(0, 6000)
BITS = st.sampled_from([4, 8, 32])
FLAGS = st.booleans()
VALUES = st.sampled_from(DTYPES)


class TestAnyConfiguration:
    @given(LENGTHS, BITS, GROUP_SIZES, FLAGS, VALUES, VALUES | st.none(), st.integers(1, 3))
    @settings(deadline=None, max_examples=60)
    def test_weights(self, numel, bits, group_size, flag, dtype, replica_dtype, rows):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        main = make_values(numel, seed=numel, dtype=dtype)
        replica = None if replica_dtype is None else make_values(numel, seed=1, dtype=replica_dtype)
        tensors = [main, replica, guarded_messages(1, layout)[0]]
        compare(ops.subtract_quantize, tensors, bits, group_size, flag, *KEYS, bits=bits)
        tensors = [make_messages(rows, layout, seed=2), make_values(rows, numel, seed=3, dtype=dtype)]
        compare(ops.dequantize_add, tensors, bits, group_size, flag)

    @given(LENGTHS, BITS, BITS, GROUP_SIZES, GROUP_SIZES, FLAGS, FLAGS, VALUES, st.integers(0, 5))
    @settings(deadline=None, max_examples=60)
    def test_gradients(
        self, numel, bits, bits_out, group_size, group_size_out, hadamard, stochastic, dtype, count
    ):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=2)
        tensors = [make_values(3, 2, numel, seed=numel, dtype=dtype), guarded_messages(3, layout)]
        rest = (bits, group_size, hadamard, stochastic, *KEYS, 32, 6016)
        compare(ops.hadamard_quantize, tensors, *rest, bits=bits)

        sent = MessageLayout(numel=numel, bits=bits_out, group_size=group_size_out)
        tensors = [make_messages(count, layout, seed=4), guarded_messages(2, sent)]
        rest = (numel, bits, group_size, bits_out, group_size_out, stochastic, *KEYS, 32, 6016)
        compare(ops.dequantize_reduce_quantize, tensors, *rest, bits=bits_out)

        tensors = [make_messages(count, sent, seed=5), torch.full((numel,), 3.0, dtype=dtype)]
        compare(ops.dequantize_reduce_hadamard, tensors, bits_out, group_size_out, hadamard, 1 / 48)


def quantize_long(main: Tensor, out: Tensor) -> None:
    """Divided among all threads, whatever the least of work for one."""
    ops.hadamard_quantize(main.view(1, 1, -1), out, 8, 128, True, True, *KEYS, 0, 0)


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
        expected = [apply("reference", quantize_long, [x, guarded_messages(1, LONG_LAYOUT)]) for x in inputs]
        start = threading.Barrier(len(inputs))

        def call(index: int) -> bool:
            start.wait()
            same = True
            for _ in range(10):
                out = guarded_messages(1, LONG_LAYOUT)
                quantize_long(inputs[index], out)
                same &= torch.equal(whole(out), expected[index])
            return same

        with ops.use_backend("numba"), ThreadPoolExecutor(len(inputs)) as pool:
            assert all(pool.map(call, range(len(inputs))))

    def test_taken_parallel_region_is_not_waited_for(self, monkeypatch):
        main, out = make_values(LONG, seed=1), guarded_messages(1, LONG_LAYOUT)
        monkeypatch.setattr(cpu_kernels, "run_parallel", None)
        assert cpu._parallel.enter()
        try:
            with ops.use_backend("numba"):
                quantize_long(main, out)
        finally:
            cpu._parallel.leave()

    def test_kernels_compile_where_no_cache_can_be_written(self):
        def decorator(*args: object, cache: bool = False) -> Callable[[object], tuple]:
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return lambda function: (function, args)

        assert cpu_kernels._compile(decorator, len, "signature") == (len, ("signature",))


def run_python(code: str, *, timeout: float = 280, **environment: str) -> str:
    """Return what the code prints in a process of its own."""
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
        ops.subtract_quantize(main, None, out, 4, 128, True, 1, 2)
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
assert len(ours) == 1 and "pip install numba" in ours[0], ours
assert torch.equal(quantize("auto"), quantize("reference"))
print(ops.backend_name("cpu"), "sdp4bit.kernels.cpu.backend" in sys.modules)
"""
        assert run_python(CHECK + code).split() == ["reference", "False"]

    def test_numba_leaves_the_number_of_torch_threads_alone(self):
        """Both may use one OpenMP, of which numba would set the number of threads."""
        code = "torch.set_num_threads(3); check(); print(torch.get_num_threads())"
        assert run_python(CHECK + code, NUMBA_NUM_THREADS="2").split() == ["3"]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_forked_child_computes_on_its_own_thread(self):
        code = """
import os
expected = quantize("numba").numpy().tobytes()
child = os.fork()
if not child:  # in which torch's own operators may wait for threads that are gone
    os._exit(int(quantize("numba").numpy().tobytes() != expected))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
        assert run_python(CHECK + code, OMP_NUM_THREADS="2", NUMBA_NUM_THREADS="2").split() == ["0"]

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_processes_that_compile_into_one_cache_at_once(self, tmp_path):
        variables = {"NUMBA_CACHE_DIR": str(tmp_path)}
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(run_python, CHECK + "check()", timeout=850, **variables) for _ in range(4)]
            assert [run.result() for run in runs] == [""] * 4
        assert list(tmp_path.rglob("*.nbi"))

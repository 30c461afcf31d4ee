"""The Triton kernels write the bytes of the reference, and nothing else.

On a GPU if there is one, and in Triton's interpreter otherwise. Triton decides at its import whether it
interprets, so without a GPU this file runs itself in a process of its own, and the rest of the test session
never sees an interpreted kernel.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import ROOT

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime.errors import InterpreterError

from sdp4bit.kernels.triton import backend as cuda
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import derive_keys
from tests.kernels.kernel_buffers import (
    DTYPES,
    bits_of,
    copy_to,
    guarded_messages,
    guarded_values,
    make_messages,
    make_special_values,
    make_values,
    whole,
)

IS_INTERPRETED = not cuda._IS_COMPILED
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU and not IS_INTERPRETED else "cpu")
RUNS_HERE = IS_INTERPRETED or HAS_GPU

KEYS = derive_keys(1234, 7)
SIGNS = (0, 0xDEADBEEF)
DEFAULT_TESTS = "not gpu and not slow"


def run_in_interpreter(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marker, "-p", "no:cacheprovider", __file__]
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
    out = torch.empty(MessageLayout(numel=64, bits=4, group_size=32).nbytes, dtype=torch.uint8)
    with ops.use_backend("triton"), pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        ops.subtract_quantize(torch.zeros(64), None, out, 4, 32, False, 0, 0)


@contextmanager
def skip_loops_of_old_interpreters() -> Iterator[None]:
    """Skip if this is Triton before 3.7 and NumPy since 2.4: no interpreted loop to a bound at run time."""
    try:
        yield
    except InterpreterError as error:
        if "only 0-dimensional arrays can be converted to Python scalars" in str(error):
            pytest.skip("this Triton cannot interpret a loop to a bound at run time with this NumPy")
        raise


def compare(
    operator: Callable[..., None], tensors: list[Tensor | None], *rest: object, bits: int = 0
) -> None:
    """The operator changes its last tensor, and what surrounds it, as the reference does: bit for bit.

    Args:
        bits: of a message that is the output; 32 says that it holds fp32.
    """
    results = []
    for backend, device in (("reference", torch.device("cpu")), ("triton", DEVICE)):
        copies = [None if tensor is None else copy_to(tensor, device) for tensor in tensors]
        with ops.use_backend(backend), skip_loops_of_old_interpreters():
            operator(*copies, *rest)
        results.append(whole(copies[-1]).cpu())
    expected, actual = ((x.view(torch.float32) if bits == 32 else x) for x in results)
    different = bits_of(actual) != bits_of(expected)
    assert not different.any(), f"{int(different.sum())} differ, first at {different.nonzero()[:8].tolist()}"


# Group sizes: the defaults, the smallest, and some that are no power of two, with an odd number of blocks
# (96, 160, 32) and an even one (192).
# Lengths: none, below, at and above a block; a tail group with an odd and an even number of blocks.
SHAPES = [
    (128, 0),
    (128, 1),
    (128, 31),
    (128, 32),
    (128, 33),
    (128, 128),
    (128, 3 * 128 + 96),
    (128, 128 + 64),
    (128, 2048 + 2048 + 16),
    (32, 100),
    (64, 64 * 5 + 32),
    (96, 96 * 3),
    (96, 96 + 50),
    (160, 160 * 2 + 96 + 7),
    (192, 192 * 2 + 64),
    (512, 512 + 480),
    (2048, 2048),
    (2048, 2048 + 96 + 5),
    (2048, 1000),
]
FURTHER_SHAPES = {
    *((128, 31), (128, 128), (128, 128 + 64), (64, 64 * 5 + 32), (96, 96 * 3)),
    *((512, 512 + 480), (2048, 2048), (2048, 1000)),
}
"""Those that the slow tests add."""
LONG_SHAPES = [(8224, 8224 + 160), (16384, 9000)]
"""Groups that do not fit in a program's registers."""


def variants(*columns: tuple) -> list[Any]:
    """One row per shape, whose other columns run through their values at different paces."""
    return [
        pytest.param(
            *shape,
            *(column[index // pace % len(column)] for pace, column in enumerate(columns, start=1)),
            marks=[pytest.mark.slow] if shape in FURTHER_SHAPES else [],
        )
        for index, shape in enumerate(SHAPES)
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, about the overflows that are meant
class TestBytes:
    __test__ = RUNS_HERE

    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "stochastic", "dtype", "replica_dtype"),
        variants((False, True), DTYPES, (torch.bfloat16, None, torch.float16, torch.float32)),
    )
    def test_subtract_quantize(self, bits, group_size, numel, stochastic, dtype, replica_dtype):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        main = guarded_values(make_values(numel, seed=1, dtype=dtype), offset=numel % 3)
        replica = None if replica_dtype is None else make_values(numel, seed=2, dtype=replica_dtype)
        out = guarded_messages(1, layout)[0]
        compare(ops.subtract_quantize, [main, replica, out], bits, group_size, stochastic, *KEYS, bits=bits)

    @pytest.mark.parametrize("stochastic", [False, True])
    @pytest.mark.parametrize("bits", [4, 8, 32])
    def test_subtract_quantize_of_special_values(self, bits, stochastic):
        main = make_special_values(128, seed=3)
        replica = torch.zeros_like(main)
        out = guarded_messages(1, MessageLayout(numel=main.numel(), bits=bits, group_size=128))[0]
        compare(ops.subtract_quantize, [main, replica, out], bits, 128, stochastic, *KEYS, bits=bits)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_scales_at_the_edge_of_rounding_up(self, bits):
        """The largest values whose scale, before it is rounded up, ends in each of the bits around 0xFFFD."""
        candidates = (torch.arange(1 << 22, dtype=torch.int32) + 0x40000000).view(torch.float32)
        step = candidates * torch.tensor(1.0 / (2 ** (bits - 1) - 1), dtype=torch.float32)
        low = step.view(torch.int32) & 0xFFFF
        edges = [candidates[low == edge % 0x10000][:2] for edge in range(0xFFF8, 0x10008)]
        main = torch.zeros(32, 32)
        main[:, 3] = torch.cat(edges)
        main[:, 4] = -main[:, 3] / 3
        out = guarded_messages(1, MessageLayout(numel=1024, bits=bits, group_size=32))[0]
        compare(ops.subtract_quantize, [main.view(-1), None, out], bits, 32, False, *KEYS)

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize(("group_size", "numel"), LONG_SHAPES)
    def test_subtract_quantize_of_long_groups(self, group_size, numel, bits):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        tensors = [make_values(numel, seed=4), None, guarded_messages(1, layout)[0]]
        compare(ops.subtract_quantize, tensors, bits, group_size, True, *KEYS)

    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "accumulate", "dtype", "rows"),
        variants((True, False), (torch.bfloat16, torch.float32, torch.float16), (1, 2)),
    )
    def test_dequantize_add(self, bits, group_size, numel, accumulate, dtype, rows):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        messages = make_messages(rows, layout, seed=5)
        replica = guarded_values(make_values(rows, numel, seed=6, dtype=dtype), offset=numel % 3)
        compare(ops.dequantize_add, [messages, replica], bits, group_size, accumulate)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("accumulate", [False, True])
    @pytest.mark.parametrize("bits", [4, 8, 32])
    def test_dequantize_add_of_special_values(self, bits, accumulate, dtype):
        replica = make_special_values(64, seed=7, dtype=dtype)[None]
        layout = MessageLayout(numel=replica.numel(), bits=bits, group_size=64)
        messages = make_messages(1, layout, seed=8, special=True)
        compare(ops.dequantize_add, [messages, replica], bits, 64, accumulate)

    @pytest.mark.parametrize("hadamard", [False, True])
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize(
        ("group_size", "numel", "stochastic", "dtype", "signs"), variants((True, False), DTYPES, SIGNS)
    )
    def test_hadamard_quantize(self, bits, hadamard, group_size, numel, stochastic, dtype, signs):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=2)
        values = guarded_values(make_values(1, 2, numel, seed=9, dtype=dtype), offset=numel % 3)
        tensors = [values, guarded_messages(1, layout)]
        rest = (bits, group_size, hadamard, stochastic, *KEYS, 32 * 3, 32 * 1000, signs * hadamard)
        compare(ops.hadamard_quantize, tensors, *rest)

    @pytest.mark.parametrize("hadamard", [False, True])
    @pytest.mark.parametrize("numel", [0, 33, 224])
    def test_hadamard_quantize_in_full_precision(self, numel, hadamard):
        layout = MessageLayout(numel=numel, bits=32, group_size=128, parts=2)
        tensors = [make_values(1, 2, numel, seed=9), guarded_messages(1, layout)]
        compare(ops.hadamard_quantize, tensors, 32, 128, hadamard, True, *KEYS, 0, 0, bits=32)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(("hadamard", "signs"), [(False, 0), (True, 0), (True, 0x99999999)])
    def test_hadamard_quantize_of_special_values(self, bits, hadamard, signs, dtype):
        values = make_special_values(64, seed=10, dtype=dtype)[None, None]
        layout = MessageLayout(numel=values.numel(), bits=bits, group_size=64)
        tensors = [values, guarded_messages(1, layout)]
        compare(ops.hadamard_quantize, tensors, bits, 64, hadamard, True, *KEYS, 0, 0, signs, bits=bits)

    @pytest.mark.parametrize("numel", [160, 161])
    def test_hadamard_quantize_of_a_transposed_view(self, numel):
        """Gradients lie as [parts, destinations, numel] and are sent as [destinations, parts, numel]."""
        gradient = guarded_values(make_values(2, 3, numel, seed=11))
        layout = MessageLayout(numel=numel, bits=8, group_size=128, parts=2)
        tensors = [gradient.transpose(0, 1), guarded_messages(3, layout)]
        compare(ops.hadamard_quantize, tensors, 8, 128, True, True, *KEYS, 0, 32 * 6)

    @pytest.mark.parametrize("bits", [4, 8])
    def test_hadamard_quantize_at_the_highest_random_numbers(self, bits):
        layout = MessageLayout(numel=64, bits=bits, group_size=64, parts=2)
        tensors = [make_values(1, 2, 64, seed=12), guarded_messages(1, layout)]
        for keys in ((0xFFFFFFFF, 0x80000000), (0, 1)):
            compare(
                ops.hadamard_quantize, tensors, bits, 64, True, True, *keys, (1 << 32) - 64, (1 << 32) - 32
            )

    @pytest.mark.parametrize("hadamard", [False, True])
    @pytest.mark.parametrize(("group_size", "numel"), LONG_SHAPES)
    def test_hadamard_quantize_of_long_groups(self, group_size, numel, hadamard):
        bits = 4 if hadamard else 8
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        tensors = [make_values(1, 1, numel, seed=13), guarded_messages(1, layout)]
        signs = 0x80000001 * hadamard
        compare(ops.hadamard_quantize, tensors, bits, group_size, hadamard, True, *KEYS, 0, 0, signs)

    @pytest.mark.parametrize(("bits_in", "bits_out"), [(8, 4), (4, 4), (8, 8), (4, 8), (32, 4), (8, 32)])
    @pytest.mark.parametrize(
        ("group_size", "numel", "group_size_in", "stochastic", "count"),
        variants((128, 96, 32, 160, 2048, 128, 512), (True, False), (2, 4, 1)),
    )
    def test_dequantize_reduce_quantize(
        self, bits_in, bits_out, group_size, numel, group_size_in, stochastic, count
    ):
        received = MessageLayout(numel=numel, bits=bits_in, group_size=group_size_in)
        sent = MessageLayout(numel=numel, bits=bits_out, group_size=group_size)
        compare(
            ops.dequantize_reduce_quantize,
            [make_messages(count, received, seed=14), guarded_messages(1, sent)],
            *(numel, bits_in, group_size_in, bits_out, group_size, stochastic, *KEYS, 64, 0),
            bits=bits_out,
        )

    @pytest.mark.parametrize(("bits_in", "bits_out"), [(8, 4), (4, 4), (32, 32)])
    @pytest.mark.parametrize("count", [0, 3, 9])
    def test_dequantize_reduce_quantize_of_parts(self, bits_in, bits_out, count):
        """Any number of messages: none, one of the unrolled numbers, more than are unrolled."""
        received = MessageLayout(numel=200, bits=bits_in, group_size=128, parts=2)
        sent = MessageLayout(numel=200, bits=bits_out, group_size=64)
        compare(
            ops.dequantize_reduce_quantize,
            [make_messages(count, received, seed=15), guarded_messages(2, sent)],
            *(200, bits_in, 128, bits_out, 64, True, *KEYS, 96, 32 * 77),
            bits=bits_out,
        )

    @pytest.mark.parametrize(("bits_in", "bits_out"), [(8, 4), (4, 8), (32, 8)])
    def test_dequantize_reduce_quantize_of_special_values(self, bits_in, bits_out):
        numel = 32 * 40
        received = MessageLayout(numel=numel, bits=bits_in, group_size=32)
        sent = MessageLayout(numel=numel, bits=bits_out, group_size=64)
        compare(
            ops.dequantize_reduce_quantize,
            [make_messages(2, received, seed=16, special=True), guarded_messages(1, sent)],
            *(numel, bits_in, 32, bits_out, 64, True, *KEYS, 0, 0),
        )

    @pytest.mark.parametrize(("group_size", "numel"), LONG_SHAPES)
    def test_dequantize_reduce_quantize_of_long_groups(self, group_size, numel):
        received = MessageLayout(numel=numel, bits=8, group_size=4096)
        sent = MessageLayout(numel=numel, bits=4, group_size=group_size)
        compare(
            ops.dequantize_reduce_quantize,
            [make_messages(2, received, seed=17), guarded_messages(1, sent)],
            *(numel, 8, 4096, 4, group_size, True, *KEYS, 0, 0),
        )

    @pytest.mark.parametrize("bits", [4, 8, 32])
    @pytest.mark.parametrize(
        ("group_size", "numel", "hadamard", "dtype", "count", "signs"),
        variants((True, False), DTYPES, (2, 1, 4), SIGNS),
    )
    def test_dequantize_reduce_hadamard(self, bits, group_size, numel, hadamard, dtype, count, signs):
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        messages = make_messages(count, layout, seed=18)
        out = guarded_values(torch.full((numel,), float("nan"), dtype=dtype), offset=numel % 3)
        rest = (bits, group_size, hadamard, 1 / 96, signs * hadamard)
        compare(ops.dequantize_reduce_hadamard, [messages, out], *rest)

    @pytest.mark.parametrize("count", [0, 3, 9])
    @pytest.mark.parametrize("bits", [4, 8, 32])
    def test_dequantize_reduce_hadamard_of_any_number_of_messages(self, bits, count):
        layout = MessageLayout(numel=300, bits=bits, group_size=128)
        messages = make_messages(count, layout, seed=19)
        out = guarded_values(torch.full((300,), float("nan")))
        compare(ops.dequantize_reduce_hadamard, [messages, out], bits, 128, True, 1 / 32 / 9)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize(("hadamard", "signs"), [(False, 0), (True, 0), (True, 0x99999999)])
    def test_dequantize_reduce_hadamard_of_special_values(self, bits, hadamard, signs, dtype):
        layout = MessageLayout(numel=32 * 40, bits=bits, group_size=32)
        messages = make_messages(2, layout, seed=20, special=True)
        out = guarded_values(torch.full((layout.numel,), float("nan"), dtype=dtype))
        compare(ops.dequantize_reduce_hadamard, [messages, out], bits, 32, hadamard, 2.0**-12, signs)

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(100))
    def test_random_configurations(self, seed):
        draw = random.Random(seed)
        bits, bits_out = draw.choice((4, 8, 32)), draw.choice((4, 8, 32))
        group_size, group_size_out = (32 * draw.choice((1, 2, 3, 4, 5, 7, 16, 33)) for _ in range(2))
        numel = draw.choice((draw.randrange(100), draw.randrange(1500), 32 * draw.randrange(100)))
        parts, count = draw.randrange(1, 4), draw.randrange(1, 11)
        keys = derive_keys(draw.randrange(1 << 40), draw.randrange(1 << 60))
        first, row_stride = 32 * draw.randrange(1 << 20), 32 * draw.randrange(1 << 20)
        stochastic, flag = draw.random() < 0.5, draw.random() < 0.5
        dtype, offset = draw.choice(DTYPES), draw.choice((0, 0, 1, 3, 8))
        numbering = (stochastic, *keys, first, row_stride)
        signs = draw.choice((0, 1, draw.randrange(1 << 32))) * flag
        layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
        parted = MessageLayout(numel=numel, bits=bits, group_size=group_size, parts=parts)
        sent = MessageLayout(numel=numel, bits=bits_out, group_size=group_size_out)

        values = guarded_values(make_values(parts, 2, numel, seed=seed, dtype=dtype), offset).transpose(0, 1)
        tensors = [values, guarded_messages(2, parted)]
        compare(ops.hadamard_quantize, tensors, bits, group_size, flag, *numbering, signs, bits=bits)

        tensors = [make_messages(count, parted, seed), guarded_messages(parts, sent)]
        rest = (numel, bits, group_size, bits_out, group_size_out, *numbering)
        compare(ops.dequantize_reduce_quantize, tensors, *rest, bits=bits_out)

        messages = make_messages(count, layout, seed)
        out = guarded_values(make_values(numel, seed=seed, dtype=dtype), offset)
        compare(ops.dequantize_reduce_hadamard, [messages, out], bits, group_size, flag, 0.3, signs)

        replica = guarded_values(make_values(2, numel, seed=seed + 1, dtype=dtype), offset)
        compare(ops.dequantize_add, [messages.repeat(2, 1)[:2], replica], bits, group_size, flag)

        tensors = [make_values(numel, seed=seed), replica[1], guarded_messages(1, layout)[0]]
        compare(ops.subtract_quantize, tensors, bits, group_size, stochastic, *keys, bits=bits)

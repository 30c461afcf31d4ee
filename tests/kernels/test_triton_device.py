"""The Triton kernels on a GPU: one launch per operator, no synchronization, CUDA graphs.

All tests need a GPU. Their bytes are compared with the reference here only as a sign of life;
`test_triton.py` compares every variant.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.formats import with_scales
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys
from sdp4bit_lab.selftest.cases import POISON, bits_of, make_values

pytest.importorskip("triton", reason="needs Triton")

from sdp4bit.kernels.triton import backend as cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not cuda._IS_COMPILED, reason="needs a CUDA or ROCm device"
    ),
]

DEVICE = torch.device("cuda")
NODES, LOCAL_RANKS, NUMEL = 2, 4, 100_000
"""A gradient path on one device: messages of the sizes that 2 nodes of 4 ranks would exchange."""
INTRA = MessageLayout(numel=NUMEL, bits=8, group_size=128, parts=NODES)
INTER = MessageLayout(numel=NUMEL, bits=4, group_size=128)
KEY = RoundingKey(*derive_keys(1234, 7), row_stride=INTRA.padded_numel)


def gradient_path(gradient: Tensor, intra: Tensor, inter: Tensor, out: Tensor) -> None:
    rows = gradient.transpose(0, 1)
    ops.hadamard_quantize(rows, out=intra, layout=INTRA, hadamard=True, rounding=KEY)
    ops.dequantize_reduce_quantize(intra, received=INTRA, out=inter, sent=INTER, rounding=KEY, dither=None)
    multiplier = 1 / 32 / (NODES * LOCAL_RANKS)
    ops.dequantize_reduce_hadamard(
        inter, out=out, layout=INTER, hadamard=True, multiplier=multiplier, dither=None
    )


def path_buffers(seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = make_values(NODES, LOCAL_RANKS, NUMEL, seed=seed).to(device)
    intra = torch.full((LOCAL_RANKS, INTRA.nbytes), POISON, dtype=torch.uint8, device=device)
    inter = torch.full((NODES, INTER.nbytes), POISON, dtype=torch.uint8, device=device)
    return gradient, intra, inter, torch.full((NUMEL,), float("nan"), device=device)


def expected_of_path(seed: int) -> Tensor:
    buffers = path_buffers(seed, torch.device("cpu"))
    with ops.use_backend("reference"):
        gradient_path(*buffers)
    return buffers[-1]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(bits_of(actual.cpu()), bits_of(expected))


def test_gradient_path_is_three_launches():
    buffers = path_buffers(0, DEVICE)
    gradient_path(*buffers)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        gradient_path(*buffers)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_device]
    assert names == ["quantize_kernel", "reduce_quantize_kernel", "reduce_hadamard_kernel"]
    assert_same(buffers[-1], expected_of_path(0))


def test_gradient_path_neither_waits_nor_allocates():
    buffers = path_buffers(1, DEVICE)
    gradient_path(*buffers)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradient_path(*buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


def test_gradient_path_in_a_cuda_graph():
    buffers = path_buffers(2, DEVICE)
    gradient_path(*buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient_path(*buffers)
    for buffer, fresh in zip(buffers, path_buffers(3, DEVICE), strict=True):
        buffer.copy_(fresh)
    graph.replay()
    assert_same(buffers[-1], expected_of_path(3))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_of_another_device_than_the_current_one():
    buffers = path_buffers(5, torch.device("cuda", 1))
    with torch.cuda.device(0):
        gradient_path(*buffers)
    assert_same(buffers[-1], expected_of_path(5))


@pytest.mark.slow
@pytest.mark.parametrize("bits", with_scales())
def test_offsets_beyond_32_bits(bits):
    """The last groups of a row of more than 2**31 values are coded and decoded as if they were alone."""
    numel, alone = (1 << 31) + 2048 * 3, 2048 * 3
    layout, short = (MessageLayout(numel=n, bits=bits, group_size=2048) for n in (numel, alone))
    main = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    main[-alone:] = make_values(alone, seed=6, dtype=torch.bfloat16).to(DEVICE)
    message = torch.full((1, layout.nbytes), POISON, dtype=torch.uint8, device=DEVICE)
    ops.subtract_quantize(main, replica=None, out=message[0], layout=layout)
    expected = torch.empty(1, short.nbytes, dtype=torch.uint8)
    with ops.use_backend("reference"):
        last = main[-alone:].cpu()
        ops.subtract_quantize(last, replica=None, out=expected[0], layout=short)
    codes = message[0, layout.scales_offset - short.code_bytes : layout.scales_offset]
    scales = message[0, layout.payload_bytes - 2 * short.groups : layout.payload_bytes]
    assert torch.equal(codes.cpu(), expected[0, : short.code_bytes])
    assert torch.equal(scales.cpu(), expected[0, short.scales_offset : short.payload_bytes])
    replica = torch.zeros(1, alone, dtype=torch.bfloat16)
    with ops.use_backend("reference"):
        ops.dequantize_add(expected, replica=replica, layout=short, accumulate=False)
    ops.dequantize_add(message, replica=main[None], layout=layout, accumulate=False)
    assert_same(main[-alone:], replica[0])

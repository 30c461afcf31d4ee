"""The five operators as Triton kernels for NVIDIA and AMD GPUs. Not run on a GPU.

What is known: Triton's interpreter gives the bytes of :mod:`sdp4bit.quantization.reference`, and every kernel
compiles for sm_80, sm_90 and gfx942. Speed is not measured, so tile sizes and warp counts are reasoned, not
tuned; nothing is tuned at run time.

Each function is one kernel launch and nothing else: no allocation, no other kernel, no wait for the device.
So a step can be captured in a CUDA graph, after one call that compiles. Each operator passes once over
memory: the bytes in the docstrings are all that a value costs, and they are the minimum, because each input
is read once and each output written once. The exception are groups of more than 8192 values, whose input
`subtract_quantize`, `hadamard_quantize` and `dequantize_reduce_quantize` read twice.

A kernel is compiled per dtype, bits, group size, rounding, number of messages (up to 8), alignment of the
rows and whether signs change, not per shape. Rows whose length and strides are multiples of 16 values move
in 16-byte vectors; rows of any length work, with smaller accesses to the values, never to the codes.

CPU tensors are served if TRITON_INTERPRET=1 was set before Triton was imported, for tests.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
from torch import Tensor

from sdp4bit.kernels.triton.kernels import (
    dequantize_kernel,
    quantize_kernel,
    reduce_hadamard_kernel,
    reduce_quantize_kernel,
)
from sdp4bit.quantization.layout import (
    BLOCK,
    FULL_PRECISION,
    MESSAGE_ALIGNMENT,
    MessageLayout,
    message_layout,
)

_TILE_SLOTS = 64
"""Slots of 32 values per program; not measured. Two warps of NVIDIA with a slot per thread keep 56 to 72
registers per thread, and a message of 1 MiB still has programs for every multiprocessor."""
_MAX_SLOTS = 256
"""Slots of a group that a program keeps in registers; a longer group is read twice."""
_RAW_GROUP = 4
"""Group size, in blocks, of the tiles of unquantized messages, which have no groups."""
_MAX_UNROLLED = 8
"""Messages up to which a sum is unrolled, and compiled for their number; not measured."""
_VALUE_UNIT = 16
"""Rows whose length and strides are multiples of this are read and written in 16-byte vectors."""

_IS_COMPILED = isinstance(quantize_kernel, triton.JITFunction)


@cache
def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _warps(slots: int, values_per_thread: int, device: torch.device) -> int:
    """Warps that leave each thread this many values of each half of a tile of slots."""
    return max(1, slots * 16 // (values_per_thread * _warp_size(device)))


def _launch(kernel, programs: int, out: Tensor, *arguments, num_warps: int, **constants) -> None:
    if not out.is_cuda and _IS_COMPILED:
        raise ValueError(
            f"Triton kernels need CUDA tensors, got {out.device}: use the numba or reference back end, or "
            "set TRITON_INTERPRET=1 before Triton is imported to interpret them on the CPU"
        )
    if not programs:
        return
    with torch.cuda.device_of(out):
        # Fusion would change a sum whose product overflows: infinite when rounded, finite when not.
        kernel[(programs,)](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=False)


def _signed(bits: int) -> int:
    """Return 32 bits as int32: Triton would take an int of 2**31 or more for 64 bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def _group_blocks(layout: MessageLayout) -> int:
    return _RAW_GROUP if layout.bits == FULL_PRECISION else layout.group_size // BLOCK


def _tile(layout: MessageLayout) -> tuple[int, int, int]:
    """Return groups per program, slots per group (a power of two) and programs per row."""
    blocks = _group_blocks(layout)
    slots = min(1 << (blocks - 1).bit_length(), _MAX_SLOTS)
    groups = max(1, _TILE_SLOTS // slots)
    return groups, slots, -(-layout.padded_numel // (BLOCK * blocks * groups))


def _random_blocks(stochastic: bool, first: int, row_stride: int) -> tuple[int, int]:
    return (first // BLOCK, row_stride // BLOCK) if stochastic else (0, 0)


def _message_stride(messages: Tensor) -> int:
    """Return how far apart messages begin, in units of 16 bytes; a single message may report anything."""
    return messages.stride(0) // MESSAGE_ALIGNMENT if messages.shape[0] > 1 else 0


def _unrolled(count: int) -> int:
    return count if count <= _MAX_UNROLLED else -1


def subtract_quantize(
    main: Tensor,
    replica: Tensor | None,
    out: Tensor,
    *,
    bits: int,
    group_size: int,
    stochastic: bool,
    k0: int,
    k1: int,
) -> None:
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`.

    Bytes per value: 4 (fp32 main) + 2 (bf16 replica) read, bits / 8 + 2 / group_size written; 6.5 with 4 bits
    and groups of 2048.

    Raises:
        ValueError: main or replica is not contiguous.
    """
    for name, tensor in (("main", main), ("replica", replica)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got stride {tensor.stride()}")
    layout = message_layout(numel=main.numel(), bits=bits, group_size=group_size)
    groups, slots, programs = _tile(layout)
    unit = math.gcd(_VALUE_UNIT, layout.numel)
    _launch(
        quantize_kernel,
        programs,
        out,
        main,
        main if replica is None else replica,
        out,
        layout.numel // unit,
        0,
        0,
        1,
        layout.padded_numel // BLOCK,
        0,
        _signed(k0),
        _signed(k1),
        0,
        0,
        None,
        UNIT=unit,
        BITS=bits,
        GROUP=_group_blocks(layout),
        GROUPS=groups,
        SLOTS=slots,
        HAS_REPLICA=replica is not None,
        HADAMARD=False,
        STOCHASTIC=stochastic,
        # No transform has to find a chunk in one thread: more threads keep more loads in flight.
        num_warps=_warps(groups * slots, 8, out.device),
    )


def dequantize_add(
    messages: Tensor, replica: Tensor, *, bits: int, group_size: int, accumulate: bool
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`.

    Bytes per value: bits / 8 + 2 / group_size read, 2 (bf16 replica) written and, to accumulate, 2 read; 4.5
    with 4 bits and groups of 2048.
    """
    rows, numel = replica.shape
    layout = message_layout(numel=numel, bits=bits, group_size=group_size)
    row_stride = replica.stride(0) if rows > 1 else 0
    unit = math.gcd(_VALUE_UNIT, numel, row_stride)
    blocks = layout.padded_numel // BLOCK
    _launch(
        dequantize_kernel,
        rows * -(-blocks // _TILE_SLOTS),
        replica,
        messages,
        replica,
        numel // unit,
        blocks,
        _message_stride(messages),
        row_stride // unit,
        UNIT=unit,
        BITS=bits,
        GROUP=_group_blocks(layout),
        ROWS=_TILE_SLOTS,
        ACCUMULATE=accumulate,
        # 16 bytes of the replica per thread, the widest store: more would be exchanged before it.
        num_warps=_warps(_TILE_SLOTS, 16 // replica.element_size(), replica.device),
    )


def hadamard_quantize(
    values: Tensor,
    out: Tensor,
    *,
    bits: int,
    group_size: int,
    hadamard: bool,
    stochastic: bool,
    k0: int,
    k1: int,
    first: int,
    row_stride: int,
    signs: int = 0,
) -> None:
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`.

    Bytes per value: 4 (fp32) or 2 (bf16) read, bits / 8 + 2 / group_size written; 5.02 from fp32 with 8 bits
    and groups of 128. Rows are read where they lie, whatever the strides of `values`.
    """
    destinations, parts, numel = values.shape
    layout = message_layout(numel=numel, bits=bits, group_size=group_size, parts=parts)
    groups, slots, programs = _tile(layout)
    # The stride of a dimension of size 1 means nothing.
    destination_stride = values.stride(0) if destinations > 1 else 0
    part_stride = values.stride(1) if parts > 1 else 0
    unit = math.gcd(_VALUE_UNIT, numel, destination_stride, part_stride)
    first_block, row_blocks = _random_blocks(stochastic, first, row_stride)
    _launch(
        quantize_kernel,
        destinations * parts * programs,
        out,
        values,
        values,
        out,
        numel // unit,
        destination_stride // unit,
        part_stride // unit,
        parts,
        layout.padded_numel // BLOCK,
        _message_stride(out),
        _signed(k0),
        _signed(k1),
        first_block,
        row_blocks,
        _signed(signs) if signs else None,
        UNIT=unit,
        BITS=bits,
        GROUP=_group_blocks(layout),
        GROUPS=groups,
        SLOTS=slots,
        HAS_REPLICA=False,
        HADAMARD=hadamard,
        STOCHASTIC=stochastic,
        num_warps=_warps(groups * slots, 16, out.device),
    )


def dequantize_reduce_quantize(
    messages: Tensor,
    out: Tensor,
    *,
    numel: int,
    bits_in: int,
    group_size_in: int,
    bits_out: int,
    group_size_out: int,
    stochastic: bool,
    k0: int,
    k1: int,
    first: int,
    row_stride: int,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`.

    Bytes per value: k * (bits_in / 8 + 2 / group_size_in) read, bits_out / 8 + 2 / group_size_out written;
    4.58 for four messages of 8 bits into 4 bits with groups of 128.
    """
    parts = out.shape[0]
    received = message_layout(numel=numel, bits=bits_in, group_size=group_size_in, parts=parts)
    sent = message_layout(numel=numel, bits=bits_out, group_size=group_size_out)
    groups, slots, programs = _tile(sent)
    first_block, row_blocks = _random_blocks(stochastic, first, row_stride)
    _launch(
        reduce_quantize_kernel,
        parts * programs,
        out,
        messages,
        out,
        messages.shape[0],
        parts,
        sent.padded_numel // BLOCK,
        _message_stride(messages),
        _message_stride(out),
        _signed(k0),
        _signed(k1),
        first_block,
        row_blocks,
        COUNT=_unrolled(messages.shape[0]),
        BITS_IN=bits_in,
        GROUP_IN=_group_blocks(received),
        BITS=bits_out,
        GROUP=_group_blocks(sent),
        GROUPS=groups,
        SLOTS=slots,
        STOCHASTIC=stochastic,
        num_warps=_warps(groups * slots, 16, out.device),
    )


def dequantize_reduce_hadamard(
    messages: Tensor,
    out: Tensor,
    *,
    bits: int,
    group_size: int,
    hadamard: bool,
    multiplier: float,
    signs: int = 0,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`.

    Bytes per value: k * (bits / 8 + 2 / group_size) read, 4 (fp32) written; 6.06 for four messages of 4 bits
    with groups of 128.
    """
    layout = message_layout(numel=out.numel(), bits=bits, group_size=group_size)
    unit = math.gcd(_VALUE_UNIT, layout.numel)
    blocks = layout.padded_numel // BLOCK
    _launch(
        reduce_hadamard_kernel,
        -(-blocks // _TILE_SLOTS),
        out,
        messages,
        out,
        layout.numel // unit,
        messages.shape[0],
        blocks,
        _message_stride(messages),
        multiplier,
        _signed(signs) if signs else None,
        UNIT=unit,
        COUNT=_unrolled(messages.shape[0]),
        BITS=bits,
        GROUP=_group_blocks(layout),
        ROWS=_TILE_SLOTS,
        HADAMARD=hadamard,
        num_warps=_warps(_TILE_SLOTS, 16, out.device),
    )

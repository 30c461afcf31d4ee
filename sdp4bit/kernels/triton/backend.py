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
from sdp4bit.quantization.hadamard import Hadamard
from sdp4bit.quantization.layout import BLOCK, FULL_PRECISION, MESSAGE_ALIGNMENT, MessageLayout
from sdp4bit.quantization.random import RoundingKey

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
    """Return the warps that leave each thread this many values of each half of a tile of slots."""
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
    # Triton's tiles are powers of two: a group of 3 blocks occupies 4 slots, of which one is masked.
    slots = min(1 << (blocks - 1).bit_length(), _MAX_SLOTS)
    groups = max(1, _TILE_SLOTS // slots)
    return groups, slots, -(-layout.padded_numel // (BLOCK * blocks * groups))


def _rounding_numbers(rounding: RoundingKey | None) -> tuple[int, int, int, int]:
    """Return both keys, and the numbers of rows in blocks of 32: of the first, and between rows."""
    if rounding is None:
        return 0, 0, 0, 0
    blocks = rounding.first // BLOCK, rounding.row_stride // BLOCK
    return _signed(rounding.k0), _signed(rounding.k1), *blocks


def _signs(hadamard: Hadamard | None) -> int | None:
    """Return the signs to change, None for none: another kernel, without the work."""
    return _signed(hadamard.signs) if hadamard is not None and hadamard.signs else None


def _message_stride(messages: Tensor) -> int:
    """Return how far apart messages begin, in units of 16 bytes; a single message may report anything."""
    return messages.stride(0) // MESSAGE_ALIGNMENT if messages.shape[0] > 1 else 0


def _unrolled(count: int) -> int:
    return count if count <= _MAX_UNROLLED else -1


def _quantize(
    values: Tensor,
    replica: Tensor | None,
    out: Tensor,
    layout: MessageLayout,
    hadamard: Hadamard | None,
    rounding: RoundingKey | None,
    *,
    rows: int,
    strides: tuple[int, int],
    out_stride: int,
    values_per_thread: int,
) -> None:
    """Launch the kernel that quantizes rows; strides of values: between destinations, between parts."""
    groups, slots, programs = _tile(layout)
    # Lengths and strides are passed in the largest unit they share: in units of 16 values the compiler knows
    # them to be multiples of 16, and moves whole vectors.
    unit = math.gcd(_VALUE_UNIT, layout.numel, *strides)
    _launch(
        quantize_kernel, rows * programs, out,
        values, values if replica is None else replica, out,
        layout.numel // unit, strides[0] // unit, strides[1] // unit, layout.parts,
        layout.padded_numel // BLOCK, out_stride, *_rounding_numbers(rounding), _signs(hadamard),
        UNIT=unit, BITS=layout.bits, GROUP=_group_blocks(layout), GROUPS=groups, SLOTS=slots,
        HAS_REPLICA=replica is not None, HADAMARD=hadamard is not None, STOCHASTIC=rounding is not None,
        num_warps=_warps(groups * slots, values_per_thread, out.device),
    )  # fmt: skip


def subtract_quantize(
    main: Tensor, *, replica: Tensor | None, out: Tensor, layout: MessageLayout, rounding: RoundingKey | None
) -> None:
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`.

    Bytes per value: 4 (fp32 main) + 2 (bf16 replica) read, bits / 8 + 2 / group_size written; 6.5 with 4 bits
    and groups of 2048.
    """
    # No transform has to find a chunk in one thread: more threads keep more loads in flight.
    place = {"rows": 1, "strides": (0, 0), "out_stride": 0, "values_per_thread": 8}
    _quantize(main, replica, out, layout, None, rounding, **place)


def dequantize_add(messages: Tensor, *, replica: Tensor, layout: MessageLayout, accumulate: bool) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`.

    Bytes per value: bits / 8 + 2 / group_size read, 2 (bf16 replica) written and, to accumulate, 2 read; 4.5
    with 4 bits and groups of 2048.
    """
    rows = replica.shape[0]
    row_stride = replica.stride(0) if rows > 1 else 0
    unit = math.gcd(_VALUE_UNIT, layout.numel, row_stride)
    blocks = layout.padded_numel // BLOCK
    _launch(
        dequantize_kernel, rows * -(-blocks // _TILE_SLOTS), replica,
        messages, replica, layout.numel // unit, blocks, _message_stride(messages), row_stride // unit,
        UNIT=unit, BITS=layout.bits, GROUP=_group_blocks(layout), ROWS=_TILE_SLOTS, ACCUMULATE=accumulate,
        # 16 bytes of the replica per thread, the widest store: more would be exchanged before it.
        num_warps=_warps(_TILE_SLOTS, 16 // replica.element_size(), replica.device),
    )  # fmt: skip


def hadamard_quantize(
    values: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: Hadamard | None,
    rounding: RoundingKey | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`.

    Bytes per value: 4 (fp32) or 2 (bf16) read, bits / 8 + 2 / group_size written; 5.02 from fp32 with 8 bits
    and groups of 128. Rows are read where they lie, whatever the strides of `values`.
    """
    destinations, parts, _ = values.shape
    # The stride of a dimension of size 1 means nothing.
    strides = values.stride(0) if destinations > 1 else 0, values.stride(1) if parts > 1 else 0
    place = {"rows": destinations * parts, "strides": strides, "out_stride": _message_stride(out)}
    _quantize(values, None, out, layout, hadamard, rounding, **place, values_per_thread=16)


def dequantize_reduce_quantize(
    messages: Tensor,
    *,
    received: MessageLayout,
    out: Tensor,
    sent: MessageLayout,
    rounding: RoundingKey | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`.

    Bytes per value: k * (bits_in / 8 + 2 / group_size_in) read, bits_out / 8 + 2 / group_size_out written;
    4.58 for four messages of 8 bits into 4 bits with groups of 128.
    """
    groups, slots, programs = _tile(sent)
    _launch(
        reduce_quantize_kernel, received.parts * programs, out,
        messages, out, messages.shape[0], received.parts, sent.padded_numel // BLOCK,
        _message_stride(messages), _message_stride(out), *_rounding_numbers(rounding),
        COUNT=_unrolled(messages.shape[0]), BITS_IN=received.bits, GROUP_IN=_group_blocks(received),
        BITS=sent.bits, GROUP=_group_blocks(sent), GROUPS=groups, SLOTS=slots,
        STOCHASTIC=rounding is not None, num_warps=_warps(groups * slots, 16, out.device),
    )  # fmt: skip


def dequantize_reduce_hadamard(
    messages: Tensor, *, out: Tensor, layout: MessageLayout, hadamard: Hadamard | None, multiplier: float
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`.

    Bytes per value: k * (bits / 8 + 2 / group_size) read, 4 (fp32) written; 6.06 for four messages of 4 bits
    with groups of 128.
    """
    unit, blocks = math.gcd(_VALUE_UNIT, layout.numel), layout.padded_numel // BLOCK
    _launch(
        reduce_hadamard_kernel, -(-blocks // _TILE_SLOTS), out,
        messages, out, layout.numel // unit, messages.shape[0], blocks, _message_stride(messages),
        multiplier, _signs(hadamard),
        UNIT=unit, COUNT=_unrolled(messages.shape[0]), BITS=layout.bits, GROUP=_group_blocks(layout),
        ROWS=_TILE_SLOTS, HADAMARD=hadamard is not None,
        num_warps=_warps(_TILE_SLOTS, 16, out.device),
    )  # fmt: skip

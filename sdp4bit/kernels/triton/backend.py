"""The operators as Triton kernels for NVIDIA and AMD GPUs.

An H200 and Triton's interpreter produce the bytes of :mod:`sdp4bit.quantization.reference`, and every kernel
compiles for sm_80 to sm_120, gfx942 and gfx950. Programs per multiprocessor, warps and registers were varied
on the H200; on other GPUs the speed is not measured.

Each function is a single kernel launch without allocation or synchronization, so a step can be captured in a
CUDA graph after one call that compiles. Each input is read once and each output is written once; docstrings
state the bytes per value. Only groups of more than 8192 values are read twice by `subtract_quantize`,
`hadamard_quantize` and `dequantize_reduce_quantize`.

A kernel is compiled per dtype, format, group size, rounding, number of messages (up to 8) and row alignment,
not per shape. Rows whose length and strides are multiples of 16 values use 16-byte vectors. Other rows use
smaller accesses to the values, but not to the codes.

CPU tensors work if TRITON_INTERPRET=1 was set before Triton was imported, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from sdp4bit.kernels.triton import tables
from sdp4bit.kernels.triton.checksum import checksum_kernel
from sdp4bit.kernels.triton.codes import DITHER, NEAREST, STOCHASTIC
from sdp4bit.kernels.triton.formats import FORMATS
from sdp4bit.kernels.triton.kernels import (
    dequantize_kernel,
    quantize_kernel,
    reduce_hadamard_kernel,
    reduce_pieces_kernel,
    reduce_quantize_kernel,
)
from sdp4bit.kernels.triton.launch import launch
from sdp4bit.quantization.checksum import STRIPE_WORDS, bytes_of, signed64
from sdp4bit.quantization.formats import BLOCK
from sdp4bit.quantization.layout import MESSAGE_ALIGNMENT, MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey
from sdp4bit.quantization.tables import Call, launches

_MAX_SLOTS = 256
"""Maximum slots of a group in registers; a longer group is read twice."""
_RAW_GROUP = 4
"""Group size, in blocks, for tiles of unquantized messages."""
_MAX_UNROLLED = 8
"""Maximum number of messages for which a sum is unrolled; not varied."""
_MAX_PAIRED = 4
"""Maximum number of messages that threads sum for a pair of slots, limited by registers."""
_REGISTERS, _MORE_REGISTERS, _MOST_REGISTERS = 80, 96, 128
"""Maximum registers of a thread; more for transforms and checksums, most for final sums, and for sums and odd
rows of pairs of slots. They leave six, five or four warps per scheduler, enough for threads of 16 to 64
values. On an H200 32 registers more took 1 to 11 % longer, and 32 fewer 1 to 3 %, or 26 % for a sum that is
quantized (`results/gpu/h200/tuning.json`)."""
_REGISTERS_OF_BLOCKS = 168
"""Registers of a thread that finds 32 values, and the own ones, by their blocks. They leave three warps per
scheduler, enough for norms and biases."""
_WAVES = 8
"""Programs relative to those that run at once, if all registers are used.

An H200 took up to 31 % longer with one wave than with eight. Nsight Compute then saw 0.67 to 0.8 of the
possible programs, because kernels need fewer registers than allowed (1.29 for a sum that is quantized). A
program per tile was 6 % faster to 8 % slower than eight waves (`results/gpu/h200/tuning.json`, `ncu.json`).
"""
_CHECKSUM_WORDS, _CHECKSUM_WARPS = 1024, 4
"""Words of a piece per program, 64 bytes per thread; not varied."""
_MODES: dict[bool | None, int] = {None: NEAREST.value, False: STOCHASTIC.value, True: DITHER.value}
"""Rounding modes by `rounding and rounding.dither`."""
_NO_TABLE = (None, 0, 0)
"""The numbers of a kernel that describe sections, see `tables.py`."""
_VALUE_UNIT = 16
"""Rows whose length and strides are multiples of this are read and written in 16-byte vectors."""

_IS_COMPILED = isinstance(quantize_kernel, triton.JITFunction)


@cache
def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _warps(slots: int, values_per_thread: int, device: torch.device) -> int:
    """Return the warps for this many values per thread in each half of a tile of slots."""
    return max(1, slots * 16 // (values_per_thread * _warp_size(device)))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _resident_warps(registers: int) -> int:
    """Return the warps per multiprocessor with these registers; its four parts have 512 per lane each."""
    return 4 * (512 // registers)


def _programs(tiles: int, rows: int, num_warps: int, registers: int, device: torch.device) -> int:
    """Return the number of programs for the tiles of a row, which share them equally."""
    resident = _multiprocessors(device) * max(1, _resident_warps(registers) // num_warps)
    return -(-tiles // max(1, tiles * rows // (_WAVES * resident)))


def _launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float | Tensor | None, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    *,
    registers: int = _REGISTERS,
) -> None:
    """Launch a kernel for a grid of [tiles, parts, destinations]; the last tensor is the one written.

    Args:
        registers: maximum of a thread.
    """
    tiles, parts, destinations = grid
    rows = parts * destinations
    if not tiles * rows:
        return
    if tables.recording.noted is not None:
        tables.recording.noted.append(
            tables.Launch(kernel, grid, tensors, numbers, constants, num_warps, registers)
        )
        return
    device = tensors[-1].device
    programs = _programs(tiles, rows, num_warps, registers, device), parts, destinations
    _launch_programs(kernel, programs, tensors, numbers, constants, num_warps, registers=registers)


def _launch_programs(
    kernel: Any,
    programs: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float | Tensor | None, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    *,
    registers: int,
) -> None:
    device = tensors[-1].device
    is_cpu = device.type == "cpu"
    if is_cpu and _IS_COMPILED:
        raise ValueError(
            f"Triton kernels need CUDA tensors, got {device}: use the numba or reference back end, or "
            "set TRITON_INTERPRET=1 before Triton is imported to interpret them on the CPU"
        )
    is_current = is_cpu or device.index == torch.cuda.current_device()
    with nullcontext() if is_current else torch.cuda.device(device):
        launch(kernel, programs, tensors, numbers, constants, num_warps, registers=registers)


def pack(calls: Sequence[Call], tensors: Sequence[Tensor]) -> tables.PackedTable:
    """Return the calls of a table as launches for all sections of a kind."""
    return tables.PackedTable(calls, tensors, join=_join, launch=_launch_programs)


def _join(calls: Sequence[Call], tensors: Sequence[Tensor]) -> list[tables.Joined]:
    joined = []
    for kind in launches(calls):
        found = []
        for each in kind:
            arguments = each.bind(0, tensors)
            # None without values.
            made = tables.recording.of(globals()[each.operator], arguments)
            found += [(launched, each, arguments) for launched in made]
        if found:
            joined.append(tables.Joined(found, tensors, programs_of=_programs))
    return joined


def _signed(bits: int) -> int:
    """Return 32 bits as int32, because Triton passes an int of 2**31 or more in 64 bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def _group_blocks(layout: MessageLayout) -> int:
    return layout.group_size // BLOCK if layout.format.has_scales else _RAW_GROUP


def _in_pairs(layout: MessageLayout) -> bool:
    """Return whether threads can process pairs of slots, with both chunks of each block."""
    return FORMATS[layout.format.name].in_halves and _group_blocks(layout) % 2 == 0


def _is_odd_row(layout: MessageLayout) -> bool:
    """Return whether the last group of a row has an odd number of blocks, unlike the others."""
    return layout.padded_numel // BLOCK % _group_blocks(layout) % 2 == 1


def _tile(layout: MessageLayout, threads: int) -> tuple[int, int, int]:
    """Return groups per tile, slots per group (a power of two) and tiles per row.

    A tile has one slot of 32 values per thread, or one group.
    """
    blocks = _group_blocks(layout)
    # Triton's tiles are powers of two. A group of 3 blocks takes 4 slots, one of them masked.
    slots = min(1 << (blocks - 1).bit_length(), _MAX_SLOTS)
    groups = max(1, threads // slots)
    return groups, slots, -(-layout.padded_numel // (BLOCK * blocks * groups))


def _key_numbers(key: RoundingKey) -> tuple[int, int, int, int]:
    """Return both keys, and the first number and the row stride in blocks of 32."""
    return _signed(key.k0), _signed(key.k1), key.first // BLOCK, key.row_stride // BLOCK


def _rounding_numbers(rounding: RoundingKey | None) -> tuple[int | None, ...]:
    """Return the numbers of the key, and the mask of the sender's dither or None."""
    if rounding is None:
        return 0, 0, 0, 0, None
    return *_key_numbers(rounding), rounding.mask if rounding.dither else None


def _dither_numbers(dither: RoundingKey | None) -> tuple[int | None, ...]:
    """Return the numbers of the key of received dither; without dither the first block is None."""
    return (0, 0, None, 0) if dither is None else _key_numbers(dither)


def _mode(rounding: RoundingKey | None) -> int:
    return _MODES[rounding and rounding.dither]


def _message_stride(messages: Tensor) -> int:
    """Return the stride of messages in units of 16 bytes; that of a single message is meaningless."""
    return messages.stride(0) // MESSAGE_ALIGNMENT if messages.shape[0] > 1 else 0


def _most_registers(blocks: Tensor | None) -> int:
    return _MOST_REGISTERS if blocks is None else _REGISTERS_OF_BLOCKS


def _unrolled(count: int) -> int:
    return count if count <= _MAX_UNROLLED else -1


def _quantize(
    values: Tensor,
    replica: Tensor | None,
    out: Tensor,
    layout: MessageLayout,
    *,
    hadamard: bool,
    rounding: RoundingKey | None,
    destinations: int,
    strides: tuple[int, int],
    out_stride: int,
    values_per_thread: int,
    is_paired: bool,
    clip: float = 1.0,
    skip: int | None = None,
    blocks: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """Launch the kernel that quantizes rows; strides are between destinations and between parts."""
    groups, slots, tiles = _tile(layout, _warp_size(out.device) * (1 + is_paired))
    # Lengths and strides are passed in their largest common unit. In units of 16 values the compiler can use
    # full vectors.
    unit = math.gcd(_VALUE_UNIT, layout.numel, *strides) if blocks is None else 1
    is_odd = is_paired and _is_odd_row(layout)
    _launch(
        quantize_kernel,
        (tiles, layout.parts, destinations - (skip is not None)),
        (values, values if replica is None else replica, out),
        (
            layout.numel // unit if blocks is None else blocks,
            *(strides[0] // unit, strides[1] // unit),
            *(layout.padded_numel // BLOCK, out_stride, *_rounding_numbers(rounding), skip),
            None if nonfinite is None else nonfinite.view(torch.uint8),
            *_NO_TABLE,
        ),
        (
            *(unit, FORMATS[layout.format.name], float(clip), _group_blocks(layout), groups, slots),
            *(replica is not None, hadamard, _mode(rounding), is_paired),
            is_odd,
        ),
        _warps(groups * slots, values_per_thread, out.device),
        registers=_MOST_REGISTERS if is_odd else _MORE_REGISTERS if hadamard else _REGISTERS,
    )


def subtract_quantize(
    main: Tensor,
    *,
    replica: Tensor | None,
    out: Tensor,
    layout: MessageLayout,
    clip: float = 1.0,
    blocks: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`.

    Bytes per value: 4 (fp32 main) + 2 (bf16 replica) read, bits / 8 + 2 / group_size written; 6.5 with 4 bits
    and groups of 2048.
    """
    # Without a transform a chunk may span threads, and more threads keep more loads in flight. Codes below
    # 4 bits are words of a full chunk.
    per_thread = 16 if FORMATS[layout.format.name].in_words else 8
    _quantize(
        main,
        replica,
        out,
        layout,
        hadamard=False,
        rounding=None,
        destinations=1,
        strides=(0, 0),
        out_stride=0,
        values_per_thread=per_thread,
        is_paired=False,
        clip=clip,
        blocks=blocks,
        nonfinite=nonfinite,
    )


def dequantize_add(
    messages: Tensor,
    *,
    replica: Tensor,
    layout: MessageLayout,
    accumulate: bool,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`.

    Bytes per value: bits / 8 + 2 / group_size read, 2 (bf16 replica) written and, to accumulate, 2 read; 4.5
    with 4 bits and groups of 2048.
    """
    rows, slots = replica.shape[0], _warp_size(replica.device)
    row_stride = replica.stride(0) if rows > 1 else 0
    unit = math.gcd(_VALUE_UNIT, layout.numel, row_stride) if blocks is None else 1
    row_blocks = layout.padded_numel // BLOCK
    _launch(
        dequantize_kernel,
        (-(-row_blocks // slots), rows, 1),
        (messages, replica),
        (
            layout.numel // unit if blocks is None else blocks,
            *(row_blocks, _message_stride(messages), row_stride // unit, *_NO_TABLE),
        ),
        (unit, FORMATS[layout.format.name], _group_blocks(layout), slots, accumulate),
        # 16 bytes of the replica per thread, the widest store.
        _warps(slots, 16 // replica.element_size(), replica.device),
    )


def hadamard_quantize(
    values: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    rounding: RoundingKey | None,
    skip: int | None = None,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`.

    Bytes per value: 4 (fp32) or 2 (bf16) read, bits / 8 + 2 / group_size written; 5.02 from fp32 with 8 bits
    and groups of 128. Rows are read in place with any strides of `values`.
    """
    destinations, parts, _ = values.shape
    # The stride of a dimension of size 1 is meaningless.
    strides = values.stride(0) if destinations > 1 else 0, values.stride(1) if parts > 1 else 0
    # The second slot of a pair may be in a block after the last one, which has no entry.
    is_paired = hadamard and _in_pairs(layout) and blocks is None
    _quantize(
        values,
        None,
        out,
        layout,
        hadamard=hadamard,
        rounding=rounding,
        destinations=destinations,
        strides=strides,
        out_stride=_message_stride(out),
        values_per_thread=32 if is_paired else 16,
        is_paired=is_paired,
        skip=skip,
        blocks=blocks,
    )


def dequantize_reduce_quantize(
    messages: Tensor,
    *,
    received: MessageLayout,
    out: Tensor,
    sent: MessageLayout,
    rounding: RoundingKey | None,
    dither: RoundingKey | None,
    skip: int | None = None,
    own: Tensor | None = None,
    blocks: Tensor | None = None,
    hadamard: bool = False,
    multiplier: float = 1.0,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`.

    Bytes per value: k * (bits_in / 8 + 2 / group_size_in) read, bits_out / 8 + 2 / group_size_out written;
    4.58 for four messages of 8 bits into 4 bits with groups of 128.
    """
    is_paired = rounding is not None and messages.shape[0] <= _MAX_PAIRED and _in_pairs(sent)
    groups, slots, tiles = _tile(sent, _warp_size(out.device) * (1 + is_paired))
    unit = math.gcd(_VALUE_UNIT, received.numel) if blocks is None else 1
    _launch(
        reduce_quantize_kernel,
        (tiles, sent.parts, out.shape[0] - (skip is not None and own is None)),
        (messages, messages if own is None else own, out),
        (
            *(messages.shape[0], sent.padded_numel // BLOCK, _message_stride(messages), _message_stride(out)),
            *(received.parts, sent.parts, skip),
            *_rounding_numbers(rounding),
            *_dither_numbers(dither),
            *(multiplier, received.numel // unit if blocks is None else blocks, *_NO_TABLE),
        ),
        (
            *(_unrolled(messages.shape[0]), FORMATS[received.format.name], _group_blocks(received)),
            *(FORMATS[sent.format.name], _group_blocks(sent), groups, slots, _mode(rounding), is_paired),
            *(is_paired and _is_odd_row(sent), own is not None, unit, hadamard),
        ),
        _warps(groups * slots, 32 if is_paired else 16, out.device),
        registers=_most_registers(blocks) if is_paired or blocks is not None else _REGISTERS,
    )


def dequantize_reduce_hadamard(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    hadamard: bool,
    multiplier: float,
    dither: RoundingKey | None,
    part: int = 0,
    skip: int | None = None,
    own: Tensor | None = None,
    own_multiplier: float = 1.0,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`.

    Bytes per value: k * (bits / 8 + 2 / group_size) read, 4 (fp32) written and, with own values, 4 read.
    Four messages of 4 bits with groups of 128 take 6.06.
    """
    row_blocks = layout.padded_numel // BLOCK
    unit = math.gcd(_VALUE_UNIT, layout.numel) if blocks is None else 1
    slots, count = _warp_size(out.device), messages.shape[0] - (skip is not None)
    _launch(
        reduce_hadamard_kernel,
        (-(-row_blocks // slots), 1, 1),
        (messages, messages if own is None else own, out),
        (
            layout.numel // unit if blocks is None else blocks,
            *(count, row_blocks, _message_stride(messages)),
            *(part, layout.parts, multiplier, *_dither_numbers(dither)[:3]),
            *(skip, None if own_multiplier == 1.0 else float(own_multiplier), *_NO_TABLE),
        ),
        (
            *(unit, _unrolled(count), FORMATS[layout.format.name], _group_blocks(layout), slots),
            *(hadamard, own is not None),
        ),
        _warps(slots, 16, out.device),
        registers=_most_registers(blocks),
    )


def dequantize_reduce_pieces(
    messages: Tensor,
    *,
    out: Tensor,
    layout: MessageLayout,
    pieces: int,
    stride: int,
    hadamard: bool,
    multiplier: float,
    dither: KeySeries | None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_pieces`.

    Bytes per value as in dequantize_reduce_hadamard.
    """
    count, slots, row_blocks = len(messages) // pieces, _warp_size(out.device), layout.padded_numel // BLOCK
    unit = math.gcd(_VALUE_UNIT, layout.numel)  # the stride is a multiple of 32
    _launch(
        reduce_pieces_kernel,
        (-(-row_blocks // slots), pieces, 1),
        (messages, out),
        (
            *(layout.numel // unit, stride // unit, count, row_blocks, _message_stride(messages), multiplier),
            *((None, 0) if dither is None else map(signed64, dither[:2])),
            *_NO_TABLE,
        ),
        (unit, _unrolled(count), FORMATS[layout.format.name], _group_blocks(layout), slots, hadamard),
        _warps(slots, 16, out.device),
        registers=_MOST_REGISTERS,
    )


def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.add_checksum`.

    Each byte is read once.
    """
    source = bytes_of(values)
    unit = math.gcd(8, source.data_ptr(), source.numel())
    words = -(-source.numel() // 8)
    _launch(
        checksum_kernel,
        (-(-words // STRIPE_WORDS), -(-min(words, STRIPE_WORDS) // _CHECKSUM_WORDS), 1),
        (source, out),
        (source.numel() // unit,),
        (unit, _CHECKSUM_WORDS),
        _CHECKSUM_WARPS,
        registers=_MORE_REGISTERS,
    )

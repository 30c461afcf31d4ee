"""The operators on CPU tensors, compiled by numba.

Functions have the names, arguments and results of :mod:`sdp4bit.quantization.reference`.
:mod:`sdp4bit.quantization.ops` has checked the arguments. fp32 and bf16 tensors are read and written in
place, other dtypes through an fp32 copy. `programs.py` runs the kernels, and `tables.py` those of a table by
one call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdp4bit.kernels.cpu import compilation, formats, kernels
from sdp4bit.kernels.cpu.parameters import NO_INDEX, DequantizeRows, Key, QuantizeRows, ReduceQuantize
from sdp4bit.kernels.cpu.programs import compiled, float_bits, program_of, run
from sdp4bit.kernels.cpu.tables import PackedTable, keys_of
from sdp4bit.quantization.checksum import GOLDEN, STRIPE_WORDS, signed64, stripe_factors, words_of
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import KeySeries, RoundingKey
from sdp4bit.quantization.tables import Call

FORMATS = formats.FORMATS
_NEGATIVE_ZERO_BITS = 0x80000000
_NO_KEY = Key(*RoundingKey(0, 0)[:-1])
_READ_IN_PLACE = (torch.float32, torch.bfloat16)


def compile_seconds() -> float:
    """See :func:`sdp4bit.quantization.ops.compile_seconds`."""
    return compiled.seconds


def _key(key: RoundingKey | None) -> Key:
    return _NO_KEY if key is None else Key(*key[:-1])


def pack(calls: Sequence[Call], tensors: Sequence[Tensor]) -> PackedTable | None:
    """Return the calls of a table as one call; None if kernels work on copies of the values, or on none.

    Args:
        tensors: tensors to move that have the dtypes and strides of all later ones.
    """
    named = [argument for each in calls for argument in each.bind(0, tensors).values()]
    is_copied = any(isinstance(each, Tensor) and each.dtype is torch.float16 for each in named)
    has_values = any(layout.numel for each in calls for layout in each.layouts)
    if is_copied or not has_values or len(tensors) > kernels.MOST_MOVING:
        return None
    return PackedTable(calls, tensors, operators=globals())


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
    """See :func:`sdp4bit.quantization.ops.subtract_quantize`."""
    main = main if main.dtype in _READ_IN_PLACE else main.float()
    if replica is not None and replica.dtype not in _READ_IN_PLACE:
        replica = replica.float()
    run(
        program_of(
            kernels.quantize_rows,
            sent=layout,
            clip=clip,
            has_replica=replica is not None,
            has_blocks=blocks is not None,
        ),
        layout.numel,
        QuantizeRows(
            values=main.data_ptr(),
            is_bf16=main.dtype is torch.bfloat16,
            replica=0 if replica is None else replica.data_ptr(),
            replica_is_bf16=replica is not None and replica.dtype is torch.bfloat16,
            out=out.data_ptr(),
            blocks=0 if blocks is None else blocks.data_ptr(),
            nonfinite=0 if nonfinite is None else nonfinite.data_ptr(),
        ),
        _key(None),
    )


def dequantize_add(
    messages: Tensor,
    *,
    replica: Tensor,
    layout: MessageLayout,
    accumulate: bool,
    blocks: Tensor | None = None,
) -> None:
    """See :func:`sdp4bit.quantization.ops.dequantize_add`."""
    rows, target = replica.shape[0], replica if replica.dtype in _READ_IN_PLACE else replica.float()
    size, is_bf16 = target.element_size(), target.dtype is torch.bfloat16
    run(
        program_of(kernels.dequantize_rows, received=layout, terms=1, has_blocks=blocks is not None),
        rows * layout.numel,
        DequantizeRows(
            messages=messages.data_ptr(),
            row_step=messages.stride(0),
            terms=1,
            rows=rows,
            short=layout.numel,
            out=target.data_ptr(),
            out_stride=target.stride(0) * size,
            is_bf16=is_bf16,
            own=target.data_ptr() if accumulate else 0,
            own_is_bf16=is_bf16,
            # The sum of the single message starts from -0.0, so that -0.0 is preserved.
            initial=_NEGATIVE_ZERO_BITS,
            blocks=0 if blocks is None else blocks.data_ptr(),
        ),
        _key(None),
    )
    if target is not replica:
        replica.copy_(target)


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
    """See :func:`sdp4bit.quantization.ops.hadamard_quantize`."""
    if values.dtype not in _READ_IN_PLACE:
        values = values.to(torch.float32, memory_format=torch.contiguous_format)
    destinations, size = values.shape[0] - (skip is not None), values.element_size()
    outer, inner, _ = values.stride()
    run(
        program_of(
            kernels.quantize_rows,
            sent=layout,
            rounding=rounding and rounding.dither,
            hadamard=hadamard,
            has_blocks=blocks is not None,
        ),
        destinations * layout.parts * layout.numel,
        QuantizeRows(
            values=values.data_ptr(),
            is_bf16=values.dtype is torch.bfloat16,
            outer_stride=outer * size,
            inner_stride=inner * size,
            destinations=destinations,
            skip=NO_INDEX if skip is None else skip,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            blocks=0 if blocks is None else blocks.data_ptr(),
        ),
        _key(rounding),
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
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_quantize`."""
    terms, destinations = messages.shape[0], out.shape[0] - (skip is not None)
    run(
        program_of(
            kernels.reduce_quantize,
            received=received,
            sent=sent,
            terms=terms,
            rounding=rounding and rounding.dither,
            is_dither=dither is not None,
        ),
        max(terms, 1) * destinations * sent.parts * sent.numel,
        ReduceQuantize(
            messages=messages.data_ptr(),
            stride=messages.stride(0),
            terms=terms,
            out=out.data_ptr(),
            out_stride=out.stride(0),
            apart=out.shape[0],
            destinations=destinations,
            skip=NO_INDEX if skip is None else skip,
        ),
        _key(rounding),
        _key(dither),
    )
    if own is not None:
        assert skip is not None
        dequantize_reduce_hadamard(
            messages,
            out=own,
            layout=received,
            hadamard=hadamard,
            multiplier=multiplier,
            dither=dither and dither.at_row(skip),
            part=skip,
            blocks=blocks,
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
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_hadamard`."""
    if own is not None and own.dtype not in _READ_IN_PLACE:
        own = own.float()
    terms, target = messages.shape[0], out if out.dtype in _READ_IN_PLACE else out.float()
    run(
        program_of(
            kernels.dequantize_rows,
            received=layout,
            terms=terms,
            hadamard=hadamard,
            is_dither=dither is not None,
            has_blocks=blocks is not None,
        ),
        max(terms, 1) * layout.numel,
        DequantizeRows(
            messages=messages.data_ptr(),
            stride=messages.stride(0),
            terms=terms,
            part=part,
            skip=NO_INDEX if skip is None else skip,
            out=target.data_ptr(),
            is_bf16=target.dtype is torch.bfloat16,
            own=0 if own is None else own.data_ptr(),
            own_is_bf16=own is not None and own.dtype is torch.bfloat16,
            own_multiplier=float_bits(own_multiplier),
            multiplier=float_bits(multiplier),
            blocks=0 if blocks is None else blocks.data_ptr(),
        ),
        _key(dither),
    )
    if target is not out:
        out.copy_(target)


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
    """See :func:`sdp4bit.quantization.ops.dequantize_reduce_pieces`."""
    terms, target = messages.shape[0] // pieces, out if out.dtype in _READ_IN_PLACE else out.float()
    keys = None if dither is None else keys_of(dither, pieces)
    run(
        program_of(
            kernels.dequantize_rows,
            received=layout,
            terms=terms,
            hadamard=hadamard,
            is_dither=dither is not None,
        ),
        max(messages.shape[0], 1) * layout.numel,
        DequantizeRows(
            messages=messages.data_ptr(),
            row_step=messages.stride(0),
            stride=messages.stride(0) * pieces,
            terms=terms,
            rows=pieces,
            short=stride,
            out=target.data_ptr(),
            out_stride=stride * target.element_size(),
            is_bf16=target.dtype is torch.bfloat16,
            multiplier=float_bits(multiplier),
            keys=0 if keys is None else keys.data_ptr(),
        ),
        _key(None),
    )
    if target is not out:
        out.copy_(target)


def add_checksum(values: Tensor, *, out: Tensor) -> None:
    """See :func:`sdp4bit.quantization.ops.add_checksum`."""
    words, factors = words_of(values), stripe_factors(values.device)
    sum_words = compiled.of(compilation.compile_sum_words)
    out += sum_words(words.numpy(), factors.numpy(), STRIPE_WORDS, signed64(GOLDEN))

"""The parameters of the CPU kernels: groups of int64 numbers, one after the other in memory.

The back end fills the groups by keyword, and a kernel reads them by the same names. It is compiled for the
classes of the groups that it is called with.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from numba import typeof, types
from numba.extending import intrinsic, models, register_model

from sdp4bit.kernels.cpu import formats, tiles, vectors
from sdp4bit.kernels.cpu.formats import coding_of
from sdp4bit.kernels.cpu.vectors import INT64, point
from sdp4bit.quantization.formats import Format

NO_INDEX = 1 << 62
ONE_BITS = 0x3F800000
"""fp32 bits of 1."""


class Key(NamedTuple):
    """Attributes of `RoundingKey`."""

    k0: int
    k1: int
    first: int
    row_stride: int
    dither: bool
    sender: int


class Layout(NamedTuple):
    """A message layout: attributes of `MessageLayout`, and the step of its codes."""

    numel: int
    padded_numel: int
    parts: int
    code_bytes: int
    scales_offset: int
    payload_bytes: int
    nbytes: int
    groups: int
    group_size: int
    step: int  # fp32 bits of one code unit relative to a group's largest magnitude


class Work(NamedTuple):
    """The values of a tile, and the threads' working memory."""

    tile: int
    offset: int  # of the first thread's memory from the parameters
    memory_stride: int


class Flags(NamedTuple):
    """Constants of a kernel, which is compiled for them."""

    received: Format | None = None
    sent: Format | None = None
    is_dither: bool = False  # of received codes
    rounding: int = tiles.NEAREST  # of sent codes
    is_clipped: bool = False
    hadamard: bool = False
    has_replica: bool = False
    has_blocks: bool = False


class QuantizeRows(NamedTuple):
    """Followed by a Key, a Layout and Work. Tensors are addresses, and strides are in bytes."""

    values: int
    is_bf16: int
    out: int
    outer_stride: int = 0  # of destinations in values
    inner_stride: int = 0  # of parts in values
    out_stride: int = 0
    replica: int = 0
    replica_is_bf16: int = 0
    destinations: int = 1  # without the skipped one
    skip: int = NO_INDEX
    blocks: int = 0
    nonfinite: int = 0  # a flag, or 0


class ReduceQuantize(NamedTuple):
    """Followed by the Keys of sent and received codes, both Layouts and Work."""

    messages: int
    stride: int
    terms: int
    out: int
    out_stride: int
    apart: int  # parts p, p + apart, ... of the sums are sent in one message
    destinations: int  # without the skipped one
    skip: int = NO_INDEX


class DequantizeRows(NamedTuple):
    """Followed by the Key of received codes, a Layout and Work."""

    messages: int
    terms: int
    out: int
    is_bf16: int
    stride: int = 0  # between terms
    out_stride: int = 0
    rows: int = 1
    row_step: int = 0  # between the first messages of rows
    short: int = 0  # values of rows other than the last one
    part: int = 0
    skip: int = NO_INDEX  # a message
    own: int = 0
    own_is_bf16: int = 0
    own_multiplier: int = ONE_BITS  # fp32 bits
    initial: int = 0  # fp32 bits from which sums start
    multiplier: int = ONE_BITS  # fp32 bits
    keys: int = 0  # both keys of each row, or 0 if all rows have those of the Key
    blocks: int = 0


Group = QuantizeRows | ReduceQuantize | DequantizeRows | Key | Layout | Work


class Parameters(types.Type):
    """Address of groups of parameters, with the flags and formats that the kernel is compiled for.

    The name has a checksum of the inlined sources, because numba's cache checks only the file of the kernel
    and its argument types.
    """

    def __init__(self, flags: Flags, groups: tuple[type[Group], ...]) -> None:
        self.flags, self.groups = flags, groups
        files = {__file__, *(str(module.__file__) for module in (formats, tiles, vectors))}
        for format in (each for each in flags if isinstance(each, Format)):
            files |= {each.py_func.__code__.co_filename for each in formats.FORMATS[format.name] if each}
        sources = b"".join(Path(file).read_bytes() for file in sorted(files))
        names = [(each.__name__, each._fields) for each in groups]
        super().__init__(name=f"Parameters({zlib.crc32(sources)}, {flags}, {names})")


@register_model(Parameters)
class _ParametersModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Parameters) -> None:
        super().__init__(manager, kind, INT64)


@intrinsic
def address_of(typing_context: Any, parameters: Parameters) -> Any:
    """Return the address of parameters."""
    return types.int64(parameters), lambda context, builder, sig, args: args[0]


@intrinsic
def unpack(typing_context: Any, parameters: Parameters) -> Any:
    """Return the flags, as constants, and the groups of parameters."""
    constants: Iterator[Any] = (
        coding_of(each) if isinstance(each, Format) else int(each or 0) for each in parameters.flags
    )
    flags = Flags(*constants)
    kinds = [types.NamedUniTuple(types.int64, len(each._fields), each) for each in parameters.groups]
    result = types.Tuple([typeof(flags), *kinds])

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        block, index = point(builder, args[0], INT64), 0
        values = [context.get_constant_generic(builder, result[0], flags)]
        for kind in kinds:
            places = range(index, index := index + len(kind))
            numbers = [builder.load(builder.gep(block, [INT64(place)])) for place in places]
            values.append(context.make_tuple(builder, kind, numbers))
        return context.make_tuple(builder, result, values)

    return result(parameters), codegen

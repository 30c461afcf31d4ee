"""SIMD vector types with 16 or 32 lanes for numba.

numba promotes int32 to int64, which halves the SIMD width and prevents vectorization. These types map to LLVM
vectors instead, which the compiler splits over the machine's registers. Fast-math is off, so every operation
is rounded as written. Addresses are int64 numbers of any alignment.

Plain numba loops over arrays, with the same bytes, take longer by these factors. The measurement used 4 MiB
of fp32 values, 4 and 8 bits, one thread of an AMD EPYC with AVX-512, numba 0.68.1, and medians of 41
interleaved rounds (2026-11-22).

| operator                   | rounded to nearest           | stochastic                          |
|----------------------------|------------------------------|-------------------------------------|
| subtract_quantize          | 1.5 to 1.6                   | 2.9 to 3.0                          |
| dequantize_add             | 1.4 (8 bits), 1.9 (4 bits)   |                                     |
| hadamard_quantize          | 5.0 to 5.2; no transform 1.8 | 5.5 to 5.7; no transform 3.1 to 3.5 |
| dequantize_reduce_quantize | 2.3 to 3.2                   | 3.0 to 3.6                          |
| dequantize_reduce_hadamard | 4.6 to 5.8; no transform 1.9 (8 bits), 2.6 (4 bits) |              |

The transform and the hash gain most, because their shuffles stay in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
_LANE = {types.float32: FLOAT, types.int32: INT32}


class Vector(types.Type):
    """SIMD vector of float32 or int32."""

    def __init__(self, scalar: types.Type, lanes: int) -> None:
        self.scalar, self.lanes = scalar, lanes
        super().__init__(name=f"{scalar}x{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_LANE[vector.scalar], vector.lanes))


F16, F32 = Vector(types.float32, 16), Vector(types.float32, 32)
I16, I32 = Vector(types.int32, 16), Vector(types.int32, 32)


def _constant(lanes: int, value: int) -> Any:
    return ir.Constant(ir.VectorType(INT32, lanes), [INT32(value)] * lanes)


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    # LLVM recognizes this pair: insert into lane 0, then shuffle lane 0 to all lanes.
    undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, scalar, INT32(0))
    return builder.shuffle_vector(first, undefined, _constant(lanes, 0))


def _splat_int(builder: Any, number: Any, lanes: int) -> Any:
    return _splat(builder, builder.trunc(number, INT32), lanes)


def _pick(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(INT32, len(lanes)), [INT32(lane) for lane in lanes])
    return builder.shuffle_vector(a, b, mask)


def _define_operator(operation: Callable[..., object], **instructions: str) -> None:
    @infer_global(operation)
    class _Template(AbstractTemplate):
        def generic(self, args, kws):
            left, right = args
            if isinstance(left, Vector) and left == right and left.scalar.name in instructions:
                return signature(left, left, right)
            return None

    @lower_builtin(operation, Vector, Vector)
    def _lower(context, builder, sig, args):
        return getattr(builder, instructions[sig.args[0].scalar.name])(*args)


_define_operator(operator.add, float32="fadd", int32="add")
_define_operator(operator.sub, float32="fsub", int32="sub")
_define_operator(operator.mul, float32="fmul", int32="mul")
_define_operator(operator.and_, int32="and_")
_define_operator(operator.or_, int32="or_")
_define_operator(operator.xor, int32="xor")


def point(builder: Any, address: Any, pointee: Any) -> Any:
    """Return an LLVM pointer to an address, an int64."""
    return builder.inttoptr(address, pointee.as_pointer())


def _loader(result: Any, memory: Any, widen: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a function of an address that loads a value stored as `memory`."""

    @intrinsic
    def load(typing_context, address):
        def codegen(context, builder, sig, args):
            target = context.get_value_type(result)
            is_vector = isinstance(result, Vector)
            pointee = ir.VectorType(memory, result.lanes) if is_vector else memory
            # align=1, because rows begin at any address. It is as fast on current processors.
            return widen(builder, builder.load(point(builder, args[0], pointee), align=1), target)

        return result(types.int64), codegen

    return load


def _as_is(builder: Any, value: Any, target: Any) -> Any:
    return value


def _zero_extend(builder: Any, value: Any, target: Any) -> Any:
    return builder.zext(value, target)


def _widen_bf16(builder: Any, value: Any, target: Any) -> Any:
    # bf16 is the upper half of an fp32 number.
    lanes = target.count
    wide = builder.zext(value, ir.VectorType(INT32, lanes))
    return builder.bitcast(builder.shl(wide, _constant(lanes, 16)), target)


load_f32, load_f32x16 = _loader(F32, FLOAT, _as_is), _loader(F16, FLOAT, _as_is)
load_bf16 = _loader(F32, INT16, _widen_bf16)
load_u8 = _loader(I32, INT8, _zero_extend)
load_u8x16 = _loader(I16, INT8, _zero_extend)
load_scalar_u16 = _loader(types.int64, INT16, _zero_extend)
load_scalar_u32 = _loader(types.int64, INT32, _zero_extend)
load_scalar_i64 = _loader(types.int64, INT64, _as_is)


def _storer(memory: Any, narrow: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a function of an address and a vector or an int64 that stores it as `memory`."""

    @intrinsic
    def store(typing_context, address, value):
        def codegen(context, builder, sig, args):
            target = ir.VectorType(memory, value.lanes) if isinstance(value, Vector) else memory
            builder.store(narrow(builder, args[1], target), point(builder, args[0], target), align=1)

        return types.void(types.int64, value if isinstance(value, Vector) else types.int64), codegen

    return store


def _truncate(builder: Any, value: Any, target: Any) -> Any:
    return builder.trunc(value, target)


def _narrow_bf16(builder: Any, value: Any, target: Any) -> Any:
    """Round to nearest even by integers; NaN becomes 0x7FC0."""
    # Adding 0x7FFF, and 1 if the upper half is odd, carries for more than a half and for a half that rounds
    # to even. A carry out of the mantissa correctly raises the exponent up to infinity. NaN is restored.
    lanes = target.count
    bits = builder.bitcast(value, ir.VectorType(INT32, lanes))
    odd = builder.and_(builder.lshr(bits, _constant(lanes, 16)), _constant(lanes, 1))
    rounded = builder.add(builder.add(bits, _constant(lanes, 0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, _constant(lanes, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, _constant(lanes, 16)), target)


store_f32 = _storer(FLOAT, _as_is)
store_bf16 = _storer(INT16, _narrow_bf16)
store_scalar_i64 = _storer(INT64, _as_is)
store_u8, store_u16, store_u32 = (_storer(memory, _truncate) for memory in (INT8, INT16, INT32))


_TWO_BITS = [2 * (lane % 16) for lane in range(32)]
"""Bit offset of each of 32 2-bit codes in its word of 16 codes."""


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(INT32, len(numbers)), [INT32(number) for number in numbers])


def _floats(numbers: Sequence[float]) -> Any:
    return ir.Constant(ir.VectorType(FLOAT, len(numbers)), [FLOAT(number) for number in numbers])


@intrinsic
def load_2_bits(typing_context, address):
    """Return 32 numbers of two bits each, from 8 bytes, the first in the lowest bits."""

    def codegen(context, builder, sig, args):
        # Each lane shifts its bits out of a copy of the word.
        words = builder.load(point(builder, args[0], ir.VectorType(INT32, 2)), align=1)
        each = _pick(builder, words, words, [lane // 16 for lane in range(32)])
        return builder.and_(builder.lshr(each, _lanes(_TWO_BITS)), _constant(32, 3))

    return I32(types.int64), codegen


@intrinsic
def load_3_bits(typing_context, address, lower):
    """Return 32 3-bit numbers from their lower two bits and the third bits in 4 bytes."""

    def codegen(context, builder, sig, args):
        word = builder.load(point(builder, args[0], INT32), align=1)
        third = builder.bitcast(word, ir.VectorType(ir.IntType(1), 32))
        return builder.or_(args[1], builder.select(third, _constant(32, 4), _constant(32, 0)))

    return I32(types.int64, lower), codegen


@intrinsic
def store_2_bits(typing_context, address, numbers):
    """Store 32 numbers below 4 in 8 bytes, the first in the lowest bits."""

    def codegen(context, builder, sig, args):
        # A word has four numbers in its bytes. One product shifts them by 24, 18, 12 and 6 bits into the
        # highest byte. No two terms below share a bit, so nothing carries.
        octet = ir.VectorType(INT32, 8)
        quads = builder.bitcast(builder.trunc(args[1], ir.VectorType(INT8, 32)), octet)
        packed = builder.lshr(builder.mul(quads, _constant(8, 0x01041040)), _constant(8, 24))
        narrow = ir.VectorType(INT8, 8)
        builder.store(builder.trunc(packed, narrow), point(builder, args[0], narrow), align=1)

    return types.void(types.int64, numbers), codegen


@intrinsic
def store_third_bits(typing_context, address, numbers):
    """Store the third bits of 32 numbers in 4 bytes, the first in the lowest bit."""

    def codegen(context, builder, sig, args):
        third = builder.icmp_unsigned("!=", builder.and_(args[1], _constant(32, 4)), _constant(32, 0))
        builder.store(builder.bitcast(third, INT32), point(builder, args[0], INT32), align=1)

    return types.void(types.int64, numbers), codegen


@intrinsic
def load_seven_bits(typing_context, address):
    """Return the first numbers of 16 pairs of 7 bits, then the second; reads 16 bytes, two of them scales."""

    def codegen(context, builder, sig, args):
        octets = builder.load(point(builder, args[0], ir.VectorType(INT8, 16)), align=1)
        # Every lane takes the two bytes that hold its bits: shifts up and down leave these alone.
        begins = [7 * lane // 8 for lane in range(16)]
        words = _pick(builder, octets, octets, [byte for begin in begins for byte in (begin, begin + 1)])
        words = builder.bitcast(words, ir.VectorType(INT16, 16))
        words = builder.shl(words, ir.Constant(words.type, [INT16(9 - 7 * lane % 8) for lane in range(16)]))
        nine, eleven, magic = (ir.Constant(words.type, [INT16(n)] * 16) for n in (9, 11, 187))
        pairs = builder.lshr(words, nine)
        # 187 / 2**11 is 1 / 11 and 9 / 22528 more, too little to matter below 230.
        second = builder.lshr(builder.mul(pairs, magic), eleven)
        first = builder.sub(pairs, builder.mul(second, eleven))
        return builder.zext(_pick(builder, first, second, range(32)), ir.VectorType(INT32, 32))

    return I32(types.int64), codegen


@intrinsic
def store_seven_bits(typing_context, address, numbers):
    """Store 32 numbers, of 0 and 11 or below 11, as 16 pairs of 7 bits."""

    def codegen(context, builder, sig, args):
        first, second = (_pick(builder, args[1], args[1], range(i, i + 16)) for i in (0, 16))
        joined = builder.add(first, builder.mul(second, _constant(16, 11)))
        joined = builder.trunc(joined, ir.VectorType(INT8, 16))
        for width in (8, 16, 32):  # of which 7, 14, 28 bits are used: the next number moves down to them
            used, wide = width * 7 // 8, ir.VectorType(ir.IntType(2 * width), 64 // width)
            joined = builder.bitcast(joined, wide)
            low, shift = ((1 << used) - 1, width - used)
            low, high, shift = (
                ir.Constant(wide, [wide.element(n)] * wide.count) for n in (low, low << used, shift)
            )
            moved = builder.and_(builder.lshr(joined, shift), high)
            joined = builder.or_(builder.and_(joined, low), moved)
        # Twice 7 bytes: bytes 6 and 7 of the block are written again by the second store.
        octets = builder.bitcast(joined, ir.VectorType(INT8, 16))
        octets = _pick(builder, octets, octets, [*range(8), 6, *range(8, 15)])
        words = builder.bitcast(octets, ir.VectorType(INT64, 2))
        for index in (0, 1):
            place = point(builder, builder.add(args[0], INT64(6 * index)), INT64)
            builder.store(builder.extract_element(words, INT32(index)), place, align=1)

    return types.void(types.int64, numbers), codegen


def _shuffler(lanes: Sequence[int]) -> Any:
    @intrinsic
    def shuffle(typing_context, vector):
        def codegen(context, builder, sig, args):
            return _pick(builder, args[0], args[0], lanes)

        return vector(vector), codegen

    return shuffle


swap_halves = _shuffler([*range(16, 32), *range(16)])
second_halves = _shuffler([*range(16, 32)] * 2)


@intrinsic
def join(typing_context, first, second):
    """Return 32 lanes of twice 16."""

    def codegen(context, builder, sig, args):
        return _pick(builder, args[0], args[1], range(32))

    return Vector(first.scalar, 32)(first, second), codegen


def _lanewise(scalar: Any, instruction: str) -> Any:
    @intrinsic
    def convert(typing_context, vector):
        result = Vector(scalar, vector.lanes)

        def codegen(context, builder, sig, args):
            return getattr(builder, instruction)(args[0], context.get_value_type(result))

        return result(vector), codegen

    return convert


to_float = _lanewise(types.float32, "sitofp")
to_int = _lanewise(types.int32, "fptosi")  # towards zero; undefined on overflow
bits_of = _lanewise(types.int32, "bitcast")
float_of_bits = _lanewise(types.float32, "bitcast")


def _shifter(instruction: str) -> Any:
    @intrinsic
    def shift(typing_context, vector, count):
        def codegen(context, builder, sig, args):
            return getattr(builder, instruction)(args[0], _splat_int(builder, args[1], vector.lanes))

        return vector(vector, types.int64), codegen

    return shift


shift_left, shift_right, shift_right_signed = _shifter("shl"), _shifter("lshr"), _shifter("ashr")


def _splatter(lanes: int) -> Any:
    @intrinsic
    def splat(typing_context, number):
        is_float = isinstance(number, types.Float)
        source, lane = (types.float32,) * 2 if is_float else (types.int64, types.int32)

        def codegen(context, builder, sig, args):
            return (_splat if is_float else _splat_int)(builder, args[0], lanes)

        return Vector(lane, lanes)(source), codegen

    return splat


splat, splat16 = _splatter(32), _splatter(16)


@intrinsic
def maximum(typing_context, a, b):
    """Return the larger of each pair of signed lanes, in one instruction per register."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.icmp_signed(">", *args), *args)

    return a(a, b), codegen


@intrinsic
def minimum(typing_context, a, b):
    """Return the smaller of each pair of signed lanes, in one instruction per register."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.icmp_signed("<", *args), *args)

    return a(a, b), codegen


@intrinsic
def where_equal(typing_context, tested, number, chosen, other):
    """Return the lanes of `chosen` where those of the int32 `tested` are equal to those of `number`."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.icmp_signed("==", *args[:2]), *args[2:])

    return chosen(tested, number, chosen, other), codegen


@intrinsic
def largest_lane(typing_context, vector):
    """Return the largest signed lane, an int64."""

    def codegen(context, builder, sig, args):
        name = f"llvm.vector.reduce.smax.v{vector.lanes}i32"
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(INT32, [args[0].type]), name)
        return builder.sext(builder.call(function, args), INT64)

    return types.int64(vector), codegen


@intrinsic
def float_from_bits(typing_context, bits):
    """Return the fp32 number whose bits are the low 32 of an int64."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.trunc(args[0], INT32), FLOAT)

    return types.float32(types.int64), codegen


@intrinsic
def bits_from_float(typing_context, number):
    """Return the bits of an fp32 number, an int64 that is not negative."""

    def codegen(context, builder, sig, args):
        return builder.zext(builder.bitcast(args[0], INT32), INT64)

    return types.int64(types.float32), codegen


@intrinsic
def hadamard32(typing_context, block):
    """Return the transform of 32 values, the butterflies in the order of the definition."""

    def codegen(context, builder, sig, args):
        # One shuffle, and a product with 1 or -1, which is exact and may be fused with the sum. The partners
        # of the last stage are the two halves of the block.
        for stride in (1, 2, 4, 8):
            partners = _pick(builder, args[0], args[0], [lane ^ stride for lane in range(32)])
            signs = [-1.0 if lane & stride else 1.0 for lane in range(32)]
            signed = builder.fmul(args[0], _floats(signs), flags=("contract",))
            args = [builder.fadd(signed, partners, flags=("contract",))]
        first, second = (_pick(builder, args[0], args[0], range(i, i + 16)) for i in (0, 16))
        return _pick(builder, builder.fadd(first, second), builder.fsub(first, second), range(32))

    return block(block), codegen


@intrinsic
def random_bits16(typing_context, element, k0, k1, mask):
    """Return the 16 random bits of each value of the block that begins at `element`, a multiple of 32.

    The mask, a sender's number in reverse order, is XORed with the upper 8 bits. The counters of a block
    differ in their low 4 bits only, so the first mixing step, x ^ x >> 16, is scalar. The second key is
    applied after the shift, which is linear in it.
    """

    def codegen(context, builder, sig, args):
        element, k0, k1, mask = args
        # Counter of the block's first value; 16 counters serve 32 values.
        first = builder.trunc(builder.ashr(element, INT64(1)), INT32)
        first = builder.xor(first, builder.trunc(k0, INT32))
        first = builder.xor(first, builder.lshr(first, INT32(16)))
        key = builder.trunc(k1, INT32)
        key = builder.xor(key, builder.lshr(key, INT32(15)))
        sixteen = _constant(16, 16)
        x = builder.xor(_splat(builder, first, 16), ir.Constant(sixteen.type, [INT32(i) for i in range(16)]))
        x = builder.mul(x, _constant(16, 0x7FEB352D))
        x = builder.xor(builder.xor(x, builder.lshr(x, _constant(16, 15))), _splat(builder, key, 16))
        x = builder.mul(x, _constant(16, 0x846CA68B))
        # The last step of the hash, x ^ x >> 16, changes the low half only, and applies the mask in the high
        # half to the low half too.
        x = builder.xor(x, _splat(builder, builder.shl(builder.trunc(mask, INT32), INT32(24)), 16))
        high = builder.lshr(x, sixteen)
        low = builder.and_(builder.xor(x, high), _constant(16, 0xFFFF))
        return _pick(builder, low, high, range(32))

    return I32(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def prefetch(typing_context, address):
    """Prefetch the cache line of an address, which need not be valid, into the L2 cache.

    With prefetches into L1, Zen 4 reads fp32 rows slower than without any.
    """

    def codegen(context, builder, sig, args):
        name, byte = "llvm.prefetch.p0", INT8.as_pointer()
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32])
            function = ir.Function(builder.module, kind, name)
        builder.call(function, [point(builder, args[0], INT8), INT32(0), INT32(2), INT32(1)])

    return types.void(types.int64), codegen

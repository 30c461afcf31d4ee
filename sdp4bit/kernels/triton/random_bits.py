"""Random bits of the Triton kernels, and dither, which a receiver draws again to subtract it."""

from __future__ import annotations

import triton
import triton.language as tl

from sdp4bit.kernels.triton.chunks import CHUNK

# Constants of the definition, see sdp4bit.quantization.random.
_LOWBIAS_1 = tl.constexpr(0x7FEB352D)
_LOWBIAS_2 = tl.constexpr(0x846CA68B)
# Dither in the mantissa of a float, see take_off.
_DITHER_BITS = tl.constexpr(0x1FE)
_DITHER_EXPONENT = tl.constexpr(0x46800000)  # 2**14


@triton.jit
def hash32(block, k0, k1, mask):
    """Return 32 mixed bits, uint32 [..., 16], for the lanes of blocks; see low16 and high16.

    A sender's mask, if any, is XORed with the upper 8 bits of both halves.
    """
    # A counter is 16 * block + lane. The lane's four bits do not mix in the first round, so the rest of that
    # round is computed once per block.
    block = block.to(tl.uint32)
    x = (block * 16) ^ k0.to(tl.uint32, bitcast=True)
    x = tl.expand_dims(x ^ (x >> 16), -1) ^ tl.arange(0, CHUNK).to(tl.uint32)
    x = x * _LOWBIAS_1
    # x ^= k1 and x ^= x >> 15, with both contributions of the key combined. A key numbers at most 2**28
    # blocks, so block >> 28 is a zero in a register of the thread. With it both XORs are one instruction; a
    # number that all threads share would need two.
    key = k1.to(tl.uint32, bitcast=True)
    key = (key ^ (key >> 15)) ^ tl.expand_dims(block >> 28, -1)
    x = (x ^ (x >> 15) ^ key) * _LOWBIAS_2
    if mask is not None:
        # The last step, in low16, also applies this to the low half.
        x = x ^ (mask.to(tl.uint32, bitcast=True) << 24)
    return x


@triton.jit
def low16(mixed):
    """Return the random bits of lanes 0 to 15, int32, after the last step of the hash."""
    return ((mixed ^ (mixed >> 16)) & 0xFFFF).to(tl.int32, bitcast=True)


@triton.jit
def high16(mixed):
    """Return the random bits of lanes 16 to 31, int32; the last step of the hash does not change them."""
    return (mixed >> 16).to(tl.int32, bitcast=True)


@triton.jit
def random16(first_block, chunk, k0, k1, mask):
    """Return 16 random bits, int32 [..., 16], for chunks of a row that begins at block `first_block`.

    This takes one hash per value, because the other chunk of the hash is in another thread.
    """
    mixed = hash32(first_block + (chunk >> 1), k0, k1, mask)
    # The low half is shifted up, which includes its last step.
    moved = tl.expand_dims(((chunk & 1) - 1).to(tl.uint32, bitcast=True) << 16, -1)
    return high16(mixed ^ ((mixed << 16) & moved))


@triton.jit
def as_dither(random):
    """Return random bits for take_off: the upper 8, inverted, as bits 1 to 8 of a float."""
    return ((random >> 7) & _DITHER_BITS) ^ (_DITHER_EXPONENT | _DITHER_BITS)


@triton.jit
def draw_dither(first_block, chunk, k0, k1):
    """Return the dither of chunks of a row that begins at block `first_block`, for take_off."""
    return as_dither(random16(first_block, chunk, k0, k1, None))


@triton.jit
def draw_dithers(block, k0, k1):
    """Return the dither of the first and the second chunk of blocks, which share their hashes."""
    mixed = hash32(block, k0, k1, None)
    return as_dither(low16(mixed)), as_dither(high16(mixed))


@triton.jit
def reverse8(number):
    """Return a sender's mask, the low 8 bits of its number in reverse order, times 2."""
    pairs = ((number & 0x55) << 1) | ((number >> 1) & 0x55)
    fours = ((pairs & 0x33) << 2) | ((pairs >> 2) & 0x33)
    return ((fours & 0x0F) << 5) | ((fours >> 3) & 0x1E)

"""Rival formats from their definitions, as oracles: values as they arrive, in fp32.

MX: OCP Microscaling Formats 1.0. NVFP4: NVIDIA, blocks of 16 with E4M3 scales and one fp32 scale per tensor.
EDEN: Vargaftik et al., ICML 2022 (arXiv 2108.08842).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0
EDEN_GROUP = 128
Quantize = Callable[[Tensor, torch.Generator], Tensor]
"""Rounds values [..., n] as one tensor, with random numbers from the generator."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A format to compare with."""

    bits: float
    """Per value, with the scales."""
    is_random: bool
    quantize: Quantize


def e2m1(values: Tensor, draws: Tensor | None = None) -> Tensor:
    """Round to +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}: to nearest, ties to even codes, or up with probability."""
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    units = values / step
    units = units.round() if draws is None else (units + draws).floor()
    return (units * step).clamp(-E2M1_LARGEST, E2M1_LARGEST)


def e4m3(values: Tensor) -> Tensor:
    """Round to nearest FP8 E4M3, saturating."""
    return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def _blocks(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % size)).unflatten(-1, (-1, size))


def mx(values: Tensor, _: torch.Generator, *, element: Callable[[Tensor], Tensor], exponent: int) -> Tensor:
    """Share the power of two floor(log2(largest)) - exponent in blocks of 32 values."""
    blocks = _blocks(values, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    power = torch.frexp(largest).exponent - 1 - exponent  # exact, unlike log2
    scale = torch.ldexp(torch.ones_like(largest), power.clamp(-127, 127))
    return (element(blocks / scale) * scale).flatten(-2)[..., : values.shape[-1]]


def nvfp4(values: Tensor, generator: torch.Generator, *, stochastic: bool) -> Tensor:
    """Round to E2M1 in blocks of 16, whose E4M3 scales are multiplied by one fp32 scale."""
    blocks = _blocks(values, 16)
    tensor_scale = (values.abs().max() / (E2M1_LARGEST * E4M3_LARGEST)).clamp(min=2.0**-126)
    scale = e4m3(blocks.abs().amax(-1, keepdim=True) / E2M1_LARGEST / tensor_scale) * tensor_scale
    draws = torch.rand(blocks.shape, generator=generator) if stochastic else None
    units = torch.where(scale > 0, blocks / scale.clamp(min=2.0**-126), 0.0)
    return (e2m1(units.clamp(-E2M1_LARGEST, E2M1_LARGEST), draws) * scale).flatten(-2)[
        ..., : values.shape[-1]
    ]


def int4_stochastic(values: Tensor, generator: torch.Generator, *, group_size: int = 128) -> Tensor:
    """Round stochastically to -7 .. 7 times the group's largest magnitude over 7, in fp32."""
    groups = _blocks(values, group_size)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=2.0**-126)
    units = (groups / scale + torch.rand(groups.shape, generator=generator)).floor().clamp(-7, 7)
    return (units * scale).flatten(-2)[..., : values.shape[-1]]


@functools.cache
def lloyd_max(bits: int) -> tuple[Tensor, Tensor]:
    """Return levels and boundaries of the quantizer with the least squared error of normal values."""
    levels = torch.linspace(-2.0, 2.0, 2**bits, dtype=torch.float64)
    for _ in range(2000):
        boundaries = (levels[1:] + levels[:-1]) / 2
        edges = torch.cat([levels.new_tensor([-math.inf]), boundaries, levels.new_tensor([math.inf])])
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        levels = (density[:-1] - density[1:]) / torch.special.ndtr(edges).diff()
    return levels.float(), ((levels[1:] + levels[:-1]) / 2).float()


@functools.cache
def hadamard(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix in Sylvester order."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def eden(values: Tensor, generator: torch.Generator, *, bits: int) -> Tensor:
    """Rotate groups of 128 by random signs and a Hadamard matrix, round to Lloyd-Max levels, and rescale.

    The scale |x|^2 / <rotated x, levels>, sent in bf16, makes the estimate unbiased over rotations.
    """
    levels, boundaries = lloyd_max(bits)
    groups = _blocks(values, EDEN_GROUP)
    # Signs per group, as a receiver draws them from a shared counter.
    signs = torch.randint(0, 2, groups.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
    rotated = (groups * signs) @ hadamard(EDEN_GROUP)
    norm = groups.norm(dim=-1, keepdim=True)
    rounded = levels[
        torch.bucketize(rotated * (math.sqrt(EDEN_GROUP) / norm.clamp(min=2.0**-100)), boundaries)
    ]
    product = (rotated * rounded).sum(-1, keepdim=True)
    scale = torch.where(norm > 0, norm.square() / product, 0.0).bfloat16().float()
    return ((rounded * scale) @ hadamard(EDEN_GROUP) * signs).flatten(-2)[..., : values.shape[-1]]


RIVALS = {
    "MXFP8 (E4M3)": Rival(
        bits=8.25, is_random=False, quantize=functools.partial(mx, element=e4m3, exponent=8)
    ),
    "MXFP4": Rival(bits=4.25, is_random=False, quantize=functools.partial(mx, element=e2m1, exponent=2)),
    "NVFP4, nearest": Rival(bits=4.5, is_random=False, quantize=functools.partial(nvfp4, stochastic=False)),
    "NVFP4, stochastic": Rival(bits=4.5, is_random=True, quantize=functools.partial(nvfp4, stochastic=True)),
    "int4, stochastic": Rival(bits=4.125, is_random=True, quantize=int4_stochastic),
    "EDEN, 4 bits": Rival(bits=4.125, is_random=True, quantize=functools.partial(eden, bits=4)),
    "EDEN, 3 bits": Rival(bits=3.125, is_random=True, quantize=functools.partial(eden, bits=3)),
}

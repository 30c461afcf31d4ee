"""Bounds of the error of a reduction, from its exact inputs in fp64: no rounding happens here.

A quantizer has an error of half a step, or of a step with stochastic rounding. The largest magnitude of a
group gives the step. Sums add bounds, and the transform back takes their mean over a block, because
|H e| / 32 <= mean |e|.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdp4bit.config import GradientConfig
from tests.oracles.integers import QMAX


def blocks(rows: Tensor) -> Tensor:
    """Return fp64 rows, filled with zeros to a multiple of 32 values."""
    return torch.nn.functional.pad(rows.double(), (0, -rows.shape[-1] % 32))


def transformed(rows: Tensor) -> Tensor:
    """Return the Hadamard transform of blocks of 32 values, with entries of 1 and -1."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(5):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (rows.unflatten(-1, (-1, 32)) @ matrix).flatten(-2)


def averaged(bound: Tensor) -> Tensor:
    """Return the mean of each block of 32 values in place of its values."""
    return bound.unflatten(-1, (-1, 32)).mean(-1, keepdim=True).expand(*bound.shape[:-1], -1, 32).flatten(-2)


def rounding_error(magnitudes: Tensor, config: GradientConfig, level: str) -> Tensor:
    """Return the largest rounding error of values whose magnitudes are at most these, [..., values]."""
    bits, group_size, rounding = (
        getattr(config, f"{level}_{name}") for name in ("bits", "group_size", "rounding")
    )
    if bits is None:
        return torch.zeros_like(magnitudes)
    if bits == 16:  # half of the last of 8 bits, or of the least subnormal number
        return magnitudes * 2.0**-9 + 2.0**-134
    # A scale is rounded up by at most 2**-7; 2**-7 more is for arithmetic on 16 fractional bits.
    steps = (1.0 if rounding == "stochastic" else 0.5) + 2**-7
    parts = [group.amax(-1, keepdim=True).expand_as(group) for group in magnitudes.split(group_size, dim=-1)]
    return torch.cat(parts, -1) * (steps / QMAX[bits] * (1 + 2**-7)) + 2.0**-100


def reduce_scatter(inputs: Tensor, *, config: GradientConfig, multiplier: float = 1.0) -> Tensor:
    """Return how far the sums [*sizes, values] of rows [*sizes, *sizes, values] may be from the exact ones.

    Args:
        inputs: sizes are (n, g), or (b, n, g) with blocks of nodes.
    """
    *sizes, numel = inputs.shape
    sizes = sizes[: len(sizes) // 2]
    if not numel:
        return torch.zeros(*sizes, 0, dtype=torch.float64)
    levels = ["intra", *["inter"] * (len(sizes) - 1)]
    used = [level for level, size in zip(levels, sizes[::-1], strict=True) if size > 1]
    hadamard = config.hadamard and any(getattr(config, f"{level}_bits") is not None for level in used)
    rows = transformed(blocks(inputs)) if hadamard else blocks(inputs)
    error = torch.zeros_like(rows)
    # Hop by hop from the last dimension of the senders: their messages are rounded, then summed.
    for hop, level in enumerate(levels):
        size, sender = sizes[-1 - hop], len(sizes) - 1 - hop
        if size > 1:
            rounded = rounding_error(rows.abs() + error, config, level)
            if config.exact_own and level == "inter" and max(sizes[:sender], default=1) == 1:
                receiver = rows.dim() - 2 - hop
                rounded.diagonal(dim1=sender, dim2=receiver).zero_()
            error = error + rounded
        rows, error = rows.sum(sender), error.sum(sender)
    return (averaged(error) if hadamard else error)[..., :numel] * abs(multiplier)


def all_reduce(inputs: Tensor, *, config: GradientConfig, multiplier: float = 1.0) -> Tensor:
    """Return how far the sum [values] of inputs [*sizes, values] may be from the exact one."""
    *sizes, numel = inputs.shape
    world, per_node = math.prod(sizes), sizes[-1]
    nodes = world // per_node
    if world == 1 or not numel:
        return torch.zeros(numel, dtype=torch.float64)
    count = per_node if nodes == 2 else world
    stride = numel // count // 32 * 32
    length = numel - (count - 1) * stride
    level = "inter" if nodes > 1 else "intra"
    hadamard = config.hadamard and getattr(config, f"{level}_bits") is not None
    reduced_over = [1, per_node] if nodes == 2 else sizes
    pieces = torch.stack([inputs[..., p * stride : p * stride + length] for p in range(count)], dim=-2)
    total = torch.zeros(count, length, dtype=torch.float64)
    for copy in pieces.reshape(-1, *reduced_over, *reduced_over, length):
        error = blocks(reduce_scatter(copy, config=config).reshape(count, length))
        sums = blocks(copy.double().sum(tuple(range(len(reduced_over)))).reshape(count, length))
        # A transformed value is off by at most 32 times the mean error of its block.
        largest = transformed(sums).abs() + 32 * averaged(error) if hadamard else sums.abs() + error
        sent = rounding_error(largest, config, level)
        total += (error + (averaged(sent) if hadamard else sent))[:, :length]
    bound = torch.empty(numel, dtype=torch.float64)
    for piece in range(count):
        bound[piece * stride : piece * stride + length] = total[piece]
    return bound * abs(multiplier)

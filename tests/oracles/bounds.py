"""Bounds of the error of a reduction, from its exact inputs in fp64: no rounding happens here.

A quantizer has an error of half a step, or of a step with stochastic rounding. The largest magnitude of a
group gives the step. Sums add bounds, and the transform back takes their mean over a block, because
|H e| / 32 <= mean |e|.
"""

from __future__ import annotations

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
    # A scale is rounded up by at most 2**-7; 2**-7 more is for arithmetic on 16 fractional bits.
    steps = (1.0 if rounding == "stochastic" else 0.5) + 2**-7
    parts = [group.amax(-1, keepdim=True).expand_as(group) for group in magnitudes.split(group_size, dim=-1)]
    return torch.cat(parts, -1) * (steps / QMAX[bits] * (1 + 2**-7)) + 2.0**-100


def reduce_scatter(inputs: Tensor, *, config: GradientConfig, multiplier: float = 1.0) -> Tensor:
    """Return how far the sums [n, g, values] of rows [n, g, n, g, values] may be from the exact ones."""
    nodes, per_node, _, _, numel = inputs.shape
    if not numel:
        return torch.zeros(nodes, per_node, 0, dtype=torch.float64)
    hops = (config.intra_bits, per_node > 1), (config.inter_bits, nodes > 1)
    hadamard = config.hadamard and any(bits is not None for bits, used in hops if used)
    rows = transformed(blocks(inputs)) if hadamard else blocks(inputs)
    error = torch.zeros_like(rows)
    if per_node > 1:
        error = rounding_error(rows.abs(), config, "intra")
    # Of node k for rank i of node m: [k, m, i, values].
    rows, error = rows.sum(1), error.sum(1)
    if nodes > 1:
        between = rounding_error(rows.abs() + error, config, "inter")
        if config.exact_own:
            between[range(nodes), range(nodes)] = 0.0
        error = error + between
    error = error.sum(0)
    return (averaged(error) if hadamard else error)[..., :numel] * abs(multiplier)


def all_reduce(inputs: Tensor, *, config: GradientConfig, multiplier: float = 1.0) -> Tensor:
    """Return how far the sum [values] of inputs [n, g, values] may be from the exact one."""
    nodes, per_node, numel = inputs.shape
    if nodes * per_node == 1 or not numel:
        return torch.zeros(numel, dtype=torch.float64)
    count = per_node if nodes == 2 else nodes * per_node
    stride = numel // count // 32 * 32
    length = numel - (count - 1) * stride
    level = "inter" if nodes > 1 else "intra"
    hadamard = config.hadamard and getattr(config, f"{level}_bits") is not None
    reduced_over = (1, per_node) if nodes == 2 else (nodes, per_node)
    pieces = torch.stack([inputs[..., p * stride : p * stride + length] for p in range(count)], dim=2)
    total = torch.zeros(count, length, dtype=torch.float64)
    for copy in pieces.reshape(-1, *reduced_over, *reduced_over, length):
        error = blocks(reduce_scatter(copy, config=config).reshape(count, length))
        sums = blocks(copy.double().sum((0, 1)).reshape(count, length))
        # A transformed value is off by at most 32 times the mean error of its block.
        largest = transformed(sums).abs() + 32 * averaged(error) if hadamard else sums.abs() + error
        sent = rounding_error(largest, config, level)
        total += (error + (averaged(sent) if hadamard else sent))[:, :length]
    bound = torch.empty(numel, dtype=torch.float64)
    for piece in range(count):
        bound[piece * stride : piece * stride + length] = total[piece]
    return bound * abs(multiplier)

"""The method for all ranks at once, in one process: the exact results of every rank.

Read this first. :func:`refresh` is the paper's algorithm 2 (weights), and :func:`reduce_scatter` its
algorithm 3 (gradients). :func:`all_reduce` sums whole gradients with the same operators. Ranks are
dimensions of a tensor, n nodes of g ranks, and a transfer is an index. A sender quantizes a value and the
receiver dequantizes it; :func:`transmit` does both at once.

The collectives compute the same numbers from messages in buffers, slice by slice. Message layouts, slices,
exchanges and process groups do not occur here, so a fault in any of them shows as a difference. The smallest
row that is quantized (`min_numel`) is their decision, too. Groups of values, scales and codes are those of
:mod:`sdp4bit.quantization.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization import reference
from sdp4bit.quantization.formats import BLOCK, Bits, format_of
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, hadamard32
from sdp4bit.quantization.layout import round_up
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream, random_bits16


class Call(NamedTuple):
    """Numbers of a reduction from which its random bits follow, besides stage, rank and element."""

    seed: int = 0
    bucket: int = 0
    """Number of the parameter group."""
    number: int = 0
    """Number of the group's reduction, from 0."""

    def key(self, stage: Stage, rank: int) -> RoundingKey:
        """Return the key of the values that a rank quantizes at a stage."""
        stream = pack_stream(step=self.number, bucket=self.bucket, stage=stage, rank=rank)
        return RoundingKey(*derive_keys(self.seed, stream))


def refresh(replica: Tensor, mains: Tensor, *, config: WeightConfig) -> Tensor:
    """Return the weight replica after a refresh with quantized differences, qWD: paper algorithm 2.

    Args:
        replica: [ranks, n], which all ranks hold; row p approximates the main shard of rank p.
        mains: [ranks, n], the main shards after the optimizer step.
    """
    if config.bits is None or not mains.shape[1]:
        return mains.clone()
    refreshed = torch.empty_like(replica)
    for owner, (held, main) in enumerate(zip(replica, mains, strict=True)):
        # 1. The owner of a row subtracts the replica, which all ranks hold. So rounding errors return.
        change = main.float() if config.mode == "direct" else main.float() - held.float()
        # 2. It quantizes the difference and sends it to all ranks.
        received = transmit(
            pad(change), bits=config.bits, group_size=config.group_size, clip=config.effective_clip
        )[: len(main)]
        # 3. Every rank, the owner included, adds the same dequantized difference.
        refreshed[owner] = received if config.mode == "direct" else held.float() + received
    return refreshed


class Hop(NamedTuple):
    """Ranks that exchange messages: `size` of them, whose numbers are `apart`."""

    level: Literal["intra", "inter"]
    stage: Stage
    size: int
    apart: int


def hops_of(sizes: Sequence[int]) -> list[Hop]:
    """Return the hops from the innermost one.

    Args:
        sizes: (n, g), or with more levels (b, n, g) for b blocks of n nodes.
    """
    hops: list[Hop] = []
    stages = (Stage.INTRA, Stage.INTER, Stage.OUTER)[: len(sizes)]
    for stage, size in zip(stages, reversed(sizes), strict=True):
        apart = math.prod(hop.size for hop in hops)
        hops.append(Hop("intra" if stage is Stage.INTRA else "inter", stage, size, apart))
    return [hop for hop in hops if hop.size > 1]


def reduce_scatter(
    inputs: Tensor, *, config: GradientConfig, call: Call, multiplier: float = 1.0, first_rank: int = 0
) -> Tensor:
    """Return the row that each rank ends with, TLq-HS: paper algorithm 3.

    Args:
        inputs: [n, g, n, g, values]; [k, j, m, i] is the row of local rank j of node k for local rank i of
            node m. With blocks of nodes [b, n, g, b, n, g, values], which is not part of the paper.
        multiplier: factor of the sums, such as 1 / ranks for a mean.
        first_rank: number of the first rank, for the random bits.

    Returns:
        fp32 [n, g, values] or [b, n, g, values].
    """
    *sizes, numel = inputs.shape
    sizes = sizes[: len(sizes) // 2]
    world, hops = math.prod(sizes), hops_of(sizes)
    inputs = inputs.reshape(world, world, numel)
    if not hops:
        return (inputs[0].float() * multiplier).view(*sizes, numel)
    is_quantized = [getattr(config, f"{hop.level}_bits") is not None for hop in hops]

    # 1. Transform blocks of 32 values, which spreads an outlier over its block.
    hadamard = config.hadamard and any(is_quantized)
    held = transform(pad(inputs), hadamard)  # [ranks, rows, values], on each rank a row for every rank

    # 2. Hop by hop, inside each node, then between nodes and between blocks of nodes: the ranks of a hop send
    #    each other the rows of the receiver and of the ranks that it forwards to. These are every size-th
    #    row. The receiver sums the messages in the order of ranks. Sums stay transformed, because the
    #    transform is linear.
    own = None
    for hop in hops:
        rows = held.unflatten(1, (-1, hop.size)).transpose(1, 2).contiguous()  # [ranks, receivers, rows, ...]
        held = torch.zeros_like(rows[:, 0])
        is_exact = config.exact_own and hop is hops[-1] and hop.level == "inter" and is_quantized[-1]
        if is_exact:
            # The part for the own node, or the own block, crosses no link, so it is not rounded.
            own = torch.stack([rows[rank, rank // hop.apart % hop.size, 0] for rank in range(world)])
        for rank in range(world):
            sender = rank // hop.apart % hop.size
            first = rank - sender * hop.apart
            received = send(
                rows[rank],
                config=config,
                level=hop.level,
                call=call,
                stage=hop.stage,
                first=first_rank + first,
                sender=sender,
                distance=hop.apart,
            )
            if is_exact:
                received[sender] = 0.0
            held[first : first + hop.size * hop.apart : hop.apart] += received

    # 3. Transform back and multiply once.
    result = restore(held[:, 0], numel, hadamard=hadamard, multiplier=multiplier)
    if own is not None and len(hops) == 1:  # the rank's own gradient, never transformed
        result = torch.stack([inputs[rank, rank].float() for rank in range(world)]) * multiplier + result
    elif own is not None:
        result = restore(own, numel, hadamard=hadamard, multiplier=multiplier) + result
    return result.view(*sizes, numel)


def all_reduce(
    inputs: Tensor, *, config: GradientConfig, call: Call, multiplier: float = 1.0, unit: int = BLOCK
) -> Tensor:
    """Return the sum, fp32 [values], that all ranks end with; not part of the paper.

    Args:
        inputs: [n, g, values], the values of each rank; with blocks of nodes [b, n, g, values].
        multiplier: factor of the sum.
        unit: pieces begin at multiples of this, a multiple of 32.
    """
    *sizes, numel = inputs.shape
    world, per_node = math.prod(sizes), sizes[-1]
    nodes = world // per_node
    if world == 1 or not numel:
        return inputs.flatten(0, -2)[0].float() * multiplier

    # 1. Cut the values into pieces, one per rank. Of overlapping pieces the later one counts. Two nodes have
    #    the same pieces: each node reduces them alone, and they exchange their sums.
    count = per_node if nodes == 2 else world
    stride = numel // count // unit * unit
    starts = [piece * stride for piece in range(count)]
    length = numel - starts[-1]
    pieces = torch.stack([inputs[..., start : start + length] for start in starts], dim=-2)

    # 2. Reduce the pieces like rows.
    over = [1, per_node] if nodes == 2 else sizes
    rows = pieces.reshape(-1, *over, *over, length)
    sums = torch.stack(
        [
            reduce_scatter(each, config=config, call=call, first_rank=copy * count)
            for copy, each in enumerate(rows)
        ]
    ).view(-1, count, length)  # one sum per piece, or with two nodes one of each

    # 3. Gather the sums, quantized once more. Every rank decodes all of them, its own included.
    level: Literal["intra", "inter"] = "inter" if nodes > 1 else "intra"
    hadamard = config.hadamard and getattr(config, f"{level}_bits") is not None
    result = torch.empty(numel)
    for piece, start in enumerate(starts):
        gathered = torch.zeros(round_up(length, BLOCK))
        for copy, row in enumerate(transform(pad(sums[:, piece]), hadamard)):
            gathered += send(
                row,
                config=config,
                level=level,
                call=call,
                stage=Stage.GATHER,
                first=piece,
                sender=copy,
                distance=count,
            )
        result[start : start + length] = restore(gathered, length, hadamard=hadamard, multiplier=multiplier)
    return result


def send(
    rows: Tensor,
    *,
    config: GradientConfig,
    level: Literal["intra", "inter"],
    call: Call,
    stage: Stage,
    first: int,
    sender: int,
    distance: int = 1,
) -> Tensor:
    """Return the values that the receivers see of a rank's messages, fp32 [..., padded values].

    Args:
        first: number of the first rank whose messages are summed with these.
        sender: index of this rank among them.
        distance: difference between the numbers of two successive ones.
    """
    bits, group_size, rounding = (
        getattr(config, f"{level}_{name}") for name in ("bits", "group_size", "rounding")
    )
    if rounding == "nearest":
        return transmit(rows, bits=bits, group_size=group_size)
    # Receivers subtract a dither, so all senders use the key of the first one and a mask of their own.
    dither = rounding == "dither"
    key = call.key(stage, first if dither else first + sender * distance)
    random = random_bits16(0, rows.numel(), key.k0, key.k1).view(rows.shape)
    if dither:
        random ^= key._replace(sender=sender).mask << 8
    return transmit(rows, bits=bits, group_size=group_size, random=random, dither=dither)


def transmit(
    rows: Tensor,
    *,
    bits: Bits,
    group_size: int,
    random: Tensor | None = None,
    dither: bool = False,
    clip: float = 1.0,
) -> Tensor:
    """Return rows, fp32 [..., padded values], quantized and dequantized: paper equation 2.2.

    Args:
        bits: None sends fp32, and 16 sends bf16.
        random: 16 random bits per value; None rounds to nearest.
        dither: the receiver subtracts the upper half of the random bits.
        clip: fraction of a group's largest magnitude that the largest code represents.
    """
    if bits is None:
        return rows.clone()
    form, values = format_of(bits), torch.empty_like(rows)
    if not form.has_scales:
        return rows.bfloat16().float()
    for start in range(0, rows.shape[-1], group_size):
        group = (..., slice(start, start + group_size))
        draws = None if random is None else random[group].contiguous()
        codes, scale = reference.quantize_groups(
            rows[group].contiguous(), form, draws, clip=clip, dither=dither
        )
        units = codes.float()
        if draws is not None and dither:
            units = reference.subtract_dither(codes.to(torch.int8), form, draws)
        values[group] = units * scale.float().unsqueeze(-1)
    return values


def pad(rows: Tensor) -> Tensor:
    """Return rows [..., values] in fp32, filled with zeros to a multiple of 32 values."""
    padded = torch.zeros(*rows.shape[:-1], round_up(rows.shape[-1], BLOCK))
    padded[..., : rows.shape[-1]] = rows
    return padded


def transform(rows: Tensor, hadamard: bool) -> Tensor:
    """Return the Hadamard transform of rows [..., padded values], or the rows."""
    return hadamard32(rows.contiguous()) if hadamard else rows


def restore(rows: Tensor, numel: int, *, hadamard: bool, multiplier: float) -> Tensor:
    """Return the first values of summed rows, transformed back and multiplied."""
    factor = torch.tensor(multiplier * INVERSE_FACTOR if hadamard else multiplier)
    return transform(rows, hadamard)[..., :numel] * factor

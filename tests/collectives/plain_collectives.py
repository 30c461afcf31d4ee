"""What the collectives compute, written down for all ranks at once in one process: no messages, no groups.

Rows are quantized and dequantized on the spot by the quantizer of the operators' definition
(sdp4bit/quantization/reference.py). Layouts of messages, slices of a row, exchanges and node layouts do not
occur, so that a fault in any of them shows as a difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization import reference
from sdp4bit.quantization.formats import Bits, format_of
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, hadamard32
from sdp4bit.quantization.layout import round_up
from sdp4bit.quantization.random import Stage, derive_keys, pack_stream, random_bits16

SEED, BUCKET = 7, 3


def padded(rows: Tensor) -> Tensor:
    """fp32, filled with zeros to a multiple of 32 values."""
    full = torch.zeros(*rows.shape[:-1], round_up(rows.shape[-1], 32))
    full[..., : rows.shape[-1]] = rows
    return full


def passed(
    rows: Tensor,
    bits: Bits,
    group_size: int,
    random: Tensor | None,
    *,
    dither: bool,
    clip: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The values that a receiver sees of rows [..., n], and a bound for their distance from what was sent.

    The bound does not hold for clipped values.
    """
    if bits is None:
        return rows, torch.zeros_like(rows)
    values, bounds = torch.empty_like(rows), torch.empty_like(rows)
    for start in range(0, rows.shape[-1], group_size):
        span = (..., slice(start, start + group_size))
        draws = None if random is None else random[span]
        codes, scale = reference.quantize_groups(
            rows[span].contiguous(), format_of(bits), draws, clip=clip, dither=dither
        )
        scale = scale.float().unsqueeze(-1)
        units = codes.float()
        if dither:
            # Uniform numbers of 8 bits in the middle of their intervals; the lowest code is an exact zero.
            uniform = (draws // 256 + 0.5) / 256
            is_zero = format_of(bits).find_zeros(codes)
            units = torch.where(is_zero, 0.0, units + 0.5 - uniform)
        values[span] = units * scale
        # A step of the grid, or half of one; 2**-7 more for arithmetic on 16 fractional bits.
        step = 0.5 if random is None or dither else 1.0
        bounds[span] = (step + 2**-7) * scale + 2.0**-100
    return values, bounds


def rounding_bits(
    rows: Tensor, *, rounding: str, call: int, stage: Stage, rank: int, sender: int, distance: int = 1
) -> Tensor | None:
    """What a rank draws for rows [..., n] of padded length, numbered throughout; None for nearest.

    With dither it draws what the first sender draws, whose rank is `distance` less per sender, and changes
    the upper bits by its own number, mirrored.
    """
    if rounding == "nearest":
        return None
    dither = rounding == "dither"
    stream = pack_stream(
        step=call, bucket=BUCKET, stage=stage, rank=rank - distance * sender if dither else rank
    )
    bits = random_bits16(0, rows.numel(), *derive_keys(SEED, stream)).view(rows.shape)
    mirrored = sum(1 << (7 - bit) for bit in range(8) if sender >> bit & 1)
    return bits ^ (mirrored << 8) if dither else bits


def reduce_scatter(
    inputs: Tensor,
    *,
    nodes: int,
    per_node: int,
    config: GradientConfig,
    call: int,
    multiplier: float,
    first_rank: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return what each rank ends with, fp32 [world, n], and how far it may be from the exact sum.

    Args:
        inputs: [world, world, n]: row [r, d] is what rank r has for rank d.
        first_rank: numbers the first one, for the rounding bits.
    """
    world, _, numel = inputs.shape
    if world == 1:
        return inputs[0].float() * multiplier, torch.zeros(1, numel)
    quantized = [
        bits for bits, used in ((config.intra_bits, per_node > 1), (config.inter_bits, nodes > 1)) if used
    ]
    hadamard = config.hadamard and any(bits is not None for bits in quantized)
    rows = padded(inputs)
    if hadamard:
        rows = hadamard32(rows.contiguous())
    length = rows.shape[-1]
    if per_node > 1:
        rows, bounds = _intra(
            rows, nodes=nodes, per_node=per_node, config=config, call=call, first_rank=first_rank
        )
    else:
        bounds = torch.zeros_like(rows)
    factor = torch.tensor(multiplier * INVERSE_FACTOR if hadamard else multiplier)
    # Row [r, m] is now what rank r has for the rank of node m with its own local rank.
    own = None
    if nodes > 1:
        total, limit = torch.zeros(nodes, per_node, length), torch.zeros(nodes, per_node, length)
        if config.exact_own and config.inter_bits is not None:
            # What stays in the node is not rounded; the sum of the others is added to it.
            kept = torch.stack([rows[rank, rank // per_node] for rank in range(world)])
            own = (hadamard32(kept) if hadamard else kept)[:, :numel] * factor
            if per_node == 1:
                own = torch.stack([inputs[rank, rank].float() for rank in range(world)]) * multiplier
        for source in range(world):  # node by node, the order in which contributions are added
            sent = rows[source]
            random = rounding_bits(
                sent,
                rounding=config.inter_rounding,
                call=call,
                stage=Stage.INTER,
                rank=source,
                sender=source // per_node,
                distance=per_node,
            )
            dither = config.inter_rounding == "dither"
            seen, bound = passed(sent, config.inter_bits, config.inter_group_size, random, dither=dither)
            if own is not None:
                seen[source // per_node] = bound[source // per_node] = 0.0
            total[:, source % per_node] += seen
            limit[:, source % per_node] += bound + bounds[source]
    else:
        total, limit = rows[:, 0], bounds[:, 0]
    total, limit = total.reshape(world, length), limit.reshape(world, length)
    if hadamard:
        total = hadamard32(total.contiguous())
        # |H e| / 32 is at most the mean of |e| over the block.
        limit = limit.view(world, -1, 32).mean(-1, keepdim=True).expand(-1, -1, 32).reshape(world, length)
    total = total[:, :numel] * factor
    return total if own is None else own + total, limit[:, :numel] * abs(multiplier)


def all_reduce(
    inputs: Tensor, *, nodes: int, per_node: int, config: GradientConfig, call: int, multiplier: float
) -> tuple[Tensor, Tensor]:
    """Return what all ranks end with, fp32 [n], and how far it may be from the exact sum.

    Args:
        inputs: [world, n]: what each rank has.
    """
    world, numel = inputs.shape
    if world == 1 or not numel:
        return inputs[0].float() * multiplier, torch.zeros(numel)
    # Two nodes have the same pieces, and add what both have of them; else each rank has one, with its sum.
    count = per_node if nodes == 2 else world
    stride = numel // count // 32 * 32
    starts = [piece * stride for piece in range(count)]
    length = numel - starts[-1]
    rows = torch.stack([inputs[:, start : start + length] for start in starts], dim=1)
    sums, bounds = zip(
        *(
            reduce_scatter(
                rows[first : first + count],
                nodes=nodes if count == world else 1,
                per_node=per_node,
                config=config,
                call=call,
                multiplier=1.0,
                first_rank=first,
            )
            for first in range(0, world, count)
        ),
        strict=True,
    )
    last = "inter" if nodes > 1 else "intra"
    bits, group_size, rounding = (
        getattr(config, f"{last}_{name}") for name in ("bits", "group_size", "rounding")
    )
    total, limit = torch.empty(numel), torch.empty(numel)
    for piece, start in enumerate(starts):
        seen, bound, before = 0.0, 0.0, 0.0
        for node in range(world // count):
            row = padded(sums[node][piece])
            row = hadamard32(row.contiguous()) if config.hadamard and bits is not None else row
            named = {"rounding": rounding, "call": call, "stage": Stage.GATHER, "distance": count}
            random = rounding_bits(row, **named, rank=node * count + piece, sender=node)
            values, limits = passed(row, bits, group_size, random, dither=rounding == "dither")
            seen, bound, before = seen + values, bound + limits, before + bounds[node][piece]
        factor = torch.tensor(multiplier)
        if config.hadamard and bits is not None:
            seen = hadamard32(seen.contiguous())
            bound = bound.view(-1, 32).mean(-1, keepdim=True).expand(-1, 32).reshape(-1)
            factor = torch.tensor(multiplier * INVERSE_FACTOR)
        place = slice(start, start + length)
        total[place] = seen[:length] * factor
        limit[place] = (bound[:length] + before) * abs(multiplier)
    return total, limit


def _intra(
    rows: Tensor, *, nodes: int, per_node: int, config: GradientConfig, call: int, first_rank: int
) -> tuple[Tensor, Tensor]:
    """Return [world, nodes, n], the sums over a node that each of its ranks has for the nodes, and bounds."""
    world, _, length = rows.shape
    sums, limits = (torch.zeros(nodes, per_node, nodes, length) for _ in range(2))
    for source in range(world):
        sent = rows[source].view(nodes, per_node, length).transpose(0, 1).contiguous()
        random = rounding_bits(
            sent,
            rounding=config.intra_rounding,
            call=call,
            stage=Stage.INTRA,
            rank=first_rank + source,
            sender=source % per_node,
        )
        dither = config.intra_rounding == "dither"
        seen, bound = passed(sent, config.intra_bits, config.intra_group_size, random, dither=dither)
        sums[source // per_node] += seen
        limits[source // per_node] += bound
    return sums.view(world, nodes, length), limits.view(world, nodes, length)


def refresh(replica: Tensor, mains: Tensor, *, config: WeightConfig) -> Tensor:
    """Return the replica [world, n] after a quantized refresh towards the main shards [world, n]."""
    if config.bits is None or not mains.shape[1]:
        return mains.clone()
    result = torch.empty_like(replica)
    for rank, (held, main) in enumerate(zip(replica, mains, strict=True)):
        direct = config.mode == "direct"
        row = padded(main.float() if direct else main.float() - held.float())
        values, _ = passed(
            row, config.bits, config.group_size, None, dither=False, clip=config.effective_clip
        )
        received = values[: len(main)]
        result[rank] = received if direct else held.float() + received
    return result

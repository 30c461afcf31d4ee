"""Bytes that one rank sends, from the formulas of docs/spec.md and docs/method.md.

Only the cuts of a row are the library's: the lengths of sections, and `cut_into_chunks`, which
tests/collectives/test_plan.py checks. Collectives of the communication library count as rings, see
`sdp4bit.traffic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdp4bit.collectives.chunks import cut_into_chunks
from sdp4bit.collectives.sections import Section
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.traffic import Grid, Traffic


def row_sections(numel: int) -> list[Section]:
    """Return a row that is not cut."""
    return [Section(ranges=((0, numel),))] if numel else []


NAMED_BITS: dict[str, float] = {}
"""Bits per value of formats that a test adds."""


def message_bytes(
    parts: Sequence[tuple[Section, int]], *, bits: float | str | None, group_size: int, rows: int = 1
) -> tuple[int, float]:
    """Return the bytes of a message of rows with these values per section, and the padding among them."""
    total, padding = 0, 0.0
    for section, numel in parts:
        width, size = (32.0, 0) if bits is None else (NAMED_BITS.get(bits, bits), group_size)
        if width == 16.0:
            size = 0  # bf16 has no scales
        elif section.is_fine and bits is not None:
            width, size = max(8.0, width), 32
        padded = -(-numel // 32) * 32
        scales = -(-padded // size) * 2 if size else 0
        nbytes = -(-rows * (padded * width / 8 + scales) // 16) * 16
        total += int(nbytes)
        padding += nbytes - rows * numel * (width / 8 + (2 / size if size else 0))
    return total, padding


def messages(*sent: tuple[str, tuple[int, float], int]) -> Traffic:
    """Return the traffic of collectives: level, bytes and padding of a message, and number of messages."""
    found = Traffic()
    for level, (nbytes, padding), copies in sent:
        found += Traffic(
            intra_bytes=nbytes * copies * (level == "intra"),
            inter_bytes=nbytes * copies * (level == "inter"),
            padding_bytes=padding * copies,
            collectives=int(copies > 0),
        )
    return found


def ring(row_bytes: float, *, grid: Grid, times: int = 1) -> Traffic:
    """Return the traffic of rings over all ranks that gather or reduce rows of `row_bytes`."""
    sent, g = times * row_bytes * (grid.size - 1), grid.ranks_per_node
    if grid.nodes == 1:
        return Traffic(intra_bytes=sent, collectives=times)
    # One rank of each node sends to the next node.
    return Traffic(intra_bytes=sent * (g - 1) / g, inter_bytes=sent / g, collectives=times)


def gradient_exchange(
    numel: int, *, grid: Grid, config: GradientConfig, sections: Sequence[Section] = ()
) -> Traffic:
    """Return the traffic of one reduction of rows of `numel` values; sections () is a single one."""
    g, n, b = grid.ranks_per_node, grid.nodes, grid.blocks
    if grid.size == 1 or not (numel or sections):
        return Traffic()
    if numel < config.min_numel:
        return ring(4 * numel, grid=grid)
    cut = sections or row_sections(numel)
    found = Traffic()
    lengths = [section.numel for section in cut]
    for chosen in cut_into_chunks(lengths, config=config, grid=grid):
        parts = [(cut[index], place.stop - place.start) for index, place in chosen]
        inside = message_bytes(parts, bits=config.intra_bits, group_size=config.intra_group_size, rows=n)
        # The ranks of a block get a row for each block, those of other blocks only their own.
        in_block, between = (
            message_bytes(parts, bits=config.inter_bits, group_size=config.inter_group_size, rows=rows)
            for rows in (b, 1)
        )
        found += messages(("intra", inside, g - 1), ("inter", in_block, n // b - 1))
        found += messages(("inter", between, b - 1))
    return found


def all_reduce_exchange(
    numel: int, *, grid: Grid, config: GradientConfig, sections: Sequence[Section] = ()
) -> Traffic:
    """Return the traffic of one all-reduce of `numel` values; sections () is a single one."""
    g, n = grid.ranks_per_node, grid.nodes
    if grid.size == 1 or not numel:
        return Traffic()
    if numel // grid.size < config.min_numel:
        return ring(2 * 4 * numel / grid.size, grid=grid)
    # Two nodes reduce the same pieces, each node its own sum; otherwise there is a piece per rank.
    count, over = (g, replace(grid, nodes=1)) if n == 2 else (grid.size, grid)
    pieces = []
    for section in sections or row_sections(numel):
        stride = section.numel // count // section.unit * section.unit
        pieces.append(replace(section, ranges=((0, section.numel - stride * (count - 1)),)))
    reduced = gradient_exchange(0, grid=over, config=replace(config, min_numel=0), sections=pieces)
    hop = "inter" if n > 1 else "intra"
    bits, group_size = getattr(config, f"{hop}_bits"), getattr(config, f"{hop}_group_size")
    message = message_bytes([(piece, piece.numel) for piece in pieces], bits=bits, group_size=group_size)
    b = grid.blocks
    between = messages(("inter", message, b - 1), ("inter", message, b * (n // b - 1)))
    return reduced + between + messages(("intra", message, n * (g - 1)))


def weight_refresh(
    numel: int, *, grid: Grid, config: WeightConfig, sections: Sequence[Section] = ()
) -> Traffic:
    """Return the traffic of one refresh of the weight replica, in bf16 if it is not quantized."""
    if grid.size == 1 or not numel:
        return Traffic()
    parts = [(section, section.numel) for section in sections or row_sections(numel)]
    message = message_bytes(parts, bits=config.bits, group_size=config.group_size)
    if config.bits is None:
        message = (2 * numel, 0.0)
    copies = grid.nodes * (grid.ranks_per_node - 1) if config.replica == "full" else 0
    return messages(("inter", message, grid.nodes - 1), ("intra", message, copies))


def weight_gather(numel: int, *, grid: Grid, config: WeightConfig, times: int = 1) -> Traffic:
    """Return the traffic of so many gathers of bf16 weights inside the node."""
    if config.replica == "full" or grid.ranks_per_node == 1:
        return Traffic()
    gathered = messages(("intra", (2 * numel, 0.0), grid.nodes * (grid.ranks_per_node - 1)))
    return replace(gathered, intra_bytes=times * gathered.intra_bytes, collectives=times)

"""Estimate the memory of one rank by use, without activations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sdp4bit.collectives.plan import holds_all_rows
from sdp4bit.traffic import Grid
from sdp4bit_lab.plan.traffic import GATHERED_BYTES, REDUCED_BYTES, Exchange, GroupTraffic

MAIN_BYTES = 4
ADAM_BYTES = 8
"""Two fp32 averages."""
GATHERED_AT_ONCE = 2
"""FSDP2 gathers the next group while one computes."""
COMMUNICATOR_BYTES = 616_000_000
"""Memory of an NCCL communicator: the middle of 544 and 688 MB, which NVIDIA/nccl#964 reports for A100s."""
_PARTS = {
    "shards": ("main weights, fp32", "Adam, fp32", "frozen weights, bf16"),
    "gradients": ("gradients, fp32",),
    "replica": ("weight replica, bf16",),
    "buffers": (
        "gathered weights, bf16",
        "rows being reduced, fp32",
        "rows being reduced, bf16",
        "message buffers",
    ),
    "communicators": ("communicators",),
}


def parts(memory: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of a memory by use over shards, gradients, replica, buffers and communicators."""
    return {part: sum(memory.get(use, 0) for use in uses) for part, uses in _PARTS.items()}


def communicator_bytes(traffic: Sequence[GroupTraffic], *, grid: Grid, replicas: Grid) -> int:
    """Return the memory of FSDP2's communicators and of those that the library adds.

    FSDP2 has one for shards, and one for replicas. The library has up to two, inside and between nodes, for
    each of weights, gradients and sums over replicas.
    """
    plain = [each for each in (grid, replicas) if each.size > 1]

    def added(use: str) -> set[Grid]:
        exchanges: list[Exchange] = [getattr(group, use) for group in traffic]
        # Those without chunks are FSDP2's own.
        return {call.grid for each in exchanges if each.chunks is not None for call in each.calls}

    weights = added("refresh") | added("gathers")
    return COMMUNICATOR_BYTES * (
        len(plain) + len(weights) + len(added("gradients")) + len(added("all_reduce"))
    )


def memory_per_rank(
    traffic: Sequence[GroupTraffic], *, grid: Grid, accumulation: int, row_bytes: int = REDUCED_BYTES
) -> dict[str, int]:
    """Return bytes by use: main weights, Adam, gradients, gathered weights, replica, message buffers.

    FSDP2 keeps gradient shards, or full gradients while micro batches accumulate, and gathers few groups at a
    time. A flat buffer keeps all weights and gradients on every rank, and its weights are the replica.

    Args:
        grid: ranks that shard the groups.
        row_bytes: bytes per gradient in the rows that are reduced.
    """
    rows, trained = [group.row_numel for group in traffic], sum(group.trained_numel for group in traffic)
    is_flat = any(group.group.is_flat for group in traffic)
    freed = sorted(group.row_numel for group in traffic if group.group.freed_after_forward)
    gathered = grid.size * (sum(rows) - sum(freed[:-GATHERED_AT_ONCE]))
    keeps_gradients = is_flat or accumulation > 1
    largest = max(traffic, key=lambda group: group.row_numel)
    memory = {
        "main weights, fp32": MAIN_BYTES * trained,
        "Adam, fp32": ADAM_BYTES * trained,
        "gradients, fp32": REDUCED_BYTES * trained * (grid.size if keeps_gradients else 1),
        "gathered weights, bf16": GATHERED_BYTES * gathered,
    }
    if trained < sum(rows):
        memory["frozen weights, bf16"] = GATHERED_BYTES * (sum(rows) - trained)
    if not is_flat:
        reduced = max(group.trained_numel for group in traffic)
        memory[f"rows being reduced, {'bf16' if row_bytes == GATHERED_BYTES else 'fp32'}"] = (
            row_bytes * grid.size * reduced
        )
    if largest.weights is not None and grid.size > 1 and not is_flat:
        copies = grid.size if holds_all_rows(largest.weights, grid=grid) else grid.nodes
        memory["weight replica, bf16"] = GATHERED_BYTES * copies * sum(rows)
    # All groups share the buffers of the largest one.
    buffers = max(sum(exchange.buffer_bytes for exchange in group.exchanges) for group in traffic)
    if buffers:
        memory["message buffers"] = buffers
    return memory


def identifier(use: str) -> str:
    """Return the JSON key of a use: "Adam, fp32" becomes adam_fp32."""
    return re.sub(r"\W+", "_", use.lower())

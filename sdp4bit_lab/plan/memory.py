"""Estimate the memory of one rank by use, without activations and communicators."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sdp4bit.traffic import Grid
from sdp4bit_lab.plan.traffic import GATHERED_BYTES, REDUCED_BYTES, GroupTraffic, is_full

MAIN_BYTES = 4
ADAM_BYTES = 8
"""Two fp32 averages."""
GATHERED_AT_ONCE = 2
"""FSDP2 gathers the next group while one computes."""


def memory_per_rank(traffic: Sequence[GroupTraffic], *, grid: Grid, accumulation: int) -> dict[str, int]:
    """Return bytes by use: main weights, Adam, gradients, gathered weights, replica, message buffers.

    FSDP2 keeps gradient shards, or full gradients while micro batches accumulate, and gathers few groups at a
    time. A flat buffer keeps all weights and gradients on every rank, and its weights are the replica.

    Args:
        grid: ranks that shard the groups.
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
        memory["rows being reduced, fp32"] = REDUCED_BYTES * grid.size * reduced
    if largest.weights is not None and grid.size > 1 and not is_flat:
        copies = grid.size if is_full(largest.weights, grid=grid) else grid.nodes
        memory["weight replica, bf16"] = GATHERED_BYTES * copies * sum(rows)
    # All groups share the buffers of the largest one.
    buffers = max(sum(exchange.buffer_bytes for exchange in group.exchanges) for group in traffic)
    if buffers:
        memory["message buffers"] = buffers
    return memory


def identifier(use: str) -> str:
    """Return the JSON key of a use: "Adam, fp32" becomes adam_fp32."""
    return re.sub(r"\W+", "_", use.lower())

"""Check the back end itself: values of its collectives, and two communicators at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit_lab.selftest.check import ONE_RANK, CheckFailedError, CheckSkippedError, Context

_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Messages of a rank, up to 8 MB."""
_LARGE = 1 << 20
# Torch 2.13 renamed two collectives.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_ROUNDS = 20
_WIDTH = 4096
"""Of the matrices that are multiplied meanwhile; they take a GPU about 0.2 ms."""


def check_collectives(context: Context) -> dict[str, Any]:
    """Return milliseconds of the collectives by bytes per rank, and of two at once."""
    if context.ranks.world_size == 1:
        raise CheckSkippedError(ONE_RANK)
    times: dict[str, dict[str, float]] = {}
    for nbytes in _BYTES:
        times[str(nbytes)] = _times_of(context, nbytes // 4)
        found = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in times[str(nbytes)].items())
        context.say(f"      {nbytes:>7} bytes, ms: {found}")
    both = _two_at_once(context)
    context.say(f"      two communicators at once beside a matrix product: {1e3 * both:.1f} ms")
    return {"seconds": times, "two_communicators_seconds": both}


def _times_of(context: Context, numel: int) -> dict[str, float]:
    """Return the seconds of every collective after checking its values."""
    rank, size, device = context.ranks.rank, context.ranks.world_size, context.device
    # Rank r sends r + 1, or to rank p the number r + 1 + size * p, so that every message has its own value.
    own = torch.full((numel,), float(rank + 1), device=device)
    to_each = own + size * torch.arange(size, device=device, dtype=torch.float32)[:, None]
    received, row, total = torch.empty_like(to_each), torch.empty_like(own), torch.empty_like(own)
    ranks = torch.arange(1.0, size + 1, device=device)

    def all_reduce() -> None:
        total.copy_(own)
        dist.all_reduce(total)

    cases: dict[str, tuple[Callable[[], object], Tensor, Tensor]] = {
        "all-to-all": (
            lambda: dist.all_to_all_single(received.view(-1), to_each.view(-1)),
            received,
            (ranks + size * rank)[:, None].expand_as(received),
        ),
        "all-gather": (
            lambda: _all_gather(received.view(-1), own),
            received,
            ranks[:, None].expand_as(received),
        ),
        "reduce-scatter": (
            lambda: _reduce_scatter(row, to_each.view(-1)),
            row,
            (ranks + size * rank).sum().expand_as(row),
        ),
        "all-reduce": (all_reduce, total, ranks.sum().expand_as(total)),
    }
    repeats = 3 if 4 * numel >= _LARGE else 10
    seconds = {}
    for name, (call, output, expected) in cases.items():
        output.fill_(float("nan"))
        call()
        context.require(
            torch.equal(output, expected),
            f"{name} of {4 * numel} bytes per rank returns wrong values",
            case=f"{name}, {numel} values",
        )
        context.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        context.synchronize()
        seconds[name] = (time.perf_counter() - start) / repeats
    return seconds


def _two_at_once(context: Context) -> float:
    """Return the seconds of an all-gather, and an all-to-all of another group, beside a matrix product.

    The kernels of both groups wait on the device for those of other ranks. If one cannot start before another
    ends, they wait forever: a process group's timeout reports it.
    """
    size, device = context.ranks.world_size, context.device
    second = dist.new_group()
    width = _WIDTH if context.is_cuda else 64
    matrix = torch.ones(width, width, device=device, dtype=torch.bfloat16)
    own = torch.full((_BYTES[-1] // 4,), float(context.ranks.rank), device=device)
    rows = own.expand(size, -1).contiguous()
    gathered, received = torch.empty_like(rows), torch.empty_like(rows)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        first_work = _all_gather(gathered.view(-1), own, async_op=True)
        second_work = dist.all_to_all_single(received.view(-1), rows.view(-1), group=second, async_op=True)
        product = matrix @ matrix
        first_work.wait()
        second_work.wait()
    context.synchronize()
    seconds = (time.perf_counter() - start) / _ROUNDS
    expected = torch.arange(float(size), device=device)[:, None].expand_as(rows)
    is_right = torch.equal(gathered, expected) and torch.equal(received, expected)
    is_right = is_right and bool((product == width).all())
    dist.destroy_process_group(second)
    failure = None
    if not is_right:
        message = "an all-gather and an all-to-all at the same time return wrong values"
        failure = CheckFailedError(message, case="two communicators at once")
    context.fail_together(failure)
    return seconds

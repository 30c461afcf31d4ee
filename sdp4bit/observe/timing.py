"""Timing of a user's training steps with and without quantization, in alternating blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sdp4bit.collectives.errors import comm_error_context

TIMED_STEPS = 2  # timed steps of a block, after one that is not timed

Blocks = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of training steps on the slowest rank, the same on all ranks."""

    quantized_seconds: Blocks
    """Seconds of the timed steps with quantized communication, by block."""
    plain_seconds: Blocks
    """The same in full precision; block i was measured directly after quantized block i."""

    @property
    def quantized(self) -> float:
        """Median seconds of a step with quantized communication."""
        return statistics.median(second for block in self.quantized_seconds for second in block)

    @property
    def plain(self) -> float:
        """Median seconds of a step in full precision."""
        return statistics.median(second for block in self.plain_seconds for second in block)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Speedup of each pair of blocks: plain seconds over quantized seconds."""
        pairs = zip(self.plain_seconds, self.quantized_seconds, strict=True)
        return tuple(statistics.median(plain) / statistics.median(ours) for plain, ours in pairs)

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        ratios = self.ratios
        return (
            f"{format_seconds(self.quantized)} a step with quantization, {format_seconds(self.plain)} "
            f"without: {self.ratio:.2f}x as fast, {min(ratios):.2f} to {max(ratios):.2f} over "
            f"{len(ratios)} pairs of blocks"
        )


def time_steps(
    step: Callable[[], object],
    *,
    repeats: int,
    full_precision: Callable[[], AbstractContextManager[None]],
    device: torch.device | None,
) -> StepTimes:
    """Measure steps in blocks with and without quantization; see `CommHandle.time_steps`."""
    blocks: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for _ in range(repeats):
        for is_quantized in (True, False):
            with nullcontext() if is_quantized else full_precision():
                step()  # not timed: after a switch it gathers weights in full precision
                seconds = tuple(_seconds(step, device) for _ in range(TIMED_STEPS))
                blocks[is_quantized].append(seconds)
    mine = blocks[True], blocks[False]
    ranks: list[tuple[list[tuple[float, ...]], ...]] = [mine] * dist.get_world_size()
    with comm_error_context("times of training steps"):
        dist.all_gather_object(ranks, mine)
    quantized, plain = (_slowest([rank[kind] for rank in ranks]) for kind in range(2))
    return StepTimes(quantized_seconds=quantized, plain_seconds=plain)


def _seconds(step: Callable[[], object], device: torch.device | None) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(ranks: list[list[tuple[float, ...]]]) -> Blocks:
    blocks = zip(*ranks, strict=True)
    return tuple(tuple(max(step) for step in zip(*block, strict=True)) for block in blocks)


def format_seconds(seconds: float) -> str:
    """Return seconds for people, such as 1.25 s or 81.3 ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"

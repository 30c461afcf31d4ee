"""Measure what an entropy coder would make of dithered gradients between nodes: bits, error, its own time.

    python -m benchmarks.entropy_coding --out runs/entropy --simulated-ranks 4 --ranks-per-node 2 \
        --train-iters 250

trains as `sdp4bit pretrain` does with these options, on simulated ranks, and takes what the first node sends
to the others at `--at` steps: the sums of its ranks' gradients after the Hadamard transform. Each group of
2048 values is quantized with subtractive dither, q = floor(x / step + r), received as (q + 1/2 - r) step, and
coded by a Huffman code that was made once for normal values, so that nothing of it is sent. The step is the
first of a fixed grid, from the one that normal values need, with which the group fits its budget of bytes:
messages keep a fixed size. Written to table.md:

* bits per value and relative squared error, beside this library's codes and Shannon's bound for normal
  values;
* nanoseconds per value to code and to decode on one thread, and what the bytes that are saved would have
  taken at `--gbit` per second: a coder earns its place if it takes less than half of that.
"""

from __future__ import annotations

import argparse
import heapq
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import hadamard32
from sdp4bit.quantization.layout import message_layout
from sdp4bit.quantization.random import RoundingKey, derive_keys, random_bits16
from sdp4bit_lab.cli import COMMANDS
from sdp4bit_lab.common.files import write_atomically
from sdp4bit_lab.common.ranks import Ranks, join_ranks
from sdp4bit_lab.common.settings import SettingError, require
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.pretrain.step.simulated_model import SimulatedModel
from sdp4bit_lab.pretrain.trainer import build_run

GROUP = 2048
LANES = 4
"""Streams that the values of a group are dealt to in turn: a processor decodes them side by side."""
LONGEST = 12
"""Bits of the longest code, and of the index of the table that decodes."""
FINENESS = 64
"""Steps of the grid of step sizes from one power of two to the next."""
LARGEST = 6.5
"""Root mean squares that the symbols reach; what is beyond makes the step coarser."""
STEP_BYTES = 2
BUDGETS = (2.0, 2.5, 3.0, 3.5, 4.1)
SENT_NOW = 4 + 16 / 128
"""Bits per value of int4 in groups of 128."""


@dataclass(frozen=True, kw_only=True)
class HuffmanCode:
    """A prefix code of at most LONGEST bits for the symbols -last to last."""

    last: int
    lengths: np.ndarray
    """uint8 [symbols]."""
    words: np.ndarray
    """uint32 [symbols], first bit lowest."""
    decoding: np.ndarray
    """uint16 [2**LONGEST]: symbol number * 16 + length, by the next LONGEST bits."""


@cache
def normal_code(step: float) -> HuffmanCode:
    """Return the code for normal values of variance 1 that are dithered with this step."""
    last = math.ceil(LARGEST / step)
    lengths = _huffman_lengths(_shares(step, last))
    # Canonical: codes in the order of length, then of symbol.
    words, decoding = np.zeros(len(lengths), np.uint32), np.zeros(1 << LONGEST, np.uint16)
    code = previous = 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        length = int(lengths[symbol])
        code <<= length - previous
        previous = length
        word = int(f"{code:0{length}b}"[::-1], 2)
        words[symbol] = word
        decoding[word :: 1 << length] = symbol * 16 + length
        code += 1
    return HuffmanCode(last=last, lengths=lengths, words=words, decoding=decoding)


def _shares(step: float, last: int) -> np.ndarray:
    """Return how often normal values of variance 1 that are dithered give the symbols -last to last."""
    edges = (np.arange(-last, last + 2) - 0.5) * step
    # Dither adds a uniform number of one step: the share of a symbol is that of its interval, smeared by it.
    return np.array([_below(edge + step) - _below(edge) for edge in edges[:-1]])


def _below(edge: float) -> float:
    return 0.5 * (1 + math.erf(edge / math.sqrt(2)))


def _huffman_lengths(weights: np.ndarray) -> np.ndarray:
    """Return the lengths of an optimal code, none above LONGEST: rare symbols are made likelier until so."""
    floor = 0.0
    while True:
        order = count()
        heap = [(max(float(weight), floor), next(order), [symbol]) for symbol, weight in enumerate(weights)]
        lengths = np.zeros(len(weights), np.uint8)
        heapq.heapify(heap)
        while len(heap) > 1:
            (first, _, left), (second, _, right) = heapq.heappop(heap), heapq.heappop(heap)
            lengths[left + right] += 1
            heapq.heappush(heap, (first + second, next(order), left + right))
        if lengths.max() <= LONGEST:
            return lengths
        floor = max(1.2 * floor, 1e-6)


@njit(cache=True, nogil=True)
def encode(values, random, lengths, words, last, start, coarser, budget, out, steps):
    """Write groups of GROUP values to rows of `budget` bytes; return how many steps were tried.

    Args:
        values: fp32 [groups, GROUP].
        random: fp32 [groups, GROUP] in 0 .. 1.
        start: step of the first try, in units of a group's root mean square.
        coarser: factor from a step to the next that is tried.
        out: uint8 [groups, budget + 8]; a row begins with the bytes of each lane but the last, uint16.
        steps: fp32 [groups], written.
    """
    tries = 0
    symbols, length_of = np.empty(GROUP, np.int32), lengths.astype(np.int32)
    word_of = words.astype(np.uint64)
    for group in range(values.shape[0]):
        row, dither = values[group], random[group]
        square = np.float32(0)
        for i in range(GROUP):
            square += row[i] * row[i]
        step = np.float32(start) * np.sqrt(square / np.float32(GROUP))
        if step == 0:
            step = np.float32(1)
        bits = np.zeros(LANES, np.int32)
        while True:
            tries += 1
            inverse = np.float32(1) / step
            lowest = highest = 0
            # As positive numbers, which a conversion cuts off downwards: floor() is slower.
            for i in range(GROUP):
                symbol = np.int32(row[i] * inverse + dither[i] + np.float32(1024)) - 1024
                symbols[i] = symbol
                lowest, highest = min(lowest, symbol), max(highest, symbol)
            total = budget + 1
            if -last <= lowest and highest <= last:
                bits[:] = 0
                for i in range(0, GROUP, LANES):
                    for lane in range(LANES):
                        bits[lane] += length_of[symbols[i + lane] + last]
                total = 2 * (LANES - 1)
                for lane in range(LANES):
                    total += (bits[lane] + 7) // 8
            if total <= budget:
                break
            step = step * np.float32(coarser)
        steps[group] = step
        first = 2 * (LANES - 1)
        for lane in range(LANES):
            size = (bits[lane] + 7) // 8
            if lane < LANES - 1:
                out[group, 2 * lane] = size & 255
                out[group, 2 * lane + 1] = size >> 8
            held, filled, place = np.uint64(0), np.int64(0), first
            for i in range(lane, GROUP, LANES):
                symbol = symbols[i] + last
                held |= word_of[symbol] << np.uint64(filled)
                filled += length_of[symbol]
                if filled >= 32:
                    for byte in range(4):
                        out[group, place + byte] = np.uint8(held >> np.uint64(8 * byte) & np.uint64(255))
                    held >>= np.uint64(32)
                    filled -= 32
                    place += 4
            while filled > 0:
                out[group, place] = np.uint8(held & np.uint64(255))
                held >>= np.uint64(8)
                filled -= 8
                place += 1
            first += size
    return tries


@njit(cache=True, nogil=True)
def decode(messages, random, steps, decoding, last, values):
    """Read what encode wrote to fp32 values [groups, GROUP]."""
    mask = np.uint64((1 << LONGEST) - 1)
    for group in range(values.shape[0]):
        step = steps[group]
        row, message = values[group], messages[group]
        places = np.empty(LANES, np.int64)
        place = 2 * (LANES - 1)
        for lane in range(LANES):
            places[lane] = place
            if lane < LANES - 1:
                place += message[2 * lane] + (np.int64(message[2 * lane + 1]) << 8)
        held, filled = np.zeros(LANES, np.uint64), np.zeros(LANES, np.int64)
        for i in range(0, GROUP, LANES):
            for lane in range(LANES):
                while filled[lane] < LONGEST and places[lane] < message.shape[0]:
                    held[lane] |= np.uint64(message[places[lane]]) << np.uint64(filled[lane])
                    places[lane] += 1
                    filled[lane] += 8
                entry = decoding[held[lane] & mask]
                length = entry & 15
                held[lane] >>= np.uint64(length)
                filled[lane] -= length
                symbol = np.float32((entry >> 4) - last)
                row[i + lane] = (symbol + np.float32(0.5) - random[group, i + lane]) * step


def budget_bytes(bits: float) -> int:
    """Return the bytes of a group at so many bits per value, without its step."""
    return int(bits * GROUP / 8) - STEP_BYTES


def step_for(bits: float) -> float:
    """Return the step, in units of the root mean square, that normal values fit their budget with."""
    # Entropy of a dithered normal value: that of its density over that of the step.
    entropy = 0.5 * math.log2(2 * math.pi * math.e)
    grid = 2 ** (math.floor(FINENESS * (entropy - bits)) / FINENESS)
    while _normal_length(grid) > bits - 8 * (STEP_BYTES + 2 * (LANES - 1) + LANES / 2) / GROUP:
        grid *= 2 ** (1 / FINENESS)
    return grid


def _normal_length(step: float) -> float:
    """Return the mean length of the codes of normal values."""
    code = normal_code(step)
    return float(_shares(step, code.last) @ code.lengths)


def draw_random(shape: tuple[int, int]) -> np.ndarray:
    """Return dither in 0 .. 1, as the library draws it."""
    bits = random_bits16(0, shape[0] * shape[1], *derive_keys(0, 0))
    return ((bits.float() + 0.5) / 65536).view(shape).numpy()


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a budget comes to."""

    bits: float
    """Per value, all that a group sends."""
    squared_error: float
    """Over the squared values."""
    tries: float
    """Steps that were tried per group."""
    encode_nanoseconds: float
    decode_nanoseconds: float


def measure(groups: np.ndarray, *, bits: float, rounds: int = 5) -> Result:
    """Return error and time of a budget; every group is decoded from its bytes.

    Args:
        groups: fp32 [groups, GROUP].
    """
    step, budget = step_for(bits), budget_bytes(bits)
    code, random = normal_code(step), draw_random(groups.shape)
    messages = np.zeros((len(groups), budget + 8), np.uint8)
    steps, received = np.zeros(len(groups), np.float32), np.empty_like(groups)
    arguments = (code.lengths, code.words, code.last, step, 2 ** (1 / FINENESS), budget, messages, steps)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        tries = encode(groups, random, *arguments)
        middle = time.perf_counter()
        decode(messages, random, steps, code.decoding, code.last, received)
        times[0].append(middle - begin)
        times[1].append(time.perf_counter() - middle)
    error = np.square(received.astype(np.float64) - groups).sum() / np.square(groups.astype(np.float64)).sum()
    per_value = 1e9 / groups.size
    # The first round compiles.
    coding, decoding = (statistics.median(found[1:]) * per_value for found in times)
    return Result(
        bits=8 * (budget + STEP_BYTES) / GROUP,
        squared_error=float(error),
        tries=tries / len(groups),
        encode_nanoseconds=coding,
        decode_nanoseconds=decoding,
    )


def packed_error(groups: np.ndarray, *, bits: int, dither: bool) -> float:
    """Return the relative squared error of this library's codes in groups of 128."""
    values = torch.from_numpy(groups).view(-1)
    layout = message_layout(numel=values.numel(), bits=bits, group_size=128)
    message, received = torch.zeros(1, layout.nbytes, dtype=torch.uint8), torch.empty(1, values.numel())
    key = RoundingKey(*derive_keys(0, 1), dither=dither)
    ops.subtract_quantize(values, replica=None, out=message[0], layout=layout, rounding=key)
    ops.dequantize_add(
        message, replica=received, layout=layout, accumulate=False, dither=key if dither else None
    )
    return float((received[0] - values).double().square().sum() / values.double().square().sum())


def table(samples: Mapping[str, np.ndarray], *, gbit: float) -> str:
    """Return bits, error and time of every budget on every sample, as Markdown."""
    names = list(samples)
    text = f"| sent | bits per value | {' | '.join(f'error, {name}' for name in names)} "
    text += "| Shannon's bound | code, ns | decode, ns | saved, ns |\n" + "| --- " * (len(names) + 6) + "|\n"

    def row(name: str, bits: float, errors: Sequence[float], times: Sequence[str]) -> str:
        cells = [name, f"{bits:.3f}", *(f"{error:.4f}" for error in errors), f"{4**-bits:.4f}", *times]
        return f"| {' | '.join(cells)} |\n"

    for name, dither in (("int4, stochastic", False), ("int4, dither", True)):
        errors = [packed_error(groups, bits=4, dither=dither) for groups in samples.values()]
        text += row(name, SENT_NOW, errors, ["", "", "0"])
    for bits in BUDGETS:
        found = [measure(groups, bits=bits) for groups in samples.values()]
        last = found[-1]
        saved = (SENT_NOW - last.bits) / gbit
        times = [f"{last.encode_nanoseconds:.2f}", f"{last.decode_nanoseconds:.2f}", f"{saved:.2f}"]
        text += row("entropy-coded, dither", last.bits, [result.squared_error for result in found], times)
    return text


class _Taker:
    """Keeps what the first node of a run of simulated ranks would send between nodes."""

    def __init__(self, model: SimulatedModel) -> None:
        self._handle = model.communication
        self._add = self._handle.add_gradients
        self._handle.add_gradients = self.add_gradients  # type: ignore[method-assign]
        self.is_due = False
        self.taken: list[Tensor] = []

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor], *, rank: int) -> None:
        """Sum the gradients of the node's ranks, group by group."""
        if self.is_due and rank < self._handle.layout.ranks_per_node:
            for index, layout in enumerate(self._handle.row_layouts):
                rows = torch.empty(self._handle.layout.size, layout.numel)
                layout.write_rows(gradients, rows)
                if rank == 0:
                    self.taken.append(rows)
                else:
                    self.taken[index - len(self._handle.row_layouts)] += rows
        self._add(gradients, rank=rank)


def train_and_take(training: PretrainConfig, *, at: Sequence[int], ranks: Ranks) -> dict[str, np.ndarray]:
    """Return the groups that are sent at these steps of a run, transformed, by the step's name."""
    run = build_run(training, ranks=ranks, label=training.strategy_name)
    assert isinstance(run.loop.model, SimulatedModel)
    taker, steps, samples = _Taker(run.loop.model), run.loop.steps(), {}
    for number in range(1, max(at) + 1):
        taker.is_due = number in at
        next(steps)
        if taker.is_due:
            rows = [rows.reshape(-1)[: rows.numel() // GROUP * GROUP].view(-1, GROUP) for rows in taker.taken]
            samples[f"step {number}"] = (hadamard32(torch.cat(rows)) / math.sqrt(32)).numpy()
            taker.taken.clear()
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.entropy_coding",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--at", default="20,100,200", help="steps whose gradients are taken")
    parser.add_argument("--gbit", type=float, default=1.0, help="of the network between nodes, per second")
    mine, options = parser.parse_known_args(arguments)
    try:
        at = [int(step) for step in mine.at.split(",")]
        training = COMMANDS["pretrain"].parse(options)
        require(
            training.parallel.simulated_ranks is not None,
            "what a node sends is taken from simulated ranks: give --simulated-ranks and --ranks-per-node",
        )
        require(
            max(at) <= training.training.steps,
            f"--at {mine.at} is beyond the {training.training.steps} steps of --train-iters",
        )
        with join_ranks() as ranks:
            samples = train_and_take(training, at=at, ranks=ranks)
    except SettingError as error:
        print(f"benchmarks.entropy_coding: {error}", file=sys.stderr)
        return 2
    text = table(samples, gbit=mine.gbit)
    print(text)
    write_atomically(training.logging.out / "table.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

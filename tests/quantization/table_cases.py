"""A table of every operator on three sections of a row: two matrices, one of odd length, and vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout, message_layout
from sdp4bit.quantization.random import KeySeries, RoundingKey, Stage, key_source
from sdp4bit.quantization.tables import Call, Table, record, stand_in

NUMELS = (2 * 256 + 64, 201, 96)
VECTORS = (32, 32, 5)
"""Lengths of the vectors of the last section, which ends the row."""
WIDTH = NUMELS[0] + NUMELS[1] + sum(VECTORS)
CALLS = (0, 1, 2, (1 << 33) + 5)


def layouts(bits: float, group_size: int, *, parts: int = 1) -> list[MessageLayout]:
    """Return the layouts of the sections."""
    kinds = [(bits, group_size), (bits, group_size), (8, 32)]
    pairs = zip(NUMELS, kinds, strict=True)
    return [message_layout(numel=n, bits=b, group_size=g, parts=parts) for n, (b, g) in pairs]


def split(count: int, given: Sequence[MessageLayout], device: torch.device) -> list[Tensor]:
    """Return messages with a part per section."""
    ends = [0, *accumulate(each.nbytes for each in given)]
    whole = torch.zeros(count, ends[-1], dtype=torch.uint8, device=device)
    return [whole[:, a:b] for a, b in pairwise(ends)]


def quantizing(numels: Sequence[int], device: torch.device) -> tuple[Table, list[Tensor]]:
    """Return a table that quantizes sections of these lengths, and the parts of the message it writes."""
    given = [message_layout(numel=numel, bits=4, group_size=32) for numel in numels]
    parts, values = split(1, given, device), stand_in(torch.empty(1, 1, sum(numels)))
    calls = [
        record(ops.hadamard_quantize, each, out=part, layout=layout, hadamard=True, rounding=None)
        for each, part, layout in zip(values.split([*numels], -1), parts, given, strict=True)
    ]
    return Table(calls, moving=[values]), parts


def blocks(device: torch.device) -> Tensor:
    """Return the blocks of the vectors in the row."""
    start = NUMELS[0] + NUMELS[1]
    places = [start + sum(VECTORS[:i]) for i in range(len(VECTORS))]
    return torch.tensor([64 * at + n for at, n in zip(places, VECTORS, strict=True)], device=device)


def sections_of(rows: Tensor) -> list[Tensor]:
    """Return the values of each section in rows [..., n]; all of them for the vectors."""
    first, second, _ = NUMELS
    return [rows[..., :first], rows[..., first : first + second], rows]


class Case:
    """Runs the tables of one device with tensors at other addresses in every call."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, weight_group: int = 256) -> None:
        self.device, self.dtype, self.weight_group = device, dtype, weight_group
        self.generator = torch.Generator().manual_seed(0)
        self.blocks = [None, None, blocks(device)]
        self.sources = [
            key_source(3, count=3, number=i, bucket=5000, stage=Stage.INTER, rank=7) for i in range(3)
        ]

    def values(self, *rows: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*rows, WIDTH, generator=self.generator)
        return drawn.to(self.device, dtype or self.dtype)

    def table(
        self, operator: Callable[..., None], moving: Sequence[Tensor], make: Callable[[int], Any]
    ) -> Table:
        """Return a table of the calls whose arguments `make` returns, the first one apart."""
        calls: list[Call] = []
        for i in range(3):
            first, named = make(i)
            calls.append(record(operator, first, **named))
        return Table(calls, moving=moving)

    def key(self, i: int, **fields: Any) -> RoundingKey:
        return RoundingKey(0, 0, row_stride=(NUMELS[i] + 31) // 32 * 32, source=self.sources[i], **fields)

    def weights(self) -> Iterator[Tensor]:
        """Yield messages, flags and replicas of refreshes."""
        given = layouts(4, self.weight_group)
        main, rows = stand_in(self.values()), stand_in(self.values(2, dtype=torch.bfloat16))
        flag, sent = stand_in(torch.zeros((), dtype=torch.bool)), split(2, given, self.device)
        mains, replicas = sections_of(main), sections_of(rows)

        def subtract(i: int) -> Any:
            named = {"replica": replicas[i][1], "out": sent[i][1], "layout": given[i]}
            return mains[i], {
                **named,
                "clip": 0.9 if i < 2 else 1.0,
                "blocks": self.blocks[i],
                "nonfinite": flag,
            }

        def add(i: int) -> Any:
            named = {"replica": replicas[i], "layout": given[i], "accumulate": True}
            return sent[i], {**named, "blocks": self.blocks[i]}

        first = self.table(ops.subtract_quantize, [main, rows, flag], subtract)
        second = self.table(ops.dequantize_add, [rows], add)
        for call in CALLS:
            values, held = self.values(), self.values(2, dtype=torch.bfloat16)
            if call == CALLS[-1]:
                values[5] = float("nan")
            nonfinite = torch.zeros((), dtype=torch.bool, device=self.device)
            first.run(call, values, held, nonfinite)
            second.run(call, held)
            yield from (*(each.clone() for each in sent), nonfinite, held)

    def gradients(self) -> Iterator[Tensor]:
        """Yield the messages of both hops, and sums."""
        inner, outer = layouts(8, 128, parts=2), layouts(4, 128)
        rows, out = stand_in(self.values(4)), stand_in(self.values())
        sums = stand_in(self.values(dtype=torch.float32))
        sources = [each.unflatten(0, (2, 2)).transpose(0, 1) for each in sections_of(rows)]
        sent, passed = split(2, inner, self.device), split(2, outer, self.device)
        outs, owns = sections_of(out), sections_of(sums)

        def quantize(i: int) -> Any:
            named = {"out": sent[i], "layout": inner[i], "hadamard": True, "blocks": self.blocks[i]}
            return sources[i], {**named, "rounding": self.key(i)}

        def requantize(i: int) -> Any:
            named = {"received": inner[i], "out": passed[i], "sent": outer[i], "skip": 1, "own": owns[i]}
            named |= {"blocks": self.blocks[i], "hadamard": True, "multiplier": 1 / 96, "dither": None}
            return sent[i], {**named, "rounding": self.key(i, dither=True, sender=3)}

        def reduce(i: int) -> Any:
            named = {"out": outs[i], "layout": outer[i], "hadamard": True, "multiplier": 1 / 96, "skip": 1}
            named |= {"own": owns[i], "own_multiplier": 1 / 3, "blocks": self.blocks[i]}
            return passed[i], {**named, "dither": self.key(i, dither=True)}

        tables = [
            self.table(ops.hadamard_quantize, [rows], quantize),
            self.table(ops.dequantize_reduce_quantize, [out, sums], requantize),
            self.table(ops.dequantize_reduce_hadamard, [out, sums], reduce),
        ]
        for call in CALLS:
            output, own = self.values(), self.values(dtype=torch.float32)
            tables[0].run(call, self.values(4))
            tables[1].run(call, output, own)
            yield own.clone()
            tables[2].run(call, output, own)
            yield from (*(each.clone() for each in (*sent, *passed)), output)

    def pieces(self) -> Iterator[Tensor]:
        """Yield rows that are restored from the messages of pieces."""
        out, stride = stand_in(self.values()), 32
        given = [message_layout(numel=n - 2 * stride, bits=4, group_size=128) for n in NUMELS[:2]]
        given.append(message_layout(numel=32, bits=8, group_size=32))
        messages = split(6, given, self.device)
        copy = torch.zeros(96, device=self.device, dtype=self.dtype)
        targets = [*sections_of(out)[:2], copy]

        def restore(i: int) -> Any:
            named = {"out": targets[i], "layout": given[i], "pieces": 3, "stride": stride, "hadamard": True}
            series = KeySeries(0, (1 << 63) + 12345, source=self.sources[i])
            return messages[i], {**named, "multiplier": 1 / 32, "dither": series}

        table = self.table(ops.dequantize_reduce_pieces, [out], restore)
        for each, layout in zip(messages, given, strict=True):
            values = torch.randn(6, 1, layout.numel, generator=self.generator).to(self.device)
            named = {"layout": layout, "hadamard": True, "rounding": RoundingKey(1, 2, dither=True)}
            ops.hadamard_quantize(values, out=each, **named)
        for call in CALLS:
            output = self.values()
            table.run(call, output)
            yield from (output, copy.clone())


def outcomes(device: torch.device, dtype: torch.dtype, *, weight_group: int = 256) -> list[Tensor]:
    """Return everything that the tables write, in every call."""
    case = Case(device, dtype, weight_group=weight_group)
    return [*case.weights(), *case.gradients(), *case.pieces()]

"""Tables of operators on CPU tensors; see :mod:`sdp4bit.quantization.tables`."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdp4bit.kernels.cpu import kernels, tiles
from sdp4bit.kernels.cpu.parameters import DequantizeRows, Key
from sdp4bit.kernels.cpu.programs import Recorded, recording, run_rows
from sdp4bit.quantization.checksum import signed64
from sdp4bit.quantization.random import KeySeries
from sdp4bit.quantization.tables import Call, View

_MOVED: dict[str, dict[str, tuple[str, ...]]] = {
    "subtract_quantize": {"main": ("values",), "replica": ("replica",), "nonfinite": ("nonfinite",)},
    "dequantize_add": {"replica": ("out", "own")},
    "hadamard_quantize": {"values": ("values",)},
    "dequantize_reduce_quantize": {"own": ("out",)},
    "dequantize_reduce_hadamard": {"out": ("out",), "own": ("own",)},
    "dequantize_reduce_pieces": {"out": ("out",)},
}
"""By operator, the parameters that are addresses of its arguments."""


class PackedTable:
    """The parameters of a table's calls in one block of memory, which one call of the host runs.

    The addresses of the tensors that move come first. Each call of a kernel then has a row of a head and the
    parameters. The head states how the parameters follow from these addresses and the number of the call.
    """

    def __init__(
        self, calls: Sequence[Call], tensors: Sequence[Tensor], *, operators: Mapping[str, Any]
    ) -> None:
        self._calls, self._operators = calls, operators
        self._keys = {
            i: torch.empty(each.arguments["pieces"], 2, dtype=torch.int64)
            for i, each in enumerate(calls)
            if isinstance(each.arguments.get("dither"), KeySeries)
        }
        """Memory for the keys of pieces, by the index of their call."""
        recorded = [(i, one) for i in range(len(calls)) for one in self._recorded(i, 0, tensors)]
        self._work = sum(one.work for _, one in recorded)
        self._memory = max(one.program.memory for _, one in recorded)
        rows = [self._row(i, one, self._head(i, one, tensors)) for i, one in recorded]
        self._width, self._count = max(map(len, rows)), len(rows)
        numbers = [0] * kernels.MOST_MOVING
        for row in rows:
            numbers += row + [0] * (self._width - len(row))
        self._table: Any = np.array(numbers)  # whose type is a `Buffer` only from Python 3.12 on
        self._address = self._table.ctypes.data
        self._addresses = struct.Struct(f"{len(tensors)}q")

    def _recorded(self, index: int, number: int, tensors: Sequence[Tensor]) -> list[Recorded]:
        """Return the calls of kernels that the operator of a call makes in a run."""
        call = self._calls[index]
        return recording.of(self._operators[call.operator], call.bind(number, tensors))

    def run(self, call: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`sdp4bit.quantization.tables.Packed`."""
        self._addresses.pack_into(self._table, 0, *[each.data_ptr() for each in tensors])
        run_rows(self._address, self._width, self._count, work=self._work, memory=self._memory, call=call)

    def _head(self, index: int, recorded: Recorded, tensors: Sequence[Tensor]) -> list[int]:
        call, (first, *keys), flags = self._calls[index], recorded.groups, recorded.program.flags
        moved: list[int] = []
        for name, view in call.arguments.items():
            if isinstance(view, View):
                base = tensors[view.tensor]
                address = view.of(tensors).data_ptr()
                for field in _MOVED[call.operator][name]:
                    if getattr(first, field) == address:
                        moved += (first._fields.index(field), view.tensor, address - base.data_ptr())
        # The last key is that of received messages, the one before it that of sent ones.
        sources: list[int] = []
        if flags.rounding != tiles.NEAREST:
            sources += (len(first), *_source(call, "rounding"), 0, 0)
        if index in self._keys:
            series, place = call.arguments["dither"], self._keys[index]
            sources += (place.data_ptr(), *_source(call, "dither"), len(place), signed64(series.step))
        elif flags.is_dither:
            column = len(first) + (len(keys) - 1) * len(Key._fields)
            sources += (column, *_source(call, "dither"), 0, 0)
        moved += [-1, 0, 0] * (kernels.MOST_MOVED - len(moved) // 3)
        sources += [-1, *[0] * 6] * (2 - len(sources) // 7)
        return [*moved, *sources]

    def _row(self, index: int, recorded: Recorded, head: Sequence[int]) -> list[int]:
        first, *others = recorded.groups
        if index in self._keys:
            assert isinstance(first, DequantizeRows)
            first = first._replace(keys=self._keys[index].data_ptr())
        row = recorded.program.row((first, *others), head)
        row[-1] = self._memory  # of each thread, while others run another row
        return row

    def check(self, call: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`sdp4bit.quantization.tables.Packed`."""
        rows = iter(self._table[kernels.MOST_MOVING :].reshape(-1, self._width).tolist())
        for index, each in enumerate(self._calls):
            for one in self._recorded(index, call, tensors):
                row = next(rows)
                expected = self._row(index, one, row[2 : kernels.HEAD_WORDS])
                found = row[: len(expected)]
                found[-2] = 0  # the offset of the working memory
                if found != expected:
                    raise AssertionError(f"{each.operator}: packed {found}, but {expected} are due")
            if index in self._keys:
                due = keys_of(each.bind(call, tensors)["dither"], len(self._keys[index]))
                if not torch.equal(self._keys[index], due):
                    raise AssertionError(f"{each.operator}: keys {self._keys[index]}, but {due} are due")


def _source(call: Call, name: str) -> Iterator[int]:
    return map(signed64, call.arguments[name].source)


def keys_of(series: KeySeries, pieces: int) -> Tensor:
    """Return both keys of each piece, int64 [pieces, 2]."""
    return torch.tensor([series.key(piece)[:2] for piece in range(pieces)])

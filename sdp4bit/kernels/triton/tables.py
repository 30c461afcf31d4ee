"""Launches for all sections of a row, joined from those that the operators would make section by section.

`sections.py` has the device code that reads their tables.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdp4bit.kernels.triton import sections
from sdp4bit.quantization.checksum import signed64
from sdp4bit.quantization.layout import MESSAGE_ALIGNMENT
from sdp4bit.quantization.tables import Call, View

_PLACES = {
    "quantize_kernel": {"values": sections.VALUES, "replica": sections.OTHER_VALUES, "out": sections.SENT},
    "reduce_quantize_kernel": {
        "messages": sections.RECEIVED,
        "own": sections.VALUES,
        "out": sections.SENT,
    },
    "dequantize_kernel": {"messages": sections.RECEIVED, "replica": sections.VALUES},
    "reduce_hadamard_kernel": {
        "messages": sections.RECEIVED,
        "own": sections.OTHER_VALUES,
        "out": sections.VALUES,
    },
    "reduce_pieces_kernel": {"messages": sections.RECEIVED, "out": sections.VALUES},
}
"""By kernel, the columns of the places of its tensors."""
_STRIDES = {
    "destination_stride": sections.STRIDE,
    "part_stride": sections.OTHER_STRIDE,
    "row_stride": sections.STRIDE,
    "piece_stride": sections.STRIDE,
}
"""The columns of numbers in units of UNIT values."""


class Launch(NamedTuple):
    """A launch of a kernel; see `backend._launch`."""

    kernel: Any
    grid: tuple[int, int, int]  # tiles, parts, destinations
    tensors: tuple[Tensor, ...]
    numbers: tuple[int | float | Tensor | None, ...]
    constants: tuple[Any, ...]
    num_warps: int
    registers: int

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by their names."""
        given = (*self.tensors, *self.numbers, *self.constants)
        return dict(zip(self.kernel.arg_names, given, strict=True))


class _Recording(threading.local):
    """The launches that the calling thread records instead of making them; None if it makes them."""

    launches: list[Launch] | None = None


recording = _Recording()


class Joined:
    """A launch for several sections; the tensors that move are passed to each run."""

    def __init__(
        self,
        launches: Sequence[Launch],
        calls: Sequence[Call],
        tensors: Sequence[Tensor],
        *,
        arguments: Sequence[dict[str, Any]],
        programs_of: Callable[[int, int, int, int], int],
    ) -> None:
        """Join the launches of calls, which `quantization.tables.launches` returns together.

        Args:
            arguments: the arguments of the calls, with views of the tensors.
            programs_of: the programs for this many tiles and rows, warps and registers.
        """
        first = launches[0]
        self.kernel, self.num_warps = first.kernel, first.num_warps
        # Rows with an odd number of blocks may use more.
        self.registers = max(each.registers for each in launches)
        names = {id(value): name for named in arguments for name, value in named.items()}
        count, columns = len(first.tensors), _PLACES[first.kernel.__name__]
        self._bases = [self._base(each, names.get(id(each)), calls[0], tensors) for each in first.tensors]
        numel = "own_numel" if "OWN_UNIT" in first.named else "numel"
        has_blocks = isinstance(first.named[numel], Tensor)
        pairs = list(zip(launches, calls, strict=True))
        places = [self._places(each, columns, names, call) for each, call in pairs]
        unit_name = "OWN_UNIT" if "OWN_UNIT" in first.named else "UNIT"
        units = [each.named[unit_name] for each in launches]
        unit = math.gcd(*units, *(place for row in places for place in row[0]))

        # One row per section, with the programs that share its tiles.
        _, parts, destinations = first.grid
        tiles = [each.grid[0] for each in launches]
        total = sum(tiles)
        per_program = -(-total // programs_of(total, parts * destinations, self.num_warps, self.registers))
        rows, blocks, at = [], list[Tensor](), 0
        table_words = len(launches) * sections.WIDTH.value
        for i, (each, call) in enumerate(pairs):
            row = [0] * sections.WIDTH.value
            programs = -(-tiles[i] // per_program)
            row[sections.FIRST_PROGRAM], row[sections.PROGRAMS] = at, programs
            at += programs
            named = each.named
            if has_blocks:
                row[sections.NUMEL.value] = table_words + sum(map(len, blocks))
                blocks.append(named[numel])
            else:
                row[sections.NUMEL.value] = named[numel] * units[i] // unit
            row[sections.BLOCKS.value] = named["blocks"]
            in_values, of_messages = places[i]
            for column, place in zip((sections.VALUES, sections.OTHER_VALUES), in_values, strict=True):
                row[column.value] = place // unit
            for column, place in zip((sections.RECEIVED, sections.SENT), of_messages, strict=True):
                row[column.value] = place // MESSAGE_ALIGNMENT
            for name, column in _STRIDES.items():
                row[column.value] += named.get(name, 0) * units[i] // unit
            for name, key, suffix in (
                ("rounding", sections.ROUNDING_KEY.value, ""),
                ("dither", sections.DITHER_KEY.value, "_in"),
            ):
                if name in call.sources:
                    source = call.sources[name]
                    numbers = named.get(f"first_block{suffix}", 0), named.get(f"row_blocks{suffix}", 0)
                    row[key : key + 6] = [*numbers, *map(signed64, source)]
            rows.append(row)
        self.words = [word for row in rows for word in row]
        self.grid = (at, parts, destinations)
        device = first.tensors[-1].device
        host = torch.tensor(self.words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._table = torch.empty(len(host) + sum(map(len, blocks)), dtype=torch.int64, device=device)
        self._table[: len(host)].copy_(host, non_blocking=True)
        if blocks:
            torch.cat(blocks, out=self._table[len(host) :])

        # The arguments that all sections share. `call` is the last number.
        named = first.named
        named |= {unit_name: unit, "table": self._table, "sections": len(rows)}
        # The longest section decides the type of lengths.
        named[numel] = self._table if has_blocks else max(row[sections.NUMEL.value] for row in rows)
        if "ODD_ROW" in named:
            named["ODD_ROW"] = any(each.named["ODD_ROW"] for each in launches)
        given = list(named.values())
        self._numbers = given[count : count + len(first.numbers)]
        self._constants = tuple(given[count + len(first.numbers) :])
        flag = calls[0].arguments.get("nonfinite")
        self._flag = flag.tensor if isinstance(flag, View) else None
        self._flag_at = list(named).index("nonfinite") - count if "nonfinite" in named else 0

    @staticmethod
    def _base(tensor: Tensor, name: str | None, call: Call, tensors: Sequence[Tensor]) -> int | Tensor:
        """Return the index of the tensor that moves, or the tensor that stays."""
        view = None if name is None else call.arguments[name]
        return view.tensor if isinstance(view, View) else tensor

    def _places(
        self, launch: Launch, columns: dict[str, Any], names: dict[int, str], call: Call
    ) -> tuple[list[int], list[int]]:
        """Return the places of values, and those of messages in bytes, from the tensors of the launch."""
        values, messages = [0, 0], [0, 0]
        for index, tensor in enumerate(launch.tensors):
            parameter = launch.kernel.arg_names[index]
            column, base = columns[parameter], self._bases[index]
            view = call.arguments.get(names.get(id(tensor), ""))
            if isinstance(view, View):
                place = view.offset
            else:
                assert isinstance(base, Tensor)
                place = (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
            if column.value in (sections.VALUES.value, sections.OTHER_VALUES.value):
                # Without own values or a replica, the kernel gets another tensor that it does not read.
                is_read = names.get(id(tensor)) not in ("messages", None)
                values[column.value - sections.VALUES.value] = place if is_read else 0
            else:
                messages[column.value - sections.RECEIVED.value] = place
        return values, messages

    def run(self, call: int, tensors: Sequence[Tensor], launch: Callable[..., None]) -> None:
        """Launch for these tensors and the call with this number."""
        numbers = self._numbers
        numbers[-1] = call
        if self._flag is not None:
            numbers[self._flag_at] = tensors[self._flag].view(torch.uint8)
        bases = tuple(tensors[each] if isinstance(each, int) else each for each in self._bases)
        arguments = bases, tuple(numbers), self._constants
        launch(self.kernel, self.grid, *arguments, self.num_warps, registers=self.registers)


class PackedTable:
    """A table as launches for all sections of a kind."""

    def __init__(
        self,
        calls: Sequence[Call],
        tensors: Sequence[Tensor],
        *,
        join: Callable[[Sequence[Call], Sequence[Tensor]], list[Joined]],
        launch: Callable[..., None],
    ) -> None:
        self._calls, self._join, self._launch = calls, join, launch
        self._joined = join(calls, tensors)

    def run(self, call: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`sdp4bit.quantization.tables.Packed`."""
        for each in self._joined:
            each.run(call, tensors, self._launch)

    def check(self, call: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`sdp4bit.quantization.tables.Packed`."""
        due = [each.words for each in self._join(self._calls, tensors)]
        if [each.words for each in self._joined] != due:
            raise AssertionError(f"{self._calls[0].operator}: the packed table is stale")

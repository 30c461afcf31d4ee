"""Launches for all sections of a row, joined from those that the operators would make section by section.

`sections.py` has the device code that reads their tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdp4bit.kernels.triton import sections
from sdp4bit.quantization.checksum import signed64
from sdp4bit.quantization.layout import MESSAGE_ALIGNMENT
from sdp4bit.quantization.tables import Call, Recording, View

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
_IN_VALUES = (sections.VALUES.value, sections.OTHER_VALUES.value)
"""The columns in units of UNIT values; other places are in units of 16 bytes."""
_STRIDES = {
    "destination_stride": sections.STRIDE,
    "part_stride": sections.OTHER_STRIDE,
    "row_stride": sections.STRIDE,
    "piece_stride": sections.STRIDE,
}
"""The columns of numbers in units of UNIT values."""
_KEYS = {
    "rounding": (sections.ROUNDING_KEY.value, "first_block", "row_blocks"),
    "dither": (sections.DITHER_KEY.value, "first_block_in", "row_blocks_in"),
}
"""By argument, the first column of a key, and the numbers before its source."""


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


recording = Recording[Launch]()


class Joined:
    """A launch for several sections; the tensors that move are passed to each run."""

    def __init__(
        self,
        launches: Sequence[tuple[Launch, Call, dict[str, Any]]],
        tensors: Sequence[Tensor],
        *,
        programs_of: Callable[[int, int, int, int, torch.device], int],
    ) -> None:
        """Join launches.

        Args:
            launches: with their calls, which `quantization.tables.launches` returns together, and with the
                arguments of these, which have views of the tensors.
            programs_of: the programs for this many tiles and rows, warps and registers.
        """
        first, first_call, _ = launches[0]
        self.kernel, self.num_warps, device = first.kernel, first.num_warps, first.tensors[-1].device
        # Rows with an odd number of blocks may use more.
        self.registers = max(each.registers for each, *_ in launches)
        names = {id(value): name for *_, arguments in launches for name, value in arguments.items()}
        self._bases = [self._base(each, names.get(id(each)), first_call, tensors) for each in first.tensors]
        named = first.named
        unit_name, numel = ("OWN_UNIT", "own_numel") if "OWN_UNIT" in named else ("UNIT", "numel")
        has_blocks = isinstance(named[numel], Tensor)
        places = [self._places(each, names, call) for each, call, _ in launches]
        units = [each.named[unit_name] for each, *_ in launches]
        unit = math.gcd(*units, *(row.get(column, 0) for row in places for column in _IN_VALUES))

        # One row per section, with the programs that share its tiles.
        _, parts, destinations = first.grid
        total, rows = sum(each.grid[0] for each, *_ in launches), parts * destinations
        per_program = -(-total // programs_of(total, rows, self.num_warps, self.registers, device))
        self.words, blocks, at, longest = list[int](), list[Tensor](), 0, 0
        for (each, call, _), in_row, own_unit in zip(launches, places, units, strict=True):
            row, given = [0] * sections.WIDTH.value, each.named
            row[sections.FIRST_PROGRAM], row[sections.PROGRAMS] = at, -(-each.grid[0] // per_program)
            at += row[sections.PROGRAMS]
            if has_blocks:
                length = len(launches) * sections.WIDTH.value + sum(map(len, blocks))
                blocks.append(given[numel])
            else:
                length = given[numel] * own_unit // unit
                longest = max(longest, length)
            row[sections.NUMEL.value], row[sections.BLOCKS.value] = length, given["blocks"]
            for column, place in in_row.items():
                row[column] = place // (unit if column in _IN_VALUES else MESSAGE_ALIGNMENT)
            for name, stride in _STRIDES.items():
                row[stride.value] += given.get(name, 0) * own_unit // unit
            for name, (column, *numbers) in _KEYS.items():
                if (key := call.arguments.get(name)) is not None:
                    source = map(signed64, key.source)
                    row[column : column + 6] = [*(given.get(each, 0) for each in numbers), *source]
            self.words += row
        self.grid = (at, parts, destinations)
        host = torch.tensor(self.words, dtype=torch.int64, pin_memory=device.type == "cuda")
        table = torch.empty(len(host) + sum(map(len, blocks)), dtype=torch.int64, device=device)
        table[: len(host)].copy_(host, non_blocking=True)
        if blocks:
            torch.cat(blocks, out=table[len(host) :])

        # The arguments that all sections share. `call` is the last number.
        named |= {unit_name: unit, "table": table, "sections": len(launches)}
        # The longest section decides the type of lengths.
        named[numel] = table if has_blocks else longest
        if "ODD_ROW" in named:
            named["ODD_ROW"] = any(each.named["ODD_ROW"] for each, *_ in launches)
        count, end = len(first.tensors), len(first.tensors) + len(first.numbers)
        self._numbers = list(named.values())[count:end]
        self._constants = tuple(named.values())[end:]
        flag = first_call.arguments.get("nonfinite")
        self._flag = flag.tensor if isinstance(flag, View) else None
        self._flag_at = list(named).index("nonfinite") - count if "nonfinite" in named else 0

    @staticmethod
    def _base(tensor: Tensor, name: str | None, call: Call, tensors: Sequence[Tensor]) -> int | Tensor:
        """Return the index of the tensor that moves, or the tensor that stays."""
        view = None if name is None else call.arguments[name]
        return view.tensor if isinstance(view, View) else tensor

    def _places(self, launch: Launch, names: dict[int, str], call: Call) -> dict[int, int]:
        """Return the places of values, and those of messages in bytes, by their columns."""
        places, columns = {}, _PLACES[launch.kernel.__name__]
        for tensor, base, parameter in zip(
            launch.tensors, self._bases, launch.kernel.arg_names, strict=False
        ):
            name, column = names.get(id(tensor), "messages"), columns[parameter].value
            # Without own values or a replica, the kernel gets another tensor that it does not read.
            if column in _IN_VALUES and name == "messages":
                continue
            view = call.arguments.get(name)
            if isinstance(view, View):
                places[column] = view.offset
            else:
                assert isinstance(base, Tensor)
                places[column] = (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
        return places

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

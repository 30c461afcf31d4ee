"""Times of the Triton kernels with other launch settings, as shares of a copy.

    python -m benchmarks.gpu_tuning results/gpu/h200/tuning.json

Programs, warps, tiles and registers are varied one by one, and some together. `--device cpu` tries the
program without a GPU, in Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

EVERY_TILE = 1 << 20
"""So many waves that each program has one tile."""
_MOST_OF_A_THREAD = 255
"""Registers that a GPU can give to a thread."""
_RUNS, _CALLS = 7, 5  # on a GPU


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Launch settings, relative to the back end's own."""

    waves: int
    warps: int = 1  # times as many
    tile: int = 1  # times as large
    registers: int = 0  # more

    @property
    def name(self) -> str:
        more = f"{abs(self.registers)} registers {'more' if self.registers > 0 else 'fewer'}"
        if self.registers == _MOST_OF_A_THREAD:
            more = f"{self.registers} registers"
        changes = [
            f"{self.warps} x the warps" * (self.warps > 1),
            f"{self.tile} x the tile" * (self.tile > 1),
            more * bool(self.registers),
        ]
        waves = f"{self.waves} wave{'s' * (self.waves > 1)}"
        programs = "a program per tile" if self.waves == EVERY_TILE else waves
        return ", ".join([*filter(None, changes), programs])


SETTINGS = [
    *(Settings(waves=waves) for waves in (1, 2, 8, EVERY_TILE)),
    *(Settings(waves=waves, warps=2) for waves in (1, EVERY_TILE)),
    Settings(waves=8, warps=4),
    *(Settings(waves=waves, tile=4) for waves in (1, 8)),
    Settings(waves=1, registers=32),
    Settings(waves=8, registers=_MOST_OF_A_THREAD),
    Settings(waves=8, registers=-32),
]


@contextmanager
def launched_with(settings: Settings) -> Iterator[None]:
    """Launch the kernels with these settings; kernels compiled with others are forgotten."""
    # Not at the top: Triton reads TRITON_INTERPRET when it is imported.
    from sdp4bit.kernels.triton import backend
    from sdp4bit.kernels.triton import launch as launch_module

    warps, tile = backend._warps, backend._tile
    registers = {
        name: min(_MOST_OF_A_THREAD, getattr(backend, name) + settings.registers)
        for name in ("_REGISTERS", "_MORE_REGISTERS", "_MOST_REGISTERS")
    }
    with (
        patch.multiple(backend, _WAVES=settings.waves, **registers),
        patch.object(backend, "_warps", lambda *shape: settings.warps * warps(*shape)),
        patch.object(backend, "_tile", lambda layout, threads: tile(layout, settings.tile * threads)),
        patch.dict(launch_module._known, clear=True),
    ):
        yield


def shares_of_copy(cases: dict[str, Any], copy_seconds: float, device: str) -> list[int]:
    """Return the bandwidth of each operator in percent of the copy's."""
    from benchmarks.operator_cases import COPY

    bandwidth = cases[COPY].nbytes / copy_seconds
    found = []
    for name, case in cases.items():
        if name != COPY:
            case.run()  # compiles
            found.append(round(100 * case.nbytes / seconds_of(case, device) / bandwidth))
    return found


def seconds_of(case: Any, device: str) -> float:
    """Return the median time of a call; on a CPU that of one."""
    from benchmarks.operator_cases import measure_once

    runs, calls = (_RUNS, _CALLS) if device == "cuda" else (1, 1)
    return statistics.median(measure_once(case.run, calls, device) for _ in range(runs))


def tune(elements: int, device: str, settings: list[Settings] = SETTINGS) -> dict[str, Any]:
    """Return the shares of a copy for all settings, as a table."""
    from benchmarks.operator_cases import COPY, make_cases
    from sdp4bit.quantization import ops

    with ops.use_backend("triton"):
        cases = make_cases(elements, device)
        copy_seconds = seconds_of(cases[COPY], device)
        rows: list[list[str | int]] = []
        for each in settings:
            with launched_with(each):
                rows.append([each.name, *shares_of_copy(cases, copy_seconds, device)])
            print(*rows[-1], sep="  ", flush=True)
    note = (
        f"Shares in % of the bandwidth of a copy, {elements:,} fp32 values, 4 bits, medians of {_RUNS}; "
        "other launch settings"
    )
    return {"note": note, "columns": ["settings", *(name for name in cases if name != COPY)], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_tuning", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, help="file to write")
    parser.add_argument("--elements", type=int, default=1 << 27, help="values of a row")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.kernels import describe_machine

    machine = describe_machine()
    if arguments.device == "cuda" and machine["gpu"] is None:
        parser.error("torch sees no GPU here; --device cpu tries the program without one")
    machine["command"] = shlex.join(["python", "-m", "benchmarks.gpu_tuning", *sys.argv[1:]])
    found = tune(arguments.elements, arguments.device)
    arguments.json.write_text(json.dumps({**found, "machine": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()

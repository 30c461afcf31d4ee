"""Time the five operators on each back end relative to a copy of the same tensor.

    python -m benchmarks.kernels --elements 16384,16777216 --backends numba --threads 1,2 --json kernels.json

Before timing, the output bytes are compared with the reference. Every round runs a copy and every operator of
every back end and width, so that disturbances affect all of them; results are medians over the rounds. A
share is an operator's bandwidth (bytes read and written / seconds) relative to that of `Tensor.copy_` of as
many fp32 values. `elements` are the values of the tensor that an operator reads or writes, or for
dequantize_reduce_quantize those of all messages together. `--bits 4,3.5,3` are the widths of weight
differences and of the inter-node hop. `hadamard_quantize` is also timed without the transform. The ratio of
the two is taken in each round.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.operator_cases import COPY, FROM_BF16, NO_TRANSFORM, Case, make_cases, measure_once
from sdp4bit.quantization import ops

CHECKED_ELEMENTS = 1 << 18
DEVICES = {"reference": "cpu", "numba": "cpu", "triton": "cuda"}
DEFAULT_ELEMENTS = [1 << power for power in range(14, 29, 2)]
"""64 KB to 1 GB of fp32 values."""
REFERENCE_ELEMENTS = 1 << 24
"""The reference needs about 100 bytes of memory per element, and seconds beyond this size."""
MEASURED_SECONDS = 2e-4
PRICE = "seconds_with_over_without_transform"
"""Field of a row of `TRANSFORMS`: the ratio, paired by rounds."""
TRANSFORMS = ("hadamard_quantize", FROM_BF16)
"""Timed with and without the transform."""
SAME_FOR_ALL_WIDTHS = (COPY, *TRANSFORMS, *(op + NO_TRANSFORM for op in TRANSFORMS))
"""Independent of `--bits`, because the first hop has 8 bits."""


def reason_to_skip(backend: str) -> str | None:
    """Return why a back end cannot run here, or None."""
    if backend != "reference" and importlib.util.find_spec(backend) is None:
        return f"{backend} is not installed"
    if DEVICES[backend] == "cuda" and not torch.cuda.is_available():
        return "there is no GPU"
    return None


def check_bytes(backend: str, elements: int, bits: float) -> None:
    """Exit unless every operator writes the bytes of the reference."""
    outputs: list[dict[str, torch.Tensor]] = []
    for name in ("reference", backend):
        with ops.use_backend(name):  # type: ignore[arg-type]
            cases = make_cases(elements, DEVICES[name], bits=bits)
            for case in cases.values():
                case.run()
            outputs.append({op: case.output.cpu() for op, case in cases.items()})
    for op, expected in outputs[0].items():
        if not torch.equal(expected, outputs[1][op]):
            sys.exit(
                f"{backend}: {op} differs from the reference at {elements} elements of {bits} bits; "
                "nothing was timed"
            )


def measure(
    backends: list[str], elements: int, threads: int | None, rounds: int, budget: float, widths: list[float]
) -> list[dict[str, Any]]:
    """Time all operators of one device; stop timing each after `budget` seconds."""
    device = DEVICES[backends[0]]
    runs: dict[tuple[str, str, int], tuple[Case, int]] = {}
    for backend, bits in itertools.product(backends, widths):
        with ops.use_backend(backend):  # type: ignore[arg-type]
            for op, case in make_cases(elements, device, bits=bits).items():
                is_repeated = op in SAME_FOR_ALL_WIDTHS and bits != widths[0]
                if is_repeated or (op == COPY and backend != backends[0]):
                    continue
                case.run()
                seconds = measure_once(case.run, 1, device)
                runs[backend, op, bits] = case, max(1, int(MEASURED_SECONDS / max(seconds, 1e-7)))
    samples: dict[tuple[str, str, int], list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, (case, repetitions) in runs.items():
            if sum(samples[key]) * repetitions <= budget:
                with ops.use_backend(key[0]):  # type: ignore[arg-type]
                    samples[key].append(measure_once(case.run, repetitions, device))
    rates = {key: case.nbytes / statistics.median(samples[key]) for key, (case, _) in runs.items()}
    return [
        {
            "op": op,
            "backend": "torch" if op == COPY else backend,
            "bits": None if op in SAME_FOR_ALL_WIDTHS else bits,
            "elements": elements,
            "threads": threads,
            "seconds": statistics.median(samples[backend, op, bits]),
            "share_of_copy": rates[backend, op, bits] / rates[backends[0], COPY, widths[0]],
            **(
                {PRICE: ratio_of(samples[backend, op, bits], samples[backend, op + NO_TRANSFORM, bits])}
                if op in TRANSFORMS
                else {}
            ),
        }
        for backend, op, bits in runs
    ]


def ratio_of(seconds: list[float], others: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum of seconds / others in each round that timed both."""
    # An operator that has used up its budget is in no later round.
    ratios = [mine / other for mine, other in zip(seconds, others, strict=False)]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "rounds": len(ratios),
    }


def describe_machine() -> dict[str, Any]:
    """Return hardware, versions, commit, date and command."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # Only as a fallback, because platform.processor starts `uname`.
    processor = names[0] if names else platform.processor() or platform.machine()
    versions = {"python": platform.python_version()}
    for package in ("torch", "numba", "triton", "sdp4bit"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": processor,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]]),
    }


def _commit() -> str:
    """Return the commit; of a copied tree without .git "unknown", so that measurements are kept."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            row["op"],
            row["backend"],
            "" if row["bits"] is None else str(row["bits"]),
            f"{row['elements']:,}",
            "" if row["threads"] is None else str(row["threads"]),
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['share_of_copy']:.0%}",
        )
        for row in rows
    ]
    titles = ("operator", "back end", "bits", "elements", "threads", "microseconds", "share of copy")
    table = Table()
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for row in rows:
        if price := row.get(PRICE):
            print(
                f"{row['op']}, {row['backend']}, {row['elements']:,} elements: {price['ratio']:.2f} times "
                f"the seconds without the transform ({price['lowest']:.2f} to {price['highest']:.2f}, "
                f"{price['rounds']} rounds)"
            )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.replace("_", "").split(",")]


def widths(text: str) -> list[float]:
    return [float(part) if "." in part else int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=numbers, help="sizes, such as 16384,16777216; up to 2**28 is 1 GB")
    parser.add_argument("--backends", default="numba,triton", help="of reference, numba, triton")
    parser.add_argument("--bits", type=widths, default=[4], help="widths, such as 4,3.5,3,2; 8 as well")
    parser.add_argument("--threads", type=numbers, default=[1, torch.get_num_threads()], help="on the CPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for one operator of one size")
    parser.add_argument("--json", type=Path, help="file for machine and rows")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    backends = []
    for backend in arguments.backends.split(","):
        if backend not in DEVICES:
            sys.exit(f"unknown back end {backend!r}: use {', '.join(DEVICES)}")
        reason = reason_to_skip(backend)
        if reason is None:
            backends.append(backend)
        else:
            print(f"skipped {backend}: {reason}")
    if not backends:
        sys.exit("no back end can run here")
    sizes = arguments.elements or DEFAULT_ELEMENTS
    for backend, bits in itertools.product(backends, arguments.bits):
        if backend != "reference":
            check_bytes(backend, min(max(sizes), CHECKED_ELEMENTS), bits)
    rows = []
    for device in ("cpu", "cuda"):
        threads = sorted(set(arguments.threads)) if device == "cpu" else [None]
        for count, elements in itertools.product(threads, sizes):
            measured = [b for b in backends if DEVICES[b] == device]
            if "reference" in measured and elements > REFERENCE_ELEMENTS:
                print(f"skipped reference at {elements:,} elements: measured up to {REFERENCE_ELEMENTS:,}")
                measured.remove("reference")
            if count is not None:
                torch.set_num_threads(count)
            if measured:
                rows += measure(measured, elements, count, arguments.rounds, arguments.budget, arguments.bits)
    # Before anything else can fail.
    machine = describe_machine()
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()

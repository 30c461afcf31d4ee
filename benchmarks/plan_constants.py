"""Constants of the planner that were measured, from results/, with their sources.

`python -m benchmarks.tables` writes them into sdp4bit_lab/plan/measured.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SMALL_MODEL = "results/gpu/h100/extra/small-model-2x1.json"
"""Two ranks with so little arithmetic and so few bytes that the host is the limit."""
HOST_TIME = "results/host_time.json"
KERNELS, COPIED_BYTES, H200_BANDWIDTH = "results/gpu/h200/kernels.json", 8, 4.8e12
"""Times of the operators, the bytes that a copy of a value in fp32 moves, and the data sheet's rate."""
CPU_KERNELS = "results/kernels/zen4-1.json"
_MEMORY_BOUND = {
    "subtract_quantize": 4,
    "dequantize_add": 4,
    "hadamard_quantize": None,
    "dequantize_reduce_hadamard, dithered": 4,
}
"""Operators of the default settings that memory bounds, and their bits. Arithmetic bounds the fifth, which
requantizes."""


def _read(root: Path, name: str) -> Any:
    return json.loads((root / name).read_text(encoding="utf-8"))


def host_constants(root: Path) -> dict[str, Any]:
    """Return the host's seconds per group: plain, added by the code that ran on the GPU, and added today.

    The share of merged blocks is the time of groups of several blocks over that of a group per block.
    """
    result = _read(root, SMALL_MODEL)
    groups = result["workload"]["layers"] + 1  # each block, and the rest
    # The fastest round: slower ones were disturbed by other work on the machine, up to 8 times.
    fastest = {row["strategy"]: row["fastest"] for row in result["rows"]}
    then = (fastest["sdp4bit"] - fastest["fsdp2"]) / groups
    rows = _read(root, HOST_TIME)
    scale, medians = added_since(rows), rows[-1]["medians"]
    machine = result["machine"]
    return {
        "plain_seconds": fastest["fsdp2"] / groups,
        "added_seconds": then * scale,
        "added_seconds_then": then,
        "scale": scale,
        "merged_blocks": rows[-1]["merged"],
        "merged_share": medians["sdp4bit, merged"] / medians["sdp4bit"],
        "machine": f"a virtual machine with {machine['cores']} cores and one {machine['gpu']}",
        "source": f"{SMALL_MODEL} (commit {machine['commit'][:7]}); scale: {HOST_TIME}",
    }


def added_since(rows: list[dict[str, Any]]) -> float:
    """Return the time that the library adds now over that at the first commit, relative to plain FSDP2.

    Commits of one layout were measured on one machine. The last commit of a layout is the first of the next.
    """
    shares: dict[str, list[float]] = {}
    for row in rows:
        share = row["added"] / row["medians"]["plain FSDP2"]
        shares.setdefault(row["layout"], []).append(share)
    return math.prod(of[-1] / of[0] for of in shares.values())


def kernel_constants(root: Path) -> dict[str, Any]:
    """Return the share of a GPU's memory bandwidth that the operators reach if memory bounds them."""
    rows = _read(root, KERNELS)["rows"]
    largest = max(row["elements"] for row in rows)
    of = {(row["op"], row["bits"]): row for row in rows if row["elements"] == largest}
    copy = COPIED_BYTES * largest / of["copy", None]["seconds"] / H200_BANDWIDTH
    shares = [of[each]["share_of_copy"] for each in _MEMORY_BOUND.items()]
    # They follow each other, so their times add up: the harmonic mean.
    return {"memory_share": copy * len(shares) / sum(1 / share for share in shares), "source": KERNELS}


def kernel_rate_of_cpus(root: Path) -> float:
    """Return the bytes per second that the default's operators move on the emulated cluster's CPUs."""
    rows = _read(root, CPU_KERNELS)["rows"]
    of = {(row["op"], row["bits"]): row for row in rows}
    copy = of["copy", None]
    shares = [of[each]["share_of_copy"] for each in _MEMORY_BOUND.items()]
    rate = COPIED_BYTES * copy["elements"] / copy["seconds"]
    return float(rate * len(shares) / sum(1 / share for share in shares))


def constants(root: Path) -> dict[str, Any]:
    """Return the content of sdp4bit_lab/plan/measured.json."""
    return {
        "note": "Written by `python -m benchmarks.tables` from results/.",
        "host": host_constants(root),
        "kernels": kernel_constants(root),
    }


def constants_text(root: Path) -> str:
    return json.dumps(constants(root), indent=2) + "\n"

"""Where the time of a training step goes, on the host and on a GPU, from a trace of PyTorch's profiler.

    python -m benchmarks.step_profile results/gpu/NAME/traces/sdp4bit.json.gz

prints the device's part of a trace that `benchmarks.cluster --profile NAMES --traces FOLDER` has kept. A step
lasts until all ranks have finished it. It is divided without overlap into times in which some kernel other
than NCCL's runs, only kernels of NCCL run, no kernel runs while the host issues the step, or none after that.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Spans = list[tuple[float, float]]

STEP, WAIT = "a training step", "a wait for ranks and device"
"""Names of the two ranges of a step: the host issues it, and the host waits for its end."""
OUTSIDE = "Python outside of operators"
_PARTS = {
    "matrix products and attention": r"aten::(mm|addmm|bmm)$|attention",
    "system calls of transfers": r"^c10d::",
    "waiting for transfers": r"^wait$",
    "waiting for ranks and device": rf"^{WAIT}$",
    "operators of sdp4bit": r"sdp4bit::(subtract_quantize|hadamard_quantize|dequantize_\w+)$",
    "optimizer": r"adamw|^Optimizer",
    "copies": r"aten::(copy_|cat|fill_)$",
    "other operators": r"^aten::",
}
_PARTS_OF_CUDA = {
    "waiting for ranks and device": rf"^{WAIT}$|Synchronize",
    "launches": r"^cuda[A-Z]|^cu[A-Z]",
}
"""Parts of a step, by the names of the profiler's events; the first that matches counts."""
_KERNELS = {
    "NCCL": r"nccl",
    "quantizers": r"quantize_kernel|reduce_hadamard_kernel|reduce_pieces_kernel|checksum_kernel",
    "matrix products and attention": r"gemm|cutlass|nvjet|flash|fmha|xmma|splitK",
    "optimizer": r"[Aa]dam",
    "copies": r"[Mm]emcpy|[Mm]emset|copy|[Cc]at|split|fill",
    "other kernels": "",
}
"""Kinds of kernels by their names; the first that matches counts."""
_OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_PARTITION = {
    "computing": "kernels other than NCCL's",
    "only_nccl": "only NCCL",
    "idle_while_issuing": "no kernel, the host issues the step",
    "idle_after": "no kernel, after that",
}


def read_trace(path: Path) -> list[Event]:
    """Return the events with a duration of a trace in Chrome's format."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(data)["traceEvents"] if event.get("ph") == "X"]


def host_parts(averages: Iterable[Any], seconds: Sequence[float], *, is_cuda: bool) -> dict[str, float]:
    """Return the milliseconds of a step on the host by its parts.

    Args:
        averages: the profiler's events by name.
        seconds: of the steps that were profiled.
    """
    names = {**_PARTS, **_PARTS_OF_CUDA} if is_cuda else _PARTS
    spent = dict.fromkeys([*names, OUTSIDE], 0.0)
    for event in averages:
        part = next((part for part, pattern in names.items() if re.search(pattern, event.key)), OUTSIDE)
        spent[part] += event.self_cpu_time_total / 1e3 / len(seconds)
    # Events overlap only with their own children, so the rest of the step is outside all of them.
    spent[OUTSIDE] += 1e3 * statistics.fmean(seconds) - sum(spent.values())
    return spent


def hooks_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the parameter groups of a step, and the host's microseconds per group in FSDP2's ranges."""
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    steps = sum(event["name"] == STEP for event in ranges)
    spent: dict[str, float] = {}
    groups = 0
    for event in ranges:
        name = event["name"].partition(" (")[0]
        groups += name == "FSDP::post_backward_reduce"
        if name.startswith(("FSDP::", "sdp4bit::")):
            spent[name] = spent.get(name, 0.0) + event["dur"]
    per_group = {name: round(total / groups, 1) for name, total in sorted(spent.items())} if groups else {}
    return {"groups": groups // steps, "host_us_per_group": per_group}


def device_times(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the milliseconds of a step by the device's state and by kinds of kernels; None without kernels.

    `launch_to_start_us` is the median time from a launch to the start of its kernel. It is short if the
    device waits for the host, and long if the device has a queue.
    """
    kernels = [event for event in events if event.get("cat") in _OF_DEVICE]
    if not kernels:
        return None
    named = {name: [_span(e) for e in events if _is_range(e, name)] for name in (STEP, WAIT)}
    steps = len(named[STEP])
    issuing, whole = sorted(named[STEP]), []
    for (start, _), (_, end) in zip(issuing, sorted(named[WAIT]), strict=True):
        whole.append((start, end))
    everything = _union(map(_span, kernels))
    others = _union(_span(event) for event in kernels if _kind(event) != "NCCL")
    busy, computing = _overlap(everything, whole), _overlap(others, whole)
    idle_while_issuing = _length(issuing) - _overlap(everything, issuing)
    found = {
        "computing": computing,
        "only_nccl": busy - computing,
        "idle_while_issuing": idle_while_issuing,
        "idle_after": _length(whole) - busy - idle_while_issuing,
    }
    kinds = dict.fromkeys(_KERNELS, 0.0)
    for event in kernels:
        kinds[_kind(event)] += event["dur"]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    delays = [
        event["ts"] - launched[number]
        for event in kernels
        if (number := event.get("args", {}).get("correlation")) in launched
    ]
    return {
        "ms": {name: total / 1e3 / steps for name, total in found.items()},
        "step_ms": _length(whole) / 1e3 / steps,
        "issued_ms": _length(issuing) / 1e3 / steps,
        "kernels_ms": {kind: total / 1e3 / steps for kind, total in kinds.items()},
        "kernels": len(kernels) / steps,
        "launch_to_start_us": statistics.median(delays) if delays else None,
    }


def sentence(device: Mapping[str, Any]) -> str:
    """Return the device's part as one sentence."""
    parts = ", ".join(f"{ms:.1f} are {_PARTITION[name]}" for name, ms in device["ms"].items())
    return f"of {device['step_ms']:.1f} ms, {parts}"


def table_rows(profiles: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of a table of profiles: milliseconds per step of rank 0."""
    titles = ["strategy", "groups", "step", "host issues", "step, profiled", *_PARTITION.values()]
    titles += [*_KERNELS, "kernels", "launch to start, us"]
    rows = []
    for each in profiles:
        device = each["device"]
        row = [f"`{each['strategy']}`", str(each["groups"] or "")]
        row += [f"{1e3 * statistics.median(each[name]):.1f}" for name in ("seconds", "issued")]
        if device is None:
            row += [""] * (len(titles) - len(row))
        else:
            times = [device["step_ms"], *device["ms"].values(), *device["kernels_ms"].values()]
            delay = device["launch_to_start_us"]
            row += [*(f"{ms:.1f}" for ms in times), f"{device['kernels']:.0f}"]
            row.append("" if delay is None else f"{delay:.0f}")
        rows.append(row)
    return titles, rows


def _is_range(event: Event, name: str) -> bool:
    return event.get("cat") == "user_annotation" and event["name"] == name


def _span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _kind(event: Event) -> str:
    return next(kind for kind, pattern in _KERNELS.items() if re.search(pattern, event["name"]))


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the times that are in some span, sorted and without overlap."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def _overlap(one: Spans, other: Spans) -> float:
    """Return the length of the times that are in both, each without overlap."""
    return _length(one) + _length(other) - _length(_union([*one, *other]))


def main() -> None:
    for name in sys.argv[1:]:
        device = device_times(read_trace(Path(name)))
        print(f"{name}: {'no kernels' if device is None else sentence(device)}")


if __name__ == "__main__":
    main()

"""Check that the kernels of this device write the reference's bytes, and time them."""

from __future__ import annotations

import statistics
import time
from typing import Any

from sdp4bit.quantization import ops
from sdp4bit_lab.selftest.check import CheckFailedError, CheckSkippedError, Context
from sdp4bit_lab.selftest.kernel_cases import all_cases
from sdp4bit_lab.selftest.kernel_speed import COPY, make_cases, measure_once

_SMALL, _LARGE = 1 << 14, {"cpu": 1 << 20, "cuda": 1 << 26}
_CALLS, _ROUNDS = 200, 7


def check_kernels(context: Context) -> dict[str, Any]:
    """Return the number of calls, each equal to the reference, and the speed of the operators."""
    backend, kind = ops.backend_name(context.device.type), context.device.type
    if backend == "reference":
        raise CheckSkippedError("there are no kernels but the reference itself")
    # Before the comparison, because the first call compiles.
    speed = _first_calls(context)
    compared = 0
    for case in all_cases():
        difference = case.difference("auto", context.device)
        if difference is not None:
            message = f"{backend}: {case.operator.__name__} differs from the reference: {difference}"
            raise CheckFailedError(message, case=str(case))
        compared += 1
    context.say(f"      {compared} calls of {backend} kernels equal the reference, byte for byte")
    for name, share in _shares_of_a_copy(kind).items():
        speed[name]["share_of_copy"] = share
        context.say(
            f"      {name:<37}{speed[name]['compile_seconds']:6.2f} s to compile"
            f"{speed[name]['microseconds_per_call']:8.1f} us a call{100 * share:7.0f} % of a copy"
        )
    return {"backend": backend, "compared": compared, "operators": speed}


def _first_calls(context: Context) -> dict[str, dict[str, float]]:
    """Return the extra seconds of each operator's first call, and the host's microseconds of later ones."""
    speed = {}
    for name, case in make_cases(_SMALL, context.device.type).items():
        if name == COPY:
            continue
        seconds = []
        for calls in (1, 1, _CALLS):
            context.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                case.run()
            # Later calls are timed on the host alone: a GPU's work is only queued.
            if calls == 1:
                context.synchronize()
            seconds.append(time.perf_counter() - start)
        speed[name] = {
            "compile_seconds": max(0.0, seconds[0] - seconds[1]),
            "microseconds_per_call": 1e6 * seconds[2] / _CALLS,
        }
    return speed


def _shares_of_a_copy(kind: str) -> dict[str, float]:
    """Return bytes per second of each operator over those of a copy: medians of interleaved rounds."""
    cases = make_cases(_LARGE[kind], kind)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_ROUNDS + 1):
        for name, case in cases.items():
            seconds[name].append(measure_once(case.run, 1, kind))
    # The first round is a warm-up.
    rates = {name: case.nbytes / statistics.median(seconds[name][1:]) for name, case in cases.items()}
    return {name: rate / rates[COPY] for name, rate in rates.items() if name != COPY}

"""Do the kernels of this device write the reference's bytes, and how fast are they?"""

from __future__ import annotations

import statistics
import time
from typing import Any

from sdp4bit.quantization import ops
from sdp4bit_lab.selftest.check import CheckFailedError, CheckSkippedError, Context
from sdp4bit_lab.selftest.kernel_cases import all_cases
from sdp4bit_lab.selftest.kernel_speed import COPY, make_cases, measure_once

_LAUNCHES = 200
_SMALL, _LARGE = 1 << 14, {"cpu": 1 << 20, "cuda": 1 << 26}
_ROUNDS = 7


def check_kernels(context: Context) -> dict[str, Any]:
    """Return what compiling and calling the kernels takes, once every call has equalled the reference."""
    backend = ops.backend_name(context.device.type)
    if backend == "reference":
        raise CheckSkippedError("there are no kernels but the reference itself")
    speed = _first_calls(context)
    compared = 0
    for case in all_cases():
        difference = case.difference("auto", context.device)
        if difference is not None:
            raise CheckFailedError(
                f"{backend}: {case.operator.__name__} differs from the reference: {difference}",
                case=str(case),
            )
        compared += 1
    context.say(f"      {compared} calls of {backend} kernels equal the reference, byte for byte")
    shares = _shares_of_a_copy(context)
    for name, numbers in speed.items():
        numbers["share_of_copy"] = shares[name]
        context.say(
            f"      {name:<28}{numbers['compile_seconds']:6.2f} s to compile"
            f"{numbers['microseconds_per_call']:8.1f} us a call{100 * shares[name]:7.0f} % of a copy"
        )
    return {"backend": backend, "compared": compared, "operators": speed}


def _first_calls(context: Context) -> dict[str, dict[str, float]]:
    """Return what the first call of each operator takes beyond the second, and the host's time per call."""
    found = {}
    for name, case in make_cases(_SMALL, context.device.type).items():
        if name == COPY:
            continue
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            case.run()
            context.synchronize()
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            case.run()
        launched = time.perf_counter() - start
        context.synchronize()
        found[name] = {
            "compile_seconds": max(0.0, seconds[0] - seconds[1]),
            # On a CPU the work itself is in it; a GPU's is queued.
            "microseconds_per_call": 1e6 * launched / _LAUNCHES,
        }
    return found


def _shares_of_a_copy(context: Context) -> dict[str, float]:
    """Return bytes per second of each operator over those of a copy, medians of interleaved rounds."""
    kind = context.device.type
    cases = make_cases(_LARGE[kind], kind)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_ROUNDS + 1):
        for name, case in cases.items():
            seconds[name].append(measure_once(case.run, 1, kind))
    rates = {name: case.nbytes / statistics.median(seconds[name][1:]) for name, case in cases.items()}
    return {name: rate / rates[COPY] for name, rate in rates.items()}

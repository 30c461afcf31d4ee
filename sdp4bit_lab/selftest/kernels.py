"""Check that the kernels of this device produce the reference's bytes."""

from __future__ import annotations

import itertools
from typing import Any

from sdp4bit.quantization import ops
from sdp4bit_lab.common.progress import phase
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.selftest.cases import all_cases, difference, quick_cases
from sdp4bit_lab.selftest.check import CheckFailedError, CheckSkippedError, Context


def check_kernels(context: Context) -> dict[str, Any]:
    """Return the number of calls compared with the reference."""
    backend, compared = ops.backend_name(context.device.type), 0
    if backend == "reference":
        raise CheckSkippedError("only the reference back end is available")
    # Ranks that share a device compare a part of the calls each.
    first, step = (context.ranks.rank, context.ranks.world_size) if context.config.share_gpu else (0, 1)
    cases = list(itertools.islice(quick_cases() if context.config.quick else all_cases(), first, None, step))
    for case in cases:
        phase("comparing calls of kernels", total=len(cases), done=compared)
        found = difference(case.operator, case.first, backend="auto", device=context.device, **case.named)
        if found is not None:
            message = f"{backend}: {case.operator.__name__} differs from the reference: {found}"
            raise CheckFailedError(message, case=str(case))
        compared += 1
    compared = (
        sum(gather_over_ranks(compared, what="compared calls")) if context.config.share_gpu else compared
    )
    context.say(f"      {compared} calls of {backend} kernels equal the reference, byte for byte")
    return {"backend": backend, "compared": compared}

"""What quantization cost one bucket of Megatron-Core, as squares on the device."""

from __future__ import annotations

from torch import Tensor

from sdp4bit.collectives.weight_replica import Span
from sdp4bit.engines.measures import (
    sample_of,
    sample_spans,
    squares_row,
    weight_squares,
)
from sdp4bit.engines.megatron.comm import BucketComm, BucketWeights


def bucket_squares(comm: BucketComm, *, sample_numel: int | None) -> Tensor:
    """Return the squares of a bucket, fp64 [7]. Nothing is sent, and the host does not wait for the device.

    Args:
        sample_numel: size of the sample; the drift is then that which the next refresh will leave. None
            looks at the whole row, and at the drift as it is now.
    """
    numel = comm.bucket.row_numel
    weights = None
    if comm.weights is not None:
        replica = comm.weights.replica
        spans: list[Span] = [(0, numel)]
        if sample_numel is not None:
            spans = sample_spans(numel, sample_numel=sample_numel, unit=replica.group_size)
        main, held = _main_and_held(comm.weights, spans)
        weights = weight_squares(
            replica, main, row=main, held=held, exact=replica.bits is None, refreshed=sample_numel is not None
        )
        weights *= numel / main.numel()
    return squares_row(
        numel,
        reduction=None if comm.gradients is None else comm.gradients.quantized,
        gradient=None if comm.gradients is None else comm.gradients.sample,
        weights=weights,
        device=comm.bucket.weights.device,
    )


def _main_and_held(weights: BucketWeights, spans: list[Span]) -> tuple[Tensor, Tensor]:
    """Return stretches of the main weights, fp32, and of the replica; equal where they are sent exactly."""
    main, held = weights.sample_main(spans), sample_of(weights.own_row, spans)
    if weights.exact_numel:
        at = 0
        for start, end in spans:
            for first, last in weights.own_exact_spans:
                a, b = at + max(start, first) - start, at + min(end, last) - start
                if a < b:
                    main[a:b] = held[a:b]
            at += end - start
    return main, held

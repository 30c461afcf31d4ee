"""The table that tells what each bucket of a Megatron-Core model sends, and why where it is not quantized."""

from __future__ import annotations

from collections.abc import Sequence

from sdp4bit.config import SDP4BitConfig
from sdp4bit.engines.explain import (
    Row,
    describe_gradients,
    describe_ranks,
    describe_weights,
    render,
    with_reason,
)
from sdp4bit.engines.megatron.comm import BucketComm


def explain_buckets(comms: Sequence[BucketComm], config: SDP4BitConfig) -> str:
    """Return the table as text, one line per bucket and a line of totals."""
    return render([_row(comm, config) for comm in comms])


def _row(comm: BucketComm, config: SDP4BitConfig) -> Row:
    weights, gradients = comm.weights_dense_because, comm.gradients_dense_because
    layout = comm.layout
    if layout is not None and not gradients:
        settings = config.gradients if comm.gradients is None else comm.gradients.quantized.config
        gradients = describe_gradients(settings, layout, comm.bucket.row_numel)
    if comm.weights is not None:
        weights = describe_weights(comm.weights.config, where="in the parameter buffer")
        exact = comm.weights.exact_numel
        weights += f", {exact:,} exact (equal under TP)" if exact else ""
    return Row(
        name=comm.bucket.name,
        row_numel=comm.bucket.row_numel,
        ranks=f"{len(comm.bucket.ranks)}" if layout is None else describe_ranks(layout),
        weights=with_reason(weights, comm.moved.get("weights")),
        gradients=with_reason(gradients, comm.moved.get("gradients")),
        sent=comm.traffic.last_step,
    )

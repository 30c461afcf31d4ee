"""What quantization cost one FSDP2 parameter group, as squares on the device."""

from __future__ import annotations

from torch import Tensor

from sdp4bit.collectives.weight_replica import Span
from sdp4bit.engines.fsdp2.group_comm import GroupComm
from sdp4bit.engines.measures import (
    sample_of,
    sample_spans,
    squares_row,
    weight_squares,
)


def group_squares(comm: GroupComm, *, sample_numel: int | None) -> Tensor:
    """Return the squares of a group, fp64 [7]. Nothing is sent, and the host does not wait for the device.

    Args:
        sample_numel: size of the sample; the drift is then that which the next refresh will leave. None
            looks at the whole row, and at the drift as it is now.
    """
    numel, device = comm.group.row_numel, comm.group.device
    weights = None
    replica = comm.replica
    # To finish a refresh takes all ranks of a node, which a sample is not worth.
    usable = replica is not None and (sample_numel is None or not replica.is_pending)
    if usable and replica is not None and replica.rows is not None:
        spans: list[Span] = [(0, numel)]
        if sample_numel is not None:
            spans = sample_spans(numel, sample_numel=sample_numel, unit=replica.group_size)
        main, held = comm.group.sample_main(spans), sample_of(replica.own_row, spans)
        weights = weight_squares(
            replica,
            main,
            row=main.to(held.dtype),
            held=held,
            exact=comm.resync_wanted or replica.bits is None,
            refreshed=sample_numel is not None,
        )
        weights *= numel / sum(end - start for start, end in spans)
    return squares_row(
        numel, reduction=comm.reduce_scatter, gradient=comm.gradient_sample, weights=weights, device=device
    )

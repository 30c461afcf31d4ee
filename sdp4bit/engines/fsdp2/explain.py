"""The table that tells what each FSDP2 parameter group sends, and why where it is not quantized."""

from __future__ import annotations

from sdp4bit.engines.explain import (
    Row,
    describe_gradients,
    describe_ranks,
    describe_weights,
    render,
    with_reason,
)
from sdp4bit.engines.fsdp2.comm_state import CommState
from sdp4bit.engines.fsdp2.group_comm import GroupComm


def explain_groups(state: CommState) -> str:
    """Return the table of an FSDP2 model as text, one line per group and a line of totals."""
    return render(
        [
            Row(
                name=comm.group.name,
                row_numel=comm.group.row_numel,
                ranks=describe_ranks(comm.layout),
                weights=with_reason(
                    comm.weights_dense_because or _fsdp_weights(comm), comm.moved.get("weights")
                ),
                gradients=_fsdp_gradients(comm),
                sent=state.last_traffic(comm),
            )
            for comm in state.groups
        ]
    )


def _fsdp_gradients(comm: GroupComm) -> str:
    if not any(segment.sharded.requires_grad for segment in comm.group.segments):
        return "none, all frozen"
    text = comm.gradients_dense_because
    if not text:
        assert comm.reduce_scatter is not None
        config = comm.reduce_scatter.config
        text = describe_gradients(config, comm.layout, comm.group.row_numel)
        if comm.group.row_numel >= config.min_numel:
            text += _copies(comm, min_numel=config.min_numel)
    return with_reason(text, comm.moved.get("gradients"))


def _fsdp_weights(comm: GroupComm) -> str:
    assert comm.replica is not None
    config = comm.replica.config
    text = describe_weights(config, where=f"{config.replica} replica")
    frozen = sum(not segment.sharded.requires_grad for segment in comm.group.segments)
    text += _copies(comm) if config.bits is not None else ""
    if frozen and config.bits is not None:
        text += f", {frozen} frozen not sent"
    return text + (f", {comm.full_refreshes} times in full precision" if comm.full_refreshes else "")


def _copies(comm: GroupComm, *, min_numel: int = 0) -> str:
    """Return how what tensor-parallel ranks hold alike travels in a group that also holds what they split."""
    parts = comm.group.parts
    if len(parts) == 1:
        return ""
    everywhere = len({ranks for part in parts for ranks in part[0].split_over})
    apart = dense = 0
    for part in parts:
        if len(part[0].split_over) < everywhere:
            short = sum(segment.end - segment.start for segment in part) < min_numel
            dense, apart = dense + len(part) * short, apart + len(part) * (not short)
    text = f", {apart} TP copies apart" if apart else ""
    return text + (f", {dense} TP copies in full precision" if dense else "")

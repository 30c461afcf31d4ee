"""Writing a checkpoint on all ranks, at once or in the background of the training that goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor

from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.pretrain.checkpoint.files import CheckpointError, Digest
from sdp4bit_lab.pretrain.checkpoint.folder import RunRecord, partial_folder, prepare, publish, step_folder
from sdp4bit_lab.pretrain.checkpoint.storage import CheckpointWriter, TensorSavePlanner, failure_of

T = TypeVar("T")

# What torch.save adds.
_BYTES_AROUND_A_TENSOR = 1300


def write_checkpoint(
    tensors: Mapping[str, Tensor],
    *,
    folder: Path,
    record: RunRecord,
    attach: Callable[[Path], None] | None = None,
    keep_last: int | None = None,
    group: dist.ProcessGroup,
) -> Path:
    """Return the complete checkpoint that the folder's `latest` names; called on all ranks of the group.

    1. Rank 0 makes a folder with a temporary name.
    2. All ranks write into it.
    3. Rank 0 describes it, gives it its name, and replaces `latest`.

    Args:
        attach: writes further files into a folder; called on rank 0.
        keep_last: older checkpoints than so many are deleted afterwards.
        group: over the CPU, with nothing else in flight on it while this runs.

    Raises:
        CheckpointError: on all ranks, if one of them failed. Older checkpoints and `latest` are untouched,
            and what was written is deleted.
    """
    step = record.progress.step
    working = partial_folder(folder, step=step)
    is_first = dist.get_rank(group) == 0

    def write() -> dict[str, Digest]:
        writer = CheckpointWriter(working, expected_bytes=_local_bytes(tensors))
        save_state(dict(tensors), storage_writer=writer, planner=TensorSavePlanner(), process_group=group)
        return writer.digests

    def describe(written: list[dict[str, Digest]]) -> None:
        digests = {name: digest for digests in written for name, digest in digests.items()}
        publish(folder, record=record, digests=digests, attach=attach, keep_last=keep_last)

    try:
        _together(lambda: prepare(folder, step=step) if is_first else None, group=group)
        written = _together(write, group=group)
        _together(lambda: describe(written) if is_first else None, group=group)
    except CheckpointError as error:
        if is_first:
            shutil.rmtree(working, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {step} was not saved: {error}. Older checkpoints in {folder} are as "
            "they were"
        ) from error
    return step_folder(folder, step=step)


def _together(work: Callable[[], T], *, group: dist.ProcessGroup) -> list[T]:
    """Return what `work` returned on each rank; CheckpointError on all of them if it failed on one."""
    result: T | None = None
    failure: str | None = None
    cause: BaseException | None = None
    try:
        result = work()
    except (Exception, CheckpointException) as error:  # the other ranks must not wait for this one
        cause = error
        failure = str(error if isinstance(error, CheckpointError) else failure_of(error))
    outcomes = gather_over_ranks((result, failure), what="outcome of writing a checkpoint", group=group)
    for _, message in outcomes:
        if message is not None:
            raise CheckpointError(message) from cause
    return [result for result, _ in outcomes]  # type: ignore[misc]


def _local_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return about how many bytes this rank writes."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in tensors.values())
    return sum(tensor.nbytes + _BYTES_AROUND_A_TENSOR for tensor in local)


def start_in_background(work: Callable[[], T]) -> Future[T]:
    """Return the outcome of work that goes on in a thread beside the caller."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised where it is waited for
            outcome.set_exception(error)

    # A process that fails does not wait for it: what is half-written then never gets a name.
    threading.Thread(target=run, name="sdp4bit-checkpoint", daemon=True).start()
    return outcome

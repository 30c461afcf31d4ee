"""A world of many ranks on one device, played by one process: every peer holds what this rank holds.

Copies stand for transfers. They run where NCCL's would: synchronous calls on the current stream,
asynchronous ones on a stream of the communicator. So the order of streams can be tested on a single GPU; the
sums are those of equal ranks, and mean nothing beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from sdp4bit_lab.common.ranks import Ranks

BACKEND = "sdp4bit-copies"
_ASYNCHRONOUS = SimpleNamespace(asyncOp=True)
"""Options of a call that is given none, as torch 2.9 calls a coalesced all-gather."""


_AnyWork: Any = dist._Work  # type: ignore[attr-defined]
_AnyGroup: Any = dist.ProcessGroup
"""Without types: the signatures of their methods differ between versions of torch."""


class _Work(_AnyWork):  # type: ignore[misc]
    """A transfer under way; as with NCCL, its tensors are kept until somebody waits."""

    def __init__(self, tensors: Sequence[Tensor], done: torch.cuda.Event | None) -> None:
        super().__init__()
        self._tensors, self._done = tensors, done

    def wait(self, timeout: Any = None) -> bool:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._done is None or self._done.query()


class LocalCopies(_AnyGroup):  # type: ignore[misc]
    """A communicator whose peers hold what this rank holds."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._stream: torch.cuda.Stream | None = None
        self._name: str | None = None

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        # torch asks once more when it has forgotten the group.
        return str(dist.distributed_c10d._world.pg_names.get(self, self._name))

    def _set_group_name(self, name: str) -> None:
        self._name = name
        super()._set_group_name(name)

    def _run(self, outputs: Sequence[Tensor], sources: Sequence[Tensor], options: Any) -> _Work:
        """Copy; a source is repeated over an output that is a multiple of it."""
        tensors = [*outputs, *sources]
        if not outputs[0].is_cuda:
            self._copy(outputs, sources)
            return _Work(tensors, None)
        stream = torch.cuda.current_stream()
        if options.asyncOp:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(stream)
            stream = self._stream
        with torch.cuda.stream(stream):
            self._copy(outputs, sources)
            done = torch.cuda.Event()
            done.record(stream)
        return _Work(tensors, done)

    @staticmethod
    def _copy(outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for output, source in zip(outputs, sources, strict=True):
                # An all-gather writes beside its own part, which may be the source.
                rows = output.view(-1, max(1, source.numel()))
                rows.copy_(source.reshape(1, -1).clone().expand_as(rows))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        return self._run([output], [input], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        own = input.view(self.size(), -1)[self.rank()]
        factor = 1 if opts.reduceOp.op == dist.ReduceOp.AVG else self.size()
        return self._run([output], [own if factor == 1 else own * factor], opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, opts: Any
    ) -> _Work:
        return self._run([output], [input.view(self.size(), -1)[self.rank()]], opts)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> _Work:
        sums = opts.reduceOp.op == dist.ReduceOp.SUM
        return self._run(tensors, [each * (self.size() if sums else 1) for each in tensors], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:
        return self._run(tensors, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> _Work:
        """The form of lists, which objects are gathered by."""
        return self._run(outputs[0], [inputs[0]] * len(outputs[0]), opts)

    def barrier(self, opts: Any) -> _Work:
        return _Work((), None)

    def _coalesced(self, run: Any, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> _Work:
        works: list[_Work] = [run(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return works[-1]

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = _ASYNCHRONOUS) -> _Work:
        return self._coalesced(self.all_gather_single, outputs, inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> _Work:
        return self._coalesced(self.reduce_scatter_single, outputs, inputs, opts)

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


@contextmanager
def simulated_world(ranks: Ranks, *, size: int) -> Iterator[Ranks]:
    """Let this process, which is alone, be rank 0 of such a world inside the block."""
    if (
        not hasattr(dist.Backend, BACKEND.upper().replace("-", "_"))
        and BACKEND not in dist.Backend.backend_list
    ):
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: LocalCopies(rank, size), devices=["cpu", "cuda"]
        )
    real = "nccl" if ranks.device.type == "cuda" else "gloo"
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, rank=0, world_size=size, store=HashStore())
    try:
        yield replace(ranks, rank=0, world_size=size, local_rank=0, local_world_size=size)
    finally:
        dist.destroy_process_group()
        dist.init_process_group(real, rank=0, world_size=1, store=HashStore())

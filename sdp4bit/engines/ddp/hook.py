"""A communication hook for DistributedDataParallel that averages gradients by a quantized all-reduce."""

# No `from __future__ import annotations`, because DDP compares a hook's annotations with its types.

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.errors import comm_error_context
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import TopologySpec, create_topologies
from sdp4bit.collectives.work import SideStream
from sdp4bit.config import GradientConfig
from sdp4bit.engines.agreement import ShardedRows, agree
from sdp4bit.observe.explain import ONE_NODE_GRADIENTS, ONE_RANK, describe_all_reduce, describe_ranks
from sdp4bit.quantization.random import check_numbers
from sdp4bit.traffic import TrafficCounter

FORMAT_VERSION = 1
_QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DDPCommState:
    """State of :func:`ddp_comm_hook` for one DistributedDataParallel model; a Stateful for checkpoints.

    All ranks get bit-identical gradients, so weights stay equal as with plain DDP. `no_sync()`, buckets of
    any size and rebuilt buckets are supported.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        topology: TopologySpec = "auto",
        config: GradientConfig | None = None,
        seed: int = 0,
    ) -> None:
        """Create the process groups; call it on all ranks of the job.

        Args:
            process_group: the model's, as `torch.distributed.new_group` returned it; None for the default
                group. Ranks outside of the group pass it too.
            topology: the ranks of each node: "auto" (by host name), ranks per node, or an (inter, intra)
                mesh.
            config: settings of the quantization; None uses the default.
            seed: seed of the rounding bits.

        Raises:
            ValueError: the topology or the settings are not supported; the same on every rank.
            TypeError: an argument has an unsupported type; the same on every rank.
            RuntimeError: torch.distributed is not initialized.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("sdp4bit.DDPCommState needs torch.distributed: call init_process_group first")
        self.config = GradientConfig() if config is None else config
        failure: Exception | None = None
        if not isinstance(self.config, GradientConfig):
            failure = TypeError(f"config={config!r} must be a GradientConfig, or None for the default")
        if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
            failure = ValueError(f"seed={seed!r} must be an integer of at least 0")
        self._group = process_group
        ranks: tuple[int, ...] = (dist.get_rank(),)
        if cast(object, process_group) is not dist.GroupMember.NON_GROUP_MEMBER:
            ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        rows = ShardedRows(name="the gradients", ranks=ranks, shard_numel=0, dtypes=())
        layouts = agree(
            [rows],
            settings={"config": self.config, "seed": seed},
            topology=topology,
            failure=failure,
            call="DDPCommState",
        ).shards
        check_numbers(buckets=1, ranks=len(ranks))
        self._layout = layouts[ranks]
        self._topology = create_topologies(list(layouts.values()), purpose="DDP")[ranks]
        self._seed = seed
        self._scratch = Scratch()
        self._traffic = TrafficCounter(self._layout)
        self._all_reduces: dict[int, QuantizedAllReduce] = {}
        self._buckets: dict[int, tuple[int, str]] = {}
        """Values and description of each bucket of the last backward."""
        self._streams: dict[torch.device, SideStream] = {}
        self._has_warned = False
        if ranks[1:] and not self.config.applies_to(nodes=self._layout.nodes):
            warnings.warn(
                "sdp4bit: all ranks are on one node, so gradients stay in full precision. To quantize them, "
                "use GradientConfig(inside_one_node=True)",
                stacklevel=2,
            )
        self.steps = 0
        """Backward passes whose gradients have been reduced."""

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Start averaging a bucket's gradients over all ranks; return a future of them."""
        index, values = bucket.index(), bucket.buffer()
        how = self._unquantized_reason(values)
        future = self._average_densely(values) if how else self._average_quantized(index, values)
        self._buckets[index] = (
            values.numel(),
            how or describe_all_reduce(self.config, self._layout, values.numel()),
        )
        if bucket.is_last():
            for old in [number for number in self._buckets if number > index]:
                del self._buckets[old]
            self.steps += 1
            self._traffic.end_step()
        return future

    def _unquantized_reason(self, values: Tensor) -> str:
        if self._layout.size == 1:
            return ONE_RANK
        if not self.config.applies_to(nodes=self._layout.nodes):
            return ONE_NODE_GRADIENTS
        if values.layout != torch.strided:
            return "full precision: sparse gradients"
        if self.steps < self.config.start_step:
            return f"full precision until step {self.config.start_step}"
        if values.dtype not in _QUANTIZED_DTYPES:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"sdp4bit: gradients in {values.dtype} are averaged in full precision: only fp32, bf16 "
                    "and fp16 are quantized",
                    stacklevel=2,
                )
            return f"full precision: {str(values.dtype).removeprefix('torch.')}"
        if values.numel() // self._layout.size < self.config.min_numel:
            return describe_all_reduce(self.config, self._layout, values.numel())
        return ""

    def _average_densely(self, values: Tensor) -> Future[Tensor]:
        if values.layout == torch.strided:
            values.mul_(1.0 / self._layout.size)
            # The bytes of a ring all-reduce.
            sent = round(2 * values.nbytes / self._layout.size)
        else:
            values.div_(self._layout.size)
            # The backend coalesces each rank's rows and gathers them.
            values = values.coalesce()
            sent = values.indices().nbytes + values.values().nbytes
        if self._layout.size > 1:
            self._traffic.count_plain(sent)
            self._traffic.count_ring(sent)
        with comm_error_context("full-precision gradient all-reduce of DDP", group=self._group):
            work: Any = dist.all_reduce(values, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    @torch.no_grad()
    def _average_quantized(self, index: int, values: Tensor) -> Future[Tensor]:
        all_reduce = self._all_reduces.get(index)
        if all_reduce is None:
            all_reduce = self._all_reduces[index] = QuantizedAllReduce(
                self._topology,
                config=self.config,
                seed=self._seed,
                ranks=range(self._layout.size),
                bucket=index,
                traffic=self._traffic,
                scratch=self._scratch,
                name=f"DDP's bucket {index}",
            )
        device, call = values.device, self.steps
        if device not in self._streams:
            self._streams[device] = SideStream(device)
        future: Future[Tensor] = Future(devices=None if device.type == "cpu" else [device])

        def average() -> None:
            # A backward pass reduces each bucket once, so (step, bucket) is unique.
            all_reduce(values, call=call, multiplier=1.0 / self._layout.size)
            # On a GPU, waiting for the future waits for the side stream, which is current here.
            future.set_result(values)

        self._streams[device].run(average)
        return future

    def stats(self) -> dict[str, Any]:
        """Return the bytes that this rank sent; cheap, never waits.

        Returns:
            "steps": backward passes whose gradients were reduced.
            "last_step", "total": bytes this rank sent inside its node ("intra_bytes") and to other nodes
            ("inter_bytes"), the padding in both, and the number of collectives.
            "compression_ratio": bytes of plain DDP over bytes sent in the last step, between nodes (inside
            the node if there is only one); None before the first step.
        """
        last = self._traffic.last_step
        return {
            "steps": self.steps,
            "last_step": last.as_dict(),
            "total": self._traffic.total.as_dict(),
            "compression_ratio": last.compression_ratio if self.steps else None,
        }

    def explain(self) -> str:
        """Return a line per bucket of the last backward with its quantization, or the reason for none."""
        ranks = f"ranks {describe_ranks(self._layout)}"
        if not self._buckets:
            return f"{ranks}; no gradients yet: register_comm_hook(state, sdp4bit.ddp_comm_hook)"
        lines = [
            f"bucket {index}: {numel:,} values, {how}"
            for index, (numel, how) in sorted(self._buckets.items())
        ]
        return "\n".join([ranks, *lines])

    def state_dict(self) -> dict[str, Any]:
        """Return the step counter of the rounding bits; the same on all ranks."""
        return {"format_version": FORMAT_VERSION, "steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; call it on all ranks.

        DDP rebuilds its buckets after the first backward of each process, unless
        `find_unused_parameters=True`. So the first backward of a resumed run uses other quantization groups
        than the uninterrupted run.

        Raises:
            ValueError: the argument is no state of this class; nothing is changed.
        """
        known = isinstance(state_dict, Mapping) and state_dict.get("format_version") == FORMAT_VERSION
        if not known or not isinstance(state_dict.get("steps"), int):
            raise ValueError(
                f"this is not the state of an sdp4bit.DDPCommState of format {FORMAT_VERSION}: {state_dict!r}"
            )
        self.steps = state_dict["steps"]


def ddp_comm_hook(state: DDPCommState, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients with quantized communication.

    Example::

        state = sdp4bit.DDPCommState()
        model.register_comm_hook(state, sdp4bit.ddp_comm_hook)

    Args:
        state: the state of the model.
        bucket: passed by DDP.

    Returns:
        A future of the bucket's gradients [n], averaged in place.
    """
    return state.average(bucket)

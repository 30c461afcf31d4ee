"""Communication of one bucket of Megatron-Core, and the state that all buckets of a model share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Range
from sdp4bit.collectives.topology import Topology
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import TelemetryConfig, WeightConfig
from sdp4bit.engines.audit import ReplicaCopy
from sdp4bit.engines.explain import describe_gradients
from sdp4bit.engines.group import GroupState, reduction_multiplier
from sdp4bit.engines.handle import ModelState
from sdp4bit.engines.measures import sample_of
from sdp4bit.engines.megatron.buckets import MegatronBucket
from sdp4bit.traffic import TrafficCounter


class BucketReplica(WeightReplica):
    """Moves a bucket's parameters, the replica that every rank holds, towards the main weights.

    The replica is Megatron's parameter buffer itself. Parameters that tensor parallelism holds in full on
    several ranks travel in full precision beside the differences: their neighbours in a row, and with them
    the scales, differ between those ranks, and rounding would drive the copies apart.
    """

    def __init__(
        self,
        bucket: MegatronBucket,
        topology: Topology,
        *,
        config: WeightConfig,
        scratch: Scratch,
        exact_ranges: Sequence[Sequence[Range]],
        traffic: TrafficCounter,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            exact_ranges: for every rank, the ranges of its row that travel in full precision.
        """
        config, name = replace(config, replica="full"), bucket.name
        super().__init__(topology, config=config, traffic=traffic, scratch=scratch, name=name)
        self._group = bucket
        self._exact = WeightReplica(
            topology,
            config=WeightConfig(bits=None, replica=config.replica),
            traffic=traffic,
            scratch=scratch,
            name=name,
        )
        self._exact_ranges = exact_ranges
        self._exact_numel = max((sum(b - a for a, b in ranges) for ranges in exact_ranges), default=0)

    @property
    def exact_numel(self) -> int:
        """Values per row that travel in full precision beside quantized ones."""
        return 0 if self.bits is None else self._exact_numel

    @property
    def own_exact_ranges(self) -> Sequence[Range]:
        """The ranges of this rank's row that travel in full precision."""
        return self._exact_ranges[self._topology.row] if self.exact_numel else []

    def sample(self, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
        """Return ranges of the main shard, fp32, and of the replica; equal where they are sent exactly."""
        main, replica = self._group.sample_main(ranges), sample_of(self.own_shard, ranges)
        at = 0
        for start, end in ranges:
            for first, last in self.own_exact_ranges:
                low, high = at + max(start, first) - start, at + min(end, last) - start
                if low < high:
                    main[low:high] = replica[low:high]
            at += end - start
        return main, replica

    @property
    def own_shard(self) -> Tensor:
        """[n], the replica of this rank's own shard."""
        n, row = self._group.shard_numel, self._topology.row
        return self._group.weights[row * n : (row + 1) * n]

    def main_shard(self) -> Tensor:
        """Return this rank's fp32 main weights [n], in a buffer that the next call overwrites."""
        nbytes = 4 * self._group.shard_numel
        row = self._scratch.messages("main row", 1, nbytes, device=self._group.weights.device)[0]
        values = row.view(torch.float32)
        self._group.read_main(values)
        return values

    def equalize(self) -> None:
        """Set every shard, on all ranks, to what the rank that owns it holds."""
        self._attach_rows()
        self.start_full_refresh(self.own_shard.clone())
        self.wait()

    def refresh(self) -> None:
        """Move the replica to the main weights, by quantized differences.

        Steps: 1. read the main weights;  2. take the exact ranges out of the difference;  3. exchange the
        quantized differences and add them;  4. gather the exact ranges.
        """
        row = self.main_shard()
        self._traffic.count_plain(self.own_shard.nbytes)
        self._attach_rows()
        exact = self._take_out_exact(row) if self.exact_numel else None
        self.start_quantized_refresh(row)
        self.wait()
        if exact is not None:
            self._gather_exact(exact)

    def refresh_fully(self) -> None:
        """Set the replica to the main weights of all ranks, rounded to the model's type."""
        self._attach_rows()
        self.start_full_refresh(self.main_shard().to(self.own_shard.dtype))
        self.wait()

    def _take_out_exact(self, row: Tensor) -> Tensor:
        """Return the exact ranges of the row; there, the row now differs from the replica by nothing."""
        sent = self.own_shard.new_zeros(self._exact_numel)
        for (start, end), at in _packed(self._exact_ranges[self._topology.row]):
            sent[at : at + end - start].copy_(row[start:end])
            row[start:end].copy_(self.own_shard[start:end])
        return sent

    def _gather_exact(self, sent: Tensor) -> None:
        self._exact.start_full_refresh(sent)
        self._exact.wait()
        received = self._exact.rows
        assert received is not None
        for rank, values in enumerate(received.view(-1, self._exact_numel)):
            first = rank * self._group.shard_numel
            for (start, end), at in _packed(self._exact_ranges[rank]):
                self._group.weights[first + start : first + end].copy_(values[at : at + end - start])

    def _attach_rows(self) -> None:
        # Looked up every time: Megatron may move its buffers.
        shape = (self._topology.nodes, self._topology.ranks_per_node, self._group.shard_numel)
        self.rows = self._group.weights.view(shape)


def _packed(ranges: Sequence[Range]) -> list[tuple[Range, int]]:
    """Return each range with its place when all are laid one behind the other."""
    result, at = [], 0
    for start, end in ranges:
        result.append(((start, end), at))
        at += end - start
    return result


class BucketState(GroupState):
    """Communication of one bucket."""

    group: MegatronBucket
    replica: BucketReplica | None

    is_changed = False
    """The main weights have moved since the last refresh."""
    is_staged = False
    """The second half of a reduction is issued with the first half of the next bucket's."""

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """See GroupState; at a step's boundary experts have no new weights yet."""
        if self.replica is None or (self.group.is_expert and not may_wait):
            return None
        return self.replica.sample(ranges)

    def copies(self) -> Sequence[ReplicaCopy]:
        """See GroupState."""
        if self.replica is None:
            return []
        copy = ReplicaCopy(
            name=self.group.name,
            rows=self.group.weights,
            layout=self.layout,
            process_group=self.group.process_group,
            is_full=True,
            traffic=self.weight_traffic,
        )
        return [copy]

    @property
    def replica_place(self) -> str:
        """See GroupState."""
        return "in the parameter buffer"

    def describe_gradients(self) -> str:
        """See GroupState."""
        if self.reduction is None or not self.is_staged:
            return super().describe_gradients()
        config = replace(self.reduction.config, pipeline_chunks=1)
        return describe_gradients(config, self.layout, self.group.shard_numel) + ", staged over buckets"

    def describe_weights(self) -> str:
        """See GroupState."""
        exact = 0 if self.replica is None else self.replica.exact_numel
        return super().describe_weights() + (f", {exact:,} exact (equal under TP)" if exact else "")

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce(self, output: Tensor, input: Tensor, op: object, *, sample_numel: int | None) -> None:
        """Reduce gradients to this rank's shard in two quantized levels.

        Args:
            output: [n]; may be a part of the input.
            input: [ranks * n].
            op: the reduction that Megatron asks for: a sum or a mean.
            sample_numel: how many values to keep as a sample; None keeps the last one.
        """
        assert self.reduction is not None
        self.reduction(output, input, **self._next_reduction(input, op, sample_numel))

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce_in_steps(
        self, output: Tensor, input: Tensor, op: object, *, sample_numel: int | None
    ) -> Iterator[None]:
        """Reduce gradients as `reduce` does; yields whenever a transfer is under way."""
        assert self.reduction is not None
        arguments = self._next_reduction(input, op, sample_numel)
        for each in self.reduction.slices(output, input, whole=True, **arguments):
            *steps, last = each.steps
            for step in steps:
                step()
                yield
            last()

    def _next_reduction(self, input: Tensor, op: object, sample_numel: int | None) -> dict[str, Any]:
        """Return the arguments of the next reduction, and count it."""
        assert self.reduction is not None
        name, process_group = self.group.name, self.group.process_group
        arguments = {
            "call": self.reductions,
            "multiplier": reduction_multiplier(op, process_group, name=name, engine="Megatron-Core"),
            "nonfinite": self.sample_gradient(input, sample_numel=sample_numel),
        }
        self.reductions += 1
        self.gradient_bits = self.reduction.bits
        return arguments

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Move the replica to the main weights, by quantized differences."""
        assert self.replica is not None
        self.is_changed = False
        self.replica.refresh()
        self.refreshes += 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh_fully(self) -> None:
        """Set the replica to the main weights, sent in full precision."""
        assert self.replica is not None
        self.is_changed = False
        self.replica.refresh_fully()
        self.count_full_refresh()


class MegatronModelState(ModelState):
    """State that the buckets of one attached model share; counts the steps of its optimizers."""

    groups: Sequence[BucketState]

    def __init__(
        self,
        groups: Sequence[BucketState],
        *,
        telemetry: TelemetryConfig | None,
        optimizers: int,
    ) -> None:
        """Count from 0.

        Args:
            optimizers: how many, stepping one after the other, make a step. If it is one, nothing of the step
                has been sent when the listeners are told: Megatron sends an optimizer's weights when it has
                stepped, or later.
        """
        super().__init__(groups, telemetry=telemetry)
        self._optimizers = optimizers
        self._stepped = 0

    def count(self, steps: int) -> None:
        """Note that one of the optimizers has done this many steps."""
        if steps > self.steps:
            self.steps, self._stepped = steps, 0
        self._stepped += 1
        if self._stepped == self._optimizers:
            self.measure_step()

"""Communication of one Megatron-Core bucket, and the state that all buckets of a model share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.samples import sample_of
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Range
from sdp4bit.collectives.topology import Topology
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.collectives.weights import Due, Weights
from sdp4bit.config import TelemetryConfig, WeightConfig
from sdp4bit.observe.stats import ModelState
from sdp4bit.traffic import TrafficCounter
from sdp4bit_megatron.buckets import MegatronBucket


class BucketReplica(WeightReplica):
    """A replica whose rows are Megatron's parameter buffer, which every rank holds.

    Parameters with copies on several tensor-parallel ranks are sent in full precision besides the
    differences. Their neighbors in a row, and therefore their scales, differ between these ranks, so rounding
    would make the copies drift apart.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        bucket: MegatronBucket,
        exact_ranges: Sequence[Sequence[Range]],
        config: WeightConfig,
        traffic: TrafficCounter,
        scratch: Scratch,
        name: str,
    ) -> None:
        """Create a replica; sends nothing.

        Args:
            exact_ranges: for every rank the ranges of its row to send in full precision.
        """
        config = replace(config, replica="full")
        super().__init__(topology, config=config, traffic=traffic, scratch=scratch, name=name)
        self._bucket = bucket
        self._exact = WeightReplica(
            topology,
            config=WeightConfig(bits=None, replica=config.replica),
            traffic=traffic,
            scratch=scratch,
            name=name,
        )
        self._is_partial = False  # while only the difference of a refresh has been applied
        self._exact_ranges = exact_ranges
        self._exact_numel = max((sum(b - a for a, b in ranges) for ranges in exact_ranges), default=0)

    @property
    def exact_numel(self) -> int:
        """Values per row that are sent in full precision besides quantized ones."""
        return 0 if self.bits is None else self._exact_numel

    @property
    def is_torn(self) -> bool:
        return self._is_partial or super().is_torn

    def sample(self, ranges: Sequence[Range]) -> tuple[Tensor, Tensor]:
        """Return ranges of the main shard, fp32, and of the replica; equal in exact ranges."""
        main, replica = self._bucket.sample_main(ranges), sample_of(self.own_shard, ranges)
        exact = self._exact_ranges[self._topology.row] if self.exact_numel else []
        at = 0
        for start, end in ranges:
            for first, last in exact:
                low, high = at + max(start, first) - start, at + min(end, last) - start
                if low < high:
                    main[low:high] = replica[low:high]
            at += end - start
        return main, replica

    @property
    def own_shard(self) -> Tensor:
        n, row = self._bucket.shard_numel, self._topology.row
        return self._bucket.weights[row * n : (row + 1) * n]

    def main_shard(self) -> Tensor:
        """Return this rank's fp32 main weights [n] in a buffer that the next call overwrites."""
        nbytes = 4 * self._bucket.shard_numel
        row = self._scratch.messages("main row", 1, nbytes, device=self._bucket.weights.device)[0]
        values = row.view(torch.float32)
        self._bucket.read_main(values)
        return values

    def start_quantized_refresh(
        self, row: Tensor, *, ranges: Sequence[Range] | None = None, as_gathered: Tensor | None = None
    ) -> None:
        """Send the difference and the exact ranges; waits."""
        self._traffic.count_plain(self.own_shard.nbytes)
        self.attach_rows()
        self._is_partial = True
        exact = self._take_out_exact(row) if self.exact_numel else None
        super().start_quantized_refresh(row, ranges=ranges, as_gathered=as_gathered)
        self.wait()
        if exact is not None:
            self._gather_exact(exact)
        self._is_partial = False

    def start_full_refresh(self, row: Tensor, *, ranges: Sequence[Range] | None = None) -> None:
        """Set the replica to the rows of all ranks; waits."""
        self.attach_rows()
        super().start_full_refresh(row, ranges=ranges)
        self.wait()
        self._is_partial = False

    def _take_out_exact(self, row: Tensor) -> Tensor:
        """Return the exact ranges of the row, and replace them in the row by the replica's values."""
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
            first = rank * self._bucket.shard_numel
            for (start, end), at in _packed(self._exact_ranges[rank]):
                self._bucket.weights[first + start : first + end].copy_(values[at : at + end - start])

    def attach_rows(self) -> None:
        """Look at the parameter buffer again, for every use, because Megatron may move it."""
        shape = (self._topology.nodes, self._topology.ranks_per_node, self._bucket.shard_numel)
        self.rows = self._bucket.weights.view(shape)


def _packed(ranges: Sequence[Range]) -> list[tuple[Range, int]]:
    """Return each range with its offset in their concatenation."""
    result, at = [], 0
    for start, end in ranges:
        result.append(((start, end), at))
        at += end - start
    return result


class BucketWeights(Weights):
    """Weights whose replica is Megatron's parameter buffer."""

    replica: BucketReplica | None


class BucketState(Group):
    """Communication of one bucket."""

    view: MegatronBucket
    weights: BucketWeights

    is_staged = False  # the second half of a reduction is issued with the first half of the next bucket's

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        # At the end of a step experts have no new weights yet.
        replica = self.weights.replica
        if replica is None or (self.view.is_expert and not may_wait):
            return None
        return replica.sample(ranges)

    def remarks(self) -> Remarks:
        exact = 0 if self.weights.replica is None else self.weights.replica.exact_numel
        return Remarks(
            place="in the parameter buffer",
            weights=[f"{exact:,} exact (equal under TP)"] if exact else [],
            staged="staged over buckets" if self.is_staged else "",
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Send the refresh that is due."""
        assert self.weights.replica is not None
        self.weights.refresh(self.weights.replica.main_shard())

    def refresh_in_full(self) -> None:
        """Send all rows in full precision."""
        self.weights.raise_to(Due.FULL)
        self.refresh()


class MegatronModelState(ModelState):
    """State that the buckets of one attached model share; counts the steps of its optimizers."""

    groups: Sequence[BucketState]

    def __init__(
        self, groups: Sequence[BucketState], *, telemetry: TelemetryConfig | None, optimizers: int
    ) -> None:
        """Create the state.

        Args:
            optimizers: number of optimizers whose steps make up one step. With a single one, listeners run
                before any weights of the step are sent.
        """
        super().__init__(groups, telemetry=telemetry)
        self._optimizers = optimizers
        self._stepped = 0

    def count(self, steps: int) -> None:
        """Record that one of the optimizers has taken this many steps."""
        if steps > self.steps:
            self.steps, self._stepped = steps, 0
        self._stepped += 1
        if self._stepped == self._optimizers:
            self.measure_step()

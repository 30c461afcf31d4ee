"""What one bucket sends: its replica of the weights, its reduction of gradients, and its counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import NodeLayout, Topology
from sdp4bit.collectives.weight_replica import Span, WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.engines.measures import GradientSample, sample_gradient
from sdp4bit.engines.megatron.buckets import MegatronBucket
from sdp4bit.quantization.random import BUCKET_BITS
from sdp4bit.traffic import TrafficCounter


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What the buckets of one data-parallel group share: who talks to whom, seed and message buffers."""

    topology: Topology
    seed: int
    scratch: Scratch


class BucketWeights:
    """Moves a bucket's parameters, the replica that every rank holds, towards the main weights.

    The replica is Megatron's parameter buffer itself. Parameters that tensor parallelism holds in full on
    several ranks travel in full precision beside the differences: their neighbours in a row, and with them
    the scales, differ between those ranks, and rounding would drive the copies apart.
    """

    def __init__(
        self,
        bucket: MegatronBucket,
        channel: Channel,
        *,
        config: WeightConfig,
        number: int,
        exact_spans: Sequence[Sequence[Span]],
        traffic: TrafficCounter,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            number: of the bucket, for the rounding bits.
            exact_spans: for every rank, the stretches of its row that travel in full precision.
        """
        topology = channel.topology
        config = replace(config, replica="full")
        options: dict[str, Any] = {
            "seed": channel.seed,
            "rank": topology.row,
            "bucket": number,
            "traffic": traffic,
            "scratch": channel.scratch,
            "name": bucket.name,
        }
        self.dirty = False
        """The main weights have moved since the last refresh."""
        self.refreshes = 0
        self._bucket = bucket
        self._topology = topology
        self._scratch = channel.scratch
        self._traffic = traffic
        self._quantized = WeightReplica(topology, config=config, **options)
        self._exact = WeightReplica(topology, config=replace(config, bits=None), **options)
        self._exact_spans = exact_spans
        self._exact_numel = max((sum(b - a for a, b in spans) for spans in exact_spans), default=0)

    @property
    def config(self) -> WeightConfig:
        """The settings of the next refresh."""
        return self._quantized.config

    def configure(self, config: WeightConfig) -> None:
        """The next refreshes are done with these settings; all ranks change them between the same two."""
        self._quantized.configure(replace(config, replica="full"))

    @property
    def exact_numel(self) -> int:
        """Values per row that travel in full precision beside quantized ones."""
        return 0 if self.config.bits is None else self._exact_numel

    @property
    def replica(self) -> WeightReplica:
        """What quantizes the differences; its rows are attached only while it refreshes."""
        return self._quantized

    @property
    def own_exact_spans(self) -> Sequence[Span]:
        """The stretches of this rank's row that travel in full precision."""
        return self._exact_spans[self._topology.row] if self.exact_numel else []

    def sample_main(self, spans: Sequence[Span]) -> Tensor:
        """Return these stretches of this rank's main weights, one behind the other, in fp32."""
        return self._bucket.sample_main(spans)

    @property
    def own_row(self) -> Tensor:
        """[n], the replica of this rank's own shard."""
        n, row = self._bucket.row_numel, self._topology.row
        return self._bucket.weights[row * n : (row + 1) * n]

    def main_row(self) -> Tensor:
        """Return this rank's fp32 main weights [n], in a buffer that the next call overwrites."""
        nbytes = 4 * self._bucket.row_numel
        row = self._scratch.messages("main row", 1, nbytes, device=self._bucket.weights.device)[0]
        values = row.view(torch.float32)
        self._bucket.read_main(values)
        return values

    def equalize(self) -> None:
        """All ranks hold, of every row, what the rank that owns it holds."""
        self._attach_rows(self._quantized)
        self._quantized.start_full_refresh(self.own_row.clone())
        self._quantized.settle()

    def refresh(self) -> None:
        """The replica has moved to the main weights, by quantized differences.

        Steps: 1. read the main weights;  2. take the exact stretches out of the difference;  3. exchange the
        quantized differences and add them;  4. gather the exact stretches.
        """
        self.dirty = False
        row = self.main_row()
        self._traffic.count_plain(self.own_row.nbytes)
        self._attach_rows(self._quantized)
        exact = self._take_out_exact(row) if self.exact_numel else None
        row = row if self.config.bits is not None else row.to(self.own_row.dtype)
        self._quantized.start_quantized_refresh(row, call=self.refreshes)
        self._quantized.settle()
        if exact is not None:
            self._gather_exact(exact)
        self.refreshes += 1

    def refresh_full(self) -> None:
        """The replica is the main weights of all ranks, rounded to the model's type."""
        self.dirty = False
        self._attach_rows(self._quantized)
        self._quantized.start_full_refresh(self.main_row().to(self.own_row.dtype))
        self._quantized.settle()

    def _take_out_exact(self, row: Tensor) -> Tensor:
        """Return the exact stretches of the row; there, the row now differs from the replica by nothing."""
        sent = self.own_row.new_zeros(self._exact_numel)
        for (start, end), at in _packed(self._exact_spans[self._topology.row]):
            sent[at : at + end - start].copy_(row[start:end])
            row[start:end].copy_(self.own_row[start:end])
        return sent

    def _gather_exact(self, sent: Tensor) -> None:
        self._exact.start_full_refresh(sent)
        self._exact.settle()
        received = self._exact.rows
        assert received is not None
        for rank, values in enumerate(received.view(-1, self._exact_numel)):
            first = rank * self._bucket.row_numel
            for (start, end), at in _packed(self._exact_spans[rank]):
                self._bucket.weights[first + start : first + end].copy_(values[at : at + end - start])

    def _attach_rows(self, replica: WeightReplica) -> None:
        # Looked up every time: Megatron may move its buffers.
        shape = (self._topology.nodes, self._topology.ranks_per_node, self._bucket.row_numel)
        replica.rows = self._bucket.weights.view(shape)


def _packed(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return each stretch with its place when all are laid one behind the other."""
    result, at = [], 0
    for start, end in spans:
        result.append(((start, end), at))
        at += end - start
    return result


class BucketGradients:
    """Reduces a bucket's gradients to each rank's row in two quantized levels."""

    def __init__(
        self,
        channel: Channel,
        *,
        config: GradientConfig,
        number: int,
        traffic: TrafficCounter,
        name: str,
    ) -> None:
        """Prepare; nothing is sent."""
        self.reductions = 0
        self.sample: GradientSample | None = None
        """Of the last reduction in a step that is to be measured."""
        self.quantized = QuantizedReduceScatter(
            channel.topology,
            config=config,
            seed=channel.seed,
            rank=channel.topology.row,
            bucket=number,
            traffic=traffic,
            scratch=channel.scratch,
            name=name,
        )
        self._size = channel.topology.size

    def reduce(self, output: Tensor, input: Tensor, op: Any, *, sample_numel: int | None = None) -> None:
        """`output` [n] holds this rank's row of the reduction; it may be a part of `input` [ranks * n].

        Args:
            sample_numel: how many values to keep as a sample; None keeps the last one.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"Megatron asks for the reduction {op}, which cannot be quantized")
        nonfinite = None
        if sample_numel is not None and input.numel():
            self.sample = sample_gradient(input, sample_numel=sample_numel, unit=self.quantized.group_unit)
            nonfinite = self.sample.nonfinite
        multiplier = 1.0 / self._size if op == dist.ReduceOp.AVG else 1.0
        self.quantized(output, input, call=self.reductions, multiplier=multiplier, nonfinite=nonfinite)
        self.reductions += 1


class BucketComm:
    """Communication of one bucket; what is None stays Megatron's own, for the reason given."""

    def __init__(self, bucket: MegatronBucket, *, layout: NodeLayout | None) -> None:
        self.bucket = bucket
        self.layout = layout
        """None where nothing is replaced and counted: expert buckets."""
        nodes, ranks = (layout.nodes, layout.ranks_per_node) if layout else (1, len(bucket.ranks))
        self.traffic = TrafficCounter(nodes=nodes, ranks_per_node=ranks)
        self.weights: BucketWeights | None = None
        self.weights_dense_because = ""
        self.gradients: BucketGradients | None = None
        self.gradient_bits: int | None = None
        """Of the last reduction, on its last hop; None for full precision."""
        self.gradients_dense_because = ""
        self.moved: dict[str, str] = {}
        """Why "weights" or "gradients" are not quantized as configured, where alerts have moved them."""

    def count_dense(self, row: Tensor) -> None:
        """Megatron gathers or reduces rows like this one in full precision."""
        self.traffic.count_plain(row.nbytes)
        self.traffic.count_ring(row.nbytes)


def weight_number(bucket: MegatronBucket, index: int) -> int:
    """Return the bucket's number for the rounding bits of its weights.

    A tied embedding has the same number on the first and the last pipeline stage, so that both, with equal
    main weights, round alike; it is no other bucket's.
    """
    tied = (1 << BUCKET_BITS) - 1
    return tied if bucket.has_tied_embedding else index + (index >= tied)

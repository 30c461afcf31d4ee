"""Communication of one parameter group, independent of the engine.

An engine supplies its groups (:class:`ParameterGroup`) and calls them when they communicate. A group's
quantizers, reasons for full precision, counters, measures and row of the `explain` table live here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.sections import FINE_BITS, Range, fine_bits
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import AlertConfig, GradientConfig, WeightConfig
from sdp4bit.observe.alerts import Watched, thresholds_of
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.observe.explain import Row, describe_gradients, describe_ranks, describe_weights
from sdp4bit.observe.measures import (
    GradientQuantizer,
    Measures,
    gradient_squares,
    sample_of,
    sample_ranges,
    squared_norms,
    weight_squares,
)
from sdp4bit.quantization.formats import Bits
from sdp4bit.traffic import Traffic, TrafficCounter

SMALL_EDIT = 1 / 128
"""Largest edit that is sent as a quantized difference, relative to the weights (Euclidean norms). 4 bits then
leave an error of about a quarter of it, the cost of rounding weights to bf16."""


def change_squares(main: Tensor, held: Tensor) -> Tensor:
    """Return |main - held|^2 and |main|^2 of weights and their replica, of one dtype; fp64 [2]."""
    change = main.float() - held.float()
    return torch.stack([change.square().sum(), main.float().square().sum()]).double()


def is_large_change(squares: Tensor) -> Tensor:
    """Return which changes are sent in full precision, bool [n]; NaN and infinity count as large.

    Args:
        squares: [n, 2], per group the sum of `change_squares` over its ranks.
    """
    change, size = squares.unbind(-1)
    return ~(change <= SMALL_EDIT**2 * size)


class ParameterGroup(Protocol):
    """Parameters that an engine gathers and reduces together."""

    @property
    def name(self) -> str:
        """Name in errors, tables and alerts; unique in a model."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that it is sharded over, in order."""

    @property
    def shard_numel(self) -> int:
        """Values of one rank's shard, padding included."""

    @property
    def device(self) -> torch.device:
        """Device of computation and communication."""

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        """Return a copy of these ranges of this rank's main shard, concatenated, in fp32."""


class GroupStats(Measures):
    """Statistics of one parameter group on this rank."""

    name: str
    intra_bytes: int
    """Bytes sent inside the node in the last step."""
    inter_bytes: int
    """Bytes sent to other nodes in the last step."""
    compression_ratio: float | None
    """Bytes between nodes without sdp4bit over those with it; None before the first step."""
    weight_bits: Bits
    """Current bits; None for full precision."""
    gradient_bits: Bits
    """Bits on the last hop of the last reduction; None for full precision."""


class GroupState(ABC):
    """Communication of one parameter group: replica, reduction, counters, measures.

    Without a replica or a reduction the engine's own collective runs, for the reason given.
    """

    def __init__(self, group: ParameterGroup, *, index: int, layout: NodeLayout) -> None:
        """Create a group without quantizers.

        Args:
            index: number of the group in its model, the same on all its ranks.
            layout: the nodes of its ranks.
        """
        self.group: ParameterGroup = group
        self.index = index
        self.layout = layout
        nodes, ranks = layout.nodes, layout.ranks_per_node
        self.weight_traffic = TrafficCounter(nodes=nodes, ranks_per_node=ranks)
        self.gradient_traffic = TrafficCounter(nodes=nodes, ranks_per_node=ranks)
        self.separate_parameters = False
        """Whether rows are cut into sections of complete parameters, see `SDP4BitConfig`."""
        self.replica: WeightReplica | None = None
        self.weights_unquantized_reason = ""
        self.reduction: QuantizedReduceScatter | None = None
        self.gradients_unquantized_reason = ""
        self.refreshes = 0  # quantized refreshes so far
        self.full_refreshes = 0
        """Full-precision refreshes after the first one, that is, after loads and edits of the weights."""
        self._was_refreshed = False
        self.reductions = 0  # quantized reductions so far; part of the counter for rounding bits
        self.gradient_bits: Bits = None  # see `GroupStats`
        self.gradient_sample: Tensor | None = None
        """Sample of the last reduction in a step that will be measured."""
        self.counts_nonfinite = False  # whether steps are measured
        self.nonfinite_groups: Tensor | None = None
        """Received non-finite quantization groups since the last measured step, fp64 on the device."""

    @property
    def counters(self) -> tuple[TrafficCounter, ...]:
        """The group's traffic counters, each for its own set of ranks."""
        return self.weight_traffic, self.gradient_traffic

    @property
    def gradient_quantizers(self) -> Sequence[GradientQuantizer]:
        """The quantized collectives of a gradient, in order, all with the same settings."""
        return [] if self.reduction is None else [self.reduction]

    @property
    def gradient_layouts(self) -> Sequence[NodeLayout]:
        """The node layout of each gradient quantizer."""
        return [] if self.reduction is None else [self.layout]

    @property
    def weight_config(self) -> WeightConfig | None:
        return None if self.replica is None else self.replica.config

    @property
    def gradient_config(self) -> GradientConfig | None:
        return self.gradient_quantizers[0].config if self.gradient_quantizers else None

    @property
    def refresh_is_full(self) -> bool:
        """Whether the next refresh will be in full precision although the group has a quantizer."""
        return False

    def watched(self, config: AlertConfig, *, process_group: ProcessGroup | None) -> Watched:
        """Return the group as alerts see it; `process_group` is None for a single process."""
        return Watched(
            name=self.group.name,
            row=self.index,
            ranks=self.group.ranks,
            process_group=process_group,
            device=self.group.device,
            traffic=self.gradient_traffic,
            thresholds=thresholds_of(
                config,
                gradients=self.gradient_config,
                layouts=self.gradient_layouts,
                weights=self.weight_config,
            ),
        )

    def count_full_refresh(self) -> None:
        """Count a full-precision refresh, except for the first."""
        self.full_refreshes += self._was_refreshed
        self._was_refreshed = True

    def sample_gradient(self, gradient: Tensor, *, sample_numel: int | None) -> Tensor | None:
        """Keep a sample of a gradient that is about to be reduced, and count its non-finite groups.

        Args:
            gradient: [n], this rank's input to the reduction.
            sample_numel: size of the sample; None in steps that are not measured.

        Returns:
            The counter of non-finite quantization groups for the reduction; None if steps are not measured.
        """
        quantizers = self.gradient_quantizers
        if not quantizers or not gradient.numel():
            return None
        if sample_numel is not None:
            unit = math.lcm(*(quantizer.group_unit for quantizer in quantizers))
            ranges = sample_ranges(gradient.numel(), sample_numel=sample_numel, unit=unit)
            self.gradient_sample = sample_of(gradient, ranges)
        elif not self.counts_nonfinite:
            return None
        # Counted in every step, so that no NaN between two samples is missed, and read with the next sample.
        if self.nonfinite_groups is None:
            self.nonfinite_groups = torch.zeros((), dtype=torch.float64, device=gradient.device)
        return self.nonfinite_groups

    def count_dense(
        self, traffic: TrafficCounter, shard_bytes: int, *, members: Sequence[int] | None = None
    ) -> None:
        """Count a full-precision collective of the engine over shards of this size.

        Args:
            members: indices in the layout of the ranks that take part; None for all.
        """
        traffic.count_plain(shard_bytes, members)
        traffic.count_ring(shard_bytes, members)

    @abstractmethod
    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """Return these ranges of this rank's main shard, in fp32, and of its replica.

        Args:
            may_wait: finish a pending refresh, which is a collective of the node.

        Returns:
            None if there is no replica, or if its refresh is pending and `may_wait` is False.
        """

    def squares(self, *, sample_numel: int | None) -> Tensor:
        """Return the current squared norms of the group, fp64 [SQUARES]; sends nothing.

        Args:
            sample_numel: size of the weight sample, taken at the end of a step. None measures the entire
                shard.
        """
        numel = self.group.shard_numel
        unknown = torch.full((), math.nan, dtype=torch.float64, device=self.group.device)
        gradient, weights, nonfinite = [unknown] * 2, [unknown] * 4, unknown
        if self.gradient_quantizers and self.gradient_sample is not None:
            gradient = gradient_squares(
                self.gradient_sample, quantizers=self.gradient_quantizers, numel=numel
            )
        if self.nonfinite_groups is not None:
            nonfinite = self.nonfinite_groups
        if self.replica is not None:
            ranges: list[Range] = [(0, numel)]
            if sample_numel is not None:
                ranges = sample_ranges(numel, sample_numel=sample_numel, unit=self.replica.config.group_size)
            sample = self.sample_weights(ranges, may_wait=sample_numel is None)
            if sample is not None:
                weights = weight_squares(
                    *sample,
                    replica=self.replica,
                    exact=self.refresh_is_full or self.replica.bits is None,
                    refreshed=sample_numel is not None or self.awaits_refresh(),
                    numel=numel,
                )
        return torch.stack([*gradient, *weights, nonfinite])

    @abstractmethod
    def awaits_refresh(self) -> bool:
        """Return whether this rank knows of a change of the weights that has not been sent."""

    def pending_squares(self) -> Tensor:
        """Return |main - replica|^2 and |main|^2 of the change not sent yet, fp64 [2]; sends nothing."""
        numel = self.group.shard_numel
        sample = None if self.replica is None else self.sample_weights([(0, numel)], may_wait=True)
        if sample is None or not sample[0].numel():
            return torch.full((2,), math.nan, dtype=torch.float64, device=self.group.device)
        main, held = sample
        return torch.stack(squared_norms(held.float() if self.awaits_refresh() else main, main, numel=numel))

    def copies(self) -> Sequence[ReplicaCopy]:
        """Return this rank's copies of weights that other ranks hold too, for the audit."""
        return []

    def stats(self, traffic: Traffic, measures: Measures) -> GroupStats:
        return {
            "name": self.group.name,
            "intra_bytes": round(traffic.intra_bytes),
            "inter_bytes": round(traffic.inter_bytes),
            "compression_ratio": traffic.compression_ratio,
            **measures,
            "weight_bits": None if self.replica is None else self.replica.bits,
            "gradient_bits": self.gradient_bits,
        }

    def explain(self, traffic: Traffic) -> Row:
        return Row(
            name=self.group.name,
            shard_numel=self.group.shard_numel,
            ranks=self.describe_ranks(),
            weights=self.describe_weights(),
            gradients=self.describe_gradients(),
            sent=traffic,
        )

    def describe_ranks(self) -> str:
        return describe_ranks(self.layout)

    def describe_weights(self) -> str:
        if self.replica is None:
            return self.weights_unquantized_reason
        text = describe_weights(self.replica.config, where=self.replica_place)
        text += self._describe_fine([self.replica.bits])
        return text + (f", full refreshes: {self.full_refreshes}" if self.full_refreshes else "")

    @property
    def replica_place(self) -> str:
        assert self.replica is not None
        return f"{self.replica.config.replica} replica"

    def describe_gradients(self) -> str:
        if self.reduction is None:
            return self.gradients_unquantized_reason
        config, numel = self.reduction.config, self.group.shard_numel
        text = describe_gradients(config, self.layout, numel)
        if numel < config.min_numel:
            return text
        return text + self._describe_fine([config.intra_bits, config.inter_bits])

    def _describe_fine(self, bits: Sequence[Bits]) -> str:
        has_fewer = any(fine_bits(each) != each for each in bits)
        return f", 1-D in {FINE_BITS} bits" if self.separate_parameters and has_fewer else ""


def reduction_multiplier(op: object, process_group: ProcessGroup, *, name: str, engine: str) -> float:
    """Return the factor that turns a sum over the ranks into the requested reduction.

    Raises:
        ValueError: the reduction is neither a sum nor a mean.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / process_group.size()
    raise ValueError(
        f"{name}: {engine} asks for the reduction {getattr(op, 'op', op)}, but only sums and means can be "
        "quantized. On FSDP2, keep set_force_sum_reduction_for_comms(True)"
    )

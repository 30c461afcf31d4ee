"""Communication of one parameter group, whatever engine trains it.

An engine tells what its groups are (:class:`ParameterGroup`) and when they communicate. What every group has
is here once: what quantizes it, the reasons where nothing does, counters, measures, its row of the table.
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
from sdp4bit.collectives.sections import FINE_BITS, Range
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.engines.audit import ReplicaCopy
from sdp4bit.engines.explain import Row, describe_gradients, describe_ranks, describe_weights
from sdp4bit.engines.measures import (
    GradientQuantizer,
    GradientSample,
    Measures,
    gradient_squares,
    sample_gradient,
    sample_ranges,
    weight_squares,
)
from sdp4bit.traffic import Traffic, TrafficCounter

SMALL_EDIT = 1 / 128
"""Changes up to this share of a group's weights (Euclidean norms) are sent as differences: 4 bits then leave
an error of about a quarter of it, which is what rounding weights to bf16 costs. Larger ones, such as other
weights altogether, are sent in full precision."""


def change_squares(main: Tensor, held: Tensor) -> Tensor:
    """Return |main - held|^2 and |main|^2 of weights and of what a replica holds of them, fp64 [2].

    Args:
        main: in the type of the replica.
    """
    change = main.float() - held.float()
    return torch.stack([change.square().sum(), main.float().square().sum()]).double()


def is_large_change(squares: Tensor) -> Tensor:
    """Return which changes are sent in full precision, bool [n]; those that are not finite are among them.

    Args:
        squares: [n, 2], of each group the sum of `change_squares` over its ranks.
    """
    change, size = squares.unbind(-1)
    return ~(change <= SMALL_EDIT**2 * size)


class ParameterGroup(Protocol):
    """Parameters that are gathered and reduced together, as an engine knows them."""

    @property
    def name(self) -> str:
        """What errors, tables and alerts call it; unique in a model."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that it is sharded over, in order."""
        ...

    @property
    def shard_numel(self) -> int:
        """Values of one rank's shard, padding included."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes and communicates."""
        ...

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        """Return these ranges of this rank's main shard, one behind the other, in fp32; a copy."""
        ...


class GroupStats(Measures):
    """What is reported of one parameter group on this rank."""

    name: str
    intra_bytes: int
    """Bytes sent inside the node in the last step."""
    inter_bytes: int
    """Bytes sent to other nodes in the last step."""
    compression_ratio: float
    """Bytes of the engine without sdp4bit over those sent, between nodes."""
    weight_bits: float | None
    """As they are now; None for full precision."""
    gradient_bits: float | None
    """Of the last reduction, on its last hop; None for full precision."""


class GroupState(ABC):
    """Communication of one parameter group: replica, reduction, counters, measures.

    What is None stays the engine's own, for the reason given. Engines extend it by what they remember of a
    group, and by `sample_weights`.
    """

    def __init__(self, group: ParameterGroup, *, index: int, layout: NodeLayout) -> None:
        """Prepare; nothing is quantized yet.

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
        """Rows are cut into sections of whole parameters, see `SDP4BitConfig`."""
        self.replica: WeightReplica | None = None
        self.weights_unquantized_reason = ""
        self.reduction: QuantizedReduceScatter | None = None
        self.gradients_unquantized_reason = ""
        self.refreshes = 0
        """Quantized refreshes so far, which number the rounding bits."""
        self.full_refreshes = 0
        """Refreshes in full precision, the first left out: after loads, and after edits of the weights."""
        self._was_refreshed = False
        self.reductions = 0
        """Quantized reductions so far, which number the rounding bits."""
        self.gradient_bits: float | None = None
        """Of the last reduction, on its last hop; None for full precision."""
        self.gradient_sample: GradientSample | None = None
        """Of the last reduction in a step that is to be measured."""

    @property
    def counters(self) -> tuple[TrafficCounter, ...]:
        """What counts the group's bytes, each on a grid of ranks of its own."""
        return self.weight_traffic, self.gradient_traffic

    @property
    def gradient_quantizers(self) -> Sequence[GradientQuantizer]:
        """What a gradient passes, in this order; all have the same settings."""
        return [] if self.reduction is None else [self.reduction]

    @property
    def gradient_layouts(self) -> Sequence[NodeLayout]:
        """The nodes of the ranks that each of these communicates over."""
        return [] if self.reduction is None else [self.layout]

    # -- settings --------------------------------------------------------------------------------------

    @property
    def weight_config(self) -> WeightConfig | None:
        """The settings of the next refreshes; None if they are not quantized."""
        return None if self.replica is None else self.replica.config

    @property
    def gradient_config(self) -> GradientConfig | None:
        """The settings of the next reductions; None if they are not quantized."""
        return self.gradient_quantizers[0].config if self.gradient_quantizers else None

    @property
    def refresh_is_full(self) -> bool:
        """Whether the next refresh is in full precision, for a reason of its own."""
        return False

    def count_full_refresh(self) -> None:
        """Count a refresh in full precision; the first is not among those that are reported."""
        self.full_refreshes += self._was_refreshed
        self._was_refreshed = True

    # -- gradients -------------------------------------------------------------------------------------

    def sample_gradient(self, gradient: Tensor, *, sample_numel: int | None) -> Tensor | None:
        """Keep a sample of a gradient that is about to be reduced, in a step that is to be measured.

        Args:
            gradient: [n], what this rank hands in.
            sample_numel: size of the sample; None keeps none.

        Returns:
            Where the reduction counts quantization groups that are not finite; None if no sample is kept.
        """
        quantizers = self.gradient_quantizers
        if not quantizers or sample_numel is None or not gradient.numel():
            return None
        unit = math.lcm(*(quantizer.group_unit for quantizer in quantizers))
        self.gradient_sample = sample_gradient(gradient, sample_numel=sample_numel, unit=unit)
        return self.gradient_sample.nonfinite

    def count_dense(
        self, traffic: TrafficCounter, shard_bytes: int, *, members: Sequence[int] | None = None
    ) -> None:
        """Count a collective of the engine's own, over shards of this size, in full precision.

        Args:
            members: places in the layout of the ranks that take part; None for all.
        """
        traffic.count_plain(shard_bytes, members)
        traffic.count_ring(shard_bytes, members)

    # -- measures --------------------------------------------------------------------------------------

    @abstractmethod
    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        """Return these ranges of this rank's main shard, in fp32, and of what the replica holds of it.

        Args:
            may_wait: finish a refresh that is under way, which takes all ranks of a node.

        Returns:
            None if there is no replica to compare with, or it must be waited for and may not.
        """

    def squares(self, *, sample_numel: int | None) -> Tensor:
        """Return the squared norms of the group as it is now, fp64 [SQUARES]; sends nothing.

        Args:
            sample_numel: size of the sample of weights; the drift is then that which the next refresh will
                leave. None takes the whole shard, and the present drift.
        """
        numel = self.group.shard_numel
        unknown = torch.full((), math.nan, dtype=torch.float64, device=self.group.device)
        gradient, weights, nonfinite = [unknown] * 2, [unknown] * 4, unknown
        if self.gradient_quantizers and self.gradient_sample is not None:
            gradient = gradient_squares(
                self.gradient_sample, quantizers=self.gradient_quantizers, numel=numel
            )
            nonfinite = self.gradient_sample.nonfinite
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
                    refreshed=sample_numel is not None,
                    numel=numel,
                )
        return torch.stack([*gradient, *weights, nonfinite])

    # -- what the handle tells -------------------------------------------------------------------------

    def copies(self) -> Sequence[ReplicaCopy]:
        """Return this rank's copies of weights that other ranks hold too, to be compared."""
        return []

    def stats(self, traffic: Traffic, measures: Measures) -> GroupStats:
        """Report the group's traffic of the last step and its last measures."""
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
        """Return the group's row of the table, with what it sent in the last step."""
        return Row(
            name=self.group.name,
            shard_numel=self.group.shard_numel,
            ranks=self.describe_ranks(),
            weights=self.describe_weights(),
            gradients=self.describe_gradients(),
            sent=traffic,
        )

    def describe_ranks(self) -> str:
        """Return over which ranks the group is spread, as text."""
        return describe_ranks(self.layout)

    def describe_weights(self) -> str:
        """Return how the weights travel, as text; engines add what they do besides."""
        if self.replica is None:
            return self.weights_unquantized_reason
        text = describe_weights(self.replica.config, where=self.replica_place)
        text += self._describe_fine([self.replica.bits])
        return text + (f", {self.full_refreshes} times in full precision" if self.full_refreshes else "")

    @property
    def replica_place(self) -> str:
        """Where the replica is, as text."""
        assert self.replica is not None
        return f"{self.replica.config.replica} replica"

    def describe_gradients(self) -> str:
        """Return how the gradients travel, as text; engines add what they do besides."""
        if self.reduction is None:
            return self.gradients_unquantized_reason
        config, numel = self.reduction.config, self.group.shard_numel
        text = describe_gradients(config, self.layout, numel)
        if numel < config.min_numel:
            return text
        return text + self._describe_fine([config.intra_bits, config.inter_bits])

    def _describe_fine(self, bits: Sequence[float | None]) -> str:
        """Return that norms and biases have more bits than these, if so."""
        has_fewer = any(each is not None and each < FINE_BITS for each in bits)
        return f", 1-D in {FINE_BITS} bits" if self.separate_parameters and has_fewer else ""


def reduction_multiplier(op: object, process_group: ProcessGroup, *, name: str, engine: str) -> float:
    """Return the factor that turns a sum over the ranks into the reduction that an engine asks for.

    Raises:
        ValueError: a reduction that is no sum and no mean.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / process_group.size()
    raise ValueError(
        f"{name}: {engine} asks for the reduction {getattr(op, 'op', op)}, which cannot be quantized: only "
        "sums and means can; on FSDP2, keep set_force_sum_reduction_for_comms(True)"
    )

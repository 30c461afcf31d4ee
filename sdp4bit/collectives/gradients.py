"""Gradients of a parameter group: the only place that decides how they are reduced, and that counts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.plan import AllReducePlan, ReducePlan
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.samples import sample_of, sample_ranges
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.topology import Nodes
from sdp4bit.config import GradientConfig
from sdp4bit.grad_mode import outside_autograd
from sdp4bit.quantization.formats import Bits
from sdp4bit.traffic import ALONE, TrafficCounter

T = TypeVar("T")
GradientQuantizer = QuantizedReduceScatter | QuantizedAllReduce  # a collective that quantizes gradients
_QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Progress(Protocol):
    """Steps of the model that a group belongs to."""

    steps: int
    """Steps that have ended."""

    @property
    def gradient_sample_numel(self) -> int | None:
        """Size of the sample to keep of gradients that are reduced now; None keeps none."""


class _Untrained:
    """Progress of a group that belongs to no model yet."""

    steps = 0
    gradient_sample_numel = None


class Gradients:
    """Reductions of the gradients of one parameter group, quantized or in full precision.

    Engines pass gradients and their own collective. This object decides which one runs (bits, `start_step`,
    `min_numel`), numbers the quantized reductions, counts bytes, and samples gradients in measured steps.
    """

    def __init__(self, name: str, *, nodes: Nodes, replicate: Nodes | None = None) -> None:
        """Create gradients that are reduced in full precision.

        Args:
            name: name of the parameter group, for errors.
            nodes: the nodes of the ranks that reduce.
            replicate: the nodes of the ranks with the same shard (HSDP, DDP); None without any.
        """
        self.name = name
        self._size = nodes.size
        self._replicas = 1 if replicate is None else replicate.size
        self.unquantized_reason: Unquantized | None = None
        """Why there is no reduction; if it is None when an engine is attached, one is created."""
        self.unquantized_sum_reason: Unquantized | None = None
        """Likewise, of the all-reduce over the replicate dimension."""
        self.unquantizable: Unquantized | None = None
        """Why the values of the last all-reduce cannot be quantized by any settings."""
        self.reduction: QuantizedReduceScatter | None = None
        # Sums gradients over the replicate dimension; without it the engine does, in full precision.
        self.all_reduce: QuantizedAllReduce | None = None
        self.plain_all_reduces = False
        """Whether the engine's own reduction is an all-reduce, which sends each row twice (DeepSpeed)."""
        self.traffic, self.all_reduce_traffic = TrafficCounter(nodes), TrafficCounter(replicate or ALONE)
        self.reductions = 0
        """Quantized reductions so far; part of the key of the rounding bits, and saved in checkpoints."""
        self.all_reduces = 0  # likewise, quantized all-reduces
        self.bits: Bits = None  # bits of the last reduction; None for full precision
        self.progress: Progress = _Untrained()
        self.counts_nonfinite = False  # whether steps are measured
        self.sample: Tensor | None = None
        """Sample of the last reduction in a step that will be measured."""
        self.nonfinite_groups: Tensor | None = None
        """Received non-finite quantization groups since the last measured step, fp64 on the device."""

    @property
    def quantizers(self) -> Sequence[GradientQuantizer]:
        """The quantized collectives of a gradient, in order, all with the same settings."""
        return [each for each in (self.reduction, self.all_reduce) if each is not None]

    @property
    def config(self) -> GradientConfig | None:
        """Settings of the quantized collectives; None without any."""
        return self.quantizers[0].config if self.quantizers else None

    @property
    def plan(self) -> ReducePlan | Unquantized:
        """The latest plan of a reduction, or the reason why there is none."""
        plan = None if self.reduction is None else self.reduction.plans.last
        return plan or self.unquantized_reason or Unquantized(Cause.NOT_PLANNED)

    @property
    def all_reduce_plan(self) -> AllReducePlan | Unquantized:
        """The latest plan of an all-reduce, or the reason why there is none."""
        plan = None if self.all_reduce is None else self.all_reduce.plans.last
        return plan or self.unquantized_sum_reason or Unquantized(Cause.NOT_PLANNED)

    def state(self) -> Mapping[str, int]:
        """Return the counters from which rounding bits are derived, for a checkpoint."""
        return {"reductions": self.reductions, "all_reduces": self.all_reduces}

    def load(self, state: Mapping[str, int]) -> None:
        """Continue from the counters of a state."""
        self.reductions, self.all_reduces = state["reductions"], state["all_reduces"]

    # -- the decision ------------------------------------------------------------------------------------

    def is_quantized(self, numel: int) -> bool:
        """Return whether a reduction to rows of this length would be quantized now."""
        return self._is_due(self.reduction, numel)

    def _is_due(self, quantizer: GradientQuantizer | None, numel: int) -> bool:
        if quantizer is None or not numel or quantizer.config.exempts(numel=numel, steps=self.progress.steps):
            return False
        return isinstance(quantizer, QuantizedReduceScatter) or quantizer.takes(numel)

    def sections(self, numel: int, *, unit: int) -> tuple[Section, ...] | None:
        """Return the sections of a row, () for a single one; None if only full precision is possible.

        Engines that know the parameters in a row override it.

        Args:
            unit: common multiple of the group sizes.
        """
        return ()

    # -- reductions --------------------------------------------------------------------------------------

    @outside_autograd
    def reduce(
        self, output: Tensor, input: Tensor, op: object, *, plain: Callable[[], T] | None = None
    ) -> T | None:
        """Reduce rows over the ranks to this rank's row.

        Args:
            output: [n]; may be this rank's row of the input.
            input: [ranks * n]. A quantized reduction does not change other ranks' rows.
            op: a sum, also one that is multiplied, or a mean of `torch.distributed.ReduceOp`.
            plain: the engine's own reduction; not needed if `is_quantized`.

        Returns:
            The result of `plain`; None after a quantized reduction.

        Raises:
            ValueError: a quantized reduction is neither a sum nor a mean.
        """
        self.bits, reduction, numel = None, self.reduction, output.numel()
        sections = None
        if reduction is not None and self.is_quantized(numel):
            sections = self.sections(numel, unit=reduction.group_unit)
        if reduction is None or sections is None:
            assert plain is not None, f"{self.name}: pass plain=..., the engine's own reduction"
            self.count_plain(output.nbytes)
            return plain()
        reduction(output, input, sections=sections, **self.next_reduction(input, op))
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce_in_steps(self, output: Tensor, input: Tensor, op: object) -> Iterator[None]:
        """Reduce like `reduce`, quantized and in one chunk; yield whenever a transfer is in flight."""
        reduction, numel = self.reduction, output.numel()
        assert reduction is not None
        sections = self.sections(numel, unit=reduction.group_unit) or ()
        options = self.next_reduction(input, op)
        for each in reduction.chunks(output, input, in_one_chunk=True, sections=sections, **options):
            yield from each

    def next_reduction(self, input: Tensor, op: object) -> dict[str, Any]:
        """Return the arguments `call`, `multiplier` and `nonfinite` of the next quantized reduction.

        Counts it and samples the input, for a caller that sends the messages itself.
        """
        assert self.reduction is not None
        # Counted first. One rank alone may see an exception below, and the numbers, from which all derive the
        # rounding bits, must stay equal.
        call = self.reductions
        self.reductions += 1
        multiplier = reduction_multiplier(op, ranks=self._size, name=self.name)
        nonfinite = self._sample(input)
        self.bits = self.reduction.bits
        if self.plain_all_reduces:  # the reduction itself counts the bytes of a plain reduce-scatter
            self.traffic.count_plain(input.nbytes // self._size)
        return {"call": call, "multiplier": multiplier, "nonfinite": nonfinite}

    @outside_autograd
    def reduce_in_place(
        self,
        values: Tensor,
        op: object,
        *,
        plain: Callable[[], T],
        run: Callable[[Callable[[], None]], T],
        number: int | None = None,
    ) -> T:
        """Replace values by their sum or mean over the replicate dimension.

        Args:
            values: [n]. Values that are sparse, or of a dtype that no quantizer takes, stay with `plain`.
            op: a sum, also one that is multiplied, or a mean of `torch.distributed.ReduceOp`.
            plain: the engine's own all-reduce.
            run: runs the quantized all-reduce that it gets, for instance on a side stream.
            number: number of this all-reduce, if the engine has one. DDP's buckets come and go, and use the
                number of the step. None counts all-reduces.

        Returns:
            The result of `plain` or of `run`.

        Raises:
            ValueError: a quantized all-reduce is neither a sum nor a mean.
        """
        self.bits, all_reduce, numel = None, self.all_reduce, values.numel()
        self.unquantizable = None
        if values.layout != torch.strided:
            self.unquantizable = Unquantized(Cause.SPARSE)
        elif values.dtype not in _QUANTIZED_DTYPES:
            self.unquantizable = Unquantized(Cause.DTYPE, str(values.dtype).removeprefix("torch."))
        sections = None
        if all_reduce is not None and self.unquantizable is None and self._is_due(all_reduce, numel):
            sections = self.sections(numel, unit=all_reduce.group_unit)
        if all_reduce is None or sections is None:
            row_bytes = 2 * numel * values.element_size() / self._replicas
            if values.layout != torch.strided:  # the backend gathers the rows of each rank
                row_bytes = values.indices().nbytes + values.values().nbytes
            self.count_plain_all_reduce(round(row_bytes))
            return plain()
        if number is None:
            number = self.all_reduces
            self.all_reduces += 1  # first, as in `next_reduction`
        multiplier = reduction_multiplier(op, ranks=self._replicas, name=self.name)
        # Otherwise the reduce-scatter has sampled this gradient.
        nonfinite = self._sample(values) if self.reduction is None else None
        self.bits = all_reduce.bits
        return run(
            partial(
                all_reduce,
                values,
                call=number,
                multiplier=multiplier,
                nonfinite=nonfinite,
                sections=sections,
            )
        )

    # -- bytes and samples -------------------------------------------------------------------------------

    def count_plain(self, row_bytes: int) -> None:
        """Count a reduction of the engine's own, to rows of this size."""
        self.bits = None
        for _ in range(2 if self.plain_all_reduces else 1):
            self.traffic.count_plain(row_bytes)
            self.traffic.count_ring(row_bytes)

    def count_plain_all_reduce(self, row_bytes: int) -> None:
        """Count an all-reduce of the engine's own, over rows of this size.

        A ring all-reduce sends each rank's part of the values twice, which is one row.
        """
        self.bits = None
        if self._replicas > 1 and row_bytes:
            self.all_reduce_traffic.count_plain(row_bytes)
            self.all_reduce_traffic.count_ring(row_bytes)

    def _sample(self, gradient: Tensor) -> Tensor | None:
        """Keep a sample of a gradient in steps that are measured.

        Args:
            gradient: [n], this rank's input to the reduction.

        Returns:
            The counter of non-finite quantization groups for the reduction; None if steps are not measured.
        """
        sample_numel, numel = self.progress.gradient_sample_numel, gradient.numel()
        is_measured = sample_numel is not None or self.counts_nonfinite
        if not is_measured or not numel:
            return None
        if sample_numel is not None:
            unit = math.lcm(*(quantizer.group_unit for quantizer in self.quantizers))
            self.sample = sample_of(gradient, sample_ranges(numel, sample_numel=sample_numel, unit=unit))
        # Counted in every step, so that no NaN between two samples is missed, and read with the next sample.
        if self.nonfinite_groups is None:
            self.nonfinite_groups = torch.zeros((), dtype=torch.float64, device=gradient.device)
        return self.nonfinite_groups

    def end_sample(self) -> None:
        """Forget the sample of a measured step, which a step without this gradient would report again."""
        self.sample = self.nonfinite_groups = None


def reduction_multiplier(op: object, *, ranks: int, name: str) -> float:
    """Return the factor that turns a sum over so many ranks into the requested reduction.

    Raises:
        ValueError: the reduction is neither a sum, also one that is multiplied, nor a mean.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:  # FSDP2's, with a divide factor
        _, factor = cast(Any, op).__getstate__()  # as for a pickle: stubs know no attribute
        return float(factor)
    raise ValueError(
        f"{name}: the engine asks for the reduction {getattr(op, 'op', op)}, but only sums and means can be "
        "quantized"
    )

"""One FSDP2 parameter group: its quantizers, and the detector of edits of its weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sdp4bit.collectives.gradients import Gradients
from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.samples import sample_of
from sdp4bit.collectives.sections import Section
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weights import change_squares
from sdp4bit.engines.fsdp2.edits import Edits
from sdp4bit.engines.fsdp2.view import FSDPView
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.quantization.checks import VALUE_DTYPES
from sdp4bit.quantization.ops import checksum
from sdp4bit.warn import warn_user


class FSDPGradients(Gradients):
    """Gradients whose rows FSDP2 makes up of the parameters with a gradient."""

    def __init__(self, view: FSDPView, *, nodes: Nodes, replicate: Nodes | None) -> None:
        super().__init__(view.name, nodes=nodes, replicate=replicate)
        self._view = view
        self.separate_parameters = False  # see `SDP4BitConfig`
        self.warn_once: Callable[[str], None] = warn_user  # the state of the model replaces it

    def sections(self, numel: int, *, unit: int) -> tuple[Section, ...] | None:
        sections = self._view.gradient_sections(numel, unit=unit, separate=self.separate_parameters)
        if sections is None:
            self.warn_once(
                "unknown parameters got no gradient. A module in which tensor parallelism splits some "
                "parameters and copies others then reduces its gradients in full precision; apply "
                f"fully_shard separately to its parts that are not always used ({self._view.name})",
            )
        return sections


class FSDPGroup(Group):
    """A parameter group with its quantizers, and the detector of edits of its weights."""

    view: FSDPView
    gradients: FSDPGradients

    def __init__(
        self,
        view: FSDPView,
        *,
        index: int,
        layout: Nodes,
        replicate: Nodes | None,
    ) -> None:
        super().__init__(view, index=index, layout=layout, replicate=replicate)
        self.gradients = FSDPGradients(view, nodes=layout, replicate=replicate)
        self.data_rank, self.replicate_data_ranks = view.data_rank, view.replicate_data_ranks
        self.edits = Edits(view, self.weights)
        # HSDP: gradients were reduced over shards but not over the replicate dimension since.
        self.awaits_all_reduce = False

    def has_unsummed_gradients(self) -> bool:
        """Return whether gradients exist that were not summed over the replicate dimension."""
        return self.awaits_all_reduce and any(s.sharded.grad is not None for s in self.view.params)

    def values_of(self, row: Tensor) -> Tensor:
        """Return the part of a row [n] that holds values and not bits."""
        return row if self.view.value_ranges is None else sample_of(row, self.view.value_ranges)

    def change_squares(self) -> Tensor:
        """Return |main - replica|^2 and |main|^2 over this rank's shard, fp64 [2]."""
        assert self.weights.replica is not None
        loaded = self.weights.loaded_row
        held = self.weights.replica.own_shard if loaded is None else loaded
        main = self.view.main_shard(held.dtype)
        return change_squares(self.values_of(main), self.values_of(held))

    def awaits_refresh(self) -> bool:
        seen = self.edits.seen
        return seen.has_stepped or seen.was_loaded or super().awaits_refresh()

    def remarks(self) -> Remarks:
        params = self.view.params
        frozen = sum(not param.sharded.requires_grad for param in params)
        exact = sum(param.sharded.requires_grad and param.holds_bits for param in params)
        weights = [f"{frozen} frozen not sent"] if frozen else []
        weights += [f"{exact} of another dtype in full precision"] if exact else []
        gradients = "none, all frozen" if frozen == len(params) else ""
        # A value of 32 bits takes the place of two in a row of bf16.
        numel = sum(param.numel for param in params)
        return Remarks(numel=numel, weights=weights, gradients=gradients)

    def main_copy(self) -> ReplicaCopy | None:
        """Return a checksum of the main shard if quantized all-reduces keep it equal over HSDP ranks."""
        if self.gradients.all_reduce is None or self.replicate_layout is None:
            return None
        assert self.view.replicate is not None
        return ReplicaCopy(
            name=f"{self.view.name} (main weights)",
            rows=checksum(self.view.main_shard(torch.float32)).view(1),
            layout=self.replicate_layout,
            process_group=self.view.replicate,
            is_full=True,
            traffic=self.gradients.all_reduce_traffic,
            can_be_refreshed=False,
        )


def check_dtypes(view: FSDPView, *, weights: bool, gradients: bool) -> None:
    """Raise ValueError if the weights or the gradients have a dtype that cannot be quantized, if they are."""
    if weights and view.row_dtype not in VALUE_DTYPES:
        raise ValueError(
            f"{view.name} holds {view.row_dtype} parameters; only fp32, bf16 and fp16 can be quantized: "
            f"use MixedPrecisionPolicy(param_dtype=...), or pass skip=[{view.name!r}]"
        )
    reduced = view.reduce_dtype
    if gradients and reduced.is_floating_point and reduced not in VALUE_DTYPES:
        raise ValueError(
            f"{view.name} reduces gradients in {reduced}; only fp32, bf16 and fp16 can be "
            f"quantized: use MixedPrecisionPolicy(reduce_dtype=torch.float32), or pass skip=[{view.name!r}]"
        )

"""What the communication of many ranks does to the weights and gradients of one process.

Plays the part that FSDP2 and its quantized hooks have in a real run: when weights are gathered and refreshed,
how gradients are reduced, what would have been sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.simulated import VirtualReduceScatter, VirtualReplica
from sdp4bit.collectives.topology import NodeLayout
from sdp4bit.config import SDP4BitConfig
from sdp4bit.engines.measures import (
    GradientSample,
    SampledMeasures,
    group_stats,
    sample_gradient,
    sample_of,
    sample_spans,
    squares_row,
    weight_squares,
)
from sdp4bit.engines.simulated.rows import RowLayout
from sdp4bit.traffic import Traffic, TrafficCounter

FORMAT_VERSION = 1


class _Group:
    """One parameter group: its rows, what quantizes it, and what it has sent."""

    def __init__(self, name: str, rows: RowLayout, *, layout: NodeLayout, stays_gathered: bool) -> None:
        self.name = name
        self.rows = rows
        self.stays_gathered = stays_gathered
        """Whether the weights are kept after forward, for the backward that follows."""
        self.is_gathered = False
        self.replica: VirtualReplica | None = None
        self.reduction: VirtualReduceScatter | None = None
        self.weight_traffic = TrafficCounter(nodes=layout.nodes, ranks_per_node=layout.ranks_per_node)
        self.gradient_traffic = TrafficCounter(nodes=layout.nodes, ranks_per_node=layout.ranks_per_node)
        self.is_changed = False
        """Whether an optimizer has changed the main weights since the last refresh."""
        self.resync_wanted = True
        """The next refresh is in full precision; so is the first."""
        self.was_loaded = False
        """What is held comes from a checkpoint; the next refresh, in full precision, is with that."""
        self.refreshes = 0
        self.reductions = 0
        self.is_reduced_quantized = False
        self.gradient_sample: GradientSample | None = None
        """Of the first rank's last reduction in a step that is to be measured."""

    @property
    def total_traffic(self) -> Traffic:
        """What one rank has sent so far."""
        return self.weight_traffic.total + self.gradient_traffic.total


class VirtualCommunication:
    """Communication of virtual ranks, with the interface of sdp4bit.quantize_communication's handle."""

    def __init__(
        self,
        main: nn.Module,
        compute: nn.Module,
        *,
        groups: Iterable[tuple[str, Sequence[str]]],
        layout: NodeLayout,
        config: SDP4BitConfig,
        reshard: bool,
    ) -> None:
        """Prepare; nothing is allocated.

        Args:
            main: the fp32 main weights, which the optimizer updates.
            compute: the weights that all ranks compute with; the same module as main if nothing can make
                them differ.
            groups: name and parameters' names of every FSDP2 group, in the order of their numbers.
            reshard: whether the ranks free the weights of a block after its forward.
        """
        self.layout = layout
        self.config = config
        self.steps = 0
        """Optimizer steps that have been followed by a forward."""
        self._step_pending = False
        self._main_parameters = dict(main.named_parameters())
        self._main = {name: parameter.detach() for name, parameter in self._main_parameters.items()}
        self._held = {name: parameter.detach() for name, parameter in compute.named_parameters()}
        self._is_shared = main is compute
        self._dtype = next(iter(self._held.values())).dtype
        self._reduced: dict[str, Tensor] = {}
        self._scratch = Scratch()
        self._groups = []
        for bucket, (name, members) in enumerate(groups):
            rows = RowLayout({member: self._main[member] for member in members}, ranks=layout.size)
            group = _Group(name, rows, layout=layout, stays_gathered=bucket == 0 or not reshard)
            if config.weights is not None and config.weights.saves_bytes(nodes=layout.nodes):
                group.replica = VirtualReplica(
                    layout,
                    config=config.weights,
                    seed=config.seed,
                    bucket=bucket,
                    traffic=group.weight_traffic,
                    scratch=self._scratch,
                )
            if config.gradients is not None:
                group.reduction = VirtualReduceScatter(
                    layout,
                    config=config.gradients,
                    seed=config.seed,
                    bucket=bucket,
                    traffic=group.gradient_traffic,
                    scratch=self._scratch,
                )
            self._groups.append(group)
        self._sampled = SampledMeasures(config.telemetry, [group.name for group in self._groups])

    # -- weights ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_forward(self) -> None:
        """The weights to compute with are current; called before every forward of the first rank."""
        if self._step_pending:
            self._step_pending = False
            self.steps += 1
            for group in self._groups:
                group.weight_traffic.end_step()
                group.gradient_traffic.end_step()
            self._measure()
        for group in self._groups:
            if not group.is_gathered:
                self._refresh(group)
                self._count_gather(group)
                group.is_gathered = True

    def _measure(self) -> None:
        if self._sampled.is_due(self.steps):
            rows = [self._squares(group) for group in self._groups]
            self._sampled.publish(torch.stack(rows), step=self.steps)
        for group in self._groups:
            group.gradient_sample = None

    def _squares(self, group: _Group) -> Tensor:
        """Return the squares of the first rank's part of a group, as its process would measure them."""
        numel, replica, weights = group.rows.numel, group.replica, None
        if replica is not None:
            spans = sample_spans(numel, sample_numel=self._sampled.sample_numel, unit=replica.group_size)
            main = sample_of(group.rows.row(self._main, rank=0), spans).float()
            held = sample_of(group.rows.row(self._held, rank=0), spans)
            weights = weight_squares(
                replica,
                main,
                row=main.to(held.dtype),
                held=held,
                exact=group.resync_wanted or replica.bits is None,
                refreshed=True,
            )
            weights *= numel / sum(end - start for start, end in spans)
        return squares_row(
            numel,
            reduction=None if group.reduction is None else group.reduction.of_first_rank,
            gradient=group.gradient_sample,
            weights=weights,
            device=next(iter(self._held.values())).device,
        )

    def after_forward(self) -> None:
        """The first rank has ended a forward."""
        for group in self._groups:
            group.is_gathered = group.stays_gathered

    def before_backward(self) -> None:
        """The first rank is about to go backward, which frees the weights behind it."""
        for group in self._groups:
            if not group.is_gathered:
                self._count_gather(group)
            group.is_gathered = False

    def reshard(self) -> None:
        """What the root of the model has gathered is freed, as its reshard() does."""
        self._groups[0].is_gathered = False

    def mark_step(self) -> None:
        """An optimizer has changed the main weights."""
        self._step_pending = True
        for group in self._groups:
            group.is_changed = True
            group.is_gathered = False

    def resync(self) -> None:
        """The next forward computes with the main weights, sent in full precision."""
        for group in self._groups:
            group.resync_wanted, group.was_loaded = True, False
            group.is_changed = group.is_gathered = False

    def _refresh(self, group: _Group) -> None:
        if group.replica is None:
            if (group.is_changed or group.resync_wanted) and not self._is_shared:
                for segment in group.rows.segments:
                    self._held[segment.name].copy_(self._main[segment.name])
            group.is_changed = group.resync_wanted = False
            return
        if not (group.is_changed or group.resync_wanted):
            return
        held, rows = self._rows("held", group, self._dtype), self._rows("main", group, self._dtype)
        group.rows.write_rows(self._held, held)
        group.rows.write_rows(self._main, rows)
        if group.resync_wanted:
            group.replica.refresh_fully(held if group.was_loaded else rows, held)
            group.is_changed = group.is_changed and group.was_loaded
            group.resync_wanted = group.was_loaded = False
        if group.is_changed:
            group.replica.refresh(rows, held, call=group.refreshes)
            group.refreshes += 1
            group.is_changed = False
        group.rows.read_rows(held, self._held)

    def _count_gather(self, group: _Group) -> None:
        row_bytes = group.rows.numel * self._dtype.itemsize
        group.weight_traffic.count_plain(row_bytes)
        if group.replica is None:
            group.weight_traffic.count_ring(row_bytes)
        else:
            group.replica.count_gather(row_bytes)

    def _rows(self, use: str, group: _Group, dtype: torch.dtype) -> Tensor:
        """Return [ranks, n] of unspecified content, until the next call for this use."""
        device = next(iter(self._held.values())).device
        nbytes = group.rows.numel * dtype.itemsize
        return self._scratch.messages(f"{use} rows", self.layout.size, nbytes, device=device).view(dtype)

    # -- gradients -------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor], *, rank: int) -> None:
        """A rank's gradients are part of the sum, and are not needed any more; called for one after another.

        Full-precision sums are fp32, added in the order of the ranks.
        """
        for group in self._groups:
            if rank == 0:
                group.is_reduced_quantized = self._is_quantized_now(group)
            if group.reduction is not None and group.is_reduced_quantized:
                rows = self._rows("gradient", group, torch.float32)
                group.rows.write_rows(gradients, rows)
                nonfinite = None
                if rank == 0 and self._sampled.is_due(self.steps + 1):
                    group.gradient_sample = sample_gradient(
                        rows.view(-1),
                        sample_numel=self._sampled.sample_numel,
                        unit=group.reduction.of_first_rank.group_unit,
                    )
                    nonfinite = group.gradient_sample.nonfinite
                group.reduction.add(rows, call=group.reductions, nonfinite=nonfinite)
                continue
            for segment in group.rows.segments:
                total, gradient = self._sum_of(segment.name), gradients[segment.name]
                if rank == 0:
                    total.copy_(gradient)
                else:
                    total.add_(gradient)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """The main weights have the mean of all ranks' gradients as theirs."""
        ranks = self.layout.size
        for group in self._groups:
            names = [segment.name for segment in group.rows.segments]
            reduced = {name: self._sum_of(name) for name in names}
            if group.reduction is not None and group.is_reduced_quantized:
                rows = group.rows

                def take(
                    rank: int, row: Tensor, rows: RowLayout = rows, reduced: dict[str, Tensor] = reduced
                ) -> None:
                    rows.read_row(row.div_(ranks), rank=rank, tensors=reduced)

                group.reduction.finish(take)
                group.reductions += 1
            else:
                row_bytes = group.rows.numel * torch.float32.itemsize
                group.gradient_traffic.count_plain(row_bytes)
                group.gradient_traffic.count_ring(row_bytes)
                torch._foreach_div_(list(reduced.values()), float(ranks))
            for name in names:
                self._main_parameters[name].grad = reduced[name]

    def _is_quantized_now(self, group: _Group) -> bool:
        config = self.config.gradients
        return config is not None and group.rows.numel >= config.min_numel and self.steps >= config.start_step

    def _sum_of(self, name: str) -> Tensor:
        if name not in self._reduced:
            self._reduced[name] = torch.empty_like(self._main[name])
        return self._reduced[name]

    # -- the handle ------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what all ranks together would have sent, and what quantization cost.

        The same members as of sdp4bit.quantize_communication's handle: "last_step" and "total" are sums over
        the ranks, what quantization cost is the first rank's.
        """
        last = sum((self._last_traffic(group) for group in self._groups), Traffic())
        total = sum((group.total_traffic for group in self._groups), Traffic())
        return {
            "steps": self.steps + int(self._step_pending),
            "last_step": self._of_all_ranks(last),
            "total": self._of_all_ranks(total),
            "compression_ratio": last.compression_ratio,
            "exchange_seconds": last.exchange_seconds,
            **self._sampled.totals(),
        }

    def group_stats(self) -> list[dict[str, Any]]:
        """Return one dictionary per parameter group about the first rank, as the handle does."""
        measured = {measures.name: measures for measures in self._sampled.by_group()}
        return [
            group_stats(
                group.name,
                self._last_traffic(group),
                measures=measured.get(group.name),
                weight_bits=None if group.replica is None else group.replica.bits,
                gradient_bits=(
                    group.reduction.of_first_rank.bits
                    if group.reduction is not None and group.is_reduced_quantized
                    else None
                ),
            )
            for group in self._groups
        ]

    def _last_traffic(self, group: _Group) -> Traffic:
        counters = (group.weight_traffic, group.gradient_traffic)
        return sum((c.current_step if self._step_pending else c.last_step for c in counters), Traffic())

    def _of_all_ranks(self, traffic: Traffic) -> dict[str, int]:
        return {name: count * self.layout.size for name, count in traffic.as_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-exact resume needs: what the ranks hold of the weights, and counters."""
        replica: dict[str, Tensor] = {}
        counters: dict[str, Tensor] = {}
        for group in self._groups:
            # Before a refresh in full precision nothing is pending: a resumed run begins with one too.
            is_due = group.resync_wanted and not group.was_loaded
            changed = int(group.is_changed and not is_due)
            counters[group.name] = torch.tensor([group.reductions, group.refreshes, changed])
            if group.replica is not None:
                for segment in group.rows.segments:
                    name = segment.name
                    replica[name] = self._main[name].to(self._dtype) if is_due else self._held[name]
        return {
            "format_version": FORMAT_VERSION,
            "steps": self.steps + int(self._step_pending),
            "layout": {"nodes": self.layout.nodes, "ranks_per_node": self.layout.ranks_per_node},
            "groups": counters,
            "replica": replica,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Counters and what the ranks hold of the weights are as saved; main weights are loaded already."""
        self.steps, self._step_pending = int(state_dict["steps"]), False
        for group in self._groups:
            counters = [int(value) for value in state_dict["groups"][group.name]]
            group.reductions, group.refreshes, changed = counters
            group.is_changed = bool(changed)
            group.resync_wanted, group.is_gathered = True, False
            group.was_loaded = group.replica is not None
            if group.replica is not None:
                for segment in group.rows.segments:
                    self._held[segment.name].copy_(state_dict["replica"][segment.name])

    def remove(self) -> None:
        """The memory of messages and gradients is free."""
        self._scratch = Scratch()
        self._reduced.clear()
        self._groups.clear()

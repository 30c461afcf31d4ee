"""Apply the communication of many ranks to the weights and gradients of one process.

Replaces FSDP2 and its quantized hooks: when weights are gathered and refreshed, how gradients are reduced,
and how many bytes would be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp4bit.collectives.group import Group
from sdp4bit.collectives.samples import sample_of
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import CutParam, Range, Section, cut_row, whole_row
from sdp4bit.collectives.topology import Nodes
from sdp4bit.collectives.weights import Due, Weights, change_squares, is_large_change
from sdp4bit.config import AuditConfig, SDP4BitConfig
from sdp4bit.engines.handle import CommHandle, StateDict
from sdp4bit.engines.protocol import Undo
from sdp4bit.observe.explain import layout_reason
from sdp4bit.observe.stats import ModelState
from sdp4bit_lab.simulated.collectives import SimulatedReduceScatter, SimulatedReplica
from sdp4bit_lab.simulated.rows import RowLayout

FORMAT_VERSION = 2


class SimulatedGroup:
    """Parameters that the simulated ranks gather and reduce together."""

    process_group = value_ranges = None

    def __init__(self, name: str, rows: RowLayout, *, main: Mapping[str, Tensor]) -> None:
        self.name = name
        self.rows = rows
        self._main = main
        self.ranks = tuple(range(rows.ranks))
        self.shard_numel = rows.numel
        self.device = next(iter(main.values())).device

    def sections(self, *, unit: int, separate: bool) -> tuple[Section, ...]:
        """Return the sections of a row, as for FSDP2; see `cut_row`."""
        if not separate:
            return whole_row(self.shard_numel)
        parameters = [
            CutParam(numel=param.end - param.start, is_fine=self._main[param.name].dim() <= 1, number=number)
            for number, param in enumerate(self.rows.params)
        ]
        return cut_row(parameters, unit=unit, count=len(parameters))

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        """Return these ranges of rank 0's main shard, concatenated, in fp32."""
        return sample_of(self.rows.row(self._main, rank=0), ranges).float()


class SimulatedWeights(Weights):
    """Weights that are stored once for all simulated ranks."""

    replica: SimulatedReplica | None


class SimulatedGroupState(Group):
    """Communication state of one parameter group; counters are per rank."""

    view: SimulatedGroup
    weights: SimulatedWeights

    def __init__(
        self,
        group: SimulatedGroup,
        *,
        index: int,
        layout: Nodes,
        held: Mapping[str, Tensor],
        stays_gathered: bool,
    ) -> None:
        super().__init__(group, index=index, layout=layout)
        self._held = held
        self.reductions_of_all: SimulatedReduceScatter | None = None
        """Reduction of all ranks; `reduction` is rank 0's part of it."""
        self.stays_gathered = stays_gathered
        """Whether the weights are kept from forward to backward."""
        self.is_gathered = False
        self.reduction: dict[str, Any] = {}  # arguments of the reduction under way, equal for all ranks
        self.gradient_sections: tuple[Section, ...] = ()

    def sample_weights(self, ranges: Sequence[Range], *, may_wait: bool) -> tuple[Tensor, Tensor] | None:
        held = self.view.rows.row(self._held, rank=0)
        return self.view.sample_main(ranges), sample_of(held, ranges)

    def forget_reduction(self) -> None:
        """Give the number of an interrupted reduction back, so that its repetition has the same bits."""
        if self.reduction:
            self.gradients.reductions = self.reduction["call"]
            self.reduction = {}


class SimulatedModelState(ModelState):
    """State of the simulated model."""

    groups: Sequence[SimulatedGroupState]


class SimulatedRanks:
    """Simulated ranks as an engine; their training loop calls the handle itself."""

    def __init__(self, state: SimulatedModelState) -> None:
        self._state = state

    def groups(self) -> Sequence[Group]:
        return self._state.groups

    def install(self, group: Group) -> Undo:
        return lambda: None

    def on_step(self, call: Callable[[int], None]) -> Undo:
        return self._state.on_step(call)


class SimulatedCommHandle(CommHandle):
    """Communication engine of simulated ranks, with the common handle interface.

    `stats()` reports the bytes of all ranks together. Quantization errors are measured on rank 0 and decide
    on alerts. Each replica is stored once, so an audit finds nothing.
    """

    _state: SimulatedModelState

    def __init__(
        self,
        main: nn.Module,
        compute: nn.Module,
        *,
        groups: Iterable[tuple[str, Sequence[str]]],
        layout: Nodes,
        config: SDP4BitConfig,
        reshard: bool,
    ) -> None:
        """Prepare without allocating.

        Args:
            main: fp32 main weights, which the optimizer updates.
            compute: weights that all ranks compute with; the same module as main if they cannot differ.
            groups: name and parameter names of every FSDP2 group, in order.
            reshard: whether ranks free a block's weights after its forward.
        """
        self.layout = layout
        self._main_parameters = dict(main.named_parameters())
        self._main = {name: parameter.detach() for name, parameter in self._main_parameters.items()}
        self._held = {name: parameter.detach() for name, parameter in compute.named_parameters()}
        self._compute = compute
        self._is_shared = main is compute
        self._dtype = next(iter(self._held.values())).dtype
        self._reduced: dict[str, Tensor] = {}
        self._scratch = Scratch()
        comms = []
        for index, (name, members) in enumerate(groups):
            rows = RowLayout({member: self._main[member] for member in members}, ranks=layout.size)
            comm = SimulatedGroupState(
                SimulatedGroup(name, rows, main=self._main),
                index=index,
                layout=layout,
                held=self._held,
                stays_gathered=index == 0 or not reshard,
            )
            comm.separate_parameters = config.separate_parameters
            self._choose(comm, config)
            comms.append(comm)
        super().__init__(SimulatedModelState(comms, telemetry=config.telemetry), config=config)
        self._state.reporting_ranks = layout.size
        with self._attaching() as undo:
            # The memory of messages and gradients.
            undo.callback(setattr, self, "_scratch", Scratch())
            undo.callback(self._reduced.clear)
            self._install(SimulatedRanks(self._state), undo=undo, watched=comms)

    def _choose(self, comm: SimulatedGroupState, config: SDP4BitConfig) -> None:
        """Set up a group's quantized communication, or the reason for its absence."""
        comm.weights.unquantized_reason = layout_reason(config.weights, self.layout)
        comm.gradients.unquantized_reason = layout_reason(config.gradients, self.layout)
        if config.weights is not None and not comm.weights.unquantized_reason:
            comm.weights.replica = SimulatedReplica(
                self.layout,
                config=config.weights,
                traffic=comm.weights.traffic,
                scratch=self._scratch,
                sections=comm.view.sections(
                    unit=config.weights.group_size, separate=config.separate_parameters
                ),
            )
        if config.gradients is None or comm.gradients.unquantized_reason:
            return
        comm.reductions_of_all = SimulatedReduceScatter(
            self.layout,
            config=config.gradients,
            seed=config.seed,
            bucket=comm.index,
            traffic=comm.gradients.traffic,
            scratch=self._scratch,
        )
        comm.gradients.reduction = comm.reductions_of_all.of_rank_0
        comm.gradient_sections = comm.view.sections(
            unit=comm.gradients.reduction.group_unit, separate=config.separate_parameters
        )

    # -- weights ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_forward(self) -> None:
        """Update the compute weights; call before every forward of rank 0."""
        state = self._state
        if state.step_pending:
            state.end_step()
        for comm in state.groups:
            if not comm.is_gathered:
                self._refresh(comm)
                self._count_gather(comm)
                comm.is_gathered = True

    def after_forward(self) -> None:
        """Record the end of a forward of rank 0."""
        for comm in self._state.groups:
            comm.is_gathered = comm.stays_gathered

    def before_backward(self) -> None:
        """Record the start of a backward of rank 0, which then frees the weights."""
        for comm in self._state.groups:
            if not comm.is_gathered:
                self._count_gather(comm)
            comm.is_gathered = False

    def reshard(self) -> None:
        """Record that the root's weights are freed, as by its reshard()."""
        self._state.groups[0].is_gathered = False

    def mark_step(self) -> None:
        """Record that an optimizer has changed the main weights."""
        self._state.step_pending = True
        for comm in self._state.groups:
            comm.weights.mark_changed()
            comm.is_gathered = False

    def resync(self) -> None:
        """Refresh the replicas in full precision before the next forward."""
        for comm in self._state.groups:
            comm.weights.raise_to(Due.FULL)
            comm.is_gathered = False

    def _refresh(self, comm: SimulatedGroupState) -> None:
        layout, weights, replica = comm.view.rows, comm.weights, comm.weights.replica
        if weights.is_current:
            return
        if replica is None:
            if not self._is_shared:
                for param in layout.params:
                    self._held[param.name].copy_(self._main[param.name])
            return
        held, rows = self._rows("held", comm, self._dtype), self._rows("main", comm, torch.float32)
        layout.write_rows(self._held, held)
        layout.write_rows(self._main, rows)
        evaluates = not self._compute.training
        events = weights.events()._replace(evaluates=evaluates)
        if weights.needs_size(events):
            # As on FSDP2, the size of the change decides if an evaluation is the first to use it.
            by_rank = [change_squares(row.to(self._dtype), own) for row, own in zip(rows, held, strict=True)]
            weights.agree_on_size(events, is_large=bool(is_large_change(torch.stack(by_rank).sum(0))))
        replica.rows = held
        due = weights.due, weights.is_from_checkpoint
        weights.refresh(rows, row=held if weights.is_from_checkpoint else rows, in_evaluation=evaluates)
        try:
            layout.read_rows(held, self._held)
        except BaseException:  # also Ctrl-C: the compute weights still have the rows before
            weights.due, weights.is_from_checkpoint = due
            raise

    def _count_gather(self, comm: SimulatedGroupState) -> None:
        shard_bytes = comm.view.shard_numel * self._dtype.itemsize
        if comm.weights.replica is None:
            comm.weights.gather_plain(shard_bytes, lambda: None)  # one process holds all weights
        else:
            comm.weights.traffic.count_plain(shard_bytes)
            comm.weights.replica.count_gather(shard_bytes)

    def _rows(self, use: str, comm: SimulatedGroupState, dtype: torch.dtype) -> Tensor:
        """Return uninitialized [ranks, n], valid until the next call for this use."""
        nbytes = comm.view.shard_numel * dtype.itemsize
        name, device = f"{use} rows", comm.view.device
        return self._scratch.messages(name, self.layout.size, nbytes, device=device).view(dtype)

    # -- gradients -------------------------------------------------------------------------------------

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, Tensor], *, rank: int) -> None:
        """Add a rank's gradients, which may be overwritten; call for one rank after another.

        Full-precision sums are fp32, in rank order.
        """
        state = self._state
        for comm in state.groups:
            if comm.reductions_of_all is not None and comm.gradients.is_quantized(comm.view.shard_numel):
                rows = self._rows("gradient", comm, torch.float32)
                comm.view.rows.write_rows(gradients, rows)
                if rank == 0:
                    comm.reductions_of_all.abandon()
                    comm.forget_reduction()
                    comm.reduction = comm.gradients.next_reduction(rows.view(-1), dist.ReduceOp.SUM)
                comm.reductions_of_all.add(
                    rows,
                    call=comm.reduction["call"],
                    nonfinite=None if rank else comm.reduction["nonfinite"],
                    sections=comm.gradient_sections,
                )
                continue
            for param in comm.view.rows.params:
                total, gradient = self._sum_of(param.name), gradients[param.name]
                if rank == 0:
                    total.copy_(gradient)
                else:
                    total.add_(gradient)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Set the gradients of the main weights to the mean over all ranks."""
        ranks = self.layout.size
        for comm in self._state.groups:
            names = [param.name for param in comm.view.rows.params]
            reduced = {name: self._sum_of(name) for name in names}
            if comm.reductions_of_all is not None and comm.gradients.is_quantized(comm.view.shard_numel):
                rows = comm.view.rows

                def take(
                    rank: int, row: Tensor, rows: RowLayout = rows, reduced: dict[str, Tensor] = reduced
                ) -> None:
                    rows.read_row(row.div_(ranks), rank=rank, tensors=reduced)

                comm.reductions_of_all.finish(take)
                comm.reduction = {}
            else:
                comm.gradients.count_plain(comm.view.shard_numel * torch.float32.itemsize)
                torch._foreach_div_(list(reduced.values()), float(ranks))
            for name in names:
                self._main_parameters[name].grad = reduced[name]

    def _sum_of(self, name: str) -> Tensor:
        if name not in self._reduced:
            self._reduced[name] = torch.empty_like(self._main[name])
        return self._reduced[name]

    # -- the handle ------------------------------------------------------------------------------------

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        return wrong

    def state_dict(self) -> StateDict:
        """Return the gathered weights and counters, for a bit-exact resume."""
        state = self._state
        replica: dict[str, Tensor] = {}
        counters: dict[str, Tensor] = {}
        for comm in state.groups:
            # A pending full refresh is not saved, because a resumed run starts with one.
            comm.forget_reduction()
            is_due, saved = comm.weights.due is Due.FULL, comm.state()
            saved["due"] = Due.NOTHING if is_due else saved["due"]
            counters[comm.view.name] = torch.tensor([*saved.values()])
            if comm.weights.replica is not None:
                for param in comm.view.rows.params:
                    name = param.name
                    replica[name] = self._main[name].to(self._dtype) if is_due else self._held[name]
        return {
            "format_version": FORMAT_VERSION,
            "steps": state.steps + int(state.step_pending),
            "layout": {"nodes": self.layout.nodes, "ranks_per_node": self.layout.ranks_per_node},
            "groups": counters,
            "replica": replica,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state, after the main weights have been loaded."""
        state = self._state
        state.steps, state.step_pending = int(state_dict["steps"]), False
        for comm in state.groups:
            saved = dict(zip(comm.state(), map(int, state_dict["groups"][comm.view.name]), strict=True))
            comm.load(saved)
            comm.reduction, comm.is_gathered = {}, False
            comm.weights.raise_to(Due.FULL)
            if comm.weights.replica is not None:
                comm.weights.load_rows(None, due=Due(saved["due"]))
                for param in comm.view.rows.params:
                    self._held[param.name].copy_(state_dict["replica"][param.name])

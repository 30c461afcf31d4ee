"""A communication hook for DistributedDataParallel that averages gradients by a quantized all-reduce."""

# No `from __future__ import annotations`, because DDP compares a hook's annotations with its types.

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.errors import comm_error_context, ranks_in_words
from sdp4bit.collectives.group import Group, Remarks
from sdp4bit.collectives.reasons import Cause, Unquantized
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.sections import Range, take_ranges
from sdp4bit.collectives.streams import SideStream
from sdp4bit.collectives.topology import Topology, TopologySpec, create_topologies, destroy_topology
from sdp4bit.config import AuditConfig, Auto, SDP4BitConfig, Settings, as_settings, settings_in
from sdp4bit.engines.agreement import ShardedRows, agree
from sdp4bit.engines.attach import host_group
from sdp4bit.engines.auto import check_choice
from sdp4bit.engines.choosing import ChoosingHandle
from sdp4bit.engines.handle import StateDict
from sdp4bit.engines.loading import check_state
from sdp4bit.observe.alerts import Alerts
from sdp4bit.observe.audit import ReplicaCopy
from sdp4bit.observe.explain import describe_all_reduce, layout_reason, one_hop_note, one_node_note
from sdp4bit.observe.measures import Telemetry
from sdp4bit.observe.stats import ModelState
from sdp4bit.quantization.ops import checksum
from sdp4bit.quantization.random import check_numbers
from sdp4bit.warn import warn_user

FORMAT_VERSION = 1
_NO_GRADIENTS = (
    "no gradients yet: buckets show here after the first backward pass of a model with "
    "register_comm_hook(state, sdp4bit.ddp_comm_hook)"
)
_NOT_SENT = Unquantized(Cause.EVERYWHERE)


@dataclass(kw_only=True)
class Bucket:
    """Parameters that DDP reduces together; every rank holds all of them."""

    name: str
    ranks: tuple[int, ...]
    process_group: ProcessGroup | None
    shard_numel: int
    device: torch.device
    parameters: Sequence[Tensor]
    value_ranges: Sequence[Range] | None = None

    def sample_main(self, ranges: Sequence[Range]) -> Tensor:
        values = torch.cat([parameter.detach().float().flatten() for parameter in self.parameters])
        return torch.cat(take_ranges(values, ranges))


class BucketGroup(Group):
    """Communication of one bucket: an all-reduce over all ranks, which hold the same weights."""

    view: Bucket

    def remarks(self) -> Remarks:
        gradients = self.gradients
        reason = gradients.unquantized_sum_reason or gradients.unquantizable
        if reason is None and gradients.config is not None:
            numel, steps = self.view.shard_numel, gradients.progress.steps
            return Remarks(gradients=describe_all_reduce(gradients.config, self.layout, numel, steps=steps))
        return Remarks(gradients=str(reason))


class DDPModelState(ModelState):
    """The buckets of one model."""

    groups: Sequence[BucketGroup]

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        given = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return any(id(param) in given for group in self.groups for param in group.view.parameters)


class DDPCommState(ChoosingHandle):
    """State of :func:`ddp_comm_hook` for one DistributedDataParallel model, and its handle.

    Its parameter groups are DDP's buckets, and every backward pass with reduced gradients counts as a step.
    All ranks get bit-identical gradients, so weights stay equal as with plain DDP. `no_sync()`, buckets of
    any size and rebuilt buckets are supported. A `Stateful` for torch.distributed.checkpoint.
    """

    _sent = ("gradients",)
    _hint = "comm.time_steps(step) measures your steps with and without quantization."
    _silence_reasons = (
        "either the gradients are not averaged (no_sync), or another DistributedDataParallel averages them: "
        "call its register_comm_hook with this state"
    )

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        topology: TopologySpec = "auto",
        config: Settings = None,
    ) -> None:
        """Create the process groups, now or, without torch.distributed, at the first backward.

        Call it on all ranks of the job.

        Args:
            process_group: the model's, as `torch.distributed.new_group` returned it; None for the default
                group. Ranks outside of the group pass it too.
            topology: the ranks of each node: "auto" (by host name), ranks per node, or an (inter, intra)
                mesh. A tuple of one of the first two and the nodes per block, such as (8, 32), reduces in
                three levels.
            config: settings or the name of a preset; None uses the default. No weights are sent, so `weights`
                does not apply. Neither does `audit`, because weights differ inside `join()`: call `audit()`.

        Raises:
            ValueError: the topology or the settings are not supported; the same on every rank.
            TypeError: an argument has an unsupported type; the same on every rank.
        """
        settings, failure = as_settings(None), None
        try:
            settings = as_settings(config)
            is_group = process_group is None or isinstance(process_group, ProcessGroup)
            if not is_group and cast(object, process_group) is not dist.GroupMember.NON_GROUP_MEMBER:
                raise TypeError(
                    f"process_group={process_group!r} is no process group: pass settings as config="
                )
        except (TypeError, ValueError) as caught:
            if not _has_group():
                raise
            failure, process_group = caught, None  # raising here would leave the other ranks waiting
        config = settings_in(settings)[-1]
        super().__init__(DDPModelState([], telemetry=config.telemetry), config=config, note=_NO_GRADIENTS)
        self._settings = settings
        self._undo.callback(self._end)
        if config.alerts is not None:
            self._alerts = Alerts([], config=config.alerts, telemetry=self._state.telemetry)
            self._undo.callback(self._state.on_step(self._alerts.at_step_boundary))
        self._torch_group = self._process_group = process_group
        self._spec = topology
        self._topology: Topology | None = None  # None before `_prepare`
        self._unquantized_reason: Unquantized | None = None
        self._scratch = Scratch()
        self._buckets: list[BucketGroup] = []
        self._state.groups = self._buckets
        self._are_new = False  # whether buckets have changed in this backward
        self._streams: dict[torch.device, SideStream] = {}
        self._warned: set[torch.dtype] = set()
        self._checked = WeakTensorKeyDictionary()  # first buckets of models that average over the same ranks
        if _has_group():
            self._prepare(failure)

    def _prepare(self, failure: Exception | None = None) -> Topology:
        """Agree with all ranks of the job, and create the process groups."""
        group = self._torch_group
        ranks: tuple[int, ...] = (dist.get_rank(),)
        if cast(object, group) is not dist.GroupMember.NON_GROUP_MEMBER:
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        rows = ShardedRows(name="the gradients", ranks=ranks, shard_numel=0, dtypes=())
        layouts = agree(
            [rows],
            settings={"config": self._settings},
            topology=self._spec,
            failure=failure,
            call="DDPCommState",
        )
        check_numbers(buckets=1, ranks=len(ranks))
        self._layouts = layouts
        self._topology = create_topologies(list(layouts.shards.values()), purpose="DDP")[ranks]
        self._undo.callback(destroy_topology, self._topology)
        self._unquantized_reason = reason = layout_reason(self.config.gradients, self._topology.layout)
        notes = one_node_note([(_NOT_SENT, reason)]), "" if reason else one_hop_note([self._topology.layout])
        for note in filter(None, notes):
            warn_user(note, ranks)
        if isinstance(self._settings, Auto):
            self._search_among(self._settings, host=host_group(self._undo))
            self._equip()
        return self._topology

    @property
    def steps(self) -> int:
        """Backward passes whose gradients have been reduced."""
        return self._state.steps + int(self._state.step_pending)

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Start averaging a bucket's gradients over all ranks; return a future of them.

        An exception is raised at the end of the backward, because DDP cannot be used after one in a hook.
        """
        try:
            return self._average(bucket)
        except BaseException as failure:
            if torch._C._current_graph_task_id() == -1:  # for a rank that has joined
                raise
            _raise_after_backward(failure)
            return _completed(bucket.buffer())
        finally:
            # Other ranks may have seen no exception.
            if self._topology is not None and self._is_active and bucket.is_last():
                self._end_backward(bucket.index() + 1)

    @property
    def _is_active(self) -> bool:
        return self._is_quantized and not self._removed

    def _average(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        if self._removed:
            return self._average_densely(bucket.buffer())
        topology, state, values = self._topology or self._prepare(), self._state, bucket.buffer()
        if bucket.index() == 0:
            if self._is_quantized:
                self._check_model(bucket)
            if self._is_quantized and state.step_pending:
                # The last backward ends here, because its measures are complete: DDP has waited for its
                # futures.
                state.end_step()
            if self._search is not None:
                # A backward with reduced gradients is a step, also for ranks that have joined.
                self._search.note_step()
                self._search.begin_pass()
        if not self._is_quantized:
            return self._average_densely(values)
        gradients, plain = self._group_of(bucket, topology).gradients, partial(self._average_densely, values)
        if values.layout != torch.strided:
            values = _shared_part(values, topology.layout.size)
            plain = partial(self._sum, values)
        averaged = gradients.reduce_in_place(
            values,
            dist.ReduceOp.AVG,
            plain=plain,
            run=partial(self._run_beside, values),
            number=state.steps,  # a backward pass reduces each bucket once, so (step, bucket) is unique
        )
        reason = None if gradients.all_reduce is None else gradients.unquantizable
        if reason is not None and reason.cause is Cause.DTYPE and values.dtype not in self._warned:
            self._warned.add(values.dtype)
            warn_user(
                f"gradients in {values.dtype} are averaged in full precision: only fp32, bf16 and fp16 are "
                "quantized",
                topology.layout.ranks,
            )
        return averaged

    def _check_model(self, first: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Raise ValueError if a model with this first bucket averages over other ranks than this state."""
        # The memory of a bucket is that of one wrapper, which a state may change. Sparse gradients are new.
        values = first.buffer()
        subject = values if values.layout == torch.strided else first.parameters()[0]
        if subject in self._checked:
            return
        # DDP passes a hook neither the model nor its process group, so this looks for them.
        models = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        own = dist.get_process_group_ranks(self._torch_group or dist.group.WORLD)
        for model in models:
            if not any(state is self for _, state in vars(model).get("_comm_hooks", ())):
                continue
            ranks = dist.get_process_group_ranks(model.process_group)
            if ranks != own:
                raise ValueError(
                    f"the model averages over {ranks_in_words(ranks)}, but its DDPCommState over "
                    f"{ranks_in_words(own)}: create it with DDPCommState(model.process_group, ...)"
                )
        self._checked[subject] = True

    def _group_of(self, bucket: dist.GradBucket, topology: Topology) -> BucketGroup:  # type: ignore[name-defined]
        """Return the bucket's group; DDP rebuilds its buckets after the first backward."""
        index, values = bucket.index(), bucket.buffer()
        if index == len(self._buckets):
            layout = topology.layout
            new = Bucket(
                name=f"bucket {index}",
                ranks=layout.ranks,
                process_group=self._torch_group or dist.group.WORLD,
                shard_numel=0,
                device=values.device,
                parameters=(),
            )
            created = BucketGroup(new, index=index, layout=layout, replicate=layout)
            created.weights.unquantized_reason = _NOT_SENT
            self._state.watch(created)
            created.gradients.unquantized_reason = Unquantized(Cause.SUMMED_IN_PLACE)
            self._equip_bucket(created)
            self._buckets.append(created)
        group: BucketGroup = self._buckets[index]
        rows, numel = group.view, values.numel()
        self._are_new |= rows.shard_numel != numel
        rows.shard_numel, rows.device, rows.parameters = numel, values.device, bucket.parameters()
        return group

    def _equip_bucket(self, group: BucketGroup) -> None:
        """Give a bucket the collective of the settings."""
        gradients, topology = group.gradients, self._topology
        gradients.unquantized_sum_reason, gradients.all_reduce = self._unquantized_reason, None
        if self.config.gradients is not None and self._unquantized_reason is None:
            assert topology is not None
            gradients.all_reduce = QuantizedAllReduce(
                topology,
                config=self.config.gradients,
                seed=self.config.seed,
                ranks=range(topology.layout.size),
                bucket=group.index,
                traffic=gradients.all_reduce_traffic,
                scratch=self._scratch,
                name=f"DDP's bucket {group.index}",
            )

    def _quantizes(self, config: SDP4BitConfig) -> bool:
        assert self._topology is not None
        return config.gradients is not None and layout_reason(config.gradients, self._topology.layout) is None

    def _install_groups(self) -> None:
        """Do nothing: DDP calls the hook, whatever the settings are."""

    def _equip(self) -> None:
        assert self._topology is not None
        self._unquantized_reason = layout_reason(self.config.gradients, self._topology.layout)
        for group in self._buckets:
            self._equip_bucket(group)

    def _average_densely(self, values: Tensor) -> Future[Tensor]:
        """Average as plain DDP."""
        size = dist.get_world_size(self._torch_group)
        is_dense = values.layout == torch.strided
        return self._sum(values.mul_(1.0 / size) if is_dense else _shared_part(values, size))

    def _sum(self, values: Tensor) -> Future[Tensor]:
        """Start DDP's own all-reduce."""
        with comm_error_context("full-precision gradient all-reduce of DDP", group=self._torch_group):
            work: Any = dist.all_reduce(values, group=self._torch_group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def _run_beside(self, values: Tensor, average: Callable[[], None]) -> Future[Tensor]:
        """Run a quantized all-reduce on a side stream; return a future of the values that it averages."""
        device = values.device
        if device not in self._streams:
            self._streams[device] = SideStream(device)
        future = _future(device)

        def average_and_answer() -> None:
            average()
            # On a GPU, waiting for the future waits for the side stream, which is current here.
            future.set_result(values)

        self._streams[device].run(average_and_answer)
        return future

    def _end_backward(self, count: int) -> None:
        """Record that all buckets have been passed, so many."""
        state, is_first = self._state, self._note == _NO_GRADIENTS
        state.step_pending = True
        for group in self._buckets[count:]:
            state.retired += group.gradients.all_reduce_traffic.total
        self._are_new |= count < len(self._buckets)
        del self._buckets[count:]
        if self._are_new:
            # Buckets hold other values now, so earlier measures describe none of them.
            state.telemetry = Telemetry(self.config.telemetry, [each.view.name for each in self._buckets])
            if self._alerts is not None:
                self._alerts.watch(self._buckets, telemetry=state.telemetry)
            self._are_new = False
        if is_first:
            self._note = one_node_note([(_NOT_SENT, self._unquantized_reason)])
            self._log_attached()

    def mark_step(self) -> None:
        """Do nothing: no weights are sent, and every backward pass counts as a step."""
        self._check_attached()

    def resync(self) -> None:
        """Do nothing: no weights are sent, so there are no replicas to refresh."""
        self._check_attached()

    def _check_switch(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "full_precision or time_steps was called during backward: call it between steps"
            )

    def _switch(self) -> None:
        self._set_quantized(not self._is_quantized)

    def _audited(self) -> list[ReplicaCopy]:
        return [
            ReplicaCopy(
                name=f"{group.view.name} (weights)",
                rows=torch.stack([checksum(parameter.detach()) for parameter in group.view.parameters]),
                layout=group.layout,
                process_group=group.view.process_group,
                is_full=True,
                traffic=group.weights.traffic,
                can_be_refreshed=False,
            )
            for group in self._buckets
            if group.view.process_group is not None
        ]

    def _refresh_mismatched(self, wrong: Sequence[Group], *, config: AuditConfig) -> Sequence[Group]:
        return wrong  # none: an audit of weights raises

    def state_dict(self) -> StateDict:
        """Return the step counter of the rounding bits; the same on all ranks."""
        self._check_attached()
        numbers = {"format_version": torch.tensor(FORMAT_VERSION), "steps": torch.tensor(self.steps)}
        return numbers | self._saved_search()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; call it on all ranks.

        DDP rebuilds its buckets after the first backward of each process, unless
        `find_unused_parameters=True`. So the first backward of a resumed run uses other quantization groups
        than the uninterrupted run.

        Raises:
            ValueError: the argument is no state of this class; nothing is changed.
        """
        self._check_attached()
        with self._on_all_ranks("load_state_dict"):
            check_state(state_dict, owner="an sdp4bit.DDPCommState", version=FORMAT_VERSION, keys=("steps",))
            check_choice(state_dict)
        self._load_search(state_dict)
        self._state.steps, self._state.step_pending = int(state_dict["steps"]), False


def _shared_part(gradient: Tensor, ranks: int) -> Tensor:
    """Return this rank's part of the mean of a sparse gradient."""
    # A new tensor, unlike plain DDP (docs/upstream.md): autograd may give the values of a gradient to another
    # parameter, too. Dense gradients are in DDP's own memory.
    return (gradient / ranks).coalesce()


def _future(device: torch.device) -> Future[Tensor]:
    return Future(devices=None if device.type == "cpu" else [device])


def _completed(values: Tensor) -> Future[Tensor]:
    future = _future(values.device)
    future.set_result(values)
    return future


def _raise_after_backward(failure: BaseException) -> None:
    """Raise an exception, as it is, once DDP has ended this backward."""
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def fail() -> None:
        raise failure

    # DDP queues its end behind its last bucket. So the first callback runs before that, and the second after.
    queue(partial(queue, fail))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


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
    if not isinstance(state, DDPCommState):
        raise TypeError(
            f"sdp4bit.ddp_comm_hook was registered with {type(state).__name__} as its state: use "
            "model.register_comm_hook(sdp4bit.DDPCommState(), sdp4bit.ddp_comm_hook)"
        )
    return state.average(bucket)

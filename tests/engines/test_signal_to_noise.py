"""The signal-to-noise ratio and the noise scale of `measure()`, against sums in full precision.

Layer: real processes over gloo, in which the oracle sends all gradients once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.group import Reduction
from sdp4bit.engines.fsdp2.hooks import ReduceScatterHook, ReplicateGroup
from sdp4bit.observe.measures import mean_ratios, sample_received, sample_sent
from tests.engines.ddp.test_hook import DDPRun
from tests.engines.fsdp2.test_hybrid import HybridRun
from tests.ranks import on_ranks
from tests.toy import Run, build, loss_of

ENTIRE = TelemetryConfig(interval=2, sample_numel=1 << 20)
CONFIG = SDP4BitConfig(gradients=GradientConfig(min_numel=0, inside_one_node=True), telemetry=ENTIRE)


def backward(run: Any) -> None:
    """The gradients of the last rank are ten times as long as those of the first."""
    rank = dist.get_rank()
    (loss_of(run.model, next(run.data)) * (1 + 9 * rank / (dist.get_world_size() - 1))).backward()


class Oracle:
    """Sums per parameter group: the ranks' gradients, and the mean on every rank as FSDP2 or DDP gets it."""

    def __init__(self) -> None:
        self.sent: dict[Any, Tensor] = {}
        self.arrived: dict[Any, tuple[Tensor, int, int]] = {}

    def send(self, key: Any, values: Tensor) -> None:
        self.sent[key] = self.sent.get(key, 0.0) + values.double()

    def receive(self, key: Any, values: Tensor, *, first: int, copies: int) -> None:
        before = self.arrived[key][0] if key in self.arrived else 0.0
        self.arrived[key] = before + values.double(), first, copies

    def ratios(self) -> tuple[float, float]:
        """Return |mean| / |error| and the variance of a rank's gradient over the squared gradient."""
        ranks, total = dist.get_world_size(), torch.zeros(3, dtype=torch.float64)
        for key, own in self.sent.items():
            mean, squares = own.clone(), own.square().sum()
            dist.all_reduce(mean)
            dist.all_reduce(squares)
            mean /= ranks
            arrived, first, copies = self.arrived[key]
            error = (arrived - mean[first : first + len(arrived)]).square().sum() / copies
            dist.all_reduce(error)
            deviations = squares - ranks * mean.square().sum()
            total += torch.stack([mean.square().sum(), error, deviations / (ranks - 1)])
        signal, noise, variance = total.tolist()
        return math.sqrt(signal / noise), variance / (signal - variance / ranks)

    @contextmanager
    def watching_fsdp2(self) -> Iterator[None]:
        reduce_scatter, all_reduce = ReduceScatterHook.__call__, ReplicateGroup.allreduce

        def scattered(hook: Any, **options: Any) -> None:
            output, group = options["output_tensor"], options["group"]
            self.send(hook._group, options["input_tensor"])
            reduce_scatter(hook, **options)
            if hook._group.replicate_layout is None:
                # The library lets FSDP2 ask for sums and divide later.
                mean = output / dist.get_world_size()
                self.receive(hook._group, mean, first=group.rank() * len(output), copies=1)

        def reduced(hook: Any, tensors: list[Tensor], opts: Any) -> None:
            all_reduce(hook, tensors, opts)
            mean = tensors[0] / dist.get_world_size()
            first = hook._group.view.process_group.rank() * len(mean)
            self.receive(hook._group, mean, first=first, copies=hook._stock.size())

        with (
            mock.patch.object(ReduceScatterHook, "__call__", scattered),
            mock.patch.object(ReplicateGroup, "allreduce", reduced),
        ):
            yield


def reduce_twice(run: Any) -> None:
    backward(run)
    backward(run)


def reduce_once(run: Any) -> None:
    run.model.set_requires_gradient_sync(False)
    backward(run)
    run.model.set_requires_gradient_sync(True)
    backward(run)


def all_reduce_once(run: Any) -> None:
    run.model.set_requires_all_reduce(False)
    backward(run)
    if run.comm._state.gradient_sample_numel:
        assert run.comm.measure()["signal_to_noise"] is None  # the mean over replicas has not arrived
    run.model.set_requires_all_reduce(True)
    backward(run)


def check_measured(measured: Sequence[Mapping[str, float]], oracle: Oracle) -> None:
    ratio, scale = oracle.ratios()
    expected = {"signal_to_noise": ratio, "gradient_noise_scale": scale}
    for each in measured:
        assert each == pytest.approx(expected, rel=1e-4), (measured, expected)
    assert 2 < ratio < 200 and scale > 0
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, measured)
    assert all(one == every[0] for one in every)


def names() -> tuple[str, str]:
    return "signal_to_noise", "gradient_noise_scale"


@pytest.mark.parametrize("step", [backward, reduce_twice, reduce_once, all_reduce_once])
@pytest.mark.parametrize("placement", [None, "shards in the node", "replicas in the node"])
@on_ranks(4, timeout=500)
def test_fsdp2_and_hsdp(placement: str | None, step: Callable[[Any], None]) -> None:
    if placement is None and step is all_reduce_once:
        return
    run: Any = Run(build(), CONFIG) if placement is None else HybridRun(CONFIG, placement)
    oracle = Oracle()
    assert [run.comm.measure()[name] for name in names()] == [None, None]
    step(run)
    run.step()
    with oracle.watching_fsdp2():
        step(run)
    measured = [run.comm.measure()]
    run.step()
    run.evaluate()
    measured.append(run.comm.measure())
    run.train(1)  # a step that is not measured
    measured.append(run.comm.measure())
    check_measured([{name: each[name] for name in names()} for each in measured], oracle)


@on_ranks(4, timeout=500)
def test_replicas_whose_shards_are_reduced_in_full_precision() -> None:
    config = replace(CONFIG, gradients=replace(CONFIG.gradients, intra_bits=None))
    run, oracle = HybridRun(config), Oracle()
    with oracle.watching_fsdp2():
        backward(run)
    run.step()
    with oracle.watching_fsdp2():
        oracle.__init__()  # type: ignore[misc]
        backward(run)
    check_measured([{name: run.comm.measure()[name] for name in names()}], oracle)


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(4, timeout=500)
def test_ddp(accumulate: int) -> None:
    run, oracle = DDPRun(CONFIG, topology=2), Oracle()
    reduce = QuantizedAllReduce.__call__

    def watched(all_reduce: Any, values: Tensor, **options: Any) -> None:
        oracle.send(all_reduce, values)
        reduce(all_reduce, values, **options)
        oracle.receive(all_reduce, values, first=0, copies=4)

    def step() -> None:
        for _ in range(accumulate - 1):
            with run.ddp.no_sync():
                backward(run)
        backward(run)
        run.optimizer.step()
        run.optimizer.zero_grad()

    for _ in range(3):
        step()
    with mock.patch.object(QuantizedAllReduce, "__call__", watched):
        step()
    measured = [run.state.measure()]
    step()
    measured.append(run.state.measure())
    check_measured([{name: each[name] for name in names()} for each in measured], oracle)


@on_ranks(4, timeout=500)
def test_a_sample_of_a_long_gradient_is_of_the_same_places_before_and_after() -> None:
    ratios = []
    for numel in (1 << 20, 2048):
        run = Run(build(), replace(CONFIG, telemetry=TelemetryConfig(interval=1, sample_numel=numel)))
        backward(run)
        ratios.append(run.comm.measure()["signal_to_noise"])
    assert ratios[1] == pytest.approx(ratios[0], rel=0.3) and ratios[1] != ratios[0]


@on_ranks(2, timeout=500)
def test_nothing_is_known_without_telemetry_and_with_gradients_that_are_not_finite() -> None:
    run = Run(build(), replace(CONFIG, telemetry=None), topology=1).train(2)
    assert [run.comm.measure()[name] for name in names()] == [None, None]
    run = Run(build(), replace(CONFIG, telemetry=TelemetryConfig(interval=1)), topology=1)
    (loss_of(run.model, next(run.data)) * (math.nan if dist.get_rank() else 1.0)).backward()
    assert [run.comm.measure()[name] for name in names()] == [None, None]


def test_micro_batches_with_gradients_of_other_parameters_are_not_known() -> None:
    process_group: Any = SimpleNamespace(size=lambda: 2)
    group: Any = SimpleNamespace(gradient_quantizers=[SimpleNamespace(group_unit=32)], mean_sample=None)
    over = Reduction(process_group, 0.5)
    found = []
    for numel in (64, 64, 32):
        values = torch.randn(numel)
        sample_sent(group, values, over, sample_numel=4096)
        sample_received(group, values / 2 + 0.01, over, copies=2, sample_numel=4096)
        with mock.patch.object(dist, "all_reduce"):  # the other rank has zeros
            found.append(mean_ratios([group.mean_sample])[0])
    assert None not in found[:2] and found[2] is None

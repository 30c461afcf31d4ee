"""Lossless refreshes of replicas: exact whatever the sizes, counted, and safe from damage.

Layer: 4 processes over gloo, as 2 nodes of 2 ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp4bit import WeightConfig
from sdp4bit.collectives import lossless_refresh
from sdp4bit.collectives.exchange import PendingExchange
from sdp4bit.collectives.lossless_refresh import LosslessCoding
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.collectives.topology import arrange, create_topologies
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.config import ReplicaPlacement
from sdp4bit.quantization import ops
from sdp4bit.quantization.lossless import DamagedMessageError
from sdp4bit.traffic import Traffic, TrafficCounter
from sdp4bit_lab.simulated.collectives import SimulatedReplica
from tests.ranks import run_ranks

LENGTH = 20_000
SIZES = [1e-5, 1e-5, 1e-5, 3e-4, 3e-4, 1.0, 1e-6, *[1e-6] * 5, 1e-3]
"""Of the movements of each step: those after a smaller one do not fit into its messages."""


def told_of(sent: Traffic, coding: LosslessCoding) -> tuple[float | None, ...]:
    counts = sent.inter_bytes, sent.intra_bytes, sent.padding_bytes
    return *counts, coding.further_rounds, coding.late_values, coding.bits_per_weight


class Replicas:
    """This rank's replica, and the main shards of all ranks, which every rank can compute."""

    def __init__(self, placement: ReplicaPlacement) -> None:
        layout = arrange(range(4), [0, 0, 1, 1])
        (topology,) = create_topologies([layout], purpose="weights").values()
        self.traffic = TrafficCounter(nodes=2, ranks_per_node=2)
        self.rank = dist.get_rank()
        self.replica = WeightReplica(
            topology,
            config=WeightConfig(mode="lossless", replica=placement),
            seed=0,
            rank=self.rank,
            bucket=0,
            traffic=self.traffic,
            scratch=Scratch(),
            name="blocks.0",
        )
        self._random = torch.Generator().manual_seed(1)
        self.main = 0.02 * torch.randn(4, LENGTH, generator=self._random)
        self.replica.start_full_refresh(self.main[self.rank].bfloat16())
        self.replica.wait()
        self.traffic.end_step()
        self.calls = 0

    def move(self, size: float, ranges: Any = None) -> None:
        movement = size * torch.randn(4, LENGTH, generator=self._random)
        for start, end in ranges or [(0, LENGTH)]:
            self.main[:, start:end] += movement[:, start:end]

    def refresh(self, ranges: Any = None) -> None:
        self.replica.start_quantized_refresh(self.main[self.rank], call=self.calls, ranges=ranges)
        self.calls += 1
        self.replica.wait()
        self.traffic.end_step()

    def expected(self) -> Tensor:
        rows = self.main.bfloat16().view(2, 2, LENGTH)
        return rows if self.replica.is_full else rows[:, self.rank % 2]

    def assert_exact(self) -> None:
        assert self.replica.rows is not None
        assert torch.equal(self.replica.rows.view(torch.int16), self.expected().view(torch.int16))


def refresh_with_surprises(placement: ReplicaPlacement) -> list[Any]:
    """Return, per step, bytes between nodes, padding, messages that were too small, and bits per weight."""
    with ops.use_backend("numba"):
        replicas = Replicas(placement)
        coding = replicas.replica.coding
        told = []
        for size in SIZES:
            replicas.move(size)
            replicas.refresh()
            replicas.assert_exact()
            sent = replicas.traffic.last_step
            told.append(told_of(sent, coding))
        return told


def simulate(placement: ReplicaPlacement) -> list[Any]:
    """Return what refresh_with_surprises returns on rank 0, of simulated ranks."""
    layout = arrange(range(4), [0, 0, 1, 1])
    traffic, scratch = TrafficCounter(nodes=2, ranks_per_node=2), Scratch()
    config = WeightConfig(mode="lossless", replica=placement)
    replica = SimulatedReplica(layout, config=config, seed=0, bucket=0, traffic=traffic, scratch=scratch)
    random = torch.Generator().manual_seed(1)
    main = 0.02 * torch.randn(4, LENGTH, generator=random)
    held = torch.empty(4, LENGTH, dtype=torch.bfloat16)
    replica.refresh_fully(main, held)
    traffic.end_step()
    told = []
    with ops.use_backend("numba"):
        for call, size in enumerate(SIZES):
            main += size * torch.randn(4, LENGTH, generator=random)
            replica.refresh(main, held, call=call)
            assert torch.equal(held.view(torch.int16), main.bfloat16().view(torch.int16))
            traffic.end_step()
            sent, coding = traffic.last_step, replica.coding
            told.append(told_of(sent, coding))
    return told


@pytest.mark.parametrize("placement", ["node", "full"])
def test_replicas_are_exact_also_when_a_step_needs_more_than_was_agreed(placement: ReplicaPlacement) -> None:
    results = run_ranks(refresh_with_surprises, 4, placement)
    told = results[0]
    rounds = [step[3] for step in told]
    # Larger movements after smaller ones: at 3e-4, at 1.0, at 1e-3 after many calm steps.
    assert rounds == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3]
    assert told[-1][4] > told[5][4] > told[3][4] > 0
    sent = [step[0] for step in told]
    assert sent[0] > 2 * LENGTH  # the first has room for all bits
    assert sent[2] < 0.25 * LENGTH
    assert sent[-2] < 0.1 * LENGTH
    assert [step[5] for step in told][5] > 9  # a jump by many times the weights themselves
    assert told == simulate(placement)


def train_ranges() -> None:
    """What does not train is not looked at."""
    with ops.use_backend("numba"):
        for placement in ("node", "full"):
            replicas = Replicas(placement)  # type: ignore[arg-type]
            ranges = [(100, 5000), (9000, 16001)]
            for size in (1e-4, 1e-2, 1e-4):
                replicas.move(size, ranges)
                replicas.refresh(ranges)
                replicas.assert_exact()
            replicas.move(1e-4)
            replicas.refresh()
            replicas.assert_exact()
            assert replicas.replica.coding.further_rounds >= 1


def test_ranges_of_a_row() -> None:
    run_ranks(train_ranges, 4)


def be_sent_damage(placement: ReplicaPlacement, bit: int) -> str:
    """Flip a bit of what rank 0 receives between nodes; return what it says, or nothing on other ranks."""
    with ops.use_backend("numba"):
        replicas = Replicas(placement)
        for size in (1e-4, 1e-4):
            replicas.move(size)
            replicas.refresh()
        replicas.move(1e-4)
        before = replicas.replica.rows.clone()  # type: ignore[union-attr]
        original = lossless_refresh.start_all_gather_rows

        class Damaged(PendingExchange):
            def __init__(self, pending: PendingExchange, received: Tensor) -> None:
                super().__init__([])
                self._pending, self._received = pending, received

            def wait(self) -> None:
                self._pending.wait()
                flat = self._received[1]
                flat[bit // 8 % flat.numel()] ^= 1 << bit % 8
                super().wait()

        def gather(received: Tensor, *args: Any, **named: Any) -> PendingExchange:
            return Damaged(original(received, *args, **named), received)

        if dist.get_rank() != 0:
            if placement == "node":
                replicas.refresh()
                replicas.assert_exact()
            else:  # rank 1 is handed the damaged message, too
                replicas.replica.start_quantized_refresh(replicas.main[replicas.rank], call=2)
                try:
                    replicas.replica.wait()
                except DamagedMessageError as error:
                    return str(error)
            return ""
        lossless_refresh.start_all_gather_rows = gather
        try:
            with pytest.raises(DamagedMessageError) as caught:
                replicas.refresh()
        finally:
            lossless_refresh.start_all_gather_rows = original
        assert torch.equal(before, replicas.replica.rows)  # type: ignore[arg-type]
        return str(caught.value)


@pytest.mark.parametrize(("placement", "bit"), [("node", 3), ("node", 20_001), ("full", 9_999)])
def test_a_damaged_message_is_said_to_come_from_its_sender(placement: ReplicaPlacement, bit: int) -> None:
    first, second, *others = run_ranks(be_sent_damage, 4, placement, bit)
    assert first.startswith("the lossless weights of blocks.0 from rank 2 are damaged: ")
    assert "resume from a checkpoint" in first
    assert second == ("" if placement == "node" else first)
    assert others == ["", ""]


def test_settings_that_are_not_lossless_are_said_to_have_no_effect() -> None:
    for name, value in (("bits", 8), ("bits", None), ("group_size", 128), ("rounding", "stochastic")):
        with pytest.raises(ValueError, match=f'{name}={value!r} has no effect with weights.mode="lossless"'):
            WeightConfig(mode="lossless", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "device", "words"),
    [
        (torch.bfloat16, "cuda", "blocks.0: .* has no kernels for cuda yet, only for the CPU"),
        (torch.float32, "cpu", "blocks.0 is gathered in torch.float32"),
    ],
)
def test_other_devices_and_types_are_refused_with_the_way_out(
    dtype: torch.dtype, device: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        lossless_refresh.check_dtype(dtype, torch.device(device), name="blocks.0")
    assert "weights=None" in str(caught.value)
    lossless_refresh.check_dtype(torch.float16, torch.device("cpu"), name="blocks.0")

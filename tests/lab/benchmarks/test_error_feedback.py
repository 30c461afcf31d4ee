"""Error feedback between nodes, as benchmarks.error_feedback trains with it. Layer: one process."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from benchmarks.error_feedback import reduction_with_feedback, train
from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.collectives.scratch import Scratch
from sdp4bit.config import GradientConfig
from sdp4bit.traffic import TrafficCounter
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from sdp4bit_lab.simulated import collectives as simulated

RANKS, PER_NODE, NUMEL = 4, 2, 3000


def reduced(kind: type[QuantizedReduceScatter], rounding: str, *, calls: int) -> torch.Tensor:
    """Return what every call leaves of the same gradients, [calls, ranks, n]."""
    layout = simulated.simulated_layout(RANKS, ranks_per_node=PER_NODE)
    config = GradientConfig(intra_bits=None, inter_bits=3, inter_rounding=rounding)
    with mock.patch.object(simulated, "QuantizedReduceScatter", kind):
        reduction = simulated.SimulatedReduceScatter(
            layout,
            config=config,
            seed=1,
            bucket=0,
            traffic=TrafficCounter(nodes=2, ranks_per_node=2),
            scratch=Scratch(),
        )
    found = torch.empty(calls, RANKS, NUMEL)
    for call in range(calls):
        for rows in gradients():
            reduction.add(rows, call=call)
        reduction.finish(lambda rank, row, call=call: found[call, rank].copy_(row))
    return found


def gradients() -> torch.Tensor:
    return torch.randn(RANKS, RANKS, NUMEL, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither"])
def test_errors_that_are_always_forgotten_change_no_bit(rounding):
    forgetful = reduction_with_feedback(beta=1.0, reset=1)
    plain = reduced(QuantizedReduceScatter, rounding, calls=2)
    assert torch.equal(reduced(forgetful, rounding, calls=2), plain)


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_what_a_message_leaves_out_comes_with_the_next(rounding):
    exact, calls = gradients().sum(0), 40

    def error_of_the_mean(kind: type[QuantizedReduceScatter]) -> float:
        mean = reduced(kind, rounding, calls=calls).mean(0)
        return float((mean - exact).square().mean() / exact.square().mean())

    once = reduced(QuantizedReduceScatter, rounding, calls=1)[0]
    one_error = float((once - exact).square().mean() / exact.square().mean())
    # The sum over all calls errs by no more than what the last one left out: the mean by 1 / calls of that.
    assert error_of_the_mean(reduction_with_feedback(beta=1.0, reset=None)) < 4 * one_error / calls**2
    without = error_of_the_mean(QuantizedReduceScatter)
    assert without > 0.5 * one_error / calls, "without feedback the errors only average out, if that"


def test_feedback_needs_nodes_of_several_ranks():
    alone = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
    with pytest.raises(SettingError, match="give --simulated-ranks 4"):
        train(PretrainConfig(), feedback="plain", beta=1.0, reset=1, ranks=alone)

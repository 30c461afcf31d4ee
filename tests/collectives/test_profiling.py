"""Collectives and operators are named ranges of a profile. Layer: gloo."""

from __future__ import annotations

import torch

from sdp4bit.config import GradientConfig, WeightConfig
from tests.collectives.built import reduce_scatter_of, replica_of
from tests.ranks import on_ranks


@on_ranks(2)
def test_profiles_name_collectives_with_their_group_and_operators() -> None:
    replica, _ = replica_of(2, 1, WeightConfig(), name="layers.3")
    reduction, _ = reduce_scatter_of(2, 1, GradientConfig(), name="layers.3")
    with torch.profiler.profile() as profile:
        reduction(torch.empty(64), torch.ones(128), call=0)
        replica.start_full_refresh(torch.zeros(64))
        replica.start_quantized_refresh(torch.ones(64))
        replica.wait()
    names = [event.name for event in profile.events() if event.name.startswith("sdp4bit::")]
    of_group = [
        f"sdp4bit::{name} (layers.3)" for name in ("reduce_scatter", "full_refresh", "weight_refresh")
    ]
    assert set(names) == {
        *of_group,
        *("sdp4bit::hadamard_quantize", "sdp4bit::dequantize_reduce_hadamard"),
        *("sdp4bit::subtract_quantize", "sdp4bit::dequantize_add"),
    }

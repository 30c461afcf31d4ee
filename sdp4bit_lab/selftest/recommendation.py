"""Recommend for or against sdp4bit on this cluster, from measured bandwidths and planned bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sdp4bit.config import SDP4BitConfig
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.plan.config import ProbeConfig
from sdp4bit_lab.plan.costs import Cluster
from sdp4bit_lab.plan.latency import Latency
from sdp4bit_lab.plan.layout import ParallelLayout
from sdp4bit_lab.plan.model import PlanModelConfig, gpt_groups
from sdp4bit_lab.plan.probe import measure
from sdp4bit_lab.plan.step import plan_step
from sdp4bit_lab.pretrain.model.cards import CardName
from sdp4bit_lab.selftest.check import CheckSkippedError, Context

MODEL: CardName = "1.3B"
_MEGABYTES, _ROUNDS = 8.0, 3
_LEAST_GAIN = 1.1
"""Ratio of the communication times above which sdp4bit is recommended."""


def check_recommendation(context: Context) -> dict[str, Any]:
    """Return the measured links, the communication time of a 1.3B model's step, and a recommendation.

    On a single node, the recommendation is about `topology=1`.
    """
    if context.ranks.world_size == 1:
        raise CheckSkippedError("one rank sends nothing")
    if context.config.share_gpu is not None and context.is_cuda:
        raise CheckSkippedError("ranks that share a GPU have no links of their own")
    parallel = context.config.parallel
    probed = measure(
        ProbeConfig(megabytes=_MEGABYTES, rounds=_ROUNDS, parallel=parallel), ranks=context.ranks
    )
    nodes, seconds = probed["nodes"], probed["latency"]
    cluster = Cluster(
        name=probed["name"],
        nodes=nodes,
        devices_per_node=probed["devices_per_node"],
        # A level of one rank is not used.
        inter_bandwidth=probed["inter_bandwidth"] or math.inf,
        intra_bandwidth=probed["intra_bandwidth"] or math.inf,
        latency=Latency(message=seconds) if nodes > 1 else Latency(nvlink=seconds),
        quantization_bandwidth=probed["quantization_bandwidth"],
        device_flops=1.0,
        device_memory=(
            torch.cuda.get_device_properties(context.device).total_memory if context.is_cuda else None
        ),
    )
    plan = plan_step(
        gpt_groups(PlanModelConfig(model_card=MODEL).padded_shape(tensor_parallel=1)),
        # Plan communication only.
        flops_per_sequence=0.0,
        cluster=cluster,
        layout=ParallelLayout(),
        config=SDP4BitConfig(),
    )
    plain = {
        "fp32 gradients": plan.baseline.communication_seconds,
        "bf16 gradients": plan.bf16_baseline.communication_seconds,
    }
    if plan.hybrid is not None:
        plain[f"{plan.hybrid.name} and bf16 gradients"] = plan.hybrid.plain.communication_seconds
    kernels, ours = plan.quantized.quantization_seconds, plan.quantized.communication_seconds
    links = " and ".join(
        f"{format_bytes(rate)}/s {level}"
        for rate, level in (
            (probed["inter_bandwidth"], "between nodes (per node)"),
            (probed["intra_bandwidth"], f"inside {'the' if nodes == 1 else 'a'} node (per rank)"),
        )
        if rate is not None
    )
    return {
        "probe": probed,
        "model": MODEL,
        "exchange_seconds": {**plain, "sdp4bit": ours},
        "kernel_seconds": kernels,
        "topology": 1 if plan.is_split else None,
        "recommendation": recommendation(
            plain, exchange=ours, kernels=kernels, links=links, is_split=plan.is_split
        ),
    }


def recommendation(
    plain: Mapping[str, float], *, exchange: float, kernels: float, links: str, is_split: bool
) -> str:
    """Return a recommendation from the seconds of a step's communication.

    Args:
        plain: without quantization, by its name.
        exchange: with sdp4bit, without kernels.
        links: measured rates, as text.
        is_split: every rank of a single node counts as a node.
    """
    ours = exchange + kernels
    seconds = ", ".join(f"{value:.2f} s with {name}" for name, value in plain.items())
    text = (
        f"measured {links}. Estimated communication of a {MODEL} model on these links, per step: {seconds}, "
        f"{ours:.2f} s with sdp4bit (of which kernels {kernels:.2f} s). "
    )
    gains = [value / ours for value in plain.values()]
    how = " with topology=1, each rank as its own node" if is_split else ""
    if min(gains) < _LEAST_GAIN:
        return f"{text}sdp4bit is not worth enabling here{', with topology=1 either' if is_split else ''}"
    *first, last = (f"{gain:.1f}" for gain in gains)
    return (
        f"{text}sdp4bit makes it {', '.join(first)} and {last} times faster: enable it{how}, unless "
        "computation hides the communication"
    )

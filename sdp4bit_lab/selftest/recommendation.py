"""Recommend for or against sdp4bit on this cluster, from measured bandwidths and planned bytes."""

from __future__ import annotations

from typing import Any

from sdp4bit.config import SDP4BitConfig
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
    """Return the communication time of a 1.3B model's step, and a recommendation."""
    if context.ranks.world_size == 1:
        raise CheckSkippedError("one rank sends nothing")
    if context.are_threads:
        raise CheckSkippedError("threads send nothing over links")
    parallel = context.config.parallel
    probed = measure(
        ProbeConfig(megabytes=_MEGABYTES, rounds=_ROUNDS, parallel=parallel), ranks=context.ranks
    )
    if probed["inter_bandwidth"] is None:
        raise CheckSkippedError(
            "all ranks are on one node, where nothing is quantized by default; --ranks-per-node splits a "
            "host into nodes"
        )
    cluster = Cluster(
        name=probed["name"],
        nodes=probed["nodes"],
        devices_per_node=probed["devices_per_node"],
        inter_bandwidth=probed["inter_bandwidth"],
        # Not used with one device per node.
        intra_bandwidth=probed["intra_bandwidth"] or probed["inter_bandwidth"],
        latency=Latency(message=probed["latency"]),
        quantization_bandwidth=probed["quantization_bandwidth"],
        device_flops=1.0,
    )
    plan = plan_step(
        gpt_groups(PlanModelConfig(model_card=MODEL).padded_shape(tensor_parallel=1)),
        # Plan communication only.
        flops_per_sequence=0.0,
        cluster=cluster,
        layout=ParallelLayout(),
        config=SDP4BitConfig(),
    )
    plain, bf16 = plan.baseline.communication_seconds, plan.bf16_baseline.communication_seconds
    kernels, ours = plan.quantized.quantization_seconds, plan.quantized.communication_seconds
    return {
        "probe": probed,
        "model": MODEL,
        "exchange_seconds": {"fp32 gradients": plain, "bf16 gradients": bf16, "sdp4bit": ours},
        "kernel_seconds": kernels,
        "recommendation": recommendation(plain=plain, bf16=bf16, exchange=ours, kernels=kernels),
    }


def recommendation(*, plain: float, bf16: float, exchange: float, kernels: float) -> str:
    """Return a recommendation from the seconds of a step's communication."""
    ours = exchange + kernels
    gain = bf16 / ours
    text = (
        f"estimated communication of a {MODEL} model on these links, per step: {plain:.2f} s with fp32 "
        f"gradients, {bf16:.2f} s with bf16 gradients, {ours:.2f} s with sdp4bit (of which kernels "
        f"{kernels:.2f} s). "
    )
    if gain < _LEAST_GAIN:
        return text + "sdp4bit is not worth enabling here"
    return (
        text
        + f"sdp4bit makes it {plain / ours:.1f} and {gain:.1f} times faster: enable it unless computation "
        "hides the communication"
    )

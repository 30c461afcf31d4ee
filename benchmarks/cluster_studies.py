"""Strategies of others that the emulated cluster has only for comparisons; no features of the library.

`local-H` is DiLoCo (Douillard et al., arXiv 2311.08105) as torchft runs it: ranks train alone, and every H
steps they average their movements. `zeropp` is the communication of ZeRO++ (Wang et al., arXiv 2306.10209):
weights in 8 bits and gradients in 4, in blocks, rounded to nearest. Groups of 128 gradients share a scale, as
in sdp4bit. DeepSpeed's own collectives, and hpZ's second copy of the weights, are not part of it.
`sdp4bit-8bit-gradients` is the setting for Muon, `NAME-threes` exchanges three blocks at once, and `qwd-SIZE`
is `qwd` with groups of that size, where `qwd` has 2,048.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from benchmarks.cluster_strategies import (
    STRATEGIES,
    Cluster,
    TrainingStep,
    Workload,
    build_model,
    preset_of,
    stock_fsdp2,
    training_step_of_ddp,
    training_step_of_fsdp2,
)
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.collectives.topology import create_topology

OUTER = {1: (0.7, 0.6), 8: (1.0, 0.0), 30: (0.7, 0.6), 100: (0.7, 0.6)}
"""DiLoCo's outer learning rate and momentum, by the steps from one exchange to the next.

The best that were tried (results/frontier-outer-optimizer.json); torchft's examples have 0.7 and 0.9. The
entry of one step is for the time of an exchange.
"""
ZERO_PLUS_PLUS = SDP4BitConfig(
    weights=WeightConfig(bits=8, mode="direct"),
    gradients=GradientConfig(
        intra_bits=4,
        intra_rounding="nearest",
        inter_rounding="nearest",
        hadamard=False,
        exact_own=False,
    ),
)


class LocalSteps(TrainingStep):
    """Train alone with AdamW, and every `period` steps exchange movements of the weights.

    The anchor is the weights after the last exchange. An outer SGD, with Nesterov momentum unless that is
    0, moves it by the mean of the ranks' movements, and every rank continues from it.
    """

    def __init__(
        self, model: nn.Module, *, workload: Workload, period: int, messages: GradientConfig | None
    ) -> None:
        """Create both optimizers; collective.

        Args:
            messages: format of the movements; None sends fp32.
        """
        super().__init__(model, workload=workload)
        self._period = period
        self._anchor = nn.Parameter(self._weights())
        rate, momentum = OUTER[period]
        self._outer = torch.optim.SGD([self._anchor], rate, momentum=momentum, nesterov=momentum > 0)
        self._all_reduce = messages and QuantizedAllReduce(create_topology(1), config=messages)

    def _weights(self) -> Tensor:
        return parameters_to_vector(self.parameters()).detach()

    def __call__(self) -> Tensor:
        loss = super().__call__()
        if self.steps % self._period == 0:
            self._exchange()
        return loss

    def finish(self) -> None:
        if self.steps % self._period:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        moved = self._anchor - self._weights()
        if self._all_reduce:
            self._all_reduce(moved, call=self.steps, multiplier=1 / dist.get_world_size())
        else:
            dist.all_reduce(moved)
            moved /= dist.get_world_size()
        self._anchor.grad = moved
        self._outer.step()
        self._anchor.grad = None
        parameters = list(self.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, values in zip(parameters, self._anchor.split(sizes), strict=True):
            parameter.copy_(values.view_as(parameter))


def _qwd(group_size: int) -> SDP4BitConfig:
    config = preset_of("qwd")
    assert config.weights is not None
    return replace(config, weights=replace(config.weights, group_size=group_size))


def _local(period: int, messages: GradientConfig | None) -> Callable[[Workload, Cluster], TrainingStep]:
    def build(workload: Workload, cluster: Cluster) -> TrainingStep:
        model = build_model(workload)
        return LocalSteps(model, workload=workload, period=period, messages=messages)

    return build


STUDIES: dict[str, Callable[[Workload, Cluster], TrainingStep]] = {
    "ddp-powersgd-32": training_step_of_ddp("powersgd", matrix_approximation_rank=32),
    "zeropp": training_step_of_fsdp2(ZERO_PLUS_PLUS),
    "sdp4bit-paper": training_step_of_fsdp2(preset_of("sdp4bit-paper")),
    "sdp4bit-8bit-gradients": training_step_of_fsdp2(SDP4BitConfig(gradients=GradientConfig(inter_bits=8))),
    "fsdp2-bf16-threes": stock_fsdp2(torch.bfloat16, blocks_per_group=3),
    "sdp4bit-threes": training_step_of_fsdp2(preset_of("sdp4bit"), blocks_per_group=3),
    **{f"qwd-{size}": training_step_of_fsdp2(_qwd(size)) for size in (512, 1024, 4096)},
    **{f"local-{period}": _local(period, None) for period in OUTER},
    **{f"local-{period}-4bit": _local(period, GradientConfig()) for period in OUTER},
}
BUILDERS = STRATEGIES | STUDIES
"""All strategies; those of studies run only if they are named."""

"""Name the strategies: the paper's ablation (Table 6) in its order, then the library's presets."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig

Strategy = Literal[
    "baseline",
    "qw",
    "qwd",
    "ulq",
    "tlq",
    "tlq-hs",
    "sdp4bit-paper",
    "sdp4bit",
    "sdp4bit-w3g3.5",
    "sdp4bit-w2g3",
    "sdp4bit-w2g2",
]
DEFAULT_STRATEGY: Strategy = "sdp4bit"


def _whole_rows(
    weights: WeightConfig | None = None, gradients: GradientConfig | None = None
) -> SDP4BitConfig:
    """Build a strategy of the paper, which quantizes each row without parameter boundaries."""
    return SDP4BitConfig(weights=weights, gradients=gradients, separate_parameters=False)


_TLQ_HS = GradientConfig(inter_rounding="stochastic", exact_own=False)
_TLQ = replace(_TLQ_HS, hadamard=False)

STRATEGIES: dict[Strategy, SDP4BitConfig] = {
    "baseline": _whole_rows(),
    "qw": _whole_rows(WeightConfig(mode="direct")),
    "qwd": _whole_rows(WeightConfig()),
    "ulq": _whole_rows(gradients=replace(_TLQ, intra_bits=4)),
    "tlq": _whole_rows(gradients=_TLQ),
    "tlq-hs": _whole_rows(gradients=_TLQ_HS),
    "sdp4bit-paper": _whole_rows(WeightConfig(), _TLQ_HS),
    "sdp4bit": SDP4BitConfig.preset("sdp4bit"),
    "sdp4bit-w3g3.5": SDP4BitConfig.preset("sdp4bit-w3g3.5"),
    "sdp4bit-w2g3": SDP4BitConfig.preset("sdp4bit-w2g3"),
    "sdp4bit-w2g2": SDP4BitConfig.preset("sdp4bit-w2g2"),
}
"""baseline: bf16 weights, fp32 gradients. qw: 4-bit weights. qwd: 4-bit weight differences. ulq: 4-bit
gradients at both hops. tlq: 8-bit intra-node, 4-bit inter-node. tlq-hs: tlq after a Hadamard transform.
sdp4bit-paper: qwd and tlq-hs, the paper's SDP4Bit."""

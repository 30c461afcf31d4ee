"""The ablation of the paper's table 6, field by field, for tests of the library and of the lab."""

from __future__ import annotations

from sdp4bit.config import GradientConfig, SDP4BitConfig, WeightConfig

_WEIGHTS = WeightConfig(bits=4, group_size=2048, mode="difference", replica="node")
_DIRECT = WeightConfig(bits=4, group_size=2048, mode="direct", replica="node")


def _gradients(*, intra_bits: int, hadamard: bool) -> GradientConfig:
    return GradientConfig(
        intra_bits=intra_bits,
        inter_bits=4,
        intra_group_size=128,
        inter_group_size=128,
        hadamard=hadamard,
        intra_rounding="stochastic",
        inter_rounding="stochastic",
        exact_own=False,
    )


_PARTS = {
    "baseline": (None, None),
    "qw": (_DIRECT, None),
    "qwd": (_WEIGHTS, None),
    "ulq": (None, _gradients(intra_bits=4, hadamard=False)),
    "tlq": (None, _gradients(intra_bits=8, hadamard=False)),
    "tlq-hs": (None, _gradients(intra_bits=8, hadamard=True)),
    "sdp4bit-paper": (_WEIGHTS, _gradients(intra_bits=8, hadamard=True)),
}
PAPER_STRATEGIES = {
    name: SDP4BitConfig(weights=weights, gradients=gradients, separate_parameters=False)
    for name, (weights, gradients) in _PARTS.items()
}

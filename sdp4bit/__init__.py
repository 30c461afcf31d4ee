"""4-bit communication for sharded data-parallel training in PyTorch.

SDP4Bit (NeurIPS 2024) quantizes weight differences to 4 bits and gradients to 8 bits inside a node and 4 bits
between nodes. One line after `fully_shard`::

    comm = sdp4bit.quantize_communication(model)
"""

from __future__ import annotations

from sdp4bit import megatron
from sdp4bit.collectives.errors import ExchangeError
from sdp4bit.config import (
    PRESETS,
    VERSION,
    AlertConfig,
    AuditConfig,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
)
from sdp4bit.engines.audit import ReplicaMismatchError
from sdp4bit.engines.fallback import Alert
from sdp4bit.engines.fsdp2.api import quantize_communication
from sdp4bit.engines.handle import CommHandle

__version__ = VERSION

__all__ = [
    "PRESETS",
    "Alert",
    "AlertConfig",
    "AuditConfig",
    "CommHandle",
    "ExchangeError",
    "GradientConfig",
    "ReplicaMismatchError",
    "SDP4BitConfig",
    "TelemetryConfig",
    "WeightConfig",
    "__version__",
    "megatron",
    "quantize_communication",
]

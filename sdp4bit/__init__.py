"""4-bit communication for sharded data-parallel training in PyTorch.

SDP4Bit (NeurIPS 2024) sends weight differences in 4 bits, and gradients in 8 bits inside a node and 4 bits
between nodes. One line after `fully_shard`::

    comm = sdp4bit.quantize_communication(model)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sdp4bit.config import (
    PRESETS,
    VERSION,
    AlertConfig,
    AuditConfig,
    Auto,
    GradientConfig,
    SDP4BitConfig,
    TelemetryConfig,
    WeightConfig,
)

if TYPE_CHECKING:
    from sdp4bit.collectives.errors import ExchangeError
    from sdp4bit.engines.ddp.hook import DDPCommState, ddp_comm_hook
    from sdp4bit.engines.entrance import quantize_communication
    from sdp4bit.engines.handle import CommHandle
    from sdp4bit.observe.alerts import Alert
    from sdp4bit.observe.audit import ReplicaMismatchError

__version__ = VERSION

__all__ = [
    "PRESETS",
    "Alert",
    "AlertConfig",
    "AuditConfig",
    "Auto",
    "CommHandle",
    "DDPCommState",
    "ExchangeError",
    "GradientConfig",
    "ReplicaMismatchError",
    "SDP4BitConfig",
    "TelemetryConfig",
    "WeightConfig",
    "__version__",
    "ddp_comm_hook",
    "quantize_communication",
]

_IMPORTED_WHEN_USED = {
    "Alert": "sdp4bit.observe.alerts",
    "CommHandle": "sdp4bit.engines.handle",
    "DDPCommState": "sdp4bit.engines.ddp.hook",
    "ExchangeError": "sdp4bit.collectives.errors",
    "ReplicaMismatchError": "sdp4bit.observe.audit",
    "ddp_comm_hook": "sdp4bit.engines.ddp.hook",
    "quantize_communication": "sdp4bit.engines.entrance",
}
"""Names whose modules import torch, which takes seconds and is not needed for help, settings and plans."""

if not TYPE_CHECKING:  # so that a type checker rejects unknown names

    def __getattr__(name: str) -> object:
        if name not in _IMPORTED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
        return value


def __dir__() -> list[str]:
    """Return the public names, including those not imported yet."""
    return sorted(__all__)

"""Quantized collectives over `torch.distributed`, for training loops without an engine.

The engines use the same objects. `examples/by_hand.py` trains with them::

    topology = create_topology(8)  # ranks per node
    replica = WeightReplica(topology, config=WeightConfig())
    reduce_scatter = QuantizedReduceScatter(topology, config=GradientConfig())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdp4bit.collectives.all_reduce import QuantizedAllReduce
    from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
    from sdp4bit.collectives.topology import Topology, create_topology
    from sdp4bit.collectives.weight_replica import WeightReplica

__all__ = ["QuantizedAllReduce", "QuantizedReduceScatter", "Topology", "WeightReplica", "create_topology"]

_MODULES = {
    "QuantizedAllReduce": "all_reduce",
    "QuantizedReduceScatter": "reduce_scatter",
    "Topology": "topology",
    "WeightReplica": "weight_replica",
    "create_topology": "topology",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        # When a name is used, because plans need other modules of this package and no torch.
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

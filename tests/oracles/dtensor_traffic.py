"""The collectives that DTensor issues, counted as rings in rank order: the minimum of any algorithm."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

RINGS = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2, "all_to_all_single": 1}
"""Number of times that a ring sends the full tensor around."""


class CollectiveCounter(TorchDispatchMode):
    """Count calls and inter-node bytes of the collectives below DTensor."""

    def __init__(self, ranks_per_node: int) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node
        self.calls: Counter[str] = Counter()
        self.inter_bytes = 0.0
        """Sent by one node."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor calls again with its collectives
        name = function._schema.name.partition("::")[2]
        if function.namespace == "_c10d_functional" and name in RINGS:
            self._count(name, args[0], str(args[-1]))
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: torch.Tensor, group_name: str) -> None:
        group = torch._C._distributed_c10d._resolve_process_group(group_name)
        ranks = dist.get_process_group_ranks(group)
        # The full tensor: the result of a gather, the input of other collectives.
        whole = tensor.nbytes * (len(ranks) if name == "all_gather_into_tensor" else 1)
        nodes = len({rank // self._ranks_per_node for rank in ranks})
        self.calls[f"{name} {'between nodes' if nodes > 1 else 'inside a node'}"] += 1
        if nodes > 1:
            # A ring over all ranks leaves a node once, rings over replicas once per rank of the node.
            rings = self._ranks_per_node * nodes // len(ranks)
            self.inter_bytes += rings * RINGS[name] * whole * (len(ranks) - 1) / len(ranks)

"""Launches on a GPU of one optimizer step beyond those of plain FSDP2, counted on one simulated rank.

    python -m tests.engines.launches results/launches.json

writes the counts that docs/results/speed.md states.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from sdp4bit import SDP4BitConfig, quantize_communication
from tests.engines.simulated_cuda import Kernels, _Group, simulate
from tests.engines.stream_simulator import is_library

LAYOUT = {"nodes": 2, "ranks_per_node": 8}
WIDTH, HIDDEN, LAYERS = 256, 512, 4
GROUPS = LAYERS + 1
_NO_LAUNCH = {
    *("view", "_unsafe_view", "slice", "select", "t", "transpose", "detach", "alias", "as_strided"),
    *("squeeze", "unsqueeze", "expand", "split", "split_with_sizes", "unbind", "narrow", "permute"),
    *("unfold", "set_", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("resize_", "record_stream", "_record_function_enter_new", "_record_function_exit"),
    *("lift_fresh", "is_same_size"),
}
"""Operators that make a view or allocate."""


class _Norm(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.bias is None else x * self.weight + self.bias


class _Block(nn.Module):
    """The parameters of a Llama block: seven matrices and two norms, and if wanted their biases."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([_Norm(bias=bias), _Norm(bias=bias)])
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        for matrix in self.attention:
            x = x + matrix(y)
        y = self.norms[1](x)
        return x + self.down(self.gate(y) * self.up(y))


class _Launches(TorchDispatchMode):
    """Counts the operators that launch, by the function of the library that calls them; "" for others."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "c10d" and name not in _NO_LAUNCH:
            self.counts[_caller()] += 1
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Return module and function of the innermost call of the library."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_library(file):
            return f"{file.rpartition('sdp4bit/')[2]} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _count(config: SDP4BitConfig | None, *, bias: bool) -> tuple[Counter[str], int]:
    """Return the launches of a step that is not measured, by cause, and the number of host waits."""
    torch.manual_seed(0)
    kernel, coalesced = Kernels.__getattr__, _Group._coalesced
    with simulate(world=LAYOUT["nodes"] * LAYOUT["ranks_per_node"], sees_operators=False) as sim:
        blocks = [_Block(bias=bias) for _ in range(LAYERS)]
        model = nn.Sequential(nn.Embedding(512, WIDTH), *blocks, _Norm(), nn.Linear(WIDTH, 512, bias=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*blocks, model):
            fully_shard(module, mp_policy=policy)
        if config is not None:
            quantize_communication(model, topology=LAYOUT["ranks_per_node"], config=config)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tokens = torch.randint(0, 512, (1, 8))
        launches = _Launches()

        def counted(kernels: Kernels, name: str) -> Any:
            launches.counts[f"kernel {name}"] += 1
            return kernel(kernels, name)

        def joined(group: _Group, run: Any, outputs: Any, inputs: Any, options: Any) -> Any:
            launches.counts[f"collective {run.__name__.removesuffix('_single')}"] -= len(outputs) - 1
            return coalesced(group, run, outputs, inputs, options)

        def step() -> None:
            model(tokens).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        sent, waits = len(sim.collectives), len(sim.host_waits)
        with (
            launches,
            mock.patch.object(Kernels, "__getattr__", counted),
            mock.patch.object(_Group, "_coalesced", joined),
        ):
            step()
        kinds = [each.alike[0] for each in sim.collectives[sent:]]
        # The library's only all-reduce, of flags, is one of the host.
        launches.counts.update(f"collective {kind}" for kind in kinds if kind != "all_reduce")
        return launches.counts, len(sim.host_waits) - waits


def count_launches(*, bias: bool) -> tuple[Counter[str], int]:
    """Return the launches of the default configuration beyond plain FSDP2, by cause, and its host waits.

    Args:
        bias: whether the layers of a block have biases.

    Collectives that plain FSDP2 launches instead are negative.
    """
    counts, waits = _count(SDP4BitConfig(), bias=bias)
    counts.subtract(_count(None, bias=bias)[0])
    return Counter({cause: count for cause, count in counts.items() if count}), waits


def table_of(counts: Counter[str]) -> str:
    """Return a line per cause, most launches first."""
    return "\n".join(f"{count:5} {cause or 'elsewhere'}" for cause, count in counts.most_common())


def main(path: str) -> None:
    result: dict[str, Any] = {**LAYOUT, "groups": GROUPS}
    for name, bias in (("launches", False), ("launches_with_biases", True)):
        counts, result["host_waits"] = count_launches(bias=bias)
        result[name] = dict(sorted(counts.items()))
        print(f"{table_of(counts)}\n{counts.total()} launches of {GROUPS} groups")
    Path(path).write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    from torch.distributed import HashStore, init_process_group

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    main(sys.argv[1])

"""Launches and host time per parameter group of one training step, with ranks as threads of one process.

    python -m benchmarks.gpu_profile profile.json --ranks 8 --width 4096

Two Llama-like blocks and a head of that width are trained with plain FSDP2, then with sdp4bit's default. All
ranks are profiled at once. "launches" are CUDA launches per group and rank, null on a CPU. "hook_us" is host
time in the library's hooks per group and rank, an upper bound because threads share the interpreter.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from sdp4bit import quantize_communication
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.selftest.threads import run_on_threads

LAYERS, VOCABULARY, TOKENS = 2, 4096, 512
GROUPS = LAYERS + 1
_LAUNCH = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
_HOOKS = ("sdp4bit::all_gather (", "sdp4bit::reduce_scatter (")
_WARM_UP = 3


class _Block(nn.Module):
    """The parameters of a Llama block: seven matrices and two norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width * 11 // 4
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        for matrix in self.attention:
            x = x + matrix(y)
        y = self.norms[1](x)
        return x + self.down(self.gate(y) * self.up(y))


def _step_of(ranks: Ranks, *, width: int, quantized: bool) -> Any:
    """Return a function that takes one optimizer step of a new model."""
    torch.manual_seed(0)
    blocks = [_Block(width) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY, bias=False))
    model.to(ranks.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy)
    handle = quantize_communication(model, topology=ranks.world_size // 2) if quantized else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device=ranks.device)

    def step() -> None:
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.handle = handle  # type: ignore[attr-defined]  # lives as long as the step
    return step


def _profiled(size: int, device: str, *, width: int, quantized: bool) -> dict[str, Any]:
    """Return launches and host microseconds of one step, per group and rank."""
    profiles: list[Any] = []

    def program(ranks: Ranks) -> None:
        step = _step_of(ranks, width=width, quantized=quantized)
        for _ in range(_WARM_UP):
            step()
        torch.distributed.barrier()
        # One rank records all threads, its own and those of autograd included.
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        settings = _ExperimentalConfig(profile_all_threads=True)
        recorder = profile(activities=activities, experimental_config=settings) if ranks.rank == 0 else None
        if recorder is not None:
            recorder.start()
        torch.distributed.barrier()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        torch.distributed.barrier()
        if recorder is not None:
            recorder.stop()
            profiles.append(recorder)

    run_on_threads(program, size=size, device=device, timeout=timedelta(minutes=5))
    averages = profiles[0].key_averages()
    launches = sum(each.count for each in averages if each.key.startswith(_LAUNCH))
    # The outermost ranges, which contain those of the refresh and of the operators.
    hooks = [each for each in averages if each.key.startswith(_HOOKS)]
    return {
        "launches": round(launches / size / GROUPS, 1) if device == "cuda" else None,
        "hook_us": round(sum(each.cpu_time_total for each in hooks) / size / GROUPS) if hooks else None,
        "calls": sum(each.count for each in hooks) / size / GROUPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, help="file to write")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    found = {
        name: _profiled(arguments.ranks, arguments.device, width=arguments.width, quantized=name == "sdp4bit")
        for name in ("plain", "sdp4bit")
    }
    settings = {"ranks": arguments.ranks, "width": arguments.width, "layers": LAYERS, "groups": GROUPS}
    arguments.json.write_text(json.dumps({**settings, **found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

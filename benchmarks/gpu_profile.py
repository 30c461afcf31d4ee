"""Launches and host time per parameter group of one training step, on ranks that share a GPU over NCCL.

    python -m benchmarks.gpu_profile profile.json --ranks 2 --width 256

Two Llama-like blocks and a head of that width are trained with plain FSDP2, then with sdp4bit's default.
Numbers are per group, of rank 0 and the whole step. "launches" are CUDA launches, null on a CPU. "host_us" is
the time in which the host has issued a step, the median of steps that are not profiled. It contains waits for
other ranks' hosts, the kernels on a CPU, and with a large width the waits for a device whose queue is full.
"step_us" lasts until the device has finished. "calls" are calls of the library's hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

from sdp4bit import quantize_communication
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.launch.local import run_on_ranks
from sdp4bit_lab.common.launch.shared_gpu import multi_process_service, nccl_variables
from sdp4bit_lab.common.ranks import Ranks

LAYERS, VOCABULARY, TOKENS = 2, 4096, 512
GROUPS = LAYERS + 1
_LAUNCH = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
_HOOKS = ("sdp4bit::all_gather (", "sdp4bit::reduce_scatter (")
_NAMES = ("plain", "sdp4bit")
_WARM_UP, _TIMED = 3, 7


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
    with ranks.device:
        blocks = [_Block(width) for _ in range(LAYERS)]
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY, bias=False)
        )
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the profile."""

    json: Path
    width: int


def profile_ranks(settings: Settings, *, ranks: Ranks) -> None:
    """Profile both steps on all ranks, and write the numbers of rank 0."""
    found = {name: _profiled(ranks, settings.width, quantized=name == "sdp4bit") for name in _NAMES}
    if ranks.is_first:
        layout = {"ranks": ranks.world_size, "backend": torch.distributed.get_backend()}
        layout |= {"width": settings.width, "layers": LAYERS, "groups": GROUPS}
        settings.json.write_text(json.dumps({**layout, **found}, indent=1) + "\n")
        print(json.dumps(found, indent=1))


def _profiled(ranks: Ranks, width: int, *, quantized: bool) -> dict[str, Any]:
    """Return launches, microseconds and calls of hooks of one step, per group."""
    step, is_cuda = _step_of(ranks, width=width, quantized=quantized), ranks.device.type == "cuda"
    issued, lasted = [], []
    for number in range(_WARM_UP + _TIMED):
        _meet(ranks.device)
        start = time.perf_counter()
        step()
        issued.append(time.perf_counter() - start)
        _meet(ranks.device)
        if number >= _WARM_UP:
            lasted.append(time.perf_counter() - start)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, acc_events=True) as recorder:
        step()
        _meet(ranks.device)
    averages = recorder.key_averages()
    launches = sum(each.count for each in averages if each.key.startswith(_LAUNCH))
    on_cpu = torch.autograd.DeviceType.CPU
    hooks = [each for each in averages if each.key.startswith(_HOOKS) and each.device_type == on_cpu]
    return {
        "launches": round(launches / GROUPS, 1) if is_cuda else None,
        "host_us": round(statistics.median(issued[_WARM_UP:]) * 1e6 / GROUPS),
        "step_us": round(statistics.median(lasted) * 1e6 / GROUPS),
        "calls": sum(each.count for each in hooks) / GROUPS,
    }


def _meet(device: torch.device) -> None:
    """Wait for the work of all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, help="file to write")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    is_cuda = arguments.device == "cuda"
    if not is_cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with multi_process_service() if is_cuda else nullcontext():
        sys.exit(
            run_on_ranks(
                "benchmarks.gpu_profile:profile_ranks",
                config=Settings(json=arguments.json, width=arguments.width),
                parallel=RanksConfig(nproc_per_node=arguments.ranks),
                leaves_early=False,
                variables=partial(nccl_variables, interface="lo") if is_cuda else None,
            )
        )


if __name__ == "__main__":
    main()

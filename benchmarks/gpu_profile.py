"""Launches and host time per parameter group of one training step, with ranks as threads of one process.

    python -m benchmarks.gpu_profile profile.json --ranks 8 --width 256

Two Llama-like blocks and a head of that width are trained with plain FSDP2, then with sdp4bit's default.
Numbers are per group and rank, of the whole step. "launches" are CUDA launches, null on a CPU; copies between
threads are among them. "host_us" is CPU time of all threads in steps that are not profiled, the median. It
contains the kernels on a CPU, and with a large width the waits for a device whose queue is full. "calls" are
calls of the library's hooks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
_WARM_UP, _TIMED = 3, 5


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


def _meet(device: str) -> None:
    """Wait for the work of all ranks."""
    if device == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()


def _profiled(size: int, device: str, *, width: int, quantized: bool) -> dict[str, Any]:
    """Return launches, host microseconds and calls of hooks of one step, per group and rank."""
    host: list[float] = []
    is_warm, is_recorded, has_ended = (threading.Event() for _ in range(3))

    def program(ranks: Ranks) -> None:
        step = _step_of(ranks, width=width, quantized=quantized)
        for number in range(_WARM_UP + _TIMED):
            _meet(device)
            start = time.process_time()
            step()
            torch.distributed.barrier()  # not yet for the device, because that spins
            if ranks.rank == 0 and number >= _WARM_UP:
                host.append(time.process_time() - start)
        if ranks.rank == 0:
            is_warm.set()
            is_recorded.wait()
        torch.distributed.barrier()
        step()
        _meet(device)
        if ranks.rank == 0:
            has_ended.set()

    def run() -> None:
        try:
            run_on_threads(program, size=size, device=device, timeout=timedelta(minutes=5))
        finally:
            is_warm.set()
            has_ended.set()

    # The main thread records all threads, those of autograd included: Kineto starts in no other.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    recorder = profile(
        activities=activities,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
        acc_events=True,
    )
    with ThreadPoolExecutor(1) as helper:
        ended = helper.submit(run)
        is_warm.wait()
        with recorder:
            is_recorded.set()
            has_ended.wait()
        ended.result()
    averages = recorder.key_averages()
    launches = sum(each.count for each in averages if each.key.startswith(_LAUNCH))
    on_cpu = torch.autograd.DeviceType.CPU
    hooks = [each for each in averages if each.key.startswith(_HOOKS) and each.device_type == on_cpu]
    return {
        "launches": round(launches / size / GROUPS, 1) if device == "cuda" else None,
        "host_us": round(statistics.median(host) * 1e6 / size / GROUPS),
        "calls": sum(each.count for each in hooks) / size / GROUPS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("json", type=Path, help="file to write")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
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

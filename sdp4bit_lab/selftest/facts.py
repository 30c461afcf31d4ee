"""What the ranks run on, and what about it will hurt."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from sdp4bit.collectives.topology import host_name
from sdp4bit.quantization import ops
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.selftest.check import Context

_PACKAGES = ("sdp4bit", "torch", "triton", "numba", "numpy")
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_MUST_AGREE = ("versions", "cuda", "nccl", "device", "kernels")


def check_facts(context: Context) -> dict[str, Any]:
    """Return versions, devices and the environment of all ranks, and warnings about them."""
    mine: dict[str, Any] = {
        "host": host_name(),
        "local_world_size": context.ranks.local_world_size,
        "device": _device(context.device),
        "device_uuid": _uuid(context.device),
        "memory_bytes": _memory(context.device),
        "peer_access": _peer_access(context.device),
        "kernels": ops.backend_name(context.device.type),
        "communicator_bytes": _communicator_bytes(context),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if context.is_cuda else None,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }
    ranks = gather_over_ranks(mine, what="facts about the ranks")
    found = list(warnings_of(ranks))
    context.say(
        f"      {len(ranks)} ranks on {len({rank['host'] for rank in ranks})} hosts, {mine['device']}, torch "
        f"{mine['versions']['torch']}, backend {dist.get_backend()}, kernels {mine['kernels']}"
    )
    for warning in found:
        context.say(f"      warning: {warning}")
    return {"backend": dist.get_backend(), "ranks": ranks, "warnings": found}


def warnings_of(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what a person should know of these ranks, a sentence each."""
    for name in _MUST_AGREE:
        for number, rank in enumerate(ranks):
            if rank[name] != ranks[0][name]:
                yield f"rank {number} on {rank['host']} has {name} {rank[name]}, rank 0 {ranks[0][name]}"
                break
    hosts = Counter(rank["host"] for rank in ranks)
    for host, count in hosts.items():
        sizes = {rank["local_world_size"] for rank in ranks if rank["host"] == host}
        if sizes != {count}:
            yield (
                f"{host} has {count} ranks, but LOCAL_WORLD_SIZE says {', '.join(map(str, sorted(sizes)))}: "
                'topology="auto" goes by the host name; give ranks per node if several hosts share one'
            )
    is_cuda = any(rank["device_uuid"] for rank in ranks)
    used = Counter(rank["device_uuid"] for rank in ranks if rank["device_uuid"])
    if used and max(used.values()) > 1:
        yield f"{max(used.values())} ranks share a GPU: times mean little, and NCCL may refuse"
    if is_cuda and any(rank["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" for rank in ranks):
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets kernels and exchanges wait for each other: unset it with "
            "FSDP2; Megatron-Core needs it with tensor parallelism only"
        )
    if any(rank["environment"].get("CUDA_LAUNCH_BLOCKING") == "1" for rank in ranks):
        yield "CUDA_LAUNCH_BLOCKING=1: nothing overlaps; unset it outside debugging"
    if any(rank["peer_access"] is False for rank in ranks):
        yield "some GPUs of a host cannot reach each other's memory (no P2P): exchanges go through the host"
    if any(rank["kernels"] == "reference" for rank in ranks):
        yield "no fast kernels: install triton (GPUs) or numba (CPUs); the PyTorch reference is very slow"


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def _uuid(device: torch.device) -> str | None:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _memory(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _peer_access(device: torch.device) -> bool | None:
    """Return whether this GPU reaches the memory of all others of the host; None for a CPU."""
    if device.type != "cuda":
        return None
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _communicator_bytes(context: Context) -> int | None:
    """Return the device memory that one more communicator of all ranks takes; None for a CPU or one rank."""
    if not context.is_cuda or context.ranks.world_size == 1:
        return None
    torch.cuda.synchronize(context.device)
    before, _ = torch.cuda.mem_get_info(context.device)
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1, device=context.device), group=group)
    torch.cuda.synchronize(context.device)
    after, _ = torch.cuda.mem_get_info(context.device)
    dist.destroy_process_group(group)
    return before - after


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

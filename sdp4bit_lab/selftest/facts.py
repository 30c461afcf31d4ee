"""Collect versions, devices and environment of all ranks, and warn about harmful settings."""

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
from sdp4bit_lab.common.machine import device_name, nccl_version
from sdp4bit_lab.common.ranks import gather_over_ranks
from sdp4bit_lab.selftest.check import Context

_PACKAGES = ("sdp4bit", "torch", "triton", "numba", "numpy")
_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_MUST_AGREE = ("versions", "cuda", "nccl", "device", "kernels")


def check_facts(context: Context) -> dict[str, Any]:
    """Return the facts of all ranks, and warnings about them."""
    device = context.device
    properties = torch.cuda.get_device_properties(device) if context.is_cuda else None
    facts: dict[str, Any] = {
        "host": host_name(),
        "local_world_size": context.ranks.local_world_size,
        "device": device_name(device),
        "device_uuid": str(properties.uuid) if properties else None,
        "memory_bytes": properties.total_memory if properties else None,
        "peer_access": _peer_access(device),
        "kernels": ops.backend_name(device.type),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl_version(device),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    }
    ranks = gather_over_ranks(facts, what="facts about the ranks")
    warnings = list(warnings_of(ranks))
    # Torch 2.15 has two back ends for the name "nccl".
    world: Any = dist.group.WORLD
    backend, backend_class = (
        dist.get_backend(),
        type(world._get_backend(device)).__name__,
    )
    hosts = len({rank["host"] for rank in ranks})
    context.say(
        f"      {len(ranks)} rank{'s' * (len(ranks) > 1)} on {hosts} host{'s' * (hosts > 1)}, "
        f"{facts['device']}\n"
        f"      torch {facts['versions']['torch']}, backend {backend} ({backend_class}), "
        f"kernels {facts['kernels']}"
    )
    for warning in warnings:
        context.say(f"      warning: {warning}")
    return {"backend": backend, "backend_class": backend_class, "ranks": ranks, "warnings": warnings}


def warnings_of(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield warnings about the facts of all ranks, one sentence each."""
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
                f"{host} has {count} ranks, but LOCAL_WORLD_SIZE is {', '.join(map(str, sorted(sizes)))}: "
                'topology="auto" groups ranks by host name; set ranks per node if hosts share a name'
            )
    is_cuda = any(rank["device_uuid"] for rank in ranks)
    used = Counter(rank["device_uuid"] for rank in ranks if rank["device_uuid"])
    if used and max(used.values()) > 1:
        count = max(used.values())
        yield f"{count} ranks share a GPU: they share its time and memory, and NCCL uses sockets"
    if is_cuda and any(rank["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" for rank in ranks):
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 serializes kernels and collectives: unset it for FSDP2; "
            "Megatron-Core needs it for tensor parallelism only"
        )
    if any(rank["environment"].get("CUDA_LAUNCH_BLOCKING") == "1" for rank in ranks):
        yield "CUDA_LAUNCH_BLOCKING=1 disables all overlap: unset it outside debugging"
    if any(rank["peer_access"] is False for rank in ranks):
        yield "some GPUs of a host have no peer access (P2P): their messages pass through host memory"
    if any(rank["kernels"] == "reference" for rank in ranks):
        yield "no fast kernels: install triton (GPU) or numba (CPU); the PyTorch reference is very slow"


def _peer_access(device: torch.device) -> bool | None:
    """Return whether this GPU can access the memory of all other local GPUs; None for a CPU."""
    if device.type != "cuda":
        return None
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

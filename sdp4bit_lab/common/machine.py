"""Describe software and device for a report that a user pastes, without names of machines."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from sdp4bit import __version__
from sdp4bit.addresses import page
from sdp4bit.quantization import ops
from sdp4bit_lab.common.files import wrapped

PASTE = "---- paste these lines into a report; they name no machine "
_WIDTH = 79


def device_name(device: torch.device) -> str:
    """Return the model of a GPU with its compute capability, or the kind of CPU."""
    if device.type != "cuda":
        return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def nccl_version(device: torch.device) -> str | None:
    """Return the version of NCCL; None on a CPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None


def software(device: torch.device) -> str:
    """Return the device and the versions that a report needs, in one sentence."""
    versions = [
        *(f"sdp4bit {__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"),
        *([f"NCCL {nccl_version(device)}"] if device.type == "cuda" else []),
        f"kernels {ops.backend_name(device.type)}",
    ]
    return f"{device_name(device)}; {', '.join(versions)}"


def pasted(lines: Sequence[str]) -> str:
    """Return the block that ends the output of a command, with a link to the place to report."""
    where = f"where to report: {page('first-hour#report')}"
    return "\n".join(["", PASTE.ljust(_WIDTH, "-"), wrapped(lines), "-" * _WIDTH, where])

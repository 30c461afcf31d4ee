"""Imports torchtitan without a device: its questions about one are answered for the CPU."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ecosystem.on_cpu import WORLD


def cpu_as_a_device() -> ModuleType:
    """Return the answers to torchtitan's questions about a device, for the CPU."""
    answers = {
        "set_device": lambda _: None,
        "current_device": lambda: 0,
        "device_count": lambda: int(os.environ.get("WORLD_SIZE", WORLD)),
        "is_available": lambda: False,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: None,
    }
    module = ModuleType("cpu_as_a_device")
    vars(module).update(answers)
    return module


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch._utils, "_get_available_device_type", lambda: "cpu")
    patch.setattr(torch._utils, "_get_device_module", lambda _: cpu_as_a_device())
    pytest.importorskip("torchtitan.tools.utils", reason="torchtitan is not installed: make test-ecosystem")

if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 is made for a newer torch
    dist.set_timeout = lambda *_: None

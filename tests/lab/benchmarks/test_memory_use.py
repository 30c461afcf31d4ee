"""Measured memory beside the planned one. Layers: files, one process."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch

from benchmarks.memory_use import PeakMode, bytes_of_tensors, planned
from sdp4bit_lab.plan.memory import parts
from tests import ROOT

RESULT: dict[str, Any] = json.loads((ROOT / "results/memory.json").read_text(encoding="utf-8"))
MEGABYTE = 2**20


def test_the_peak_is_that_of_all_threads() -> None:
    """Two tensors live at the same time; a third comes after a thread has freed one of them."""
    with PeakMode() as mode:
        kept = [torch.zeros(MEGABYTE), torch.zeros(MEGABYTE)]
        freeing = threading.Thread(target=kept.pop)
        freeing.start()
        freeing.join()
        kept.append(torch.zeros(MEGABYTE))
    assert mode.growth == pytest.approx(2 * 4 * MEGABYTE, rel=0.02)


def test_tensors_that_share_memory_count_once() -> None:
    before = bytes_of_tensors()
    tensor = torch.zeros(MEGABYTE)
    views = [tensor[1:], torch.nn.Parameter(tensor)]
    assert bytes_of_tensors() - before == 4 * MEGABYTE
    assert len(views) == 2


def test_the_planned_memory_is_that_of_the_planner_and_close_to_the_measured_one() -> None:
    assert [row["strategy"] for row in RESULT["rows"]] == list(planned())
    for row, cost in zip(RESULT["rows"], planned().values(), strict=True):
        by_use = {use: size for use, size in parts(cost.memory).items() if use != "communicators"}
        assert row["planned"] == by_use
        held = by_use["shards"] + by_use["replica"]
        # Beyond them, sdp4bit keeps message buffers; plain FSDP2 keeps a few numbers.
        least, most = (0, 1000) if row["strategy"] == "FSDP2" else (1, cost.memory["message buffers"] * 1.1)
        assert least <= row["between_steps"] - held <= most
        # The planner leaves out activations, and unsharded gradients in bf16.
        assert 1.0 < row["measured"] / sum(by_use.values()) < 1.15

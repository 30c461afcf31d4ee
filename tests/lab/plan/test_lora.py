"""Plans of LoRA: bytes of a real run, and the options. Layer: gloo, 2 and 4 processes; else no process."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sdp4bit import quantize_communication
from sdp4bit.traffic import Grid
from sdp4bit_lab.cli import main
from sdp4bit_lab.plan.memory import memory_per_rank
from sdp4bit_lab.plan.model import ShardedGroup, with_adapters
from sdp4bit_lab.plan.step import BASELINE
from sdp4bit_lab.plan.traffic import group_traffic
from tests import ROOT
from tests.ranks import run_ranks
from tests.toy import POLICY, QUANTIZED, data_mesh

HIDDEN, RANK, MICRO_BATCHES = 64, 64, 2  # adapters whose sections would merge without the frozen rest
Capture = pytest.CaptureFixture[str]


class Adapted(nn.Module):
    """A frozen layer and its adapter, with the modules and the order of peft."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Block(nn.Module):
    """A frozen norm, and an adapted MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN).requires_grad_(False)
        self.first, self.second = Adapted(HIDDEN, HIDDEN), Adapted(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)).relu())


def planned_groups() -> tuple[ShardedGroup, ...]:
    """Return what a plan knows of two blocks behind a frozen layer."""
    h = HIDDEN
    shapes = ((h,), (h,), (h, h), (h,), (h, h), (h,))
    blocks = [ShardedGroup(name=f"blocks.{index}", shapes=shapes) for index in range(2)]
    root = ShardedGroup(name="(root)", shapes=((h, h), (h,)), freed_after_forward=False)
    return with_adapters([*blocks, root], rank=RANK)


def count(per_node: int) -> dict[str, tuple[float, ...]]:
    """Train in micro-batches; return the last step's bytes between nodes and inside, and plain FSDP2's."""
    torch.manual_seed(0)
    model = nn.Module()
    model.first = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
    model.blocks = nn.Sequential(Block(), Block())
    model.forward = lambda x: model.blocks(model.first(x))  # type: ignore[method-assign]
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh(), mp_policy=POLICY)
    fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
    comm = quantize_communication(model, topology=per_node, config=QUANTIZED)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for micro_batch in range(3 * MICRO_BATCHES):
        is_last = (micro_batch + 1) % MICRO_BATCHES == 0
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        model(torch.randn(4, HIDDEN)).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    model(torch.randn(4, HIDDEN))  # ends the step
    sent = {
        group.view.name: sum((c.last_step for c in group.counters[1:]), group.counters[0].last_step)
        for group in comm.groups
    }
    counted = {
        name: (each.inter_bytes, each.intra_bytes, each.plain_inter_bytes, each.plain_intra_bytes)
        for name, each in sent.items()
    }
    return {**counted, "replica": (sum(group.weights.replica.rows.nbytes for group in comm.groups),)}


@pytest.mark.gloo
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2)])
def test_planned_bytes_are_those_of_a_run(nodes: int, per_node: int) -> None:
    grid = Grid(nodes=nodes, ranks_per_node=per_node)
    ranks = run_ranks(count, grid.size, per_node)
    traffic = [group_traffic(group, grid=grid, config=QUANTIZED) for group in planned_groups()]
    replica = memory_per_rank(traffic, grid=grid, accumulation=MICRO_BATCHES)["weight replica, bf16"]
    assert all(counted["replica"] == (replica,) for counted in ranks)
    for group in planned_groups():
        ours, plain = (
            group_traffic(group, grid=grid, config=config, accumulation=MICRO_BATCHES)
            for config in (QUANTIZED, BASELINE)
        )
        expected = [
            sum(getattr(exchange, f"{level}_bytes") for exchange in each.exchanges)
            for each in (ours, plain)
            for level in ("inter", "intra")
        ]
        for counted in ranks:
            assert list(counted[group.name]) == expected, group.name


def planned(capsys: Capture, *arguments: str) -> dict[str, Any]:
    cluster = ("--device", "h100", "--nodes", "2", "--devices-per-node", "1", "--inter-bandwidth", "1.25")
    assert main(["plan", *cluster, "--device-tflops", "400", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_plan_of_lora_sends_frozen_weights_once(capsys: Capture) -> None:
    full, lora = planned(capsys), planned(capsys, "--lora-rank", "16")
    adapters = 24 * 16 * 2048 * (4 + 2 + 5 + 5)
    assert lora["parameters"] - full["parameters"] == adapters
    # Half of the frozen weights leave each of two nodes once, in bf16; plain FSDP2 sends blocks twice a step.
    assert lora["frozen_bytes_per_node"] == 2 * full["parameters"] / 2
    assert full["frozen_bytes_per_node"] == 0
    assert lora["baseline"]["inter_bytes"] > 3.5 * lora["frozen_bytes_per_node"] / 2
    assert lora["quantized"]["inter_bytes"] == pytest.approx(adapters / 2 * 1.03, rel=0.02)
    # No gradients of frozen weights: two thirds of the arithmetic.
    assert lora["quantized"]["compute_seconds"] == pytest.approx(full["quantized"]["compute_seconds"] * 2 / 3)
    memory = lora["quantized"]["memory"]
    assert memory["frozen_weights_bf16"] == full["parameters"]
    assert memory["weight_replica_bf16"] == 2 * lora["parameters"]
    assert memory["adam_fp32"] == 8 * adapters / 2
    assert main(["plan", "--lora-rank", "8"]) == 0
    assert "LoRA of rank 8: frozen weights are sent once" in " ".join(capsys.readouterr().out.split())


def test_the_documented_table_is_the_command_s(capsys: Capture) -> None:
    page = (ROOT / "docs/lora.md").read_text()
    command = page.partition("sdp4bit plan ")[2].partition("\n\n")[0].replace("\\\n", " ").split()
    rows = re.findall(r"\| (\d) \| \d+ Gbit/s \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page)
    assert len(rows) == 5
    for devices, rate, *times in rows:
        options = [*command, "--devices-per-node", devices, "--inter-bandwidth", rate]
        seconds = []
        for name, more in (("bf16_baseline", "1"), ("quantized", "1"), ("bf16_baseline", "2")):
            assert main(["plan", *options, "--replicas", more, "--json"]) == 0
            seconds.append(json.loads(capsys.readouterr().out)[name]["step_seconds"])
        assert [f"{each:.1f}" for each in seconds] == times


@pytest.mark.parametrize("arguments", [("--tp", "4"), ("--engine", "megatron")])
def test_lora_is_planned_for_fsdp2_alone(capsys: Capture, arguments: tuple[str, ...]) -> None:
    assert main(["plan", "--lora-rank", "8", *arguments]) == 2
    assert "--lora-rank supports FSDP2 without tensor parallelism" in capsys.readouterr().err

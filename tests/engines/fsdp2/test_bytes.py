"""FSDP2 integration, bytes: what real collectives send equals the cost formulas of the method.

Per rank and step, with N parameters on n nodes of g ranks and G values per scale of 2 bytes:
gradients N (1 + 2 / G) (g - 1) / g inside a node, N / g (1 / 2 + 2 / G) (n - 1) / n between nodes;
weight differences N / g (1 / 2 + 2 / G) (n - 1) / n between nodes (paper section 3, with bf16 scales).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.collectives import exchange
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.traffic import Traffic
from tests.ranks import on_ranks, run_ranks
from tests.toy import POLICY, QUANTIZED, Run, adamw, batches, build, data_mesh, train

FEWER_BITS = {"8/3 and 2": (8, 3, 2), "3/2 and 3": (3, 2, 3)}
"""Bits of gradients inside a node and between nodes, and of weight differences."""
LAYOUTS = [(2, 2), (1, 4), (3, 2), pytest.param((4, 1), marks=pytest.mark.slow)]


@contextmanager
def count_sent_bytes(per_node: int) -> Iterator[dict[str, int]]:
    """Count the bytes that this rank hands to point-to-point sends, by level."""
    sent = {"intra": 0, "inter": 0}
    original = dist.isend
    node = dist.get_rank() // per_node

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group, peer = kwargs["group"], kwargs["group_dst"]
        same_node = dist.get_global_rank(group, peer) // per_node == node
        sent["intra" if same_node else "inter"] += tensor.nbytes
        return original(tensor, *args, **kwargs)

    exchange.dist.isend = counting
    try:
        yield sent
    finally:
        exchange.dist.isend = original


class Even(nn.Module):
    """Parameters whose rows are multiples of 8 groups of 2048 on 4 and 6 ranks: nothing needs padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 384, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).square().mean() for layer in self.layers)


def measure_even(per_node: int, config: SDP4BitConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes sent in one steady step, as counted at the sends and as reported."""
    model = Even()
    for layer in model.layers:
        fully_shard(layer, mesh=data_mesh(), mp_policy=POLICY)
    fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
    comm = sdp4bit.quantize_communication(model, topology=per_node, config=config)
    optimizer = adamw(model)
    for step in range(2):
        with count_sent_bytes(per_node) as sent:
            model(torch.randn(2, 512)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            assert comm.stats()["total"]["inter_bytes"] == sent["inter"]
    return sent, comm.stats()["last_step"]


def measure(per_node: int) -> dict[int | str, Any]:
    """Return what is sent with each group size and with each kind of replica."""
    result: dict[int | str, Any] = {}
    for size in (128, 256):
        gradients = GradientConfig(intra_group_size=size, inter_group_size=128)
        result[size] = measure_even(per_node, SDP4BitConfig(gradients=gradients))
    for name, (intra, inter, weights) in FEWER_BITS.items():
        config = SDP4BitConfig(
            gradients=GradientConfig(intra_bits=intra, inter_bits=inter),
            weights=WeightConfig(bits=weights, group_size=128),
        )
        result[name] = measure_even(per_node, config)
    for replica in ("node", "full"):
        result[replica] = measure_odd(per_node, replica)
    return result


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def layout(request: pytest.FixtureRequest) -> tuple[int, int, list[dict[int | str, Any]]]:
    """Nodes, ranks per node, and what each rank has measured; all of a layout in the same processes."""
    nodes, per_node = request.param
    return nodes, per_node, run_ranks(measure, nodes * per_node, per_node)


@pytest.mark.parametrize("group_size", [128, 256])
def test_bytes_per_step_equal_the_formula(layout: Any, group_size: int) -> None:
    nodes, per_node, measured = layout
    numel, n, g = 2 * 512 * 384, nodes, per_node
    intra_gradients = numel * (1 + 2 / group_size) * (g - 1) / g
    inter_gradients = numel / g * (1 / 2 + 2 / 128) * (n - 1) / n
    weights = numel / g * (1 / 2 + 2 / 2048) * (n - 1) / n
    gathers = 2 * 2 * numel * (g - 1) / g  # bf16 rows in the node, forward and backward
    for sent, reported in (each[group_size] for each in measured):
        assert sent["inter"] == reported["inter_bytes"] == inter_gradients + weights
        assert reported["intra_bytes"] == intra_gradients + gathers
        # On one node FSDP2 gathers by itself.
        assert sent["intra"] == intra_gradients + (gathers if nodes > 1 else 0)
        assert reported["padding_bytes"] == 0


@pytest.mark.parametrize("name", FEWER_BITS)
def test_bytes_of_fewer_bits_equal_the_formula(layout: Any, name: str) -> None:
    nodes, per_node, measured = layout
    intra, inter, weights = FEWER_BITS[name]
    numel, n, g, scale = 2 * 512 * 384, nodes, per_node, 2 / 128
    intra_gradients = numel * (intra / 8 + scale) * (g - 1) / g
    between = numel / g * (inter / 8 + scale + weights / 8 + scale) * (n - 1) / n
    gathers = 2 * 2 * numel * (g - 1) / g
    for sent, reported in (each[name] for each in measured):
        assert sent["inter"] == reported["inter_bytes"] == between
        assert reported["intra_bytes"] == intra_gradients + gathers
        assert sent["intra"] == intra_gradients + (gathers if nodes > 1 else 0)
        assert reported["padding_bytes"] == 0


def test_the_constants_per_parameter_are_those_of_the_method() -> None:
    """0.516 bytes per parameter / g between nodes for gradients, 0.501 for weights, 1.016 inside."""
    assert MessageLayout(numel=2**20, bits=4, group_size=128).nbytes / 2**20 == 0.515625
    assert MessageLayout(numel=2**20, bits=8, group_size=128).nbytes / 2**20 == 1.015625
    assert MessageLayout(numel=2**20, bits=4, group_size=2048).nbytes / 2**20 == 0.5009765625
    assert MessageLayout(numel=2**20, bits=3, group_size=128).nbytes / 2**20 == 0.390625
    assert MessageLayout(numel=2**20, bits=2, group_size=128).nbytes / 2**20 == 0.265625


def measure_odd(per_node: int, replica: str) -> list[tuple[int, int, dict[str, int], list[int]]]:
    model = build()
    config = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
    config = replace(config, weights=replace(config.weights, replica=replica))
    comm = sdp4bit.quantize_communication(model, topology=per_node, config=config)
    optimizer, data = adamw(model), batches()
    train(model, optimizer, data, 1, clip=None)
    with count_sent_bytes(per_node) as sent:
        train(model, optimizer, data, 1, clip=None)
    rows = [group.group.shard_numel for group in comm._state.groups]
    return sent["intra"], sent["inter"], comm.stats()["last_step"], rows


@pytest.mark.parametrize("replica", ["node", "full"])
def test_odd_sizes_cost_the_formula_plus_the_padding_that_is_reported(layout: Any, replica: str) -> None:
    nodes, per_node, measured = layout
    n, g, world = nodes, per_node, nodes * per_node
    for intra, inter, reported, rows in (each[replica] for each in measured):
        numel = sum(rows) * world
        formula = numel * (1 + 2 / 128) * (g - 1) / g + numel / g * (1 / 2 + 2 / 128) * (n - 1) / n
        formula += numel / g * (1 / 2 + 2 / 2048) * (n - 1) / n
        if replica == "full":
            formula += numel / g * (1 / 2 + 2 / 2048) * (g - 1)
        elif g > 1:
            # Gathered in forward and backward; the root, which comes first, stays gathered in between.
            gathers = 2 * (2 * numel - rows[0] * world) * (g - 1) / g
            formula += gathers
            intra += gathers if nodes == 1 else 0  # by FSDP2 itself
        assert (intra, inter) == (reported["intra_bytes"], reported["inter_bytes"])
        assert intra + inter == pytest.approx(formula + reported["padding_bytes"], abs=1)
        # 31 values of padding and one shortened group per row and message, 15 bytes of alignment.
        assert 0 < reported["padding_bytes"] < 0.05 * (intra + inter)


@on_ranks(2)
def test_on_one_node_weights_are_quantized_only_where_that_saves_bytes() -> None:
    """Weights equal plain FSDP2's bit for bit unless quantizing them saves bytes; what is left is told."""
    plain = Run(build(), None).train(2).finish()
    configs = [replace(QUANTIZED, gradients=None), QUANTIZED]
    configs.append(replace(configs[0], weights=replace(QUANTIZED.weights, replica="full")))
    for config in configs:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = Run(build(), config, topology=2)
        texts = [str(w.message).removeprefix("sdp4bit: ") for w in caught if "sdp4bit" in str(w.message)]
        is_full = config is configs[2]
        table = run.comm.explain()
        assert table.count("one node: differences would save nothing") == (0 if is_full else 4)
        assert len(texts) == (0 if is_full else 1)
        assert max(map(len, table.splitlines())) <= 80
        assert (
            table.splitlines()[-1].startswith("total")
            if is_full
            else " ".join(table.split()).endswith(texts[0])
        )
        assert (run.train(2).finish() == plain) == (config is configs[0])
        groups = run.comm._state.groups
        weights = sum((group.weight_traffic.last_step for group in groups), Traffic())
        gradients = sum((group.gradient_traffic.last_step for group in groups), Traffic())
        assert (weights.intra_bytes < weights.plain_intra_bytes) == is_full
        if config is QUANTIZED:
            rows = sum(group.group.shard_numel for group in groups)
            assert gradients.plain_intra_bytes == 4 * rows
            assert f"sends {gradients.intra_bytes:,.0f} instead of {4 * rows:,} bytes to reduce" in texts[0]
            assert f"and {2 * rows:,} to gather their weights" in texts[0]

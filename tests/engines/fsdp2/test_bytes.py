"""FSDP2 integration, bytes: what real collectives send equals the cost formulas of the method.

Per rank and step, with N parameters on n nodes of g ranks and G values per scale of 2 bytes:
gradients N (1 + 2 / G) (g - 1) / g inside a node, N / g (1 / 2 + 2 / G) (n - 1) / n between nodes;
weight differences N / g (1 / 2 + 2 / G) (n - 1) / n between nodes (paper section 3, with bf16 scales).
With fewer bits b, b / 8 takes the place of 1 / 2.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.collectives import transport
from sdp4bit.config import ReplicaPlacement
from tests.ranks import on_ranks, run_ranks
from tests.tables import flat
from tests.toy import POLICY, QUANTIZED, Run, adamw, build, data_mesh

pytestmark = pytest.mark.gloo

WIDTHS = [(8, 4, 4, 2048), (3, 2, 2, 128)]
"""Bits of gradients inside a node and between nodes, of weight differences, and weights per scale."""


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

    transport.dist.isend = counting
    try:
        yield sent
    finally:
        transport.dist.isend = original


def check_even(n: int, g: int, widths: tuple[int, int, int, int]) -> None:
    """Rows are multiples of 8 groups of 2048 on 4 and 6 ranks: nothing needs padding."""
    intra, inter, weights, group_size = widths
    config = SDP4BitConfig(
        gradients=GradientConfig(intra_bits=intra, inter_bits=inter, inside_one_node=True),
        weights=WeightConfig(bits=weights, group_size=group_size),
    )
    model = fully_shard(nn.Linear(512, 384, bias=False), mesh=data_mesh(), mp_policy=POLICY)
    comm = sdp4bit.quantize_communication(model, topology=g, config=config)
    optimizer = adamw(model)
    for step in range(2):
        with count_sent_bytes(g) as sent:
            model(torch.randn(2, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            assert comm.stats()["total"]["inter_bytes"] == sent["inter"]
    reported = comm.stats()["last_step"]
    numel, scale = 512 * 384, 2 / 128
    intra_gradients = numel * (intra / 8 + scale) * (g - 1) / g
    between = numel / g * (inter / 8 + scale + weights / 8 + 2 / group_size) * (n - 1) / n
    gathers = 2 * numel * (g - 1) / g  # bf16 rows in the node; the root stays gathered for the backward
    assert sent["inter"] == reported["inter_bytes"] == between
    assert reported["intra_bytes"] == intra_gradients + gathers
    # On one node FSDP2 gathers by itself.
    assert sent["intra"] == intra_gradients + (gathers if n > 1 else 0)
    assert reported["padding_bytes"] == 0


def check_odd(n: int, g: int, replica: ReplicaPlacement) -> None:
    """Odd sizes cost the formula plus the padding that is reported."""
    config = replace(QUANTIZED, weights=WeightConfig(replica=replica), separate_parameters=False)
    run = Run(build(), config, topology=g).train(1)
    with count_sent_bytes(g) as sent:
        run.train(1)
    rows = [group.view.shard_numel for group in run.comm.groups]
    reported, intra, inter = run.comm.stats()["last_step"], sent["intra"], sent["inter"]
    numel = sum(rows) * n * g
    formula = numel * (1 + 2 / 128) * (g - 1) / g + numel / g * (1 / 2 + 2 / 128) * (n - 1) / n
    formula += numel / g * (1 / 2 + 2 / 2048) * (n - 1) / n
    if replica == "full":
        formula += numel / g * (1 / 2 + 2 / 2048) * (g - 1)
    elif g > 1:
        # Gathered in forward and backward; the root, which comes first, stays gathered in between.
        gathers = 2 * (2 * numel - rows[0] * n * g) * (g - 1) / g
        formula += gathers
        intra += gathers if n == 1 else 0  # by FSDP2 itself
    assert (intra, inter) == (reported["intra_bytes"], reported["inter_bytes"])
    assert intra + inter == pytest.approx(formula + reported["padding_bytes"], abs=1)
    # 31 values of padding and one shortened group per row and message, 15 bytes of alignment.
    assert 0 < reported["padding_bytes"] < 0.05 * (intra + inter)


def check_layout(nodes: int, per_node: int) -> None:
    for widths in WIDTHS:
        check_even(nodes, per_node, widths)
    check_odd(nodes, per_node, "node")
    check_odd(nodes, per_node, "full")


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (1, 4), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_bytes_per_step_equal_the_formula(nodes: int, per_node: int) -> None:
    run_ranks(check_layout, nodes * per_node, nodes, per_node)


ON_ONE_NODE = {
    "nothing asked for": (SDP4BitConfig(), False, False),
    "gradients asked for": (QUANTIZED, False, True),
    "weights asked for": (SDP4BitConfig(weights=WeightConfig(replica="full")), True, False),
    "weights alone, not asked for": (SDP4BitConfig(gradients=None), False, False),
}
"""Settings, and whether weights and gradients are then quantized where all ranks are on one node."""


@on_ranks(2)
def test_on_one_node_nothing_is_quantized_unless_asked_for() -> None:
    for case in ON_ONE_NODE.values():
        one_node(*case, is_hybrid=False)


@on_ranks(4)
def test_on_one_node_nothing_is_quantized_over_replicas_unless_asked_for() -> None:
    for name in ("nothing asked for", "gradients asked for"):
        one_node(*ON_ONE_NODE[name], is_hybrid=True)


def one_node(config: SDP4BitConfig, weights: bool, gradients: bool, *, is_hybrid: bool) -> None:
    """What is not quantized equals plain FSDP2 bit for bit, and the reason and the way to ask are given."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if is_hybrid else None
    plain = Run(build(mesh=mesh), None).train(1).finish()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(build(mesh=mesh), config, topology=world)
    texts = [str(w.message).removeprefix("sdp4bit: ") for w in caught if "sdp4bit" in str(w.message)]
    table, count = run.comm.explain(full=True), len(run.comm.groups)
    assert flat(table).count('sharded inside one node (WeightConfig(replica="full")') == count * (not weights)
    is_unquantized = not gradients and config.gradients is not None
    assert flat(table).count("GradientConfig(inside_one_node=True) quantizes") == count * is_unquantized
    assert max(map(len, table.splitlines())) <= 80
    assert len(texts) == (not weights and not gradients and dist.get_rank() == 0)
    assert all(flat(table).endswith(text) for text in texts)
    assert (run.train(1).finish() == plain) == (not weights and not gradients)
    groups = run.comm.groups
    assert [group.weights.replica is not None for group in groups] == [weights] * count
    assert [bool(group.gradients.quantizers) for group in groups] == [gradients] * count
    if mesh is not None and not gradients:
        assert all(group.gradients.all_reduce is None for group in groups)


@on_ranks(4)
def test_a_step_is_an_optimizer_step_however_often_gradients_are_reduced() -> None:
    run = Run(build(), QUANTIZED).train(2)
    once = run.comm.stats()["last_step"]["inter_bytes"]
    gradients = sum(group.gradients.traffic.current_step.inter_bytes for group in run.comm.groups)
    weights = once - gradients

    # Every micro-batch is reduced by itself, as some trainers do.
    for _ in range(3):
        run.backward()
    run.step()
    stats = run.comm.stats()
    assert stats["steps"] == 3
    assert stats["last_step"]["inter_bytes"] == weights + 3 * gradients

    # A forward and backward without a step, as a trainer's dry run, belongs to the next step.
    run.backward()
    run.optimizer.zero_grad()
    assert all(run.comm.stats()[name] == stats[name] for name in ("steps", "last_step"))
    run.train(1)
    again = run.comm.stats()
    assert again["steps"] == 4
    assert again["last_step"]["inter_bytes"] == weights + 2 * gradients


@on_ranks(2)
def test_a_step_that_changes_nothing_is_a_step_and_an_edit_is_none() -> None:
    run = Run(build(), QUANTIZED, topology=1).train(2)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0  # as in the first step of a warm-up
    run.train(1)
    run.evaluate()
    assert run.comm.stats()["steps"] == 3
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1.001)
    run.evaluate()
    assert run.comm.stats()["steps"] == 3


@on_ranks(4)
def test_steps_without_replicas_are_agreed_on() -> None:
    """An optimizer that only some ranks have still ends a step on all of them."""
    run = Run(build(), replace(QUANTIZED, weights=None))
    for step in range(3):
        run.backward()
        run.backward()
        if dist.get_rank() == 0:
            run.comm.mark_step()
        run.evaluate()
        assert run.comm.stats()["steps"] == step + 1
        assert run.comm.stats()["sampled_step"] == step + 1

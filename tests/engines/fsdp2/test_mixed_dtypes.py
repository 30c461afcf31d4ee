"""Groups whose parameters are trained in several dtypes, and what else is new in FSDP2 of torch 2.15.

Layer: 2 and 4 processes over gloo, as nodes of 1 or 2 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from sdp4bit import SDP4BitConfig
from tests import mutations
from tests.ranks import on_ranks
from tests.tables import explained
from tests.toy import (
    IDENTITY,
    POLICY,
    QUANTIZED,
    Run,
    ToyGPT,
    assert_close_to_plain,
    assert_equal,
    assert_replicas_identical,
    shard,
)

pytestmark = pytest.mark.skipif(
    "param_dtype_override_fn" not in {field.name for field in fields(MixedPrecisionPolicy)},
    reason="since torch 2.15 parameters of one group may have several dtypes",
)
EXACT: dict[str, Any] = {"checks": [(IDENTITY, assert_equal)], "harmless": [mutations.TWICE]}
"""Replicas are refreshed in full precision, so no difference is applied twice."""
KINDS = ("weight", "bias")


def build(mesh: Any = None, *, narrow_gradients: bool = False, **changes: Any) -> Any:
    """Return the toy model with norms in fp32, of sizes that are multiples of the ranks.

    Args:
        narrow_gradients: keep some gradients in bf16; FSDP2 sorts the rows that it reduces by their dtypes.
    """
    torch.manual_seed(0)
    model: Any = ToyGPT(width=32, hidden=64)
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
    for block in model.blocks if narrow_gradients else ():
        block.ln1.weight.grad_dtype = block.fc2.weight.grad_dtype = torch.bfloat16

    def keep_norms(param: nn.Parameter) -> torch.dtype | None:
        return torch.float32 if id(param) in norms else None

    return shard(model, mesh=mesh, policy=replace(POLICY, param_dtype_override_fn=keep_norms, **changes))


def micro_batches(run: Run) -> None:
    run.model.set_requires_gradient_sync(False)
    run.backward()
    run.model.set_requires_gradient_sync(True)
    run.train(1)
    run.backward()  # reduced by itself, and added
    run.train(1)


def finalized_by_hand(run: Run) -> None:
    run.model.set_manual_backward_finalization(True)
    for _ in range(2):
        run.backward()
        run.model.finalize_backward()
        run.step()
    run.backward()
    run.model.finalize_backward(async_op=True).wait()
    run.step()


def kept_storage(run: Run) -> None:
    run.model.set_keep_unsharded_storage(True)
    run.train(2)


LOOPS: dict[str, Callable[[Run], object]] = {
    "steps": lambda run: run.train(2),
    "micro-batches": micro_batches,
    "finalized by hand": finalized_by_hand,
    "kept storage": kept_storage,
}


def train(config: SDP4BitConfig | None, loop: str, changes: dict[str, Any]) -> list[float]:
    run = Run(build(**changes), config, topology=1)
    LOOPS[loop](run)
    return run.finish()


@pytest.mark.like_plain
@on_ranks(2)
def test_identity_equals_plain_fsdp2() -> None:
    for loop in LOOPS:
        assert_close_to_plain(train, loop, {}, **EXACT)
    for loop in ("steps", "micro-batches"):
        assert_close_to_plain(train, loop, {"reduce_dtype": None}, **EXACT)


@pytest.mark.like_plain
@on_ranks(2)
def test_quantized_training_is_close_to_plain_fsdp2() -> None:
    assert_close_to_plain(train, "steps", {})


def replicated(config: SDP4BitConfig | None) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = Run(build(mesh), config, topology=1)
    run.model.set_requires_all_reduce(False)
    run.backward()
    run.model.set_requires_all_reduce(True)
    run.train(2)
    return run.finish()


@pytest.mark.like_plain
@on_ranks(4)
def test_replicas_accumulate_as_with_plain_fsdp2() -> None:
    assert_close_to_plain(replicated, **EXACT)


@on_ranks(2)
def test_parameters_of_another_dtype_travel_as_they_are_beside_differences() -> None:
    run = Run(build(), QUANTIZED, topology=1).train(3)
    run.evaluate()
    assert_replicas_identical(run.comm)
    block = next(group for group in run.comm.groups if group.view.name == "blocks.0")
    params = block.view.params
    exact = [param for param in params if param.holds_bits]
    assert {param.name for param in exact} == {f"blocks.0.ln{i}.{kind}" for i in (1, 2) for kind in KINDS}
    line = explained(run.comm.explain(full=True))["blocks.0"]
    assert "4 of another dtype in full precision" in line
    # Not the length of the row, in which a value of fp32 takes the place of two of bf16.
    assert line.startswith(f"blocks.0 {sum(param.numel for param in params):,} ")
    for param in exact:
        assert torch.equal(param.local_view(block.weights.replica.own_shard), param.local)
    # Two nodes: one message of matrices in 4 bits, biases in 8 bits and norms in 32 bits.
    matrices = sum(s.numel for s in params if s.sharded.dim() == 2)
    biases = [s.numel for s in params if s.sharded.dim() == 1 and not s.holds_bits]
    least = matrices / 2 + sum(biases) + 4 * sum(s.numel for s in exact)
    sent = block.weights.traffic.last_step.inter_bytes
    assert block.weights.full_refreshes == 0 and least < sent < least + 2 * (matrices / 32) + 4 * 128


def narrow(config: SDP4BitConfig | None) -> list[float]:
    run = Run(build(narrow_gradients=True), config, topology=1)
    # Adam takes no gradients of another dtype than its parameter.
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, foreach=False)
    return run.train(2).finish()


@pytest.mark.like_plain
@on_ranks(2)
def test_rows_of_gradients_follow_the_order_of_fsdp2() -> None:
    assert_close_to_plain(narrow)
    run = Run(build(narrow_gradients=True), QUANTIZED, topology=1)
    run.backward()
    block = next(group.view for group in run.comm.groups if group.view.name == "blocks.0")
    order = [param.name for param in block.params]
    apart = {name for name in order if name.endswith(("ln1.weight", "fc2.weight"))}
    ends = block._gradient_order[:2], block._gradient_order[-2:]
    assert apart in [{order[i] for i in end} for end in ends]
    numel = sum(param.numel for param in block.params)
    sections = block.gradient_sections(numel, unit=128, separate=True)
    fine = [end - start for section in sections if section.is_fine for start, end in section.ranges]
    assert sum(fine) == sum(param.numel for param in block.params if param.sharded.dim() == 1)


@on_ranks(2)
def test_a_resume_is_bit_identical(tmp_path: Path) -> None:
    run = Run(build(), QUANTIZED, topology=1).train(2)
    dcp.save({"comm": run.comm, "model": run.model.state_dict()}, checkpoint_id=str(tmp_path))
    resumed = Run(build(), QUANTIZED, topology=1)
    dcp.load({"comm": resumed.comm, "model": resumed.model.state_dict()}, checkpoint_id=str(tmp_path))
    assert resumed.evaluate() == run.evaluate()

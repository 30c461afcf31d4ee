"""What cannot be attached to is refused on all ranks with one text, and nothing is left half attached.

Layer: gloo, 4 processes as 2 nodes x 2 ranks. Hosts are stood in for by patching the host name of each rank.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate, replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig, quantize_communication
from sdp4bit.engines import attach
from sdp4bit.engines.fsdp2.events import StateDictAliases
from sdp4bit.engines.fsdp2.torch_internals import param_groups_of
from sdp4bit.engines.fsdp2.view import FSDPView
from tests import toy
from tests.ranks import on_ranks

LIMIT = 150.0
WEIGHTS_ONLY, GRADIENTS_ONLY = SDP4BitConfig(gradients=None), SDP4BitConfig(weights=None)


class Holder(nn.Module):
    """Any parameters, summed in the forward if they can be."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        trainable = [t.dtype in (torch.float32, torch.float64) for t in tensors]
        self.held = nn.ParameterList(
            nn.Parameter(t, requires_grad=g) for t, g in zip(tensors, trainable, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x * p.float().sum() for p in self.held), torch.zeros(()))


def footprint(model: object) -> list[Any]:
    """What attaching changes: communication objects, hooks on modules, global hooks, process groups."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    fsdp = [m for m in modules if isinstance(m, FSDPModule)]
    groups = [group for m in fsdp for group in param_groups_of(m)]
    return [
        [(g._all_gather_comm, g._reduce_scatter_comm, g.force_sum_reduction_for_comms) for g in groups],
        [[*m._load_state_dict_post_hooks, *m._state_dict_hooks] for m in modules],
        [*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks],
        sorted(group.group_name for group in dist.distributed_c10d._world.pg_map),
    ]


def refuse(
    model: Any, *parts: str, error: type[Exception] = ValueError, without: str = "\0", **options: Any
) -> None:
    """Every rank refuses with the same text, which holds all the parts, printed once; nothing has changed."""
    before = footprint(model)
    text = printed = "accepted"
    try:
        quantize_communication(model, **options)
    except error as refusal:
        text, printed = str(refusal), "".join(traceback.format_exception(refusal))
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert texts == [text] * len(texts)
    for part in parts:
        assert part in text, text
    assert without not in text
    assert printed.count(text) == 1 and "direct cause" not in printed and "During handling" not in printed
    assert footprint(model) == before


def accept(model: nn.Module, **options: Any) -> None:
    """The model can be attached to, trains with quantized messages, and is plain again after remove()."""
    before = footprint(model)
    comm = quantize_communication(model, **options)
    assert footprint(model) != before
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss = model(torch.ones(())) if isinstance(model, Holder) else toy.loss_of(model, next(toy.batches()))
    loss.backward()
    optimizer.step()
    assert comm.stats()["steps"] == 1
    assert comm.stats()["last_step"]["inter_bytes"] > 0
    comm.remove()
    assert footprint(model) == before
    comm.remove()
    for call in (comm.state_dict, lambda: comm.load_state_dict({})):
        with pytest.raises(RuntimeError, match="removed from its model"):
            call()


def held(*tensors: torch.Tensor, policy: MixedPrecisionPolicy | None = None, **options: Any) -> Holder:
    return fully_shard(Holder(*tensors), mp_policy=policy or MixedPrecisionPolicy(), **options)


@contextmanager
def lost_the_second_time(owner: object, name: str) -> Iterator[None]:
    """Let the second call of a function fail on all ranks."""
    stock, calls = getattr(owner, name), count(1)

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("lost")
        return stock(*args, **options)

    with mock.patch.object(owner, name, fail):
        yield


@on_ranks(2, timeout=LIMIT)
def test_an_attachment_that_fails_in_the_middle_undoes_itself() -> None:
    model = toy.build()
    before = footprint(model)
    for owner, name in (
        (attach, "QuantizedReduceScatter"),  # process groups exist
        (FSDPView, "install"),  # one parameter group communicates through the handle
        (StateDictAliases, "watch"),  # all of them do, and optimizers are watched
    ):
        with lost_the_second_time(owner, name), pytest.raises(RuntimeError, match="lost"):
            quantize_communication(model, topology=1)
        assert footprint(model) == before
    accept(model, topology=1)


# -- models -------------------------------------------------------------------------------------------


@on_ranks(2, timeout=LIMIT)
def test_models_that_cannot_be_quantized_are_refused() -> None:
    refuse(nn.Linear(4, 4), "Linear has no FSDP2 modules: call torch.distributed.fsdp.fully_shard")
    refuse(fully_shard(nn.Sequential(nn.ReLU())), "hold no parameters")
    way_out = "pass the root of fully_shard, or a list of local roots"
    for given, named in ((None, "model=None: "), ([None], "model=list: "), ("gpt", "model=str: ")):
        refuse(given, named + way_out, error=TypeError)
    waves = held(torch.ones(40, 40, dtype=torch.complex64))
    refuse(waves, "holds torch.complex64 parameters", "skip=['(root)']", topology=1)

    # What the operators do not read is refused before it gets there, and left alone if skipped.
    no_kernel = "only fp32, bf16 and fp16 can be quantized"
    double = held(torch.ones(40, 40, dtype=torch.float64))
    refuse(double, "(root) holds torch.float64 parameters", no_kernel, "skip=['(root)']", topology=1)
    accept(double, skip=["(root)"], topology=1)
    accept(held(torch.ones(40, 40, dtype=torch.float64), policy=toy.POLICY), topology=1)
    float8 = held(torch.ones(40, 40).to(torch.float8_e4m3fn))
    refuse(float8, "holds torch.float8_e4m3fn parameters", no_kernel, topology=1)
    summed = held(torch.ones(40, 40), policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    refuse(summed, "reduces gradients in torch.float64", "reduce_dtype=torch.float32", topology=1)
    accept(summed, config=WEIGHTS_ONLY, topology=1)


def stand_in(module: str, name: str) -> nn.Module:
    """Wrap a model in a class that only has the name of another engine's."""
    return type(name, (nn.Sequential,), {"__module__": module})(nn.Linear(8, 8))


@on_ranks(2, timeout=LIMIT)
def test_models_of_other_engines_are_refused_with_their_class_and_the_way_out() -> None:
    fsdp1 = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    refuse(
        fsdp1, "fully_sharded_data_parallel.FullyShardedDataParallel communicates", "fully_shard (fsdp_ver"
    )
    refuse(nn.Sequential(fsdp1), "FullyShardedDataParallel, `model.0`, communicates")
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    refuse(ddp, "distributed.DistributedDataParallel communicates", "Register sdp4bit.ddp_comm_hook")
    for module, name, way_out in (
        ("deepspeed.runtime.zero", "Wrapper", "Pass the engine that deepspeed.initialize returned"),
        ("olmo_core.nn.parallel.distributed", "MultiGroupDistributedDataParallel", "TransformerTrainModule"),
        ("torchtitan.experiments.graph_trainer.simple_fsdp", "SimpleFSDPLinear", "torchtitan's own Trainer"),
        ("megatron_fsdp.megatron_fsdp", "MegatronFSDP", "shard with fully_shard of PyTorch"),
        ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "FullyShardedDataParallel", "optimizer"),
        (
            "megatron.core.distributed.distributed_data_parallel",
            "DistributedDataParallel",
            "sdp4bit_megatron",
        ),
    ):
        refuse(stand_in(module, name), f"{module}.{name} communicates for this model", way_out)


@on_ranks(2, timeout=LIMIT)
def test_replicated_models_are_refused_with_the_way_out() -> None:
    """By both that torch has: one on FSDP2's parameter groups, and one on DistributedDataParallel."""
    refuse(replicate(nn.Linear(8, 8)), "Linear has no FSDP2 modules", "use sdp4bit.ddp_comm_hook")
    if "mesh" not in inspect.signature(replicate_with_fsdp.replicate).parameters:
        return  # torch 2.9 makes it of the way out
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    model = replicate_with_fsdp.replicate(nn.Sequential(nn.Linear(8, 8)), mesh=mesh)
    process_groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ValueError, match="ReplicateSequential is replicated over 2 ranks") as refusal:
        quantize_communication(model, topology=1)
    assert "DistributedDataParallel with sdp4bit.ddp_comm_hook" in str(refusal.value)
    assert "fully_shard with a mesh of (ranks, 1)" in str(refusal.value)
    assert len(dist.distributed_c10d._world.pg_map) == process_groups
    way_out = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    accept(held(torch.ones(40, 40), mesh=way_out), topology=1)


@on_ranks(2, timeout=LIMIT)
def test_models_with_custom_communication_are_refused() -> None:
    custom = toy.build()
    comm = quantize_communication(custom, topology=1)
    refuse(custom, "is attached already: call remove() on the first handle", topology=1)
    with comm.full_precision():
        refuse(custom, "is attached already: call remove() on the first handle", topology=1)
    comm.remove()
    accept(custom, topology=1)
    custom.blocks[1].set_custom_all_gather(mock.Mock())
    refuse(custom, "blocks.1 has custom communication (Mock)", topology=1, skip="blocks.1")


@on_ranks(4, timeout=LIMIT)
def test_other_memory_is_refused_for_what_is_quantized_and_else_used() -> None:
    setter = "set_allocate_memory_from_process_group_for_comm"
    allocating = toy.build()
    getattr(allocating, setter)(True)
    refuse(allocating, f"(root): {setter} applies to FSDP2's all-gather of its weights", topology=2)
    inside = {"topology": 4, "config": toy.QUANTIZED}
    refuse(allocating, "reduce-scatter of its gradients", "skip=['(root)']", **inside)
    refuse(allocating, "reduce-scatter of its gradients", topology=2, config=GRADIENTS_ONLY)
    toy.Run(allocating, WEIGHTS_ONLY, topology=4).train(2).comm.remove()
    accept(allocating, topology=2, skip="(root)")

    only_here = toy.build()
    if dist.get_rank() == 2:
        getattr(only_here, setter)(True)
    refuse(only_here, "all-gather of its weights", "[rank 2]", topology=2)

    collectives = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    if not hasattr(collectives, "SymmMemAllGather"):
        return  # torch 2.9
    with (
        mock.patch.object(collectives, "symm_mem") as memory,
        mock.patch("torch.cuda.use_mem_pool"),
        mock.patch("torch.cpu.use_mem_pool", create=True),  # since torch 2.15 the pool is of the device
    ):
        symmetric = toy.build()
        for module in (symmetric, *symmetric.blocks):
            module.set_force_sum_reduction_for_comms(True)
            module.set_symm_mem_for_comm()
        refuse(symmetric, "set_symm_mem_for_comm", "all-gather of its weights", "weights=None", topology=2)
        refuse(symmetric, "set_symm_mem_for_comm", "reduce-scatter of its gradients", **inside)
        # Full-precision weights and gradients stay FSDP2's, in its memory.
        memory.reset_mock()
        toy.Run(symmetric, toy.LOSSLESS, topology=4).train(1)
        assert memory.rendezvous.called


# -- settings -----------------------------------------------------------------------------------------


@on_ranks(4, timeout=LIMIT)
def test_topologies_that_do_not_fit_are_refused() -> None:
    model = toy.build()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    refuse(model, "topology=3 ranks per node does not divide the 4 ranks: use one of [1, 2, 4]", topology=3)
    refuse(model, "topology=0 ranks per node", topology=0)
    for wrong in (True, "banana", 2.0, None):
        refuse(model, f"topology={wrong!r} is unknown", topology=wrong)
    refuse(model, "must be 2-D (inter, intra), but it has 1 dimension [", topology=grid["intra"])
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("intra", "inter"))
    refuse(model, "the mesh is (intra, inter), but must be (inter, intra)", topology=turned)
    accept(model, topology=2)


HOST = "sdp4bit.engines.agreement.host_name"


@on_ranks(4, timeout=LIMIT)
def test_hosts_with_unequal_ranks_are_refused() -> None:
    model = toy.build()
    for hosts, message in (("aaab", "unequally over the nodes (a: 3, b: 1)"), ("abab", "node-major order")):
        with mock.patch(HOST, return_value=f"host-{hosts[dist.get_rank()]}"):
            table = [f"{rank:>6}  {rank:>11}  host-{hosts[rank]}" for rank in range(4)]
            refuse(model, message.replace("a:", "host-a:").replace("b:", "host-b:"), "\n  ".join(table))
            accept(model, topology=1)
    with mock.patch(HOST, return_value="aabb"[dist.get_rank()]):
        comm = quantize_communication(model)
        assert "2 x 2" in comm.explain(full=True)
        comm.remove()


@on_ranks(4, timeout=LIMIT)
def test_settings_that_differ_between_ranks_are_refused_and_named() -> None:
    """What differs is named, and nothing else."""
    model, first = toy.build(), dist.get_rank() == 0
    grid = init_device_mesh("cpu", (2, 2))
    differ = "have different settings or versions; make them equal on all ranks:\n  config."
    seed = f"{differ}seed: 0 [rank 0], 1 [ranks 1, 2, 3]"
    refuse(model, seed, without="weights", config=SDP4BitConfig(seed=0 if first else 1))
    weights = WeightConfig(bits=8, replica="full") if first else WeightConfig()
    refuse(
        model,
        f"{differ}weights.bits: 8 [rank 0], 4 [ranks 1, 2, 3]\n",
        "  config.weights.replica: 'full' [rank 0], 'node' [ranks 1, 2, 3]",
        without="group_size",
        config=SDP4BitConfig(weights=weights),
    )
    gradients = f"{differ}gradients: GradientConfig(...) [rank 0], None [ranks 1, 2, 3]"
    one_sided = SDP4BitConfig(gradients=GradientConfig() if first else None)
    refuse(model, gradients, without="weights", config=one_sided)
    skip = ["blocks.0"] if first else ["blocks.1"]
    refuse(model, "different settings", "skip: ['blocks.", skip=skip, topology=2)
    refuse(model, "\n  topology: a mesh [rank 0], 2 [ranks", topology=grid if first else 2)
    refuse(
        model,
        "ranks 0, 1, 2, 3 share a data-parallel group but not its parameter groups",
        "skip the same modules on all of them",
        "group 2 (blocks.0).skipped: True [rank 0], False [ranks 1, 2, 3]",
        without="shard_numel",
        skip=lambda name: name == "blocks.0" and first,
        topology=2,
    )
    refuse(model, "skip='*.nothing' matches no FSDP module; there are (root), blocks.0", skip=["*.nothing"])
    accept(model, topology=2, skip={"blocks.0", "norm"})


@on_ranks(4, timeout=LIMIT)
def test_what_one_rank_cannot_do_is_refused_by_all() -> None:
    model, last = toy.build(), dist.get_rank() == 3

    def fail(name: str) -> bool:
        return not last or bool({}["no such name"])

    unsharded = toy.ToyGPT()
    refuse(unsharded if last else model, "ToyGPT has no FSDP2 modules", "[rank 3]", topology=2)
    wrong_type = (
        "skip=5 has an unsupported type: use patterns over the names of FSDP modules, or a predicate [rank 3]"
    )
    refuse(model, wrong_type, error=TypeError, skip=5 if last else None, topology=2)
    refuse(model, "KeyError: 'no such name' [rank 3]", skip=fail, topology=2)
    with pytest.raises(ValueError) as caught:
        quantize_communication(model, skip=fail, topology=2)
    lines = [line.name for line in traceback.extract_tb(caught.value.__traceback__)]
    assert ("fail" in lines) == last, lines  # where it went wrong is in the traceback
    options = "use an SDP4BitConfig, the name of a preset (sdp4bit, "
    refuse(
        model,
        "config=4 has an unsupported type",
        options,
        error=TypeError,
        config=4 if last else None,
        topology=2,
    )
    refuse(model, "unknown preset 'qvd': use one of sdp4bit", config="qvd" if last else "sdp4bit", topology=2)
    with mock.patch("torch.__version__", "2.9.1" if last else "2.9.0"):
        different = "\n  torch: 2.9.0 [ranks 0, 1, 2], 2.9.1 [rank 3]"
        refuse(model, "different settings or versions", different, topology=2)
    with mock.patch("torch.__version__", "2.8.1"):
        refuse(
            model, "sdp4bit needs torch 2.9 or newer", "this is torch 2.8.1", "[ranks 0, 1, 2, 3]", topology=2
        )
    torch.manual_seed(0)
    wider, deeper = toy.ToyGPT(width=48 if last else 40), toy.ToyGPT(layers=3 if last else 2)
    differ = "ranks 0, 1, 2, 3 share a data-parallel group", "build the same model"
    refuse(toy.shard(wider), *differ, "group 1 ((root)).shard_numel: ", without="dtypes", topology=2)
    refuse(toy.shard(deeper), *differ, "parameter groups: 4 [ranks 0, 1, 2], 5 [rank 3]", topology=2)


# -- warnings and the rest ----------------------------------------------------------------------------


def warned(model: nn.Module, **options: Any) -> list[str]:
    """Return the library's warnings about attaching on all ranks; they point at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_communication(model, **options).remove()
    ours = [w for w in caught if "sdp4bit" in str(w.message)]
    assert {w.filename for w in ours} <= {__file__}
    texts: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(texts, [str(w.message) for w in ours])
    return [text for each in texts for text in each]


@on_ranks(4, timeout=LIMIT)
def test_settings_that_do_less_than_asked_for_are_warned_about() -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert warned(toy.build(mesh=hybrid), topology=2) == warned(toy.build(mesh=hybrid), topology=1) == []
    (inside,) = warned(toy.build(mesh=hybrid), topology=4)
    assert inside.startswith("sdp4bit: all parameter groups have their ranks on one node")
    accept(toy.build(mesh=init_device_mesh("cpu", (1, 4), mesh_dim_names=("r", "s"))), topology=2)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    (text,) = warned(toy.build(policy=half), topology=2)
    assert "reduced in fp16" in text

    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("other", "shard"))["shard"]
    texts = warned(toy.build(mesh=alone), topology=1)  # each rank is a group
    assert len(texts) == 4 and all("sharded over one rank" in text for text in texts)

    assert warned(toy.build(), topology=2) == []


@on_ranks(4, timeout=LIMIT)
def test_a_mesh_means_the_same_as_the_number_of_its_columns() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))
    # One (inter, intra) mesh per data-parallel group, side by side as under tensor parallelism.
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("inter", "intra", "tp"))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    for mesh, topologies in ((toy.data_mesh(), [2, grid]), (pairs, [2, cube["inter", "intra"]])):
        by_number, by_mesh = (
            quantize_communication(toy.build(mesh=mesh), topology=topology) for topology in topologies
        )
        assert [g.layout for g in by_number.groups] == [g.layout for g in by_mesh.groups]
        assert all(g.layout.nodes == 2 for g in by_mesh.groups)


def test_without_a_process_group_the_error_says_how_to_get_one() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        quantize_communication(nn.Linear(4, 4))

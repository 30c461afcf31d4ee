"""Megatron-Core integration: attaching once, refusing on all ranks, removing.

Layer: real Megatron-Core in 2 processes over gloo, through `fake_cuda`.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import sdp4bit
import sdp4bit_megatron
from sdp4bit_megatron import quantize_communication
from sdp4bit_megatron.api import _check_bucket
from sdp4bit_megatron.patches import OptimizerPatch
from tests import mutations
from tests.megatron.runs import LOSSLESS, QUANTIZED, MegatronRun
from tests.ranks import on_ranks

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")

PRELOAD = ["tests.megatron.imports"]


@on_ranks(2)
def test_every_mutation_breaks_calls_of_a_step() -> None:
    """The search for mutations that no test notices is slow and runs rarely; callers may have moved since."""
    run = MegatronRun(QUANTIZED, topology=1, overlap=True)
    for name in mutations.ALL:
        with mutations.broken(name) as fired:
            run.train(2)
        assert fired, name


def targets(run: MegatronRun) -> list[Any]:
    """The objects whose methods are replaced."""
    groups = [group for chunk in run.chunks for group in chunk.bucket_groups]
    return [*groups, *run.optimizer.chained_optimizers]


def patched(run: MegatronRun) -> list[str]:
    """Names that attaching puts on them."""
    return [name for target in targets(run) for name, value in vars(target).items() if is_ours(name, value)]


def is_ours(name: str, value: Any) -> bool:
    owner = getattr(value, "__self__", None)
    return name == "_sdp4bit_handle" or type(owner).__module__.startswith(("sdp4bit.", "sdp4bit_megatron."))


@contextmanager
def refused(*parts: str) -> Iterator[None]:
    """All ranks raise the same error, which names these parts, and is printed once."""
    with pytest.raises(ValueError) as refusal:
        yield
    printed = "".join(traceback.format_exception(refusal.value))
    assert printed.count(str(refusal.value)) == 1
    assert "direct cause" not in printed and "During handling" not in printed
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(refusal.value))
    assert len(set(texts)) == 1
    for part in parts:
        assert part in texts[0], texts[0]


def attached_once() -> None:
    run = MegatronRun(QUANTIZED, topology=1)
    names = patched(run)
    assert names
    again = quantize_communication(run.chunks, run.optimizer, config=QUANTIZED, topology=1)
    assert again is run.comm and patched(run) == names
    with refused("attached already with", "call remove()"):
        quantize_communication(run.chunks, run.optimizer, config=LOSSLESS, topology=1)
    with refused("attached already with", "topology=1"):
        quantize_communication(run.chunks, run.optimizer, config=QUANTIZED, topology=2)
    fsdp_handle = {name for name in vars(sdp4bit.CommHandle) if not name.startswith("_")}
    assert fsdp_handle <= set(dir(run.comm))
    run.comm.remove()
    preset = quantize_communication(run.chunks, run.optimizer, config="sdp4bit", topology=1)
    assert preset.config == sdp4bit.SDP4BitConfig()
    assert quantize_communication(run.chunks, run.optimizer, topology=1) is preset


def removed(overlap: bool) -> None:
    """Afterwards Megatron runs as if it had not been touched, and can be attached to again."""
    run = MegatronRun(QUANTIZED, topology=1, overlap=overlap).train(1)
    groups = len(dist.distributed_c10d._world.pg_map)
    run.comm.remove()
    assert patched(run) == []
    assert len(dist.distributed_c10d._world.pg_map) < groups
    # The weights are those that plain Megatron would have sent from these main weights.
    before = run.weights()
    for part in run.optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()
    for chunk in run.chunks:
        chunk.start_param_sync(force_sync=True)
    assert all(map(torch.equal, before, run.weights()))
    run.comm.remove()
    with pytest.raises(RuntimeError, match="removed from its model"):
        run.comm.state_dict()
    run.attach(QUANTIZED, topology=1)
    run.train(1).finish()
    assert run.comm.stats()["last_step"]["inter_bytes"] > 0

    plain = MegatronRun(None, overlap=overlap).train(2).finish()
    half = MegatronRun(LOSSLESS, topology=1, overlap=overlap).train(1)
    half.comm.remove()
    assert half.train(1).finish() == plain


def removed_after_the_process_groups(folder: Path) -> None:
    run = MegatronRun(QUANTIZED, topology=1).train(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    run.comm.remove()
    assert not run.comm.is_attached and patched(run) == []
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world)


def resynced(overlap: bool) -> None:
    """resync() sends the main weights as they are; mark_step() their changes by hand."""
    run = MegatronRun(QUANTIZED, topology=1, overlap=overlap).train(1)
    drift = run.comm.measure()["weight_drift"]
    run.comm.resync()
    run.assert_replicas_identical()
    assert 0 < run.comm.measure()["weight_drift"] < min(drift, 2**-8)  # bf16 rounds by at most 2**-9
    mains = [p for o in run.optimizer.chained_optimizers for g in o.shard_fp32_from_float16_groups for p in g]
    for main in mains:
        main.data.mul_(0.9)
    before = run.weights()
    for chunk in run.chunks:
        chunk.start_param_sync(force_sync=True)
    assert all(map(torch.equal, before, run.weights()))
    run.comm.mark_step()
    for chunk in run.chunks:
        chunk.start_param_sync(force_sync=True)
    assert not all(map(torch.equal, before, run.weights()))
    assert run.comm.measure()["weight_drift"] < 0.03


def refusals() -> None:
    """If one rank cannot attach, no rank does, and nothing is changed."""
    run = MegatronRun(QUANTIZED, attach=False)
    rank = dist.get_rank()
    communicators = len(dist.distributed_c10d._world.pg_map)

    def attach(chunks: Any = run.chunks, config: Any = QUANTIZED) -> None:
        quantize_communication(chunks, run.optimizer, config=config, topology=1)

    differ = "have different settings or versions; make them equal on all ranks:\n  config.weights.bits: None"
    with refused(
        f"{differ} [rank 0], 4 [rank 1]\n", "  config.gradients: None [rank 0], GradientConfig(...)"
    ):
        attach(config=QUANTIZED if rank else LOSSLESS)
    (part,) = run.optimizer.chained_optimizers
    with refused("use_precision_aware_optimizer", "[rank 1]"):
        part.config.use_precision_aware_optimizer = rank == 1
        attach()
    part.config.use_precision_aware_optimizer = False
    with refused("fp8_param_gather", "[ranks 0, 1]"):
        run.chunks[0].ddp_config.fp8_param_gather = True
        attach()
    run.chunks[0].ddp_config.fp8_param_gather = False
    with refused("wrap it in megatron.core.distributed.DistributedDataParallel"):
        attach([run.chunks[0].module])
    double = SimpleNamespace(name="chunk0.float64.0", param_dtype=torch.float64)
    with refused("chunk0.float64.0 holds torch.float64 parameters", "train in bf16 or fp16"):
        _check_bucket(double)
    with refused("AttributeError", "[rank 0]"):
        odd = SimpleNamespace(bucket_groups=[], ddp_config=SimpleNamespace())
        attach([odd] if rank == 0 else run.chunks)
    assert patched(run) == []
    assert len(dist.distributed_c10d._world.pg_map) == communicators
    lost = mock.patch.object(OptimizerPatch, "install", side_effect=RuntimeError("lost"))
    with lost, pytest.raises(RuntimeError, match="lost"):
        attach()  # bucket groups have been patched
    assert patched(run) == []
    assert len(dist.distributed_c10d._world.pg_map) == communicators
    other = MegatronRun(None)
    with refused("pass all of its model chunks"):
        attach(other.chunks)
    assert patched(other) == []
    if rank == 0:
        stranger = object.__new__(sdp4bit_megatron.MegatronCommHandle)
        stranger.config, stranger.topology = QUANTIZED, 1
        for target in targets(run):
            vars(target)["_sdp4bit_handle"] = stranger
    with refused("model_chunks: 'attached already' [rank 0], 'not attached yet' [rank 1]"):
        attach()


def unknown_buffer() -> None:
    """Buffers that are replaced after attaching are not sent as they are: their weights were never copied."""
    for kind, what in (("grad_data", "reduces gradients in"), ("param_data", "gathers parameters into")):
        run = MegatronRun(QUANTIZED, topology=1)
        group = run.chunks[0].bucket_groups[-1]
        group.buckets = [copy.copy(bucket) for bucket in group.buckets]
        for bucket in group.buckets:
            setattr(bucket, kind, getattr(bucket, kind).clone())
        with pytest.raises(RuntimeError) as caught:
            run.train(1)
        for part in (f"Megatron-Core {what} a buffer (torch.", "chunk0.bfloat16.", "Call remove() before"):
            assert part in str(caught.value), str(caught.value)


@pytest.mark.slow
@on_ranks(2)
def test_removal_and_resync_without_overlap() -> None:
    removed(overlap=False)
    resynced(overlap=False)


@on_ranks(2)
def test_attaching_and_removing(tmp_path: Path) -> None:
    attached_once()
    removed(overlap=True)
    resynced(overlap=True)
    refusals()
    unknown_buffer()
    removed_after_the_process_groups(tmp_path)


@on_ranks(4)
def test_ranks_without_a_part_of_the_model_attach_with_an_empty_list() -> None:
    run = MegatronRun(QUANTIZED, pp=2, attach=False)
    is_first = run.state.is_pipeline_first_stage()
    chunks, optimizer = (run.chunks, run.optimizer) if is_first else ([], None)
    run.comm = quantize_communication(chunks, optimizer, config=QUANTIZED, topology=1)
    assert bool(run.comm.groups) == is_first
    run.train(1)
    assert bool(run.comm.stats()["last_step"]["inter_bytes"]) == is_first

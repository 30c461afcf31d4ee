"""Refusals on Megatron-Core before anything changes, on stand-ins for its classes.

Layer: no process, and Megatron-Core need not be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sdp4bit_megatron.guards import MARK, check_chunks, distributed_optimizers


def dist_reduce_scatter_func() -> None:
    """Have the name of the global that a bucket group's method reads in Megatron-Core's module."""


def dist_all_gather_func() -> None:
    """The same for parameters."""


class Group:
    def __init__(self) -> None:
        self.buckets: list[Any] = []
        self.ddp_config = None
        self.grad_reduce_handle = self.param_gather_handle = None
        self.param_gather_dispatched = False
        self.intra_distributed_optimizer_instance_group = None

    def start_grad_sync(self, force_all_reduce: bool = False) -> None:
        dist_reduce_scatter_func()

    def start_param_sync(self, force_sync: bool = False) -> None:
        dist_all_gather_func()


class DistributedOptimizer:
    is_stub_optimizer = False

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)
        self.optimizer: Any = object()
        self.buffers: list[Any] = []
        self.model_float16_groups: list[Any] = []
        self.shard_fp32_from_float16_groups: list[Any] = []
        self.model_param_gbuf_map: dict[Any, Any] = {}

    def _get_model_param_range_map(self, param: Any) -> None: ...

    def _copy_main_params_to_model_params(self) -> None: ...


def instance_of(name: str) -> Any:
    """Return an object whose class, which Megatron-Core has, has this name."""
    return type(name, (), {})()


def with_attribute(stand_in: Any, name: str, value: object) -> Any:
    setattr(stand_in, name, value)
    return stand_in


def without_attribute(stand_in: Any, name: str) -> Any:
    delattr(stand_in, name)
    return stand_in


class WithoutForce(Group):
    def start_grad_sync(self) -> None:  # type: ignore[override]
        dist_reduce_scatter_func()


class Inlined(Group):
    def start_param_sync(self, force_sync: bool = False) -> None:
        """Does not read the global."""


class Renamed(DistributedOptimizer):
    def _copy_main_params_to_model_params(self, sharded: bool = True) -> None: ...  # type: ignore[override]


def chunk(group: Group | None = None, config: dict[str, Any] | None = None, **ddp: Any) -> Any:
    return SimpleNamespace(
        bucket_groups=[Group() if group is None else group],
        expert_parallel_bucket_groups=[],
        config=SimpleNamespace(**(config or {})),
        ddp_config=SimpleNamespace(**{"use_distributed_optimizer": True, **ddp}),
    )


def test_stock_objects_pass() -> None:
    check_chunks([chunk(), chunk(config={"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]})])
    first, second, stub = DistributedOptimizer(), DistributedOptimizer(), DistributedOptimizer()
    stub.is_stub_optimizer = True
    assert distributed_optimizers(first) == [first]
    assert distributed_optimizers(SimpleNamespace(chained_optimizers=[first, stub, second])) == [
        first,
        second,
    ]


def replaced() -> Group:
    return with_attribute(Group(), "start_grad_sync", lambda force_all_reduce=False: None)


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (list, ["model_chunks is empty"]),
        (lambda: [SimpleNamespace()], ["model_chunks[0] is a SimpleNamespace", "DistributedDataParallel"]),
        (lambda: [chunk(use_distributed_optimizer=False)], ["use_distributed_optimizer=True"]),
        (lambda: [chunk(), chunk(fp8_param_gather=True)], ["model_chunks[1]", "fp8_param_gather", "False"]),
        (lambda: [chunk(fp4_param_gather=True)], ["fp4_param_gather", "no 16-bit replica"]),
        (lambda: [chunk(reuse_grad_buf_for_mxfp8_param_ag=True)], ["reuse_grad_buf_for_mxfp8_param_ag"]),
        (lambda: [chunk(use_megatron_fsdp=True)], ["use_megatron_fsdp", "FSDP2"]),
        (lambda: [chunk(nccl_ub=True)], ["nccl_ub"]),
        (lambda: [chunk(reduce_scatter_with_fp32_accumulation=True)], ["the same reduce-scatter"]),
        (
            lambda: [chunk(num_distributed_optimizer_instances=2)],
            ["num_distributed_optimizer_instances=2", "set it to 1"],
        ),
        (lambda: [chunk(config={"cuda_graph_impl": "full_iteration"})], ["full iterations", "CUDA graph"]),
        (
            lambda: [chunk(config={"cuda_graph_scope": [SimpleNamespace(name="full_iteration")]})],
            ["full iterations"],
        ),
        (lambda: [chunk(config={"cuda_graph_scope": "full_iteration"})], ["full iterations"]),
        (
            lambda: [chunk(WithoutForce())],
            ["WithoutForce has start_grad_sync(self) instead of (self, force_all_reduce)", "0.16.1"],
        ),
        (lambda: [chunk(Inlined())], ["does not communicate through dist_all_gather_func"]),
        (lambda: [chunk(without_attribute(Group(), "param_gather_handle"))], ["lacks param_gather_handle"]),
        (lambda: [chunk(replaced())], ["start_grad_sync has been replaced", "undo that first"]),
    ],
)
def test_model_chunks_are_refused(build: Callable[[], Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        check_chunks(build())
    for part in parts:
        assert part in str(refusal.value)


def test_own_replacement_is_not_foreign() -> None:
    group = replaced()
    vars(group)[MARK] = object()
    check_chunks([chunk(group)])


@pytest.mark.parametrize(
    ("build", "parts"),
    [
        (
            lambda: instance_of("LayerWiseDistributedOptimizer"),
            ["LayerWiseDistributedOptimizer", "use Adam"],
        ),
        (
            lambda: instance_of("Float16OptimizerWithFloat16Params"),
            ["Float16OptimizerWithFloat16Params", "OptimizerConfig"],
        ),
        (
            lambda: with_attribute(DistributedOptimizer(), "optimizer", instance_of("HybridDeviceOptimizer")),
            ["HybridDeviceOptimizer", "optimizer_cpu_offload=False"],
        ),
        (
            lambda: DistributedOptimizer(use_precision_aware_optimizer=True),
            ["use_precision_aware_optimizer", "set it to False"],
        ),
        (lambda: DistributedOptimizer(optimizer_cpu_offload=True), ["optimizer_cpu_offload"]),
        (lambda: DistributedOptimizer(optimizer_cuda_graph=True), ["optimizer_cuda_graph"]),
        (Renamed, ["_copy_main_params_to_model_params(self, sharded) instead of (self)", "0.16.1"]),
        (
            lambda: without_attribute(DistributedOptimizer(), "model_param_gbuf_map"),
            ["lacks model_param_gbuf_map"],
        ),
    ],
)
@pytest.mark.parametrize("chained", [False, True])
def test_optimizers_are_refused(build: Callable[[], Any], parts: list[str], chained: bool) -> None:
    optimizer = build()
    if chained and "LayerWise" not in type(optimizer).__name__:
        optimizer = SimpleNamespace(chained_optimizers=[DistributedOptimizer(), optimizer])
    with pytest.raises(ValueError) as refusal:
        distributed_optimizers(optimizer)
    for part in parts:
        assert part in str(refusal.value)


def test_error_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__="0.99"))
    with pytest.raises(ValueError, match=r"Megatron-Core 0\.99 is not supported: WithoutForce"):
        check_chunks([chunk(WithoutForce())])

"""Checks for unsupported versions, settings and optimizers of Megatron-Core, without importing it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

from sdp4bit_megatron.buckets import class_names
from sdp4bit_megatron.objects import BucketGroup, Chunk, DDPConfig, Optimizer, relied_on

TESTED_VERSIONS = ("0.16.1", "0.19.2")

MARK = "_sdp4bit_handle"  # attribute of bucket groups and optimizers with replaced methods: their handle

GROUP_METHODS = {
    "start_grad_sync": ("force_all_reduce", "dist_reduce_scatter_func"),
    "start_param_sync": ("force_sync", "dist_all_gather_func"),
}
"""Replaced methods of a bucket group: their only argument and the global function that communicates."""
OPTIMIZER_METHODS = ("_copy_main_params_to_model_params", "state_dict", "load_state_dict")
"""Replaced methods of the distributed optimizer."""

_REFUSED_DDP = {
    "use_megatron_fsdp": "Megatron-FSDP has its own communication: use the distributed optimizer, or "
    "PyTorch's FSDP2 with sdp4bit.quantize_communication(model)",
    "use_custom_fsdp": "Megatron-FSDP has its own communication: use the distributed optimizer",
    "fp8_param_gather": "parameters kept in fp8 have no 16-bit replica: set it to False",
    "fp4_param_gather": "parameters kept in fp4 have no 16-bit replica: set it to False",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters kept in fp8 have no 16-bit replica: set it to False",
    "reduce_scatter_with_fp32_accumulation": "it replaces the same reduce-scatter: set it to False",
    "nccl_ub": "quantized messages are not sent from buffers registered with NCCL: set it to False",
}
_REFUSED_OPTIMIZER = {
    "use_precision_aware_optimizer": "the optimizer then overwrites the 16-bit weights, which are the "
    "replica: set it to False",
    "optimizer_cpu_offload": "the optimizer then copies main weights from the CPU itself: set it to False",
    "optimizer_cuda_graph": "a captured optimizer step cannot be detected: set it to False",
}


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise ValueError for model chunks whose communication cannot be replaced."""
    if not chunks:
        raise ValueError(
            "model_chunks is empty: pass the list of DistributedDataParallel model chunks, or optimizer=None "
            "on ranks without a part of the model"
        )
    for number, chunk in enumerate(chunks):
        what = f"model_chunks[{number}]"
        if not hasattr(chunk, "bucket_groups") or not hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"{what} is a {type(chunk).__name__}: wrap it in megatron.core.distributed."
                "DistributedDataParallel with use_distributed_optimizer=True first"
            )
        _check_ddp_config(what, chunk.ddp_config)
        _check_graphs(what, chunk.config)
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            _check_methods(group, GROUP_METHODS, relied_on(BucketGroup))


def _check_ddp_config(what: str, config: DDPConfig) -> None:
    for name, reason in _REFUSED_DDP.items():
        if getattr(config, name, False):
            raise ValueError(f"{what} uses {name}; {reason}")
    if not config.use_distributed_optimizer:
        raise ValueError(
            f"{what} all-reduces gradients: set use_distributed_optimizer=True (--use-distributed-optimizer)"
        )
    instances = getattr(config, "num_distributed_optimizer_instances", 1)
    if instances != 1:
        raise ValueError(
            f"{what} uses num_distributed_optimizer_instances={instances}, whose all-reduce between "
            "instances is not quantized: set it to 1, because sdp4bit reduces inside nodes first anyway"
        )


def _check_graphs(what: str, config: object) -> None:
    scopes = getattr(config, "cuda_graph_scope", None)
    scopes = scopes if isinstance(scopes, list | tuple) else [scopes]
    names = [getattr(scope, "name", scope) for scope in scopes]
    if "full_iteration" in [*names, getattr(config, "cuda_graph_impl", "none")]:
        raise ValueError(
            f"{what} captures full iterations in a CUDA graph, which would repeat the same rounding bits: "
            "use per-layer graphs or none"
        )


def distributed_optimizers(optimizer: object) -> list[Optimizer]:
    """Return the distributed optimizers in the result of `get_megatron_optimizer`.

    Raises:
        ValueError: the kind of optimizer or one of its settings is not supported.
    """
    if "LayerWiseDistributedOptimizer" in class_names(optimizer):
        raise ValueError(
            "LayerWiseDistributedOptimizer keeps complete layers on one rank and broadcasts them: use Adam "
            "with use_distributed_optimizer=True"
        )
    result = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue  # all its parameters are frozen
        if "DistributedOptimizer" not in class_names(part):
            raise ValueError(
                f"the optimizer contains a {type(part).__name__}, but only Megatron-Core's "
                "DistributedOptimizer is supported: set use_distributed_optimizer=True in OptimizerConfig"
            )
        for name, reason in _REFUSED_OPTIMIZER.items():
            if getattr(part.config, name, False):
                raise ValueError(f"the optimizer uses {name}; {reason}")
        if "HybridDeviceOptimizer" in class_names(part.optimizer):
            raise ValueError(
                "the optimizer keeps main weights on the CPU (HybridDeviceOptimizer): set "
                "optimizer_cpu_offload=False"
            )
        _check_methods(part, {OPTIMIZER_METHODS[0]: (None, None)}, relied_on(Optimizer))
        result.append(part)
    return result


def _check_methods(
    target: object, methods: Mapping[str, tuple[str | None, str | None]], attributes: Sequence[str]
) -> None:
    """Raise ValueError unless the object has these methods, signatures and attributes."""
    for name, (argument, collective) in methods.items():
        method = getattr(type(target), name, None)
        if method is None:
            raise _unsupported(target, f"has no method {name}")
        expected = ["self"] if argument is None else ["self", argument]
        actual = list(inspect.signature(method).parameters)
        if actual != expected:
            raise _unsupported(target, f"has {name}({', '.join(actual)}) instead of ({', '.join(expected)})")
        if collective is not None and not _reads_global(method, collective):
            raise _unsupported(target, f"does not communicate through {collective} in {name}")
        if name in vars(target) and MARK not in vars(target):
            raise ValueError(
                f"{type(target).__name__}.{name} has been replaced by other code, which sdp4bit cannot "
                "combine with its own replacement: undo that first"
            )
    missing = [name for name in attributes if not hasattr(target, name)]
    if missing:
        raise _unsupported(target, f"lacks {', '.join(missing)}")


def _reads_global(method: Callable[..., object], name: str) -> bool:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is not None and name in code.co_names and name in inspect.unwrap(method).__globals__


def _unsupported(target: object, problem: str) -> ValueError:
    core = sys.modules.get("megatron.core")
    version = getattr(core, "__version__", "unknown")
    return ValueError(
        f"Megatron-Core {version} is not supported: {type(target).__name__} {problem}. Install a version "
        f"from {' to '.join(TESTED_VERSIONS)}"
    )

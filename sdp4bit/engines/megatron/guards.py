"""Refuse versions, settings and optimizers of Megatron-Core whose communication cannot be replaced.

Everything is looked up on the objects given, so Megatron-Core is not imported here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

from sdp4bit.engines.megatron.buckets import class_names
from sdp4bit.engines.megatron.objects import BucketGroup, Chunk, DDPConfig, Optimizer, relied_on

TESTED_VERSIONS = ("0.16.1", "0.19.2")

MARK = "_sdp4bit_handle"
"""Attribute that marks bucket groups and optimizers whose methods have been replaced."""

GROUP_METHODS = {
    "start_grad_sync": ("force_all_reduce", "dist_reduce_scatter_func"),
    "start_param_sync": ("force_sync", "dist_all_gather_func"),
}
"""Methods of a bucket group: their one argument, and the module's global through which they communicate."""
OPTIMIZER_METHODS = ("_copy_main_params_to_model_params", "state_dict", "load_state_dict")
"""Methods of the distributed optimizer that are replaced."""

_REFUSED_DDP = {
    "use_megatron_fsdp": "Megatron-FSDP communicates by itself: use the distributed optimizer, or PyTorch's "
    "FSDP2 with sdp4bit.quantize_communication(model)",
    "use_custom_fsdp": "Megatron-FSDP communicates by itself: use the distributed optimizer",
    "fp8_param_gather": "parameters kept in fp8 have no 16-bit replica: set it to False",
    "fp4_param_gather": "parameters kept in fp4 have no 16-bit replica: set it to False",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters kept in fp8 have no 16-bit replica: set it to False",
    "reduce_scatter_with_fp32_accumulation": "it replaces the same reduce-scatter: set it to False",
    "nccl_ub": "buffers registered with NCCL are not what the quantized exchange sends: set it to False",
}
_REFUSED_OPTIMIZER = {
    "use_precision_aware_optimizer": "the optimizer then writes the 16-bit weights itself, and the replica "
    "that differences are taken against is lost: set it to False",
    "optimizer_cpu_offload": "main weights on the host are copied by the optimizer itself: set it to False",
    "optimizer_cuda_graph": "a captured optimizer step does not report that it has run: set it to False",
}


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise ValueError unless these are data-parallel model chunks whose communication can be replaced."""
    if not chunks:
        raise ValueError(
            "model_chunks is empty: pass the list of DistributedDataParallel model chunks, or None as the "
            "optimizer on ranks that have no part of the model"
        )
    for number, chunk in enumerate(chunks):
        what = f"model_chunks[{number}]"
        if not hasattr(chunk, "bucket_groups") or not hasattr(chunk, "ddp_config"):
            raise ValueError(
                f"{what} is a {type(chunk).__name__}: wrap it in megatron.core.distributed."
                "DistributedDataParallel with use_distributed_optimizer=True first "
                '(pip install "sdp4bit[megatron]")'
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
            f"{what} reduces all gradients on all ranks: set use_distributed_optimizer=True (in Megatron's "
            "training program, its option of that name)"
        )
    instances = getattr(config, "num_distributed_optimizer_instances", 1)
    if instances != 1:
        raise ValueError(
            f"{what} uses num_distributed_optimizer_instances={instances}, whose all-reduce between "
            "instances would stay in full precision: set it to 1; the two-level exchange finds nodes itself"
        )


def _check_graphs(what: str, config: object) -> None:
    scopes = getattr(config, "cuda_graph_scope", None)
    scopes = scopes if isinstance(scopes, list | tuple) else [scopes]
    names = [getattr(scope, "name", scope) for scope in scopes]
    if "full_iteration" in [*names, getattr(config, "cuda_graph_impl", "none")]:
        raise ValueError(
            f"{what} captures full iterations in a CUDA graph, which would replay the same rounding bits: "
            "use per-layer graphs or none"
        )


def distributed_optimizers(optimizer: object) -> list[Optimizer]:
    """Return the distributed optimizers in what `get_megatron_optimizer` returned.

    Raises:
        ValueError: another kind of optimizer, or one that does not keep its main weights apart.
    """
    if "LayerWiseDistributedOptimizer" in class_names(optimizer):
        raise ValueError(
            "LayerWiseDistributedOptimizer keeps whole layers on one rank and broadcasts them; use Adam with "
            "use_distributed_optimizer=True"
        )
    result = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue  # all its parameters are frozen
        if "DistributedOptimizer" not in class_names(part):
            raise ValueError(
                f"the optimizer contains a {type(part).__name__}; only Megatron-Core's DistributedOptimizer "
                "can be quantized: set use_distributed_optimizer=True in OptimizerConfig"
            )
        for name, reason in _REFUSED_OPTIMIZER.items():
            if getattr(part.config, name, False):
                raise ValueError(f"the optimizer uses {name}; {reason}")
        if "HybridDeviceOptimizer" in class_names(part.optimizer):
            raise ValueError(
                "the optimizer keeps main weights on the host (HybridDeviceOptimizer): set "
                "optimizer_cpu_offload=False"
            )
        _check_methods(part, {OPTIMIZER_METHODS[0]: (None, None)}, relied_on(Optimizer))
        result.append(part)
    return result


def _check_methods(
    target: object, methods: Mapping[str, tuple[str | None, str | None]], attributes: Sequence[str]
) -> None:
    """Raise ValueError unless the object has the methods, signatures and attributes that are relied on."""
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
                f"{type(target).__name__}.{name} has been replaced on the object by something else, which "
                "sdp4bit cannot share: undo that first"
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
        f"Megatron-Core {version} is not supported: {type(target).__name__} {problem}. Tested are "
        f"{' and '.join(TESTED_VERSIONS)}; install one of them, or a release between them"
    )

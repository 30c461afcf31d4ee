"""Flags of the reference implementation's scripts that have no meaning here: taken, and said so.

A launch script of Megatron-LM runs unchanged as far as these flags go. A flag that is neither here nor an
option of another group is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from sdp4bit_lab.common.marks import Switch, arg
from sdp4bit_lab.common.settings import options_of

_NO_FP16 = "Weights are gathered in bf16 or fp32, which need no loss scale."


def _because(reason: str) -> object:
    return arg(help=reason)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Flags of Megatron-LM that change nothing here; a line at the start says why."""

    use_distributed_optimizer: Annotated[
        bool, Switch, _because("FSDP2 always shards the optimizer's state.")
    ] = False
    no_async_tensor_model_parallel_allreduce: Annotated[
        bool, Switch, _because("PyTorch's tensor parallelism has no such switch.")
    ] = False
    use_flash_attn: Annotated[
        bool, Switch, _because("Attention takes PyTorch's flash kernel wherever that can run.")
    ] = False
    overlap_grad_reduce: Annotated[
        bool, Switch, _because("FSDP2 always reduces a block while backward goes on with those before it.")
    ] = False
    overlap_param_gather: Annotated[
        bool, Switch, _because("FSDP2 always gathers a block while the one before it computes.")
    ] = False
    no_gradient_accumulation_fusion: Annotated[
        bool, Switch, _because("There is no fused accumulation of gradients to switch off.")
    ] = False
    no_masked_softmax_fusion: Annotated[
        bool, Switch, _because("Mask and softmax are part of PyTorch's attention.")
    ] = False
    no_bias_gelu_fusion: Annotated[bool, Switch, _because("Fusions are up to --compile.")] = False
    no_bias_dropout_fusion: Annotated[bool, Switch, _because("Fusions are up to --compile.")] = False
    accumulate_allreduce_grads_in_fp32: Annotated[
        bool, Switch, _because("Gradients are reduced in fp32 always.")
    ] = False
    use_mcore_models: Annotated[bool, Switch, _because("The model is this program's own.")] = False
    data_impl: Annotated[
        Literal["mmap", "infer"] | None, _because("Indexed data is mapped into memory always.")
    ] = None
    distributed_backend: Annotated[
        Literal["nccl", "gloo"] | None, _because("The device decides: nccl on GPUs, gloo on CPUs.")
    ] = None
    transformer_impl: Annotated[
        Literal["local", "transformer_engine"] | None, _because("The model is this program's own.")
    ] = None
    position_embedding_type: Annotated[
        Literal["learned_absolute"] | None, _because("Positions are learned always, as in the paper.")
    ] = None
    num_workers: Annotated[
        int | None, _because("Every rank reads the memory-mapped data itself, without worker processes.")
    ] = None

    fp16: Annotated[bool, Switch, _because(_NO_FP16)] = False
    loss_scale: Annotated[float | None, _because(_NO_FP16)] = None
    initial_loss_scale: Annotated[float | None, _because(_NO_FP16)] = None
    min_loss_scale: Annotated[float | None, _because(_NO_FP16)] = None
    loss_scale_window: Annotated[float | None, _because(_NO_FP16)] = None
    hysteresis: Annotated[int | None, _because(_NO_FP16)] = None
    timing_log_level: Annotated[Literal[0, 1, 2] | None, _because("torch.profiler shows the times.")] = None

    def explain(self) -> list[str]:
        """Return a line for each flag that was given."""
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        options = options_of(type(self))
        return [f"{options[name].flags[0]} changes nothing here. {options[name].help}" for name in given]

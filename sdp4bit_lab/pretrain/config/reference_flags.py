"""Accept flags of the reference implementation's scripts that have no effect here."""

from __future__ import annotations

from collections.abc import Sequence

from sdp4bit_lab.common.settings import SettingError

_OWN_MODEL = "This program has its own model."
_FUSION = "--compile decides on fusions."
_NO_FP16 = "Weights are gathered in bf16 or fp32, which need no loss scale."

WITHOUT_EFFECT: dict[str, tuple[str, str]] = {
    "--accumulate-allreduce-grads-in-fp32": ("", "Gradients are always reduced in fp32."),
    "--bf16": ("", "Weights are gathered in bf16 unless --param-dtype is fp32."),
    "--data-impl": ("mmap|infer", "Indexed data is always mapped into memory."),
    "--distributed-backend": ("nccl|gloo", "The device decides: nccl on GPUs, gloo on CPUs."),
    "--fp16": ("", _NO_FP16),
    "--hysteresis": ("N", _NO_FP16),
    "--initial-loss-scale": ("N", _NO_FP16),
    "--loss-scale": ("N", _NO_FP16),
    "--loss-scale-window": ("N", _NO_FP16),
    "--min-loss-scale": ("N", _NO_FP16),
    "--no-async-tensor-model-parallel-allreduce": ("", "PyTorch's tensor parallelism has no such option."),
    "--no-bias-dropout-fusion": ("", _FUSION),
    "--no-bias-gelu-fusion": ("", _FUSION),
    "--no-gradient-accumulation-fusion": ("", "There is no fused gradient accumulation."),
    "--no-masked-softmax-fusion": ("", "Mask and softmax are part of PyTorch's attention."),
    "--num-workers": ("N", "Every rank reads the memory-mapped data itself, without worker processes."),
    "--overlap-grad-reduce": ("", "FSDP2 always reduces a block while backward continues."),
    "--overlap-param-gather": ("", "FSDP2 always gathers a block while the one before it computes."),
    "--position-embedding-type": ("learned_absolute", "Positions are always learned, as in the paper."),
    "--timing-log-level": ("N", "Use torch.profiler to time the parts of a step."),
    "--transformer-impl": ("local|transformer_engine", _OWN_MODEL),
    "--use-distributed-optimizer": ("", "FSDP2 always shards the optimizer's state."),
    "--use-flash-attn": ("", "Attention uses PyTorch's flash kernel if possible."),
    "--use-mcore-models": ("", _OWN_MODEL),
}
"""Accepted values (separated by |, N for any, empty for a switch), and the reason."""


def drop_reference_flags(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the other arguments, and a note per flag; SettingError for an unsupported value."""
    rest: list[str] = []
    notes: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if flag not in WITHOUT_EFFECT:
            rest.append(argument)
            continue
        values, reason = WITHOUT_EFFECT[flag]
        if values and not equals:
            value = next(remaining, "")
        if values not in ("", "N") and value not in values.split("|"):
            raise SettingError(f"{flag} {value} is not supported, only {values.replace('|', ' or ')}")
        notes.append(f"{flag} has no effect here. {reason}")
    return rest, tuple(notes)

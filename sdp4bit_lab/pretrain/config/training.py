"""Settings of run length, batch size and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from sdp4bit_lab.common.settings import option, require, require_at_least

Precision = Literal["bf16", "fp32"]
ComputeDtype = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch size and precision of the run."""

    steps: Annotated[int, option("train-iters", "steps")] = 200
    """Optimizer steps."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass. Default: the preset's."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks, instead of --accumulation."""
    accumulation: int | None = None
    """Micro batches per optimizer step; gradients are reduced after the last one. Default: 1."""
    sequence_length: Annotated[int | None, option("seq-length", "sequence-length")] = None
    """Tokens per sequence. Default: the preset's."""
    eval_interval: int = 100
    """Steps between validations. The last step is always validated."""
    eval_batches: Annotated[int, option("eval-iters", "eval-batches")] = 4
    """Global batches per validation; every validation uses the same samples."""
    param_dtype: Annotated[Precision, option("param-dtype", "precision")] = "bf16"
    """dtype of gathered weights. Main weights and gradient reduction are fp32."""
    compute_dtype: ComputeDtype = "auto"
    """dtype of activations. auto: --param-dtype, or fp32 on CPUs without bf16 instructions, which compute
    several times faster in fp32."""
    compile: bool = False
    """Compile every block with torch.compile."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward and gather them again in backward (ZeRO-3). Off: gather once per
    step."""
    exit_interval: int | None = None
    """Save and stop after a step that is a multiple of this number."""
    exit_duration_in_mins: float | None = None
    """Save and stop at the end of the step after this many minutes."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "steps", "micro_batch_size", "global_batch_size", "accumulation")
        require_at_least(1, self, "sequence_length", "eval_interval", "eval_batches", "exit_interval")
        require_at_least(0, self, "exit_duration_in_mins")
        require(
            self.accumulation is None or self.global_batch_size is None,
            f"--accumulation {self.accumulation} and --global-batch-size {self.global_batch_size} both set "
            "the batch size: give only one",
        )
        require(
            self.compute_dtype in ("auto", "fp32", self.param_dtype),
            f"--compute-dtype {self.compute_dtype} needs --param-dtype {self.compute_dtype}: "
            f"{self.param_dtype} weights are multiplied in {self.param_dtype} or fp32",
        )

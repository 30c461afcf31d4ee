"""Settings of how long a run is, how large its batches are, and in which precision it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from sdp4bit_lab.common.marks import Switch
from sdp4bit_lab.common.settings import (
    RENAMED,
    option,
    renamed_fields,
    require,
    require_at_least,
    require_positive,
)

Precision = Literal["bf16", "fp16", "fp32"]
ComputeDtype = Literal["auto", "bf16", "fp16", "fp32"]


@renamed_fields(RENAMED["training"])
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length and size of the training run, and its precision."""

    steps: Annotated[int, option("train-iters", "steps")] = 200
    """Optimizer steps."""
    micro_batch_size: int | None = None
    """Sequences per rank in one forward; the card's when not given."""
    global_batch_size: int | None = None
    """Sequences per optimizer step over all ranks; instead of --accumulation."""
    accumulation: int | None = None
    """Micro batches per optimizer step, 1 when not given; gradients are reduced once, after the last."""
    sequence_length: Annotated[int | None, option("seq-length", "sequence-length")] = None
    """Tokens per sequence; the card's when not given."""
    eval_interval: int = 100
    """Steps between validations; the last step is always followed by one."""
    eval_batches: Annotated[int, option("eval-iters", "eval-batches")] = 4
    """Global batches per validation, always the same ones."""
    precision: Annotated[Precision | None, option("param-dtype", "precision")] = None
    """dtype in which FSDP2 gathers the weights, bf16 when not given; gradients are reduced in fp32, main
    weights are fp32 always."""
    bf16: Annotated[bool, Switch] = False
    """The same as --param-dtype bf16."""
    fp16: Annotated[bool, Switch] = False
    """The same as --param-dtype fp16: the loss is scaled, as the options below say."""
    compute_dtype: Annotated[ComputeDtype, option("compute-dtype", "arithmetic")] = "auto"
    """dtype of the activations. auto: that of the gathered weights, except on CPUs without instructions for
    it, where weights are multiplied in fp32, several times faster."""
    loss_scale: float | None = None
    """fp16: multiply the loss by this always; found and adapted while training when not given."""
    initial_loss_scale: float = 2.0**32
    """fp16: first scale of the loss."""
    loss_scale_window: int = 1000
    """fp16: steps without an overflow after which the scale is doubled."""
    hysteresis: int = 2
    """fp16: overflows until the scale is halved."""
    min_loss_scale: float = 1.0
    """fp16: smallest scale of the loss; an overflow at it ends the run."""
    compile: bool = False
    """Compile every block with torch.compile."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward and gather them again in backward (ZeRO-3); off: once a step."""
    exit_interval: int | None = None
    """Save and leave when the step is a multiple of this."""
    exit_duration_in_mins: float | None = None
    """Save and leave after the first step that ends later than this many minutes after the start."""

    def __post_init__(self) -> None:
        require_at_least(1, self, "steps", "micro_batch_size", "global_batch_size", "accumulation")
        require_at_least(1, self, "sequence_length", "eval_interval", "eval_batches", "exit_interval")
        require_at_least(1, self, "loss_scale_window", "hysteresis")
        require_at_least(0, self, "exit_duration_in_mins")
        require_positive(self, "loss_scale", "initial_loss_scale", "min_loss_scale")
        require(
            self.accumulation is None or self.global_batch_size is None,
            f"--accumulation {self.accumulation} and --global-batch-size {self.global_batch_size} both say "
            "how many sequences a step has: give one of the two",
        )
        self._check_precision()
        self._check_loss_scale()

    @property
    def param_dtype(self) -> Precision:
        """dtype of the gathered weights, on which the three options about it agree."""
        if self.precision is not None:
            return self.precision
        return "fp16" if self.fp16 else "bf16"

    def _check_precision(self) -> None:
        given = {self.precision, "bf16" if self.bf16 else None, "fp16" if self.fp16 else None} - {None}
        require(
            len(given) < 2,
            f"--param-dtype is given as {' and '.join(map(str, sorted(given, key=str)))}: choose one",
        )
        require(
            self.compute_dtype in ("auto", "fp32", self.param_dtype),
            f"--compute-dtype {self.compute_dtype} needs --param-dtype {self.compute_dtype}: "
            f"{self.param_dtype} weights are multiplied in {self.param_dtype} or fp32",
        )

    def _check_loss_scale(self) -> None:
        require(
            self.loss_scale is None or self.param_dtype == "fp16",
            f"--loss-scale {self.loss_scale} has no effect with --param-dtype {self.param_dtype}: leave it "
            "out, or use --fp16",
        )
        require(
            self.initial_loss_scale >= self.min_loss_scale,
            f"--initial-loss-scale {self.initial_loss_scale} is below --min-loss-scale {self.min_loss_scale}",
        )

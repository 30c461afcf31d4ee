"""Translate flags of Megatron-LM and of the reference implementation, which extends it.

A flag sets an option of this program, has no effect and is named in a note, is accepted with the value that
this program has, or is refused with the reason.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sdp4bit_lab.pretrain.model.cards import ModelShape

SETS_OPTION = {
    "--dropout": "--attention-dropout=N --hidden-dropout=N",
    "--recompute-granularity selective": "--recompute-activations",
}
"""Flags by the option that they set. In all tables, a flag without `=` is a switch.

Accepted values follow `=`: N for any, N... for several.
"""

WITHOUT_EFFECT = {
    "Weights are gathered in bf16, unless --param-dtype is fp32; neither needs a loss scale.": """
        --bf16 --fp16 --hysteresis=N --initial-loss-scale=N --loss-scale=N --loss-scale-window=N
        --min-loss-scale=N --apply-query-key-layer-scaling
    """,
    "Gradient reduction, softmax and cross entropy are always in fp32.": """
        --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --fp16-lm-cross-entropy
    """,
    "FSDP2 always shards the optimizer's state, and communicates one block while others compute.": """
        --use-distributed-optimizer --use-torch-fsdp2 --bucket-size=N --ddp-bucket-size=N
        --overlap-grad-reduce --overlap-param-gather --no-delay-grad-reduce --delay-grad-reduce
        --delay-param-gather
    """,
    "Collectives of tensor and pipeline parallelism have no such options.": """
        --sequence-parallel --no-async-tensor-model-parallel-allreduce --tp-comm-overlap
        --tp-comm-overlap-cfg=N --disable-tp-comm-split-ag --disable-tp-comm-split-rs
        --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
        --no-clone-scatter-output-in-embedding --distribute-saved-activations
        --no-overlap-p2p-communication --overlap-p2p-communication --use-ring-exchange-p2p
        --no-scatter-gather-tensors-in-pipeline
    """,
    "The device decides: nccl on GPUs, gloo on CPUs.": "--distributed-backend=N",
    "torchrun or --nproc-per-node decides.": "--local-rank=N",
    "--compile decides on fusions, and PyTorch on the kernel of attention.": """
        --attention-backend=N --cross-entropy-loss-fusion --no-bias-dropout-fusion
        --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-gradient-accumulation-fusion
        --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --use-flash-attn
    """,
    "This program has its own model, whose initial weights do not depend on the device.": """
        --transformer-impl=N --use-cpu-initialization --use-mcore-models
    """,
    "Every rank maps the data into memory itself.": """
        --data-impl=mmap|infer --distributed-storage --no-create-attention-mask-in-dataloader
        --no-mmap-bin-files --num-workers=N
    """,
    "TensorBoard and metrics.jsonl get the values of every step.": """
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
        --log-world-size-to-tensorboard --no-log-learnig-rate-to-tensorboard
        --no-log-loss-scale-to-tensorboard --tensorboard-log-interval=N --tensorboard-queue-size=N
    """,
    "Weights & Biases is not used; it can import TensorBoard events.": """
        --wandb-exp-name=N --wandb-project=N --wandb-save-dir=N
    """,
    "torch.profiler measures times and memory of a step.": """
        --empty-unused-memory-level=N --log-memory-to-tensorboard --log-timers-to-tensorboard
        --no-barrier-with-level-1-timing --profile --profile-ranks=N... --profile-step-end=N
        --profile-step-start=N --timing-log-level=N --timing-log-option=N --use-pytorch-profiler
    """,
    "Only the gradient norm is logged.": "--log-num-zeros-in-grad --log-params-norm --log-progress",
    "Python collects garbage by itself.": "--manual-gc --manual-gc-interval=N --no-manual-gc-eval",
    "Runs repeat bit for bit, a loss that is not finite ends a run, and signals save.": """
        --deterministic-mode --exit-signal-handler --no-check-for-nan-in-loss-and-grad
    """,
    "Random numbers follow from the seed and the step.": "--no-load-rng --no-save-rng",
    "Training waits until a checkpoint is complete.": "--async-save",
    "Checkpoints have the format of torch.distributed.checkpoint.": """
        --ckpt-format=N --dist-ckpt-format=N --use-dist-ckpt
    """,
    "The optimizer is AdamW.": "--sgd-momentum=N",
}
"""Flags that have no effect, by the reason."""

EQUAL = {
    "The optimizer is AdamW, with constant weight decay.": """
        --optimizer=adam --weight-decay-incr-style=constant
    """,
    "Warm-up starts at 0.": "--lr-warmup-init=0",
    "Weights start with a standard deviation of 0.02.": "--init-method-std=0.02",
    "Norms are LayerNorm with an epsilon of 1e-5.": """
        --normalization=LayerNorm --norm-epsilon=1e-5 --layernorm-epsilon=1e-5
    """,
    "Positions are learned.": "--position-embedding-type=learned_absolute",
    "The feed-forward layer uses GELU in its tanh form.": "--openai-gelu",
    "The vocabulary is padded to a multiple of 128, without extra tokens.": """
        --make-vocab-size-divisible-by=128 --vocab-extra-ids=0
    """,
    "--recompute-granularity full recomputes every block by itself.": """
        --recompute-method=uniform --recompute-num-layers=1
    """,
    "Parallelism is data, tensor and pipeline.": "--context-parallel-size=1 --expert-model-parallel-size=1",
    "The order of samples follows from the seed.": "--dataloader-type=single",
}
"""Flags that are accepted with the value that this program has, by a description of it."""

REFUSED = {
    "this program trains GPT-2's architecture": """
        --swiglu --squared-relu --disable-bias-linear --add-qkv-bias --qk-layernorm
        --untie-embeddings-and-output-weights --group-query-attention --num-query-groups
        --use-rotary-position-embeddings --rotary-percent --rotary-base
        --rotary-seq-len-interpolation-factor --no-position-embedding --apply-layernorm-1p
        --apply-residual-connection-post-layernorm --num-experts --moe-grouped-gemm
        --multi-latent-attention --spec --encoder-num-layers --decoder-num-layers
    """,
    "weights start with a standard deviation of 0.02 on all ranks": """
        --init-method-xavier-uniform --data-parallel-random-init
    """,
    "the batch size is constant: --global-batch-size": "--rampup-batch-size",
    "lengths are in steps: --train-iters, --lr-decay-iters and --lr-warmup-iters": """
        --train-samples --lr-decay-samples --lr-warmup-samples
    """,
    "weight decay is constant: --weight-decay": "--start-weight-decay --end-weight-decay",
    "all parameters have one learning rate: --lr": "--decoupled-lr --decoupled-min-lr",
    "gradients are reduced in fp32": "--grad-reduce-in-bf16",
    "the residual stream has the dtype of --compute-dtype": "--fp32-residual-connection",
    "fp8 is not supported": "--fp8-format",
    "samples, positions and attention cross document boundaries": """
        --reset-position-ids --reset-attention-mask
    """,
    "checkpoints are saved and loaded with the state of the optimizer": """
        --finetune --no-load-optim --no-save-optim
    """,
    "the options of the model are given, not loaded": "--use-checkpoint-args",
    "--load must have a checkpoint, unless it equals --save": "--exit-on-missing-checkpoint",
    "this program trains": "--skip-train",
    "embeddings are on the first and the last pipeline rank": """
        --standalone-embedding-stage --pipeline-model-parallel-split-rank
    """,
    "this is another method than SDP4Bit": "--fast-slow-grad-reduce --high-precision-grad-device",
}
"""Flags that would change the model, the schedule or the method, by the reason."""

_OUTCOMES = {
    "sets an option": SETS_OPTION,
    "accepted with this value": EQUAL,
    "no effect": WITHOUT_EFFECT,
    "refused": REFUSED,
}
_SIZES: dict[str, Callable[[ModelShape], int]] = {
    "--ffn-hidden-size": lambda shape: 4 * shape.hidden,
    "--kv-channels": lambda shape: shape.hidden // shape.heads,
}
"""Sizes that follow from others in this model."""
_IN_ALL_SCRIPTS = "--use-distributed-optimizer"
"""Every script of the reference passes it, those of its baseline without --quantized-*."""
_REFERENCE_DROPOUT = 0.1


@dataclass(frozen=True, kw_only=True)
class _Flag:
    outcome: str
    values: str
    reason: str

    @property
    def most_values(self) -> float:
        if self.values == "N..." or self.outcome == "refused":
            return math.inf
        return 1 if self.values else 0


_FLAGS = {
    flag: _Flag(outcome=outcome, values=values, reason=reason)
    for outcome, table in _OUTCOMES.items()
    for reason, flags in table.items()
    for flag, _, values in (each.partition("=") for each in flags.split())
} | {flag: _Flag(outcome="size", values="N", reason="") for flag in _SIZES}


@dataclass(frozen=True, kw_only=True)
class Translation:
    """Options of this program, and messages about the flags that they replace."""

    options: Sequence[str]
    note: str
    """One line about differences from the reference; empty if there are none."""
    problems: Sequence[str]
    """Flags that are refused, each with the reason."""
    sizes: Mapping[str, str]
    """Values for `size_problems`."""


def translate(arguments: Sequence[str], *, known: Collection[str]) -> Translation:
    """Replace flags of the reference implementation by options of this program.

    Args:
        known: options of the command.
    """
    options: list[str] = []
    without_effect: list[str] = []
    problems: list[str] = []
    sizes: dict[str, str] = {}
    dropouts: dict[str, str] = {}
    for name, flag, values in _flags_with_values(arguments):
        if flag is None:
            options += values
        elif flag.outcome == "refused":
            problems.append(f"{name} is refused: {flag.reason}")
        elif bool(values) != bool(flag.values):
            problems.append(f"{name} {'needs a' if flag.values else 'takes no'} value")
        elif flag.outcome == "size":
            sizes[name] = values[0]
        elif flag.outcome == "sets an option":
            options += [*flag.reason.split(), *values]
            if name.endswith("-dropout"):
                dropouts[name] = values[0]
        elif flag.values not in ("", "N", "N...") and not _is_among(values[0], flag.values):
            only = flag.values.replace("|", " or ")
            problems.append(f"{name} {values[0]} is refused, only {only} is accepted: {flag.reason}")
        elif flag.outcome == "no effect":
            without_effect.append(name)
    if len(set(map(_comparable, dropouts.values()))) > 1:
        given = " and ".join(f"{name} {value}" for name, value in dropouts.items())
        problems.append(f"{given} differ: both are --dropout here")
    notes = _apply_defaults(options, known=known) if _IN_ALL_SCRIPTS in without_effect else []
    if {"--mock-data", "--data-path"} <= _names(options):
        # As in Megatron; the reference's speed scripts give both.
        options = _without("--data-path", options)
        notes.append("--data-path is not read with --mock-data")
    if without_effect:
        names = ", ".join(dict.fromkeys(without_effect))
        notes.append(f"no effect (--help-all has the reasons): {names}")
    return Translation(options=options, note="; ".join(notes), problems=problems, sizes=sizes)


def _flags_with_values(arguments: Sequence[str]) -> Iterator[tuple[str, _Flag | None, list[str]]]:
    """Yield each flag of the tables with its values; other arguments one by one, as values without a flag."""
    remaining = deque(arguments)
    while remaining:
        argument = remaining.popleft()
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if (flag := _FLAGS.get(name)) is None:
            yield "", None, [argument]
            continue
        values = [value] if equals else []
        while remaining and not remaining[0].startswith("--") and len(values) < flag.most_values:
            values.append(remaining.popleft())
        yield name, flag, values


def _apply_defaults(options: list[str], *, known: Collection[str]) -> list[str]:
    """Change options to the meaning that they have in a script of the reference; return a note on each."""
    notes = []
    given = _names(options)
    if "--strategy" in known and not given & {"--strategy", "--quantized-weights", "--quantized-gradients"}:
        options += ["--strategy", "baseline"]
        notes.append("--strategy is baseline without --quantized-weights and --quantized-gradients")
    if "--dropout" not in given:
        notes.append(f"--dropout is 0, the reference's default {_REFERENCE_DROPOUT}")
    return notes


def _names(options: Sequence[str]) -> set[str]:
    return {option.partition("=")[0].replace("_", "-") for option in options}


def _without(name: str, options: Sequence[str]) -> list[str]:
    """Return the options without one of them and its values."""
    kept, is_kept = [], True
    for option in options:
        if option.startswith("--"):
            is_kept = option.partition("=")[0].replace("_", "-") != name
        if is_kept:
            kept.append(option)
    return kept


def size_problems(sizes: Mapping[str, str], shape: ModelShape) -> list[str]:
    """List the given sizes that differ from the model's."""
    return [
        f"{name} {value} is refused, only {_SIZES[name](shape)} is accepted: as follows from --hidden-size"
        for name, value in sizes.items()
        if not _is_among(value, str(_SIZES[name](shape)))
    ]


def reference_flags() -> dict[str, bool]:
    """Map the flags to whether they are switches."""
    return {name: not flag.values and flag.outcome != "refused" for name, flag in _FLAGS.items()}


def described_flags() -> Iterator[tuple[str, str, str]]:
    """Yield flags with their values, the outcome, and the reason or the option."""
    for outcome, table in _OUTCOMES.items():
        for reason, flags in table.items():
            yield flags.replace("=", " "), outcome, reason
    sizes = " ".join(f"{name} N" for name in _SIZES)
    yield sizes, "accepted with the model's size", "They follow from --hidden-size and --num-attention-heads."


def _is_among(value: str, accepted: str) -> bool:
    return _comparable(value) in map(_comparable, accepted.split("|"))


def _comparable(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value

"""Training strategies that the emulated cluster compares.

All start from the same weights, read the same data and use AdamW. FSDP2 strategies shard each block and the
rest in bf16 and gather weights once per step (`reshard_after_forward=False`), as in the paper. All compute in
bf16 if the machine does so fast, else in fp32. HSDP shards inside a node and replicates between nodes. DDP
keeps fp32 weights on every rank.

Full-precision halves of a strategy use the same pairwise exchange as quantized halves. Gloo's own
reduce-scatter sends twice the necessary bytes, and its all-gather is half duplex between two ranks. Only
`fsdp2`, the current state for gloo users, uses gloo's collectives. Over NCCL, `fsdp2-bf16` is the reference.
A deferred HSDP all-reduces between nodes only in the last micro-batch of a step.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit_lab.common import strategies
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT, Block
from sdp4bit_lab.pretrain.step.parallelize import resolve_compute_dtype

FULL_WEIGHTS = WeightConfig(bits=None)
FULL_GRADIENTS = GradientConfig(intra_bits=None, inter_bits=None, hadamard=False)
POWER_SGD_RANK = 4
POWER_SGD_START = 2
"""Steps that PowerSGD first averages in full precision; the warm-up must be longer."""


@functools.cache
def read_tokens(path: str) -> dict[str, Tensor]:
    """Return the tokens of a text for training and validation, int64 [n] each."""
    tokens: dict[str, Tensor] = torch.load(path)
    return tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model and data; large enough by default that communication at 250 Mbit/s is 90 % of a step."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    vocabulary: int = 8192
    sequence_length: int = 128
    micro_batch: int = 1
    micro_batches: int = 1
    """Backward passes per optimizer step, all on the same batch."""
    learning_rate: float = 3e-4
    warmup_steps: int = 20
    """Steps of learning-rate warm-up. Without it, the gradient norm jumps from 3 to 47 at step 11, and a
    quantized run then has another loss than plain FSDP2."""
    clip: float | None = None
    """Largest norm of all gradients; None does not clip."""
    decay_steps: int | None = None
    """Steps in which a cosine lowers the learning rate to a tenth; None keeps it constant."""
    text: str | None = None
    """File of tokens with the keys `train` and `held_out`; None draws random tokens."""
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocabulary=self.vocabulary,
            positions=self.sequence_length,
        )

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps or self.decay_steps is None:
            return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    def batch(self, step: int, *, rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a rank's step, both [micro_batch, sequence_length].

        Frequencies follow Zipf's law, as in text, and every other token follows from its predecessor, so that
        a model can learn within few steps. With a text, sequences begin at random places of it.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 4099 + rank)
        if self.text is not None:
            tokens = read_tokens(self.text)["train"]
            last = len(tokens) - self.sequence_length
            starts = torch.randint(last, (self.micro_batch, 1), generator=generator)
            rows = tokens[starts + torch.arange(self.sequence_length + 1)]
            return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        frequencies = 1.0 / torch.arange(1, self.vocabulary + 1)
        count = self.micro_batch * (self.sequence_length + 1)
        drawn = torch.multinomial(frequencies, count, replacement=True, generator=generator)
        text = drawn.view(self.micro_batch, self.sequence_length + 1)
        text[:, 1::2] = (text[:, 0:-1:2] * 7 + 1) % self.vocabulary
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Numbers of nodes and ranks; ranks are numbered node by node."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class TrainingStep:
    """Model and optimizer of one strategy; calling it trains one step."""

    def __init__(
        self,
        model: nn.Module,
        *,
        workload: Workload,
        sent_bytes: Callable[[], float] | None = None,
        defers: bool = False,
    ) -> None:
        """Create the optimizer.

        Args:
            sent_bytes: returns this rank's count of bytes sent to other nodes so far.
            defers: whether HSDP all-reduces only in the last micro-batch.
        """
        self._model = model
        self._workload = workload
        self._sent_bytes = sent_bytes
        self._defers = defers
        self._optimizer = torch.optim.AdamW(
            model.parameters(), workload.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self._batch: tuple[Tensor, ...] = ()
        self.steps = 0

    def load(self) -> None:
        """Draw the next step's batch, so that its time is not the step's."""
        batch = self._workload.batch(self.steps, rank=dist.get_rank())
        self._batch = tuple(part.to(device()) for part in batch)

    def __call__(self) -> Tensor:
        """Train one step on the loaded batch; return this rank's loss before it."""
        tokens, targets = self._batch
        last = self._workload.micro_batches - 1
        for number in range(last + 1):
            if self._defers:
                cast(FSDPModule, self._model).set_requires_all_reduce(number == last)
            loss: Tensor = self._model(tokens, targets).sum() / targets.numel()
            loss.backward()
        if self._workload.clip is not None:
            nn.utils.clip_grad_norm_(list(self.parameters()), self._workload.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self._workload.learning_rate_at(self.steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return loss.detach()

    def finish(self) -> None:
        """Exchange anything that ranks still hold back after the last step."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model, sharded or not."""
        return self._model.parameters()

    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of this rank's weights, [1]; all ranks call it with equal shapes."""
        with torch.no_grad():
            loss: Tensor = self._model(tokens, targets)
        return loss

    def sent_bytes(self) -> float | None:
        """Return this rank's count of bytes sent to other nodes so far; None if it does not count."""
        return None if self._sent_bytes is None else self._sent_bytes()


def device() -> torch.device:
    """Return the device of this rank's model: the GPU that all ranks share, or the CPU."""
    return torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")


def compute_dtype() -> torch.dtype:
    """Return the dtype of activations that is fast on this machine."""
    return resolve_compute_dtype("auto", param_dtype=torch.bfloat16, device=device())


@functools.cache
def _initial_model(workload: Workload) -> GPT:
    model = GPT(workload.shape, compute_dtype=compute_dtype())
    model.reset_parameters(seed=workload.seed)
    return model


def build_model(workload: Workload) -> GPT:
    """Return the model with its initial weights, identical on all ranks."""
    return copy.deepcopy(_initial_model(workload)).to(device())


def shard(
    model: GPT,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    replicated_over: Cluster | None = None,
    blocks_per_group: int = 1,
) -> GPT:
    """Shard the model with FSDP2 over all ranks, or over those of each node of the cluster."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    if replicated_over is not None:
        shape = replicated_over.nodes, replicated_over.ranks_per_node
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, Block)]
    groups = [blocks[first : first + blocks_per_group] for first in range(0, len(blocks), blocks_per_group)]
    for group in groups:
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Prefetch all groups at the start of forward; exchanges that can will overlap with it.
    first_blocks = [cast(FSDPModule, group[0]) for group in groups]
    cast(FSDPModule, model).set_modules_to_forward_prefetch(first_blocks)
    return model


def _compute(workload: Workload, cluster: Cluster) -> TrainingStep:
    return TrainingStep(build_model(workload), workload=workload, sent_bytes=lambda: 0.0)


def stock_fsdp2(
    reduce_dtype: torch.dtype, *, blocks_per_group: int = 1
) -> Callable[[Workload, Cluster], TrainingStep]:
    """Return a builder of FSDP2 with its own collectives."""

    def build(workload: Workload, cluster: Cluster) -> TrainingStep:
        model = shard(build_model(workload), reduce_dtype=reduce_dtype, blocks_per_group=blocks_per_group)
        return TrainingStep(model, workload=workload)

    return build


def _counted(comm: sdp4bit.CommHandle, share: float = 1.0) -> Callable[[], float]:
    """Return a counter of the inter-node bytes reported by the library, scaled by `share`."""
    return lambda: float(comm.stats()["total"]["inter_bytes"]) * share


def _crossing(cluster: Cluster) -> float:
    """Return the fraction of a rank's peers that are on other nodes."""
    return (cluster.ranks - cluster.ranks_per_node) / max(1, cluster.ranks - 1)


def training_step_of_fsdp2(
    config: SDP4BitConfig, *, levels: int = 2, blocks_per_group: int = 1
) -> Callable[[Workload, Cluster], TrainingStep]:
    """Return a builder of quantized FSDP2 with one level (all peers equal) or two."""

    def build(workload: Workload, cluster: Cluster) -> TrainingStep:
        model = shard(build_model(workload), blocks_per_group=blocks_per_group)
        per_node = cluster.ranks_per_node if levels == 2 else 1
        comm = sdp4bit.quantize_communication(model, topology=per_node, config=config)
        # With one level, some of the counted bytes go to ranks of the same node.
        share = 1.0 if levels == 2 else _crossing(cluster)
        return TrainingStep(model, workload=workload, sent_bytes=_counted(comm, share))

    return build


def _bf16_hook(state, bucket):  # type: ignore[no-untyped-def]
    # DDP rejects the stock hook by name unless the back end is NCCL. It compares annotations with types, but
    # they are strings here, so there are none.
    return default_hooks.bf16_compress_hook(state, bucket)


def ddp(
    module: nn.Module, hook: str | None, *, ranks_per_node: int, **power_sgd: Any
) -> tuple[DistributedDataParallel, sdp4bit.DDPCommState | None]:
    """Wrap the module in DDP with a communication hook: "bf16", "powersgd", "sdp4bit" or None.

    Args:
        power_sgd: further settings of torch's PowerSGDState.

    Returns:
        The model, and the state of the sdp4bit hook.
    """
    # With several buckets, PowerSGD's follow-up reductions race on gloo and abort.
    bucket = {"bucket_cap_mb": 4096} if hook == "powersgd" else {}
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, **bucket)
    if hook == "sdp4bit":
        quantized = sdp4bit.DDPCommState(topology=ranks_per_node)
        model.register_comm_hook(quantized, sdp4bit.ddp_comm_hook)
        return model, quantized
    if hook == "bf16":
        model.register_comm_hook(None, _bf16_hook)
    elif hook == "powersgd":
        settings = {
            "matrix_approximation_rank": POWER_SGD_RANK,
            "start_powerSGD_iter": POWER_SGD_START,
            "min_compression_rate": 2,
            **power_sgd,
        }
        state = powerSGD_hook.PowerSGDState(None, **settings)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, None


def training_step_of_ddp(hook: str | None, **power_sgd: Any) -> Callable[[Workload, Cluster], TrainingStep]:
    """Return a builder of DDP with a hook; see `ddp`. PowerSGD averages the warm-up of a text exactly."""

    def build(workload: Workload, cluster: Cluster) -> TrainingStep:
        start = max(POWER_SGD_START, 0 if workload.text is None else workload.warmup_steps)
        settings = {"start_powerSGD_iter": start, **power_sgd}
        model, quantized = ddp(build_model(workload), hook, ranks_per_node=cluster.ranks_per_node, **settings)
        return TrainingStep(model, workload=workload, sent_bytes=quantized and _counted(quantized))

    return build


def _hsdp(reduce_dtype: torch.dtype, *, defers: bool = False) -> Callable[[Workload, Cluster], TrainingStep]:
    def build(workload: Workload, cluster: Cluster) -> TrainingStep:
        model = shard(build_model(workload), reduce_dtype=reduce_dtype, replicated_over=cluster)
        return TrainingStep(model, workload=workload, defers=defers)

    return build


def _hsdp_quantized(*, defers: bool = False) -> Callable[[Workload, Cluster], TrainingStep]:
    def build(workload: Workload, cluster: Cluster) -> TrainingStep:
        model = shard(build_model(workload), replicated_over=cluster)
        comm = sdp4bit.quantize_communication(model, topology=cluster.ranks_per_node)
        return TrainingStep(model, workload=workload, sent_bytes=_counted(comm), defers=defers)

    return build


def preset_of(name: strategies.Strategy, *, chunks: int = 1) -> SDP4BitConfig:
    """Return the settings of a preset with pairwise exchanges for its full-precision halves."""
    config = strategies.STRATEGIES[name]
    gradients = config.gradients or FULL_GRADIENTS
    return replace(
        config, weights=config.weights or FULL_WEIGHTS, gradients=replace(gradients, pipeline_chunks=chunks)
    )


_FULL = SDP4BitConfig(weights=FULL_WEIGHTS, gradients=FULL_GRADIENTS)
_PRESETS: tuple[strategies.Strategy, ...] = (
    *("qw", "qwd", "ulq", "tlq", "tlq-hs", "sdp4bit", "sdp4bit-w3g3.5", "sdp4bit-w2g3", "sdp4bit-w2g2"),
)
_OF_SEVERAL_RANKS_PER_NODE = (
    *("hierarchical", "hsdp", "hsdp-bf16", "hsdp-bf16-deferred", "hsdp-sdp4bit", "hsdp-sdp4bit-deferred"),
)
_OF_SEVERAL_MICRO_BATCHES = ("hsdp-bf16-deferred", "hsdp-sdp4bit-deferred")
_OF_NCCL = ("fsdp2-bf16",)

STRATEGIES: dict[str, Callable[[Workload, Cluster], TrainingStep]] = {
    "compute": _compute,
    "fsdp2": stock_fsdp2(torch.float32),
    "fsdp2-bf16": stock_fsdp2(torch.bfloat16),
    "fair": training_step_of_fsdp2(_FULL, levels=1),
    "fair-bf16": training_step_of_fsdp2(preset_of("bf16-wire"), levels=1),
    "hierarchical": training_step_of_fsdp2(_FULL),
    "ddp": training_step_of_ddp(None),
    **{f"ddp-{hook}": training_step_of_ddp(hook) for hook in ("bf16", "powersgd", "sdp4bit")},
    "hsdp": _hsdp(torch.float32),
    "hsdp-bf16": _hsdp(torch.bfloat16),
    "hsdp-bf16-deferred": _hsdp(torch.bfloat16, defers=True),
    "hsdp-sdp4bit": _hsdp_quantized(),
    "hsdp-sdp4bit-deferred": _hsdp_quantized(defers=True),
    **{name: training_step_of_fsdp2(preset_of(name)) for name in _PRESETS},
    "sdp4bit-4chunks": training_step_of_fsdp2(preset_of("sdp4bit", chunks=4)),
}
"""Builders by name. compute: no communication, so ranks diverge; an upper bound of the gain."""


def strategies_for(cluster: Cluster, *, micro_batches: int = 1, transport: str = "gloo") -> list[str]:
    """Return the strategies that differ on this cluster: one rank per node has only one level."""
    return [
        name
        for name in STRATEGIES
        if (name not in _OF_SEVERAL_RANKS_PER_NODE or cluster.ranks_per_node > 1)
        and (name not in _OF_SEVERAL_MICRO_BATCHES or micro_batches > 1)
        and (name not in _OF_NCCL or transport == "nccl")
    ]

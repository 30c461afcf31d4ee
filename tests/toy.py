"""A small GPT of odd sizes and real text for it, for the tests of the FSDP2 integration."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sdp4bit import GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig, quantize_communication
from sdp4bit.collectives.gradients import reduction_multiplier
from sdp4bit.engines.fsdp2.torch_internals import param_groups_of
from tests import mutations

VOCABULARY, SEQUENCE = 61, 24
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

LOSSLESS = SDP4BitConfig(weights=WeightConfig(bits=None), gradients=None)
"""Weights come from replicas refreshed in full precision: results equal plain FSDP2's bit for bit."""
IDENTITY = SDP4BitConfig(
    weights=WeightConfig(bits=None),
    gradients=GradientConfig(intra_bits=None, inter_bits=None, min_numel=0, inside_one_node=True),
)
"""Both hops run without quantizers; a sum over two ranks is then exact."""
QUANTIZED = SDP4BitConfig(
    gradients=GradientConfig(min_numel=0, inside_one_node=True), telemetry=TelemetryConfig(interval=1)
)
"""The default method, for the smallest rows and inside one node too, measured at every step."""


class Block(nn.Module):
    """Pre-LN attention and MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class ToyGPT(nn.Module):
    """Uneven shards everywhere, and a parameter of one element: empty shards on most ranks."""

    def __init__(self, width: int = 40, hidden: int = 107, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.temperature


def data_mesh() -> DeviceMesh:
    """Return a 1-D mesh over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard(
    model: ToyGPT,
    *,
    mesh: DeviceMesh | None = None,
    policy: MixedPrecisionPolicy = POLICY,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> ToyGPT:
    """fully_shard every block, the pair of norm and head as one group, and the root."""
    mesh = data_mesh() if mesh is None else mesh
    for index, block in enumerate(model.blocks):
        if wrap is not None:
            model.blocks[index] = block = wrap(block)
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, **options)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def build(**options: Any) -> ToyGPT:
    """Return the sharded toy model with the same weights in every call."""
    torch.manual_seed(0)
    return shard(ToyGPT(), **options)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Return the optimizer that the tests use; fused, whose first step on DTensors is by far the cheapest."""
    options = {"params": model.parameters(), "lr": 2e-3, "weight_decay": 0.01, "fused": True, **options}
    return torch.optim.AdamW(**options)


@lru_cache
def _text() -> Tensor:
    raw = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
    used = torch.unique(raw)
    table = torch.zeros(256, dtype=torch.long)
    table[used] = torch.arange(len(used)) % VOCABULARY
    return table[raw]


def batches(seed: int = 0, *, rank: int | None = None, size: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless (input, target) windows of a standard-library source file, different on every rank."""
    text = _text()
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if rank is None else rank))
    while True:
        starts = torch.randint(0, len(text) - SEQUENCE - 1, (size,), generator=generator).tolist()
        window = torch.stack([text[start : start + SEQUENCE + 1] for start in starts])
        yield window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of a batch."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    *,
    clip: float | None = 1.0,
) -> list[float]:
    """Train and return this rank's losses."""
    losses = []
    for _ in range(steps):
        loss = loss_of(model, next(data))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradient_of(model: nn.Module) -> Tensor:
    """Return this rank's part of the gradient, one parameter behind the other, in fp32."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]
    return torch.cat([torch.empty(0), *(part.detach().float().flatten() for part in parts)])


class Result(list[float]):
    """Losses and other numbers of a run, by which runs are compared; with the gradients of its steps."""

    def __init__(self, numbers: Sequence[float], gradients: Sequence[Tensor]) -> None:
        super().__init__(numbers)
        self.gradients = list(gradients)
        """This rank's part of each, before it is clipped."""


class SumInNodesFirst:
    """A dense reduction that adds as the exchange does: within each node, each block, then over all.

    Like the exchange it adds in fp32. Without quantizers the exchange equals it bit for bit.
    """

    def __init__(self, topology: int | tuple[int, int]) -> None:
        self.sizes = topology if isinstance(topology, tuple) else (topology,)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        gathered = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(gathered, input_tensor, group=group)
        ranks = dist.get_process_group_ranks(group)
        sums = dict(zip(ranks, (values.float() for values in gathered), strict=True))
        for size in self.sizes:
            of_level: dict[int, Tensor] = {}
            for number, values in sums.items():
                place = number // size
                of_level[place] = of_level[place] + values if place in of_level else values
            sums = of_level
        total = reduce(torch.add, sums.values()).view(group.size(), -1)[group.rank()]
        output_tensor.copy_(total * reduction_multiplier(op, ranks=group.size(), name="plain"))


def sum_in_nodes_first(model: nn.Module, topology: int | tuple[int, int]) -> None:
    """Let plain FSDP2 add gradients so."""
    for module in model.modules():
        for group in param_groups_of(module) if isinstance(module, FSDPModule) else []:
            group._reduce_scatter_comm = SumInNodesFirst(topology)  # the setter wants a single group


class Run:
    """One training run, loop left to the test: plain FSDP2 if `config` is None; losses are collected.

    With `ordered` plain FSDP2 adds gradients in the order of the quantized exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SDP4BitConfig | None,
        *,
        topology: int | tuple[int, int] = 2,
        ordered: bool = False,
        data_rank: int | None = None,
        clip: float | None = None,
        **optimizer_options: Any,
    ) -> None:
        self.model = model
        self.comm: Any = None
        if config is not None:
            self.comm = quantize_communication(model, topology=topology, config=config)
        elif ordered:
            sum_in_nodes_first(model, topology)
        self.optimizer = adamw(model, **optimizer_options)
        self.data = batches(rank=data_rank)
        self.eval_batch = next(batches(seed=1, rank=data_rank))
        self.clip = clip
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def backward(self) -> None:
        """One forward and backward."""
        loss = loss_of(self.model, next(self.data))
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        """One optimizer step."""
        self.gradients.append(gradient_of(self.model))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> Run:
        """Whole steps."""
        for _ in range(steps):
            self.backward()
            self.step()
        return self

    def evaluate(self, mode: Callable[[], Any] = torch.no_grad) -> float:
        """Return the loss of a forward without gradients on always the same data."""
        with mode():
            return loss_of(self.model, self.eval_batch).item()

    def finish(self) -> Result:
        """Return the losses, that of a last forward, which sees the last step, and the size of the weights.

        Replicas are identical. AdamW and bf16 can hide an error of the gradients from the losses; not from
        the sum of all magnitudes of this rank's part of the weights, in fp64.
        """
        local = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        size = sum(part.detach().double().abs().sum().item() for part in local)
        result = Result([*self.losses, self.evaluate(), size], self.gradients)
        if self.comm is not None and any(group.weights.replica is not None for group in self.comm.groups):
            assert_replicas_identical(self.comm)
        return result


LOSS_TOLERANCE = 0.003
"""Of a loss, relative to plain FSDP2's. Right code is off by 0.0003 here."""
GRADIENT_TOLERANCE = 0.3
"""Of a step's gradient, by the norm of the difference. A uniform quantizer of 4 bits whose 128 values reach 3
standard deviations has a step of 0.4 of them and an error of 0.4 / sqrt(12) = 0.12; 2.5 times that passes."""


def assert_equal(ours: list[float], plain: list[float]) -> None:
    """All numbers of two runs, and the gradients of their steps, are the same bits."""
    assert ours == plain
    for number, (mine, theirs) in enumerate(_gradients(ours, plain)):
        assert torch.equal(mine, theirs), f"the gradient of step {number} differs"


def assert_close(
    ours: list[float],
    plain: list[float],
    *,
    loss: float = LOSS_TOLERANCE,
    gradient: float = GRADIENT_TOLERANCE,
) -> None:
    """A quantized run differs from plain FSDP2's, but only as far as it may; see `assert_near`."""
    assert ours != plain
    assert_near(ours, plain, loss=loss, gradient=gradient)


def assert_near(
    ours: list[float], plain: list[float], *, loss: float = LOSS_TOLERANCE, gradient: float
) -> None:
    """Each loss and gradient of a run differs from plain FSDP2's only as far as it may.

    Args:
        ours: a `Result`, or losses without gradients.
        loss: relative tolerance of each loss.
        gradient: of each gradient, relative to its norm.
    """
    for mine, theirs in zip(ours, plain, strict=True):
        assert abs(mine - theirs) <= loss * theirs, (ours, plain)
    for number, (mine, theirs) in enumerate(_gradients(ours, plain)):
        error, norm = (mine - theirs).norm(), theirs.norm()
        assert error <= gradient * norm, f"the gradient of step {number} is {error:.3g} off, of {norm:.3g}"


def _gradients(ours: list[float], plain: list[float]) -> Iterator[tuple[Tensor, Tensor]]:
    pair = [each.gradients if isinstance(each, Result) else [] for each in (ours, plain)]
    return zip(*pair, strict=True)


Comparison = Callable[[list[float], list[float]], None]
"""Asserts that the results of a run are right, given those of plain FSDP2."""
Check = tuple[Any, Comparison]
Scenario = Callable[..., list[float]]
"""Called with a configuration (None for plain FSDP2) and more arguments; returns a `Result`."""


def assert_close_to_plain(scenario: Scenario, *args: Any, **options: Any) -> None:
    """IDENTITY equals plain FSDP2 bit for bit; QUANTIZED does not, but is close to it.

    The options are those of `assert_variants_equal`.
    """
    assert_variants_equal(scenario, args, **options)


def assert_variants_equal(
    scenario: Scenario,
    usual: tuple[Any, ...],
    *variants: tuple[Any, ...],
    checks: Sequence[Check] | None = None,
    harmless: Sequence[str] = (),
) -> None:
    """Variants of a scenario equal the usual one bit for bit, which is exact or close to plain FSDP2.

    Args:
        checks: configurations, and functions that compare the results of each with plain FSDP2's.
        harmless: mutations that change nothing here, see `mutations.check_that_mutations_are_noticed`.
    """
    plain = scenario(None, *usual)
    chosen = [(IDENTITY, assert_equal), (QUANTIZED, assert_close)] if checks is None else checks
    for config, assert_right in chosen:
        expected = scenario(config, *usual)
        assert_right(expected, plain)
        for variant in variants:
            assert scenario(config, *variant) == expected, (config, variant)
    uncached = inspect.unwrap(scenario)

    def check(config: Any, assert_right: Comparison) -> None:
        assert_right(uncached(config, *usual), plain)

    mutations.check_that_mutations_are_noticed(
        f"{uncached}{usual}", *(partial(check, *each) for each in chosen), harmless=harmless
    )


def assert_replicas_identical(comm: Any, *, may_be_alone: bool = False) -> None:
    """Every rank that holds the same rows of the same parameter group holds the same bits.

    Args:
        may_be_alone: whether no other rank may have rows of this rank; the test is then of the others.
    """
    mine = {}
    for group in comm.groups:
        if group.weights.replica is not None:
            layout = group.layout
            part = (
                0
                if group.weights.replica.holds_all_rows
                else layout.ranks.index(dist.get_rank()) % layout.ranks_per_node
            )
            mine[layout.ranks, group.view.name, part] = group.weights.replica.rows.view(torch.uint8)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    del gathered[dist.get_rank()]
    has_peers = any(mine.keys() & other.keys() for other in gathered)
    assert may_be_alone or has_peers, "no other rank has these rows"
    for other in gathered:
        for key in mine.keys() & other.keys():
            assert torch.equal(mine[key], other[key]), key

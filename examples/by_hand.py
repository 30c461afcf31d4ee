"""Sharded training without FSDP2: the quantized collectives, called by hand.

    torchrun --nproc-per-node 4 examples/by_hand.py

Every rank holds its shard of the weights and of the optimizer's state. A step gathers weights, computes,
and reduces gradients to shards, like FSDP2 with `sdp4bit.quantize_communication`. Half of the ranks represent
a node each.
"""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp4bit import SDP4BitConfig
from sdp4bit.collectives import QuantizedReduceScatter, Topology, WeightReplica, create_topology

WIDTH, LEARNING_RATE = 64, 3e-3
# Parameters share scale groups, so that a row is one section.
CONFIG = SDP4BitConfig(separate_parameters=False)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def rows_of(tensors: list[Tensor], *, ranks: int) -> Tensor:
    """Return row r for rank r, [ranks, n]: its part of each tensor, cut along the first dimension."""
    return torch.cat([each.reshape(ranks, -1) for each in tensors], dim=1)


class ShardedModel:
    """A model whose weights exist between `gather` and `reduce` only."""

    def __init__(self, model: nn.Module, topology: Topology, *, config: SDP4BitConfig) -> None:
        self.parameters = list(model.parameters())
        self.shapes = [each.shape for each in self.parameters]
        self.ranks = topology.size
        # The main shard, fp32. The optimizer never sees the weights that the model computes with.
        rows = rows_of([each.detach() for each in self.parameters], ranks=self.ranks)
        self.main = nn.Parameter(rows[topology.row].clone())
        self.model = model.bfloat16()
        self.traffic = topology.counter()
        # For the entire training, because a difference refers to the replica's last weights.
        self.replica = WeightReplica(topology, config=config.weights, traffic=self.traffic)
        self.reduce_scatter = QuantizedReduceScatter(
            topology, config=config.gradients, seed=config.seed, traffic=self.traffic
        )
        self.steps = 0

    @torch.no_grad()
    def gather(self) -> None:
        """Send this rank's difference, and take the weights of all ranks from the replica."""
        main = self.main.detach()
        if self.replica.rows is None:
            self.replica.start_full_refresh(main.bfloat16())
        else:
            self.replica.start_quantized_refresh(main)
        # Until here only the transfer between nodes is in flight; other work may run.
        rows = torch.empty(self.ranks, main.numel(), dtype=torch.bfloat16, device=main.device)
        self.replica.gather(rows.view(-1))
        parts = rows.split([shape.numel() // self.ranks for shape in self.shapes], dim=1)
        for parameter, part, shape in zip(self.parameters, parts, self.shapes, strict=True):
            parameter.data = part.reshape(shape)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients over all ranks; this rank receives its shard of them."""
        rows = rows_of([each.grad.float() for each in self.parameters], ranks=self.ranks)
        for parameter in self.parameters:
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        self.main.grad = torch.empty_like(self.main)
        # The number of the call makes the rounding bits of each step different, and equal on all ranks.
        self.reduce_scatter(self.main.grad, rows, call=self.steps, multiplier=1 / self.ranks)
        self.steps += 1


def batch(step: int, rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, WIDTH, generator=generator).to(device)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x.bfloat16()).float(), x.flip(1))


def train(
    topology: Topology, *, steps: int, device: torch.device, say: Callable[[str], object] = print
) -> tuple[list[float], Tensor]:
    """Return this rank's losses and its shard of the weights after training."""
    sharded = ShardedModel(build().to(device), topology, config=CONFIG)
    optimizer = torch.optim.AdamW([sharded.main], lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        sharded.gather()
        loss = loss_of(sharded.model, batch(step, dist.get_rank(), device))
        loss.backward()
        sharded.reduce()
        optimizer.step()
        losses.append(loss.item())
        say(f"step {step + 1}: loss {loss.item():.4f}")
    sent = sharded.traffic.total.inter_bytes / steps
    say(f"sent by each rank to other nodes, per step: {sent:,.0f} bytes")
    return losses, sharded.main.detach()


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    topology = create_topology(max(1, dist.get_world_size() // 2))  # on a cluster: create_topology()
    is_first = dist.get_rank() == 0
    train(topology, steps=12, device=device, say=print if is_first else lambda _: None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

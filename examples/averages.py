"""Evaluate averages of the weights (EMA or SWA) during training, with FSDP2.

    torchrun --nproc-per-node 2 examples/averages.py
    torchrun --nproc-per-node 2 examples/averages.py --swa

Averages are sharded like the weights. They are swapped in for an evaluation and out again; no call to the
library is needed. `topology=1` lets two ranks represent two nodes.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit

WIDTH = 128


class Averages:
    """Averages of the sharded main weights: exponential (EMA), or of equal weight (SWA) without a decay."""

    def __init__(self, model: nn.Module, *, decay: float | None) -> None:
        self.decay, self.count = decay, 0
        self.values = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights after a step."""
        self.count += 1
        is_mean = self.decay is None or self.count == 1
        share = 1 / self.count if is_mean else 1 - self.decay
        for average, param in zip(self.values, model.parameters(), strict=True):
            average.lerp_(param, share)

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """Evaluate `model` with the averages, and give the weights back."""
        model.eval()  # the averages are then sent in full precision, unless they hardly differ
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)
            model.train()

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        model.reshard()  # a forward without a backward leaves the root unsharded, and edits must be of shards
        for average, param in zip(self.values, model.parameters(), strict=True):
            kept = param.detach().clone()
            param.copy_(average)
            average.copy_(kept)


def build() -> nn.Module:
    """Return the model, sharded over all ranks; its weights are the same in every call."""
    torch.manual_seed(0)
    block = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    model = nn.Sequential(nn.Sequential(*block), nn.Linear(WIDTH, 1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Return the loss of a noisy batch, which the seed and the rank choose."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    x = torch.randn(32, WIDTH, generator=generator)
    noise = torch.randn(32, 1, generator=generator)
    return nn.functional.mse_loss(model(x).float(), x[:, :4].sum(dim=1, keepdim=True) + noise)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the mean loss of all ranks on batches that are not trained on."""
    loss = torch.stack([loss_of(model, 10_000 + batch) for batch in range(8)]).mean()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train(model: nn.Module, averages: Averages, *, steps: int, start: int = 0) -> list[tuple[float, float]]:
    """Train, average after step `start`, and return the losses of weights and averages every ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(1, steps + 1):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step <= start:
            continue
        averages.update(model)
        if step % 10 == 0:
            model.eval()
            of_weights = evaluate(model)
            with averages.in_use(model):
                losses.append((of_weights, evaluate(model)))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--swa", action="store_true", help="weigh all steps equally")
    swa = parser.parse_args().swa
    dist.init_process_group("gloo")
    model = build()
    comm = sdp4bit.quantize_communication(model, topology=1)
    losses = train(model, Averages(model, decay=None if swa else 0.9), steps=80, start=40)
    if dist.get_rank() == 0:
        for number, (of_weights, of_averages) in enumerate(losses, 1):
            print(f"step {40 + 10 * number}: loss {of_weights:.4f}, of averages {of_averages:.4f}")
        print(f"full-precision refreshes: {comm.stats()['full_refreshes']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

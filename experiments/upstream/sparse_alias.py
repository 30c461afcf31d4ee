"""Show that DDP divides a gradient twice that it shares with a sparse one; see docs/upstream.md.

A sparse embedding is added to the output of a layer. Autograd gives both the gradient of the sum, and DDP
divides the sparse one in place by the number of ranks. The layer's gradient is compared with the mean of
those that each rank's batch gives without DDP.

    torchrun --standalone --nproc-per-node 2 experiments/upstream/sparse_alias.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

WIDTH, TOKENS = 24, 20


class Model(nn.Module):
    """An embedding and a layer whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(TOKENS, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Return a loss."""
        return torch.tanh(self.layer(values) + self.embedding(tokens)).square().mean()


def batch(rank: int) -> tuple[Tensor, Tensor]:
    """Return the values and tokens of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randint(0, TOKENS, (4,), generator=generator)


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, hook in (("plain DDP", None), ("allreduce_hook", allreduce_hook)):
        torch.manual_seed(0)
        model = Model()
        replicated = DistributedDataParallel(model)
        if hook is not None:
            replicated.register_comm_hook(None, hook)
        for _ in range(2):  # from the second step on, each parameter keeps its bucket
            model.zero_grad()
            replicated(*batch(rank)).backward()
        found = model.layer.weight.grad
        assert found is not None
        parts = [torch.autograd.grad(model(*batch(each)), model.layer.weight)[0] for each in range(size)]
        share = (found.norm() / (sum(parts) / size).norm()).item()
        if rank == 0:
            print(f"{name}: {share:.3g} of the right gradient", flush=True)


if __name__ == "__main__":
    main()

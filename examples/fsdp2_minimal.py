"""The one new line in a plain FSDP2 training loop.

    torchrun --nproc-per-node 4 examples/fsdp2_minimal.py
    torchrun --nproc-per-node 4 examples/fsdp2_minimal.py --hsdp

`topology=2` lets four ranks represent two nodes of two. On a cluster leave it out: nodes are detected by
host name. With `--hsdp` each of the two nodes holds a replica.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit

WIDTH = 512


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = Model().to(device)

    size = dist.get_world_size()
    if "--hsdp" in sys.argv:
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    comm = sdp4bit.quantize_communication(model, topology=2)  # the new line

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        x = torch.randn(16, WIDTH, device=device)
        loss = nn.functional.mse_loss(model(x).float(), x.sum(dim=1, keepdim=True) / WIDTH**0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        print(comm.explain())
        print(f"{comm.stats()['compression_ratio']:.2f}x fewer inter-node bytes than plain FSDP2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The two new lines in a plain DDP training loop.

    torchrun --nproc-per-node 4 examples/ddp_minimal.py

`topology=2` lets four ranks represent two nodes of two. On a cluster leave it out: nodes are detected by
host name.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sdp4bit

WIDTH = 512


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(device))
    comm = sdp4bit.DDPCommState(topology=2)
    model.register_comm_hook(comm, sdp4bit.ddp_comm_hook)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        x = torch.randn(16, WIDTH, device=device)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True) / WIDTH**0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        print(comm.explain())
        print(f"{comm.stats()['compression_ratio']:.2f}x fewer inter-node bytes than plain DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

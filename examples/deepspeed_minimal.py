"""The one new line in a plain DeepSpeed training loop, with ZeRO-2.

    torchrun --nproc-per-node 4 examples/deepspeed_minimal.py

`topology=2` lets four ranks represent two nodes of two. On a cluster leave it out: nodes are detected by
host name. Without a GPU, set DS_ACCELERATOR=cpu. Needs pip install deepspeed.
"""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import sdp4bit

WIDTH = 512
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def main() -> None:
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    comm = sdp4bit.quantize_communication(engine, topology=2)  # the new line

    torch.manual_seed(dist.get_rank())
    for step in range(12):
        x = torch.randn(16, WIDTH, device=engine.device)
        loss = nn.functional.mse_loss(engine(x.bfloat16()).float(), x.sum(dim=1, keepdim=True) / WIDTH**0.5)
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        print(comm.explain())
        print(f"{comm.stats()['compression_ratio']:.2f}x fewer inter-node bytes than plain DeepSpeed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a vision transformer with FSDP2 and each format, on two nodes of one rank.

    torchrun --nproc-per-node 2 -m experiments.vision.run OUT.jsonl --seeds 1,2,3,4

The images are gratings of 8 directions and 4 widths in noise: 32 classes, and no image occurs twice.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sdp4bit import quantize_communication

SIZE, PATCH, WIDTH, BLOCKS, BATCH, CLASSES = 16, 4, 128, 4, 32, 32
NOISE = 2.5
"""Standard deviation; gratings have 0.7."""


class ViT(nn.Module):
    """Patches by a convolution; a class token and positions that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH) * 0.02)
        shape = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(**shape, batch_first=True, norm_first=True) for _ in range(BLOCKS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def images(random: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Return images [count, 3, SIZE, SIZE] and their classes."""
    labels = torch.randint(CLASSES, (count,), generator=random)
    angle, width = (labels % 8) * math.pi / 8, 0.5 + 0.25 * (labels // 8)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = torch.cos(angle)[:, None, None] * rows + torch.sin(angle)[:, None, None] * columns
    phase = 2 * math.pi * torch.rand(count, 1, 1, generator=random)
    gratings = torch.sin(along * width[:, None, None] + phase).unsqueeze(1)
    return gratings + NOISE * torch.randn(count, 3, SIZE, SIZE, generator=random), labels


def train(name: str, seed: int, *, steps: int, rate: float) -> float:
    """Return the validation loss."""
    torch.manual_seed(seed)
    model, mesh = ViT(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)  # this processor has no instructions for bf16
    if name != "plain":
        quantize_communication(model, name, topology=1)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1)
    random = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 50, 1.0) * (1 - 0.9 * step / steps)
        given, labels = images(random, BATCH)
        nn.functional.cross_entropy(model(given).float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    random = torch.Generator().manual_seed(dist.get_rank())
    total = torch.zeros(())
    model.eval()
    with torch.no_grad():
        for _ in range(16):
            given, labels = images(random, 64)
            total += nn.functional.cross_entropy(model(given).float(), labels)
    dist.all_reduce(total)
    return float(total) / 16 / dist.get_world_size()


def main() -> None:
    """Run the cases that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--cases", default="plain,sdp4bit,sdp4bit-w3g3.5,sdp4bit-w2g2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    settings = {"steps": options.steps, "rate": options.rate}
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for name in options.cases.split(","):
            if any((row["case"], row["seed"], row["settings"]) == (name, seed, settings) for row in done):
                continue
            began = time.monotonic()
            loss = train(name, seed, **settings)
            if dist.get_rank() == 0:
                row = {"case": name, "seed": seed, "loss": loss, "settings": settings}
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"seed {seed} {name}: {loss:.5f}, {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

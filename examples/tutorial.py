import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save")
parser.add_argument("--load")
options = parser.parse_args()
WIDTH = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))

mesh = init_device_mesh("cpu", (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model[:-1]:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
config = sdp4bit.SDP4BitConfig(telemetry=sdp4bit.TelemetryConfig())  # measures errors every 10 steps
comm = sdp4bit.quantize_communication(model, config, topology=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step, "comm": comm}


step = 0
if options.load:
    saved = state()
    dcp.load(saved, checkpoint_id=options.load)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    step = saved["step"]
    if rank == 0:
        print(f"resumed from step {step}")

losses = []
while step < options.steps:
    step += 1
    torch.manual_seed(1000 * step + rank)
    x = torch.randn(64, WIDTH)
    loss = nn.functional.mse_loss(model(x).float(), x[:, :4].sum(dim=1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {sum(losses[-10:]) / 10:.6f}")

if options.save:
    dcp.save(state(), checkpoint_id=options.save)
if rank == 0:
    print(comm.explain())
    stats = comm.stats()
    for name in "compression_ratio", "gradient_error", "weight_error", "weight_drift":
        print(f"{name}: {stats[name]:.4f}")
dist.destroy_process_group()

"""Train the study's model with Muon and the hook for DDP itself, in real processes.

torchrun --nproc-per-node 2 -m experiments.feedback_decay.hook
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from experiments.feedback_decay import run as study

STEPS, BATCH, SEED = 200, 32, 1


def train(text: study.Text, bits: int | None) -> float:
    """Return the validation loss with gradients of these bits; None for plain DDP."""
    torch.manual_seed(SEED)
    model, draws = study.GPT(128, 4, 96), torch.Generator().manual_seed(SEED)
    ddp = DistributedDataParallel(model)
    if bits is not None:
        config = sdp4bit.SDP4BitConfig(gradients=sdp4bit.GradientConfig(inter_bits=bits))
        ddp.register_comm_hook(sdp4bit.DDPCommState(topology=1, config=config), sdp4bit.ddp_comm_hook)
    named = dict(model.named_parameters())
    inner = [name for name, p in named.items() if p.ndim == 2 and "blocks" in name]
    muon = study.Muon([named.pop(name) for name in inner])
    adam = torch.optim.AdamW(named.values(), 3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    size = BATCH // dist.get_world_size()
    own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    for step in range(STEPS):
        x, y = text.batch(draws, BATCH)
        F.cross_entropy(ddp(x[own]).flatten(0, 1), y[own].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        part = min(1.0, (step + 1) / (0.1 * STEPS)) * (1 - 0.9 * step / STEPS)
        adam.param_groups[0]["lr"] = 3e-3 * part
        adam.step()
        muon.step(0.02 * part)
        model.zero_grad()
    generator, losses = torch.Generator().manual_seed(7), []
    with torch.no_grad():
        for _ in range(study.CHECKED):
            x, y = text.batch(generator, 32, checked=True)
            losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    return sum(losses) / len(losses)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for chosen in (None, 4, 8):
        loss = train(study.Text(96), chosen)
        if dist.get_rank() == 0:
            print(chosen, loss)  # noqa: T201
    dist.destroy_process_group()

"""Train with checkpoints, so that a restart continues bit for bit: the program of docs/launching.md.

    torchrun --nproc-per-node 2 examples/launched.py --checkpoints runs/launched --topology 1

Start it again with more `--steps`, and it continues. Two ranks represent two nodes: `--topology 1` says so.
On a cluster leave it out, and nodes are found by host name.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_minimal import WIDTH, Model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit


class Run:
    """A sharded model with quantized communication, its optimizer, and the step: what a checkpoint holds."""

    def __init__(self, device: torch.device, *, topology: str | int = "auto", seed: int = 0) -> None:
        torch.manual_seed(0)
        self.device, self.seed, self.step = device, seed, 0
        self.model = Model().to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        config = sdp4bit.SDP4BitConfig(seed=seed)
        self.comm = sdp4bit.quantize_communication(self.model, topology=topology, config=config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def backward(self) -> float:
        """Compute the gradients of one step; return this rank's loss."""
        # The data follow from seed, step and rank alone, so that a restart reads what is next.
        random = torch.Generator().manual_seed((self.seed * 1000 + self.step) * 1000 + dist.get_rank())
        x = torch.randn(16, WIDTH, generator=random).to(self.device)
        loss = nn.functional.mse_loss(self.model(x).float(), x.sum(dim=1, keepdim=True) / WIDTH**0.5)
        loss.backward()
        return loss.item()

    def train_step(self) -> float:
        """Train one step, and print and return the loss of rank 0, exactly."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if dist.get_rank() == 0:
            print(f"step {self.step}: loss {loss}", flush=True)
        return loss

    def weights(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def state_dict(self) -> dict[str, Any]:
        return {**self.weights(), "comm": self.comm.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
        if "comm" in state:
            self.comm.load_state_dict(state["comm"])

    def save(self, folder: Path | str) -> None:
        dcp.save({"run": self}, checkpoint_id=folder)

    def load(self, folder: Path | str) -> None:
        dcp.load({"run": self}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            print(f"resumed at step {self.step}", flush=True)


def start() -> torch.device:
    """Join the other ranks; return this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--topology", type=lambda text: text if text == "auto" else int(text), default="auto")
    parser.add_argument("--time-steps", action="store_true", help="then time steps with and without sdp4bit")
    options = parser.parse_args()

    run = Run(start(), topology=options.topology)
    # torch.distributed.checkpoint writes .metadata last: a folder that has it is complete.
    saved = sorted(options.checkpoints.glob("step-*/.metadata"))
    if saved:
        run.load(saved[-1].parent)
    if dist.get_rank() == 0:
        print(run.comm.explain())
    while run.step < options.steps:
        run.train_step()
        if run.step % options.save_every == 0:
            run.save(options.checkpoints / f"step-{run.step:08}")
    if options.time_steps:
        measured = run.comm.time_steps(run.train_step)
        if dist.get_rank() == 0:
            print(measured)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

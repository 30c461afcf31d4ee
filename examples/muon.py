"""Train a small GPT with Muon and AdamW, and save checkpoints, so that a restart continues bit for bit.

    torchrun --nproc-per-node 4 examples/muon.py --checkpoints runs/muon
    torchrun --nproc-per-node 4 examples/muon.py --checkpoints runs/muon-ddp --ddp

Muon steps the matrices of the blocks, AdamW embeddings, head and norms. FSDP2 shards inside a node and
replicates over nodes. Muon multiplies views of these shards over the node, so its own traffic stays inside.
Four ranks represent two nodes of two. On a cluster, `PER_NODE` is the number of GPUs of a node.
"""

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import sdp4bit

PER_NODE, WIDTH, LENGTH, BATCH = 2, 128, 64, 8
# Few bits between nodes cost Muon more loss than AdamW (docs/muon.md).
CONFIG = sdp4bit.SDP4BitConfig(gradients=sdp4bit.GradientConfig(inter_bits=8))
TEXT = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        shape = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 4 * WIDTH, "activation": "gelu"}
        kind = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**shape, **kind) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=ids.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def on_node(x: Tensor) -> Tensor:
    """Return the memory of an HSDP tensor as a DTensor over the ranks of the node."""
    if not isinstance(x, DTensor):
        return x  # DDP: every rank has the matrix, and Muon sends nothing
    mesh, cut = x.device_mesh["shard"], x.placements[-1:]
    return DTensor.from_local(x.to_local(), mesh, cut, run_check=False, shape=x.shape, stride=x.stride())


class Run:
    """A model with quantized communication, its two optimizers, and the step."""

    def __init__(self, device: torch.device, *, ddp: bool) -> None:
        torch.manual_seed(0)
        self.device, self.step, self.model = device, 0, GPT().to(device)
        if ddp:
            # With find_unused_parameters, DDP keeps its first buckets, which an exact resume needs.
            self.model = DistributedDataParallel(self.model, find_unused_parameters=True)
            self.comm = sdp4bit.DDPCommState(topology=PER_NODE, config=CONFIG)
            self.model.register_comm_hook(self.comm, sdp4bit.ddp_comm_hook)
        else:
            shape = (dist.get_world_size() // PER_NODE, PER_NODE)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)
            self.comm = sdp4bit.quantize_communication(self.model, CONFIG, topology=PER_NODE)
        parameters = dict(self.model.named_parameters())
        names = [name for name, p in parameters.items() if p.ndim == 2 and "blocks" in name]
        self.matrices = [parameters.pop(name) for name in names]
        # A module, because get_state_dict takes the names of parameters from one.
        self.views = nn.ParameterList(on_node(p.detach()) for p in self.matrices)
        self.muon = torch.optim.Muon(self.views, lr=2e-3, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(parameters.values(), lr=2e-3)

    def train_step(self, watch: AbstractContextManager[Any] | None = None) -> float:
        """Train one step, with Muon's part of it watched; return this rank's loss."""
        # The data follow from step and rank alone, so that a restart reads what is next.
        random = torch.Generator().manual_seed(1000 * self.step + dist.get_rank())
        starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=random).tolist()
        ids = torch.tensor([[*TEXT[i : i + LENGTH + 1]] for i in starts], device=self.device)
        loss = self.model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # the model's: views are on another mesh
        for view, p in zip(self.views, self.matrices, strict=True):
            view.grad = on_node(p.grad)
        with watch or nullcontext():
            self.muon.step()
        self.adamw.step()
        self.comm.mark_step()  # the library does not see a step of views
        self.model.zero_grad()
        self.muon.zero_grad()  # otherwise the views keep the gradients in memory
        self.step += 1
        return loss.item()

    def state(self) -> dict[str, Any]:
        weights, adamw = get_state_dict(self.model, self.adamw)
        muon = get_optimizer_state_dict(self.views, self.muon)
        return {"model": weights, "adamw": adamw, "muon": muon, "step": self.step}

    def save(self, folder: Path) -> None:
        self.comm.audit()  # raises if copies of the weights differ
        dcp.save({**self.state(), "comm": self.comm}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.adamw, model_state_dict=state["model"], optim_state_dict=state["adamw"]
        )
        set_optimizer_state_dict(self.views, self.muon, state["muon"])
        self.comm.load(folder)
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true", help="DDP instead of FSDP2")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run, collectives = Run(device, ddp=options.ddp), CommDebugMode()
    say = print if dist.get_rank() == 0 else lambda *_: None
    # torch.distributed.checkpoint writes .metadata last: a folder that has it is complete.
    if saved := sorted(options.checkpoints.glob("step-*/.metadata")):
        run.load(saved[-1].parent)
        say(f"resumed at step {run.step}")
    while run.step < options.steps:
        loss = run.train_step(collectives if run.step == options.steps - 1 else None)
        say(f"step {run.step}: loss {loss:.6f}")
        if run.step % options.save_every == 0:
            run.save(options.checkpoints / f"step-{run.step:08}")
    if ratio := (stats := run.comm.stats())["compression_ratio"]:
        say(f"gradients: {stats['last_step']['inter_bytes']:,} bytes between nodes per rank and step")
        say(f"Muon: {collectives.get_total_counts()} collectives per step, all inside a node")
        say(f"{ratio:.2f}x fewer inter-node bytes than without sdp4bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A training job whose checkpoints torch.distributed.checkpoint writes and reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from sdp4bit import SDP4BitConfig, quantize_communication
from tests import toy


class Job:
    """A model, its optimizer, data from a given step on, and a handle unless it is plain FSDP2."""

    def __init__(self, config: SDP4BitConfig | None, *, topology: int = 2, at: int = 0) -> None:
        torch.manual_seed(0)
        self.model = toy.shard(toy.ToyGPT(layers=1))
        self.comm: Any = None
        if config is not None:
            self.comm = quantize_communication(self.model, topology=topology, config=config)
        self.optimizer = toy.adamw(self.model)
        self.data = toy.batches()
        for _ in range(at):
            next(self.data)

    def train(self, steps: int) -> list[float]:
        return toy.train(self.model, self.optimizer, self.data, steps, clip=None)

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(next(toy.batches(seed=9))[0])

    def save(self, folder: str, **parts: Any) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, **parts}, checkpoint_id=folder)

    def load(self, folder: str, *, comm: str) -> Job:
        """Load; the communication's state "before" or "after" the model's, or "not"."""
        if comm == "before":
            dcp.load({"comm": self.comm}, checkpoint_id=folder)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        if comm == "after":
            dcp.load({"comm": self.comm}, checkpoint_id=folder)
        return self

    def bits(self) -> list[int]:
        return bits_of(self.comm)


def bits_of(comm: Any) -> list[int]:
    """Return of each group bit patterns of its main shard and of its replica on the devices, and counters."""
    return [
        value
        for group in comm.groups
        for value in (
            int(group.view.fingerprints().sum()),
            int(group.weights.replica.own_shard.view(torch.int16).sum(dtype=torch.int64)),
            group.weights.refreshes,
            group.gradients.reductions,
        )
    ]

"""Lightning's Trainer with ModelParallelStrategy (FSDP2) and 4-bit communication; on GPUs, or on CPUs.

    python examples/trainer_lightning.py

`topology=1` lets two ranks represent two nodes. On a cluster leave it out.
"""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install lightning") from None

from sdp4bit.trainers.lightning import SDP4BitCallback

WIDTH = 256


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)), nn.Linear(WIDTH, 1)
        )

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = (self.layers(batch).float().squeeze(1) - batch.mean(dim=1)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    switch = SDP4BitCallback(topology=1)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.device_count() > 1 else "cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=8,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[switch],  # the new line
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(128, WIDTH), batch_size=8))
    if trainer.is_global_zero:
        print({name: float(value) for name, value in trainer.callback_metrics.items()})
        print(switch.comm.explain())


if __name__ == "__main__":
    main()

"""A loop with Accelerate, FSDP2 and 4-bit communication; on a GPU per process, or on CPUs.

    torchrun --nproc-per-node 2 examples/trainer_accelerate.py

`topology=1` lets two ranks represent two nodes. On a cluster leave it out.
"""

import tempfile

import torch
from torch import nn

try:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install accelerate") from None

from sdp4bit.trainers.accelerate import quantize_communication

WIDTH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def main() -> None:
    on_cpu = not torch.cuda.is_available()
    PartialState(cpu=on_cpu)
    if on_cpu:  # accelerate has FSDP2 for devices only: let it take this process for one of them
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16", gradient_accumulation_steps=2)

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randn(128, WIDTH)
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    comm = quantize_communication(accelerator, model=model, topology=1)  # the new line

    for batch in loader:
        with accelerator.accumulate(model):
            loss = (model(batch).float().squeeze(1) - batch.mean(dim=1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print({"loss": loss.item(), **comm.log_values()})

    with tempfile.TemporaryDirectory() as folder:
        folder = accelerator.gather_for_metrics([folder], use_gather_object=True)[0]  # rank 0's, for all
        accelerator.save_state(folder)  # with the state of the communication
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    accelerator.print(comm.explain())
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""The one new line in a Megatron-Core training loop.

    torchrun --nproc-per-node 4 examples/megatron_minimal.py
    torchrun --nproc-per-node 4 examples/megatron_minimal.py --plain      # the same without it

Needs megatron-core (extra `megatron`). `topology` lets the ranks represent two nodes. On a cluster leave it
out: nodes are detected by host name. Without GPUs it trains on the CPU, where Megatron-Core does not run by
itself: `megatron_on_cpu.py` replaces the CUDA functions that it calls.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    import megatron_on_cpu

    megatron_on_cpu.install()

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

import sdp4bit_megatron

VOCABULARY, LENGTH, BATCH, MICROBATCHES = 512, 64, 4, 2


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Yield sequences that count upwards from random starts."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        yield ((starts + torch.arange(LENGTH + 1)) % VOCABULARY).cuda()


def forward_step(
    data: Iterator[torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, partial[tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    window = next(data)
    positions = torch.arange(LENGTH, device=window.device).expand(BATCH, LENGTH)
    ones = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=window.device)
    losses = model(window[:, :-1].contiguous(), positions, ones.triu(1), labels=window[:, 1:].contiguous())
    return losses, partial(mean_loss)


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="train without sdp4bit")
    parser.add_argument("--steps", type=int, default=20)
    chosen = parser.parse_args()
    has_gpus = torch.cuda.is_available()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpus else "gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)

    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    gpt = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH
    ).cuda()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [model],
    )
    comm = None
    if not chosen.plain:
        per_node = max(1, dist.get_world_size() // 2)
        comm = sdp4bit_megatron.quantize_communication([model], optimizer, topology=per_node)  # the new line

    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    data = batches(parallel_state.get_data_parallel_rank())
    for step in range(chosen.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
        if dist.get_rank() == 0:
            loss = torch.stack([result["loss"] for result in results]).mean()
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if comm is not None and dist.get_rank() == 0:
        print(comm.explain())
        print(f"{comm.stats()['compression_ratio']:.2f}x fewer inter-node bytes than plain Megatron-Core")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""transformers' Trainer with FSDP2 and 4-bit communication; on a GPU per process, or on CPUs.

    torchrun --nproc-per-node 2 examples/trainer_hf.py

`topology=1` lets two ranks represent two nodes. On a cluster leave it out.
"""

import tempfile

import torch
import torch.distributed as dist

try:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install accelerate datasets transformers") from None

from sdp4bit.trainers.hf import SDP4BitCallback


def main() -> None:
    on_cpu = not torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        bf16=True,
        max_steps=8,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        save_strategy="no",
        report_to=[],
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
    )
    if on_cpu:  # accelerate has FSDP2 for devices only: let it take this process for one of them
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))
    rows = [{"input_ids": [(start + 7 * i) % 256 for i in range(32)]} for start in range(64)]
    data = Dataset.from_list([{**row, "labels": row["input_ids"]} for row in rows])

    switch = SDP4BitCallback(topology=1)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[switch],  # the new line
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(switch.comm.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

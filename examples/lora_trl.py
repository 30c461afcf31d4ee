"""LoRA with TRL and peft on FSDP2, frozen weights sent once; on a GPU per process, or on CPUs.

    torchrun --nproc-per-node 2 examples/lora_trl.py
    torchrun --nproc-per-node 2 examples/lora_trl.py --four-bit

Two ranks represent two nodes: `topology=1` says so. On a cluster leave it out. The second command is QLoRA:
bitsandbytes packs the frozen weights. Needs pip install '.[hf]' trl peft datasets, and bitsandbytes.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from sdp4bit import GradientConfig, SDP4BitConfig
from sdp4bit.trainers.hf import SDP4BitCallback

NUMBERS = 200


def tiny_model(folder: str, *, four_bit: bool) -> LlamaForCausalLM:
    """Return a random Llama; in 4 bits it is loaded from a file, as a real one would be."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape)).to(torch.bfloat16)
    if not four_bit:
        return model
    model.save_pretrained(folder)
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,  # accelerate shards packed weights in float types alone
    )
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=packed, dtype=torch.bfloat16)


def main() -> None:
    on_cpu = not torch.cuda.is_available()
    # Before SFTConfig, which has transformers save and load on one rank alone.
    model = tiny_model(tempfile.mkdtemp(), four_bit="--four-bit" in sys.argv[1:])
    args = SFTConfig(
        output_dir=tempfile.gettempdir(),
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        bf16=True,
        max_steps=6,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=False,
        learning_rate=2e-4,
        max_length=32,
        save_strategy="no",
        report_to=[],
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
    )
    if on_cpu:  # accelerate has FSDP2 for devices only: let it take this process for one of them
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    words = {str(number): number for number in range(NUMBERS)} | {"<end>": NUMBERS, "<pad>": NUMBERS + 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    texts = [" ".join(str((first + 7 * i) % NUMBERS) for i in range(24)) for first in range(NUMBERS)]

    # Adapters of this small model have fewer than 1,024 values per rank and block.
    config = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
    switch = SDP4BitCallback(config, topology=1)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>"
        ),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[switch],  # the new line
    )
    trainer.train()
    if trainer.is_world_process_zero():
        sent = [entry["sdp4bit/inter_bytes"] for entry in trainer.state.log_history if "loss" in entry]
        ratio = switch.comm.stats()["compression_ratio"]
        print(switch.comm.explain())
        print(f"step 1 sent {sent[0]:,.0f} bytes, each later step {sent[-1]:,.0f}: {ratio:.0f} times fewer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Llama with transformers' Trainer, FSDP2 and 4-bit communication: a program for docs/first-hour.md.

    HEAD=10.0.0.1 examples/cluster/first_hour.sh \\
        examples/cluster/llama_hf.py --model meta-llama/Meta-Llama-3-8B

`--model` is a name or a folder of transformers. A folder with a config.json alone, such as
examples/cluster/llama3-8B, starts from random weights. Without `--data` the tokens are random, too, which is
enough to time a step. With `--plain` it trains without sdp4bit: compare the seconds per step of both.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

try:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        default_data_collator,
    )
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is missing: pip install accelerate transformers") from None

from sdp4bit.trainers.hf import SDP4BitCallback

FSDP2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "activation_checkpointing": True,
    "reshard_after_forward": True,
}
WARM_UP = 2


class Clock(TrainerCallback):
    """Notes the time of each step. The loss of each is logged, so that the GPU has ended it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_log(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Median of the steps after the first ones."""
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(steps[WARM_UP:])


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences of equal length from a file with a JSON object {"text": ...} per line, or random ones."""

    def __init__(self, options: argparse.Namespace, *, vocabulary: int, count: int) -> None:
        length = options.tokens
        tokens = torch.randint(vocabulary, (count * length,)).tolist()
        if options.data is not None:
            read = AutoTokenizer.from_pretrained(options.model)
            with options.data.open() as lines:
                tokens = [token for line in lines for token in read(json.loads(line)["text"])["input_ids"]]
        self.rows = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="examples/cluster/llama3.2-1B")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence; each GPU has one per step")
    parser.add_argument("--out", default="runs/llama", help="for checkpoints; a folder that all nodes share")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints; default: none")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()

    on_cpu = not torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=options.out,
        fsdp=True,
        fsdp_config=FSDP2,
        bf16=True,
        max_steps=options.steps,
        logging_steps=1,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        save_strategy="no" if options.save_every is None else "steps",
        save_steps=options.save_every or 500,
        report_to=[],
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
    )
    if on_cpu:  # accelerate has FSDP2 for devices only: let it take this process for one of them
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options.model, use_cache=False)
    has_weights = not Path(options.model).is_dir() or any(Path(options.model).glob("*.safetensors"))
    load = AutoModelForCausalLM.from_pretrained if has_weights else AutoModelForCausalLM.from_config
    # In fp32: the main weights, which the optimizer steps.
    model = load(options.model if has_weights else config, dtype=torch.float32)
    count = options.steps * args.world_size
    clock, switch = Clock(), None if options.plain else SDP4BitCallback()  # the new line
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Rows(options, vocabulary=config.vocab_size, count=count),
        data_collator=default_data_collator,
        callbacks=[clock] if switch is None else [clock, switch],
    )
    trainer.train()
    if trainer.is_world_process_zero():
        if switch is not None:
            print(switch.comm.explain())
        print(f"{clock.seconds:.3f} s per step {'without' if options.plain else 'with'} sdp4bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

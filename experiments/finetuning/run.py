"""Fine-tune a language model with TRL on FSDP2, plain and with 4-bit communication: losses and bytes.

    sdp4bit pretrain --nproc-per-node 2 --ranks-per-node 1 --train-iters 300 --lr 1e-3 --save runs/tiny \\
        --out runs/pretrain
    sdp4bit export --load runs/tiny --out runs/model
    python -m experiments.finetuning.run --model runs/model --out runs/finetuning --seeds 1,2,3

Two gloo processes stand for two nodes. The model, a GPT-2 in Hugging Face's format, learns to say what a
function does from its name and arguments: the pairs are the functions of the standard library and the first
sentences of their docstrings. Those of the files that `sdp4bit pretrain` holds out are for validation, so
that neither training has seen them. Seeds change the order of the pairs and the initial adapters.

Variants are KIND-COMMUNICATION. `full` trains all weights, `lora` adapters of rank 8 in all layers; `plain`
is FSDP2 without this library, `sdp4bit` the preset, `lossless` the preset with exact weights. A finished run
leaves a file and is not repeated. `table.md` has losses, differences to plain by seed, and bytes.

Needs sdp4bit[cpu,hf,lab], peft and trl.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from benchmarks.kernels import describe_machine
from sdp4bit import SDP4BitConfig, WeightConfig
from sdp4bit.traffic import format_bytes
from sdp4bit_lab.compare.paired import paired_difference
from sdp4bit_lab.pretrain.data.corpus import split_corpus

RANKS = 2
VARIANTS: dict[str, SDP4BitConfig | None] = {
    "full-plain": None,
    "full-sdp4bit": SDP4BitConfig.preset("sdp4bit"),
    "full-lossless": SDP4BitConfig(weights=WeightConfig(mode="lossless")),
    "lora-plain": None,
    "lora-sdp4bit": SDP4BitConfig.preset("sdp4bit"),
}
PACKAGES = ("transformers", "trl", "peft", "accelerate")
HELD_OUT = 0.05
"""Of the text, as `sdp4bit pretrain` holds out by default."""
LONGEST_PAIR = 320
"""Characters; longer ones would not fit into 128 tokens."""
PROMPT = "What does this function do?\n\ndef {name}({arguments})\n\nIt does this:"
Pair = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run of one variant and seed."""

    variant: str
    seed: int
    settings: dict[str, Any]
    """What all runs that are compared have in common."""
    loss: float
    """Of the validation pairs, after the last step."""
    train_losses: list[float]
    seconds: float
    first_bytes: float | None = None
    """That a rank has sent to the other node in the first step; None for plain FSDP2: nobody counts there."""
    later_bytes: float | None = None
    """The same for a later step, on average."""
    plain_bytes: float | None = None
    """What plain FSDP2 would have sent in these."""


def pairs_of(source: str) -> Iterator[Pair]:
    """Yield a prompt and its completion for each documented function of a source file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
        sentence = " ".join(paragraph.split()).partition(". ")[0].rstrip(".")
        prompt = PROMPT.format(name=node.name, arguments=ast.unparse(node.args))
        if sentence and len(prompt) + len(sentence) < LONGEST_PAIR:
            yield {"prompt": prompt, "completion": f" {sentence}."}


def read_pairs() -> tuple[list[Pair], list[Pair]]:
    """Return the pairs for training and those for validation."""
    found: tuple[list[Pair], list[Pair]] = [], []
    for source, is_held_out in split_corpus((), validation_fraction=HELD_OUT).read():
        found[is_held_out].extend(pairs_of(source))
    return found


def fine_tune(
    variant: str, seed: int, pairs: tuple[list[Pair], list[Pair]], arguments: argparse.Namespace
) -> Run:
    """Fine-tune the model on every rank; return what came out, with this rank's bytes."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    from sdp4bit.trainers.hf import SDP4BitCallback

    is_lora, config = variant.startswith("lora"), VARIANTS[variant]
    training, validation = pairs[0], pairs[1][: arguments.validation_pairs]
    set_seed(seed)  # of the adapters, which the trainer makes before it sets the seed itself
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    args = SFTConfig(
        output_dir=str(arguments.out / "trainer"),
        fsdp=True,
        fsdp_config={"version": 2},
        bf16=True,
        learning_rate=arguments.lora_rate if is_lora else arguments.full_rate,
        warmup_steps=min(10, arguments.steps // 2),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        max_length=min(128, model.config.n_positions),
        gradient_checkpointing=False,
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    # accelerate has FSDP2 for devices only: let it take this process for one of them.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    callback = None if config is None else SDP4BitCallback(config, topology=1)
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(training),
        eval_dataset=Dataset.from_list(validation),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if is_lora else None,
        callbacks=[] if callback is None else [callback],
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    loss = validation_loss(trainer.model_wrapped, trainer.get_eval_dataloader())
    seconds = time.perf_counter() - start
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    sent: dict[str, float] = {}
    if callback is not None:
        assert callback.comm is not None
        steps = [(entry["sdp4bit/inter_bytes"], entry["sdp4bit/compression_ratio"]) for entry in logs]
        sent = {
            "first_bytes": steps[0][0],
            "later_bytes": statistics.fmean(count for count, _ in steps[1:]),
            "plain_bytes": statistics.fmean(count * ratio for count, ratio in steps[1:]),
        }
        if dist.get_rank() == 0:
            (arguments.out / f"explain-{variant}.txt").write_text(callback.comm.explain() + "\n")
        callback.comm.remove()
    return Run(
        variant=variant,
        seed=seed,
        settings=settings_of(arguments),
        loss=loss,
        train_losses=[entry["loss"] for entry in logs],
        seconds=seconds,
        **sent,
    )


def validation_loss(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> float:
    """Return the mean over the tokens of all ranks' batches, by the forward that training has, in fp32.

    The trainer's own moves in steps of half a percent: accelerate has FSDP2 return all outputs in bf16, the
    loss included.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch, use_cache=False).logits[:, :-1].float()
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            total += torch.tensor([losses.item(), (labels != -100).sum().item()], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what two runs must have in common to be compared."""
    names = ("model", "steps", "full_rate", "lora_rate", "validation_pairs")
    return {name: getattr(arguments, name) for name in names} | {"model": str(arguments.model)}


def _work(rank: int, store: str, arguments: argparse.Namespace, todo: Sequence[tuple[str, int]]) -> None:
    """Do these runs as one rank, and write what came out of each."""
    torch.set_num_threads(1)
    # What torchrun would have set.
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    ranks |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(RANKS))
    os.environ.update(ranks, MASTER_ADDR="localhost", MASTER_PORT="1", HF_HUB_OFFLINE="1")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    import datasets

    datasets.disable_progress_bars()
    pairs = read_pairs()
    for variant, seed in todo:
        run = fine_tune(variant, seed, pairs, arguments)
        if rank == 0:
            path = arguments.out / f"{variant}-seed{seed}.json"
            path.write_text(json.dumps(asdict(run), indent=1) + "\n")
            print(f"{path.stem}: {run.loss:.4f} after {run.seconds:.0f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def table(runs: Sequence[Run]) -> str:
    """Return one row per variant, over its seeds, as Markdown.

    Raises:
        ValueError: the first steps of a seed had other losses than plain FSDP2's, so that they are no pair.
    """
    titles = ("variant", "seeds", "validation loss", "cost in loss", "95 % interval")
    titles += ("sent in step 1", "in a later step", "plain FSDP2", "ratio")
    rows = [titles, ("---",) * len(titles)]
    for name in VARIANTS:
        mine = {run.seed: run for run in runs if run.variant == name}
        if not mine:
            continue
        kind, _, communication = name.partition("-")
        plain = {run.seed: run for run in runs if run.variant == f"{kind}-plain"}
        for seed in mine.keys() & plain.keys():
            first, expected = mine[seed].train_losses[0], plain[seed].train_losses[0]
            if first != expected:
                raise ValueError(
                    f"{name} with seed {seed} began at a loss of {first}, plain FSDP2 at {expected}: these "
                    "runs cannot be compared"
                )
        means = {
            field: statistics.fmean(getattr(run, field) for run in mine.values())
            for field in ("loss", "first_bytes", "later_bytes", "plain_bytes")
            if getattr(next(iter(mine.values())), field) is not None
        }
        cells = [name, str(len(mine)), f"{means['loss']:.4f}", *["-"] * 6]
        pairs = {seed: (run.loss, plain[seed].loss) for seed, run in mine.items() if seed in plain}
        if communication != "plain" and pairs:
            difference = paired_difference(pairs)
            cells[3] = f"{difference.mean_percent:+.3f} %"
            if difference.percent_interval is not None:
                cells[4] = "{:+.3f} to {:+.3f} %".format(*difference.percent_interval)
        if "later_bytes" in means:
            sent = [means[field] for field in ("first_bytes", "later_bytes", "plain_bytes")]
            cells[5:] = [*map(format_bytes, sent), f"{sent[2] / sent[1]:.1f}"]
        rows.append(tuple(cells))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder that sdp4bit export has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3", help="numbers with commas between")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of 16 pairs; at least 2")
    parser.add_argument("--full-rate", type=float, default=5e-5, help="learning rate of all weights")
    parser.add_argument("--lora-rate", type=float, default=3e-4, help="learning rate of adapters")
    parser.add_argument("--validation-pairs", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: the first step is counted apart, so give 2 or more")
    arguments.out.mkdir(parents=True, exist_ok=True)
    notes = []
    if find_spec("numba") is None and "full-lossless" in arguments.variants:
        arguments.variants.remove("full-lossless")
        notes.append("Lossless weights were left out: their coder is slow without numba (sdp4bit[cpu]).")
    planned = [(variant, int(seed)) for seed in arguments.seeds.split(",") for variant in arguments.variants]
    files = {run: arguments.out / f"{run[0]}-seed{run[1]}.json" for run in planned}
    todo = [run for run, path in files.items() if not path.exists()]
    for path in set(files.values()) - {files[run] for run in todo}:
        if (settings := json.loads(path.read_text())["settings"]) != settings_of(arguments):
            parser.error(f"{path} is of {settings}, not {settings_of(arguments)}: give another --out")
    if todo:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(_work, args=(f"{folder}/store", arguments, todo), nprocs=RANKS)
    runs = [Run(**json.loads(path.read_text())) for path in files.values()]
    machine = describe_machine()
    versions = machine["versions"] | {name: version(name) for name in PACKAGES}
    notes.append(f"{RANKS} processes, {machine['cores']} cores ({machine['cpu']}), {machine['date'][:10]}")
    notes.append(", ".join(f"{name} {found}" for name, found in versions.items()))
    text = table(runs) + "".join(f"\n{note}\n" for note in notes)
    (arguments.out / "table.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

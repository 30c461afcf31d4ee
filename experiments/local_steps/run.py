"""Local steps: replicas that train alone for H steps and then exchange what they learned, in one process.

    python -m experiments.local_steps.run --out runs/local --seeds 1,2,3 every=1 every=8 every=8,bits=4
    python -m experiments.local_steps.run --out runs/local --report experiments/local_steps

A replica takes `every` AdamW steps on batches of its own. Then
1. the replicas send what they moved (anchor - weights), in 4 bits with Hadamard transform and dither;
2. the owner of each piece takes an outer Nesterov step on the fp32 main weights with the mean;
3. the weights return as quantized differences of the main weights from the anchor, which all replicas hold;
4. every replica continues from the anchor.
The messages are the library's; rows of all replicas are in one process. The first `start` of the steps are
synchronous. `every=0` is synchronous training throughout, on the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream
from sdp4bit_lab.compare.paired import confidence_interval
from sdp4bit_lab.pretrain.data.corpus import read_corpus
from sdp4bit_lab.pretrain.data.tokenizer import BytePairTokenizer
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT

LENGTH, VOCABULARY = 64, 2048
SHAPE = ModelShape(layers=2, hidden=64, heads=2, vocabulary=VOCABULARY, positions=LENGTH)
WARMUP, LEAST_RATE, CLIP, DECAY = 0.05, 0.1, 1.0, 0.1
GRADIENT_GROUP, WEIGHT_GROUP = 128, 2048
FULL = 32


@dataclass(frozen=True)
class Setting:
    """One run; every field is an option of the command line."""

    every: int = 8
    """Local steps between exchanges, H; 0 is synchronous."""
    replicas: int = 4
    tokens: int = 512
    """Per replica and step."""
    bits: int = FULL
    """Of either direction: 32 or 4."""
    start: float = 0.1
    """Share of the steps that is synchronous and exact."""
    outer_rate: float = 0.7
    momentum: float = 0.6
    beta2: float = 0.99
    steps: int = 600
    rate: float = 3e-3
    seed: int = 1

    @property
    def bytes(self) -> float:
        """Bytes per parameter and step while steps are local; synchronous: fp32 gradients, bf16 weights."""
        if not self.every:
            return 6.0
        scales = 0.0 if self.bits == FULL else 2 / GRADIENT_GROUP + 2 / WEIGHT_GROUP
        return (2 * self.bits / 8 + scales) / self.every


def load_tokens(folder: Path) -> Tensor:
    """Return the default corpus as tokens; they are kept in the folder."""
    path = folder / "tokens.pt"
    if not path.exists():
        documents = list(read_corpus([]))
        tokenizer = BytePairTokenizer.train(documents, vocabulary_size=VOCABULARY)
        tokens = [token for document in tokenizer.encode_documents(documents) for token in document]
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{id(tokens)}")
        torch.save(torch.tensor(tokens), partial)
        partial.rename(path)
    return torch.load(path)


class Run:
    """Replicas as rows of flat weights; the model computes with the one that is copied in."""

    def __init__(self, setting: Setting, tokens: Tensor) -> None:
        self.setting, cut = setting, int(0.9 * len(tokens))
        self.train_tokens = tokens[:cut]
        self.held_out = tokens[cut : cut + 512 * (LENGTH + 1)].view(512, LENGTH + 1)
        self.models = [self._model() for _ in range(setting.replicas if setting.every else 1)]
        self.optimizers = [self._optimizer(model) for model in self.models]

    def _model(self) -> GPT:
        model = GPT(SHAPE)
        model.reset_parameters(seed=self.setting.seed)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, self.setting.beta2), fused=True)

    def batch(self, step: int) -> Tensor:
        """Return the sequences of all replicas [replicas, n, LENGTH + 1]."""
        random = torch.Generator().manual_seed(1_000_003 * self.setting.seed + step)
        count = self.setting.replicas * self.setting.tokens // LENGTH
        first = torch.randint(len(self.train_tokens) - LENGTH, (count, 1), generator=random)
        return self.train_tokens[first + torch.arange(LENGTH + 1)].unflatten(0, (self.setting.replicas, -1))

    def update(self, index: int, sequences: Tensor, step: int) -> None:
        """Take an AdamW step of a replica on these sequences."""
        model, optimizer = self.models[index], self.optimizers[index]
        warmup = WARMUP * self.setting.steps
        part = (step - warmup) / (self.setting.steps - warmup)
        cosine = LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = self.setting.rate * ((step + 1) / warmup if step < warmup else cosine)
        optimizer.zero_grad()
        for chunk in sequences.split(64):
            (model(chunk[:, :-1], chunk[:, 1:]).sum() / (sequences.shape[0] * LENGTH)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    def train(self) -> float:
        """Return the loss of the weights that all replicas hold at the end, on held-out text."""
        setting = self.setting
        first_local = round(setting.start * setting.steps) if setting.every else setting.steps
        for step in range(setting.steps):
            batch = self.batch(step)
            if step < first_local:
                self.update(0, batch.flatten(0, 1), step)
                continue
            if step == first_local:
                for model, optimizer in zip(self.models[1:], self.optimizers[1:], strict=True):
                    model.load_state_dict(self.models[0].state_dict())
                    optimizer.load_state_dict(self.optimizers[0].state_dict())
                self.anchor = flat(self.models[0])
                self.main, self.velocity = self.anchor.clone(), torch.zeros_like(self.anchor)
            for index in range(setting.replicas):
                self.update(index, batch[index], step)
            done = step + 1 - first_local
            if done % setting.every == 0 or step + 1 == setting.steps:
                self.exchange(step)
        model = self.models[0]
        with torch.no_grad():
            losses = [model(x[:, :-1], x[:, 1:]).sum() for x in self.held_out.split(64)]
        return float(torch.stack(losses).sum() / (self.held_out.shape[0] * LENGTH))

    @torch.no_grad()
    def exchange(self, step: int) -> None:
        """Send pseudo-gradients, take the outer step, send the weights back."""
        setting = self.setting
        moved = torch.stack([self.anchor - flat(model) for model in self.models])
        mean = self.reduce(moved, call=step) if setting.bits < FULL else moved.mean(0)
        self.velocity.mul_(setting.momentum).add_(mean)
        self.main.sub_(mean + setting.momentum * self.velocity, alpha=setting.outer_rate)
        if setting.bits < FULL:
            layout = MessageLayout(numel=self.main.numel(), bits=setting.bits, group_size=WEIGHT_GROUP)
            message = torch.empty(1, layout.nbytes, dtype=torch.uint8)
            ops.subtract_quantize(self.main, replica=self.anchor, out=message[0], layout=layout)
            ops.dequantize_add(message, replica=self.anchor[None], layout=layout, accumulate=True)
        else:
            self.anchor.copy_(self.main)
        for model in self.models:
            torch.nn.utils.vector_to_parameters(self.anchor.clone(), model.parameters())

    def reduce(self, rows: Tensor, *, call: int) -> Tensor:
        """Return the mean of rows [replicas, n] as the owner of every piece gets it."""
        count, numel = rows.shape
        layout = MessageLayout(numel=numel, bits=self.setting.bits, group_size=GRADIENT_GROUP)
        keys = derive_keys(self.setting.seed, pack_stream(step=call, bucket=0, stage=Stage.INTER, rank=0))
        key = RoundingKey(*keys, dither=True)
        messages = torch.empty(count, layout.nbytes, dtype=torch.uint8)
        for sender in range(count):
            values, out = rows[sender].view(1, 1, -1), messages[sender : sender + 1]
            rounding = key._replace(sender=sender)
            ops.hadamard_quantize(values, out=out, layout=layout, hadamard=True, rounding=rounding)
        mean = torch.empty(numel)
        ops.dequantize_reduce_hadamard(
            messages, out=mean, layout=layout, hadamard=True, multiplier=INVERSE_FACTOR / count, dither=key
        )
        return mean


def flat(model: nn.Module) -> Tensor:
    """Return a copy of all parameters in one row."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def collect(folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"))]


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for every setting, its loss over synchronous training with the same seeds and batches."""
    default = asdict(Setting())
    losses: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for run in runs:
        values = {**default, **run["setting"]}
        seed = values.pop("seed")
        if not values["every"]:
            values |= {name: default[name] for name in ("bits", "start", "outer_rate", "momentum")}
        losses[tuple(values.items())][seed] = run["loss"]
    rows = []
    for items, by_seed in losses.items():
        values = dict(items)
        unused = {name: default[name] for name in ("bits", "start", "outer_rate", "momentum")}
        reference = losses.get(tuple({**values, "every": 0, **unused}.items()), {})
        percent = [100 * (by_seed[s] / reference[s] - 1) for s in sorted(by_seed.keys() & reference.keys())]
        if not values["every"] or not percent:
            continue
        low, high = confidence_interval(percent) if len(percent) > 1 else (None, None)
        mean = sum(percent) / len(percent)
        sent = Setting(**values).bytes
        rows.append(
            {**values, "bytes": sent, "seeds": len(percent), "percent": mean, "low": low, "high": high}
        )
    order = ("replicas", "tokens", "every", "bits")
    return sorted(rows, key=lambda row: tuple(row[name] for name in order))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the loss over the bytes, a line per number of replicas, with the default batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    lines: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["bits"] == 4 and row["start"] == Setting.start and row["tokens"] == Setting.tokens:
            lines[row["replicas"]].append(row)
    for replicas, points in sorted(lines.items()):
        points.sort(key=lambda row: row["bytes"])
        x, y = [p["bytes"] for p in points], [p["percent"] for p in points]
        spread = [(p["high"] or p["percent"]) - p["percent"] for p in points]
        axes.errorbar(x, y, yerr=spread, marker="o", capsize=3, label=f"{replicas} replicas")
        for p in points:
            axes.annotate(f"H={p['every']}", (p["bytes"], p["percent"]), (4, 4), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlabel("bytes per parameter and step between nodes, local steps")
    axes.set_ylabel("loss over synchronous training, %")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.axvline(1.02, color="grey", linestyle=":", label="sdp4bit, every step")
    axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Run what the command line names, or report what has been run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="field=value,...; see Setting")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", type=Path, help="folder for result.json and loss.png")
    arguments = parser.parse_args()
    if arguments.report:
        runs = collect(arguments.out)
        rows = rows_of(runs)
        for row in rows:
            interval = "" if row["low"] is None else f" ({row['low']:+.2f} to {row['high']:+.2f})"
            print(
                f"{row['replicas']} x {row['tokens']:4} H={row['every']:2} bits={row['bits']:2} "
                f"{row['bytes']:.3f} B  {row['percent']:+.2f} %{interval}  {row['seeds']} seeds"
            )
        (arguments.report / "result.json").write_text(json.dumps(runs, indent=1) + "\n")
        draw(rows, arguments.report / "loss.png")
        return
    torch.set_num_threads(1)
    tokens = load_tokens(arguments.out)
    types = {field.name: type(field.default) for field in fields(Setting)}
    for text in arguments.settings:
        given = dict(item.split("=") for item in text.split(","))
        for seed in map(int, arguments.seeds.split(",")):
            values = {name: types[name](value) for name, value in given.items()}
            path = arguments.out / f"run-{text}-{seed}.json"
            if path.exists():
                continue
            loss = Run(Setting(**values, seed=seed), tokens).train()
            path.write_text(json.dumps({"setting": {**values, "seed": seed}, "loss": loss}) + "\n")
            print(text, "seed", seed, f"loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()

"""Train with 4- and 3-bit gradients whose rounding errors return, times a decay, under Muon and AdamW.

    python -m experiments.feedback_decay.run OUT.jsonl --seeds 1,2,3 --cases muon muon:4:0 muon:4:0.95 adamw

One process simulates nodes of one rank each. A node sends Q(g + decay * e) and keeps the error
e = (g + decay * e) - Q(g + decay * e). A case is OPTIMIZER[:BITS:DECAY[:ROUNDING[:LAYOUT]]]; without bits
nothing is rounded. Layouts: `fsdp2` (the own row is exact, one rounding) and `ddp` (the sums are gathered,
rounded again, with errors of their own). Errors return for the matrices of the blocks alone; other matrices
are rounded without, vectors are not rounded.
"""

from __future__ import annotations

import argparse
import glob
import json
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdp4bit.collectives.reduce_scatter import as_dither
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR
from sdp4bit.quantization.layout import message_layout
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream

GROUP_SIZE = 128
LION_RATE, SGD_RATE = 1e-3, 0.1
CHECKED = 24  # batches of the validation


class Case(NamedTuple):
    """An optimizer and the rounding of its gradients."""

    optimizer: str
    bits: int | None = None
    decay: float = 0.0
    rounding: str = "dither"
    layout: str = "fsdp2"

    @classmethod
    def of(cls, text: str) -> Case:
        optimizer, *rest = text.split(":")
        given = dict(zip(("bits", "decay", "rounding", "layout"), rest, strict=False))
        return cls(
            optimizer,
            bits=int(given["bits"]) if rest else None,
            decay=float(given.get("decay", 0)),
            rounding=given.get("rounding", "dither"),
            layout=given.get("layout", "fsdp2"),
        )


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """A GPT over bytes."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(
                    p,
                    std=0.02 / (2 * layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02,
                )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight[: x.shape[1]])))


class Muon:
    """torch.optim.Muon without weight decay, with fp32 products of all matrices of a shape at once.

    torch's uses bf16, for which this processor has no instructions.
    """

    def __init__(
        self, parameters: list[nn.Parameter], *, momentum: float = 0.95, nesterov: bool = True
    ) -> None:
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for p in parameters:
            self.by_shape.setdefault(p.shape, []).append(p)
        self.buffers = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.by_shape.items()}
        self.momentum, self.nesterov = momentum, nesterov

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, parameters in self.by_shape.items():
            gradient, buffer = torch.stack([p.grad for p in parameters]), self.buffers[shape]
            buffer.lerp_(gradient, 1 - self.momentum)
            x = gradient.lerp(buffer, self.momentum) if self.nesterov else buffer.clone()
            if shape[0] > shape[1]:
                x = x.mT
            x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
            for _ in range(5):
                gram = x @ x.mT
                x = torch.baddbmm(
                    x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
                )
            if shape[0] > shape[1]:
                x = x.mT
            for p, update in zip(parameters, x, strict=True):
                p.add_(update, alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675): the sign of an average of gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float) -> None:
        super().__init__(parameters, {"lr": rate, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_(average.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


class Link:
    """The reduction of matrices between nodes of one rank, with errors that return."""

    def __init__(
        self, parameters: list[nn.Parameter], case: Case, *, nodes: int, decay: float, bucket: int
    ) -> None:
        self.parameters, self.case, self.nodes, self.decay, self.bucket = (
            parameters,
            case,
            nodes,
            decay,
            bucket,
        )
        self.numel = sum(p.numel() for p in parameters) // nodes
        self.rows = torch.zeros(nodes, nodes, self.numel)  # [sender, owner, values]
        self.errors = torch.zeros_like(self.rows)
        self.gather_errors = torch.zeros(nodes, self.numel)
        self.layout = message_layout(numel=self.numel, bits=case.bits, group_size=GROUP_SIZE)

    def put(self, node: int, gradients: list[Tensor]) -> None:
        torch.cat([each.view(self.nodes, -1) for each in gradients], dim=1, out=self.rows[node])

    def sent(self, wanted: Tensor, *, seed: int, step: int, stage: Stage, rank: int) -> Tensor:
        """Return what the receivers of these values [n] see."""
        key = None
        if self.case.rounding != "nearest":
            stream = pack_stream(step=step, bucket=self.bucket, stage=stage, rank=rank)
            key = RoundingKey(*derive_keys(seed, stream), dither=self.case.rounding == "dither")
        message, out = torch.empty(1, self.layout.nbytes, dtype=torch.uint8), torch.empty_like(wanted)
        ops.hadamard_quantize(
            wanted.view(1, 1, -1), out=message, layout=self.layout, hadamard=True, rounding=key
        )
        ops.dequantize_reduce_hadamard(
            message,
            out=out,
            layout=self.layout,
            hadamard=True,
            multiplier=INVERSE_FACTOR,
            dither=as_dither(key),
        )
        return out

    def reduce(self, *, seed: int, step: int) -> None:
        """Set the gradients of the parameters to the mean over nodes."""
        total = torch.zeros(self.nodes, self.numel)
        for node, owner in ((n, o) for n in range(self.nodes) for o in range(self.nodes)):
            values, error = self.rows[node, owner], self.errors[node, owner]
            if node == owner:
                total[owner] += values
                continue
            wanted = values + self.decay * error
            sent = self.sent(wanted, seed=seed, step=step, stage=Stage.INTER, rank=node * self.nodes + owner)
            torch.sub(wanted, sent, out=error)
            total[owner] += sent
        if self.case.layout == "ddp":
            for owner, (values, error) in enumerate(zip(total, self.gather_errors, strict=True)):
                wanted = values + self.decay * error
                sent = self.sent(wanted, seed=seed, step=step, stage=Stage.GATHER, rank=owner)
                torch.sub(wanted, sent, out=error)
                values.copy_(sent)
        total /= self.nodes
        sizes = [p.numel() // self.nodes for p in self.parameters]
        for p, values in zip(self.parameters, total.split(sizes, dim=1), strict=True):
            p.grad = values.reshape(p.shape)


class Text:
    """Python sources in shuffled pieces of 4,096 bytes."""

    def __init__(self, length: int) -> None:
        roots = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
        names = sorted(glob.glob(f"{roots[0]}/*.py")) + sorted(
            glob.glob(f"{roots[1]}/torch/**/*.py", recursive=True)
        )
        text = b"".join(Path(name).read_bytes() for name in names)[:24_000_000]
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        order = torch.randperm(len(values) // 4096, generator=torch.Generator().manual_seed(0))
        values = values[: len(order) * 4096].view(-1, 4096)[order]
        self.checked, self.trained, self.length = values[:60].flatten(), values[60:].flatten(), length

    def batch(
        self, generator: torch.Generator, count: int, *, checked: bool = False
    ) -> tuple[Tensor, Tensor]:
        source = self.checked if checked else self.trained
        starts = torch.randint(len(source) - self.length - 1, (count, 1), generator=generator)
        rows = source[starts + torch.arange(self.length + 1)].long()
        return rows[:, :-1], rows[:, 1:]


def train(case: Case, seed: int, text: Text, options: argparse.Namespace) -> dict[str, float]:
    """Train a case and return its validation loss."""
    torch.manual_seed(seed)
    model, draws, nodes = (
        GPT(options.width, options.layers, options.length),
        torch.Generator().manual_seed(seed),
        options.nodes,
    )
    named = dict(model.named_parameters())
    inner = [p for n, p in named.items() if p.ndim == 2 and "blocks" in n]
    outer = [p for n, p in named.items() if p.ndim == 2 and "blocks" not in n]
    vectors = [p for p in named.values() if p.ndim < 2]
    with_muon = case.optimizer.startswith("muon")
    given = outer + vectors if with_muon else list(named.values())
    rate = {"lion": LION_RATE, "sgd": SGD_RATE}.get(case.optimizer, options.adamw_rate)
    usual: torch.optim.Optimizer
    if case.optimizer == "lion":
        usual = Lion(given, rate)
    elif case.optimizer == "sgd":
        usual = torch.optim.SGD(given, rate, momentum=0.9, nesterov=True)
    else:
        usual = torch.optim.AdamW(given, rate, betas=(0.9, 0.95), weight_decay=0.0)
    muon = Muon(inner, nesterov=case.optimizer == "muon") if with_muon else None
    links = []
    if case.bits is not None:
        links = [
            Link(inner, case, nodes=nodes, decay=case.decay, bucket=0),
            Link(outer, case, nodes=nodes, decay=0.0, bucket=1),
        ]
    for step in range(options.steps):
        x, y = text.batch(draws, options.batch)
        total: dict[int, Tensor] = {}
        for node in range(nodes):
            rows = slice(node * options.batch // nodes, (node + 1) * options.batch // nodes)
            loss = F.cross_entropy(model(x[rows]).flatten(0, 1), y[rows].flatten())
            everything = inner + outer + vectors
            gradients = dict(zip(map(id, everything), torch.autograd.grad(loss, everything), strict=True))
            for link in links:
                link.put(node, [gradients[id(p)] for p in link.parameters])
            for p in vectors if links else everything:
                gradient = gradients[id(p)]
                total[id(p)] = total[id(p)] + gradient if id(p) in total else gradient
        for p in vectors if links else everything:
            p.grad = total[id(p)] / nodes
        for link in links:
            link.reduce(seed=seed, step=step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        part = min(1.0, (step + 1) / (0.1 * options.steps)) * (1 - 0.9 * step / options.steps)
        usual.param_groups[0]["lr"] = rate * part
        usual.step()
        if muon is not None:
            muon.step(options.muon_rate * part)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        losses = []
        for _ in range(CHECKED):
            x, y = text.batch(generator, 32, checked=True)
            losses.append(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item())
    return {
        "loss": sum(losses) / len(losses),
        "last": loss.item(),
        "parameters": sum(p.numel() for p in named.values()),
    }


def main() -> None:
    """Run the cases that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--seeds", required=True)
    for name, value in (
        ("width", 256),
        ("layers", 4),
        ("length", 128),
        ("batch", 8),
        ("nodes", 4),
        ("steps", 500),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--adamw-rate", type=float, default=3e-3)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, settings = (
        Text(options.length),
        {k: v for k, v in vars(options).items() if k not in ("out", "cases", "seeds")},
    )
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for name in options.cases:
            if any(
                each["case"] == name and each["seed"] == seed and each["settings"] == settings
                for each in done
            ):
                continue
            began = time.monotonic()
            result = train(Case.of(name), seed, text, options)
            row = {
                "case": name,
                "seed": seed,
                **result,
                "seconds": round(time.monotonic() - began),
                "settings": settings,
            }
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"seed {seed} {name}: {result['loss']:.5f}, {row['seconds']} s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

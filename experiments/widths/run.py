"""Measure what each width of the codes loses: squared relative errors of known values. One process, seconds.

    python -m experiments.widths.run [--out widths.md]

quantizes and dequantizes values with the operators that training calls, by width, rounding and group size:

* gradients: Gaussian values, and Student's t with 3 degrees of freedom (outliers), which pass the Hadamard
  transform as gradients do;
* weight differences: Gaussian values, and Student's t with 5 degrees of freedom, rounded to nearest, by the
  part of the largest magnitude at which the scale is clipped.

An error is |received - sent|^2 / |sent|^2 over 2^20 values; bits are those of codes and scales.

    python -m experiments.widths.run --drift-steps 100

trains a small transformer on the bytes of the standard library's sources, plainly, and keeps a bf16 replica
of its weights by quantized differences for each of `DRIFTS`. Printed is |main - replica| over what rounding
the main weights to bf16 makes of it: 1 is as good as plain FSDP2.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn

from sdp4bit.collectives.sections import whole_row
from sdp4bit.collectives.weight_replica import QuantizedReplica
from sdp4bit.config import QUANTIZED_BITS, WeightConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.hadamard import INVERSE_FACTOR, Hadamard
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys

VALUES = 1 << 20
GROUP_SIZES = (32, 128, 512, 2048)
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
DRIFTS = {
    f"{bits} bits, groups of {group_size}, clip {clip:g}": WeightConfig(
        bits=bits, group_size=group_size, clip=clip
    )
    for bits, group_size, clips in (
        *((2, 128, (1.0, 0.7, 0.6, 0.5, 0.4)), (2, 2048, (1.0, 0.6, 0.4))),
        *((3, 128, (1.0, 0.8, 0.7, 0.6)), (3, 2048, (1.0, 0.7))),
        *((4, 128, (1.0, 0.9)), (4, 2048, (1.0, 0.9, 0.7))),
    )
    for clip in clips
}
PEAK_RATE = 6e-4
KEY = RoundingKey(*derive_keys(0, 0))


def gaussian(*, seed: int = 0) -> Tensor:
    """Return normal values, fp32 [VALUES]."""
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(seed))


def student_t(*, freedom: int, seed: int = 0) -> Tensor:
    """Return values of Student's t distribution, fp32 [VALUES]: normal ones over the root of a chi-square."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.randn(freedom, VALUES, generator=generator).square().sum(0)
    return torch.randn(VALUES, generator=generator) / (squares / freedom).sqrt()


def squared_error(received: Tensor, sent: Tensor) -> float:
    """Return |received - sent|^2 / |sent|^2."""
    difference = received.double() - sent.double()
    return float(difference.square().sum() / sent.double().square().sum())


def gradient_error(values: Tensor, *, bits: int, group_size: int, stochastic: bool, hadamard: bool) -> float:
    """Return the error of one hop of a gradient."""
    layout = MessageLayout(numel=values.numel(), bits=bits, group_size=group_size)
    message = torch.empty(1, layout.nbytes, dtype=torch.uint8)
    transform = Hadamard() if hadamard else None
    named = {"layout": layout, "hadamard": transform}
    ops.hadamard_quantize(values[None, None], out=message, rounding=KEY if stochastic else None, **named)
    received = torch.empty_like(values)
    factor = INVERSE_FACTOR if hadamard else 1.0
    ops.dequantize_reduce_hadamard(message, out=received, multiplier=factor, **named, dither=None)
    return squared_error(received, values)


def weight_error(values: Tensor, *, bits: int, group_size: int, clip: float) -> float:
    """Return the error of a weight difference that is rounded to nearest."""
    layout = MessageLayout(numel=values.numel(), bits=bits, group_size=group_size)
    message, received = torch.empty(1, layout.nbytes, dtype=torch.uint8), torch.empty(1, values.numel())
    ops.subtract_quantize(values, replica=None, out=message[0], layout=layout, rounding=None, clip=clip)
    ops.dequantize_add(message, replica=received, layout=layout, accumulate=False, dither=None)
    return squared_error(received[0], values)


def gradient_table() -> str:
    """Return the errors of gradients, as Markdown."""
    inputs = {"Gaussian": (gaussian(), False), "Student's t": (student_t(freedom=3), True)}
    titles = [
        f"{name}, {rounding}"
        for rounding in ("stochastic", "nearest")
        for name in ("Gaussian", "t(3), Hadamard")
    ]
    lines = [["bits", "groups of", "bits sent", *titles], ["---"] * (3 + len(titles))]
    for bits in QUANTIZED_BITS:
        for group_size in GROUP_SIZES:
            errors = [
                gradient_error(
                    values, bits=bits, group_size=group_size, stochastic=rounded, hadamard=hadamard
                )
                for rounded in (True, False)
                for values, hadamard in inputs.values()
            ]
            sent = bits + 16 / group_size
            lines.append([str(bits), str(group_size), f"{sent:.4g}", *(f"{error:.3g}" for error in errors)])
    return _markdown(lines)


def weight_table() -> str:
    """Return the errors of weight differences by the clip, as Markdown."""
    inputs = {"Gaussian": gaussian(), "t(5)": student_t(freedom=5)}
    lines = [
        ["bits", "groups of", "values", *(f"clip {clip:g}" for clip in CLIPS)],
        ["---"] * (3 + len(CLIPS)),
    ]
    for bits in (2, 3, 4):
        for group_size in (128, 2048):
            for name, values in inputs.items():
                errors = [weight_error(values, bits=bits, group_size=group_size, clip=clip) for clip in CLIPS]
                best = min(errors)
                cells = [f"**{error:.3g}**" if error == best else f"{error:.3g}" for error in errors]
                lines.append([str(bits), str(group_size), name, *cells])
    return _markdown(lines)


class _Replica:
    """A bf16 replica of flat weights that follows them by quantized differences."""

    def __init__(self, main: Tensor, config: WeightConfig) -> None:
        self._arithmetic = QuantizedReplica(config, seed=0, bucket=0, rank=0)
        self._held = main.bfloat16()[None]

    def refresh(self, main: Tensor, *, call: int) -> None:
        layout = self._arithmetic.message_layout(whole_row(main.numel()))
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8)
        self._arithmetic.quantize(main, self._held[0], message[0], call=call, rank=0)
        self._arithmetic.apply(message, self._held, call=call)

    def drift(self, main: Tensor) -> float:
        rounding = (main - main.bfloat16().float()).norm()
        return float((main - self._held[0].float()).norm() / rounding)


def _source_bytes() -> Tensor:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def drift_table(steps: int) -> str:
    """Return the drift of each replica at every quarter of a short training, as Markdown."""
    torch.manual_seed(0)
    data, length, hidden = _source_bytes(), 128, 192
    layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(256, hidden),
            "places": nn.Embedding(length, hidden),
            "blocks": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            "out": nn.Linear(hidden, 256),
        }
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = max(1, steps // 10)
    mask = nn.Transformer.generate_square_subsequent_mask(length)

    def main_weights() -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    replicas = {name: _Replica(main_weights(), config) for name, config in DRIFTS.items()}
    shown: dict[str, list[str]] = {name: [] for name in DRIFTS}
    titles = []
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(data) - length - 1, (8,)).tolist()
        rows = torch.stack([data[start : start + length + 1] for start in starts])
        states = model["tokens"](rows[:, :-1]) + model["places"](torch.arange(length))
        logits = model["out"](model["blocks"](states, mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        decay = 0.55 + 0.45 * math.cos(math.pi * step / steps)  # to a tenth of the peak
        rate = PEAK_RATE * min(step / warmup, decay)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        main = main_weights()
        for replica in replicas.values():
            replica.refresh(main, call=step)
        if step % max(1, steps // 4) == 0:
            titles.append(f"step {step}, rate {rate:.1e}, loss {loss.item():.2f}")
            for name, replica in replicas.items():
                shown[name].append(f"{replica.drift(main):.3f}")
    lines = [["drift over bf16's rounding", *titles], ["---"] * (1 + len(titles))]
    return _markdown(lines + [[name, *cells] for name, cells in shown.items()])


def _markdown(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drift-steps", type=int, help="train so many steps and measure the drift instead")
    parser.add_argument("--out", type=Path, help="file for the tables, too")
    arguments = parser.parse_args()
    text = (
        drift_table(arguments.drift_steps)
        if arguments.drift_steps
        else f"{gradient_table()}\n{weight_table()}"
    )
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

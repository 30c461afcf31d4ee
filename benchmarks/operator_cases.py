"""Call the five operators as in a training step, for timing relative to a copy of the same size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdp4bit.config import WeightConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey, derive_keys

KEY = RoundingKey(*derive_keys(0, 0))
RANKS, NODES = 4, 2
WEIGHT_GROUP, GRADIENT_GROUP = 2048, 128
DRAWN_ELEMENTS = 1 << 22
COPY = "copy"
FROM_BF16 = "hadamard_quantize, bf16 gradient"
DITHERED = ", dithered"
"""Suffix for inter-node operators that apply or remove dither."""
NO_TRANSFORM = ", no transform"
"""Suffix for operators that quantize without the Hadamard transform, otherwise with equal arguments."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator with its tensors."""

    run: Callable[[], object]
    inputs: tuple[Tensor, ...]
    output: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        tensors = (*self.inputs, self.output)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _make_messages(values: Tensor, layout: MessageLayout) -> Tensor:
    messages = torch.empty(values.shape[0], layout.nbytes, dtype=torch.uint8, device=values.device)
    numbered = KEY._replace(row_stride=layout.padded_numel)
    ops.hadamard_quantize(values, out=messages, layout=layout, hadamard=True, rounding=numbered)
    return messages


def _draw(elements: int, seed: int, device: str) -> Tensor:
    """Return normal values, identical on every device, repeated if there are many."""
    drawn = torch.randn(min(elements, DRAWN_ELEMENTS), generator=torch.Generator().manual_seed(seed))
    return drawn.to(device).repeat(-(-elements // drawn.numel()))[:elements]


def make_cases(elements: int, device: str, *, bits: float = 4) -> dict[str, Case]:
    """Return the operators as a training step calls them, with the method's group sizes.

    Args:
        bits: width of weight differences and of the inter-node hop; below 4, differences are in groups of
        128.
    """
    main = _draw(elements, 0, device)
    copied = torch.empty_like(main)

    weights = MessageLayout(
        numel=elements, bits=bits, group_size=WEIGHT_GROUP if bits >= 4 else GRADIENT_GROUP
    )
    replica = (main + 0.01 * _draw(elements, 1, device)).bfloat16()
    difference = torch.empty(1, weights.nbytes, dtype=torch.uint8, device=device)
    clip = WeightConfig(bits=bits).effective_clip
    named: dict[str, Any] = {"replica": replica, "out": difference[0], "layout": weights, "clip": clip}
    ops.subtract_quantize(main, **named)
    updated = replica.clone()[None]

    row = elements // (RANKS * NODES)
    intra = MessageLayout(numel=row, bits=8, group_size=GRADIENT_GROUP, parts=NODES)
    gradient = main[: RANKS * NODES * row].view(NODES, RANKS, row).transpose(0, 1)
    rounded = gradient.bfloat16()
    sent = _make_messages(gradient, intra)
    # Not `sent`, which is an input of later operators.
    sent_rounded, plain, plain_rounded = (torch.empty_like(sent) for _ in range(3))
    numbered = KEY._replace(row_stride=intra.padded_numel)

    def quantized(values: Tensor, out: Tensor, *, hadamard: bool = True) -> Case:
        named: dict[str, Any] = {"layout": intra, "hadamard": hadamard, "rounding": numbered}
        return Case(run=lambda: ops.hadamard_quantize(values, out=out, **named), inputs=(values,), output=out)

    inter = MessageLayout(numel=row, bits=bits, group_size=GRADIENT_GROUP)
    reduced = torch.empty(NODES, inter.nbytes, dtype=torch.uint8, device=device)

    whole = MessageLayout(numel=elements, bits=bits, group_size=GRADIENT_GROUP)
    arrived = _make_messages(main.expand(NODES, 1, elements), whole)
    result = torch.empty_like(main)
    dithered = numbered._replace(dither=True)
    summed: dict[str, Any] = {"received": intra, "out": reduced, "sent": inter, "dither": None}
    finished: dict[str, Any] = {"out": result, "layout": whole, "hadamard": True}
    finished["multiplier"] = 1 / (32 * RANKS * NODES)
    return {
        COPY: Case(run=lambda: copied.copy_(main), inputs=(main,), output=copied),
        "subtract_quantize": Case(
            run=lambda: ops.subtract_quantize(main, **named), inputs=(main, replica), output=difference
        ),
        "dequantize_add": Case(
            run=lambda: ops.dequantize_add(difference, replica=updated, layout=weights, accumulate=True),
            inputs=(difference, updated),
            output=updated,
        ),
        "hadamard_quantize": quantized(gradient, sent),
        f"hadamard_quantize{NO_TRANSFORM}": quantized(gradient, plain, hadamard=False),
        FROM_BF16: quantized(rounded, sent_rounded),
        f"{FROM_BF16}{NO_TRANSFORM}": quantized(rounded, plain_rounded, hadamard=False),
        "dequantize_reduce_quantize": Case(
            run=lambda: ops.dequantize_reduce_quantize(sent, rounding=numbered, **summed),
            inputs=(sent,),
            output=reduced,
        ),
        f"dequantize_reduce_quantize{DITHERED}": Case(
            run=lambda: ops.dequantize_reduce_quantize(sent, rounding=dithered, **summed),
            inputs=(sent,),
            output=reduced,
        ),
        "dequantize_reduce_hadamard": Case(
            run=lambda: ops.dequantize_reduce_hadamard(arrived, dither=None, **finished),
            inputs=(arrived,),
            output=result,
        ),
        f"dequantize_reduce_hadamard{DITHERED}": Case(
            run=lambda: ops.dequantize_reduce_hadamard(arrived, dither=dithered, **finished),
            inputs=(arrived,),
            output=result,
        ),
    }


def measure_once(run: Callable[[], object], repetitions: int, device: str) -> float:
    """Return the seconds of one call, measured by events on a GPU."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repetitions):
            run()
        return (time.perf_counter() - start) / repetitions
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repetitions):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000 / repetitions

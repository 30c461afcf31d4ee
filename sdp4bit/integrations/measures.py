"""What quantization cost, over all parts of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter


def relative_distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Return |main - replica| / |main| over all pairs of them; None if there is none."""
    distance = norm = 0.0
    seen = False
    for main, replica in pairs:
        seen = True
        exact = main.float()
        distance += float((exact - replica.float()).square().sum())
        norm += float(exact.square().sum())
    if not seen:
        return None
    return float((distance / norm) ** 0.5) if norm else 0.0


def sampled_error(samples: Iterable[tuple[QuantizedReduceScatter, Tensor]]) -> float | None:
    """Return the relative error of quantizing all samples, each as its reduction does; None without any."""
    distance = norm = 0.0
    seen = False
    for reduction, sample in samples:
        seen = True
        energy = float(sample.float().square().sum())
        distance += energy * reduction.quantization_error(sample) ** 2
        norm += energy
    if not seen:
        return None
    return float((distance / norm) ** 0.5) if norm else 0.0

"""A warning for Muon, which few bits between nodes cost more loss than AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sdp4bit.addresses import page
from sdp4bit.collectives.group import Group
from sdp4bit.quantization.formats import format_of

ENOUGH_BITS = 8
"""From here on little or no cost was measured (docs/muon.md)."""


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is a Muon, by its name: it may step views, which no model holds."""
    return "muon" in type(optimizer).__name__.lower()


def muon_warning(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> str | None:
    """Return an advice if a Muon steps with gradients of few bits between nodes; "" if not.

    None if no gradient has been quantized yet.
    """
    quantized = [group for group in groups if group.gradients.bits is not None]
    if not quantized:
        return None
    sent = [
        format_of(config.inter_bits)
        for group in quantized
        if (config := group.gradients.config)
        and any(layout is not None and layout.nodes > 1 for layout in (group.layout, group.replicate_layout))
    ]
    fewest = min((each for each in sent if each.has_scales), key=lambda each: each.bits, default=None)
    if fewest is None or fewest.bits >= ENOUGH_BITS:
        return ""
    return (
        f"{type(optimizer).__name__} steps with gradients of {fewest.name} between nodes, which cost Muon "
        f"more loss than AdamW ({page('muon')}): use GradientConfig(inter_bits={ENOUGH_BITS})"
    )

"""A warning for Muon, which few bits between nodes cost more loss than AdamW."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sdp4bit.addresses import page
from sdp4bit.collectives.group import Group
from sdp4bit.quantization.formats import format_of

ENOUGH_BITS = 8
"""From here on little or no cost was measured (docs/muon.md)."""


def muon_warning(optimizer: torch.optim.Optimizer, groups: Iterable[Group]) -> str:
    """Return an advice if a Muon steps with gradients of few bits; "" otherwise.

    Muon's own name decides, because it may step views, which are no parameters of the model.
    """
    name = type(optimizer).__name__
    if "muon" not in name.lower():
        return ""
    sent = [format_of(group.gradients.bits) for group in groups if group.gradients.bits is not None]
    fewest = min((each for each in sent if each.has_scales), key=lambda each: each.bits, default=None)
    if fewest is None or fewest.bits >= ENOUGH_BITS:
        return ""
    return (
        f"{name} steps with gradients of {fewest.name} between nodes, which cost Muon more loss than AdamW "
        f"({page('muon')}): use GradientConfig(inter_bits={ENOUGH_BITS})"
    )

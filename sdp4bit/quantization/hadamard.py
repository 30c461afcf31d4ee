"""Walsh-Hadamard transform of blocks of 32, which every back end reproduces bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.quantization.formats import BLOCK

STRIDES = (1, 2, 4, 8, 16)
INVERSE_FACTOR = 1.0 / BLOCK
"""Applying the transform twice multiplies by 32, which is exact in fp32."""


def hadamard32(values: Tensor) -> Tensor:
    """Return the unnormalized transform, in natural (Sylvester) order, of each block of 32 values.

    The butterflies run over strides 1, 2, 4, 8, 16 in fp32. Additions are rounded, so this order is part of
    the definition (paper section 3.2).

    Args:
        values: fp32, contiguous, any shape whose last dimension is a multiple of 32.
    """
    mixed = values
    for stride in STRIDES:
        mixed = mixed.view(-1, BLOCK // (2 * stride), 2, stride)
        low, high = mixed[:, :, 0], mixed[:, :, 1]
        mixed = torch.stack([low + high, low - high], dim=2)
    return mixed.view(values.shape)

"""Message buffers that are kept from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Byte buffers by name that only grow, so that no fresh memory is touched in a steady state.

    One instance serves calls that follow each other on one stream (or thread): a buffer is overwritten by the
    next call that asks for the same name.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def messages(self, name: str, count: int, nbytes: int, *, device: torch.device) -> Tensor:
        """Return uint8 [count, nbytes] of unspecified content."""
        key = (name, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count * nbytes:
            # A buffer first needed under inference_mode must still be writable in training.
            with torch.inference_mode(False):
                buffer = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        return buffer[: count * nbytes].view(count, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())

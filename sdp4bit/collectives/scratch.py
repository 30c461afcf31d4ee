"""Message buffers that are kept from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Byte buffers by name that only grow, so that no fresh memory is touched in a steady state.

    A buffer is overwritten by the next call that asks for the same name on the same stream, which orders the
    two. Every CUDA stream has buffers of its own: several FSDP2 roots, or `unshard(async_op=True)` beside an
    implicit prefetch, communicate at once. Calls whose transfers are under way at once on one stream take a
    slot each and put its number into the names.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, int], Tensor] = {}
        self._slots: set[int] = set()

    def messages(self, name: str, count: int, nbytes: int, *, device: torch.device) -> Tensor:
        """Return uint8 [count, nbytes] of unspecified content, for use on the current stream."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (name, device, stream)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < count * nbytes:
            # A buffer first needed under inference_mode must still be writable in training.
            with torch.inference_mode(False):
                buffer = torch.empty(count * nbytes, dtype=torch.uint8, device=device)
            self._buffers[key] = buffer
        return buffer[: count * nbytes].view(count, nbytes)

    def take_slot(self) -> int:
        """Return the lowest number that nobody holds, until free_slot()."""
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        self._slots.add(slot)
        return slot

    def free_slot(self, slot: int) -> None:
        """Let the slot's buffers be overwritten."""
        self._slots.discard(slot)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())

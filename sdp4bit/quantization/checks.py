"""Argument checks of the operators; they raise ValueError."""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.quantization.formats import BLOCK, LEAST_CLIP
from sdp4bit.quantization.layout import MESSAGE_ALIGNMENT, MessageLayout, round_up
from sdp4bit.quantization.random import MAX_ELEMENTS, RoundingKey

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of values that operators read and write."""


def check_layout(name: str, layout: MessageLayout, *, numel: int, parts: int = 1) -> None:
    """Require this number of values per row and of parts."""
    if layout.numel != numel or layout.parts != parts:
        raise ValueError(f"{name} must have numel={numel} and parts={parts} like the tensors, got {layout}")


def check_index(name: str, index: int | None, *, count: int) -> None:
    """Require an index below the count, or None."""
    if index is not None and not 0 <= index < count:
        raise ValueError(f"{name}={index} must be from 0 to {count - 1}")


def check_blocks(blocks: Tensor, *, layout: MessageLayout, messages: Tensor) -> None:
    """Require a table with an entry for each block of a row, on the device of the messages."""
    count = layout.padded_numel // BLOCK
    if blocks.dtype != torch.int64 or blocks.shape != (count,) or not blocks.is_contiguous():
        raise ValueError(
            f"blocks must be contiguous int64 [{count}] for {layout}, got {blocks.dtype} {list(blocks.shape)}"
        )
    check_device("blocks", blocks, messages=messages)


def check_messages(name: str, messages: Tensor, *, count: int | None, layout: MessageLayout) -> None:
    """Require the size of the layout, this number of messages, and aligned rows."""
    if messages.dtype != torch.uint8 or messages.dim() != 2 or messages.shape[1] != layout.nbytes:
        raise ValueError(
            f"{name} must be uint8 [messages, {layout.nbytes}] for {layout}, "
            f"got {messages.dtype} {list(messages.shape)}"
        )
    if count is not None and messages.shape[0] != count:
        raise ValueError(f"{name} must hold {count} messages, got {messages.shape[0]}")
    if messages.numel() == 0:
        return
    (between, within), offset = messages.stride(), messages.storage_offset()
    if within != 1 or between % MESSAGE_ALIGNMENT or offset % MESSAGE_ALIGNMENT:
        raise ValueError(
            f"{name} must have rows of contiguous bytes, {MESSAGE_ALIGNMENT}-byte aligned: "
            f"strides {messages.stride()}, offset {offset}"
        )


def check_values(name: str, values: Tensor, *, messages: Tensor) -> None:
    """Require a supported dtype and the device of the messages."""
    if values.dtype not in VALUE_DTYPES:
        raise ValueError(f"{name} must be fp32, bf16 or fp16, got {values.dtype}: cast it first")
    check_device(name, values, messages=messages)


def check_own(own: Tensor, *, numel: int, messages: Tensor) -> None:
    """Require values of the own node, on the device of the messages."""
    if own.shape != (numel,) or not own.is_contiguous():
        raise ValueError(f"own must be contiguous [{numel}], got {list(own.shape)}")
    check_values("own", own, messages=messages)


def check_device(name: str, tensor: Tensor, *, messages: Tensor) -> None:
    """Require the device of the messages."""
    if tensor.device != messages.device:
        raise ValueError(
            f"{name} is on {tensor.device} and the message buffer on {messages.device}: "
            "move them to one device"
        )


def check_rounding(rounding: RoundingKey | None, *, rows: int, numel: int) -> None:
    """Require 32-bit keys, and at most as many values as a key can number."""
    if rounding is None:
        return
    k0, k1, first, row_stride, is_dither, sender, _ = rounding
    if not (0 <= k0 < 1 << 32 and 0 <= k1 < 1 << 32):
        raise ValueError(f"k0={k0} and k1={k1} must be unsigned 32-bit keys, as derive_keys returns them")
    if first < 0 or row_stride < 0 or first % BLOCK or row_stride % BLOCK:
        raise ValueError(
            f"first={first} and row_stride={row_stride} must be multiples of {BLOCK}, at least 0"
        )
    if is_dither not in (False, True) or sender < 0:
        raise ValueError(f"dither={is_dither!r} must be True or False, and sender={sender} at least 0")
    end = first + max(rows - 1, 0) * row_stride + round_up(numel, BLOCK)
    if end > MAX_ELEMENTS:
        raise ValueError(f"element {end} is beyond {MAX_ELEMENTS}, the maximum for one key")


def check_dither(dither: RoundingKey | None, *, rows: int, numel: int) -> None:
    """Require a key of subtractive dither, in addition to check_rounding."""
    if dither is not None and not dither.dither:
        raise ValueError(f"dither must be None or the senders' key with dither=True, got {dither}")
    check_rounding(dither, rows=rows, numel=numel)


def check_clip(clip: float) -> None:
    """Require a clip below which not most values saturate."""
    if not LEAST_CLIP <= clip <= 1:
        raise ValueError(f"clip={clip} must be from {LEAST_CLIP} to 1 (no clipping)")

"""What travels when a weight replica is refreshed: quantized differences, or quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor

from sdp4bit.config import WeightConfig
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import FULL_PRECISION, MessageLayout, message_layout
from sdp4bit.quantization.random import RoundingKey, Stage, derive_keys, pack_stream


class WeightMessages:
    """The arithmetic before and after the all-gathers of a parameter group's refresh."""

    def __init__(self, config: WeightConfig, *, seed: int, bucket: int) -> None:
        self._config = config
        self._seed = seed
        self._bucket = bucket

    def with_config(self, config: WeightConfig) -> WeightMessages:
        """Return the same bucket's arithmetic with other settings."""
        return WeightMessages(config, seed=self._seed, bucket=self._bucket)

    @property
    def sends_differences(self) -> bool:
        """Whether messages are added to what is held, rather than replacing it."""
        return self._config.mode == "difference"

    def layout(self, numel: int) -> MessageLayout:
        """Return the layout of the message that carries a row."""
        config = self._config
        return message_layout(numel=numel, bits=config.bits or FULL_PRECISION, group_size=config.group_size)

    def quantize(self, row: Tensor, held: Tensor, out: Tensor, *, call: int, rank: int) -> None:
        """The message carries what has to be added to, or put in the place of, what is held of a row.

        Args:
            row: [n], the main shard of a rank, in the type that weights are gathered in.
            held: [n], what the replica holds of it.
            out: uint8 [nbytes] of the layout.
            call: number of this refresh of the bucket since the start, for the rounding bits.
        """
        rounding = None
        if self._config.rounding == "stochastic":
            stream = pack_stream(step=call, bucket=self._bucket, stage=Stage.WEIGHT, rank=rank)
            rounding = RoundingKey(*derive_keys(self._seed, stream))
        replica = held if self.sends_differences else None
        ops.subtract_quantize(
            row, replica=replica, out=out, layout=self.layout(row.numel()), rounding=rounding
        )

    def apply(self, messages: Tensor, rows: Tensor) -> None:
        """Row i of a replica has followed message i, in place.

        Args:
            messages: uint8 [k, nbytes].
            rows: [k, n].
        """
        layout = self.layout(rows.shape[1])
        ops.dequantize_add(messages, replica=rows, layout=layout, accumulate=self.sends_differences)

    def quantized_differences(self, row: Tensor, held: Tensor, *, rank: int) -> tuple[Tensor, Tensor]:
        """Return what a quantized refresh has to send and what arrives of it, both in fp32; nothing is sent.

        Args:
            row: [n], a part of the main shard, of whole quantization groups: then nearest rounding gives
                what the refresh of the whole row gives.
            held: [n], what the replica holds there.
        """
        layout = self.layout(row.numel())
        message = torch.empty(1, layout.nbytes, dtype=torch.uint8, device=row.device)
        received = torch.empty(1, row.numel(), dtype=torch.float32, device=row.device)
        self.quantize(row, held, message[0], call=0, rank=rank)
        ops.dequantize_add(message, replica=received, layout=layout, accumulate=False)
        return row.float() - held.float() if self.sends_differences else row.float(), received[0]

"""SDP4Bit on Megatron-Core; importing it does not import Megatron-Core."""

from __future__ import annotations

from sdp4bit_megatron.api import quantize_communication
from sdp4bit_megatron.arguments import add_arguments, from_args
from sdp4bit_megatron.handle import MegatronCommHandle

__all__ = ["MegatronCommHandle", "add_arguments", "from_args", "quantize_communication"]

"""SDP4Bit on DeepSpeed's ZeRO-1 and ZeRO-2; importing it does not import DeepSpeed.

`sdp4bit.quantize_communication(engine)` finds :func:`attach` by the entry point of DeepSpeed's engine.
"""

from __future__ import annotations

from sdp4bit_deepspeed.api import DeepSpeedCommHandle, attach

__all__ = ["DeepSpeedCommHandle", "attach"]

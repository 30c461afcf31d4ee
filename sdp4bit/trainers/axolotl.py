"""A plugin for Axolotl: `plugins: [sdp4bit.trainers.axolotl.SDP4BitPlugin]` in its YAML file."""

from __future__ import annotations

from typing import Any

from sdp4bit.trainers import attachment

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel

    from sdp4bit.trainers.hf import SDP4BitCallback
except ImportError as error:
    raise attachment.missing("axolotl", error) from error


class SDP4BitArgs(BaseModel):
    """Keys of the YAML file."""

    sdp4bit_preset: str | None = None
    """Name of a preset."""
    sdp4bit_ranks_per_node: int | None = None
    """Ranks per node; detected by host names by default."""


class SDP4BitPlugin(BasePlugin):
    """Add `sdp4bit.trainers.hf.SDP4BitCallback` to Axolotl's trainer."""

    def get_input_args(self) -> str:
        return f"{SDP4BitArgs.__module__}.{SDP4BitArgs.__qualname__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Insert the callback before those that report to Weights & Biases and others; return no further."""
        ranks = cfg.sdp4bit_ranks_per_node
        SDP4BitCallback(
            cfg.sdp4bit_preset,
            topology="auto" if ranks is None else ranks,
            resume_from_checkpoint=cfg.resume_from_checkpoint,
        ).add_to(trainer)
        return []

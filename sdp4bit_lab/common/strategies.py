"""Name the strategies of the programs, which are the library's presets."""

from __future__ import annotations

from typing import Literal, get_args

from sdp4bit.config import SDP4BitConfig

Strategy = Literal[
    "baseline",
    "qw",
    "qwd",
    "ulq",
    "tlq",
    "tlq-hs",
    "sdp4bit-paper",
    "sdp4bit",
    "sdp4bit-w3g3.5",
    "sdp4bit-w2g3",
    "sdp4bit-w2g2",
]
DEFAULT_STRATEGY: Strategy = "sdp4bit"
STRATEGIES: dict[Strategy, SDP4BitConfig] = {name: SDP4BitConfig.preset(name) for name in get_args(Strategy)}

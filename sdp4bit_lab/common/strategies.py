"""Name the strategies of the programs, which are the library's presets."""

from typing import Literal

from sdp4bit.config import PRESETS, SDP4BitConfig
from sdp4bit.config import Preset as Strategy

DEFAULT_STRATEGY: Strategy = "sdp4bit"
STRATEGIES: dict[Strategy, SDP4BitConfig] = {name: SDP4BitConfig.preset(name) for name in PRESETS}
StrategyOrAuto = Literal[Strategy, "auto"]
AUTO: Literal["auto"] = "auto"
"""The choice between some strategies, by the time of steps."""
__all__ = ["AUTO", "DEFAULT_STRATEGY", "STRATEGIES", "Strategy", "StrategyOrAuto"]

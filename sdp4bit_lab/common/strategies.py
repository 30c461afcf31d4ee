"""Name the strategies of the programs, which are the library's presets."""

from sdp4bit.config import PRESETS, SDP4BitConfig
from sdp4bit.config import Preset as Strategy

DEFAULT_STRATEGY: Strategy = "sdp4bit"
STRATEGIES: dict[Strategy, SDP4BitConfig] = {name: SDP4BitConfig.preset(name) for name in PRESETS}
__all__ = ["DEFAULT_STRATEGY", "STRATEGIES", "Strategy"]

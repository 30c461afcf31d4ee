"""Parse strategies with options, such as tlq-hs:gq-group-size-inter=64 in `compare --strategies`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sdp4bit_lab.common.options import parse
from sdp4bit_lab.common.settings import SettingError, option_flags, require
from sdp4bit_lab.common.strategies import STRATEGIES, Strategy
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One strategy of a comparison."""

    label: str
    """Strategy, followed after colons by its own options under their primary names."""
    strategy: Strategy
    communication: CommunicationConfig
    """Its own options, and those of the command that apply to the strategy."""

    @property
    def folder_name(self) -> str:
        """The label in characters that every file system and shell accepts."""
        return self.label.replace(":", "+")


def parse_variants(text: str, *, shared: CommunicationConfig) -> list[Variant]:
    """Parse a comma-separated list of variants.

    Args:
        text: value of --strategies.
        shared: options of the command, which apply to every strategy that uses them.

    Raises:
        SettingError: an unknown or repeated strategy, an unknown option, or conflicting options.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    require(bool(items), f"--strategies {text!r}: give at least one of {', '.join(STRATEGIES)}")
    try:
        variants = [parse_variant(item, shared=shared) for item in items]
    except SettingError as error:
        raise SettingError(f"--strategies: {error}") from error
    labels = [variant.label for variant in variants]
    for label in labels:
        require(labels.count(label) == 1, f"--strategies: {label} is given twice")
    return variants


def parse_variant(item: str, *, shared: CommunicationConfig) -> Variant:
    """Parse one variant; its label has the options that differ from `shared`, in order of definition."""
    name, *options = (part.strip() for part in item.split(":"))
    strategy = next((choice for choice in STRATEGIES if choice == name), None)
    if strategy is None:
        raise SettingError(f"{name!r} is unknown: use one of {', '.join(STRATEGIES)}")
    usable = shared.restricted_to(strategy)
    try:
        communication = parse(
            CommunicationConfig,
            [f"--{option.removeprefix('--')}" for option in options],
            prog=strategy,
            default=usable,
        )
        communication.resolve(strategy, seed=0)
    except SettingError as error:
        raise SettingError(f"{item}: {error}") from error
    parts: list[str] = [strategy]
    for field in fields(CommunicationConfig):
        value = getattr(communication, field.name)
        if value != getattr(usable, field.name):
            flag = option_flags(CommunicationConfig)[field.name][0].removeprefix("--")
            parts.append(flag if value is True else f"{flag}={value}")
    return Variant(label=":".join(parts), strategy=strategy, communication=communication)

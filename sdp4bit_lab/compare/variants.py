"""Strategies with options, as `compare --strategies` takes them: tlq-hs:gq-group-size-inter=64."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdp4bit.config import SDP4BitConfig
from sdp4bit_lab.common.settings import SettingError, option_flags, options_of
from sdp4bit_lab.pretrain.config.communication import STRATEGIES, CommunicationConfig, Strategy


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the strategies to compare."""

    label: str
    """Its strategy, and behind colons the options that were given for it alone, each by its first name."""
    strategy: Strategy
    communication: CommunicationConfig
    """These options, and those of the command that the strategy has a use for."""

    @property
    def folder_name(self) -> str:
        """The label, in characters that every file system and shell takes as they are."""
        return self.label.replace(":", "+")

    def quantization(self, *, seed: int) -> SDP4BitConfig:
        """Return the library's settings."""
        return self.communication.resolve(self.strategy, seed=seed)


def parse_variants(text: str, *, shared: CommunicationConfig) -> list[Variant]:
    """Return the variants of a list with commas between.

    Args:
        text: what stands behind --strategies.
        shared: options of the command, which hold for every strategy that has a use for them.

    Raises:
        SettingError: an unknown strategy or option, an option that changes nothing, the same settings twice.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise SettingError(f"--strategies {text!r}: give at least one of {', '.join(STRATEGIES)}")
    try:
        variants = [parse_variant(item, shared=shared) for item in items]
    except SettingError as error:
        raise SettingError(f"--strategies: {error}") from error
    found: dict[SDP4BitConfig, Variant] = {}
    labels: set[str] = set()
    for variant in variants:
        if variant.label in labels:
            raise SettingError(f"--strategies: {variant.label} is given twice: give each one once")
        other = found.setdefault(variant.quantization(seed=0), variant)
        if other is not variant:
            raise SettingError(
                f"--strategies: {other.label} and {variant.label} are the same settings: leave one out"
            )
        labels.add(variant.label)
    return variants


def parse_variant(item: str, *, shared: CommunicationConfig) -> Variant:
    """Return one variant, its label with the options' own names in the order of their definition."""
    name, *options = (part.strip() for part in item.split(":"))
    strategy = _strategy(name)
    given: dict[str, Any] = {}
    for option in options:
        field, value = _parse_option(option, item=item)
        if field in given:
            raise SettingError(f"{item} gives {_name(field)} twice: give it once")
        given[field] = value
    usable = shared.restricted_to(strategy)
    try:
        communication = replace(usable, **given)
        resolved = communication.resolve(strategy, seed=0)
    except SettingError as error:
        raise SettingError(f"{item}: {error}") from error
    for field, value in given.items():
        without = replace(communication, **{field: getattr(usable, field)})
        if resolved == _resolved(without, strategy):
            others = {other: kept for other, kept in given.items() if other != field}
            raise SettingError(
                f"{item}: {_name(field)} changes nothing, as {_label(strategy, others)} has that "
                "already: leave it out" + ("" if isinstance(value, bool) else ", or give another value")
            )
    return Variant(label=_label(strategy, given), strategy=strategy, communication=communication)


def _resolved(communication: CommunicationConfig, strategy: Strategy) -> SDP4BitConfig | None:
    """Return the library's settings; None where one of them needs an option that is not among them."""
    try:
        return communication.resolve(strategy, seed=0)
    except SettingError:
        return None


def _strategy(name: str) -> Strategy:
    for choice in STRATEGIES:
        if choice == name:
            return choice
    raise SettingError(f"{name!r} is unknown: use any of {', '.join(STRATEGIES)}")


def _label(strategy: str, given: Mapping[str, object]) -> str:
    parts = [strategy]
    for name, option in options_of(CommunicationConfig).items():
        if name in given:
            value, flag = given[name], option.flags[0].removeprefix("--")
            if option.is_switch:
                parts.append(flag if value else f"no-{flag}")
            else:
                parts.append(f"{flag}={value}")
    return ":".join(parts)


def _name(field: str) -> str:
    return option_flags(CommunicationConfig)[field][0].removeprefix("--")


def _parse_option(option: str, *, item: str) -> tuple[str, object]:
    """Return the field of the communication settings that is meant, and its value."""
    name, equals, text = (part.strip() for part in option.partition("="))
    name = name.removeprefix("--").replace("_", "-")
    known = _names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise SettingError(
            f"{item}: {name!r} is not an option of communication: "
            + (f"did you mean {near[0]}? " if near else "")
            + "`sdp4bit pretrain --help` lists them"
        )
    field, switched = known[name]
    if field in ("quantized_weights", "quantized_gradients"):
        raise SettingError(
            f"{item}: the strategy says what is quantized: leave {name} out, or choose another "
            f"of {', '.join(STRATEGIES)}"
        )
    if switched is not None:
        if equals:
            raise SettingError(f"{item}: {name} is a switch: write it without a value")
        return field, switched
    if not text:
        raise SettingError(f"{item}: {name} needs a value: write {name}=VALUE")
    try:
        return field, options_of(CommunicationConfig)[field].parse(text)
    except SettingError as error:
        raise SettingError(f"{item}: {name}={error}") from None


def _names() -> dict[str, tuple[str, bool | None]]:
    """Return what an option may be called, with its field and, for a switch, what the name alone means."""
    names: dict[str, tuple[str, bool | None]] = {}
    for field, option in options_of(CommunicationConfig).items():
        # The field's own name is what config.json calls it.
        for name in (*(flag.removeprefix("--") for flag in option.flags), field.replace("_", "-")):
            names[name] = (field, True if option.is_switch else None)
            if option.has_opposite:
                names[f"no-{name}"] = (field, False)
    return names

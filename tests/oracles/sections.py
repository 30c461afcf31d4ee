"""Rows in sections by definition: each section as if it were a row of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from sdp4bit.collectives.sections import Section, whole_row
from sdp4bit.config import GradientConfig, WeightConfig
from sdp4bit.quantization import definition
from sdp4bit.quantization.definition import Call
from tests.oracles import bounds

Config = TypeVar("Config", GradientConfig, WeightConfig)


def config_of(config: Config, section: Section) -> Config:
    """Return the settings of a row that holds only this section: norms and biases have 8 bits per value."""
    if not section.is_fine:
        return config
    if isinstance(config, WeightConfig):
        return replace(config, bits=config.bits and max(8, config.bits), group_size=32, clip=1.0)
    bits = {
        name: value and max(8, value)
        for name, value in (("intra_bits", config.intra_bits), ("inter_bits", config.inter_bits))
    }
    return replace(config, **bits, intra_group_size=32, inter_group_size=32)


def by_section(
    rows: Tensor, sections: Sequence[Section], compute: Callable[[Tensor, Section], Tensor]
) -> Tensor:
    """Return the results of the sections of rows [..., n] in place of the sections; () is a single one."""
    joined = torch.empty(0)
    for section in sections or whole_row(rows.shape[-1]):
        result = compute(section.take(rows), section)
        if not joined.numel():
            joined = torch.zeros(*result.shape[:-1], rows.shape[-1], dtype=result.dtype)
        section.take(joined).copy_(result)
        section.put(result, joined)
    return joined


def reduce_scatter(
    inputs: Tensor,
    sections: Sequence[Section],
    *,
    config: GradientConfig,
    seed: int,
    bucket: int,
    call: int,
    multiplier: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums [*sizes, values] of rows [*sizes, *sizes, values], and bounds of their errors."""
    sizes = inputs.shape[: inputs.dim() // 2]
    if not inputs.shape[-1]:
        return torch.zeros(*sizes, 0), torch.zeros(*sizes, 0)

    def sums(rows: Tensor, section: Section) -> Tensor:
        number = Call(seed, bucket, section.call(call))
        own = config_of(config, section)
        return definition.reduce_scatter(rows, config=own, call=number, multiplier=multiplier)

    def errors(rows: Tensor, section: Section) -> Tensor:
        return bounds.reduce_scatter(rows, config=config_of(config, section), multiplier=multiplier)

    return by_section(inputs, sections, sums), by_section(inputs, sections, errors)


def all_reduce(
    inputs: Tensor,
    sections: Sequence[Section],
    *,
    config: GradientConfig,
    seed: int,
    bucket: int,
    call: int,
    multiplier: float,
) -> Tensor:
    """Return the sum [values] of inputs [*sizes, values] that all ranks end with."""
    if not inputs.shape[-1]:
        return torch.zeros(0)

    def sums(rows: Tensor, section: Section) -> Tensor:
        return definition.all_reduce(
            rows,
            config=config_of(config, section),
            call=Call(seed, bucket, section.call(call)),
            multiplier=multiplier,
            unit=section.unit,
        )

    return by_section(inputs, sections, sums)


def refresh(replica: Tensor, mains: Tensor, sections: Sequence[Section], *, config: WeightConfig) -> Tensor:
    """Return the replica [ranks, n] after a refresh of these sections towards mains [ranks, n]."""
    refreshed = replica.clone()
    for section in sections or whole_row(mains.shape[-1]):
        if section.ranges:
            moved = definition.refresh(
                section.take(replica), section.take(mains), config=config_of(config, section)
            ).to(replica.dtype)
            section.take(refreshed).copy_(moved)
            section.put(moved, refreshed)
    return refreshed

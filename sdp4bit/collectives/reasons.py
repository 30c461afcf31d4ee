"""Reasons for full precision, as values: programs compare these, and never a sentence."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Cause(Enum):
    """Why weights or gradients are not quantized; its value is the sentence, with a place for a detail."""

    OFF = "off in the configuration"
    ONE_RANK = "one rank"
    ONE_NODE_WEIGHTS = 'full precision: sharded inside one node (WeightConfig(replica="full") quantizes)'
    ONE_NODE_GRADIENTS = (
        "full precision: all ranks on one node (GradientConfig(inside_one_node=True) quantizes)"
    )
    SKIPPED = "skipped{}"
    UNSUPPORTED = "{}"  # in the engine's words
    EVERYWHERE = "not sent: every rank has them all"
    SUMMED_IN_PLACE = "every rank sums them all"
    SPARSE = "full precision: sparse gradients"
    DTYPE = "full precision: {}"
    NOT_PLANNED = "not planned yet: a plan is made when it is first needed"


class Unquantized(NamedTuple):
    """A reason why weights or gradients are not quantized; its text is for people."""

    cause: Cause
    detail: str = ""

    def __str__(self) -> str:
        return self.cause.value.replace("{}", self.detail)


class FullReason(Enum):
    """Why a refresh in full precision is due; `observe/explain.py` has the sentences."""

    FIRST_USE = auto()
    REQUESTED = auto()  # by a call, by an interrupted refresh, or by the level of another rank
    LARGE = auto()  # an edit of more than LARGEST_SMALL_EDIT
    LOADED = auto()
    NONFINITE = auto()  # the refresh before held NaN or infinity
    CHECKPOINT = auto()  # rows of a checkpoint, which fit
    MISFIT = auto()  # rows of a checkpoint do not fit

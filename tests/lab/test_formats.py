"""Lists of formats in the programs are complete. Layer: no process."""

from __future__ import annotations

from typing import get_args

from sdp4bit.quantization.formats import choices
from sdp4bit_lab.pretrain.config import communication
from sdp4bit_lab.selftest.cases import ALL_BITS, HOPS


def test_programs_know_every_format() -> None:
    """The self-test's hops, and the choices of `sdp4bit pretrain`."""
    assert set(ALL_BITS) == {*choices(), 32}
    for side in zip(*HOPS, strict=True):
        assert {*choices(), 32} <= set(side)
    assert [*get_args(communication._Bits)] == choices()

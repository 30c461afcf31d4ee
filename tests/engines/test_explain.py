"""Rows of `explain()`. Layer: no process."""

from __future__ import annotations

from dataclasses import replace

from sdp4bit.observe.explain import TableRow, render
from sdp4bit.traffic import Traffic

LAYER = TableRow(
    name="",
    shard_numel=263_040,
    ranks="2 x 8",
    weights="int4/2048 difference, node replica",
    gradients="intra int8/128, inter int4/128, Hadamard",
    sent=Traffic(intra_bytes=20, inter_bytes=10, collectives=2),
)


def test_a_model_of_80_layers_fits_20_lines_and_full_shows_every_group() -> None:
    rows = [replace(LAYER, name="(root)", shard_numel=9), *(replace(LAYER, name=f"{i}") for i in range(80))]
    short, full = render(rows).splitlines(), render(rows, full=True).splitlines()
    assert len(short) < 20 and len(full) == 2 + 3 * 81 + 1
    assert "0 to 79, each of 80      263,040  2 x 8            20            10" in short
    # The total counts every group.
    assert short[-1].split() == full[-1].split() == ["total", "1,620", "810"]


def test_groups_with_other_numbers_or_reasons_have_their_own_row() -> None:
    more = replace(LAYER.sent, inter_bytes=11)
    differing = [replace(LAYER, name="a", sent=more), replace(LAYER, name="b", weights="one rank")]
    rows = [replace(LAYER, name="x"), *differing, replace(LAYER, name="y")]
    names = [line.split()[0] for line in render(rows).splitlines()[2:] if not line.startswith(" ")]
    assert names == ["x", "a", "b", "total"]
    assert "x to y, each of 2 " in render(rows)

"""The cuts of a row; test_properties.py compares the collectives of each section with the definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp4bit.collectives.sections import CutParam, cut_row

UNIT = 384
LAYOUTS = [(2, 2), (4, 1)]
NUMELS = [(100, False), (33, True), (2 * UNIT, False), (UNIT, False), (130, False), (1, True), (64, True)]
"""Values of each parameter of a row, and whether it is a norm or a bias."""
NUMEL = sum(numel for numel, _ in NUMELS)
PARAMETERS = [CutParam(numel=n, is_fine=fine, number=i) for i, (n, fine) in enumerate(NUMELS)]
SECTIONS = cut_row(PARAMETERS, unit=UNIT, count=len(NUMELS))


def test_a_row_is_cut_at_the_borders_of_its_parameters() -> None:
    first, aligned, fine = SECTIONS
    assert first.ranges == ((0, 100),) and first.unit == 32
    assert aligned.ranges == ((133, 263 + 3 * UNIT),) and aligned.unit == UNIT  # three matrices, aligned
    assert fine.ranges == ((100, 133), (263 + 3 * UNIT, 264 + 3 * UNIT), (264 + 3 * UNIT, NUMEL))
    assert fine.is_fine and fine.numel == 64 + 32 + 64
    assert [section.number for section in SECTIONS] == [0, 2, 1]


parameters = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0, 1, 32, 64, 128, 256, 384]), st.integers(0, 400)),
        st.booleans(),
        st.sampled_from([(), ("tensor",)]),
    ),
    max_size=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=parameters, unit=st.sampled_from([32, 64, 128]))
def test_no_block_and_no_group_has_values_of_two_parameters(
    drawn: list[tuple[int, bool, tuple[str, ...]]], unit: int
) -> None:
    owner = torch.cat([torch.full((n,), i) for i, (n, *_) in enumerate(drawn)] or [torch.empty(0)])
    row = [CutParam(numel=n, is_fine=fine, number=i, kind=k) for i, (n, fine, k) in enumerate(drawn)]
    sections = cut_row(row, unit=unit, count=len(row))
    seen = torch.zeros(len(owner), dtype=torch.int64)
    for section in sections:
        for start, end in section.ranges:
            seen[start:end] += 1
        # 0 fills a section up, so owners are counted from 1.
        taken = section.take(owner.double() + 1)
        assert len(taken) == section.numel
        for group in taken.split(32 if section.is_fine else unit):
            assert len(set(group.tolist()) - {0.0}) == 1
        members = [drawn[int(i) - 1] for i in set(taken.tolist()) - {0.0}]
        assert all(fine == section.is_fine for _, fine, _ in members)
        assert len({kind for *_, kind in members}) == 1
        back = torch.zeros(len(owner), dtype=torch.float64)
        section.take(back).copy_(taken)
        section.put(taken, back)
        assert torch.equal(section.take(back), taken)
    assert (seen == 1).all()
    assert len({section.number for section in sections}) == len(sections)
    assert len({section.call(call) for section in sections for call in range(3)}) == 3 * len(sections)


def test_the_numbers_of_copies_do_not_depend_on_what_is_split() -> None:
    """A tensor-parallel peer whose split parameters are shorter rounds the copies by the same bits."""

    def copies(split: int) -> list[tuple[int, int, int]]:
        row = [
            CutParam(numel=split, is_fine=False, number=0, kind="split"),
            CutParam(numel=64, is_fine=False, number=1),
            CutParam(numel=split, is_fine=True, number=2, kind="split"),
            CutParam(numel=40, is_fine=True, number=3),
        ]
        cut = cut_row(row, unit=32, count=4)
        return [(s.call(5), s.numel, s.unit) for s in cut if s.number in (1, 3)]

    assert copies(33) == copies(64) == [(21, 64, 32), (23, 40, 32)]

"""The state machine of weight refreshes is the table in docs/architecture.md.

Layer: a pure function, no process.
"""

from __future__ import annotations

import re

from sdp4bit.engines.fsdp2.refresh import Event, Refresh, State, next_refresh
from tests import ROOT


def documented() -> dict[tuple[State, Event], Refresh]:
    """Return the table: the state after an event, "-" for the same; for GATHER the refresh."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n### States of a replica\n")[2].partition("\n#")[0]
    header, _, *lines = (
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)
    )
    refreshes = {}
    for name, *cells in lines:
        state = State[name]
        for title, cell in zip(header[1:], cells, strict=True):
            event = Event[title]
            after = state if cell == "-" else State[cell] if cell in State.__members__ else State.CURRENT
            refreshes[state, event] = Refresh("none", "none", after)
            if event is Event.GATHER:
                kind, _, ranges = cell.rstrip(")").partition(" (")
                refreshes[state, event] = Refresh(kind, ranges or "none", State.CURRENT)  # type: ignore[arg-type]
    return refreshes


def test_every_event_in_every_state_is_as_documented() -> None:
    pairs = {(state, event): next_refresh(state, event) for state in State for event in Event}
    assert pairs == documented()


def test_only_current_weights_need_no_refresh_and_only_differences_from_finite_ones_are_sent() -> None:
    """Whatever has happened, a refresh of the kind that the state needs follows at the next gather."""
    for state in State:
        refresh = next_refresh(state, Event.GATHER)
        assert (refresh.kind == "none") == (state is State.CURRENT)
        assert refresh.is_full == (state not in (State.CURRENT, State.STEPPED, State.EDITED))

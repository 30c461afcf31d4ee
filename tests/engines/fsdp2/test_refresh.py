"""The state machine of weight refreshes: every pair of a state and an event.

Layer: a pure function, no process. docs/architecture.md shows the same table; a test compares them.
"""

from __future__ import annotations

import re

from sdp4bit.engines.fsdp2.refresh import Event, Refresh, State, next_refresh
from tests import ROOT

TABLE = """
| | STEP | SMALL_EDIT | LARGE_CHANGE | NONFINITE | WEIGHTS_LOADED | RESYNC | STATE_LOADED | STEPPED_STATE_LOADED | MISFIT | GATHER |
| NEVER | - | - | - | - | - | - | LOADED | LOADED_STEPPED | - | full |
| CURRENT | STEPPED | EDITED | FULL_DUE | - | FULL_DUE | FULL_DUE | LOADED | LOADED_STEPPED | - | none |
| STEPPED | - | EDITED | FULL_DUE | NOT_FINITE | FULL_DUE | FULL_DUE | LOADED | LOADED_STEPPED | - | difference (trained) |
| EDITED | - | - | FULL_DUE | NOT_FINITE | FULL_DUE | FULL_DUE | LOADED | LOADED_STEPPED | - | difference (row) |
| LOADED | LOADED_STEPPED | - | - | - | - | FULL_DUE | - | LOADED_STEPPED | FULL_DUE | checkpoint |
| LOADED_STEPPED | - | - | FULL_DUE | - | - | FULL_DUE | LOADED | - | FULL_DUE | checkpoint, difference (trained) |
| FULL_DUE | - | - | - | - | - | - | LOADED | LOADED_STEPPED | - | full |
| NOT_FINITE | - | - | - | - | FULL_DUE | FULL_DUE | LOADED | LOADED_STEPPED | - | full |
"""  # noqa: E501
"""The state after an event, "-" for the same; for GATHER the refresh, after which a group is CURRENT."""


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table in Markdown, without its rule."""
    lines = [line for line in table.strip().splitlines() if not set(line) <= set("|-: ")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def expected() -> dict[tuple[State, Event], Refresh]:
    header, *lines = rows(TABLE)
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
        # A backward uses the weights of its forward.
        refreshes[state, Event.GATHER_IN_BACKWARD] = Refresh("none", "none", state)
    return refreshes


def test_every_event_in_every_state() -> None:
    pairs = {(state, event): next_refresh(state, event) for state in State for event in Event}
    assert pairs == expected()


def test_only_current_weights_need_no_refresh_and_only_differences_from_finite_ones_are_sent() -> None:
    """Whatever has happened, a refresh of the kind that the state needs follows at the next gather."""
    for state in State:
        refresh = next_refresh(state, Event.GATHER)
        assert (refresh.kind == "none") == (state is State.CURRENT)
        assert refresh.is_full == (state not in (State.CURRENT, State.STEPPED, State.EDITED))


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n### States of a replica\n")[2].partition("\n#")[0]
    shown = rows("\n".join(re.findall(r"^\|.*\|$", section, re.MULTILINE)))
    assert shown == rows(TABLE)

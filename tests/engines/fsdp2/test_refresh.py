"""The table of weight refreshes is the one in docs/architecture.md.

Layer: a pure function, no process.
"""

from __future__ import annotations

from sdp4bit.engines.fsdp2.freshness import Event, State, decision_table, next_refresh
from tests import ROOT


def test_the_documentation_shows_the_table_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("\n### States of a replica\n")[2].partition("\n#")[0]
    assert f"\n\n{decision_table()}\n\n" in section


def test_only_current_weights_need_no_refresh_and_only_differences_from_finite_ones_are_sent() -> None:
    """Whatever has happened, a refresh of the kind that the state needs follows at the next gather."""
    for state in State:
        refresh = next_refresh(state, Event.GATHER)
        assert refresh.state is State.CURRENT
        assert (refresh.kind == "none") == (state is State.CURRENT)
        assert refresh.is_full == (state not in (State.CURRENT, State.STEPPED, State.EDITED))
        events = [next_refresh(state, event) for event in Event if event is not Event.GATHER]
        assert all(each[:2] == ("none", "none") for each in events)

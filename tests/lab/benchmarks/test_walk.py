"""The page of a step names the functions that a step runs, in their order. Layer: 4 processes over gloo."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import walk
from tests.ranks import run_ranks


@pytest.mark.gloo
def test_the_page_names_the_functions_of_a_step() -> None:
    # Where operators are checked, a step records again to compare.
    trace, *_ = run_ranks(walk.traced_step, walk.RANKS, backend="auto", checked=False)
    written = walk.PAGE.read_text(encoding="utf-8")
    assert walk.without_counts(written) == walk.without_counts(walk.page(trace)), "run benchmarks.walk"
    # The links alone, so that a pattern which removes too much would show.
    stops = [name.partition(":")[2] for part in walk.STOPS.values() for name in part.stops]
    assert len(stops) in range(25, 42) and all(f"[`{stop}`](../sdp4bit/" in written for stop in stops)


def complete() -> walk.Trace:
    """Return a trace in which every stop runs two lines."""
    calls = {key: [*part.stops] for key, part in walk.STOPS.items()}
    return walk.Trace(calls=calls, lines={name: {1, 2} for names in calls.values() for name in names})


def test_stops_that_do_not_run_and_long_functions_without_a_reason_are_named() -> None:
    trace = complete()
    walk.page(trace)
    calls = {**trace.calls, "backward": trace.calls["backward"][1:]}
    with pytest.raises(ValueError, match=r"AllGatherHook\._gather_replica no longer runs in backward"):
        walk.page(replace(trace, calls=calls))
    lines = {**trace.lines, "a.module:new": {*range(walk.MOST_LINES + 1)}}
    with pytest.raises(ValueError, match=f"a.module:new runs {walk.MOST_LINES + 1} lines and has no reason"):
        walk.page(replace(trace, lines=lines))


def test_the_order_of_a_page_is_that_of_the_trace() -> None:
    trace = complete()
    trace.calls["optimizer"].reverse()
    section = walk.page(trace).partition("## Optimizer step")[2]
    assert section.index("`FSDPModelState.reshard`") < section.index("`StepObserver.note_step`")

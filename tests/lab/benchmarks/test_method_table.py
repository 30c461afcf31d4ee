"""The table of methods, from results that the test makes up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.method_table import Sources, method_table
from benchmarks.tables import Results

STRATEGIES = {
    **{"fsdp2": 8.0, "fair": 7.0, "fair-bf16": 6.0, "ddp": 5.0, "ddp-bf16": 4.0, "ddp-powersgd": 3.0},
    **{"ddp-sdp4bit": 1.7, "sdp4bit": 1.5, "sdp4bit-w3g3.5": 1.4, "sdp4bit-w2g2": 1.3, "compute": 0.1},
}


def cluster() -> dict[str, Any]:
    rows = [
        {"strategy": name, "rate": "100mbit", "seconds_per_step": value, "tx_bytes_per_node_per_step": 80.0}
        for name, value in STRATEGIES.items()
    ]
    return {"parameters": 10, "rows": rows}


def cells(**changes: Any) -> dict[str, list[str]]:
    """Return the cells of each row by its method."""
    results = Results()
    given = {"cluster": cluster(), "accuracy": results.accuracy, "hooks": results._study("ddp_hooks")}
    runs = [
        {"setting": {"every": every, "replicas": replicas, "seed": seed, **more}, "loss": loss}
        for every, replicas, seed, more, loss in (
            *((0, 2, seed, {}, 2.0) for seed in (1, 2)),
            *((every, 2, seed, {"bits": 4}, 2.0 + 0.02 * seed) for every in (8, 32) for seed in (1, 2)),
            # Others, which the table does not take.
            *((0, 4, 1, {}, 9.0), (8, 2, 1, {}, 9.0), (8, 2, 1, {"bits": 4, "tokens": 4096}, 9.0)),
        )
    ]
    lines = method_table(Sources(**{**given, "local_steps": runs, **changes})).replace("\xa0", " ")
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_local_steps_share_an_exchange_and_take_the_runs_of_their_setting() -> None:
    row = cells()["8 local steps (DiLoCo), 4 bits"]
    assert row[:2] == ["0.30", "1.00"]  # 0.1 + (1.7 - 0.1) / 8 seconds, 80 / 10 / 8 bytes
    assert row[2].startswith("+1.50 % (-4.85 to +7.85")  # 1 and 2 %, Student's t


def test_methods_are_in_the_order_of_seconds_and_have_their_own_losses() -> None:
    rows = cells()
    assert list(rows)[-1] == "FSDP2, gloo's own collectives" and rows["DDP"][2] == "0"
    seconds = [float(row[0]) for row in rows.values()]
    assert seconds == sorted(seconds) and len(rows) == 12
    assert rows["DDP, PowerSGD of rank 4"][2].startswith("+2.93 %")


def test_a_missing_loss_is_an_error() -> None:
    with pytest.raises(StopIteration):
        cells(accuracy=[])

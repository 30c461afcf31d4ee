"""`comm.load`: checkpoints with the handle's state, with a part of it, and without; a save after a load.

Layer: gloo, 2 processes as 2 nodes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sdp4bit import WeightConfig
from tests import toy
from tests.engines.fsdp2.test_checkpoint import (
    FOREIGN,
    LIMIT,
    NODE,
    Job,
    assert_refreshed_in_full,
    expect_warnings,
)
from tests.ranks import on_ranks


def continued(folder: Path, job: Job, *, has_state: bool) -> list[float]:
    """Load model and optimizer as usual, then the handle; return the losses of two steps."""
    job.load(str(folder), comm="not")
    expected = [] if has_state else [f"the checkpoint {folder} has no 'comm', the state of this handle"]
    with expect_warnings(*expected):
        assert job.comm.load(folder) == has_state
    return job.train(2)


@on_ranks(2, timeout=LIMIT)
def test_load_takes_full_partial_and_plain_checkpoints(tmp_path: Path) -> None:
    """Exactly, with a refresh in full precision of the part that was not saved, and with one of all."""
    job = Job(NODE, topology=1)
    job.train(1)
    state = job.comm.state_dict()
    half = {
        name: dict(list(part.items())[: len(part) // 2]) if isinstance(part, dict) else part
        for name, part in state.items()
    }
    assert 0 < len(half["replica"]) < len(state["replica"])
    job.save(str(tmp_path / "full"), comm=job.comm)
    job.save(str(tmp_path / "partial"), comm=half)
    job.save(str(tmp_path / "plain"))
    losses = job.train(2)

    assert continued(tmp_path / "full", Job(NODE, topology=1, at=1), has_state=True) == losses
    for name, has_state in (("partial", True), ("plain", False)):
        resumed = Job(NODE, topology=1, at=1)
        found = continued(tmp_path / name, resumed, has_state=has_state)
        assert found == pytest.approx(losses, abs=0.05), name
        assert resumed.comm.audit()
        toy.assert_replicas_identical(resumed.comm)


@on_ranks(2, timeout=LIMIT)
def test_a_save_after_a_load_that_no_forward_has_used_continues_bit_for_bit(tmp_path: Path) -> None:
    """Loaded weights are refreshed in full precision at the next forward, in the resumed run too."""
    job = Job(NODE, topology=1)
    job.train(1)
    job.logits()  # sends the difference of the step
    job.model.load_state_dict(job.model.state_dict())
    job.save(str(tmp_path), comm=job.comm)
    losses = job.train(2)
    assert job.comm.stats()["full_refreshes"] == len(job.comm.groups)
    resumed = Job(NODE, topology=1, at=1)
    with expect_warnings("the loaded communication state was not saved with these weights"):
        assert resumed.load(str(tmp_path), comm="after").train(2) == losses


@on_ranks(2)
def test_rows_that_the_same_ranks_saved_on_other_nodes_are_not_used() -> None:
    full = replace(NODE, weights=WeightConfig(replica="full"))
    apart, together = Job(full, topology=1), Job(full, topology=2)
    apart.train(1)
    with expect_warnings(FOREIGN):
        together.comm.load_state_dict(apart.comm.state_dict())
        together.model.load_state_dict(apart.model.state_dict())
        assert_refreshed_in_full(together)

"""Where a run starts, the store of a start, and a soak of kills under torchrun.

Layer: no process, threads, and for the soak torchrun with 2 ranks.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from sdp4bit import ExchangeError
from sdp4bit_lab.common.launch.store import join_store
from sdp4bit_lab.pretrain.checkpoint import Start, choose_start
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from tests.lab.common.launch.soak import Soak, plan, run_soak
from tests.lab.pretrain.saved_runs import save_step
from tests.ranks import one_rank


def test_where_a_run_starts(tmp_path):
    mine, other, empty = tmp_path / "mine", tmp_path / "other", tmp_path / "empty"
    same_spelled_otherwise = tmp_path / "other" / ".." / "mine"
    with one_rank():
        save_step(mine, 4, job="a job")
        save_step(other, 4)

        def start(job: str | None = None, **config: Path | bool) -> Start:
            return choose_start(CheckpointConfig(**config), job=job)

        beginning = Start()
        goes_on = Start(folder=mine, continues=True)
        assert start() == start(save=mine) == start(save=mine, job="another job") == beginning
        assert start(load=other) == Start(folder=other)
        assert start(save=mine, load=other) == Start(folder=other)
        # Asked for.
        assert start(save=mine, auto_resume=True) == goes_on
        assert start(save=mine, load=other, auto_resume=True) == goes_on
        assert start(save=mine, load=same_spelled_otherwise) == goes_on
        # There is nothing yet: the same command line begins.
        assert start(save=empty, auto_resume=True) == start(save=empty, load=empty) == beginning
        assert start(save=empty, load=other, auto_resume=True) == Start(folder=other)
        # torchrun has restarted the processes of the job that saved.
        assert start(save=mine, job="a job") == start(save=mine, load=other, job="a job") == goes_on
        (mine / "step-00000004" / "run.json").write_text("{")
        assert start(save=mine, job="a job") == beginning
        # Damaged is not the same as empty: the run must not silently start anew.
        assert start(save=mine, auto_resume=True) == goes_on


def join(
    store: dist.Store, order: list[int], *, seconds: float = 30
) -> dict[int, tuple[str, str] | Exception]:
    """Return what each rank of a world of 3 got, started in this order; keys show whose part it is."""
    outcomes: dict[int, tuple[str, str] | Exception] = {}

    def run(rank: int) -> None:
        try:
            part, job = join_store(store, rank=rank, world_size=3, timeout=timedelta(seconds=seconds))
            part.add("members", 1)
            deadline = time.monotonic() + seconds
            while part.add("members", 0) < len(order) and time.monotonic() < deadline:
                time.sleep(0.01)
            outcomes[rank] = (str(part.add("members", 0)), job)
        except ExchangeError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return outcomes


def test_processes_of_a_new_start_never_meet_what_old_ones_left():
    store = dist.HashStore()
    jobs = set()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        outcomes = join(store, order)
        # All three, and nobody of an earlier start, are in one part of the store.
        assert [members for members, _ in outcomes.values()] == ["3", "3", "3"]
        jobs |= {job for _, job in outcomes.values()}
    assert len(jobs) == 1

    # Ranks that are missing are named, though they have left traces at earlier starts.
    outcomes = join(store, [0, 2], seconds=1)
    assert "rank 0 waited for rank 1 until the timeout" in str(outcomes[0])
    assert "3" in {members for members, _ in join(store, [2, 1, 0]).values()}


def test_a_plan_holds_all_kinds_of_faults():
    faults = plan(Soak(kills=50))
    signals = [fault["signal"] for fault in faults]
    assert [signals.count(name) for name in ("SIGKILL", "SIGTERM", "SIGSTOP")] == [39, 6, 5]
    phases = {fault["phase"] for fault in faults}
    assert {"forward", "exchange", "optimizer", "checkpoint write", "random"} <= phases


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_under_torchrun_goes_on_by_itself_to_the_same_losses(tmp_path):
    soak = Soak(kills=3, ranks=2, ranks_per_node=1, steps=24, timeout_seconds=60)
    account = run_soak(soak, tmp_path)
    assert account["equal"], account["first_difference"]
    assert account["kills"] == 3 and account["every_load_took_the_latest"]
    assert account["left_in_the_folder"] == ["step-00000020", "step-00000024"]

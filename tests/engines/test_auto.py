"""The choice of settings by the time of steps: which candidate wins, and how the steps on the way train.

Layers: no process for the choice, by a clock that only the test moves; real processes over gloo.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import sdp4bit
from sdp4bit import Auto, GradientConfig, SDP4BitConfig, WeightConfig
from sdp4bit.engines import auto as module
from sdp4bit.engines.auto import Search
from sdp4bit.engines.fsdp2.hooks import AllGatherHook
from tests.engines.ddp.test_hook import DDPRun
from tests.engines.fsdp2.test_checkpoint import Job
from tests.engines.fsdp2.test_parallelism import TensorParallelRun
from tests.ranks import first_rank_warns, on_ranks, run_ranks
from tests.toy import IDENTITY, LOSSLESS, QUANTIZED, Run, adamw, build, loss_of

SMALL = Auto(warmup_steps=1, block_steps=4, rounds=2)
"""As the default, but with 26 steps until the choice."""
CHOICE_AFTER = 1 + 1 + 3 * 2 * 4  # marks: the beginning, the warm-up, and the blocks


class Trained:
    """A search and the training that it steers, on one rank; steps take the seconds that the test says."""

    def __init__(
        self,
        seconds: Callable[[str, int], float],
        auto: Auto | None = None,
        *,
        candidates: Sequence[str] = ("plain", "bf16-wire", "sdp4bit"),
        maximum: Callable[[Sequence[float]], Sequence[float]] = list,
    ) -> None:
        self.now, self.used, self.agreements = 0.0, list[Any](), 0
        self.refusal, self._seconds, self._maximum = "", seconds, maximum
        self.search = Search(
            auto or Auto(),
            candidates,
            use=self.used.append,
            refusal=lambda: self.refusal,
            maximum=self._agree,
            device=None,
            ranks=[0],
        )
        self.steps: list[str] = []  # the candidate of each

    def _agree(self, values: Sequence[float]) -> Sequence[float]:
        self.agreements += 1
        return self._maximum(values)

    def train(self, steps: int) -> Trained:
        with (
            mock.patch.object(module.time, "perf_counter", side_effect=lambda: self.now),
            mock.patch.object(module.dist, "get_rank", return_value=0),
        ):
            for _ in range(steps):
                self.steps.append(self.search.candidate)
                self.now += self._seconds(self.search.candidate, len(self.steps))
                self.search.note_step()
                self.search.begin_pass()
        return self

    @property
    def chosen(self) -> str | None:
        return self.search.candidate if self.search.is_chosen else None


def by_name(**seconds: float) -> Callable[[str, int], float]:
    names = {"plain": "plain", "bf16": "bf16-wire", "ours": "sdp4bit"}
    table = {names[name]: each for name, each in seconds.items()}
    return lambda name, step: table[name]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        (by_name(plain=4.0, bf16=3.0, ours=1.0), "sdp4bit"),
        (by_name(plain=1.0, bf16=1.2, ours=1.4), "plain"),
        (by_name(plain=1.3, bf16=1.0, ours=1.2), "bf16-wire"),
        # Within 2 % the more exact one wins, and beyond it does not.
        (by_name(plain=1.019, bf16=1.015, ours=1.0), "plain"),
        (by_name(plain=1.03, bf16=1.019, ours=1.0), "bf16-wire"),
        (by_name(plain=1.03, bf16=1.021, ours=1.0), "sdp4bit"),
    ],
)
def test_the_fastest_wins(seconds: Callable[[str, int], float], chosen: str) -> None:
    assert Trained(seconds).train(83).chosen == chosen


def test_a_slow_first_step_an_evaluation_and_a_checkpoint_do_not_count() -> None:
    """Every switch costs 60 seconds in its first step, and every 5th step has a pause of 100."""
    before = [""]

    def seconds(name: str, step: int) -> float:
        is_first, before[0] = before[0] != name, name
        own = {"plain": 1.0, "bf16-wire": 1.1, "sdp4bit": 0.9}[name]
        return own + 60 * is_first * (name == "sdp4bit") + 100 * (step % 5 == 0)

    assert Trained(seconds).train(83).chosen == "sdp4bit"


def test_the_third_to_fifth_of_six_steps_are_timed() -> None:
    """Step n of a block takes n seconds, or ten times as many with the slow candidates."""
    found = Trained(lambda name, step: ((step - 12) % 6 + 1) * (1 if name == "sdp4bit" else 10)).train(83)
    assert found.search.medians() == {"plain": 40.0, "bf16-wire": 40.0, "sdp4bit": 4.0}


def test_a_candidate_within_the_spread_of_the_fastest_stays() -> None:
    """Blocks of sdp4bit take 1 or 1.3 seconds a step in turns, those of bf16-wire always 1.2."""
    blocks: list[str] = []

    def seconds(name: str, step: int) -> float:
        if (step - 12) % 6 == 0:
            blocks.append(name)
        return {"plain": 5.0, "bf16-wire": 1.2}.get(name, 1.0 if blocks.count(name) % 2 else 1.3)

    assert Trained(seconds).train(83).steps.count("bf16-wire") == 24


class OfDevice:
    """Marks that only this clock takes, as events of a GPU."""

    def __init__(self, host: Any, *, behind: float = 0.0) -> None:
        self._host, self.behind = host, behind

    def mark(self) -> tuple[str, float]:
        return "event", self._host.mark()

    def has_passed(self, point: tuple[str, float]) -> bool:
        return point[1] <= self._host.mark() - self.behind

    def seconds(self, start: tuple[str, float], end: tuple[str, float]) -> float:
        assert start[0] == end[0] == "event" and self.has_passed(end)
        return end[1] - start[1]


def test_the_search_reads_the_clock_of_the_device_and_the_watch_that_of_the_host() -> None:
    found = Trained(lambda name, step: {"plain": 3.0, "bf16-wire": 2.0}.get(name, 1.0 if step < 300 else 9.0))
    found.search._clock = OfDevice(found.search._host)
    assert found.train(299).chosen == "sdp4bit"
    assert found.train(280).chosen == "bf16-wire"


def test_a_block_goes_on_until_the_device_has_done_its_timed_steps() -> None:
    """The host is 2.5 steps of a second ahead, so that each block takes two steps more."""
    found = Trained(by_name(plain=1.0, bf16=1.0, ours=1.0))
    found.search._clock = OfDevice(found.search._host, behind=2.5)
    found.train(11 + 8)
    assert found.steps == ["plain"] * 19 and found.search.candidate == "bf16-wire"
    assert found.train(11 * 8).chosen == "plain"


def test_a_slow_spell_longer_than_a_block_does_not_decide() -> None:
    """It makes two of the fastest candidate's steps slow, and with it all steps of its neighbours."""
    times = by_name(plain=1.0, bf16=0.95, ours=0.8)
    found = Trained(lambda name, step: times(name, step) * (3 if 36 <= step <= 47 else 1)).train(83)
    assert found.chosen == "sdp4bit"


def test_clearly_slower_candidates_drop_out_after_two_rounds() -> None:
    auto = Auto(candidates=("plain", "bf16-wire", "sdp4bit", "sdp4bit-w2g2"))
    found = Trained(
        lambda name, step: {"plain": 9.0, "bf16-wire": 5.0}.get(name, 1.0), auto, candidates=auto.candidates
    ).train(83)
    assert found.chosen == "sdp4bit"
    assert {name: found.steps.count(name) for name in auto.candidates[:2]} == {
        "plain": 11 + 12,
        "bf16-wire": 12,
    }
    assert found.steps.count("sdp4bit-w2g2") == 24


def test_the_slowest_rank_decides() -> None:
    """The other rank's steps take 2 seconds with sdp4bit, and are fast without it."""
    found: list[Trained] = []

    def maximum(values: Sequence[float]) -> Sequence[float]:
        steps, least, is_refused, *seconds = values
        is_slow = found[0].search.candidate == "sdp4bit"
        return [steps, least, is_refused, *(max(each, 2.0 if is_slow else 0.1) for each in seconds)]

    found.append(Trained(by_name(plain=1.0, bf16=1.2, ours=0.3), maximum=maximum))
    assert found[0].train(83).chosen == "plain"


def test_nothing_runs_after_a_choice_that_stays() -> None:
    found = Trained(by_name(plain=3.0, bf16=2.0, ours=1.0), Auto(recheck_steps=None)).train(100)
    assert found.chosen == "sdp4bit"
    with mock.patch.object(module.time, "perf_counter", side_effect=AssertionError("a clock was read")):
        found.search.begin_pass()
    given = Trained(by_name(plain=1.0), candidates=["plain"]).train(300)
    assert given.chosen == "plain" and not given.agreements


def test_ranks_agree_once_per_block_and_once_per_window() -> None:
    found = Trained(by_name(plain=1.0, bf16=1.0, ours=1.0)).train(83)
    assert found.agreements == 1 + 12 and found.chosen == "plain"
    assert found.train(501).agreements == 1 + 12 + 10


def test_a_lasting_change_of_the_time_begins_a_new_search(caplog: pytest.LogCaptureFixture) -> None:
    """The link becomes ten times slower, so that fewer bytes pay."""

    def seconds(name: str, step: int) -> float:
        return (
            {"plain": 1.0, "bf16-wire": 0.9, "sdp4bit": 1.2}[name]
            if step < 300
            else ({"plain": 9.0, "bf16-wire": 5.0, "sdp4bit": 2.0}[name])
        )

    found = Trained(seconds).train(299)
    assert found.chosen == "bf16-wire"
    caplog.clear()
    found.train(250)
    assert found.chosen == "sdp4bit"
    again, chose = (record.getMessage() for record in caplog.records)
    assert again == "auto measures again: a step takes 5.00 s now, 900 ms before"
    assert re.fullmatch(
        r"auto chose sdp4bit after \d+ steps \(plain 9.00 s, bf16-wire 5.00 s, sdp4bit 2.00 s a step\)", chose
    )


def test_a_passing_change_does_not() -> None:
    """60 slow steps reach into two windows, but are the median of one at most."""
    times = by_name(plain=1.0, bf16=0.9, ours=1.2)
    found = Trained(lambda name, step: times(name, step) * (9 if 201 <= step <= 260 else 1)).train(600)
    assert set(found.steps[83:]) == {"bf16-wire"}


def test_many_steps_begin_a_new_search() -> None:
    found = Trained(by_name(plain=1.0, bf16=0.9, ours=1.2), Auto(recheck_steps=400)).train(83)
    found.train(401)
    assert not found.search.is_chosen
    assert found.train(83).chosen == "bf16-wire"


def test_a_rank_that_cannot_switch_delays_all() -> None:
    found = Trained(by_name(plain=3.0, bf16=2.0, ours=1.0), SMALL).train(2)
    found.refusal = "block 3 holds gradients"
    with pytest.warns(UserWarning, match="auto cannot switch yet: block 3 holds gradients"):
        found.train(5)
    found.train(20)
    assert set(found.steps) == {"plain"}  # one warning, and no switch
    found.refusal = ""
    found._maximum = lambda values: [*values[:2], 1.0, *values[3:]]  # of a rank that refuses
    assert set(found.train(20).steps) == {"plain"}
    found._maximum = list
    assert found.train(CHOICE_AFTER).chosen == "sdp4bit"


def test_steps_inside_a_pause_are_left_out_and_the_block_begins_again() -> None:
    found = Trained(by_name(plain=3.0, bf16=2.0, ours=1.0), SMALL).train(4)
    with found.search.paused(), found.search.paused():
        found.train(100)
    assert found.steps == ["plain"] * 104
    found.train(4)
    assert found.search.candidate == "plain"  # the first of these ends no step of the block
    assert found.train(1).search.candidate == "bf16-wire"
    assert found.search.medians() == {"plain": 3.0}


def test_ranks_in_different_passes_raise() -> None:
    found = Trained(by_name(plain=1.0), maximum=lambda values: [values[0], values[1] + 1, *values[2:]])
    with pytest.raises(RuntimeError, match="some ranks begin training pass 10 and others 11"):
        found.train(30)


def test_a_state_holds_the_choice_for_the_same_candidates() -> None:
    found = Trained(by_name(plain=3.0, bf16=2.0, ours=1.0))
    assert found.search.state()[1] == -1
    state = found.train(83).search.state()
    resumed = Trained(by_name(plain=1.0, bf16=2.0, ours=1.0))
    with mock.patch.object(module.dist, "get_rank", return_value=1):
        resumed.search.load(state)
    assert resumed.chosen == "sdp4bit" and len(resumed.used) == 1
    other = Auto(candidates=("plain", "sdp4bit-w2g2", "sdp4bit"))
    for auto, saved in ((other, state), (Auto(), None), (Auto(), torch.tensor([state[0], -1]))):
        searching = Trained(lambda *_: 1.0, auto, candidates=[*auto.named()]).train(20)
        searching.search.load(saved)
        assert searching.chosen is None
        assert searching.train(83).chosen == "plain"


def test_passes_without_a_step_warn_once_and_prolong_the_warm_up() -> None:
    found = Trained(by_name(plain=3.0, bf16=2.0, ours=1.0), SMALL)
    with (
        mock.patch.object(module, "warn_user") as warned,
        mock.patch.object(module.dist, "get_rank", return_value=0),
    ):
        for _ in range(300):
            found.search.begin_pass()
    assert warned.call_count == 1 and "128 training passes but no optimizer step" in warned.call_args[0][0]
    assert found.agreements == 8  # at passes 2, 4, 8, ..., 256
    assert found.train(512 + CHOICE_AFTER).chosen == "sdp4bit"


def test_a_step_of_several_passes_is_timed_as_a_whole() -> None:
    """Five passes of different lengths a step; the settings change only between two steps."""
    found = Trained(lambda name, step: {"plain": 4.0, "bf16-wire": 3.0, "sdp4bit": 2.0}[name], SMALL)
    switched = []

    def use(config: object) -> None:
        switched.append(passes)

    found.search._use = use
    now = 0.0
    with (
        mock.patch.object(module.time, "perf_counter", side_effect=lambda: now),
        mock.patch.object(module.dist, "get_rank", return_value=0),
    ):
        for passes in range(5 * 30):
            if passes and passes % 5 == 0:
                found.search.note_step()
            found.search.begin_pass()
            now += {"plain": 4.0, "bf16-wire": 3.0, "sdp4bit": 2.0}[found.search.candidate] * (1 + passes % 5)
    assert found.search.medians() == {"plain": 60.0, "bf16-wire": 45.0, "sdp4bit": 30.0}
    assert found.chosen == "sdp4bit" and switched and all(passes % 5 == 0 for passes in switched)
    # Passes 2, 4 and 8 end no warm-up with a step, 9 and 10 are none, 11 begins a step; then one per block.
    assert found.agreements == 6 + 6


def test_a_rank_that_sees_no_step_follows_the_others() -> None:
    """Its shards are empty, and the other rank's optimizer alone steps; no decision is this rank's own."""
    other = Trained(by_name(plain=3.0, bf16=2.0, ours=1.0), SMALL)
    told: list[Sequence[float]] = []

    def follow(values: Sequence[float]) -> Sequence[float]:
        return [max(pair) for pair in zip(values, told.pop(0), strict=True)]

    without = Trained(by_name(plain=0.0), SMALL, maximum=follow)
    other._maximum = lambda values: told.append(values) or values  # type: ignore[func-returns-value]
    with mock.patch.object(module.dist, "get_rank", return_value=1):
        for _ in range(CHOICE_AFTER):
            other.train(1)
            without.search.begin_pass()
    assert without.chosen == other.chosen == "sdp4bit"
    assert without.search.medians() == other.search.medians() and not told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ()}, "at least one"),
        ({"candidates": "sdp4bit"}, "must be a list of presets"),
        ({"candidates": ("plain", "plain")}, "must be different"),
        ({"candidates": ("plain", "nonsense")}, "unknown preset 'nonsense'"),
        ({"candidates": ("plain", "auto")}, "needs FSDP2 or DDP"),
        ({"choice": "qwd"}, "auto.choice='qwd' is unknown: use one of plain, bf16-wire, sdp4bit"),
        ({"block_steps": 3}, "at least 4"),
        ({"rounds": 0}, "at least 1"),
        ({"recheck_steps": 0}, "at least 1"),
        ({"warmup_steps": -1}, "at least 0"),
        ({"candidates": ("bf16-wire", SDP4BitConfig(seed=1))}, r"candidates differ in seed \(0, 1\)"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Auto(**options)


# Real processes


def settings(**options: Any) -> Auto:
    return Auto(**{"warmup_steps": 1, "block_steps": 4, "rounds": 2, "recheck_steps": None, **options})


def without_quantizers(*, hybrid: bool = False) -> Auto:
    # HSDP shards inside a node, whose replica quantizes nothing unless every rank holds it.
    lossless = replace(LOSSLESS, weights=WeightConfig(bits=None, replica="full"))
    return settings(candidates=("plain", lossless if hybrid else LOSSLESS, IDENTITY))


def trained(config: Any, steps: int, *, topology: int = 1, hybrid: bool = False) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")) if hybrid else None
    run = Run(build(mesh=mesh), config, topology=topology).train(steps)
    if config is not None:
        candidates = run.comm._search.medians()
        assert len(candidates) == len(config.candidates), candidates
    return run.finish()


@on_ranks(2)
def test_without_quantizers_every_block_trains_as_plain_fsdp2_does() -> None:
    assert trained(without_quantizers(), 32) == trained(None, 32)


@pytest.mark.slow
@on_ranks(4)
def test_with_replicas_too() -> None:
    auto = without_quantizers(hybrid=True)
    assert trained(auto, 32, topology=2, hybrid=True) == trained(None, 32, topology=2, hybrid=True)


@on_ranks(2)
def test_without_quantizers_every_block_trains_as_ddp_does() -> None:
    exact = SDP4BitConfig(gradients=GradientConfig(intra_bits=None, inter_bits=None, min_numel=0))
    found = []
    for config in (settings(candidates=("plain", exact)), None):
        run = DDPRun(config)
        for _ in range(24):
            run.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        found.append(run.losses)
        if config is not None:
            assert run.state.stats()["auto"]["is_chosen"] and len(run.state.stats()["auto"]["seconds"]) == 2
    assert found[0] == found[1]


def train_timed(run: Run | Job, seconds: Mapping[str, float], steps: int) -> None:
    """Train; steps take the seconds of their candidates, and a tenth more on rank 1."""
    now = 0.0
    with mock.patch.object(module.time, "perf_counter", side_effect=lambda: now):
        for _ in range(steps):
            now += seconds[run.comm.stats()["auto"]["candidate"]] * (1 + dist.get_rank() / 10)
            run.train(1)


@on_ranks(2)
def test_the_choice_is_reported_and_trains_as_its_settings_do() -> None:
    run = Run(build(), settings(), topology=1)
    said = "auto still measures, now with plain: the model communicates as without sdp4bit"
    assert run.comm.explain() == said
    handler = mock.Mock(level=logging.WARNING)
    logging.getLogger("sdp4bit").addHandler(handler)
    train_timed(run, {"plain": 4.0, "bf16-wire": 2.0, "sdp4bit": 1.0}, CHOICE_AFTER)
    logging.getLogger("sdp4bit").removeHandler(handler)
    said = "chose sdp4bit after 26 steps (plain 4.40 s, bf16-wire 2.20 s, sdp4bit 1.10 s a step)"
    logged = [call.args[0].getMessage() for call in handler.handle.call_args_list]
    assert logged == [f"auto {said}"] * (dist.get_rank() == 0)
    stats = run.comm.stats()["auto"]
    assert stats["candidate"] == "sdp4bit" and stats["is_chosen"]
    assert stats["seconds"] == pytest.approx({"plain": 4.4, "bf16-wire": 2.2, "sdp4bit": 1.1})
    assert run.comm.config == SDP4BitConfig()
    assert all(group.weights.replica is not None for group in run.comm.groups)
    run.train(1)
    # As text on one line, because explain() wraps it.
    assert "auto chose sdp4bit (plain 4.40 s" in " ".join(run.comm.explain().split())
    assert run.comm.stats()["compression_ratio"] > 4


@on_ranks(2)
def test_a_choice_of_plain_frees_the_replicas_and_calls_nothing_of_ours() -> None:
    run = Run(build(), settings(), topology=1)
    train_timed(run, {"plain": 1.0, "bf16-wire": 2.0, "sdp4bit": 4.0}, CHOICE_AFTER)
    assert run.comm.stats()["auto"]["candidate"] == "plain"
    assert not any(isinstance(group.view.comms.all_gather, AllGatherHook) for group in run.comm.groups)
    assert all(group.weights.replica is None and not group.gradients.quantizers for group in run.comm.groups)
    with run.comm.full_precision():
        run.train(1)
    with pytest.raises(RuntimeError, match="quantization is off"):
        run.comm.time_steps(lambda: run.train(1))
    run.train(1).finish()


@on_ranks(2)
def test_a_given_choice_trains_as_the_settings_alone() -> None:
    for name in ("sdp4bit", "bf16-wire", "plain"):
        alone = None if name == "plain" else name
        given = Run(build(), Auto(choice=name), topology=1).train(3)
        assert given.comm.stats()["auto"] == {"candidate": name, "is_chosen": True, "seconds": {}}
        assert given.finish() == Run(build(), alone, topology=1).train(3).finish()


@on_ranks(2)
def test_on_one_node_plain_is_left() -> None:
    with first_rank_warns("all parameter groups have their ranks on one node"):
        run = Run(build(), "auto", topology=2)
    assert run.train(2).finish() == Run(build(), None).train(2).finish()
    assert "only plain is left" in run.comm.explain()


def save_and_resume(folder: str, seconds: Mapping[str, float], before: int, resumes: str | None) -> None:
    run = Job(settings(), topology=1)
    train_timed(run, seconds, before)
    run.save(folder, comm=run.comm)
    resumed = [Job(settings(), topology=1, at=before).load(folder, comm=when) for when in ("before", "after")]
    if resumes is None:
        assert not resumed[0].comm.stats()["auto"]["is_chosen"]
        train_timed(resumed[0], seconds, CHOICE_AFTER)
        assert resumed[0].comm.stats()["auto"]["is_chosen"]
        return
    expected = run.train(3)
    for each in resumed:
        auto = each.comm.stats()["auto"]
        assert (auto["candidate"], auto["is_chosen"]) == (resumes, True)
        assert each.train(3) == expected


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("seconds", "before", "resumes"),
    [
        ({"plain": 4.0, "bf16-wire": 2.0, "sdp4bit": 1.0}, CHOICE_AFTER + 2, "sdp4bit"),
        ({"plain": 4.0, "bf16-wire": 1.0, "sdp4bit": 2.0}, CHOICE_AFTER + 2, "bf16-wire"),
        ({"plain": 1.0, "bf16-wire": 1.0, "sdp4bit": 1.0}, CHOICE_AFTER + 2, "plain"),
        ({"plain": 1.0, "bf16-wire": 1.0, "sdp4bit": 1.0}, 13, None),  # in a block of sdp4bit
        ({"plain": 1.0, "bf16-wire": 1.0, "sdp4bit": 1.0}, 4, None),  # in a block of plain
    ],
)
def test_a_resume_goes_on_with_the_choice(
    tmp_path: Path, seconds: dict[str, float], before: int, resumes: str | None
) -> None:
    run_ranks(save_and_resume, 2, str(tmp_path), seconds, before, resumes)


@on_ranks(2)
def test_full_precision_and_removal_inside_a_block_of_each_candidate() -> None:
    for before in (3, 7, 11):  # in the first blocks of plain, bf16-wire and sdp4bit
        run = Run(build(), without_quantizers(), topology=1).train(before)
        with run.comm.full_precision():
            run.train(2)
        with pytest.raises(RuntimeError, match='while config="auto" measures'):
            run.comm.time_steps(dist.barrier)
        run.train(2)
        run.comm.remove()
        assert run.train(1).finish() == Run(build(), None).train(before + 5).finish()


@on_ranks(2)
def test_accumulation_and_two_optimizers() -> None:
    """The blocks are of optimizer steps, whatever passes they consist of."""
    finished = []
    for config in (without_quantizers(), None):
        run = Run(build(), config, topology=1)
        parameters = [*run.model.parameters()]
        optimizers = [adamw(run.model, params=half) for half in (parameters[::2], parameters[1::2])]
        for _ in range(28):
            for is_last in (False, True):
                run.model.set_requires_gradient_sync(is_last)
                run.backward()
            for optimizer in optimizers:
                optimizer.step()
            run.model.zero_grad()
        finished.append(run.finish())
        if config is not None:
            stats = run.comm.stats()["auto"]
            assert len(stats["seconds"]) == 3
    assert finished[0] == finished[1]


@on_ranks(2)
def test_steps_that_gradscaler_skips_because_of_one_rank() -> None:
    finished = []
    for config in (without_quantizers(), None):
        run, scaler = Run(build(), config, topology=1), torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(40):
            scaler.scale(loss_of(run.model, next(run.data))).backward()
            if number % 6 == 1 and dist.get_rank() == 1:
                run.model.head.weight.grad.to_local()[0, 0] = float("inf")
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
        finished.append([run.evaluate(), scaler.get_scale()])
        if config is not None:
            assert run.comm.stats()["auto"]["is_chosen"]
    assert finished[0] == finished[1] and finished[0][1] < 0.1


@on_ranks(2)
def test_a_rank_without_an_optimizer_of_torch_does_not_stop_the_others() -> None:
    """Rank 1 changes its shards by hand. No rank waits for another, and both train as plain FSDP2 does."""
    finished = []
    for config in (without_quantizers(), None):
        run = Run(build(policy=MixedPrecisionPolicy()), config, topology=1)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for _ in range(28):
            run.backward()
            if dist.get_rank() == 0:
                run.optimizer.step()
            else:
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
            run.model.zero_grad()
        finished.append(run.losses)
        if config is not None:
            assert len(run.comm.stats()["auto"]["seconds"]) == 3
    assert finished[0] == finished[1]


@on_ranks(2)
def test_optimizers_in_backward() -> None:
    finished = []
    for config in (without_quantizers(), None):
        run = Run(build(policy=MixedPrecisionPolicy()), config, topology=1)
        for parameter in run.model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.01)

            def step(_: object, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(32):
            run.backward()
        finished.append(run.finish())
        if config is not None:
            assert run.comm.stats()["auto"]["is_chosen"]
    assert finished[0] == finished[1]


@on_ranks(2)
def test_two_models_search_independently() -> None:
    runs = [Run(build(), settings(), topology=1) for _ in range(2)]
    train_timed(runs[0], {"plain": 1.0, "bf16-wire": 2.0, "sdp4bit": 3.0}, CHOICE_AFTER)
    assert runs[1].comm.stats()["auto"]["candidate"] == "plain" and not runs[1].comm._search._passes
    train_timed(runs[1], {"plain": 9.0, "bf16-wire": 2.0, "sdp4bit": 1.0}, CHOICE_AFTER)
    assert [run.comm.stats()["auto"]["candidate"] for run in runs] == ["plain", "sdp4bit"]


def lose_rank_1(step: int) -> None:
    run = Run(build(), settings(), topology=1).train(step)
    if dist.get_rank() == 1:
        run.comm._search.begin_pass = lambda: os.kill(os.getpid(), signal.SIGKILL)
    run.train(1)


@pytest.mark.gloo
def test_a_rank_that_is_lost_at_the_end_of_a_block_is_named() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(lose_rank_1, 2, 5, timeout=60)
    assert 'ExchangeError: agreement of config="auto": rank 0 has waited' in str(failure.value)


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallel_ranks_choose_together() -> None:
    """They hold copies of the norms, which settings of their own would round differently."""
    for slow_rank, chosen in ((0, "plain"), (3, "plain"), (None, "settings 2")):
        run = TensorParallelRun(settings(candidates=("plain", QUANTIZED)), topology=1)
        quantized = 9.0 if dist.get_rank() == slow_rank else 1.0
        train_timed(run, {"plain": 2.0, "settings 2": quantized}, CHOICE_AFTER)
        assert run.comm.stats()["auto"]["candidate"] == chosen
        run.check_copies()


@on_ranks(2)
def test_only_fsdp2_and_ddp_search() -> None:
    with pytest.raises(ValueError, match="needs FSDP2 or DDP: name a preset here"):
        sdp4bit.engines.attach_engine([], install=lambda group: lambda: None, config="auto")


@on_ranks(2)
def test_different_candidates_on_ranks_are_refused() -> None:
    auto = Auto(rounds=4 + dist.get_rank())
    with pytest.raises(ValueError, match=r"config.rounds: 4 \[rank 0\], 5 \[rank 1\]"):
        Run(build(), auto, topology=1)

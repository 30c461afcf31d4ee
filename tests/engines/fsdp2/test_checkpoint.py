"""Checkpoints of an attached model through torch.distributed.checkpoint: exact resume, or a full refresh.

Layer: gloo, 4 processes as 2 nodes x 2 ranks. Exact resumes and other numbers of ranks run in new processes,
other layouts in the same ones, with new models.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig, quantize_communication
from sdp4bit.collectives.weights import Due
from sdp4bit.quantization.ops import checksum
from tests import ROOT, toy
from tests.engines.fsdp2.jobs import Job
from tests.ranks import first_rank_warns, on_ranks, run_ranks

pytestmark = pytest.mark.gloo

NODE = SDP4BitConfig(gradients=GradientConfig(min_numel=0))
RANDOM = SDP4BitConfig(
    weights=WeightConfig(replica="full"),
    gradients=GradientConfig(min_numel=0, inter_rounding="dither"),
)
"""All rounding is by random bits, which a resumed run must draw again."""
BEFORE = 1
LIMIT = 240.0


@contextmanager
def expect_warnings(*beginnings: str) -> Iterator[None]:
    """The library warns like this on the first rank, and not otherwise."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if str(w.message).startswith("sdp4bit: ")]
    if dist.get_rank() != 0:
        beginnings = ()
    assert len(texts) == len(beginnings), texts
    for text, beginning in zip(texts, beginnings, strict=True):
        assert text.startswith(f"sdp4bit: {beginning}"), text


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield the warnings that the library logs meanwhile."""
    handler, lines = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdp4bit").addHandler(handler)
    yield lines
    logging.getLogger("sdp4bit").removeHandler(handler)


FOREIGN = (
    "the loaded communication state was not saved with these weights, by these ranks and with this layout"
)


@lru_cache
def plain_twin() -> Job:
    return Job(None)


def assert_refreshed_in_full(job: Job, after: str = "") -> None:
    """The next forward equals that of plain FSDP2 with the same weights, and replicas are identical."""
    logits, plain = job.logits(), plain_twin()
    plain.model.load_state_dict(job.model.state_dict())
    assert torch.equal(logits, plain.logits()), after
    toy.assert_replicas_identical(job.comm)


# -- resume -------------------------------------------------------------------------------------------


def levels_of(comm: Any) -> set[tuple[Due, bool]]:
    """Return what is due in the groups, and whether rows of a checkpoint go first."""
    return {(group.weights.due, group.weights.is_from_checkpoint) for group in comm.groups}


def save_and_go_on(folder: str, config: SDP4BitConfig, after: int) -> tuple[list[float], list[int]]:
    job = Job(config, topology=dist.get_world_size() // 2)
    job.train(BEFORE)
    job.save(f"{folder}/after-step", comm=job.comm)
    job.logits()
    assert all(comm.weights.is_current for comm in job.comm.groups)
    job.save(f"{folder}/after-eval", comm=job.comm.state_dict())
    return job.train(after), job.bits()


def resume(folder: str, config: SDP4BitConfig, exact: list[tuple[list[float], list[int]]]) -> None:
    """Losses, weights, replicas and counters are those of the run that was not interrupted."""
    losses, bits = exact[dist.get_rank()]
    start = partial(Job, topology=dist.get_world_size() // 2, at=BEFORE)
    with expect_warnings(), logged() as lines:
        job = start(config).load(f"{folder}/after-step", comm="before")
        assert job.comm.stats()["steps"] == BEFORE
        assert job.train(len(losses)) == losses
        assert job.bits() == bits
        # A replica on every rank holds what one per node holds.
        placement = "node" if config.weights.replica == "full" else "full"
        other = replace(config, weights=replace(config.weights, replica=placement))
        assert start(other).load(f"{folder}/after-eval", comm="after").train(2) == losses[:2]
        assert lines == []
        # Without the communication's state the replica starts from the weights: other losses, but close.
        job = start(config).load(f"{folder}/after-step", comm="not")
        with logged() as lines:
            without = job.train(2)
        assert [line.startswith("weights were loaded without") for line in lines] == [True] * (
            dist.get_rank() == 0
        )
    assert without != losses[:2]
    assert max(abs(a - b) for a, b in zip(without, losses, strict=False)) < 0.05


@pytest.mark.parametrize(
    ("config", "ranks", "after"),
    [
        pytest.param(NODE, 2, 3, id="node"),
        pytest.param(RANDOM, 4, 20, id="full-stochastic-20-steps", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_continues_bit_for_bit(
    config: SDP4BitConfig, ranks: int, after: int, tmp_path: Path
) -> None:
    exact = run_ranks(save_and_go_on, ranks, str(tmp_path), config, after, timeout=LIMIT)
    run_ranks(resume, ranks, str(tmp_path), config, exact, timeout=LIMIT)


@on_ranks(2, timeout=LIMIT)
def test_a_run_that_goes_back_in_its_own_process_repeats_itself(tmp_path: Path) -> None:
    """It was saved with nothing pending, and loads after a step that no forward has used."""
    job = Job(NODE, topology=1)
    job.train(BEFORE)
    job.logits()
    job.save(str(tmp_path), comm=job.comm)
    expected = job.train(2), job.bits(), job.comm.stats()["steps"]
    for comm in ("before", "after"):
        job.load(str(tmp_path), comm=comm).data = toy.batches()
        for _ in range(BEFORE):
            next(job.data)
        with expect_warnings():
            assert (job.train(2), job.bits(), job.comm.stats()["steps"]) == expected, comm


def weights_of(job: Job) -> list[int]:
    """Return checksums of the main weights of all ranks."""
    job.model.reshard()
    return [int(checksum(cast(DTensor, param).full_tensor().detach())) for param in job.model.parameters()]


def save_and_digest(folder: str, topology: int) -> list[int]:
    job = Job(NODE, topology=topology)
    job.train(BEFORE)
    job.save(folder, comm=job.comm)
    return weights_of(job)


def resume_elsewhere(folder: str, topology: int, weights: list[int]) -> None:
    """Another number of ranks or nodes: warned about, refreshed in full precision, and trains on."""
    job, plain = Job(NODE, topology=topology), Job(None)
    with expect_warnings(FOREIGN):
        job.load(folder, comm="after")
        assert weights_of(job) == weights
        assert_refreshed_in_full(job)
    losses, expected = job.train(2), plain.load(folder, comm="not").train(2)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 0.05
    toy.assert_replicas_identical(job.comm)
    assert job.comm.stats()["steps"] == BEFORE + 2


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((4, 2), (2, 1), id="fewer ranks"),
        pytest.param((2, 1), (4, 2), id="a node comes back", marks=pytest.mark.slow),
    ],
)
def test_other_ranks_resume_from_a_refresh_in_full_precision(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    """Ranks, and ranks per node; other nodes of the same ranks are below."""
    (weights, *_) = run_ranks(save_and_digest, saved[0], str(tmp_path), saved[1], timeout=LIMIT)
    run_ranks(resume_elsewhere, loaded[0], str(tmp_path), loaded[1], weights, timeout=LIMIT)


# -- foreign state ------------------------------------------------------------------------------------


@on_ranks(2, timeout=LIMIT)
def test_foreign_state_is_used_on_no_rank(tmp_path: Path) -> None:
    """State that does not belong to these weights on every rank is used on none."""
    job = Job(NODE, topology=1)
    job.train(BEFORE)
    weights, rank = job.model.state_dict(), dist.get_rank()
    torch.save(job.comm.state_dict(), f"{tmp_path}/{rank}.pt")
    dist.barrier()
    own, of_first_rank = (torch.load(f"{tmp_path}/{name}.pt", weights_only=True) for name in (rank, 0))

    def loaded(state: dict[str, Any]) -> Job:
        fresh = Job(NODE, topology=1)
        fresh.comm.load_state_dict(state)
        fresh.model.load_state_dict(weights)
        return fresh

    # Each rank its own: used, and that makes a difference.
    with expect_warnings():
        fresh = loaded(own)
        expected = job.logits()
        assert torch.equal(fresh.logits(), expected)
        assert fresh.bits()[1::4] == job.bits()[1::4]
        fresh.comm.resync()
        assert not torch.equal(fresh.logits(), expected)

    # What one rank saved, loaded by all; the same again, saved before anybody noticed.
    fresh = loaded(of_first_rank)
    for candidate in (fresh, loaded(fresh.comm.state_dict())):
        with expect_warnings(FOREIGN):
            assert_refreshed_in_full(candidate)

    # Another last bit of one weight on one rank.
    if rank == 1:
        weights["head.weight"].to_local().view(torch.int32)[0, 0] += 1
    with expect_warnings(FOREIGN):
        assert_refreshed_in_full(loaded(own))


def equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(one[key], other[key]) for key in one)
    if isinstance(one, DTensor):
        one, other = one.to_local(), other.to_local()
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@on_ranks(2, timeout=LIMIT)
def test_what_is_no_communication_state_is_an_error_and_changes_nothing() -> None:
    job = Job(NODE, topology=1)
    job.train(1)
    state = job.comm.state_dict()
    wrong: dict[str, Any] = {
        "a NoneType": None,
        "it lacks format_version, steps, counters, replica, fingerprints": {},
        "it lacks replica": {key: value for key, value in state.items() if key != "replica"},
        "has format 2, but this version of sdp4bit reads 3": {**state, "format_version": 2},
        "counters, replica should be dictionaries": {**state, "counters": None, "replica": [1]},
    }
    for message, content in wrong.items():
        with pytest.raises(ValueError, match=message):
            job.comm.load_state_dict(content)
        assert equal_states(job.comm.state_dict(), state)


# -- loads that bypass the handle ---------------------------------------------------------------------


def scaled(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value * 0.9 for name, value in state.items()}


def load_in_place(model: nn.Module, folder: str) -> None:
    """Let the checkpoint's values appear in the model's tensors, as dcp.load does, and call nothing else."""
    state = model.state_dict()
    dcp.save(scaled(state), checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)


@on_ranks(2, timeout=LIMIT)
def test_loads_that_bypass_the_handle_lead_to_a_refresh_in_full_precision(tmp_path: Path) -> None:
    """Right after a step in training mode, when an edit would be part of the step's quantized difference."""
    loads: dict[str, Callable[[nn.Module], Any]] = {
        "load_state_dict": lambda m: m.load_state_dict(scaled(m.state_dict())),
        "set_model_state_dict": lambda m: set_model_state_dict(m, scaled(m.state_dict())),
        "inner submodule": lambda m: m.head.load_state_dict(scaled(m.head.state_dict())),
        "in place": lambda m: load_in_place(m, str(tmp_path)),
    }
    job = Job(NODE, topology=1)
    # Once, for three loads in a row, on one rank.
    with expect_warnings("weights were sent in full precision 3 times in a row, now because: weights wer"):
        for name, load in loads.items():
            job.train(1)
            with torch.no_grad():
                load(job.model)
                assert_refreshed_in_full(job, name)


@on_ranks(2, timeout=LIMIT)
def test_the_documented_functions_save_resume_and_roll_back(tmp_path: Path) -> None:
    page = (ROOT / "docs/script-checkpoints.md").read_text(encoding="utf-8")
    (functions,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    def documented(job: Job) -> dict[str, Any]:
        names = {"model": job.model, "optimizer": job.optimizer, "comm": job.comm}
        exec(functions, names)
        return names

    job = Job(NODE, topology=1)
    job.train(1)
    weights, with_state, plain = weights_of(job), str(tmp_path / "with"), str(tmp_path / "without")
    documented(job)["save"](with_state)
    model, optimizer = get_state_dict(job.model, job.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=plain)
    losses = job.train(2)

    for folder, due in ((with_state, (Due.TRAINED, True)), (plain, (Due.FULL, False))):
        resumed = Job(NODE, topology=1, at=1)
        documented(resumed)["load"](folder)
        assert weights_of(resumed) == weights
        assert levels_of(resumed.comm) == {due}
        assert (resumed.train(2) == losses) == (folder == with_state)

    documented(job)["load"](with_state)
    job.data = Job(None, at=1).data
    assert weights_of(job) == weights and job.train(2) == losses


# -- what is saved ------------------------------------------------------------------------------------


def leaves(state: Any) -> Iterator[Any]:
    if type(state) is dict:
        for key, value in state.items():
            assert type(key) is str
            yield from leaves(value)
    else:
        yield state


@on_ranks(2, timeout=LIMIT)
def test_saving_changes_nothing_and_holds_plain_values(tmp_path: Path) -> None:
    job, twin = Job(NODE, topology=1), Job(NODE, topology=1)
    plain = plain_twin().model.state_dict()
    template = job.comm.state_dict()
    losses = []
    for _ in range(2):
        losses += job.train(1)
        assert equal_states(job.comm.state_dict(), job.comm.state_dict())
    assert losses == twin.train(2)
    state = job.comm.state_dict()
    assert not equal_states(state, template)
    assert [type(leaf) for leaf in leaves(state)] == [type(leaf) for leaf in leaves(template)]
    assert {type(leaf) for leaf in leaves(state)} == {torch.Tensor, DTensor}

    ours = job.model.state_dict()
    assert list(ours) == list(plain) and ours.keys() == state["replica"].keys()
    for name, value in ours.items():
        like, row = plain[name], state["replica"][name]
        assert (type(value), value.dtype, value.shape) == (DTensor, torch.float32, like.shape)
        assert row.shape == like.shape and row.placements == value.placements == like.placements

    # The handle is a Stateful. A template from before the first forward is filled like any other.
    dcp.save({"comm": job.comm}, checkpoint_id=f"{tmp_path}/later")
    twin.comm.resync()
    dcp.load({"comm": twin.comm}, checkpoint_id=f"{tmp_path}/later")
    dcp.load({"comm": template}, checkpoint_id=f"{tmp_path}/later")
    assert equal_states(twin.comm.state_dict(), state) and equal_states(template, state)
    full = Job(replace(NODE, weights=None), topology=1)
    full.train(1)
    full.comm.load_state_dict(state := full.comm.state_dict())
    assert equal_states(full.comm.state_dict(), state)


@on_ranks(2, timeout=LIMIT)
def test_a_save_in_the_background_of_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The thread that saves has a process group of its own.

    Ranks could begin its collectives and those of the training in different orders.
    """
    job, own_group = Job(NODE, topology=1), dist.new_group()
    job.train(BEFORE)
    for number, comm in enumerate(("before", "after")):
        model, optimizer = get_state_dict(job.model, job.optimizer)
        pending = dcp.async_save(
            {"model": model, "optimizer": optimizer, "comm": job.comm},
            checkpoint_id=f"{tmp_path}/{number}",
            process_group=own_group,
        )
        expected = job.train(2), job.bits()
        pending.result()
        resumed = Job(NODE, topology=1, at=BEFORE + 2 * number)
        with expect_warnings():
            resumed.load(f"{tmp_path}/{number}", comm=comm)
            assert (resumed.train(2), resumed.bits()) == expected


# -- other layouts: pipeline stages, nodes, HSDP, settings ------------------------------------------------


class Stage(nn.Module):
    """A stage of a pipeline whose parameters have names of their own; the second one has a layer more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        names = [str(10 * number + index) for index in range(2 + number)]
        self.layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in names})
        # With parameters in the root, all stages have a group of the same name.
        own = [f"scale{number}", "shift"][: 1 + number]
        self.own = nn.ParameterDict({name: nn.Parameter(torch.ones(64)) for name in own})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + torch.relu(layer(x))
        for parameter in self.own.values():
            x = x * parameter
        return x


def stage(number: int, dp: Any) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(number)
    model = Stage(number)
    for layer in model.layers.values():
        fully_shard(layer, mesh=dp, mp_policy=toy.POLICY)
    fully_shard(model, mesh=dp, mp_policy=toy.POLICY)
    comm = quantize_communication(model, topology=1, config=toy.QUANTIZED)
    return model, comm, torch.optim.SGD(model.parameters(), lr=0.1)


def train_stage(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(4, 64) * (1 + dist.get_rank())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(4)
def test_stages_of_unequal_size_resume_bit_for_bit(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh["pp"].get_local_rank()
    model, comm, optimizer = stage(number, mesh["dp"])
    train_stage(model, optimizer, 1)
    dcp.save({"model": model.state_dict(), "comm": comm}, checkpoint_id=tmp_path)
    losses = train_stage(model, optimizer, 2)
    model, comm, optimizer = stage(number, mesh["dp"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.load({"model": model.state_dict(), "comm": comm}, checkpoint_id=tmp_path)
        assert train_stage(model, optimizer, 2) == losses


def laid_out(kind: str) -> tuple[nn.Module, Any]:
    """Return a model of 4 ranks and its handle; the layouts have names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if kind == "HSDP" else None
    model = toy.build(mesh=mesh)
    config: SDP4BitConfig = toy.QUANTIZED
    if kind == "full-precision weights":
        config = replace(config, weights=None)
    if kind == "full-precision gradients":
        config = replace(config, gradients=None)
    return model, quantize_communication(model, topology=4 if kind == "one node" else 2, config=config)


CHAIN = ["full-precision gradients", "HSDP", "one node", "full-precision weights", "two nodes"]
"""What each saves, the next one loads."""


@pytest.mark.slow
@on_ranks(4, timeout=240)
def test_another_layout_starts_from_the_main_weights(tmp_path: Path) -> None:
    """The first forward equals that of plain FSDP2 with the same weights; plain `dcp.load` raises nothing."""
    batch, plain = next(toy.batches(seed=9))[0], toy.build()
    for number, kind in enumerate(CHAIN):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, comm = laid_out(kind)
            if number:
                saved = f"{tmp_path}/{number - 1}"
                plain_state = plain.state_dict()
                dcp.load({"model": plain_state}, checkpoint_id=saved)
                dcp.load({"model": model.state_dict(), "comm": comm}, checkpoint_id=saved)
                with torch.no_grad():
                    assert torch.equal(model(batch), plain(batch)), kind
                    plain.reshard()
                toy.assert_replicas_identical(comm, may_be_alone=True)  # as with HSDP
                assert comm.stats()["steps"] == number
            toy.train(model, toy.adamw(model), toy.batches(), 1)
            dcp.save({"model": model.state_dict(), "comm": comm}, checkpoint_id=f"{tmp_path}/{number}")
            comm.remove()


@on_ranks(2)
def test_an_edit_that_no_forward_has_used_survives_a_resume() -> None:
    """Saved between an edit and the next forward: the resumed run computes with the edited weights.

    The last forward before the edit used finite weights, or weights that left NaN in the replica.
    """
    run = toy.Run(toy.build(), toy.QUANTIZED, topology=1).train(2)
    edited = [param.detach() * 0.9 for param in run.model.parameters()]
    for factor in (1.0, math.nan):
        run.model.reshard()
        with torch.no_grad():
            torch._foreach_mul_(list(run.model.parameters()), factor)
            run.evaluate()
            run.model.reshard()
            for param, value in zip(run.model.parameters(), edited, strict=True):
                param.data.copy_(value)
        resumed = toy.Run(toy.build(), toy.QUANTIZED, topology=1)
        resumed.model.load_state_dict(run.model.state_dict())
        resumed.comm.load_state_dict(run.comm.state_dict())
        assert levels_of(resumed.comm) == {(Due.NOTHING, True)}
        with first_rank_warns("was not saved with these weights"):
            loss = resumed.evaluate()
        assert math.isfinite(loss) and loss == run.evaluate()


def frozen_late(folder: Path | None) -> Any:
    """Freeze a part from the start, and another between backward and step; a resume then sends as much."""
    run = toy.Run(toy.build(), toy.QUANTIZED, topology=1, fused=None, foreach=False)
    block = run.model.blocks[0]
    block.ln1.requires_grad_(False)
    if folder is None:
        run.train(1)
        run.backward()
    block.fc1.requires_grad_(False)
    if folder is None:
        run.step()
    return run


@on_ranks(2, timeout=LIMIT)
def test_a_resume_after_freezing_in_a_step_is_bit_identical(tmp_path: Path) -> None:
    run, resumed = frozen_late(None), frozen_late(tmp_path)
    dcp.save({"comm": run.comm, "model": run.model.state_dict()}, checkpoint_id=str(tmp_path))
    dcp.load({"comm": resumed.comm, "model": resumed.model.state_dict()}, checkpoint_id=str(tmp_path))
    assert resumed.evaluate() == run.evaluate()
    for mine, theirs in zip(resumed.comm.groups, run.comm.groups, strict=True):
        assert torch.equal(mine.weights.replica.own_shard, theirs.weights.replica.own_shard)
        assert mine.edits.trained == theirs.edits.trained

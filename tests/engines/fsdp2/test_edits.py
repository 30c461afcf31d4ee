"""FSDP2 integration: how edits and loads are found, agreed on and sent, and what steps may change.

Layer: real processes over gloo, 2 or 4 ranks, in as few starts as possible. Each of the ways in which users
edit weights (`weight_edits.py`) is tried with plain FSDP2, with replicas in full precision (equal bit for
bit) and with the default method.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sdp4bit import SDP4BitConfig, quantize_communication
from sdp4bit.engines.fsdp2 import events
from sdp4bit.quantization.layout import MessageLayout
from tests import mutations
from tests.engines.fsdp2 import weight_edits
from tests.engines.fsdp2.edited_runs import WAYS, check_way
from tests.ranks import on_ranks, run_ranks
from tests.tables import flat
from tests.toy import (
    IDENTITY,
    LOSSLESS,
    POLICY,
    QUANTIZED,
    Result,
    Run,
    adamw,
    assert_close_to_plain,
    assert_equal,
    assert_replicas_identical,
    build,
    data_mesh,
    gradient_of,
    loss_of,
)

pytestmark = pytest.mark.gloo

WHOLE_ROWS = replace(QUANTIZED, separate_parameters=False)
PRELOAD = [weight_edits.__name__]  # which registers the ways
QUICK = [
    *("averaged_model", "weight_decay_by_hand", "pruning_mask", "frozen_weights", "one_rank_alone"),
    *("between_micro_batches", "checkpoint_in_place"),
]
"""One way of each kind, which the quick tests try."""


def fresh_groups(run: Run) -> set[str]:
    """Return the groups whose replica row equals this rank's main shard, as after a full refresh."""
    return {
        g.view.name
        for g in run.comm.groups
        if torch.equal(g.weights.replica.own_shard, g.view.main_shard(g.weights.replica.rows.dtype))
    }


def sent_weights(run: Run) -> dict[str, float]:
    """Return what each group's weights sent to other nodes since the last optimizer step."""
    return {g.view.name: g.weights.traffic.current_step.inter_bytes for g in run.comm.groups}


def difference_bytes(run: Run) -> dict[str, float]:
    """Return what a 4-bit difference of each group's row takes."""
    return {
        g.view.name: MessageLayout(numel=g.view.shard_numel, bits=4, group_size=2048).nbytes
        for g in run.comm.groups
    }


def check_sizes() -> None:
    """Small edits travel as 4-bit differences, large ones in full precision; only of groups edited."""
    run = Run(build(), WHOLE_ROWS, topology=1).train(2)
    run.evaluate()
    usual = difference_bytes(run)
    assert sent_weights(run) == usual and not fresh_groups(run)

    def edit_block(factor: float) -> dict[str, float]:
        before = sent_weights(run)
        run.model.reshard()
        for parameter in run.model.blocks[1].parameters():
            parameter.data.mul_(factor)
        run.evaluate()
        return {name: sent - before[name] for name, sent in sent_weights(run).items()}

    assert edit_block(1.001) == {**dict.fromkeys(usual, 0), "blocks.1": usual["blocks.1"]}
    assert not fresh_groups(run)
    assert edit_block(1.1) == {**dict.fromkeys(usual, 0), "blocks.1": 2.0 * 7734}
    assert fresh_groups(run) == {"blocks.1"}
    assert run.comm.stats()["full_refreshes"] == 1
    assert "full refreshes: 1" in flat(run.comm.explain(full=True))
    assert_replicas_identical(run.comm)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            edit_block(0.9)
    expected = ["sdp4bit: weights were sent in f"] if dist.get_rank() == 0 else []
    assert [str(w.message)[:31] for w in caught] == expected


def check_edits_after_steps() -> None:
    """After an optimizer step the difference holds every edit: no more is sent than without one."""
    # A for-loop optimizer writes parameters one by one, as a load into a state dict does.
    run = Run(build(), WHOLE_ROWS, topology=1, fused=None, foreach=False).train(1)
    kept = run.model.state_dict()
    for _ in range(2):
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        run.train(1)
    run.evaluate()
    assert sent_weights(run) == difference_bytes(run) and kept
    assert run.comm.stats()["full_refreshes"] == 0


def check_reasons() -> None:
    """The log names each refresh in full precision and its reason, which `group_stats` keeps."""
    run = Run(build(), WHOLE_ROWS, topology=1).train(1)

    def scaled(factor: float) -> None:
        run.model.reshard()
        run.model.blocks[1].fc1.weight.data.mul_(factor)

    def switch() -> None:
        with run.comm.full_precision():
            pass

    requested = "requested (resync, full_precision, audit, auto), interrupted, or due on another rank"
    for cause, reason in (
        (run.comm.resync, requested),
        (switch, requested),
        (lambda: run.model.load_state_dict(run.model.state_dict()), "weights were loaded"),
        (lambda: scaled(1.5), "weights changed by more than 1/128 of their norm"),
        (lambda: scaled(float("nan")), "weights changed by more than 1/128 of their norm"),
        (
            lambda: run.model.eval().blocks[1].load_state_dict({}, strict=False),
            "weights were loaded, in evaluation",
        ),
    ):
        cause()
        with mock.patch.object(events.logger, "info") as log:
            run.evaluate()
        group = run.comm.group_stats()[2]
        assert group["full_refresh_reason"] == reason, (reason, group)
        assert (1, "blocks.1", group["full_refresh_reason"]) in [call.args[1:] for call in log.call_args_list]
    assert group["full_refreshes"] == 6


@on_ranks(2)
def test_edits_are_sent_by_their_size_and_steps_hold_them() -> None:
    check_sizes()
    check_reasons()
    check_edits_after_steps()


@on_ranks(2)
def test_all_ranks_follow_the_edit_of_one_and_a_forward_asks_once() -> None:
    """One rank edits its shard in a way that nothing counts; all ranks use the new weights at once."""
    plain, run = (Run(build(), config, topology=1).train(1) for config in (None, LOSSLESS))
    before = run.evaluate()
    assert before == plain.evaluate()
    for each in (plain, run):
        each.model.reshard()
        if dist.get_rank() == 1:
            each.model.blocks[0].fc1.weight.to_local().data.mul_(0.5)
    counted = mock.patch.object(events, "all_reduce_on_host", wraps=events.all_reduce_on_host)
    with counted as reductions:
        assert run.evaluate() == plain.evaluate() != before
    assert reductions.call_count == 2  # who has seen an edit, and how large it is

    # A forward asks once for all groups, also after a step.
    for action in (run.evaluate, run.backward):
        run.model.reshard()
        with counted as reductions:
            action()
        assert reductions.call_count == 1
    run.step()
    with counted as reductions:
        run.train(2)
    assert reductions.call_count == 2

    # Outside of a forward each group asks for itself, so that an edit between two of them is found.
    plain, run = (Run(build(), config, topology=1) for config in (None, LOSSLESS))
    for each in (plain, run):
        each.evaluate()
        each.model.reshard()
        for block in each.model.blocks:
            block.unshard()
            block.reshard()
            for parameter in each.model.blocks[1].parameters():
                parameter.data.mul_(1.5)
    assert run.evaluate() == plain.evaluate()


@on_ranks(2)
def test_a_backward_has_the_weights_of_its_forward_whatever_is_asked_for_in_between() -> None:
    runs = [Run(build(), QUANTIZED, topology=1).train(2) for _ in range(2)]
    for run in runs:
        loss = loss_of(run.model, next(run.data))
        if run is runs[1]:
            run.comm.resync()
        loss.backward()
    one, other = ([p.grad.to_local() for p in run.model.parameters()] for run in runs)
    assert all(map(torch.equal, one, other))
    runs[1].evaluate()
    assert [run.comm.stats()["full_refreshes"] for run in runs] == [0, len(runs[1].comm.groups)]


# -- after a step, NaN, loads ----------------------------------------------------------------------------


@on_ranks(2)
def test_evaluation_right_after_a_step_uses_the_averages_that_were_put_in() -> None:
    """In evaluation mode the size of a change decides after a step, too."""
    run = Run(build(), QUANTIZED, topology=1).train(1)
    run.model.eval()
    for factor, is_exact in ((0.5, True), (1.001, False)):
        with torch.no_grad():
            for param in run.model.parameters():
                param.data.mul_(factor)
        run.evaluate()
        run.model.reshard()
        assert len(fresh_groups(run)) == (4 if is_exact else 0)
        run.comm.mark_step()


@on_ranks(2)
def test_evaluations_of_averages_cause_no_warning() -> None:
    run = Run(build(), QUANTIZED, topology=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            run.train(1)
            run.model.eval()
            for factor in (0.5, 2.0):
                with torch.no_grad():
                    for param in run.model.parameters():
                        param.data.mul_(factor)
                if factor < 1:
                    run.evaluate()
                    run.model.reshard()
            run.model.train()
    # In and out of each evaluation but the last, which is still in.
    assert run.comm.stats()["full_refreshes"] == 4 * 7


@on_ranks(2)
def test_training_in_evaluation_mode_sends_differences() -> None:
    """Some loops switch dropout off so; steps are sent as in training mode."""
    runs = [Run(build(), QUANTIZED, topology=1, lr=1e-3) for _ in range(2)]
    runs[0].model.eval()
    evaluating, training = ((run.train(3).losses, run.comm.stats()) for run in runs)
    assert evaluating == training
    assert evaluating[1]["full_refreshes"] == 0


def poisoned(config: SDP4BitConfig | None, *, by_overflow: bool) -> list[float]:
    """A loop steps with weights that are not finite when they are gathered, rewinds, and goes on."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float16 if by_overflow else torch.bfloat16, reduce_dtype=torch.float32
    )
    run = Run(build(policy=policy), config, topology=1, lr=1e-3).train(1)
    params: list[DTensor] = list(run.model.parameters())
    with torch.no_grad():
        backup = [param.detach().clone() for param in params]
        for param in params[:1] if by_overflow else params:
            if by_overflow:
                param.data.to_local().view(-1)[:1] = 7e4
            else:
                param.data.mul_(float("nan"))
    run.backward()
    for param in params:
        param.grad = torch.zeros_like(param)  # the optimizer's own state stays finite
    run.step()
    with torch.no_grad():
        for param, kept in zip(params, backup, strict=True):
            param.data.copy_(kept.data)
    run.train(2)
    if run.comm is not None:
        assert_replicas_identical(run.comm)
    return run.losses[2:]


@on_ranks(2)
def test_a_replica_recovers_from_values_that_are_not_finite() -> None:
    for by_overflow in (False, True):
        plain = poisoned(None, by_overflow=by_overflow)
        assert all(loss == loss for loss in plain)
        assert poisoned(LOSSLESS, by_overflow=by_overflow) == plain
        losses = poisoned(QUANTIZED, by_overflow=by_overflow)
        assert losses == pytest.approx(plain, rel=0.003), (losses, plain)


@on_ranks(2)
def test_weights_that_become_nan_are_reported_within_two_steps() -> None:
    """Once, by the first rank, with the step; not as edits by an optimizer."""
    run = Run(build(), QUANTIZED, topology=1, lr=1e-3).train(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.backward()
        for param in run.model.parameters():
            param.grad.mul_(float("nan"))
        run.step()
        run.train(5)
    ours = [each for each in caught if "sdp4bit" in str(each.message)]
    if dist.get_rank() == 0:
        (text,) = [str(each.message) for each in ours]
        assert "/tests/" in ours[0].filename  # the call of the model, not a line of torch
        assert "the gathered weights hold NaN or infinity" in text and "noticed after step 4)" in text, text
    else:
        assert not ours


def loaded_on_one_rank(config: SDP4BitConfig | None, moment: str) -> list[float]:
    """After a step, or a forward; or only a layer, after an evaluation that left the root unsharded."""
    run = Run(build(), config, topology=1).train(1)
    if moment != "after a step":
        run.evaluate()
    if moment == "after a forward":
        run.model.reshard()
    if dist.get_rank() == 1:
        module = run.model.blocks[0].fc1 if moment == "a part" else run.model
        module.load_state_dict({name: value.detach() * 0.9 for name, value in module.state_dict().items()})
    return run.train(1).finish()


@on_ranks(2)
def test_a_load_on_one_rank_alone_is_followed_by_all() -> None:
    for moment in ("after a step", "after a forward", "a part"):
        assert loaded_on_one_rank(LOSSLESS, moment) == loaded_on_one_rank(None, moment)


@on_ranks(2)
def test_a_state_dict_that_is_kept_is_looked_at_once_per_forward() -> None:
    run = Run(build(), LOSSLESS, topology=1).train(1)
    kept = run.model.state_dict()
    for _ in range(20):  # a loop that only saves holds on to nothing
        copy.copy(run.model.state_dict())
    handed_out = run.comm._state.aliases._kept.values()
    assert max(len(each) for each in handed_out) <= 2
    run.train(1)
    versions = mock.Mock(side_effect=events.tensor_version)
    with mock.patch.object(events, "tensor_version", versions):
        run.evaluate()
    # Its tensors are asked twice each: whether they were written to, and what they are from now on.
    assert 0 < versions.call_count <= 2 * len(kept)
    # A write to one of them is an edit, and no load.
    before, refreshes = run.evaluate(), run.comm.stats()["full_refreshes"]
    kept["blocks.0.fc1.weight"].to_local().mul_(1.01)
    assert run.evaluate() != before and run.comm.stats()["full_refreshes"] == refreshes


# -- optimizers of some ranks only -------------------------------------------------------------------------


class Positions(nn.Module):
    """Two parameters that rank 0 holds alone."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 8, width) * 0.02)
        self.scale = nn.Parameter(torch.ones(1))
        self.fc1, self.fc2 = nn.Linear(width, 2 * width + 2), nn.Linear(2 * width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x + self.position))) * self.scale


def train_filtered(config: SDP4BitConfig | None, freeze: bool) -> list[float]:
    """Ranks give their optimizer the parameters that they hold a part of, and clear only their gradients."""
    torch.manual_seed(0)
    model = Positions()
    fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
    comm = None if config is None else quantize_communication(model, topology=1, config=config)
    optimizer = adamw(model, params=[p for p in model.parameters() if p.to_local().numel()], lr=1e-2)
    x = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses, gradients = [], []
    for step in range(4):
        if freeze and step == 2:
            model.scale.requires_grad_(False)  # its gradient is left over on the ranks without a part of it
            model.fc2.bias.requires_grad_(False)
        loss = (model(x) - x.roll(1, 0)).pow(2).mean()
        loss.backward()
        gradients.append(gradient_of(model))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if comm is not None:
        model.reshard()
        model(x)
        assert_replicas_identical(comm)
        (group,) = comm.groups
        main = group.view.main_shard(torch.bfloat16).float()
        assert (group.weights.replica.own_shard.float() - main).norm() < 0.02 * main.norm()
    return Result(losses, gradients)


def alternating(config: SDP4BitConfig | None) -> list[float]:
    """Two roots with an optimizer each step in turn; one's step does not send the other's weights."""
    models = [build(), build()]
    comm = None if config is None else quantize_communication(models, topology=1, config=config)
    runs = [Run(model, None) for model in models]
    for _ in range(2):
        for run in runs:
            run.train(1)
            if comm is not None:
                for model in models:
                    model.reshard()
                    loss_of(model, run.eval_batch)
                mine = models.index(run.model)
                sent = [g.weights.traffic.current_step.inter_bytes > 0 for g in comm.groups]
                started = comm.stats()["steps"] > 1
                assert not started or sent == [(g < len(sent) // 2) == (mine == 0) for g in range(len(sent))]
    losses = [loss for run in runs for loss in run.losses]
    losses += [loss_of(model, runs[0].eval_batch).item() for model in models]
    return Result(losses, [gradient for run in runs for gradient in run.gradients])


def train_alone(config: SDP4BitConfig | None) -> list[float]:
    """Parameters of one row: rank 1 has no value and no optimizer, and says itself that a step was taken."""
    torch.manual_seed(0)
    model = nn.Linear(256, 1)
    fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = None if config is None else quantize_communication(model, topology=1, config=config)
    told = [str(w.message) for w in caught if "holds only padding" in str(w.message)]
    params = [p for p in model.parameters() if p.to_local().numel()]
    assert len(told) == (comm is not None and not params)
    optimizer = adamw(model, params=params) if params else None
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses, gradients = [], []
    for _ in range(3):
        loss = (model(x) - 1).pow(2).mean()
        loss.backward()
        gradients.append(gradient_of(model))
        if optimizer is not None:
            optimizer.step()
        elif comm is not None:
            comm.mark_step()
        model.zero_grad()
        losses.append(loss.item())
    return Result(losses, gradients)


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_what_steps_change_does_not_depend_on_the_optimizer_of_one_rank() -> None:
    for choice in (False, True):
        assert_close_to_plain(train_filtered, choice)
    exact = [(IDENTITY, assert_equal)]
    assert_close_to_plain(alternating, checks=exact, harmless=[mutations.TWICE])
    all_on_first = [mutations.FIRST_ROW, mutations.FIRST_RANK]  # rank 0 holds all values
    assert_close_to_plain(train_alone, checks=exact, harmless=[mutations.TWICE, *all_on_first])


# -- the ways that users know -------------------------------------------------------------------------


def check_ways(names: list[str], topology: int, method: str) -> None:
    for name in names:
        try:
            check_way(name, topology, method)
        except AssertionError as error:
            error.add_note(f"edited by {name}")
            raise


NAMES = list(WAYS)
SLOW = pytest.mark.slow


@pytest.mark.like_plain
@pytest.mark.parametrize(
    ("method", "topology", "names"),
    [
        pytest.param("4 bits", 1, QUICK, id="4 bits"),
        pytest.param("4 bits", 1, NAMES, id="4 bits, all", marks=SLOW),
        pytest.param("4 bits", 2, ["averages_copied_in_and_out"], id="4 bits, nodes of two ranks"),
        pytest.param(
            "on a GPU", 1, ["averages_copied_in_and_out", "sharpness_aware_subtracted"], id="as a GPU"
        ),
        pytest.param("on a GPU", 1, NAMES, id="as a GPU, all", marks=SLOW),
        pytest.param("full precision", 1, NAMES, id="full precision", marks=SLOW),
    ],
)
def test_edits_are_followed_as_by_plain_fsdp2(method: str, topology: int, names: list[str]) -> None:
    run_ranks(check_ways, 2 * topology, names, topology, method, timeout=280)

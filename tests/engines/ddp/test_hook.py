"""The communication hook for DistributedDataParallel, against DDP without one.

Layer: 2 and 4 real processes over gloo.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig
from sdp4bit.collectives.all_reduce import QuantizedAllReduce
from sdp4bit.quantization.tables import Table
from sdp4bit.traffic import Grid
from tests import mutations
from tests.engines.fsdp2.test_bytes import count_sent_bytes
from tests.oracles.traffic import all_reduce_exchange
from tests.ranks import first_rank_warns, on_ranks, run_ranks
from tests.tables import flat
from tests.toy import (
    Result,
    SumInNodesFirst,
    ToyGPT,
    adamw,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    batches,
    gradient_of,
    loss_of,
)

pytestmark = pytest.mark.gloo

ALL = GradientConfig(min_numel=0, inside_one_node=True)
EXACT = GradientConfig(intra_bits=None, inter_bits=None, min_numel=0)
BUCKET_MB = 0.02
"""Several buckets of a model of 130 kB."""


def untyped(hook: Any) -> Any:
    """Return a hook that DDP takes on gloo and from a module with annotations as strings."""
    return lambda state, bucket: hook(state, bucket)


def average_nodes_first(ranks_per_node, bucket):  # type: ignore[no-untyped-def]
    """Average as plain DDP, but add within each node, then over nodes: the order of the quantized exchange.

    DDP compares annotations with types, but they are strings here, so there are none.
    """
    output = torch.empty(bucket.buffer().numel())
    row = bucket.buffer().repeat(dist.get_world_size())
    SumInNodesFirst(ranks_per_node)(output, row, dist.group.WORLD, dist.ReduceOp.AVG)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(output)
    return future


class DDPRun:
    """The toy model in DDP, with a hook unless the configuration is None."""

    def __init__(
        self,
        config: GradientConfig | SDP4BitConfig | None,
        *,
        topology: int | str = 1,
        model: nn.Module | None = None,
        clip: float | None = None,
        bucket_cap_mb: float = BUCKET_MB,
        compile: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = DistributedDataParallel(model or ToyGPT(), bucket_cap_mb=bucket_cap_mb, **options)
        self.state: Any = None
        if config is not None:
            if isinstance(config, GradientConfig):
                config = SDP4BitConfig(gradients=config)
            self.state = sdp4bit.DDPCommState(topology=topology, config=config)
            self.model.register_comm_hook(self.state, sdp4bit.ddp_comm_hook)
        elif dist.get_world_size() > 2 and topology != "auto":
            self.model.register_comm_hook(topology, average_nodes_first)
        self.ddp = self.model
        if compile:
            self.model = torch.compile(self.model, backend="aot_eager")
        self.optimizer = adamw(self.model)
        self.data = batches()
        self.clip = clip
        self.losses: list[float] = []
        self.gradients: list[torch.Tensor] = []

    def backward(self) -> None:
        loss = loss_of(self.model, next(self.data))
        loss.backward()
        self.losses.append(loss.item())

    def train(self, steps: int, *, accumulate: int = 1) -> DDPRun:
        for _ in range(steps):
            for _ in range(accumulate - 1):
                with self.ddp.no_sync():
                    self.backward()
            self.backward()
            self.gradients.append(gradient_of(self.model))
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def finish(self) -> Result:
        """Return the losses and the size of the weights; all ranks hold the same ones."""
        self.check_ranks()
        size = sum(values.double().abs().sum().item() for values in self.weights())
        return Result([*self.losses, size], self.gradients)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def check_ranks(self) -> None:
        """All ranks hold the same weights, bit for bit."""
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, self.weights())
        for other in held:
            assert all(map(torch.equal, held[0], other))


def sizes(state: Any) -> list[int]:
    return [group.view.shard_numel for group in state.groups]


def training(config: GradientConfig | None, options: dict[str, Any], accumulate: int = 1) -> Result:
    """Micro-batches under no_sync() are not exchanged."""
    run = DDPRun(config, **options).train(2, accumulate=accumulate)
    assert run.state is None or run.state.steps == 2
    return run.finish()


CHECKS = [(EXACT, assert_equal), (ALL, assert_close), (replace(ALL, inter_bits=3.5), assert_close)]
"""A mean of two is exact."""


@pytest.mark.like_plain
@on_ranks(2)
def test_gradients_are_averaged_as_by_plain_ddp() -> None:
    for options in ({}, {"static_graph": True}):
        assert_close_to_plain(training, options, checks=CHECKS, harmless=mutations.WEIGHTS)


@pytest.mark.like_plain
@on_ranks(4)
def test_four_ranks_average_as_plain_ddp_that_adds_in_the_same_order() -> None:
    for topology in (1, 2):
        options = {"topology": topology}
        assert_close_to_plain(training, options, checks=CHECKS[:2], harmless=mutations.WEIGHTS)


@on_ranks(4, timeout=400.0)
def test_weights_stay_equal_with_the_bytes_of_the_formula() -> None:
    """DDP rebuilds its buckets after the first step."""
    for topology, grid in (
        (1, Grid(nodes=4, ranks_per_node=1)),
        (2, Grid(nodes=2, ranks_per_node=2)),
        (4, Grid(nodes=1, ranks_per_node=4)),
    ):
        run, buckets, total = DDPRun(ALL, topology=topology), [], 0
        for _ in range(2):
            with count_sent_bytes(topology) as sent:
                run.train(1)
            buckets.append(sizes(run.state))
            total += sent["inter"]
            expected = [all_reduce_exchange(numel, grid=grid, config=ALL) for numel in buckets[-1]]
            last = run.state.stats()["last_step"]
            assert sent["inter"] == last["inter_bytes"] == sum(each.inter_bytes for each in expected)
            assert sent["intra"] == last["intra_bytes"] == sum(each.intra_bytes for each in expected)
        first, second = buckets
        assert len(first) < 3 <= len(second) and sum(first) == sum(second)
        run.check_ranks()
        stats = run.state.stats()
        assert stats["steps"] == 2
        assert stats["total"]["collectives"] > stats["last_step"]["collectives"] > 0
        table = run.state.explain(full=True)
        assert table.count(f"  {grid.nodes} x {grid.ranks_per_node}  ") == len(sizes(run.state))
        assert table.count("gradients  all-reduce ") == len(sizes(run.state))
        assert stats["total"]["inter_bytes"] == total


@pytest.mark.like_plain
@pytest.mark.slow
@on_ranks(2)
def test_accumulated_clipped_and_compiled_gradients_are_averaged_as_by_plain_ddp() -> None:
    compiled = {"compile": True, "bucket_cap_mb": 1}  # torch.compile wants no buckets below the first one
    assert_close_to_plain(training, compiled, checks=CHECKS[:2], harmless=mutations.WEIGHTS)
    for is_view in (False, True):
        options = {"clip": 0.5, "gradient_as_bucket_view": is_view}
        assert_close_to_plain(training, options, 3, checks=CHECKS, harmless=mutations.WEIGHTS)


class Unused(nn.Module):
    """One of two layers runs twice, another one in each step, and perhaps on each rank; a third never."""

    def __init__(self, *, by_rank: bool = False) -> None:
        super().__init__()
        self.gpt, self.calls = ToyGPT(), 0
        self.layers = nn.ModuleList(nn.Linear(61, 61) for _ in range(3))
        self.offset = dist.get_rank() if by_rank else 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        layer = self.layers[(self.calls + self.offset) % 2]
        return layer(layer(self.gpt(tokens)))


def using_some(config: GradientConfig | None, by_rank: bool, accumulate: int) -> Result:
    torch.manual_seed(1)
    run = DDPRun(config, model=Unused(by_rank=by_rank), find_unused_parameters=True)
    return run.train(3, accumulate=accumulate).finish()


def scaling(config: GradientConfig | None) -> Result:
    """Two models take turns with a GradScaler, which skips a step in which one rank has an infinite loss."""
    runs = [DDPRun(config), DDPRun(config, clip=0.5)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        for run in runs:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(run.model, next(run.data))
            run.losses.append(loss.item())
            scaler.scale(loss * (math.inf if step == 1 and dist.get_rank() == 0 else 1.0)).backward()
            scaler.unscale_(run.optimizer)
            if step != 1:
                run.gradients.append(gradient_of(run.model))
            scaler.step(run.optimizer)
            run.optimizer.zero_grad()
        scaler.update()
    results = [run.finish() for run in runs]
    return Result(
        [*results[0], *results[1], scaler.get_scale()], [*results[0].gradients, *results[1].gradients]
    )


def joining(config: GradientConfig | None) -> Result:
    """The first rank has a batch more than the other, which joins with zeros."""
    run = DDPRun(config)
    with run.ddp.join():
        run.train(3 - dist.get_rank())
    return run.finish()


@pytest.mark.like_plain
@on_ranks(2)
def test_unused_parameters_and_uneven_inputs_are_averaged_as_by_plain_ddp() -> None:
    for by_rank, accumulate in ((False, 1), (True, 2)):
        assert_close_to_plain(using_some, by_rank, accumulate, checks=CHECKS, harmless=mutations.WEIGHTS)
    assert_close_to_plain(joining, checks=CHECKS, harmless=mutations.WEIGHTS)


@pytest.mark.like_plain
@on_ranks(2)
def test_two_models_with_a_gradient_scaler_are_trained_as_by_plain_ddp() -> None:
    assert_close_to_plain(scaling, checks=CHECKS[:2], harmless=mutations.WEIGHTS)


@pytest.mark.slow
@on_ranks(4)
def test_full_precision_equals_plain_ddp_and_is_reported() -> None:
    plain = DDPRun(None, topology="auto").train(2).losses  # with DDP's own all-reduce
    late = DDPRun(replace(ALL, start_step=2)).train(2)
    assert late.losses == plain
    assert late.state.explain(full=True).count("full precision until step 2") == len(sizes(late.state))
    stats = late.state.stats()
    assert stats["compression_ratio"] == 1.0
    assert stats["last_step"]["inter_bytes"] == pytest.approx(2 * 4 * sum(sizes(late.state)) * 3 / 4, abs=8)
    late.train(1)
    assert late.state.explain(full=True).count("all-reduce inter int4/128") == len(sizes(late.state))
    short = DDPRun(GradientConfig(min_numel=1 << 20)).train(2)
    assert short.losses == plain
    assert "all-reduce: part below min_numel=1048576" in flat(short.state.explain(full=True))

    with first_rank_warns(r"PCIe, attach with topology=1"):
        inside = DDPRun(GradientConfig(min_numel=0), topology=4).train(2)
    assert inside.losses == plain
    table = inside.state.explain(full=True)
    assert flat(table).count("GradientConfig(inside_one_node=True) quantizes") == len(sizes(inside.state))

    torch.manual_seed(0)
    double = DDPRun(ALL, model=nn.Linear(64, 64).double())
    with first_rank_warns("torch.float64 are averaged in full precision"):
        double.model(torch.ones(1, 64).double() * dist.get_rank()).sum().backward()
    (weight, _) = double.model.parameters()
    assert weight.grad is not None and (weight.grad == 1.5).all()
    assert "full precision: float64" in double.state.explain(full=True)


@pytest.mark.slow
@on_ranks(4)
def test_pairs_of_ranks_train_a_model_each_and_errors_are_the_same_on_all_ranks() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    outside = sdp4bit.DDPCommState(pairs[0], topology=1).explain(full=True)
    assert flat(outside).endswith("with register_comm_hook(state, sdp4bit.ddp_comm_hook)")
    torch.manual_seed(0)
    model = DistributedDataParallel(ToyGPT(), process_group=mine)
    state = sdp4bit.DDPCommState(mine, topology=1, config=SDP4BitConfig(gradients=ALL))
    model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
    loss_of(model, next(batches())).backward()
    assert "  2 x 1  " in state.explain(full=True) and "not sent: every rank has them all" in state.explain(
        full=True
    )
    new = sdp4bit.DDPCommState(mine, topology=1)
    assert new.stats()["compression_ratio"] is None
    with pytest.raises(ValueError, match=r"different settings(.|\n)*seed: 0 \[rank 0\], 1 \[rank 1\]"):
        sdp4bit.DDPCommState(mine, topology=1, config=SDP4BitConfig(seed=dist.get_rank()))
    with pytest.raises(ValueError, match=r"sdp4bit\.DDPCommState: .*preset"):
        sdp4bit.DDPCommState(mine, config="sdp4")
    with pytest.raises(ValueError, match=r"not the state of an sdp4bit\.DDPCommState"):
        state.load_state_dict({"steps": 3})


@on_ranks(4)
def test_a_state_of_other_ranks_than_the_model_is_refused() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(ToyGPT(), process_group=pairs[dist.get_rank() // 2])
    model.register_comm_hook(sdp4bit.DDPCommState(topology=1), sdp4bit.ddp_comm_hook)
    with pytest.raises(
        ValueError, match=r"averages over ranks .*, but its DDPCommState over ranks 0, 1, 2, 3:"
    ):
        loss_of(model, next(batches())).backward()


def failing(real: Any, *, call: int, error: type[BaseException] | None) -> Any:
    """Return a function that fails in this call, and otherwise does what the real one does.

    Of tables only those count that restore sums, after everything was sent.
    """
    calls = itertools.count(1)

    def fail(*args: Any, **options: Any) -> Any:
        is_counted = not isinstance(args[0], Table) or args[0].calls[0].operator == "dequantize_reduce_pieces"
        if is_counted and next(calls) == call and error is not None:
            raise error("on purpose")
        return real(*args, **options)

    return fail


FAULTS = {"before sending": (QuantizedAllReduce, "__call__"), "after sending": (Table, "run")}


@on_ranks(2)
def test_an_exception_in_the_hook_is_raised_as_it_is_and_ddp_continues() -> None:
    """Other ranks may have seen none: all count the step, so that their rounding bits stay equal."""
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        run, steps = DDPRun(ALL, **options).train(2), 2
        for (target, name), error, ranks in itertools.product(
            FAULTS.values(), (torch.OutOfMemoryError, KeyboardInterrupt), ((0, 1), (1,))
        ):
            if name == "__call__" and ranks == (1,):
                continue  # the other rank waits for this one
            here = dist.get_rank() in ranks
            fail = failing(getattr(target, name), call=2, error=error if here else None)
            raised = pytest.raises(error, match=r"^on purpose$") if here else nullcontext()
            with mock.patch.object(target, name, fail), raised:
                run.backward()
            run.optimizer.zero_grad()
            run.train(1).check_ranks()
            steps += 2
            assert run.state.steps == steps


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 40, sparse=True), nn.Linear(40, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@pytest.mark.parametrize("config", [ALL, GradientConfig()], ids=["quantized", "rows that are too short"])
@on_ranks(3)
def test_sparse_gradients_are_averaged_as_without_a_hook(config: GradientConfig) -> None:
    def backward(hooked: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(SparseEmbedding())
        state = sdp4bit.DDPCommState(topology=1, config=SDP4BitConfig(gradients=config))
        if hooked:
            model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
        torch.manual_seed(dist.get_rank())
        # Tokens repeat, and ranks have different ones.
        tokens = torch.randint(10 + 10 * dist.get_rank(), (4, 30))
        model(tokens).square().mean().backward()
        module = model.module
        assert module.embed.weight.grad.is_sparse
        return module.embed.weight.grad.coalesce(), module.head.weight.grad, state

    rows, dense, _ = backward(False)
    ours, quantized, state = backward(True)
    assert torch.equal(ours.indices(), rows.indices()) and torch.equal(ours.values(), rows.values())
    assert torch.equal(quantized, dense) == (config != ALL)
    assert flat(state.explain(full=True)).count("gradients full precision: sparse gradients") == 1
    assert state.stats()["steps"] == 1


def run_with_unused_parameters() -> DDPRun:
    torch.manual_seed(1)
    return DDPRun(ALL, model=Unused(), find_unused_parameters=True)


def train_and_save(folder: str) -> list[list[torch.Tensor]]:
    """Return the gradients of the two steps after the checkpoint."""
    run = run_with_unused_parameters().train(4)
    dcp.save({"model": run.model.state_dict(), "comm": run.state}, checkpoint_id=folder)
    return gradients_of_two_steps(run)


def gradients_of_two_steps(run: DDPRun) -> list[list[torch.Tensor]]:
    found = []
    for _ in range(2):
        run.backward()
        found.append([p.grad.clone() for p in run.model.parameters() if p.grad is not None])
        run.model.zero_grad()
    return found


def load_and_continue(folder: str, loads: bool) -> list[list[torch.Tensor]]:
    run = run_with_unused_parameters()
    saved = {"model": run.model.state_dict()} | ({"comm": run.state} if loads else {})
    dcp.load(saved, checkpoint_id=folder)
    run.model.load_state_dict(saved["model"])
    run.model.module.calls = 4
    for _ in range(4):
        next(run.data)
    return gradients_of_two_steps(run)


def test_a_new_process_continues_from_a_distributed_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    expected = run_ranks(train_and_save, 2, str(tmp_path))
    for loads in (True, False):
        resumed = run_ranks(load_and_continue, 2, str(tmp_path), loads)
        for step, (theirs, ours) in enumerate(zip(expected[0], resumed[0], strict=True)):
            assert all(map(torch.equal, theirs, ours)) == loads, (step, loads)


@on_ranks(2)
def test_a_state_made_before_the_process_group_agrees_at_the_first_backward() -> None:
    with mock.patch.object(dist, "is_initialized", return_value=False):
        with pytest.raises(TypeError, match="use an SDP4BitConfig"):
            sdp4bit.DDPCommState(config=ALL)  # type: ignore[arg-type]
        early = sdp4bit.DDPCommState(topology=1, config=SDP4BitConfig(gradients=ALL))
    run = DDPRun(None)
    run.model.register_comm_hook(early, sdp4bit.ddp_comm_hook)
    assert run.train(1).weights()[0].equal(DDPRun(ALL).train(1).weights()[0])
    with mock.patch.object(dist, "is_initialized", return_value=False):
        early = sdp4bit.DDPCommState(topology=1 + dist.get_rank())
    run = DDPRun(None)
    run.model.register_comm_hook(early, sdp4bit.ddp_comm_hook)
    with pytest.raises(ValueError, match=r"different settings(.|\n)*topology: 1 \[rank 0\], 2 \[rank 1\]"):
        run.backward()


@on_ranks(2)
def test_wrong_arguments_are_named_on_all_ranks() -> None:
    """Settings in the place of the group, also on one rank only; None, which torch's own hooks take."""
    for given in ("sdp4bit-w3g3.5", None if dist.get_rank() == 0 else ALL):
        with pytest.raises(
            TypeError, match=r"process_group=.* is no process group: pass settings as config="
        ):
            sdp4bit.DDPCommState(given, topology=1)  # type: ignore[arg-type]
    run = DDPRun(None)
    run.model.register_comm_hook(None, sdp4bit.ddp_comm_hook)
    with pytest.raises(TypeError, match=r"registered with NoneType as its state: .*DDPCommState\(\)"):
        run.backward()


@on_ranks(2)
def test_a_handle_describes_gradients_only() -> None:
    run = DDPRun(ALL).train(1)
    described = str(run.state)
    assert ": 1 parameter group on 2 x 1 ranks (" in described
    assert "; gradients of " in described
    assert "weights" not in described


@on_ranks(2)
def test_bytes_are_a_7th_of_plain_ddp_and_a_4th_of_the_bf16_hook() -> None:
    """Two nodes of a rank: each value costs 4 bits and a 128th of a scale of 2 bytes, instead of 4 bytes."""
    sent, numel = [], 512 * 512
    for hook in (allreduce_hook, bf16_compress_hook, None):
        run = DDPRun(None, model=nn.Linear(512, 512, bias=False), bucket_cap_mb=25)
        state = sdp4bit.DDPCommState(topology=1)
        run.model.register_comm_hook(
            dist.group.WORLD if hook else state, untyped(hook or sdp4bit.ddp_comm_hook)
        )
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
            count_sent_bytes(1) as own,
        ):
            run.model(torch.ones(2, 512)).sum().backward()
        # A ring sends (n - 1) / n of the values twice.
        sent.append(sum(call.args[0].nbytes for call in reduced.call_args_list) + own["inter"])
    assert sent == [4 * numel, 2 * numel, numel * (1 / 2 + 2 / 128)]
    assert state.stats()["last_step"]["inter_bytes"] == sent[2]
    assert state.stats()["compression_ratio"] == sent[0] / sent[2] > 7.7 and sent[1] / sent[2] > 3.87


WATCHED = SDP4BitConfig(
    gradients=ALL,
    telemetry=TelemetryConfig(interval=1),
    alerts=AlertConfig(gradient_error=0.01, weight_error=None),
)


@on_ranks(2)
def test_the_state_is_a_handle_like_that_of_fsdp2() -> None:
    """Measures, alerts, blocks in full precision, audits and removal."""
    run, plain, heard = DDPRun(WATCHED), DDPRun(None), list[Any]()
    run.state.on_alert(heard.append)
    with run.state.full_precision():
        assert run.train(1).losses == plain.train(1).losses and run.state.steps == 0
    run.train(3)
    # The last backward is measured when the next one begins. Buckets are rebuilt once.
    names, stats = [f"bucket {index}" for index in range(len(sizes(run.state)))], run.state.stats()
    assert (stats["steps"], stats["sampled_step"], stats["weight_drift"]) == (3, 2, None)
    assert 0.01 < stats["gradient_error"] < 0.3
    assert [each["name"] for each in run.state.group_stats()] == names
    assert all(each["gradient_bits"] == 4 for each in run.state.group_stats())
    assert {alert.group for alert in run.state.alerts()} >= set(names) and heard == run.state.alerts()
    held: list[Any] = [None] * 2
    dist.all_gather_object(held, heard)
    assert held[0] == held[1]
    times = run.state.time_steps(lambda: run.train(1), repeats=1)
    assert times.quantized > 0 and run.state.audit()
    with torch.no_grad():
        next(run.model.parameters())[0] += dist.get_rank()
    with pytest.raises(sdp4bit.ReplicaMismatchError, match=r"bucket .* differ, without a majority"):
        run.state.audit()
    twin = DDPRun(None)
    twin.model.load_state_dict(run.model.state_dict())
    run.state.remove()
    for each in (run, twin):
        each.data, each.losses, each.gradients = batches(seed=1), [], []
        each.model.zero_grad()
        each.backward()
    assert gradient_of(run.model).equal(gradient_of(twin.model)) and not run.state.is_attached
    assert "removed" in run.state.explain(full=True)


@on_ranks(2)
def test_muon_with_few_bits_is_warned_of_once() -> None:
    run = DDPRun(ALL)
    run.optimizer = torch.optim.Muon([p for p in run.model.parameters() if p.ndim == 2], lr=1e-3)
    with first_rank_warns(r"Muon steps with gradients of int4 .* GradientConfig\(inter_bits=8\)"):
        run.train(2)

"""Wrong uses of a handle: on one rank alone, as a model, as data, with callbacks that fail.

Layer: real processes over gloo. All ranks raise the same error at once, and training continues.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sdp4bit
from sdp4bit import AlertConfig, GradientConfig, SDP4BitConfig, TelemetryConfig, WeightConfig
from sdp4bit.collectives import scratch
from sdp4bit.engines import arrival
from sdp4bit.log import logger
from tests.ranks import on_ranks

ALL = GradientConfig(min_numel=0)
WIDTH = 64
SOON = 20.0
"""Seconds after which a rank no longer learns of an error at once; the job's timeout is longer."""


def model_of(engine: str, config: SDP4BitConfig | None = None) -> tuple[Any, Any]:
    """Return a model of two layers with this engine, and its handle."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    config = config or SDP4BitConfig(gradients=ALL)
    if engine == "DDP":
        model, comm = DistributedDataParallel(model), sdp4bit.DDPCommState(topology=1, config=config)
        model.register_comm_hook(comm, sdp4bit.ddp_comm_hook)
        return model, comm
    fully_shard(model)
    return model, sdp4bit.quantize_communication(model, topology=1, config=config)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, torch.full((2, WIDTH), 1.0 + dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def everywhere(value: object) -> list[Any]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def wrong_calls(
    folder: Path, comm: Any, model: Any
) -> dict[str, tuple[type[Exception], Callable[[int], object]]]:
    """Return calls by a part of their error; each gets the rank, and is wrong on rank 1 or on both."""
    state = comm.state_dict()

    def loads(rank: int) -> Any:
        return comm.load(folder / ("saved", "absent")[rank])

    def loads_file(rank: int) -> Any:
        return comm.load(folder / ("saved", "file")[rank])

    return {
        r"needs a function that runs one training step, got 5 \(on rank 1\)$": (
            TypeError,
            lambda rank: comm.time_steps([lambda: step(model), 5][rank], repeats=1),
        ),
        r"repeats=\d differs from repeats=\d on rank \d; pass the same on all ranks \(on rank \d\)$": (
            ValueError,
            lambda rank: comm.time_steps(lambda: step(model), repeats=1 + rank),
        ),
        r"absent is absent: comm.load needs the folder .* \(on rank 1\)$": (ValueError, loads),
        r"file is a file: comm.load needs": (ValueError, loads_file),
        r"comm.load needs the folder of a checkpoint": (ValueError, lambda rank: comm.load()),
        r"has format 77, but this version": (
            ValueError,
            lambda rank: comm.load_state_dict({**state, "format_version": 77} if rank else state),
        ),
    }


@pytest.mark.parametrize("engine", ["FSDP2", "DDP"])
@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_training_continues(engine: str, tmp_path: Path) -> None:
    model, comm = model_of(engine)
    step(model)
    dcp.save({"comm": comm}, checkpoint_id=tmp_path / "saved")
    (tmp_path / "file").touch()
    for text, (kind, call) in wrong_calls(tmp_path, comm, model).items():
        begin = time.monotonic()
        with pytest.raises(kind, match=text) as error:
            call(dist.get_rank())
        assert time.monotonic() - begin < SOON, text
        assert len(set(everywhere(str(error.value)))) == 1
    step(model)
    assert comm.load(tmp_path / "saved") and comm.audit()
    step(model)
    comm.remove()


@on_ranks(2)
def test_a_wait_that_ctrl_c_interrupts_does_not_count() -> None:
    """Nor does one that is interrupted at any of the calls to the store."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def meet() -> None:
        arrival.wait_for_ranks(range(2), call="comm.audit")

    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            meet()
        for name in ("delete_key", "set", "add", "check"):
            real = getattr(type(store), name)

            def once(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
                setattr(type(store), name, real)
                real(self, *args)
                raise KeyboardInterrupt

            with mock.patch.object(type(store), name, once), pytest.raises(KeyboardInterrupt):
                meet()
    store.set("interrupted", "") if rank == 0 else store.wait(["interrupted"])
    if rank == 0:
        begin = time.monotonic()
        meet()
        assert time.monotonic() - begin > 0.9
    else:
        time.sleep(1.0)
        meet()
    meet()


@pytest.mark.parametrize("engine", ["FSDP2", "DDP"])
@on_ranks(2)
def test_a_handle_is_no_model_and_no_data(engine: str) -> None:
    model, comm = model_of(engine)
    step(model)
    for use in (lambda: comm(torch.ones(2, WIDTH)), lambda: comm.parameters(), lambda: comm.train()):
        with pytest.raises((TypeError, AttributeError), match="is not the model, which is changed in place"):
            use()
    assert not hasattr(comm, "nothing") and not hasattr(comm, "__array__")
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled\. Save comm\.state_dict\(\)"):
            use(comm)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        torch.save({"comm": comm}, "/dev/null")
    numbers = [value for value in comm.state_dict().values() if not isinstance(value, dict)]
    assert numbers and all(isinstance(value, torch.Tensor) for value in numbers)  # others would be pickled


class Tied(nn.Module):
    """A sparse embedding whose output is added to a layer's, so that autograd gives both one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, tokens = batch
        return torch.tanh(self.layer(values) + self.embed(tokens))


@pytest.mark.parametrize("use", ["quantizers", "full_precision", "removed"])
@on_ranks(2)
def test_sparse_gradients_leave_those_of_other_layers_alone(use: str) -> None:
    """Unlike with plain DDP; so gradients are computed by hand, for the batches of all ranks."""
    torch.manual_seed(0)
    net, state = Tied(), sdp4bit.DDPCommState(topology=1, config=SDP4BitConfig(gradients=None))
    model = DistributedDataParallel(net)
    model.register_comm_hook(state, sdp4bit.ddp_comm_hook)
    if use == "removed":
        state.remove()
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        batches = [
            (torch.randn(4, WIDTH, generator=generator), torch.randint(0, 20, (4,), generator=generator))
            for _ in range(2)
        ]
        of_ranks = [torch.autograd.grad(net(batch).square().mean(), [*net.parameters()]) for batch in batches]
        with state.full_precision() if use == "full_precision" else contextlib.nullcontext():
            model(batches[dist.get_rank()]).square().mean().backward()
        for parameter, *parts in zip(net.parameters(), *of_ranks, strict=True):
            expected = sum(part.to_dense() for part in parts) / 2
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.to_dense(), expected)
        net.zero_grad()


@on_ranks(2)
def test_each_wrapper_of_a_state_is_checked() -> None:
    """Also one that takes the place of a wrapper whose ranks were right, around the same parameters."""
    model, state = model_of("DDP")
    first, second = (
        SimpleNamespace(buffer=lambda each=each: each, parameters=lambda: [*model.parameters()])
        for each in torch.zeros(2, WIDTH).unbind()
    )
    state._check_model(first)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    other = DistributedDataParallel(model.module, process_group=alone)
    other.register_comm_hook(state, sdp4bit.ddp_comm_hook)
    with pytest.raises(ValueError, match=r"averages over rank \d, but its DDPCommState over ranks 0, 1"):
        state._check_model(second)
    with mock.patch.object(gc, "get_objects", side_effect=AssertionError("a search in every step")):
        state._check_model(first)


@on_ranks(2)
def test_callbacks_and_handlers_of_logs_that_fail_do_not_end_a_step() -> None:
    config = SDP4BitConfig(
        gradients=ALL, telemetry=TelemetryConfig(interval=1), alerts=AlertConfig(gradient_error=1e-9)
    )
    model, comm = model_of("FSDP2", config)
    records: list[logging.LogRecord] = []
    calls: list[object] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise BrokenPipeError("no reader")

    def fail(alert: object) -> None:
        calls.append(alert)
        raise LookupError("no such channel")

    own = logging.getLogger("sdp4bit")
    own.addHandler(Keeping())
    if dist.get_rank() == 0:
        own.addHandler(Failing())
        comm.on_alert(fail)
        comm.on_alert(calls.append)
    for _ in range(3):
        step(model)
        comm._alerts._above.clear()  # as if the measure had fallen in between
    assert everywhere(comm.stats()["steps"]) == [3, 3] and comm.alerts()
    failures = [record for record in records if record.exc_info]
    assert len(failures) == (dist.get_rank() == 0)  # once
    if failures:
        assert "LookupError: no such channel" in logging.Formatter().format(failures[0])
        assert failures[0].filename == "alerts.py"
        assert len(calls) == 2 * len(comm.alerts())


@on_ranks(2)
def test_a_conversion_after_attaching_is_refused_as_before() -> None:
    for config in (SDP4BitConfig(gradients=ALL), SDP4BitConfig(weights=None, gradients=ALL)):
        model, _ = model_of("FSDP2", config)
        model.double()
        with pytest.raises(ValueError, match=r"torch\.float64.*only fp32, bf16 and fp16 can be"):
            model(torch.ones(2, WIDTH, dtype=torch.float64))
    model, comm = model_of("FSDP2")
    model.bfloat16()
    loss_of(model, torch.ones(2, WIDTH, dtype=torch.bfloat16)).backward()
    assert {group.view.row_dtype for group in comm.groups} == {torch.bfloat16}


@on_ranks(2)
def test_timing_without_an_optimizer_warns_of_no_refresh() -> None:
    model, comm = model_of("FSDP2", SDP4BitConfig(weights=WeightConfig(replica="full")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.time_steps(
            lambda: (loss_of(model, torch.ones(2, WIDTH)).backward(), model.zero_grad()), repeats=4
        )
    assert not [each for each in caught if "full precision" in str(each.message)]


@pytest.mark.unit
def test_tables_are_few_and_bound_to_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MOST_TABLES", 3)
    held, cpu = scratch.Scratch(), torch.device("cpu")
    kept = tuple(range(3, 5))
    table = held.table(kept, device=cpu)
    assert held.table(kept, device=cpu) is table
    for number in range(100):  # each tuple may get the memory, and the id, of one before
        assert held.table(tuple(range(number, number + 1)), device=cpu).tolist() == [number]
    assert held.table(kept, device=cpu).tolist() == [3, 4]
    assert len(held._tables) <= 3


@pytest.mark.unit
def test_a_logged_record_names_its_line(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("%s", "loud")
    assert [(record.message, record.filename) for record in caplog.records] == [("loud", "test_misuse.py")]

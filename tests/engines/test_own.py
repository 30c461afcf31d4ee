"""`sdp4bit.engines.attach_engine`: errors, switching, and its state.

`test_contract.py` and `test_events.py` train with it. Layer: 2 processes over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from examples.engine import ZeRO2
from sdp4bit import GradientConfig, SDP4BitConfig, WeightConfig, engines
from sdp4bit.collectives.weights import Due
from sdp4bit.engines import attach_engine
from tests.engines.own_engines import Own
from tests.ranks import on_ranks

CONFIG = SDP4BitConfig(weights=WeightConfig(group_size=32), gradients=GradientConfig(min_numel=0))


def built(layers: int = 2) -> ZeRO2:
    torch.manual_seed(0)
    return ZeRO2(nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))))


def attach(engine: ZeRO2, config: Any = CONFIG, **options: Any) -> engines.EngineHandle:
    return attach_engine(engine.blocks, install=engine.install, config=config, topology=1, **options)


@on_ranks(2)
def test_mistakes_of_one_rank_are_errors_on_all_and_leave_nothing() -> None:
    rank, engine = dist.get_rank(), built()
    for text, call in {
        "no preset": lambda: attach(engine, "no preset" if rank else CONFIG),
        "different settings": lambda: attach(engine, replicate=bool(rank)),
        "parameter groups": lambda: attach(built(2 + rank)),
        "has no attribute 'name'": lambda: attach_engine(
            [[None], engine.blocks][rank], install=engine.install
        ),
    }.items():
        with pytest.raises((ValueError, AttributeError), match=text) as error:
            call()
        texts: list[Any] = [None] * 2
        dist.all_gather_object(texts, str(error.value).partition(" (on rank")[0])
        assert not engine.quantized and texts[0] == texts[1]
    assert attach(engine).audit()


@on_ranks(2)
def test_an_install_that_fails_is_undone() -> None:
    engine = built()

    def install(group: engines.Group) -> Any:
        if group.index == 1:
            raise KeyError("no such group")
        return engine.install(group)

    with pytest.raises(KeyError, match="no such group"):
        attach_engine(engine.blocks, install=install, config=CONFIG, topology=1)
    assert not engine.quantized
    comm = attach(engine)
    assert set(engine.quantized) == {0, 1}
    comm.remove()
    assert not engine.quantized
    with pytest.raises(RuntimeError, match="has been removed"):
        comm.mark_step()


@on_ranks(2)
def test_full_precision_is_the_engine_s_own_training(tmp_path: Path) -> None:
    """Bit for bit, and the first step behind it sends all weights in full precision."""
    plain, quantized = Own(CONFIG, tmp_path), Own(CONFIG, tmp_path)
    plain.comm.remove()
    plain.comm = mock.Mock()
    with quantized.comm.full_precision():
        for run in (plain, quantized):
            for _ in range(3):
                run.train()
    assert plain.losses == quantized.losses
    assert quantized.comm.stats()["steps"] == 0
    assert all(group.weights.due is Due.FULL for group in quantized.comm.groups)
    for _ in range(2):
        quantized.train()
    assert quantized.comm.stats()["steps"] == 2 and quantized.comm.audit()
    quantized.comm.resync()
    quantized.train()
    assert quantized.comm.stats()["full_refreshes"] == 2  # of two groups


@pytest.mark.parametrize("replicate", [False, True])
@on_ranks(2)
def test_a_checkpoint_holds_numbers_and_no_pickles(replicate: bool, tmp_path: Path) -> None:
    engine = built()
    comm = attach(engine, replicate=replicate)
    for group in comm.groups:
        group.gradients.reductions, group.gradients.all_reduces, group.weights.refreshes = 3, 4, 5
    comm._state.steps = 7
    saved = comm.state_dict()
    assert all(isinstance(value, torch.Tensor) for each in saved["groups"] for value in each.values())
    dcp.save({"comm": comm}, checkpoint_id=tmp_path)
    comm.remove()
    other = attach(engine, replicate=replicate)
    with pytest.raises(ValueError, match="of 1 parameter groups, but the model has 2"):
        other.load_state_dict({**saved, "groups": saved["groups"][:1]})
    with pytest.raises(ValueError, match="not the state of an engine"):
        other.load_state_dict({} if dist.get_rank() else saved)
    assert other.stats()["steps"] == 0  # on both ranks
    assert other.load(tmp_path)
    assert other.stats()["steps"] == 7
    for group in other.groups:
        assert (group.gradients.reductions, group.gradients.all_reduces, group.weights.refreshes) == (3, 4, 5)
        assert group.weights.due is Due.FULL


@pytest.mark.unit
def test_public_names() -> None:
    assert [getattr(engines, name).__name__ for name in engines.__all__] == engines.__all__
    assert dir(engines) == sorted(engines.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attach_engines'"):
        engines.attach_engines  # noqa: B018

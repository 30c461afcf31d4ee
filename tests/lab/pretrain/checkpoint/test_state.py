"""What a checkpoint holds, under names that do not depend on how a model is cut into chunks.

Layer: one rank in this process.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.pretrain.checkpoint.checkpointer import Checkpointer
from sdp4bit_lab.pretrain.checkpoint.config import CheckpointConfig
from sdp4bit_lab.pretrain.checkpoint.folder import Progress, RunRecord
from sdp4bit_lab.pretrain.checkpoint.state import TrainingState
from sdp4bit_lab.pretrain.config.pretrain import OptimizerConfig
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.optimizer import build_optimizer
from tests.lab.pretrain.checkpoint.saved_runs import one_rank
from tests.lab.pretrain.tiny_runs import this_rank

SHAPE = ModelShape(layers=2, hidden=16, heads=2, vocabulary=128, positions=8)


class Numbers:
    """A part of a run with a state of plain values and tensors."""

    def __init__(self, **values: object) -> None:
        self.values = values

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values, "history": torch.tensor([float(len(self.values))]), "none": {}}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.values = state_dict["values"]


class NoCommunication:
    """The state of a handle that quantizes nothing."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self.steps = state_dict["steps"]


def gpt(seed: int) -> GPT:
    model = GPT(SHAPE)
    model.reset_parameters(seed=seed)
    return model


def chunks(model: GPT) -> list[nn.Module]:
    """Return two parts of the model, as the stages of a pipeline have them: with names of the whole."""
    first, last = nn.Module(), nn.Module()
    first.token_embedding, first.position_embedding = model.token_embedding, model.position_embedding
    first.blocks, last.blocks = (
        nn.ModuleDict({"0": model.blocks["0"]}),
        nn.ModuleDict({"1": model.blocks["1"]}),
    )
    last.final_norm = model.final_norm
    return [first, last]


def adamw(*models: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    parameters = nn.ModuleList(models).parameters()
    return build_optimizer(parameters, config=OptimizerConfig(), learning_rate=rate)


def trained(model: GPT, *optimizers: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        tokens = torch.randint(0, 100, (4, 9), generator=generator)
        loss = model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def checkpointer(folder: Path, *, parts: dict[str, object] | None = None, **state: object) -> Checkpointer:
    return Checkpointer(
        TrainingState(**{"communication": NoCommunication(), **state}, ranks=this_rank(), **(parts or {})),
        config=CheckpointConfig(save=folder),
        identity=RunRecord(
            shape=asdict(SHAPE),
            vocabulary_size=100,
            world_size=1,
            strategy="baseline",
            dataset="text",
            seed=1,
        ),
        ranks=this_rank(),
    )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[float]]:
    """Return a checkpoint after 3 steps of a whole model, and the losses of the 3 steps that follow."""
    with one_rank():
        model = gpt(seed=1)
        optimizer = adamw(model)
        trained(model, optimizer, steps=3)
        parts = {"shared": {"scale": Numbers(scale=1024.0, good=7)}, "per_rank": {"own": Numbers(rank=0)}}
        saving = checkpointer(tmp_path, models=[model], optimizers=[optimizer], parts=parts)
        saving.save(progress=Progress(step=3, samples=12))
        # What is trained from here on is not in it.
        losses = trained(model, optimizer, steps=3)
        saving.close()
    return tmp_path, losses


@pytest.mark.parametrize("separate", [False, True], ids=["one optimizer", "an optimizer per chunk"])
def test_chunks_of_a_model_load_what_a_whole_one_saved_and_the_reverse(separate, saved, tmp_path_factory):
    folder, losses = saved
    with one_rank():
        model = gpt(seed=2)
        parts = chunks(model)
        optimizers = [adamw(part) for part in parts] if separate else [adamw(*parts)]
        loading = checkpointer(tmp_path_factory.mktemp("again"), models=parts, optimizers=optimizers)
        assert loading.load(folder) == Progress(step=3, samples=12)
        again = loading._config.save
        loading.save(progress=Progress(step=3, samples=12))
        assert trained(model, *optimizers, steps=3) == losses
        loading.close()

        whole = gpt(seed=2)
        optimizer = adamw(whole)
        last = checkpointer(folder, models=[whole], optimizers=[optimizer])
        last.load(again)
        assert trained(whole, optimizer, steps=3) == losses
        last.close()


def test_settings_of_the_optimizer_are_those_of_the_run_that_loads(saved):
    folder, _ = saved
    with one_rank():
        model = gpt(seed=2)
        optimizer = adamw(model, rate=0.5)
        checkpointer(folder, models=[model], optimizers=[optimizer]).load(folder)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
        assert all(state["step"].item() == 3 for state in optimizer.state.values())


def test_further_parts_come_back_and_may_be_new(saved):
    folder, _ = saved
    with one_rank(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = gpt(seed=2)
        scale, own, new, communication = (
            Numbers(scale=0.0, good=0),
            Numbers(rank=5),
            Numbers(),
            NoCommunication(),
        )
        parts = {"shared": {"scale": scale, "new": new}, "per_rank": {"own": own, "newer": Numbers(a=1)}}
        state = {"models": [model], "optimizers": [adamw(model)], "communication": communication}
        checkpointer(folder, parts=parts, **state).load(folder)
        assert scale.values == {"scale": 1024.0, "good": 7} and own.values == {"rank": 0}
        assert new.values == {}
        # Of another size: not used, and said so.
        other = {"per_rank": {"own": replace_history(Numbers(rank=5))}}
        checkpointer(folder, parts=other, **state).load(folder)
        assert other["per_rank"]["own"].values == {"rank": 5}
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2
    assert "has no newer state: this run starts with a new one" in texts[0]
    assert "saved with another layout of ranks: its own state is not used" in texts[1]


def replace_history(numbers: Numbers) -> Numbers:
    state = numbers.state_dict()
    numbers.state_dict = lambda: {**state, "history": torch.zeros(7)}  # type: ignore[method-assign]
    return numbers


def test_what_the_model_needs_and_the_checkpoint_lacks_is_named(saved):
    folder, _ = saved
    with one_rank():
        model = gpt(seed=2)
        extra = nn.Module()
        extra.blocks = nn.ModuleDict({"2": nn.Linear(3, 3)})
        with pytest.raises(
            SettingError, match=r"model\.blocks\.2\.weight is not in it, this model needs \(3, 3\)"
        ):
            checkpointer(folder, models=[model, extra], optimizers=[adamw(model)]).load(folder)
        wider = nn.Module()
        wider.final_norm = nn.LayerNorm(17)
        with pytest.raises(
            SettingError, match=r"final_norm\.weight has the shape \(16,\), this model needs \(17,\)"
        ):
            checkpointer(folder, models=[wider], optimizers=[]).load(folder)
        before = [parameter.clone() for parameter in model.parameters()]
        assert all(map(torch.equal, before, gpt(seed=2).parameters()))


def test_other_text_and_another_seed_are_warned_of(saved):
    folder, _ = saved
    with one_rank():
        model = gpt(seed=2)
        loading = checkpointer(folder, models=[model], optimizers=[adamw(model)])
        loading._identity = replace(loading._identity, dataset="other", seed=2)
        with (
            pytest.warns(UserWarning, match="trained on other text"),
            pytest.warns(UserWarning, match="trained with seed 1, this run has 2"),
        ):
            loading.load(folder)

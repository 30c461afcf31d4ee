"""Decay groups of AdamW and the learning-rate schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS, ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.optimizer import build_optimizer, set_learning_rate


def rates(steps: int, **options) -> list[float]:
    optimizer = OptimizerConfig(learning_rate=1.0, **options)
    run = PretrainConfig(training=TrainingConfig(steps=steps), optimizer=optimizer)
    return [run.schedule.rate(step) for step in range(steps)]


def test_biases_and_norms_do_not_decay_but_embeddings_do():
    gpt = GPT(ModelShape(layers=1, hidden=32, heads=4, vocabulary=128, positions=16))
    optimizer = build_optimizer(gpt.parameters(), config=OptimizerConfig(), learning_rate=0.5)
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    decayed, not_decayed = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert all(name.endswith(".bias") or "norm" in name for name in not_decayed)
    assert all(name.endswith(".weight") and "norm" not in name for name in decayed)
    assert {"token_embedding.weight", "position_embedding.weight"} <= set(decayed)
    assert len(decayed) + len(not_decayed) == len(names)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates(100, warmup_fraction=0.1)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_warm_up_without_an_option_is_the_cards_or_a_hundredth_of_the_steps():
    def steps(card, **options):
        run = PretrainConfig(model=ModelConfig(model_card=card), optimizer=OptimizerConfig(**options))
        return replace(run, training=TrainingConfig(steps=1000)).warmup_steps

    assert steps("125M") == 10
    assert steps("125M", decay_steps=350) == 4
    assert steps("tiny") == MODEL_CARDS["tiny"].warmup_steps
    assert steps("tiny", warmup_fraction=0.1) == 100
    assert steps("tiny", warmup_fraction=0.1, warmup_steps=7) == 7
    assert steps("tiny", warmup_steps=0) == 0


def test_decay_is_half_a_cosine_to_a_tenth():
    found = rates(110, warmup_fraction=10 / 110)
    assert max(found) == found[9] == 1.0
    assert found[59] == pytest.approx(0.55)
    assert found[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in itertools.pairwise(found[9:]))
    short = rates(100, decay_steps=50, warmup_fraction=0.0, min_lr=0.2)
    assert short[49:] == pytest.approx([0.2] * 51)
    assert all(0 < rate <= 1.0 for rate in rates(7, warmup_fraction=1.0))


def test_decay_may_be_a_line_or_nothing():
    line = rates(20, warmup_steps=10, decay_style="linear", min_lr=0.0)
    assert line == pytest.approx([(step + 1) / 10 for step in range(10)] + [s / 10 for s in range(9, -1, -1)])
    assert rates(20, warmup_steps=10, decay_style="constant")[10:] == [1.0] * 10

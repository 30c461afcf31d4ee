"""Settings of the pretraining program: defaults, checks, and what the command line makes of them."""

from __future__ import annotations

from typing import get_args

import pytest

from sdp4bit import PRESETS, SDP4BitConfig
from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.common.strategies import STRATEGIES, Strategy
from sdp4bit_lab.compare.config import CompareConfig, DemoConfig
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, ModelConfig, OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from sdp4bit_lab.pretrain.data.config import DataConfig
from sdp4bit_lab.pretrain.model.cards import MODEL_CARDS
from tests.paper_strategies import PAPER_STRATEGIES


def test_strategies_are_the_paper_s_and_the_presets_of_the_library():
    presets = {name: SDP4BitConfig.preset(name) for name in PRESETS}
    assert {**PAPER_STRATEGIES, **presets} == STRATEGIES
    assert tuple(STRATEGIES) == get_args(Strategy)


def test_defaults_come_from_the_model_card():
    config = PretrainConfig(model=ModelConfig(model_card="1.3B"))
    assert (config.sequence_length, config.micro_batch_size, config.learning_rate) == (2048, 4, 2e-4)
    assert (config.model_shape.layers, config.model_shape.hidden, config.model_shape.heads) == (24, 2048, 16)


def test_given_settings_replace_the_card():
    config = PretrainConfig(
        model=ModelConfig(model_card="125M", layers=2, hidden=96),
        training=TrainingConfig(sequence_length=64, micro_batch_size=3),
        optimizer=OptimizerConfig(learning_rate=0.5),
    )
    assert (config.sequence_length, config.micro_batch_size, config.learning_rate) == (64, 3, 0.5)
    assert (config.model_shape.layers, config.model_shape.hidden, config.model_shape.heads) == (2, 96, 12)


def test_vocabulary_is_padded_to_a_multiple_of_128():
    shape = ModelConfig().shape(vocabulary=50257, sequence_length=8)
    assert shape.vocabulary == 50304


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(hidden=100, heads=3), "--hidden-size 100 is not divisible by --num-.* 102"),
        (lambda: ModelConfig(layers=0), "--num-layers 0 must be at least 1"),
        (lambda: ModelConfig(dropout=1.0), "--dropout 1.0"),
        (lambda: DataConfig(vocabulary_size=256), "--vocab-size 256 must be between 257"),
        (lambda: DataConfig(validation_fraction=0.0), "--validation-fraction 0.0"),
        (lambda: TrainingConfig(steps=0), "--train-iters 0 must be at least 1"),
        (lambda: TrainingConfig(micro_batch_size=0), "--micro-batch-size 0"),
        (
            lambda: TrainingConfig(param_dtype="fp32", compute_dtype="bf16"),
            "--compute-dtype bf16 needs --param-dtype",
        ),
        (lambda: OptimizerConfig(learning_rate=0.0), "--lr 0.0 must be positive"),
        (lambda: OptimizerConfig(warmup_fraction=1.5), "--lr-warmup-fraction 1.5"),
        (lambda: OptimizerConfig(beta2=1.0), "--adam-beta2 1.0"),
        (lambda: ParallelConfig(ranks_per_node=0), "--ranks-per-node 0"),
        (lambda: ParallelConfig(ranks_per_node=3).check_world(4), "3 does not divide the 4 ranks.* 1, 2, 4"),
        (lambda: LoggingConfig(log_interval=0), "--log-interval 0"),
        (lambda: LoggingConfig(telemetry_interval=-1), "--telemetry-interval -1"),
        (lambda: CheckpointConfig(save_interval=0), "--save-interval 0"),
        (lambda: PretrainConfig(seed=-1), "--seed -1"),
        (lambda: PretrainConfig(model=ModelConfig(model_card="13B")), "13B model: set --lr"),
        (
            lambda: PretrainConfig(strategy="qwd", communication=CommunicationConfig(pipeline_chunks=2)),
            "--gradient-alltoall-pipeline has no effect with strategy qwd",
        ),
        (lambda: CompareConfig(seeds="1,x"), "--seeds '1,x'"),
        (lambda: CompareConfig(seeds="1,1"), "--seeds '1,1'"),
        (lambda: DemoConfig(steps=0), "--train-iters 0"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_numbers(make, message):
    with pytest.raises(SettingError, match=message):
        make()


def test_communication_settings_reach_the_library():
    settings = CommunicationConfig(pipeline_chunks=4, replica="full")
    config = settings.resolve("sdp4bit", seed=7)
    assert config.seed == 7
    assert config.gradients is not None
    assert config.gradients.pipeline_chunks == 4
    assert config.weights is not None
    assert config.weights.replica == "full"


def test_compare_trains_seed_by_seed_and_applies_options_where_they_mean_something():
    config = CompareConfig(
        strategies="baseline, qwd,tlq",
        seeds="1,2",
        communication=CommunicationConfig(replica="full", pipeline_chunks=2),
    )
    runs = [run for _, run in config.runs()]
    assert [(run.seed, run.strategy) for run in runs] == [
        (seed, strategy) for seed in (1, 2) for strategy in ("baseline", "qwd", "tlq")
    ]
    assert [run.communication.replica for run in runs[:3]] == [None, "full", None]
    assert [run.communication.pipeline_chunks for run in runs[:3]] == [None, None, 2]
    assert len({run.logging.out for run in runs}) == 6


def test_demo_is_two_nodes_of_two_ranks():
    runs = [run for _, run in DemoConfig().comparison().runs()]
    assert [run.strategy for run in runs] == ["baseline", "sdp4bit"]
    assert {(run.parallel.nproc_per_node, run.parallel.ranks_per_node, run.seed) for run in runs} == {
        (4, 2, 1)
    }


def test_cards_without_a_learning_rate_are_those_the_paper_only_timed():
    assert [name for name, card in MODEL_CARDS.items() if card.learning_rate is None] == [
        "2.7B",
        "13B",
        "18B",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrain", "--steps", "0"], "sdp4bit: error: --train-iters 0 must be at least 1\n"),
        (
            ["pretrain", "--nproc-per-node", "4", "--ranks-per-node", "3"],
            "sdp4bit: error: --ranks-per-node 3 does not divide the 4 ranks: use one of 1, 2, 4\n",
        ),
        (
            ["compare", "--strategies", "fast"],
            "sdp4bit: error: --strategies: 'fast' is unknown: use any of baseline, qw, qwd, ulq, tlq, "
            "tlq-hs, sdp4bit-paper, sdp4bit, sdp4bit-w2g3, sdp4bit-w2g2\n",
        ),
    ],
)
def test_a_wrong_setting_on_the_command_line_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == message


def test_an_unknown_strategy_on_the_command_line_lists_the_choices(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["pretrain", "--strategy", "fast"])
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert all(name in output.err + output.out for name in STRATEGIES)

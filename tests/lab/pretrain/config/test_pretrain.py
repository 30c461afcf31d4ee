"""Settings of the pretraining program: defaults, contradictions, and the lines that name them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from sdp4bit import PRESETS, SDP4BitConfig
from sdp4bit_lab.cli import main
from sdp4bit_lab.common.progress import end_progress
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.common.strategies import STRATEGIES, Strategy
from sdp4bit_lab.compare.config import CompareConfig, DemoConfig
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig, ReliabilityConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, ModelConfig, OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import TrainingConfig
from tests.paper_strategies import PAPER_STRATEGIES


def test_strategies_are_the_paper_s_and_the_presets_of_the_library():
    presets = {name: SDP4BitConfig.preset(name) for name in PRESETS}
    assert {**PAPER_STRATEGIES, **presets} == STRATEGIES
    assert tuple(STRATEGIES) == get_args(Strategy)


def test_auto_chooses_between_the_strategies_with_the_details_of_the_run():
    details = CommunicationConfig(weight_bits=3)
    config = PretrainConfig(strategy="auto", seed=7, communication=details)
    named = config.settings.named()
    assert [*named] == ["plain", "bf16-wire", "settings 3"]
    assert named["settings 3"] == config.quantization and config.quantization.weights.bits == 3
    assert {each.seed for each in named.values() if each is not None} == {7}
    assert config.strategy_name == "auto"
    assert [*PretrainConfig(strategy="auto").settings.named()] == ["plain", "bf16-wire", "sdp4bit"]
    assert PretrainConfig(strategy="tlq").settings == PretrainConfig(strategy="tlq").quantization
    with pytest.raises(SettingError, match="--strategy auto conflicts with --quantized-weights"):
        PretrainConfig(strategy="auto", communication=CommunicationConfig(quantized_weights=True))
    with pytest.raises(SettingError, match="--strategy auto measures real ranks"):
        PretrainConfig(strategy="auto", parallel=ParallelConfig(simulated_ranks=8, ranks_per_node=2))


def test_given_settings_replace_those_of_the_model_card():
    card = PretrainConfig(model=ModelConfig(model_card="1.3B"))
    assert (card.sequence_length, card.micro_batch_size, card.learning_rate) == (2048, 4, 2e-4)
    assert (card.model_shape.layers, card.model_shape.hidden, card.model_shape.heads) == (24, 2048, 16)
    given = PretrainConfig(
        model=ModelConfig(model_card="125M", layers=2, hidden=96),
        training=TrainingConfig(sequence_length=64, micro_batch_size=3),
        optimizer=OptimizerConfig(learning_rate=0.5),
    )
    assert (given.sequence_length, given.micro_batch_size, given.learning_rate) == (64, 3, 0.5)
    assert (given.model_shape.layers, given.model_shape.hidden, given.model_shape.heads) == (2, 96, 12)


def check_layout(accumulation: int = 1, **parallel: int) -> None:
    """Check a model of 4 blocks and 4 heads on as many ranks as share it."""
    config = PretrainConfig(
        model=ModelConfig(layers=4, heads=4),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(accumulation=accumulation),
    )
    config.check_layout(config.parallel.model_parallel_size)


model, training, optimizer = ModelConfig, TrainingConfig, OptimizerConfig
parallel, reliability = ParallelConfig, ReliabilityConfig
pipeline = partial(check_layout, pipeline_model_parallel_size=2)
simulated = partial(ParallelConfig, simulated_ranks=8)
WRONG = [
    (lambda: model(hidden=100, heads=3), "--hidden-size 100 is not divisible by --num-.* 102"),
    (lambda: model(layers=0), "--num-layers 0 must be at least 1"),
    (lambda: model(dropout=1.0), "--dropout 1.0"),
    (lambda: PretrainConfig(model=model(positions=64)), "-embeddings 64 is less than the 128 tok"),
    (lambda: PretrainConfig(model=model(model_card="13B")), "13B model: set --lr"),
    (lambda: training(accumulation=2, global_batch_size=8), "give only one"),
    (lambda: training(param_dtype="fp32", compute_dtype="bf16"), "bf16 needs --param-dtype"),
    (lambda: optimizer(learning_rate=0.0), "--lr 0.0 must be positive"),
    (lambda: optimizer(warmup_fraction=1.5), "--lr-warmup-fraction 1.5"),
    (lambda: optimizer(beta2=1.0), "--adam-beta2 1.0"),
    (lambda: PretrainConfig(optimizer=optimizer(min_lr=1.0)), "--min-lr 1.0 is above the peak 0.001"),
    (lambda: LoggingConfig(log_interval=0), "--log-interval 0"),
    (lambda: LoggingConfig(telemetry_interval=-1), "--telemetry-interval -1"),
    (lambda: CheckpointConfig(save=Path("x"), save_interval=0), "--save-interval 0 must be at least 1"),
    (lambda: CheckpointConfig(auto_resume=True), "--auto-resume has no effect without --save"),
    (lambda: CheckpointConfig(keep_last=2), "--keep-last 2 has no effect without --save"),
    (lambda: PretrainConfig(seed=-1), "--seed -1"),
    (lambda: reliability(audit_interval=-1), "audit.interval=-1 must be an integer of at least 1"),
    (lambda: reliability(audit_interval=0, audit_on_mismatch="resync"), "--audit-on-mismatch has no effect"),
    (
        lambda: PretrainConfig(strategy="baseline", reliability=reliability(alerts="warn")),
        "alerts need quantized",
    ),
    (lambda: parallel(ranks_per_node=0), "--ranks-per-node 0"),
    (lambda: parallel(ranks_per_node=3).check_world(4), "3 does not divide the 4 ranks.* 1, 2, 4"),
    (lambda: parallel(tensor_model_parallel_size=4).check_world(6), "is 4, which does not divide the 6"),
    (lambda: check_layout(tensor_model_parallel_size=3), "does not divide the 4 attention heads"),
    (lambda: check_layout(pipeline_model_parallel_size=3), "does not divide the 4 blocks"),
    (lambda: pipeline(num_layers_per_virtual_pipeline_stage=3), "the 2 blocks of each of the 2 ranks"),
    (lambda: pipeline(3, num_layers_per_virtual_pipeline_stage=1), "3 micro batches .* not a multiple of"),
    (lambda: parallel(num_layers_per_virtual_pipeline_stage=1), "without --pipeline-model-parallel-size"),
    (lambda: simulated(simulated_ranks=1, ranks_per_node=1), "one rank sends nothing"),
    (lambda: simulated(ranks_per_node=3), "does not divide the 8 simulated ranks: use one of 1, 2, 4, 8"),
    (lambda: simulated(), "needs --ranks-per-node"),
    (lambda: simulated(ranks_per_node=4, nproc_per_node=2), "remove --nproc-per-node"),
    (lambda: simulated(ranks_per_node=4, tensor_model_parallel_size=2), "remove --tensor-model-parallel"),
    (lambda: simulated(ranks_per_node=4).check_world(2), "but 2 were started"),
    (lambda: CompareConfig(seeds="1,x"), "--seeds '1,x'"),
    (lambda: DemoConfig(steps=0), "--train-iters 0"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_setting_is_refused_with_its_numbers(make, message):
    with pytest.raises(SettingError, match=message):
        make()


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
    places = {(run.parallel.nproc_per_node, run.parallel.ranks_per_node, run.seed) for run in runs}
    assert places == {(4, 2, 1)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrain --steps 0", "--train-iters 0 must be at least 1"),
        ("pretrain --strategy qwd --quantized-weights", "give one or the other"),
        ("pretrain --wq-group-size 64 --quantized-gradients", "--wq-group-size has no effect without"),
        ("pretrain --strategy baseline --replica full", "--replica has no effect with strategy baseline"),
        ("pretrain --strategy qwd --pipeline-chunks 2", "--gradient-alltoall-pipeline has no effect with"),
        ("pretrain --wq-group-size 100", "weights.group_size=100 must be a positive multiple of 32"),
        (
            "compare --strategies fast",
            "'fast' is unknown: use one of sdp4bit, sdp4bit-w3g3.5, ",
        ),
    ],
)
def test_a_wrong_setting_on_the_command_line_is_one_line_and_exit_code_2(arguments, message, capsys):
    end_progress()  # of an earlier test in this process
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("sdp4bit: error: ") and message in error and error.count("\n") == 1

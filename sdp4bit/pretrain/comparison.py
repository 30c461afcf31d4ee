"""Settings of the commands that train several times: compare and demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sdp4bit.pretrain.communication_config import STRATEGIES, CommunicationConfig, Strategy
from sdp4bit.pretrain.config import LoggingConfig, ModelConfig, OptimizerConfig, PretrainConfig
from sdp4bit.pretrain.data_config import CacheFolder, DataConfig
from sdp4bit.pretrain.parallel_config import ParallelConfig
from sdp4bit.pretrain.settings import SettingError, option_flags
from sdp4bit.pretrain.training_config import TrainingConfig

DEMO_PROCESSES = 4
DEMO_RANKS_PER_NODE = 2


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The same training run with several strategies and seeds."""

    strategies: str = "baseline,sdp4bit"
    """Names of the paper's ablation with commas between: baseline, qw, qwd, ulq, tlq, tlq-hs, sdp4bit."""
    seeds: str = "1"
    """Numbers with commas between; each gives other weights, another sample order and other rounding."""
    out: Path = Path("runs/compare")
    """Folder for summary.json, table.md, curves.png and the log of every run."""
    log_interval: int = 10
    """Steps between printed lines when the output is not a terminal."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        self.runs()

    def runs(self) -> list[PretrainConfig]:
        """Return the settings of every run, in the order they are trained: seed by seed."""
        strategies = _names(self.strategies)
        seeds = _numbers(self.seeds)
        self._check_used(strategies)
        return [self._run(strategy, seed) for seed in seeds for strategy in strategies]

    def _run(self, strategy: Strategy, seed: int) -> PretrainConfig:
        return PretrainConfig(
            strategy=strategy,
            seed=seed,
            model=self.model,
            data=self.data,
            training=self.training,
            optimizer=self.optimizer,
            # Options that concern one half of the method are meant for the strategies that have it.
            communication=self.communication.restricted_to(strategy),
            parallel=self.parallel,
            logging=LoggingConfig(
                out=self.out / f"{strategy}-seed{seed}",
                tensorboard=False,
                log_interval=self.log_interval,
            ),
        )

    def _check_used(self, strategies: Sequence[Strategy]) -> None:
        communication = self.communication
        if communication.names_parts:
            raise SettingError(
                "--quantized-weights and --quantized-gradients are for `pretrain`: "
                "here, --strategies says what is quantized"
            )
        used = {name for strategy in strategies for name in communication.restricted_to(strategy).given()}
        for name in communication.given():
            if name not in used:
                flag = option_flags(CommunicationConfig)[name][0]
                raise SettingError(f"{flag} has no effect with any of the strategies {self.strategies}")


def _names(text: str) -> list[Strategy]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES:
            raise SettingError(f"--strategies: {name!r} is unknown: use any of {', '.join(STRATEGIES)}")
    if not names or len(set(names)) < len(names):
        raise SettingError(f"--strategies {text!r}: give at least one strategy, each one once")
    return [choice for name in names for choice in STRATEGIES if choice == name]


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"--seeds {text!r}: give numbers with commas between, such as 1,2,3") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise SettingError(f"--seeds {text!r}: give numbers of at least 0, each one once")
    return seeds


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """A small GPT, trained twice: with plain FSDP2 and with 4-bit communication."""

    out: Path = Path("runs/demo")
    """Folder for summary.json, curves.png and the logs of both runs."""
    steps: int = 100
    """Optimizer steps of each run."""
    seed: int = 1
    """Seed of the weights, the sample order and the rounding; the same for both runs."""
    cache_dir: CacheFolder = None
    """Where tokenized text is kept between runs; $XDG_CACHE_HOME/sdp4bit or ~/.cache/sdp4bit otherwise."""

    def __post_init__(self) -> None:
        self.comparison()

    def comparison(self) -> CompareConfig:
        """Return the two runs: the tiny model on the standard library's sources."""
        return CompareConfig(
            strategies="baseline,sdp4bit",
            seeds=str(self.seed),
            out=self.out,
            data=DataConfig(cache_dir=self.cache_dir),
            training=TrainingConfig(
                steps=self.steps,
                eval_interval=max(2, self.steps // 4),
                # Weights are gathered once a step, as in the paper; twice would flatter the comparison.
                reshard_after_forward=False,
            ),
            optimizer=OptimizerConfig(warmup_fraction=0.1),
            parallel=ParallelConfig(nproc_per_node=DEMO_PROCESSES, ranks_per_node=DEMO_RANKS_PER_NODE),
        )

"""Settings of compare and of demo, which is a preset of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from sdp4bit_lab.common.settings import SettingError, option, option_flags, require, require_at_least
from sdp4bit_lab.compare.variants import Variant, parse_variant, parse_variants
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import LoggingConfig, ModelConfig, OptimizerConfig, PretrainConfig
from sdp4bit_lab.pretrain.config.training import ComputeDtype, TrainingConfig
from sdp4bit_lab.pretrain.data.config import CacheFolder, DataConfig

DEFAULT_BASELINE = "baseline"
DEFAULT_OUT = Path("runs/compare")
_STEP_SECONDS = 0.45, 1.0
"""A step of the demo on two idle cores, where it was measured, and on busy ones."""
DEMO_PROCESSES = 4
DEMO_RANKS_PER_NODE = 2


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Train the same model with several strategies and seeds."""

    strategies: str = "baseline,sdp4bit"
    """Strategies, separated by commas (baseline, qw, qwd, ulq, tlq, tlq-hs, sdp4bit-paper, sdp4bit,
    sdp4bit-w3g3.5, sdp4bit-w2g3, sdp4bit-w2g2). Communication options for one strategy follow its name after
    colons: tlq-hs:gq-group-size-inter=64."""
    seeds: str = "1"
    """Seeds, separated by commas. A seed sets initial weights, sample order and random rounding."""
    baseline: str | None = None
    """Strategy that the others are compared with. Default: baseline."""
    merge: tuple[Path, ...] = ()
    """Folders of earlier comparisons, whose runs are tabulated together in --out. Nothing is trained."""
    out: Path = DEFAULT_OUT
    """Folder for summary.json, table.md, curves.png and a folder per run. Finished runs in it are kept."""
    jobs: int = 1
    """Runs to train concurrently, each with one thread per rank."""
    log_interval: int = 10
    """Steps between printed lines."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        require_at_least(1, self, "jobs", "log_interval")
        if self.merge:
            require(self.out != DEFAULT_OUT, "--merge needs --out, the folder for the merged tables")
            require(
                replace(self, merge=(), out=DEFAULT_OUT, baseline=None) == CompareConfig(),
                "--merge trains nothing: use it with --out and --baseline only",
            )
            return
        for name in ("exit_interval", "exit_duration_in_mins"):
            require(
                getattr(self.training, name) is None,
                f"--{name.replace('_', '-')} is for `pretrain`, which saves a checkpoint: remove it. A "
                "signal stops `compare`, and the same command continues with the remaining runs",
            )
        variants = [variant for variant, _ in self.runs()]
        self.choose_baseline([variant.label for variant in variants])
        for name in self.communication.given():
            value, flag = getattr(self.communication, name), option_flags(CommunicationConfig)[name][0]
            require(
                any(getattr(variant.communication, name) == value for variant in variants),
                f"{flag} has no effect on any of the strategies {self.strategies}",
            )

    def runs(self) -> list[tuple[Variant, PretrainConfig]]:
        """Return every variant with its settings in training order: seed by seed."""
        variants = parse_variants(self.strategies, shared=self.communication)
        return [(variant, self._run(variant, seed)) for seed in _numbers(self.seeds) for variant in variants]

    def choose_baseline(self, labels: list[str]) -> str | None:
        """Return the baseline's label; None if it is not given and `baseline` is not among the labels."""
        if self.baseline is None:
            return DEFAULT_BASELINE if DEFAULT_BASELINE in labels else None
        try:
            given = parse_variant(self.baseline, shared=self.communication).label
        except SettingError as error:
            raise SettingError(f"--baseline: {error}") from error
        choices = ", ".join(dict.fromkeys(labels))
        require(
            given in labels,
            f"--baseline: {given} is not among the strategies: add it, or use one of {choices}",
        )
        return given

    def _run(self, variant: Variant, seed: int) -> PretrainConfig:
        return PretrainConfig(
            strategy=variant.strategy,
            seed=seed,
            model=self.model,
            data=self.data,
            training=self.training,
            optimizer=self.optimizer,
            communication=variant.communication,
            parallel=self.parallel,
            logging=LoggingConfig(
                out=self.out / f"{variant.folder_name}-seed{seed}",
                tensorboard=False,
                log_interval=self.log_interval,
            ),
        )


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise SettingError(f"--seeds {text!r}: give integers separated by commas, such as 1,2,3") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise SettingError(f"--seeds {text!r}: give different integers of at least 0")
    return seeds


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """A small GPT, trained with plain FSDP2 and with 4-bit communication."""

    out: Path = Path("runs/demo")
    """Folder for summary.json, table.md, curves.png, links.png and a folder per run."""
    steps: int = 150
    """Optimizer steps of each run."""
    seed: int = 1
    """Seed of initial weights, sample order and random rounding of both runs."""
    compute_dtype: Annotated[ComputeDtype, option("compute-dtype")] = "auto"
    """dtype of activations. auto: bf16, or fp32 on CPUs without bf16 instructions."""
    cache_dir: CacheFolder = None
    """Cache of tokenized text. Default: $XDG_CACHE_HOME/sdp4bit or ~/.cache/sdp4bit."""
    retime: bool = False
    """Measure the step times again; otherwise those of an earlier demo in --out are shown."""

    def __post_init__(self) -> None:
        self.comparison()

    @property
    def links(self) -> Path:
        """File with the step times."""
        return self.out / "links.json"

    @property
    def minutes(self) -> tuple[int, int]:
        """Usual duration: idle and busy machine."""
        idle, busy = (round(2 * self.steps * seconds / 60) for seconds in _STEP_SECONDS)
        return 1 + idle, 2 + busy

    def comparison(self) -> CompareConfig:
        """Return the settings of both runs: the tiny model on the standard library's sources."""
        return CompareConfig(
            seeds=str(self.seed),
            out=self.out,
            data=DataConfig(cache_dir=self.cache_dir),
            training=TrainingConfig(
                steps=self.steps,
                eval_interval=max(2, self.steps // 3),
                compute_dtype=self.compute_dtype,
                # Gather weights once per step, as in the paper; twice would make the savings look larger.
                reshard_after_forward=False,
            ),
            parallel=ParallelConfig(nproc_per_node=DEMO_PROCESSES, ranks_per_node=DEMO_RANKS_PER_NODE),
        )


@dataclass(frozen=True, kw_only=True)
class LinkTimesConfig:
    """Settings of the demo's steps at three link rates."""

    run: PretrainConfig
    out: Path
    """File for the times."""
    why_calculated: str
    """Why the times are calculated; "" measures them on a shaped link."""

    @classmethod
    def of(cls, demo: DemoConfig, *, why_calculated: str) -> LinkTimesConfig:
        """Return the settings for a demo."""
        run = next(run for variant, run in demo.comparison().runs() if variant.strategy == "sdp4bit")
        # Enough steps to draw from; the run is dropped afterwards.
        run = replace(run, training=replace(run.training, steps=10_000))
        return cls(run=run, out=demo.links, why_calculated=why_calculated)

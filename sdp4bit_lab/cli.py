"""The `sdp4bit` command: one registry of what it can do."""

from __future__ import annotations

import difflib
import os
import pkgutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sdp4bit import __version__

if TYPE_CHECKING:
    from sdp4bit_lab.compare.config import CompareConfig, DemoConfig
    from sdp4bit_lab.plan.config import PlanConfig, ProbeConfig
    from sdp4bit_lab.pretrain.config.checkpoint import ExportConfig
    from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
    from sdp4bit_lab.pretrain.data.preprocess import PreprocessConfig
    from sdp4bit_lab.report.command import ReportConfig
    from sdp4bit_lab.selftest.config import SelftestConfig

_TRAINING = ("tyro", "rich", "tensorboard", "tokenizers", "yaml")
_ABOUT = (
    "4-bit communication for sharded data parallel training. `sdp4bit COMMAND --help` shows the options that "
    "matter, `--help-all` all of them, `sdp4bit --version` the version."
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One of the commands."""

    name: str
    settings: str
    """Its settings class as module:class, imported when the command is chosen."""
    packages: Sequence[str]
    """Imports of the extra `lab` that it needs sooner or later: none of them is missed after hours."""
    shown: Sequence[str] = ()
    """Fields that `--help` shows; all of them if empty. `--help-all` always shows all."""
    takes_reference_flags: bool = False
    """Whether it takes flags of the reference implementation that have no effect here."""
    run: Callable[[Any], int]
    """Does what the settings say and returns the exit code."""

    @property
    def description(self) -> str:
        """What `--help` says of it."""
        return " ".join((self.run.__doc__ or "").split())

    def parse(self, options: Sequence[str]) -> Any:
        """Return the settings; prints help or an error and exits instead where that is due.

        Options may stand in a file, given by --config-file, if the command needs yaml.

        Raises:
            SettingError: options that contradict each other, or a package that is missing.
        """
        from sdp4bit_lab.common.settings import SettingError, short_help

        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise SettingError(
                f'`sdp4bit {self.name}` needs {", ".join(missing)}: pip install "sdp4bit[lab]"'
            )
        settings, prog = pkgutil.resolve_name(self.settings), f"sdp4bit {self.name}"
        if self.shown and ("--help" in options or "-h" in options):
            print(short_help(settings, prog=prog, description=self.description, shown=self.shown), end="")
            raise SystemExit(0)
        options = ["--help" if option == "--help-all" else option for option in options]
        if "tyro" not in self.packages:
            from sdp4bit_lab.common.plain_parser import parse_without_tyro

            return parse_without_tyro(settings, options, prog=prog, description=self.description)
        if "yaml" in self.packages:
            from sdp4bit_lab.common.config_file import expand_config_file

            options = expand_config_file(options)
        if self.takes_reference_flags:
            from sdp4bit_lab.pretrain.config.reference_flags import drop_reference_flags

            options, notes = drop_reference_flags(options)
            if os.environ.get("RANK", "0") == "0":
                for note in notes:
                    print(f"sdp4bit: {note}", file=sys.stderr)
        import tyro

        # Options have the names of their fields alone; a test keeps those unique.
        config = (tyro.conf.OmitArgPrefixes,)
        return tyro.cli(settings, prog=prog, description=self.description, args=options, config=config)


COMMANDS: dict[str, Command] = {}


def _command(
    name: str, *, shown: str = "", **options: Any
) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
    """Return a decorator that registers a function; its docstring is the command's description."""

    def register(run: Callable[[Any], int]) -> Callable[[Any], int]:
        COMMANDS[name] = Command(name=name, run=run, shown=shown.split(), **options)
        return run

    return register


@_command(
    "pretrain",
    settings="sdp4bit_lab.pretrain.config.pretrain:PretrainConfig",
    packages=_TRAINING,
    takes_reference_flags=True,
    shown="""strategy model_card data_path tokenizer_model vocabulary_size steps micro_batch_size
    global_batch_size sequence_length learning_rate param_dtype compile eval_interval
    nproc_per_node ranks_per_node simulated_ranks tensor_model_parallel_size pipeline_model_parallel_size
    save save_interval auto_resume out log_interval alerts seed dry_run""",
)
def _pretrain(config: PretrainConfig) -> int:
    """Pretrain a GPT with FSDP2 and quantized communication. Starts --nproc-per-node processes on this
    machine; under torchrun, torchrun starts them. Options may also stand in a file, with --config-file
    NAME.yaml or NAME.toml; those on the command line win."""
    if config.dry_run:
        from sdp4bit_lab.plan.dry_run import print_dry_run

        print_dry_run(config)
        return 0
    from sdp4bit_lab.common.launch.local import run_on_ranks

    return run_on_ranks("sdp4bit_lab.pretrain.trainer:pretrain", config=config, parallel=config.parallel)


@_command(
    "compare",
    settings="sdp4bit_lab.compare.config:CompareConfig",
    packages=(*_TRAINING, "matplotlib", "scipy"),
    takes_reference_flags=True,
    shown="""strategies seeds baseline merge out model_card data_path tokenizer_model vocabulary_size steps
    micro_batch_size global_batch_size sequence_length learning_rate param_dtype eval_interval
    nproc_per_node ranks_per_node simulated_ranks log_interval""",
)
def _compare(config: CompareConfig) -> int:
    """Train the same model with several strategies and seeds, one after another, and compare their losses.
    Stopped or killed, the same command goes on with the runs that are left."""
    if config.merge:
        from sdp4bit_lab.compare.run import merge_comparisons

        merge_comparisons(config)
        return 0
    from sdp4bit_lab.common.launch.local import run_on_ranks

    return run_on_ranks("sdp4bit_lab.compare.run:compare", config=config, parallel=config.parallel)


@_command(
    "demo",
    settings="sdp4bit_lab.compare.config:DemoConfig",
    packages=(*_TRAINING, "matplotlib", "scipy"),
)
def _demo(config: DemoConfig) -> int:
    """Train a small GPT on 4 processes of this machine that stand for 2 nodes of 2 ranks: first with plain
    FSDP2, then with 4-bit communication. Stopped or killed, the same command goes on."""
    return _compare(config.comparison())


@_command(
    "export",
    settings="sdp4bit_lab.pretrain.config.checkpoint:ExportConfig",
    packages=("tyro", "rich", "safetensors", "tokenizers"),
)
def _export(config: ExportConfig) -> int:
    """Write the model and tokenizer of a checkpoint as a Hugging Face GPT-2 model: config.json,
    model.safetensors and the tokenizer's files. One process, no GPU."""
    from sdp4bit_lab.pretrain.export import export_model

    print(f"sdp4bit: written {export_model(config)}")
    return 0


@_command(
    "preprocess",
    settings="sdp4bit_lab.pretrain.data.preprocess:PreprocessConfig",
    packages=("tyro", "rich", "tokenizers"),
)
def _preprocess(config: PreprocessConfig) -> int:
    """Turn documents (.jsonl, plain text) into Megatron's .bin/.idx files, which pretrain and compare read
    with --data-path."""
    from sdp4bit_lab.pretrain.data.preprocess import preprocess

    preprocess(config)
    return 0


@_command(
    "plan",
    settings="sdp4bit_lab.plan.config:PlanConfig",
    packages=("tyro", "rich", "scipy", "yaml"),
    shown="""strategy model_card cluster device probe nodes devices_per_node inter_bandwidth intra_bandwidth
    device_tflops tensor_parallel pipeline_parallel micro_batch_size accumulation engine overlap json
    reproduce_table_2""",
)
def _plan(config: PlanConfig) -> int:
    """Predict the gain of quantized communication on a cluster: bytes, step time, memory, a recommendation.
    Nothing is trained; the clusters are the paper's, described by options, or measured by `sdp4bit probe`."""
    from sdp4bit_lab.plan.command import run_plan

    return run_plan(config)


@_command("probe", settings="sdp4bit_lab.plan.config:ProbeConfig", packages=("tyro", "yaml"))
def _probe(config: ProbeConfig) -> int:
    """Measure the intra-node and inter-node bandwidth and the speed of quantization, for `sdp4bit plan
    --probe`. Starts --nproc-per-node processes on this machine; under torchrun, torchrun starts them."""
    from sdp4bit_lab.common.launch.local import run_on_ranks

    return run_on_ranks(
        "sdp4bit_lab.plan.probe:probe", config=config, parallel=config.parallel, leaves_early=False
    )


@_command("selftest", settings="sdp4bit_lab.selftest.config:SelftestConfig", packages=())
def _selftest(config: SelftestConfig) -> int:
    """Check that the library works on these machines, and recommend it or not: kernels against the reference,
    exchanges over the real network, streams under random delays, a training run. Under torchrun, or with
    --nproc-per-node; one process alone checks kernels."""
    from sdp4bit_lab.common.launch.local import run_on_ranks

    if config.device == "cpu":
        # Before any process asks for GPUs, which decides the back end of its exchanges.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return run_on_ranks(
        "sdp4bit_lab.selftest.command:selftest", config=config, parallel=config.parallel, leaves_early=False
    )


@_command(
    "report",
    settings="sdp4bit_lab.report.command:ReportConfig",
    packages=("tyro", "jinja2", "plotly", "rich", "scipy"),
)
def _report(config: ReportConfig) -> int:
    """Show training runs on one HTML page: does the loss suffer, how many bytes are saved, are the runs
    healthy? Reads the --out folders of pretrain, compare and demo, also while they run."""
    from sdp4bit_lab.report.command import write_report

    print(f"sdp4bit: written {write_report(config)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of the command: 0, 2 for a wrong setting, 1 or a signal's for a failed run."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--version"]:
        print(f"sdp4bit {__version__}")
        return 0
    if arguments and arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    from sdp4bit_lab.common.settings import EXIT_SETTING, SettingError

    try:
        if not arguments:
            raise SettingError(f"no command is given: use one of {', '.join(COMMANDS)}")
        if arguments[0] not in COMMANDS:
            near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
            raise SettingError(f"{arguments[0]!r} is not a command: {hint}")
        command = COMMANDS[arguments[0]]
        return command.run(command.parse(arguments[1:]))
    except SettingError as error:
        print(f"sdp4bit: error: {error}", file=sys.stderr)
        return EXIT_SETTING
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _overview() -> str:
    """List the commands, without importing the settings of any."""
    lines = ["usage: sdp4bit COMMAND [options]", "", *textwrap.wrap(_ABOUT, 80), "", "commands:"]
    for name, command in COMMANDS.items():
        lines += textwrap.wrap(
            f"{name:12}{command.description}", 80, initial_indent="  ", subsequent_indent=" " * 14
        )
    return "\n".join(lines)

"""Register and run the commands of `sdp4bit`."""

from __future__ import annotations

import difflib
import os
import pkgutil
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sdp4bit import __version__
from sdp4bit.addresses import install
from sdp4bit_lab.common.files import shorten_warnings
from sdp4bit_lab.common.settings import EXIT_SETTING, SettingError

if TYPE_CHECKING:
    from sdp4bit_lab.common.launch.config import RanksConfig
    from sdp4bit_lab.compare.config import CompareConfig, DemoConfig
    from sdp4bit_lab.plan.config import PlanConfig, ProbeConfig
    from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
    from sdp4bit_lab.pretrain.data.preprocess import PreprocessConfig
    from sdp4bit_lab.report.command import ReportConfig
    from sdp4bit_lab.selftest.config import SelftestConfig

_CONFIG_FILE = ("yaml",) if sys.version_info >= (3, 11) else ("yaml", "tomli")
_TRAINING = ("rich", "safetensors", "tensorboard", "tokenizers", *_CONFIG_FILE)
_ABOUT = (
    "4-bit communication for sharded data parallel training. `sdp4bit COMMAND --help` shows the common "
    "options, `--help-all` all of them, and `sdp4bit --version` the version."
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """Describe one command: its settings, requirements and entry point."""

    name: str
    settings: str
    """Settings class as module:class, imported when the command is chosen."""
    packages: Sequence[str]
    """Packages of the extra `lab` that must be installed."""
    shown: Sequence[str] = ()
    """Fields that `--help` lists; () for all. `--help-all` always lists all."""
    takes_reference_flags: bool = False
    """Whether to accept flags of the reference implementation."""
    summary: str
    """Line in the list of commands."""
    run: Callable[[Any], int]
    """Return the exit code. The docstring is the command's description."""

    @property
    def description(self) -> str:
        return " ".join((self.run.__doc__ or "").split())

    def parse(self, options: Sequence[str]) -> Any:
        """Return the settings; print help and exit if asked.

        Commands that depend on yaml also accept --config-file.

        Raises:
            SettingError: conflicting options, or a missing package.
        """
        from sdp4bit_lab.common.options import check_known, parse, primary_flags

        missing = [name for name in self.packages if find_spec(name) is None]
        if missing:
            raise SettingError(f"`sdp4bit {self.name}` needs {', '.join(missing)}: {install('lab')}")
        settings, prog = pkgutil.resolve_name(self.settings), f"sdp4bit {self.name}"
        if {"--help", "-h", "--help-all"} & set(options):
            self._print_help(settings, prog=prog, shown=() if "--help-all" in options else self.shown)
            raise SystemExit(0)
        if "yaml" in self.packages:
            options = self._with_config_file(settings, options)
        if not self.takes_reference_flags:
            return parse(settings, options, prog=prog)
        from sdp4bit_lab.pretrain.config.reference_flags import size_problems, translate

        translation = translate(options, known=primary_flags(settings))
        check_known(settings, translation.options, prog=prog, problems=translation.problems)
        parsed: Any = parse(settings, translation.options, prog=prog)
        shape = parsed.model.shape(vocabulary=1, sequence_length=1)
        if problems := size_problems(translation.sizes, shape):
            raise SettingError("; ".join(problems))
        if translation.note and os.environ.get("RANK", "0") == "0":
            print(f"sdp4bit: {translation.note}", file=sys.stderr)
        return parsed

    def _with_config_file(self, settings: type, options: Sequence[str]) -> Sequence[str]:
        from sdp4bit_lab.common.config_file import expand_config_file
        from sdp4bit_lab.common.options import opposite_flags, primary_flags

        names, switches = primary_flags(settings), opposite_flags(settings)
        if self.takes_reference_flags:
            from sdp4bit_lab.pretrain.config.reference_flags import reference_flags

            flags = reference_flags()
            names |= {flag: flag for flag in flags}
            switches |= {flag: "" for flag, is_switch in flags.items() if is_switch}
        return expand_config_file(options, names=names, switches=switches)

    def _print_help(self, settings: type, *, prog: str, shown: Sequence[str]) -> None:
        from sdp4bit_lab.common.options import format_help

        others = []
        if self.takes_reference_flags:
            from sdp4bit_lab.pretrain.config.reference_flags import described_flags

            others = [f"{outcome}: {flags}. {reason}" for flags, outcome, reason in described_flags()]
            others.insert(0, "Flags of Megatron-LM and of the reference implementation:")
        text = format_help(settings, prog=prog, description=self.description, shown=shown, others=others)
        print(text, end="", flush=True)


COMMANDS: dict[str, Command] = {}


def _command(
    name: str, *, summary: str, shown: str = "", **options: Any
) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
    """Return a decorator that registers a command."""

    def register(run: Callable[[Any], int]) -> Callable[[Any], int]:
        COMMANDS[name] = Command(name=name, summary=summary, run=run, shown=shown.split(), **options)
        return run

    return register


@_command(
    "pretrain",
    summary="train a GPT with quantized communication",
    settings="sdp4bit_lab.pretrain.config.pretrain:PretrainConfig",
    packages=_TRAINING,
    takes_reference_flags=True,
    shown="""strategy model_card data_path tokenizer_model vocabulary_size steps micro_batch_size
    global_batch_size sequence_length learning_rate param_dtype compile eval_interval
    nproc_per_node ranks_per_node simulated_ranks tensor_model_parallel_size pipeline_model_parallel_size
    save save_interval auto_resume out log_interval alerts seed""",
)
def _pretrain(config: PretrainConfig) -> int:
    """Pretrain a GPT with FSDP2 and quantized communication. Starts --nproc-per-node processes on this
    machine, or uses those that a launcher has started. --config-file NAME.yaml (or .toml) reads options
    from a file; options on the command line override it."""
    config.checkpoint.check_load()
    return _run_on_ranks("sdp4bit_lab.pretrain.trainer:pretrain", config, config.parallel)


@_command(
    "compare",
    summary="train with several strategies and seeds, and compare the losses",
    settings="sdp4bit_lab.compare.config:CompareConfig",
    packages=(*_TRAINING, "matplotlib", "scipy"),
    takes_reference_flags=True,
    shown="""strategies seeds baseline merge jobs out model_card data_path tokenizer_model vocabulary_size
    steps micro_batch_size global_batch_size sequence_length learning_rate param_dtype eval_interval
    nproc_per_node ranks_per_node simulated_ranks log_interval""",
)
def _compare(config: CompareConfig) -> int:
    """Train the same model with several strategies and seeds, and compare their losses. If it is interrupted,
    the same command continues with the remaining runs."""
    if config.merge:
        from sdp4bit_lab.compare.run import merge_comparisons

        merge_comparisons(config)
        return 0
    from sdp4bit_lab.common.launch.config import RanksConfig

    # With --jobs, this process starts the ranks of every run itself.
    parallel = config.parallel if config.jobs == 1 else RanksConfig(nproc_per_node=1)
    return _run_on_ranks("sdp4bit_lab.compare.run:compare", config, parallel)


@_command(
    "demo",
    summary="show the gain with a small GPT: step times on slow links, losses",
    settings="sdp4bit_lab.compare.config:DemoConfig",
    packages=(*_TRAINING, "matplotlib", "scipy"),
)
def _demo(config: DemoConfig) -> int:
    """Show the gain with a small GPT on 4 local processes that represent 2 nodes of 2 ranks. The demo trains
    with plain FSDP2 and with 4-bit communication, and prints the losses of both and the time of a step at
    three link rates. With root, the nodes are joined by a shaped link; otherwise the times are calculated.
    It takes about 4 minutes on two idle cores. If it is interrupted, the same command continues."""
    _import_torch(config.comparison().parallel)
    from sdp4bit_lab.compare.demo import demo

    return demo(config)


@_command(
    "preprocess",
    summary="tokenize documents for --data-path",
    settings="sdp4bit_lab.pretrain.data.preprocess:PreprocessConfig",
    packages=("rich", "tokenizers"),
)
def _preprocess(config: PreprocessConfig) -> int:
    """Tokenize documents (.jsonl, plain text) into Megatron's .bin/.idx files, which --data-path reads."""
    from sdp4bit_lab.pretrain.data.preprocess import preprocess

    preprocess(config)
    return 0


@_command(
    "plan",
    summary="predict the gain on a cluster",
    settings="sdp4bit_lab.plan.config:PlanConfig",
    packages=("rich", "matplotlib", *_CONFIG_FILE),
    shown="""strategy model_card hf_config cluster device probe nodes devices_per_node inter_bandwidth
    intra_bandwidth device_tflops tensor_parallel pipeline_parallel micro_batch_size accumulation
    engine overlap json plot""",
)
def _plan(config: PlanConfig) -> int:
    """Predict the gain of quantized communication on a cluster: bytes, step time, memory and a
    recommendation. The cluster is described by options, measured by `sdp4bit probe`, or one of the
    paper's."""
    from sdp4bit_lab.plan.command import run_plan

    return run_plan(config)


@_command(
    "probe",
    summary="measure a cluster for plan",
    settings="sdp4bit_lab.plan.config:ProbeConfig",
    packages=_CONFIG_FILE,
)
def _probe(config: ProbeConfig) -> int:
    """Measure intra-node and inter-node bandwidth and quantization speed for `sdp4bit plan --probe`. Starts
    --nproc-per-node processes on this machine, or uses those that a launcher has started."""
    return _run_on_ranks("sdp4bit_lab.plan.probe:probe", config, config.parallel, leaves_early=False)


@_command(
    "selftest",
    summary="check that the library works on these machines",
    settings="sdp4bit_lab.selftest.config:SelftestConfig",
    packages=(),
)
def _selftest(config: SelftestConfig) -> int:
    """Check that the library works on these machines, and whether it is faster there. Compares kernels with
    the reference, collectives on the real network with a simulation, and a short training run with plain
    FSDP2. Needs torchrun or --nproc-per-node, or --share-gpu on a single GPU; one rank checks the
    kernels only."""
    if config.device == "cpu":
        # Before torch.cuda is first queried, because visible GPUs would select NCCL.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    program = "sdp4bit_lab.selftest.command:selftest"
    if config.share_gpu is None:
        return _run_on_ranks(program, config, config.parallel, leaves_early=False)
    from sdp4bit_lab.selftest.sharing import shared_gpu

    with shared_gpu(config) as variables:
        parallel = replace(config.parallel, nproc_per_node=config.share_gpu)
        return _run_on_ranks(program, config, parallel, leaves_early=False, variables=variables)


@_command(
    "report",
    summary="write an HTML page about training runs",
    settings="sdp4bit_lab.report.command:ReportConfig",
    packages=("jinja2", "plotly", "rich", "scipy"),
)
def _report(config: ReportConfig) -> int:
    """Write an HTML page about training runs: loss, inter-node bytes and training stability. Reads the --out
    folders of pretrain, compare and demo, even during training."""
    from sdp4bit_lab.common.progress import start_progress

    start_progress("reading the runs")
    from sdp4bit_lab.report.command import write_report

    print(f"sdp4bit: wrote {write_report(config)}")
    return 0


def _run_on_ranks(program: str, config: object, parallel: RanksConfig, **options: Any) -> int:
    """Join the launcher's ranks if there is one, import torch, and call `run_on_ranks`."""
    _import_torch(parallel)
    from sdp4bit_lab.common.launch.local import run_on_ranks

    return run_on_ranks(program, config=config, parallel=parallel, **options)


def _import_torch(parallel: RanksConfig) -> None:
    """Join the launcher's ranks if there is one, and import torch, which takes seconds and is shown."""
    from sdp4bit_lab.common.launch.environment import adopt_launcher
    from sdp4bit_lab.common.progress import start_progress

    adopt_launcher(parallel)
    # For the ranks, too: without reverse DNS every connection prints a warning. Errors are still printed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_progress("importing torch")
    import torch  # noqa: F401


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, 2 for a wrong setting, 1, 3 or 128 + signal for a failed run."""
    shorten_warnings()
    try:
        code = _main(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        from sdp4bit_lab.common.failures import outcome

        if (ending := outcome(error)) is None:
            raise
        print(f"sdp4bit: error: {ending[0]}", file=sys.stderr)
        return ending[1]


def _main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"sdp4bit {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else EXIT_SETTING
    if arguments[0] not in COMMANDS:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
        raise SettingError(f"{arguments[0]!r} is not a command: {hint}")
    command = COMMANDS[arguments[0]]
    settings = command.parse(arguments[1:])

    from sdp4bit_lab.common.progress import end_progress

    try:
        return command.run(settings)
    finally:
        end_progress()


def _overview() -> str:
    """List the commands, one per line, without importing their settings."""
    commands = (f"  {name:12}{command.summary}" for name, command in COMMANDS.items())
    head = ("usage: sdp4bit COMMAND [options]", "", *textwrap.wrap(_ABOUT, 80), "", "commands:")
    return "\n".join([*head, *commands])

"""The `sdp4bit` command: preprocess, pretrain, compare, demo, export, import, plan, probe, report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

EXIT_SETTING = 2
_PACKAGES = ("tyro", "rich", "tokenizers", "numpy", "matplotlib", "safetensors")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of the command: 0, 2 for a wrong setting, 1 or a signal's for a failed run."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        return _wrong_setting(f"this command needs {', '.join(missing)}: pip install sdp4bit[pretrain]")
    from sdp4bit.pretrain.options import SettingError

    try:
        return _run(parse(arguments))
    except SettingError as error:
        return _wrong_setting(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parse(arguments: Sequence[str] | None) -> Any:
    """Return the settings of the chosen command; their class says which it is."""
    import tyro

    from sdp4bit.compare.config import CompareConfig, DemoConfig
    from sdp4bit.plan.config import PlanConfig
    from sdp4bit.plan.probe_config import ProbeConfig
    from sdp4bit.pretrain.checkpoint.config import ExportConfig, ImportConfig
    from sdp4bit.pretrain.config.file import expand_config_file
    from sdp4bit.pretrain.config.pretrain import PretrainConfig
    from sdp4bit.pretrain.data.preprocess import PreprocessConfig
    from sdp4bit.report.command import ReportConfig

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    classes = {"pretrain": PretrainConfig, "compare": CompareConfig, "demo": DemoConfig}
    classes |= {"plan": PlanConfig, "probe": ProbeConfig}
    if arguments and arguments[0] in classes:
        arguments[1:] = expand_config_file(arguments[1:], settings=classes[arguments[0]])
    commands: Any = (
        Annotated[PretrainConfig, tyro.conf.subcommand("pretrain", description=_PRETRAIN)]
        | Annotated[CompareConfig, tyro.conf.subcommand("compare", description=_COMPARE)]
        | Annotated[DemoConfig, tyro.conf.subcommand("demo", description=_DEMO)]
        | Annotated[ExportConfig, tyro.conf.subcommand("export", description=_EXPORT)]
        | Annotated[ImportConfig, tyro.conf.subcommand("import", description=_IMPORT)]
        | Annotated[PreprocessConfig, tyro.conf.subcommand("preprocess", description=_PREPROCESS)]
        | Annotated[PlanConfig, tyro.conf.subcommand("plan", description=_PLAN)]
        | Annotated[ProbeConfig, tyro.conf.subcommand("probe", description=_PROBE)]
        | Annotated[ReportConfig, tyro.conf.subcommand("report", description=_REPORT)]
    )
    return tyro.cli(
        commands,
        prog="sdp4bit",
        description="4-bit communication for sharded data parallel training.",
        args=arguments,
        # Options have the names of their fields alone; a test keeps those unique.
        config=(tyro.conf.OmitArgPrefixes,),
    )


_PRETRAIN = (
    "Pretrain a GPT with FSDP2 and quantized communication. Starts --nproc-per-node processes on this "
    "machine; under torchrun, torchrun starts them. Options may also stand in a file, with --config-file "
    "NAME.yaml or NAME.toml; those on the command line win."
)
_COMPARE = (
    "Train the same model with several strategies and seeds, one after another, and compare their losses. "
    "Stopped or killed, the same command goes on with the runs that are left."
)
_PREPROCESS = (
    "Turn documents (.jsonl, also .gz or .zst, and .parquet) into Megatron's .bin/.idx files, which pretrain "
    "and compare read with --data-path."
)
_DEMO = (
    "Train a small GPT on 4 processes of this machine that stand for 2 nodes of 2 ranks: first with plain "
    "FSDP2, then with 4-bit communication."
)
_EXPORT = (
    "Write the model and tokenizer of a checkpoint as a Hugging Face GPT-2 model: config.json, "
    "model.safetensors and the tokenizer's files. One process, no GPU."
)
_IMPORT = (
    "Write a Hugging Face GPT-2 model as a checkpoint, which `sdp4bit pretrain --load` continues from at "
    "step 0 with a new optimizer. One process, no GPU."
)
_PLAN = (
    "Say what quantized communication would gain on a cluster: bytes, step time, memory, a verdict. Nothing "
    "is trained; the clusters are the paper's, described by options, or measured by `sdp4bit probe`."
)
_PROBE = (
    "Measure the bandwidth inside and between nodes and the speed of quantization, for `sdp4bit plan "
    "--probe`. Starts --nproc-per-node processes on this machine; under torchrun, torchrun starts them."
)
_REPORT = (
    "Show training runs on one HTML page: losses, bytes, times, quantization errors, alerts. Reads the files "
    "that pretrain, compare and demo write into --out, also while they run."
)


def _run(config: Any) -> int:
    from sdp4bit.compare.config import CompareConfig, DemoConfig
    from sdp4bit.plan.config import PlanConfig
    from sdp4bit.plan.probe_config import ProbeConfig
    from sdp4bit.pretrain.checkpoint.config import ExportConfig, ImportConfig
    from sdp4bit.pretrain.data.preprocess import PreprocessConfig
    from sdp4bit.pretrain.launch.local import run_on_ranks
    from sdp4bit.report.command import ReportConfig, write_report

    if isinstance(config, ReportConfig):
        print(f"sdp4bit: written {write_report(config)}")
        return 0
    if isinstance(config, PlanConfig):
        from sdp4bit.plan.command import run_plan

        return run_plan(config)
    if isinstance(config, ProbeConfig):
        from sdp4bit.plan.probe import probe

        return run_on_ranks(probe, config=config, parallel=config.parallel, leaves_early=False)

    if isinstance(config, PreprocessConfig):
        from sdp4bit.pretrain.data.preprocess import preprocess

        preprocess(config)
        return 0
    if isinstance(config, DemoConfig):
        from sdp4bit.compare.demo import demo

        return run_on_ranks(demo, config=config, parallel=config.comparison().parallel)
    if isinstance(config, CompareConfig):
        from sdp4bit.compare.run import compare, merge_comparisons

        if config.merge:
            merge_comparisons(config)
            return 0
        return run_on_ranks(compare, config=config, parallel=config.parallel)
    if isinstance(config, ExportConfig | ImportConfig):
        from sdp4bit.pretrain.checkpoint.huggingface import export_model, import_model

        written = export_model(config) if isinstance(config, ExportConfig) else import_model(config)
        print(f"sdp4bit: written {written}")
        return 0
    if config.dry_run:
        from sdp4bit.plan.dry_run import print_dry_run

        print_dry_run(config)
        return 0
    from sdp4bit.pretrain.trainer import pretrain

    return run_on_ranks(pretrain, config=config, parallel=config.parallel)


def _wrong_setting(message: str) -> int:
    print(f"sdp4bit: error: {message}", file=sys.stderr)
    return EXIT_SETTING

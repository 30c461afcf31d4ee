"""The order of imports between the rooms of `sdp4bit`, and the length of source files.

Layer: no process. Source is parsed, never imported, so a broken room does not hide another one's
violation. An import counts wherever it stands: inside a function, under TYPE_CHECKING, or as a
string given to `import_module`.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

MAX_LINES = 600
SOURCE_SUFFIXES = {".py", ".sh", ".toml", ".yaml", ".yml"}

# What each room may import besides itself: what stands left of it. A room is the longest of these names that
# a module's name begins with; "api" stands for the names of `sdp4bit/__init__.py`.
METHOD = {"config", "quantization", "traffic", "collectives"}
ENGINES = METHOD | {"engines", "engines.ddp", "engines.fsdp2", "engines.megatron", "engines.simulated"}
LIBRARY = ENGINES | {"megatron", "api"}
_IN_PRETRAIN = (
    "text",
    "marks",
    "options",
    "model",
    "launch",
    "data",
    "checkpoint",
    "config",
    "timers",
    "step",
    "stability",
    "paired",
    "metrics",
)
PRETRAIN = {f"pretrain.{part}" for part in (*_IN_PRETRAIN, "stopping", "loop", "trainer")}
PROGRAMS = {"compare", "plan", "report"}
MAY_IMPORT = {
    "config": set(),
    "quantization": {"config"},
    "kernels": {"quantization"},
    "traffic": {"config", "quantization.layout"},
    "collectives": {"config", "quantization", "traffic"},
    "engines": METHOD,
    **{f"engines.{engine}": METHOD | {"engines"} for engine in ("ddp", "fsdp2", "megatron", "simulated")},
    "megatron": ENGINES,
    "trainers": ENGINES,
    "api": ENGINES | {"megatron"},
    **{
        f"pretrain.{part}": LIBRARY | {f"pretrain.{left}" for left in _IN_PRETRAIN[:place]}
        for place, part in enumerate(_IN_PRETRAIN)
    },
    **{f"pretrain.{part}": LIBRARY | PRETRAIN for part in ("stopping", "loop", "trainer")},
    "pretrain": LIBRARY,
    **dict.fromkeys(PROGRAMS, LIBRARY | PRETRAIN),
    "selftest": LIBRARY | PRETRAIN | {"plan"},
    "cli": LIBRARY | PRETRAIN | PROGRAMS | {"selftest"},
    "__main__": {"cli"},
}
ROOMS = MAY_IMPORT.keys() - {"api"}
KERNEL_CALLER = "sdp4bit.quantization.ops"
MOST_FILES = 20
"""Source files in a folder of the package."""


def module_name(path: Path) -> str:
    """Dotted name of a source file given relative to the repository root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room a dotted name lies in; a name that is no room belongs to the package itself."""
    parts = module.split(".")
    names = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
    return next((name for name in names if name in ROOMS), "api")


def static_text(node: ast.expr) -> str:
    """What is known of a string before the program runs: all of a literal, an f-string's start."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return static_text(node.values[0])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that one statement or call imports, relative ones resolved in `package`."""

    def absolute(name: str, level: int) -> str:
        if level == 0:
            return name
        return ".".join([*package.split(".")[: len(package.split(".")) - level + 1], name])

    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(node.module or "", node.level).rstrip(".")
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func).split(".")[-1]
        if called in {"import_module", "__import__"}:
            text = static_text(node.args[0])
            yield absolute(text.lstrip("."), len(text) - len(text.lstrip(".")))


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, and whether it runs only when a function is called."""
    for child in ast.iter_child_nodes(node):
        yield child, lazy
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk(child, lazy or inside)


def violations(source: str, path: Path) -> list[str]:
    """Imports in `source` that the order of rooms forbids, one line of text each."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    room = room_of(module)
    if room == "api" and module != "sdp4bit":
        return [f"{path}: not a known room; give it a place in MAY_IMPORT"]
    found = []
    for node, lazy in walk(ast.parse(source)):
        for name in imported(node, package):
            if name.split(".")[0] != "sdp4bit":
                continue
            target = room_of(name)
            if target == room:
                continue
            where = f"{path}:{getattr(node, 'lineno', 0)}: {room} imports {name}"
            if target == "kernels":
                if module != KERNEL_CALLER:
                    found.append(f"{where}; only {KERNEL_CALLER} may")
                elif not lazy:
                    found.append(f"{where} when it is itself imported, not when an op is called")
            elif target not in MAY_IMPORT[room]:
                parts = [part for part in MAY_IMPORT[room] if part.startswith(f"{target}.")]
                if not any(f"{name}.".startswith(f"sdp4bit.{part}.") for part in parts):
                    found.append(where)
    return found


def python_files(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


def test_every_room_imports_only_what_stands_left_of_it() -> None:
    files = python_files("sdp4bit")
    assert Path("sdp4bit/__init__.py") in files
    found = [line for path in files for line in violations((ROOT / path).read_text(), path)]
    assert not found, "\n".join(found)


def test_no_folder_of_the_package_holds_more_files_than_can_be_overlooked() -> None:
    counts = Counter(path.parent for path in python_files("sdp4bit"))
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


def test_no_source_file_is_longer_than_the_limit() -> None:
    files = [
        path
        for folder in ("sdp4bit", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCE_SUFFIXES
    ]
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 1
    long = [f"{path}: {n} lines" for path, n in sorted(lengths.items()) if n > MAX_LINES]
    assert not long, "\n".join(long)


LAZY = "def op():\n    "


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "import sdp4bit.quantization"),
        ("config.py", "import torch, sdp4bit.plan"),
        ("config.py", "from sdp4bit import SDP4BitConfig"),
        ("config.py", LAZY + "from sdp4bit.pretrain.config.pretrain import TrainConfig"),
        ("quantization/random.py", "from sdp4bit.collectives import work"),
        ("quantization/layout.py", "from ..traffic import TrafficCounter"),
        ("quantization/ops.py", "from sdp4bit.kernels import cpu"),
        ("quantization/ops.py", "class Backend:\n    from ..kernels import cpu"),
        ("quantization/ops.py", "if True:\n    import_module('sdp4bit.kernels.triton.backend')"),
        ("quantization/__init__.py", LAZY + "import sdp4bit.kernels.cpu.backend"),
        ("quantization/reference.py", LAZY + "import sdp4bit.kernels.cpu.backend"),
        ("kernels/cpu/backend.py", "from sdp4bit.collectives.topology import Topology"),
        ("kernels/cpu/backend.py", "from sdp4bit.config import SDP4BitConfig"),
        ("traffic.py", "from sdp4bit.quantization import reference"),
        ("traffic.py", "from sdp4bit.quantization.layouts import Layout"),
        ("traffic.py", "import sdp4bit.plan"),
        ("plan/step.py", "import sdp4bit.compare"),
        ("plan/step.py", "from .. import report"),
        ("collectives/work.py", "from sdp4bit import plan"),
        ("collectives/work.py", "from ..engines.fsdp2.api import CommHandle"),
        ("collectives/__init__.py", "from .. import engines"),
        ("collectives/work.py", "from typing import Any\nif Any:\n    import sdp4bit.engines"),
        ("engines/fsdp2/api.py", LAZY + "from sdp4bit.pretrain import model"),
        ("engines/fsdp2/api.py", "importlib.import_module(f'sdp4bit.kernels.{name}')"),
        ("engines/fsdp2/api.py", "import_module('...pretrain', __package__)"),
        ("engines/fsdp2/api.py", "import sdp4bit"),
        ("__init__.py", LAZY + "from sdp4bit.pretrain import trainer"),
        ("__init__.py", "from .cli import main"),
        ("engines/fsdp2/hooks.py", "from sdp4bit.engines.megatron import patches"),
        ("engines/audit.py", "from sdp4bit.engines.fsdp2.groups import FSDPGroup"),
        ("pretrain/model/gpt.py", "from sdp4bit.cli import main"),
        ("pretrain/model/gpt.py", "from sdp4bit.pretrain.launch.config import ParallelConfig"),
        ("pretrain/data/config.py", "from sdp4bit.pretrain.trainer import pretrain"),
        ("pretrain/trainer.py", "from sdp4bit.plan import memory"),
        ("pretrain/__init__.py", "from sdp4bit.pretrain import trainer"),
        ("cli.py", LAZY + "from sdp4bit.kernels import cuda"),
        ("utils.py", "import math"),
    ],
)
def test_violation_is_found(path: str, source: str) -> None:
    assert len(violations(source, Path("sdp4bit", path))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "import math\nfrom dataclasses import dataclass"),
        ("config.py", "import sdp4bit_extras.pretrain"),
        ("quantization/ops.py", LAZY + "from sdp4bit.kernels import cpu"),
        ("quantization/ops.py", LAZY + "import_module(f'sdp4bit.kernels.{name}')"),
        ("quantization/__init__.py", "from . import layout\nfrom .reference import quantize"),
        ("kernels/cpu/backend.py", "from sdp4bit.quantization.layout import Layout"),
        ("traffic.py", "from sdp4bit.quantization.layout import Layout"),
        ("plan/step.py", "from sdp4bit.quantization import layout\nimport sdp4bit.pretrain.config"),
        ("collectives/work.py", "from ..quantization import ops\nfrom sdp4bit import traffic"),
        ("engines/fsdp2/api.py", "from sdp4bit import collectives, engines, traffic"),
        ("__init__.py", "from sdp4bit.engines.fsdp2.api import quantize_communication"),
        ("pretrain/step/gradients.py", "from sdp4bit.pretrain.model import gpt"),
        ("report/page.py", "from sdp4bit.pretrain.metrics import read_metrics"),
        ("pretrain/trainer.py", "import sdp4bit\nfrom sdp4bit import SDP4BitConfig, engines"),
        ("cli.py", LAZY + "from sdp4bit.pretrain.trainer import Trainer\n    import sdp4bit.plan"),
        ("__main__.py", "from sdp4bit.cli import main"),
    ],
)
def test_allowed_import_passes(path: str, source: str) -> None:
    assert violations(source, Path("sdp4bit", path)) == []

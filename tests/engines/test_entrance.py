"""Adapters of other engines: found by entry points, and not needed. Layer: files; fresh processes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sdp4bit
from sdp4bit.engines import entrance
from tests import ADAPTERS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][entrance.ADAPTERS]
ADAPTER = """
def attach(model, **arguments):
    return model, arguments
"""
ALONE = f"""
import pkgutil, sys
from importlib import import_module
from importlib.util import find_spec
class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {(*ADAPTERS, "sdp4bit_lab")}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Absent)

import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import sdp4bit
from sdp4bit.engines import entrance

for each in pkgutil.walk_packages(sdp4bit.__path__, "sdp4bit."):
    if not each.name.startswith(("sdp4bit.trainers.", "sdp4bit.kernels.")):  # which need other packages
        import_module(each.name)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(8, 8))
engine = type("DeepSpeedEngine", (nn.Module,), {{"__module__": "deepspeed.runtime.engine"}})()
entrance.entry_points = lambda **_: ()
try:
    sdp4bit.quantize_communication(engine)
except ValueError as error:
    assert "DeepSpeedEngine communicates" in str(error) and "install sdp4bit again" in str(error), error
else:
    raise AssertionError
entrance.entry_points = None  # not read for a model of FSDP2
fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
comm = sdp4bit.quantize_communication(model)
model(torch.ones(2, 8)).sum().backward()
torch.optim.SGD(model.parameters()).step()
model(torch.ones(2, 8))
assert comm.stats()["steps"] == 1, comm.stats()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a package with entry points, as pip does."""

    def install(entries: str) -> None:
        (tmp_path / "adapter_of_a_test.py").write_text(ADAPTER)
        info = tmp_path / "adapter_of_a_test-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adapter_of_a_test\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{entrance.ADAPTERS}]\n{entries}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    return install


class Engine(nn.Module):
    """Has an adapter."""


class SpecialEngine(Engine):
    """Has none of its own."""


def test_an_engine_is_attached_by_the_adapter_of_its_nearest_class(install: Callable[[str], None]) -> None:
    install(f"{__name__}.Engine = adapter_of_a_test:attach\ntorch.nn.modules.module.Module = missing:attach")
    expected: dict[str, Any] = {"config": "sdp4bit", "topology": 2, "skip": None}
    for engine in (Engine(), SpecialEngine()):
        found: Any = sdp4bit.quantize_communication(engine, "sdp4bit", topology=2)
        assert found == (engine, expected)
    assert entrance._adapter_of([Engine()]) is None and entrance._adapter_of(3) is None


def test_the_adapters_of_this_repository_are_declared_and_need_no_engine() -> None:
    assert list(DECLARED) == ["deepspeed.runtime.engine.DeepSpeedEngine"]
    for target in DECLARED.values():
        module, _, name = target.partition(":")
        assert module in ADAPTERS and callable(getattr(import_module(module), name))


def test_the_installed_package_has_these_entry_points() -> None:
    """If not, install the package again."""
    found = importlib.metadata.distribution("sdp4bit").entry_points.select(group=entrance.ADAPTERS)
    assert {each.name: each.value for each in found} == DECLARED


@pytest.mark.slow
@pytest.mark.gloo
def test_the_library_trains_without_adapters() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

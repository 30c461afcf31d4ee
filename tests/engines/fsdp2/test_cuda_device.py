"""FSDP2 integration on a CUDA device that is not there: everything is on it, and the host waits for nothing.

Layer: FakeTensors in a process of its own, which sees the device that fake_device.cpp registers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.fsdp2 import fake_device

SOURCE = Path(__file__).with_name("fake_device.cpp")
RUNS = [f"{replica}, {audit}" for replica in ("node", "full") for audit in ("not audited", "audited")]


def compile_device(folder: Path) -> Path:
    """Return the compiled device; it is compiled again when torch, the compiler or the source is another."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler: neither $CXX, g++ nor c++ is there")
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this build of torch has a CUDA device of its own")
    from torch.utils import cpp_extension

    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(SOURCE.read_bytes() + version + repr((torch.__version__, torch.__file__)).encode())
    library = folder / f"{key.hexdigest()[:16]}.so"
    if not library.exists():
        torch_libraries = Path(torch.__file__).parent / "lib"
        working = folder / f"{library.name}.{os.getpid()}"
        command = [
            *(compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", str(SOURCE), "-o", str(working)),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in cpp_extension.include_paths()),
            *(f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}", "-lc10", "-ltorch_cpu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        working.replace(library)
    return library


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = getattr(request.config, "cache", None)
    folder = tmp_path_factory.mktemp("device") if cache is None else cache.mkdir("fake_device")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.fsdp2.fake_device", str(compile_device(folder))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert sorted(found["runs"]) == sorted(RUNS)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_all_that_a_step_uses_is_on_the_device(name: str, report: dict[str, Any]) -> None:
    run = report["runs"][name]
    # Messages are looked at one by one in the run itself: where they are, and that they have no holes.
    sent = run["collectives of each step"]
    assert len(sent) == fake_device.STEPS
    for step, kinds in enumerate(sent):
        assert "alltoall_base_ torch.uint8" in kinds
        # Only the first step's weights are in full precision between nodes.
        assert ("_allgather_base_ torch.uint8" in kinds) == (step > 0)
        is_audited = "not" not in name and step == fake_device.AUDIT_INTERVAL
        assert ("_allgather_base_ torch.int64" in kinds) == is_audited
    assert run["replicas"] == {"cuda:0": 3}
    for what in ("gradients", "optimizer", "held"):
        assert run[what]["cuda:0"] > 3
    assert set(run["gradients"]) == set(run["optimizer"]) == {"cuda:0"}
    # Measures and flags on their way to the host.
    assert set(run["held on the host"]) == {"torch.float64 pinned", "torch.bool pinned"}
    assert run["sampled step"] == fake_device.STEPS - 1


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_nothing_in_a_training_step(name: str, report: dict[str, Any]) -> None:
    run = report["runs"][name]
    for step, waits in enumerate(run["waits of each step"][1:], start=1):
        if "not" not in name and step == fake_device.AUDIT_INTERVAL:
            # An audit compares checksums on the host: that is what its interval is for.
            assert waits and all("audit_replicas" in place for place in waits)
        else:
            assert waits == []
    # What follows the last step is the first use of its weights, as in training.
    assert run["waits of each evaluation"][0] == []


def test_faults_in_the_hooks_are_seen(report: dict[str, Any]) -> None:
    for hook in ("AllGatherHook", "ReduceScatterHook"):
        faults = report["faults"][hook]["waits"]
        assert list(faults) == list(fake_device.FAULTS)
        assert min(faults.values()) > 0, faults
    # Backward has a thread of its own, as on a GPU.
    assert report["faults"]["AllGatherHook"]["threads"] == ["main", "other"]
    assert report["faults"]["ReduceScatterHook"]["threads"] == ["other"]
    assert "cpu" in report["misplaced"]

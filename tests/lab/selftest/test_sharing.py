"""`--share-gpu`: the ranks that it starts, the errors before it starts any, and the checks made for them.

Layers: functions; scripts in place of NVIDIA's programs; a fake process group; gloo; the command.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sdp4bit.engines.fsdp2 import api
from sdp4bit.engines.fsdp2.api import FSDPCommHandle
from sdp4bit_lab.common.launch import shared_gpu as launch
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.selftest import collectives, exchanges
from sdp4bit_lab.selftest.check import Check, Context, run_checks
from sdp4bit_lab.selftest.collectives import check_collectives
from sdp4bit_lab.selftest.config import SelftestConfig
from sdp4bit_lab.selftest.exchanges import GRADIENTS, WEIGHTS, check_exchanges
from sdp4bit_lab.selftest.sharing import shared_gpu
from sdp4bit_lab.selftest.training import check_removal
from tests.lab.pretrain.tiny_runs import command_line, this_rank
from tests.ranks import fake_world, run_ranks

# -- the command -----------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_share_a_device_pass_over_gloo(tmp_path: Path) -> None:
    path = tmp_path / "selftest.json"
    names = ["facts", "collectives", "training", "removal"]
    done = command_line(
        *("selftest", "--share-gpu", "4", "--ranks-per-node", "2", "--device", "cpu", "--steps", "3"),
        *("--only", ",".join(names), "--json", str(path)),
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    checks = {check["name"]: check for check in result["checks"]}
    assert [(name, check["result"]) for name, check in checks.items()] == [(name, "passed") for name in names]
    assert result["ranks"] == 4
    facts, communicated, _, removed = (checks[name]["findings"] for name in names)
    assert facts["backend"] == "gloo" and len(facts["ranks"]) == 4
    times = communicated["seconds"]
    assert list(times) == ["1024", "65536", "1048576", "8388608"]
    expected = {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"}
    assert all(set(of_size) == expected and min(of_size.values()) > 0 for of_size in times.values())
    assert removed["removed_after"] == 2
    assert [len(losses) for losses in removed["losses"].values()] == [3, 3]


def test_several_ranks_are_started_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"^--share-gpu 4 starts all ranks itself"):
        SelftestConfig(share_gpu=4, parallel=RanksConfig(nproc_per_node=2))
    with pytest.raises(SettingError, match=r"--ranks-per-node 3 does not divide the 4 ranks"):
        SelftestConfig(share_gpu=4, parallel=RanksConfig(ranks_per_node=3))
    with pytest.raises(SettingError, match=r"--share-gpu 1 must be at least 2"):
        SelftestConfig(share_gpu=1)
    monkeypatch.setenv("RANK", "0")
    assert SelftestConfig().share_gpu is None
    with pytest.raises(SettingError, match=r"without --nproc-per-node and torchrun"):
        SelftestConfig(share_gpu=4)


@pytest.mark.gloo
def test_without_a_gpu_the_command_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = command_line("selftest", "--share-gpu", "4")
    assert (done.returncode, done.stdout) == (2, "")
    error = f"sdp4bit: error: --share-gpu 4 needs a GPU, and torch {torch.__version__} sees none: "
    assert error in done.stderr and "over gloo with --device cpu" in done.stderr


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make torch see a GPU, and a script in place of nvidia-smi print its memory; return the script's log."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "_DRIVER_PROGRAMS", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def free(printed: str) -> Path:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" >> "$0.log"\n{printed}\n')
        program.chmod(0o755)
        return tmp_path / "nvidia-smi.log"

    return free


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (4095, "end other programs, or use --share-gpu 3"),
        (2047, "end other programs"),
        (12, "end other programs"),
    ],
)
def test_too_little_memory_is_named_with_numbers(
    memory: Callable[[str], Path], free: int, advice: str
) -> None:
    memory(f"echo {free}")
    with pytest.raises(SettingError) as error, shared_gpu(SelftestConfig(share_gpu=4, mps="off")):
        pass
    numbers = f"--share-gpu 4 needs 4096 MiB of GPU memory, and {free} MiB are free: "
    assert str(error.value) == numbers + advice


@pytest.mark.gloo
@pytest.mark.parametrize("printed", ["echo 4096", "echo no GPU; exit 6", "echo [N/A]"])
def test_enough_or_unknown_memory_gives_every_rank_its_variables(
    memory: Callable[[str], Path],
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    log = memory(printed)
    with shared_gpu(SelftestConfig(share_gpu=4, mps="off")) as variables:
        assert variables is not None
        found = [variables(rank) for rank in range(4)]
    assert [each["NCCL_HOSTID"] for each in found] == ["rank0", "rank1", "rank2", "rank3"]
    assert {each["CUDA_VISIBLE_DEVICES"] for each in found} == {"3"}
    assert log.read_text().endswith(" -i 3\n")
    about = "sdp4bit: 4 ranks on one GPU; MPS is off: ranks take turns on the GPU\n"
    assert capsys.readouterr().out == about


@pytest.mark.gloo
def test_a_cpu_needs_no_preparation() -> None:
    with shared_gpu(SelftestConfig(share_gpu=4, device="cpu")) as variables:
        assert variables is None


# -- collectives -----------------------------------------------------------------------------------------


def context(**options: Any) -> Context:
    parallel = RanksConfig(ranks_per_node=1, distributed_timeout_minutes=1)
    return Context(config=SelftestConfig(parallel=parallel, **options), ranks=this_rank())


class _SpoiledWork:
    """A transfer whose result is wrong once it has been waited for."""

    def __init__(self, work: Any, output: Tensor) -> None:
        self._work, self._output = work, output

    def wait(self) -> None:
        self._work.wait()
        self._output[-1] += 1


@contextmanager
def wrong_on_rank_1(name: str, *, is_async: bool) -> Iterator[None]:
    """Make the last value of a collective wrong on rank 1."""
    owner: Any = collectives if name.startswith("_") else dist
    right = getattr(owner, name)

    def wrong(output: Tensor, *args: Any, **options: Any) -> Any:
        work = right(output, *args, **options)
        if options.get("async_op", False) != is_async:
            return work
        if is_async:
            return _SpoiledWork(work, output)
        output[-1] += 1
        return None

    with patch.object(owner, name, wrong) if dist.get_rank() == 1 else nullcontext():
        yield


CALLS = {
    "all-to-all": "all_to_all_single",
    "all-gather": "_all_gather",
    "reduce-scatter": "_reduce_scatter",
    "all-reduce": "all_reduce",
}


def outcome_of(check: Check, **options: Any) -> dict[str, Any]:
    (outcome,) = run_checks([("check", check)], context(**options))
    return outcome.as_dict()


def outcomes_of_wrong_collectives() -> list[dict[str, Any]]:
    """Return the outcomes with each collective wrong, with one or both of two at once, and with none."""
    outcomes = []
    at_once = (CALLS["all-gather"], CALLS["all-to-all"])
    with patch.object(collectives, "_BYTES", (1 << 10, 1 << 12)), patch.object(collectives, "_ROUNDS", 2):
        for name in CALLS.values():
            with wrong_on_rank_1(name, is_async=False):
                outcomes.append(outcome_of(check_collectives))
        for names in (at_once[:1], at_once[1:], at_once):
            with ExitStack() as stack:
                for name in names:
                    stack.enter_context(wrong_on_rank_1(name, is_async=True))
                outcomes.append(outcome_of(check_collectives))
        outcomes.append(outcome_of(check_collectives))
    return outcomes


@pytest.mark.gloo
def test_a_wrong_value_of_any_collective_fails_on_all_ranks() -> None:
    for outcomes in run_ranks(outcomes_of_wrong_collectives, 2, timeout=120):
        *wrong, right = outcomes
        assert right["result"] == "passed", right
        assert [(each["result"], each["failure"]["rank"]) for each in wrong] == [("failed", 1)] * 7
        messages = [each["failure"]["message"] for each in wrong]
        assert messages[:4] == [f"{name} of 1024 bytes per rank returns wrong values" for name in CALLS]
        assert set(messages[4:]) == {"an all-gather and an all-to-all at the same time return wrong values"}


# -- removal ---------------------------------------------------------------------------------------------


def _wrong_weights(right: Callable[[FSDPCommHandle], None]) -> Callable[[FSDPCommHandle], None]:
    def remove(handle: FSDPCommHandle) -> None:
        held = [param.sharded_param for param in handle._state.groups[0].view._fsdp_group.fsdp_params]
        right(handle)
        with torch.no_grad():
            for parameter in held:
                parameter.to_local().mul_(1.0001)  # far within the tolerance of a quantized run

    return remove


REMOVALS: dict[str, Callable[[], Any]] = {
    "right": nullcontext,
    "hooks of communication left": lambda: patch.object(api, "_restore", lambda group, previous: None),
    "hooks of modules left": lambda: patch.object(RemovableHandle, "remove", lambda hook: None),
    "nothing removed": lambda: patch.object(FSDPCommHandle, "remove", lambda handle: None),
    "wrong weights": lambda: patch.object(FSDPCommHandle, "remove", _wrong_weights(FSDPCommHandle.remove)),
}


def outcomes_of_removals() -> dict[str, dict[str, Any]]:
    outcomes = {}
    for name, broken in REMOVALS.items():
        with broken():
            outcomes[name] = outcome_of(check_removal, steps=3)
    return outcomes


@pytest.mark.gloo
def test_an_incomplete_or_wrong_removal_is_found() -> None:
    found = run_ranks(outcomes_of_removals, 2, timeout=240)
    for outcomes in found:
        results = {name: outcome["result"] for name, outcome in outcomes.items()}
        assert results == {name: "passed" if name == "right" else "failed" for name in REMOVALS}, outcomes
    causes = {
        # Found by the run without quantizers, whose losses equal plain FSDP2's.
        "hooks of communication left": "with sdp4bit removed halfway and",
        "hooks of modules left": "hooks are left after remove()",
        "nothing removed": "hooks are left after remove()",
        "wrong weights": "with sdp4bit removed halfway and",
    }
    for outcomes, (name, cause) in itertools.product(found, causes.items()):
        assert cause in outcomes[name]["failure"]["message"]


# -- compilation -----------------------------------------------------------------------------------------


def simulated_cases(size: int) -> tuple[list[set[Any]], set[Any]]:
    """Return the cases that each rank simulates to compile its share, and those that the check compares."""
    names = {id(config): name for name, config in itertools.chain(GRADIENTS.items(), WEIGHTS.items())}
    found: list[Any] = []

    def record(layout: Any, config: Any, values: Any, **_: Any) -> Any:
        kind, numel = type(config).__name__, values[0].shape[-1]
        found.append((layout.describe(), kind, names[id(config)], numel))
        if kind == "WeightConfig":
            return iter([torch.zeros(size, numel, dtype=torch.bfloat16)] * len(values))
        return list(torch.zeros(size, numel)), torch.zeros(numel)

    right, shares = exchanges._compile_kernels, []

    def compile_on_each_rank(context: Context, specs: Any) -> None:
        for rank in range(size):
            right(replace(context, ranks=replace(context.ranks, rank=rank)), specs)
            shares.append(found.copy())
            found.clear()

    with (
        fake_world(size, rank=0),
        patch.multiple(exchanges, _simulate_gradients=record, _simulate_weights=record),
        patch.object(exchanges, "_compile_kernels", compile_on_each_rank),
        patch.object(Context, "is_cuda", True),
        patch.multiple(Context, synchronize=lambda self: None, fail_together=lambda self, failure: None),
    ):
        check_exchanges(context())
    return shares, set(found)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compile_every_case_of_the_exchanges_exactly_once(size: int) -> None:
    shares, compared = simulated_cases(size)
    times = Counter(itertools.chain.from_iterable(shares))
    assert set(times) == compared and set(times.values()) == {1}
    layouts = {layout for layout, *_ in compared}
    assert len(layouts) == {2: 2, 4: 4}[size], layouts
    # A rank has whole settings: no two ranks compile the variants that layouts of a setting share.
    settings = [{case[1:3] for case in share} for share in shares]
    assert sum(map(len, settings)) == len(set().union(*settings)) == 9

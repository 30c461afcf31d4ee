"""The contract of every trainer: the same run without and with sdp4bit, its bytes, logs, resume and errors.

Layer: 2 gloo processes, each representing a node. A further trainer is a driver in tests/ecosystem/trainers.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem import on_cpu
from tests.ecosystem.on_cpu import CONFIGS, QUANTIZED, STEPS, WORLD
from tests.ranks import first_rank_warns, run_ranks

PACKAGES = {
    "accelerate": ["accelerate", "transformers"],
    "hf": ["transformers", "accelerate"],
    "lightning": ["lightning"],
    "olmo_core": ["olmo_core"],
    "torchtitan": ["spmd_types", "tests.ecosystem.titan_device"],
}
"""Packages of each trainer, by its driver."""
ENGINES = [*PACKAGES, *(f"{name} DDP" for name in ("accelerate", "hf", "lightning", "olmo_core"))]
"""The drivers with FSDP2, and those that also train with DDP."""


class Runs(NamedTuple):
    driver: Any
    ddp: bool
    folder: Path
    ranks: list[dict[str, Any]]


def train_all(name: str, folder: Path) -> dict[str, Any]:
    """Train in all configurations, and continue the quantized run from its checkpoint."""
    driver = driver_of(name)
    train = partial(driver.train, ddp=True) if name.endswith(" DDP") else driver.train
    on_cpu.as_launched()
    found = {config: train(folder / config, CONFIGS[config]) for config in CONFIGS}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sdp4bit")
        found["resumed"] = train(folder / "resumed", QUANTIZED, driver.checkpoint(folder / "quantized"))
    if driver.WITHOUT_STATE is not None:
        with first_rank_warns(driver.WITHOUT_STATE):
            train(folder / "from plain", QUANTIZED, driver.checkpoint(folder / "plain"))
    return found


def driver_of(name: str) -> Any:
    return importlib.import_module(f"tests.ecosystem.trainers.{name.removesuffix(' DDP')}")


def skip_without(name: str) -> None:
    for package in PACKAGES[name.removesuffix(" DDP")]:
        pytest.importorskip(package, reason=f"{package} is not installed: make test-ecosystem")


@pytest.fixture(scope="module", params=ENGINES)
def driver(request: pytest.FixtureRequest, monkeypatch_module: pytest.MonkeyPatch) -> tuple[str, Any]:
    """Return a trainer's name and driver, whose ranks share the modules that it names."""
    skip_without(request.param)
    found = driver_of(request.param)
    monkeypatch_module.setattr(sys.modules[__name__], "PRELOAD", found.PRELOAD, raising=False)
    return request.param, found


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def runs(driver: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    name, found = driver
    folder = tmp_path_factory.mktemp(name)
    return Runs(found, name.endswith(" DDP"), folder, run_ranks(train_all, WORLD, name, folder))


def test_full_precision_equals_the_plain_trainer_and_quantized_is_close(runs: Runs) -> None:
    on_cpu.assert_losses(runs.ranks, rel=0.01 if runs.ddp else 0.02)
    for rank in runs.ranks:
        assert rank["lossless"].get("generated") == rank["plain"].get("generated")


def test_bytes_are_counted_and_logged(runs: Runs) -> None:
    for rank in runs.ranks:
        # Plain FSDP2 gathers the weights for each of the two micro-batches.
        least = 7 if runs.ddp else runs.driver.LEAST
        on_cpu.assert_bytes(rank["plain"], rank["quantized"], least=least, ddp=runs.ddp)
    plain, quantized = (runs.driver.logged(runs.folder / name) for name in ("plain", "quantized"))
    assert not any(name.startswith("sdp4bit/") for name in plain)
    steps, sent = zip(*quantized["sdp4bit/inter_bytes"], strict=True)
    # The first step sends the weights of FSDP2 in full precision.
    assert steps == tuple(range(1, STEPS + 1)) and sent[-1] > 0 and (sent[0] > sent[-1]) != runs.ddp
    assert quantized["sdp4bit/ratio"][-1][1] > least
    assert 0 < quantized["sdp4bit/gradient_error"][-1][1] < 0.3


def test_a_resume_repeats_the_run_bit_for_bit(runs: Runs) -> None:
    for rank in runs.ranks:
        losses = rank["resumed"]["losses"]
        assert losses and losses == rank["quantized"]["losses"][-len(losses) :]
        assert rank["resumed"]["weights"] == rank["quantized"]["weights"]


def test_the_export_holds_the_weights_and_nothing_else(runs: Runs) -> None:
    plain, lossless, quantized = (runs.driver.exported(runs.folder / name) for name in CONFIGS)
    assert plain and plain.keys() == lossless.keys() == quantized.keys()
    assert all(torch.equal(plain[name], lossless[name]) for name in plain)
    assert any(not torch.equal(plain[name], quantized[name]) for name in plain)


# -- checkpoints of single trainers -------------------------------------------------------------------


def continue_in_place(folder: Path) -> None:
    """Continue a run of transformers in its own folder; the callback is not given the checkpoint."""
    hf = driver_of("hf")
    on_cpu.as_launched()
    first = hf.train(folder, QUANTIZED)
    trainer = hf.trainer_of(folder, hf.SDP4BitCallback(QUANTIZED, topology=1))
    trainer.train(resume_from_checkpoint=str(hf.checkpoint(folder)))
    assert on_cpu.weights_of(trainer.model) == first["weights"]


def test_a_run_of_transformers_continues_in_its_own_folder(tmp_path: Path) -> None:
    skip_without("hf")
    run_ranks(continue_in_place, WORLD, tmp_path)


def save_a_file(folder: Path) -> None:
    on_cpu.as_launched()
    with first_rank_warns("is a single file"):
        driver_of("lightning").train(folder, QUANTIZED, shards=False)


def test_a_checkpoint_of_lightning_in_a_single_file_is_warned_about(tmp_path: Path) -> None:
    skip_without("lightning")
    run_ranks(save_a_file, WORLD, tmp_path)


# -- Lightning's own switch for hooks of DDP -----------------------------------------------------------


def pass_to_the_strategy(folder: Path) -> None:
    """Lightning takes the state before there is a process group, and registers it on CUDA only."""
    import sdp4bit

    lightning = driver_of("lightning")
    on_cpu.as_launched()
    expected = lightning.train(folder / "callback", QUANTIZED, ddp=True)
    with mock.patch.object(dist, "is_initialized", return_value=False):
        state = sdp4bit.DDPCommState(topology=1, config=QUANTIZED)

    class OnAnyDevice(lightning.DDPStrategy):
        def _register_ddp_hooks(self) -> None:
            with mock.patch.object(type(self), "root_device", torch.device("cuda")):
                super()._register_ddp_hooks()

    strategy = OnAnyDevice(
        find_unused_parameters=True, ddp_comm_state=state, ddp_comm_hook=sdp4bit.ddp_comm_hook
    )
    found = lightning.train(folder / "strategy", None, strategy=strategy)
    assert (found["losses"], found["weights"]) == (expected["losses"], expected["weights"])
    assert state.stats()["total"]["inter_bytes"] == expected["reported"] > 0


def test_the_strategy_of_lightning_takes_the_state(tmp_path: Path) -> None:
    skip_without("lightning")
    run_ranks(pass_to_the_strategy, WORLD, tmp_path)


# -- models that cannot be attached --------------------------------------------------------------------


def attach_unsupported() -> None:
    on_cpu.as_launched()
    accelerate, hf, lightning, olmo = map(driver_of, ("accelerate", "hf", "lightning", "olmo_core"))
    accelerate.Accelerator(cpu=True)
    linear = torch.nn.Linear(8, 8)
    fsdp1 = FullyShardedDataParallel(linear, device_id=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=fsdp1))
    replicated = replicate(torch.nn.Linear(8, 8))
    replicated(torch.ones(1, 8))
    callback = olmo.SDP4BitCallback()
    callback.trainer = SimpleNamespace(train_module=SimpleNamespace(model=linear))
    name = "FullyShardedDataParallel communicates for this model, not FSDP2"
    for expected, attach in {
        f"{name}.*fsdp=True.*This run uses MULTI_CPU": lambda: hf.SDP4BitCallback().on_train_begin(
            None, None, None, model=fsdp1
        ),
        f"{name}.*strategy='ddp'": lambda: lightning.SDP4BitCallback().on_fit_start(trainer, None),
        f"{name}.*fsdp_version=2": lambda: accelerate.quantize_communication(None, model=fsdp1),
        "sharded or wrapped.*name='fsdp'": callback.post_attach,
        "sharded or wrapped": lambda: accelerate.quantize_communication(None, model=linear),
        "only before the first forward": lambda: accelerate.quantize_communication(None, model=replicated),
        r"no skip=\['a'\]": lambda: accelerate.quantize_communication(
            None, model=DistributedDataParallel(linear), skip=["a"]
        ),
    }.items():
        with pytest.raises(ValueError, match=f"prepared with FSDP2 or DDP, but .*{expected}"):
            attach()


def test_a_model_with_neither_fsdp2_nor_ddp_is_refused_with_the_way_out() -> None:
    for name in ("accelerate", "hf", "lightning", "olmo_core"):
        skip_without(name)
    run_ranks(attach_unsupported, WORLD)

"""The same run twice, and with what must not change it: every bit of losses, gradients, weights, replicas.

Layer: gloo, 4 processes that stand for 2 nodes of 2, pretraining a small model with dropout.
docs/numerics.md lists what holds under which change, and why; resuming is tested in
tests/lab/pretrain/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("rich")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")

from sdp4bit.collectives.reduce_scatter import QuantizedReduceScatter
from sdp4bit.engines.fsdp2.api import FSDPCommHandle
from sdp4bit.quantization import ops
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.pretrain import PretrainConfig
from tests.lab.pretrain.tiny_runs import small, train_here, write_text
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

STEPS = 2


class Bits:
    """Digests of all bits that pass, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, tensor: Tensor) -> None:
        self._digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())

    def __str__(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def recorded() -> Iterator[dict[str, Bits]]:
    """Every reduced gradient, and the weights and replicas at the end, of the run meanwhile."""
    bits = {name: Bits() for name in ("gradients", "weights", "own rows", "replicas")}
    reduce, remove = QuantizedReduceScatter.__call__, FSDPCommHandle.remove

    def reduce_and_record(self: QuantizedReduceScatter, output: Tensor, *args: Any, **kwargs: Any) -> None:
        reduce(self, output, *args, **kwargs)
        bits["gradients"].add(output)

    def record_and_remove(self: FSDPCommHandle) -> None:
        for comm in self.groups:
            for parameter in comm.view._fsdp_group.fsdp_params:
                bits["weights"].add(parameter.sharded_param.to_local())
            assert comm.weights.replica is not None
            bits["own rows"].add(comm.weights.replica.own_shard)
            assert comm.weights.replica.rows is not None
            bits["replicas"].add(comm.weights.replica.rows)
        remove(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedReduceScatter, "__call__", reduce_and_record)
        patch.setattr(FSDPCommHandle, "remove", record_and_remove)
        yield bits


Outcome = dict[str, Any]


def outcome(config: PretrainConfig, backend: ops.BackendName = "reference") -> Outcome:
    """Return the losses and norms of a run, and what its bits amount to on this rank."""
    with recorded() as bits, ops.use_backend(backend):
        (result,) = train_here(config)
    return {
        "losses": [step.loss.hex() for step in result.steps],
        "norms": [step.grad_norm.hex() for step in result.steps],
        "validation": [(step, loss.hex()) for step, loss in result.validation],
        **{name: str(found) for name, found in bits.items()},
    }


def outcomes(runs: list[tuple[PretrainConfig, ops.BackendName]]) -> list[Outcome]:
    return [outcome(config, backend) for config, backend in runs]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def tiny(text: Path, out: Path, **communication: Any) -> PretrainConfig:
    config = small(text, out, communication=CommunicationConfig(**communication))
    return replace(config, training=replace(config.training, steps=STEPS, eval_batches=1))


def test_bits_of_a_run_are_those_of_another_with_the_same_seed(text: Path, tmp_path: Path) -> None:
    runs: list[tuple[PretrainConfig, ops.BackendName]] = [
        (tiny(text, tmp_path / "first"), "reference"),
        (tiny(text, tmp_path / "full", replica="full"), "reference"),
        (replace(tiny(text, tmp_path / "other"), seed=6), "reference"),
    ]
    results = run_ranks(outcomes, 4, runs)
    # In new processes, and cut into other slices.
    again = run_ranks(outcomes, 4, [(tiny(text, tmp_path / "slices", pipeline_chunks=4), "reference")])
    for (first, full, other), (slices,) in zip(results, again, strict=True):
        assert first == slices
        assert {name for name in first if full[name] != first[name]} == {"replicas"}  # of another shape
        assert all(other[name] != first[name] for name in first)
    assert len({found[1]["replicas"] for found in results}) == 1  # every rank holds the same full replica


@pytest.mark.slow  # losses are compared in tests/engines/fsdp2/test_exactness.py
def test_bits_do_not_depend_on_the_back_end(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    runs: list[tuple[PretrainConfig, ops.BackendName]] = [
        (tiny(text, tmp_path / "reference"), "reference"),
        (tiny(text, tmp_path / "numba"), "numba"),
    ]
    for reference, numba in run_ranks(outcomes, 4, runs):
        assert reference == numba

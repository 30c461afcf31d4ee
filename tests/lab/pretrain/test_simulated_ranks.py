"""Simulated ranks: one process trains as processes over gloo do, bit for bit, and counts the same bytes.

Real runs of 4 processes stand for 2 nodes of 2, those of 2 for 2 nodes of 1. Sums in full precision have the
same bits only for 2 ranks: gloo adds those of more in an order of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from sdp4bit.engines.fsdp2.view import find_groups
from sdp4bit.quantization.ops import BackendName
from sdp4bit_lab.pretrain.checkpoint_files import open_checkpoint, read_tensors
from sdp4bit_lab.pretrain.config.checkpoint import CheckpointConfig
from sdp4bit_lab.pretrain.config.communication import CommunicationConfig
from sdp4bit_lab.pretrain.config.parallel import ParallelConfig
from sdp4bit_lab.pretrain.config.pretrain import ModelConfig, PretrainConfig
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.parallelize import RankLayout, shard_chunks
from sdp4bit_lab.pretrain.step.simulated_model import parameter_groups
from sdp4bit_lab.simulated.rows import RowLayout
from tests.lab.pretrain.tiny_runs import losses, read_log, small, this_rank, train_here
from tests.ranks import one_rank, run_ranks

BYTES = ("intra_bytes", "inter_bytes", "compression_ratio")
MEASURED = ("step", "samples", "loss", "lr", "grad_norm", *BYTES, "weight_drift", "gradient_error")


def simulated(config: PretrainConfig, *, ranks: int) -> PretrainConfig:
    """Return the same run in one process, in a folder beside."""
    out = config.logging.out.with_name(config.logging.out.name + "-simulated")
    saved = config.checkpoint.save
    return replace(
        config,
        parallel=replace(config.parallel, simulated_ranks=ranks),
        logging=replace(config.logging, out=out),
        checkpoint=replace(config.checkpoint, save=saved and saved.with_name(saved.name + "-simulated")),
    )


def measured(config: PretrainConfig) -> list[dict[str, Any]]:
    """Return everything that a run has logged, apart from times.

    Real ranks exchange checksums before a save. Simulated ones have nothing to compare, so the bytes of the
    step after a save are left out.
    """
    saved = config.checkpoint.save_interval if config.checkpoint.save is not None else None
    lines = [{name: line[name] for name in MEASURED if name in line} for line in read_log(config.logging.out)]
    for line in lines:
        if saved and "step" in line and line["step"] > 1 and line["step"] % saved == 1:
            for name in BYTES:
                line.pop(name, None)
    return lines


def assert_repeated_alone(
    configs: list[PretrainConfig], *, ranks: int, backend: BackendName = "reference"
) -> list[PretrainConfig]:
    """Train real ranks, then the same in one process, whose configs are returned; all measures are equal.

    Runs that save are resumed from step 2, and their losses are equal, too.
    """
    run_ranks(train_here, ranks, *configs, backend=backend)
    alone = [simulated(config, ranks=ranks) for config in configs]
    resumed = {
        config.logging.out: replace(
            config,
            logging=replace(config.logging, out=config.logging.out.with_name("resumed")),
            checkpoint=CheckpointConfig(load=config.checkpoint.save / "step-00000002"),
        )
        for config in alone
        if config.checkpoint.save is not None
    }
    run_ranks(train_here, 1, *alone, *resumed.values(), backend=backend)
    for out, again in resumed.items():
        later = {event: loss for event, loss in losses(out).items() if event[1] > 2}
        assert losses(again.logging.out) == later
    for real, one in zip(configs, alone, strict=True):
        assert measured(one) == measured(real)
    return alone


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint; parameters and what the optimizer keeps of them are whole."""
    with one_rank():
        path, _, reader = open_checkpoint(folder)
        tensors = {
            n: torch.empty(found.size, dtype=found.properties.dtype) for n, found in reader.tensors.items()
        }
        read_tensors(tensors, path=path, reader=reader)
    return tensors


def changed(config: PretrainConfig, training: dict[str, Any], **others: Any) -> PretrainConfig:
    return replace(config, training=replace(config.training, **training), **others)


def four_ranks(text: Path, folder: Path) -> list[PretrainConfig]:
    """Return runs whose gradients are all quantized."""
    base = small(text, folder / "usual")
    steps = {"steps": 3, "eval_interval": 2}
    saving = CheckpointConfig(save=folder / "saved", save_interval=2)
    other = small(text, folder / "other", strategy="sdp4bit")
    every_option = CommunicationConfig(
        weight_bits=8, weight_group_size=96, replica="full", intra_bits=4, inter_group_size=256,
        inter_rounding="nearest", pipeline_chunks=2,
    )  # fmt: skip
    return [
        changed(base, steps, checkpoint=saving),
        changed(small(text, folder / "narrow", strategy="sdp4bit-w3g3.5"), steps),
        changed(other, {**steps, "param_dtype": "fp32", "accumulation": 1}, communication=every_option),
    ]


@pytest.mark.gloo
def test_runs_of_four_ranks_are_repeated_bit_for_bit(text: Path, tmp_path: Path) -> None:
    """With accumulation, dropout and a resume: losses, norms, bytes; weights, optimizer states, replicas."""
    configs = four_ranks(text, tmp_path)
    alone = assert_repeated_alone(configs, ranks=4)
    assert all(len(measured(config)) == 5 for config in configs)
    real_save, simulated_save = configs[0].checkpoint.save, alone[0].checkpoint.save
    assert real_save is not None and simulated_save is not None
    for step in ("step-00000002", "step-00000003"):
        ranks, here = saved_tensors(real_save / step), saved_tensors(simulated_save / step)
        common = [name for name in here if name.startswith(("model.", "optimizer."))]
        assert len(common) == 28 * 4
        assert all(torch.equal(here[name], ranks[name]) for name in common)
        replicas = [name for name in here if name.startswith("communication.replica.")]
        assert len(replicas) == 28
        assert all(torch.equal(here[name], ranks[name]) for name in replicas)


def two_ranks(text: Path, folder: Path) -> list[PretrainConfig]:
    """Return runs that reduce some or all gradients in full precision."""
    apart = ParallelConfig(ranks_per_node=1)
    steps = {"steps": 4, "eval_interval": 2, "reshard_after_forward": False}
    base, qw, late = (small(text, folder / name, parallel=apart) for name in ("baseline", "qw", "late"))
    return [
        changed(base, {**steps, "param_dtype": "fp32"}, strategy="baseline"),
        changed(qw, steps, strategy="qw"),
        changed(late, steps, communication=CommunicationConfig(start_step=2)),
    ]


@pytest.mark.gloo
@pytest.mark.slow
def test_runs_of_two_ranks_with_full_precision_sums_are_repeated_bit_for_bit(
    text: Path, tmp_path: Path
) -> None:
    """Plain FSDP2; weights alone; quantization that starts later."""
    assert_repeated_alone(two_ranks(text, tmp_path), ranks=2)


def rows_of_fsdp(config: PretrainConfig) -> list[tuple[str, int, list[tuple[str, int, int]]]]:
    ranks = this_rank()
    mesh = init_device_mesh("cpu", (1, ranks.world_size, 1), mesh_dim_names=("pipeline", "data", "tensor"))
    groups = find_groups(shard_chunks(config, layout=RankLayout(mesh=mesh, ranks=ranks)))
    return [(g.name, g.shard_numel, [(s.name, s.start, s.end) for s in g.params]) for g in groups]


@pytest.mark.gloo
def test_rows_are_those_of_fsdp(text: Path, tmp_path: Path) -> None:
    """Of sizes that three ranks do not divide."""
    config = small(text, tmp_path, model=ModelConfig(layers=3, hidden=40, heads=2))
    with torch.device("meta"):
        model = GPT(config.model_shape)
    parameters = dict(model.named_parameters())
    found = []
    for name, members in parameter_groups(model):
        rows = RowLayout({member: parameters[member] for member in members}, ranks=3)
        found.append((name, rows.numel, [(s.name, s.start, s.end) for s in rows.params]))
    assert all(result == found for result in run_ranks(rows_of_fsdp, 3, config))


def test_rows_hold_the_chunks_of_every_rank() -> None:
    """Written, read back as a whole and row by row; zeros where there is nothing."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"even": (8, 3), "uneven": (6, 5), "short": (1, 7), "vector": (10,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    layout = RowLayout(tensors, ranks=4)
    assert layout.numel == 2 * 3 + 2 * 5 + 7 + 3
    rows = torch.full((4, layout.numel), torch.nan)
    layout.write_rows(tensors, rows)
    assert rows.isfinite().all()
    assert torch.equal(rows[3, 6:], torch.cat([torch.zeros(10 + 7), tensors["vector"][9:], torch.zeros(2)]))
    assert all(torch.equal(layout.row(tensors, rank=rank), rows[rank]) for rank in range(4))
    whole, by_row = ({name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(2))
    layout.read_rows(rows, whole)
    for rank in range(4):
        layout.read_row(rows[rank], rank=rank, tensors=by_row)
    for name, tensor in tensors.items():
        assert torch.equal(whole[name], tensor) and torch.equal(by_row[name], tensor)


def resume_elsewhere(config: PretrainConfig, message: str) -> list[float]:
    warns = pytest.warns(UserWarning, match=message) if this_rank().is_first else nullcontext()
    with warns:
        (result,) = train_here(config)
    return [step.loss for step in result.steps]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_real_run_continues_a_simulated_one_and_the_other_way_round(text: Path, tmp_path: Path) -> None:
    """The same weights and optimizer states, so nearly the same losses; replicas are refreshed."""
    real = small(text, tmp_path, checkpoint=CheckpointConfig(save=tmp_path / "real", save_interval=4))
    alone = ParallelConfig(simulated_ranks=2, ranks_per_node=2)
    saved_alone = CheckpointConfig(save=tmp_path / "simulated", save_interval=4)
    simulating = replace(real.logging, out=tmp_path / "simulating")
    (results,) = run_ranks(
        train_here, 1, replace(real, parallel=alone, checkpoint=saved_alone, logging=simulating)
    )
    expected = results[0].steps[4].loss
    run_ranks(train_here, 2, real)
    moves = (
        ("simulated", 2, real.parallel, 2, "saved with world size 1"),
        ("simulated", 1, replace(alone, simulated_ranks=4), 1, r"world size 1 \(2 simulated ranks"),
        ("real", 1, alone, 2, "saved with world size 2"),
    )
    for number, (source, processes, parallel, accumulation, message) in enumerate(moves):
        moved = replace(
            real,
            parallel=parallel,
            logging=replace(real.logging, out=tmp_path / f"moved-{number}"),
            training=replace(real.training, accumulation=accumulation),
            checkpoint=CheckpointConfig(load=tmp_path / source / "step-00000004"),
        )
        continued = run_ranks(resume_elsewhere, processes, moved, message)[0]
        assert len(continued) == 4
        assert continued[0] == pytest.approx(expected, rel=0.01)

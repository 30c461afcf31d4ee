"""Llama 3 8B and 1B by the files of docs/first-hour.md: real sizes as planned, and a tiny width that trains.

Layer: tensors without values in a fake process group of 16 ranks; 2 processes on machines of their own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import sdp4bit
from benchmarks.cluster_network import reason_to_skip
from sdp4bit import SDP4BitConfig
from sdp4bit.collectives.weight_replica import WeightReplica
from sdp4bit.quantization import reference
from sdp4bit.traffic import Grid
from sdp4bit_lab.plan.config import ClusterConfig, PlanConfig
from sdp4bit_lab.plan.llama import LlamaShape
from sdp4bit_lab.plan.traffic import group_traffic
from tests import ROOT
from tests.lab.common.launch.slurm_nodes import Machines, environment
from tests.ranks import fake_world

FOLDER = ROOT / "examples/cluster"
LEVELS = ("intra", "inter")
LAYERS = 2
"""All layers are equal."""
OPERATORS = (
    *("hadamard_quantize", "dequantize_reduce_quantize", "dequantize_reduce_hadamard"),
    *("subtract_quantize", "dequantize_add"),
)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def transformers_model(name: str, mesh: Any) -> nn.Module:
    """Return the model of transformers, sharded as Accelerate does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(FOLDER / name, use_cache=False, num_hidden_layers=LAYERS)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    inner, is_tied = model.model, config.tie_word_embeddings
    for module in (*inner.layers, *([] if is_tied else [inner.embed_tokens])):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    output = [inner.norm, *([inner.embed_tokens] if is_tied else []), model.lm_head]
    fully_shard(output, mesh=mesh, mp_policy=POLICY, reshard_after_forward=False)
    sharded: nn.Module = fully_shard(model, mesh=mesh, mp_policy=POLICY)
    return sharded


def torchtitan_model(name: str, mesh: Any) -> nn.Module:
    """Return the model of the example's config, sharded by torchtitan."""
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from examples import trainer_torchtitan
    from tests.ecosystem.trainers.torchtitan import without_factors

    configs = {"llama3-8B": "llama3_8b_sdp4bit", "llama3.2-1B": "llama3_1b_sdp4bit"}
    config = getattr(trainer_torchtitan, configs[name])().model_spec.model
    layers = config.layers[:LAYERS]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model: Any = replace(config, layers=layers).build()
    apply_fsdp_to_decoder(
        model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False
    )
    sharded: nn.Module = without_factors(model)
    return sharded


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output: Any = model(tokens)
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits.float().square().mean()


def explained(make: Callable[[str, Any], nn.Module], name: str, *, grid: Grid) -> list[tuple[int, ...]]:
    """Return values per rank and bytes inside and between nodes of each group in a steady step.

    The model's tensors have no values, and the library's operators do nothing. Its own tensors are not
    written, so that they cost no memory, and are taken for finite.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        fake_world(grid.size, rank=0),
    ):
        for operator in OPERATORS:
            patch.setattr(reference, operator, lambda *_, **__: None)
        patch.setattr(WeightReplica, "_is_nonfinite", lambda *_: torch.tensor(False))
        mesh = init_device_mesh("cpu", (grid.size,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = make(name, mesh)
            tokens = torch.zeros(1, 8, dtype=torch.long)
        comm = sdp4bit.quantize_communication(model, topology=grid.ranks_per_node)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # the first step sends replicas in full precision
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        table = comm.explain(full=True)
    pattern = rf"([\d,]+)  {grid.nodes} x {grid.ranks_per_node} +([\d,]+) +([\d,]+)$"
    rows = re.findall(pattern, table, re.MULTILINE)
    return sorted(tuple(int(cell.replace(",", "")) for cell in row) for row in rows)


@pytest.mark.parametrize(("name", "ranks_per_node"), [("llama3-8B", 8), ("llama3.2-1B", 1)])
@pytest.mark.parametrize("framework", ["transformers", "torchtitan"])
def test_groups_rows_and_bytes_of_the_real_model_are_those_of_the_plan(
    framework: str, name: str, ranks_per_node: int
) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed: make test-ecosystem")
    if framework == "torchtitan":
        pytest.importorskip("tests.ecosystem.titan_device")
    make = {"transformers": transformers_model, "torchtitan": torchtitan_model}[framework]
    grid, shape = Grid(nodes=2, ranks_per_node=ranks_per_node), LlamaShape.read(FOLDER / name)
    found = explained(make, name, grid=grid)

    planned = replace(shape, layers=LAYERS).groups()
    traffic = [group_traffic(group, grid=grid, config=SDP4BitConfig()) for group in planned]
    sent = [
        tuple(round(sum(getattr(each, f"{level}_bytes") for each in group.exchanges)) for level in LEVELS)
        for group in traffic
    ]
    assert found == sorted((group.row_numel, *each) for group, each in zip(traffic, sent, strict=True))

    # The command's total has all layers.
    layer = sent[[group.group.name for group in traffic].index("blocks.0")]
    totals = [sum(group[i] for group in sent) + (shape.layers - LAYERS) * layer[i] for i in range(2)]
    config = PlanConfig(
        hf_config=FOLDER / name,
        cluster=ClusterConfig(nodes=2, devices_per_node=ranks_per_node),
    )
    plan = config.plan(config.cluster.resolve(model=config.model_name)).quantized
    assert [plan.intra_bytes, plan.inter_bytes] == totals


@pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))
def test_a_tiny_width_trains_on_two_machines_by_the_files_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make test-ecosystem")
    program = ["examples/cluster/llama_hf.py", "--model=examples/cluster/llama-tiny", "--tokens=64"]
    program += ["--steps=10", f"--out={tmp_path}/run"]
    found = {}
    with Machines(rate="200mbit") as machines:
        for name, options in (("with", []), ("without", ["--plain"])):
            logs = [tmp_path / f"{name}{number}.log" for number in range(2)]
            started = []
            for number, log in enumerate(logs):
                variables = environment(
                    HEAD="10.77.0.1", STEPS="train", RANKS_PER_NODE="1", OUT=str(tmp_path / "out")
                )
                command = ["examples/cluster/first_hour.sh", *program, *options]
                with log.open("w") as file:
                    pipes = {"stdout": file, "stderr": subprocess.STDOUT, "env": variables}
                    started.append(machines.start(number, command, **pipes))
            codes = [process.wait(timeout=400) for process in started]
            text = "".join(log.read_text() for log in logs)
            assert codes == [0, 0], text[-6000:]
            assert re.search(rf"^[\d.]+ s per step {name} sdp4bit$", text, re.MULTILINE)
            found[name] = (text, [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", text)])
    (quantized, ours), (_, plain) = found["with"], found["without"]
    assert len(ours) == len(plain) == 10
    assert ours == pytest.approx(plain, rel=0.01) and ours[0] == plain[0]
    assert re.search(r"model\.layers\.0 to model\.layers\.1.*\n? .* 2 x 1 ", quantized)
    assert quantized.count("sdp4bit/inter_bytes") == 10
    # The groups that transformers_model repeats are Accelerate's.
    assert re.search(r"^model\.embed_tokens .* 2 x 1 ", quantized, re.MULTILINE)
    assert re.search(r"^model\.norm .* 2 x 1 ", quantized, re.MULTILINE)

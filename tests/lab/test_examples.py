"""The gallery of examples: its commands are those of programs that exist, and the quick ones train.

Layer: no process for what the gallery says; two processes of torchrun for each example that runs. A script
replaces Slurm's srun.
"""

from __future__ import annotations

import importlib
import os
import py_compile
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_flatten

import sdp4bit
from examples import averages, by_hand, engine, muon
from sdp4bit import SDP4BitConfig
from sdp4bit.collectives import create_topology
from tests import ROOT
from tests.oracles.dtensor_traffic import CollectiveCounter
from tests.ranks import on_ranks
from tests.rounding_keys import check_unique, drawn_keys
from tests.toy import POLICY, data_mesh

pytest.importorskip("rich")

from sdp4bit_lab.cli import COMMANDS

GALLERY = ROOT / "examples" / "README.md"
PROGRAMS = sorted(
    path
    for folder in ("examples", "examples/cluster")
    for path in (ROOT / folder).iterdir()
    if path.suffix in (".py", ".sh", ".sbatch", ".yaml") and path.stem != "__init__"
)


def commands() -> list[list[str]]:
    """Return the words of the gallery's commands, variables that are set for them left out."""
    starts = ("torchrun ", "sdp4bit ", "sbatch ", "python ", "examples/", "DATA=", "NNODES=", "HEAD=")
    lines = [line[4:] for line in GALLERY.read_text().splitlines() if line.startswith("    ")]
    found = [shlex.split(line) for line in lines if line.startswith(starts)]
    return [[word for word in words if not re.match(r"[A-Z_]+=", word)] for words in found]


def test_the_gallery_names_every_example() -> None:
    text = GALLERY.read_text()
    assert len(PROGRAMS) >= 5 and len(commands()) >= 9
    names = [str(path.relative_to(GALLERY.parent)) for path in PROGRAMS]
    assert [name for name in names if f"({name})" not in text] == []
    assert all((GALLERY.parent / name).exists() for name in re.findall(r"\]\(([^)#]+)", text))


@pytest.mark.gloo
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_gallery_can_be_given(words: list[str], tmp_path: Path) -> None:
    if words[0] == "sdp4bit":
        COMMANDS[words[1]].parse(words[2:])
        return
    words = [word.replace(".", "/") + ".py" if word.startswith("examples.") else word for word in words]
    programs = [ROOT / word for word in words if word.startswith("examples/")]
    assert programs
    for program in programs:
        assert program.is_file()
        if program.suffix == ".py":
            py_compile.compile(str(program), cfile=str(tmp_path / "compiled"), doraise=True)
        else:
            subprocess.run(["bash", "-n", program], check=True, timeout=30)
            assert program.suffix == ".sbatch" or os.access(program, os.X_OK)


def run(name: str, *options: str, ranks: int = 2) -> list[str]:
    """Return the lines that an example prints."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(ROOT / "examples" / name), *options],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[-1]) for line in lines if re.fullmatch(r"step \d+: loss [\d.]+", line)]


def test_the_tutorial_s_program_is_the_one_that_its_page_ends_with() -> None:
    page, program = (ROOT / "docs" / "tutorial.md").read_text(), ""
    for language, text in re.findall(r"^```(python|diff)[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            program = text
            continue
        lines = text.splitlines()
        before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
        assert program.count(before) == 1, text
        program = program.replace(before, after)
    assert (ROOT / "examples" / "tutorial.py").read_text() == program


@pytest.mark.parametrize("name", ["trainer_hf", "trainer_accelerate", "trainer_lightning"])
def test_a_missing_package_of_a_trainer_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = "accelerate" if name != "trainer_lightning" else "lightning"
    monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
    with pytest.raises(SystemExit, match=f"pip install {hidden}"):
        importlib.import_module(f"examples.{name}")


@on_ranks(4)
def test_training_by_hand_equals_fsdp2_with_the_library_bit_for_bit() -> None:
    cpu = torch.device("cpu")
    by_hand_losses, shard = by_hand.train(create_topology(2), steps=4, device=cpu, say=lambda _: None)

    model = fully_shard(by_hand.build(), mesh=data_mesh(), mp_policy=POLICY)
    comm = sdp4bit.quantize_communication(model, config=by_hand.CONFIG, topology=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=by_hand.LEARNING_RATE)
    fsdp2_losses = []
    for step in range(4):
        loss = by_hand.loss_of(model, by_hand.batch(step, dist.get_rank(), cpu))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fsdp2_losses.append(loss.item())
    assert comm.stats()["compression_ratio"] > 5  # weights and gradients are quantized
    assert by_hand_losses == fsdp2_losses and by_hand_losses[-1] < by_hand_losses[0]
    assert torch.equal(shard, torch.cat([each.to_local().flatten() for each in model.parameters()]))


@pytest.mark.parametrize("decay", [0.9, None])
@on_ranks(2)
def test_averages_are_evaluated_as_plain_fsdp2_evaluates_them(decay: float | None) -> None:
    model = averages.build()
    sdp4bit.quantize_communication(model, topology=1)
    average = averages.Averages(model, decay=decay)
    losses = averages.train(model, average, steps=20, start=5)
    before = [param.to_local().clone() for param in model.parameters()]
    with average.in_use(model):
        assert not model.training
    assert all(map(torch.equal, before, (param.to_local() for param in model.parameters())))

    plain = averages.build()
    with torch.no_grad():
        for param, value in zip(plain.parameters(), average.values, strict=True):
            param.copy_(value)
    of_weights, of_averages = losses[-1]
    assert of_averages == averages.evaluate(plain) != of_weights


@pytest.mark.gloo
@pytest.mark.slow
def test_the_example_of_averages_prints_losses() -> None:
    lines = run("averages.py", "--swa")
    found = [re.fullmatch(r"step (\d+): loss ([\d.]+), of averages ([\d.]+)", line) for line in lines[:-1]]
    assert [match[1] for match in found if match] == ["50", "60", "70", "80"]
    assert all(float(match[3]) < float(match[2]) for match in found if match)
    assert re.fullmatch(r"full-precision refreshes: \d+", lines[-1])


@pytest.mark.gloo
@pytest.mark.slow
def test_the_example_by_hand_prints_what_it_does() -> None:
    lines = run("by_hand.py")
    assert len(losses(lines)) == 12 and losses(lines)[-1] < losses(lines)[0] - 0.2
    assert re.fullmatch(r"sent by each rank to other nodes, per step: [\d,]+ bytes", lines[-1])


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "last"),
    [
        (["fsdp2_minimal.py"], "11.77x fewer inter-node bytes than plain FSDP2"),
        (["fsdp2_minimal.py", "--hsdp"], "7.74x fewer inter-node bytes than plain FSDP2"),
        (["ddp_minimal.py"], "11.64x fewer inter-node bytes than plain DDP"),
    ],
    ids=["FSDP2", "HSDP", "DDP"],
)
def test_a_minimal_example_prints_the_ratio_of_the_readme(command: list[str], last: str) -> None:
    lines = run(*command, ranks=4)
    assert lines[-1] == last and last.split(maxsplit=1)[0] in (ROOT / "README.md").read_text()
    assert len(losses(lines)) == 12 and losses(lines)[-1] < losses(lines)[0]


@pytest.mark.slow
@pytest.mark.gloo
def test_the_example_of_an_engine_trains_with_and_without_sdp4bit() -> None:
    quantized, unquantized = run("engine.py"), run("engine.py", "--plain")
    ours, plain = losses(quantized), losses(unquantized)
    assert len(ours) == 12 and ours[-1] < ours[0]
    assert ours[0] == plain[0] and ours != plain  # the first gather is in full precision
    assert ours == pytest.approx(plain, abs=0.002)
    assert sum(line == "  weights    int4/2048 difference, node replica" for line in quantized) == 3
    assert sum(line == "  gradients  inter int4/128, Hadamard" for line in quantized) == 3
    assert quantized[-1] == "7.87x fewer inter-node bytes than in full precision"


@on_ranks(4)
def test_the_example_of_an_engine_draws_no_rounding_key_twice() -> None:
    def train(steps: int, state: Any = None) -> Any:
        torch.manual_seed(0)
        trained = engine.ZeRO2(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)))
        comm = trained.attach(SDP4BitConfig(), topology=2)
        if state is not None:
            comm.load_state_dict(state)
        for _ in range(steps):
            trained.gather()
            for block in trained.blocks:
                for parameter in block.parameters:
                    parameter.grad = torch.randn_like(parameter)
            trained.reduce()
            trained.optimizer.step()
            comm.mark_step()
        return comm.state_dict()

    with drawn_keys() as keys:
        train(2, train(2))
    check_unique(keys, at_least=16)
    unnamed = engine.ZeRO2(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    unnamed.blocks[1].name = unnamed.blocks[0].name
    with pytest.raises(ValueError, match=r"two parameter groups are named 'layers\.0'"):
        unnamed.attach(SDP4BitConfig(), topology=2)


def checkpoint(folder: Path) -> dict[str, Any]:
    """Return the weights, moments and counters of a checkpoint."""
    file = folder / "full.pt"
    dcp_to_torch_save(folder, file)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    # They mark a loaded row that no refresh has used, as with weights in full precision.
    state["comm"].pop("fingerprints", None)
    return state


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "collectives", "last"),
    [
        ([], 108, "3.94x fewer inter-node bytes than without sdp4bit"),
        (["--ddp"], 0, "5.91x fewer inter-node bytes than without sdp4bit"),
    ],
    ids=["FSDP2", "DDP"],
)
def test_the_example_of_muon_resumes_bit_for_bit(
    options: list[str], collectives: int, last: str, tmp_path: Path
) -> None:
    def train(folder: Path) -> list[str]:
        return run("muon.py", *options, f"--checkpoints={folder}", "--steps=4", "--save-every=2", ranks=4)

    lines = train(tmp_path / "all")
    assert len(losses(lines)) == 4 and losses(lines)[-1] < losses(lines)[0] - 0.3
    assert re.fullmatch(r"gradients: [\d,]+ bytes between nodes per rank and step", lines[-3])
    assert lines[-2:] == [f"Muon: {collectives} collectives per step, all inside a node", last]

    shutil.copytree(tmp_path / "all" / "step-00000002", tmp_path / "rest" / "step-00000002")
    resumed = train(tmp_path / "rest")
    assert [line for line in resumed if "resumed" in line] == ["resumed at step 2"]
    assert losses(resumed) == losses(lines)[2:]
    found, expected = (checkpoint(tmp_path / name / "step-00000004") for name in ("rest", "all"))
    assert found.keys() == expected.keys() == {"model", "adamw", "muon", "step", "comm"}
    assert len(expected["muon"]["state"]) == 8
    # Every parameter has one optimizer.
    assert len(expected["adamw"]["state"]) + 8 == len(expected["model"])
    (values, layout), (expected_values, expected_layout) = tree_flatten(found), tree_flatten(expected)
    assert layout == expected_layout
    for value, other in zip(values, expected_values, strict=True):
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


@on_ranks(4)
def test_muon_of_the_example_sends_nothing_to_other_nodes() -> None:
    trained = muon.Run(torch.device("cpu"), ddp=False)
    before = [matrix.full_tensor() for matrix in trained.matrices]
    for _ in range(2):
        counter = CollectiveCounter(muon.PER_NODE)
        trained.train_step(counter)
        assert sum(counter.calls.values()) == 108 and counter.inter_bytes == 0
        assert all(name.endswith("inside a node") for name in counter.calls)
    assert trained.comm.stats()["steps"] == 2
    trained.comm.audit()
    # The step reached the model's own weights.
    assert not any(map(torch.equal, before, (matrix.full_tensor() for matrix in trained.matrices)))
    assert all(view.grad is None for view in trained.views)
    # Clipping takes the model's parameters, because those on two meshes have no common norm.
    stepped = [*trained.views, *trained.adamw.param_groups[0]["params"]]
    for parameter in stepped:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="same mesh"):
        nn.utils.clip_grad_norm_(stepped, 1.0)


@pytest.mark.gloo
@pytest.mark.slow
def test_the_megatron_example_trains_on_a_cpu_with_and_without_sdp4bit() -> None:
    pytest.importorskip("megatron.core")
    quantized, unquantized = (
        run("megatron_minimal.py", *plain, "--steps", "6") for plain in ((), ("--plain",))
    )
    ours, plain = losses(quantized), losses(unquantized)
    assert len(ours) == 6 and ours[-1] < ours[0] - 0.2
    assert ours[0] == plain[0] and ours[1:] != plain[1:]  # nothing is quantized before the first step
    assert ours[-1] == pytest.approx(plain[-1], abs=0.05)
    assert any("gradients  inter int4/128, Hadamard" in line for line in quantized)
    assert not any("int4" in line for line in unquantized)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return variables for two nodes on this machine; programs in the folder are found first."""
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    return {**os.environ, **alone, "GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": "127.0.0.1", **more}


def slurm(folder: Path, script: str, *words: str, srun: str) -> str:
    """Run a batch script on 2 nodes; in place of srun, this script has the command as its arguments."""
    for name, text in (("srun", srun), ("scontrol", "echo localhost; echo localhost")):
        (folder / name).write_text(f"#!/bin/bash\nset -e\n{text}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    command = ["bash", f"examples/{script}", *words]
    variables = environment(folder, RANKS_PER_NODE="1", **job)
    options = {"cwd": ROOT, "env": variables, "capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.gloo
def test_the_slurm_job_of_the_pretraining_program_can_be_given(tmp_path: Path) -> None:
    printed = slurm(tmp_path, "pretrain_cluster.sbatch", "text.jsonl", srun="printf '%s\\n' \"$@\"")
    launch, _, program = printed.partition("-m\n")
    assert launch.split() == ["--kill-on-bad-exit=1", "bash", "examples/cluster/first_hour.sh"]
    module, command, *options = program.splitlines()
    assert find_spec(f"{module}.__main__") is not None
    COMMANDS[command].parse(options)


@pytest.mark.gloo
@pytest.mark.slow
def test_two_nodes_with_one_host_name_need_a_topology(tmp_path: Path) -> None:
    def train(*options: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
        launch = [
            "torchrun",
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=1",
            endpoint,
        ]
        command = [*launch, "examples/launched.py", f"--checkpoints={tmp_path}", "--save-every=1", *options]
        outputs = [tmp_path / f"agent{number}.txt" for number in range(2)]
        agents = []
        for output in outputs:
            with output.open("w") as file:
                pipes = {"stdout": file, "stderr": subprocess.STDOUT}
                agents.append(subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path), **pipes))
        deadline = time.monotonic() + 200
        # An agent waits for another that has failed, so the first failure ends the test.
        while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        for agent in agents:
            agent.kill()
        printed = "".join(f"{output.name}:\n{output.read_text()}" for output in outputs)
        assert [agent.wait() for agent in agents] == [0, 0], printed[-8000:]
        return printed

    found = train("--steps=1")
    assert re.search(r"^layers\.0 .* 1 x 2 ", found, re.MULTILINE)
    assert "LOCAL_WORLD_SIZE is 1" in found and "pass topology=1" in found
    given = train("--steps=2", "--topology=1")
    assert re.search(r"^layers\.0 .* 2 x 1 ", given, re.MULTILINE)
    assert "resumed at step 1" in given and "LOCAL_WORLD_SIZE" not in given


def test_the_kubernetes_job_can_be_given() -> None:
    yaml = pytest.importorskip("yaml")
    trainer = yaml.safe_load((ROOT / "examples/cluster/kubeflow.yaml").read_text())["spec"]["trainer"]
    assert trainer["command"] == ["bash", "examples/cluster/first_hour.sh"]
    assert (ROOT / trainer["args"][0]).is_file()
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    plan = next(each["value"] for each in trainer["env"] if each["name"] == "PLAN")
    COMMANDS["plan"].parse(plan.split())

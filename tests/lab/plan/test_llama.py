"""Plans of Llama: sizes of config.json, and the tables of docs/first-hour.md. Layer: no process.

tests/ecosystem/test_llama.py compares them with the models of transformers and torchtitan.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.plan.llama import LlamaShape
from tests import ROOT

Capture = pytest.CaptureFixture[str]
FOLDER = ROOT / "examples/cluster"
PAGE = (ROOT / "docs/first-hour.md").read_text()
PARAMETERS = {"llama3-8B": 8_030_261_248, "llama3.2-1B": 1_235_814_400}
"""As Meta counts them: the 1B model's output layer is its embedding."""


def planned(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def command(number: int) -> list[str]:
    """Return the options of a command `sdp4bit plan` of the page, without the model and the link's rate."""
    text = PAGE.split("    sdp4bit plan ")[number].partition("\n\n")[0].replace("\\\n", " ")
    words = text.split()
    for name in ("--hf-config", "--inter-bandwidth"):
        place = words.index(name)
        del words[place : place + 2]
    return words


def table(head: str) -> list[list[str]]:
    lines = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) >= 4
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def span(cost: dict[str, Any]) -> str:
    return f"{cost['step_seconds_at_least']:.1f} to {cost['step_seconds']:.1f}"


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_operations_are_those_of_the_model(name: str) -> None:
    shape = LlamaShape.read(FOLDER / name)
    values = PARAMETERS[name]
    assert sum(group.numel for group in shape.groups()) == values
    # 6 operations per token and value, less those of norms and of an embedding that does not multiply.
    h, layers, tokens = shape.hidden, shape.layers, 8192
    idle = (2 * layers + 1) * h + (0 if shape.is_tied else shape.vocabulary * h)
    attention = 12 * layers * shape.queries * tokens**2
    assert shape.flops_per_sample(tokens) == 6 * tokens * (values - idle) + attention


def test_the_embedding_is_a_group_unless_it_is_the_output_layer() -> None:
    shape = LlamaShape.read(FOLDER / "llama3-8B")
    groups = shape.groups()
    assert [group.name for group in groups][::33] == ["embedding", "output"]
    assert groups[-1].shapes == ((4096,), (128256, 4096))
    assert [group.freed_after_forward for group in groups] == [True] * 33 + [False]
    assert not any(group.freed_after_forward for group in shape.groups(freed_after_forward=False))
    tied = LlamaShape.read(FOLDER / "llama3.2-1B")
    assert [group.name for group in tied.groups()][::16] == ["blocks.0", "output"]
    assert tied.keys == 512 and tied.queries == 2048


@pytest.mark.parametrize("row", table("| model | link | GB/s | FSDP2, s |"), ids=" ".join)
def test_predicted_seconds_of_the_page_are_the_command_s(row: list[str], capsys: Capture) -> None:
    model, _, rate, plain, hybrid, ours, plain_sent, sent = row
    result = planned(
        capsys, *command(1), "--hf-config", f"examples/cluster/{model}", "--inter-bandwidth", rate
    )
    costs = result["bf16_baseline"], result["hsdp"]["plain"], result["quantized"]
    assert [plain, hybrid, ours] == [span(cost) for cost in costs]
    gigabytes = [f"{cost['inter_bytes_per_node'] / 1e9:.1f}" for cost in (costs[0], costs[2])]
    assert [plain_sent, sent] == gigabytes
    assert result["recommendation"].startswith("enable")


@pytest.mark.parametrize("row", table("| model | GPUs per machine | FSDP2 |"), ids=" ".join)
def test_memory_of_the_page_is_the_command_s(row: list[str], capsys: Capture) -> None:
    model, devices, plain, ours = row
    options = ["--hf-config", f"examples/cluster/{model}", "--inter-bandwidth", "12.5"]
    result = planned(capsys, *command(1), *options, "--devices-per-node", devices)
    memory = [sum(result[name]["memory"].values()) / 1e9 for name in ("bf16_baseline", "quantized")]
    assert [plain, ours] == [f"{each:.1f}" for each in memory]
    fits = {"llama3-8B": 80, "llama3.2-1B": 24}[model]
    assert (memory[1] < fits) == (devices == "8" or model == "llama3.2-1B")


@pytest.mark.parametrize("row", table("| model | link | GB/s | gain |"), ids=" ".join)
def test_gains_of_two_sparks_are_the_command_s(row: list[str], capsys: Capture) -> None:
    model, _, rate, gain, advice = row
    result = planned(
        capsys, *command(2), "--hf-config", f"examples/cluster/{model}", "--inter-bandwidth", rate
    )
    ends = sorted(f"{result[name]:.2f}" for name in ("speedup_over_bf16", "speedup_over_bf16_hidden"))
    assert gain == " to ".join(ends)
    assert result["recommendation"].startswith(advice)


def test_minutes_of_the_page_follow_each_other() -> None:
    minutes = [int(each) for each in re.findall(r"^## Minute (\d+): ", PAGE, re.MULTILINE)]
    assert minutes == [int(each) for each in re.findall(r"^\| (\d+) \| \[", PAGE, re.MULTILINE)]
    assert all(before < after for before, after in pairwise(minutes)) and minutes[-1] < 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', not one of llama, mistral"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', not a positive number"),
        ({"mlp_bias": True}, "blocks with biases cannot be planned"),
    ],
)
def test_a_model_of_another_shape_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = json.loads((FOLDER / "llama-tiny/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | changes))
    with pytest.raises(SettingError, match=message):
        LlamaShape.read(tmp_path)
    with pytest.raises(SettingError, match="cannot be read"):
        LlamaShape.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-layers", "2"], "--hf-config has all sizes of the model"),
        (["--tp", "2"], "--hf-config supports data parallelism alone"),
    ],
)
def test_options_that_contradict_the_file_are_refused(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    assert main(["plan", "--hf-config", str(FOLDER / "llama-tiny"), *arguments]) == 2
    assert message in capsys.readouterr().err

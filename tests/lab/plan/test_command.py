"""`sdp4bit plan` as people and scripts use it. Layer: no process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sdp4bit_lab.cli import main
from sdp4bit_lab.plan.config import PROBE_FORMAT

Capture = pytest.CaptureFixture[str]


def planned(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def shown(capsys: Capture, *arguments: str) -> str:
    """Return what is printed with one space wherever there are several, or line breaks."""
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def refusal(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sdp4bit: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def probe_file(folder: Path, **changes: Any) -> str:
    content = {
        "format": PROBE_FORMAT,
        "name": "measured",
        "nodes": 4,
        "devices_per_node": 2,
        "inter_bandwidth": 2e9,
        "intra_bandwidth": 30e9,
        "latency": 1e-4,
        "quantization_bandwidth": 5e10,
        **changes,
    }
    path = folder / "probe.json"
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "left out"}))
    return str(path)


def test_table_2_as_json_has_published_and_predicted_speedups(capsys: Capture) -> None:
    result = planned(capsys, "--reproduce-table-2")
    assert [(row["cluster"], row["model"]) for row in result["rows"]] == [
        (cluster, model) for cluster in ("a100", "h800") for model in ("1.3B", "2.7B", "6.7B", "13B", "18B")
    ]
    for row in result["rows"]:
        assert row["predicted"] == pytest.approx(row["published"], rel=0.05)
    assert result["table_4_ms"] == pytest.approx(45.9, abs=1.0)
    assert set(result["figure_8"]["predicted"]) == {"a100", "h800"}


def test_table_2_as_text_stands_beside_the_published_one(capsys: Capture) -> None:
    text = shown(capsys, "--reproduce-table-2")
    assert "h800 18B 8/1 4.08 x 4.08 x -0.1 %" in text
    assert "published 45.9 ms; predicted 45.5 ms" in text
    assert "1.6 - 2.4 x" in text


def test_a_plan_as_text_has_bytes_times_memory_and_a_verdict(capsys: Capture) -> None:
    text = shown(capsys, "--cluster", "h800", "--preset", "18B", "--tp", "8", "--engine", "megatron")
    for part in (
        "18B: 18.450 billion parameters",
        "h800: 16 nodes of 8 devices, 55.3 GB/s inter-node",
        "tensor 8 x pipeline 1 x data 16 (16 nodes x 1)",
        "baselines: fp32 or bf16 reduce-scatter of gradients, bf16 all-gather of weights",
        "inter-node, per node 104 GB 69.5 GB 17.7 GB",
        "memory, no activations",
        "to all that fits behind computation, where --overlap-grad-reduce and --overlap-param-gather put it",
    ):
        assert part in text
    times = r"[\d.]+ to [\d.]+ times as fast as with {} gradients"
    assert re.search(f"verdict: enable: {times.format('fp32')}, {times.format('bf16')}$", text)
    assert text.count("verdict") == 1


H100S = ("--device", "h100", "--nodes", "4", "--devices-per-node", "8", "--device-tflops", "400",
         "--inter-bandwidth", "12.5", "--preset", "6.7B")  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--reproduce-table-2",),
        ("--cluster", "h800", "--nodes", "512", "--hidden-size", "1024", "--num-layers", "8"),
        (*H100S, "--micro-batch-size", "4", "--accumulation", "4"),
        (*H100S, "--replicas", "4"),
        ("--device", "b200", "--nodes", "128", "--devices-per-node", "8", "--inter-bandwidth", "400",
         "--device-tflops", "1000", "--preset", "18B", "--accumulation", "64", "--engine", "megatron"),
    ],
)  # fmt: skip
def test_a_plan_fits_80_columns(capsys: Capture, arguments: tuple[str, ...]) -> None:
    assert main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= 80
    if "--reproduce-table-2" not in arguments:
        # No row of the table is wrapped.
        table = lines[lines.index("") + 1 :]
        assert len({len(line) for line in table[: table.index("")]}) == 1


def test_a_cluster_of_ones_own_is_not_called_the_paper_s(capsys: Capture) -> None:
    assert "a100: 16 nodes of 4 devices" in shown(capsys, "--efficiency", "0.9")
    own = shown(capsys, "--nodes", "4", "--devices-per-node", "8")
    assert "your cluster, the paper's a100 where nothing else is given: 4 nodes of 8 devices" in own


def test_a_fast_network_is_told_not_to_bother(capsys: Capture) -> None:
    arguments = ("--cluster", "h800", "--inter-bandwidth", "400", "--accumulation", "16")
    assert "verdict: do not enable: gains" in shown(capsys, *arguments)
    result = planned(capsys, *arguments)
    assert result["verdict"].startswith("do not enable: gains ")
    assert 1 < result["speedup"] < 1.05
    assert result["speedup"] == pytest.approx(
        result["baseline"]["step_seconds"] / result["quantized"]["step_seconds"]
    )


def test_padding_is_named_and_removed(capsys: Capture) -> None:
    wide = ("--cluster", "h800", "--nodes", "512", "--hidden-size", "1024", "--num-layers", "8")
    text = shown(capsys, *wide)
    assert "padding: FSDP2 cuts dimension 0 into 4096 equal parts" in text
    assert planned(capsys, *wide)["padding"] > 1.5
    assert planned(capsys, *wide, "--engine", "megatron")["padding"] < 1.02
    assert planned(capsys, *wide, "--least-padding")["padding"] < planned(capsys, *wide)["padding"]
    few = shown(capsys, "--cluster", "h800")
    assert "padding:" not in few


def test_a_measured_cluster_is_planned_on(capsys: Capture, tmp_path: Path) -> None:
    probe = ("--probe", probe_file(tmp_path), "--device-tflops", "10")
    result = planned(capsys, *probe, "--preset", "125M")
    assert result["cluster"] == {
        "name": "measured",
        "nodes": 4,
        "devices_per_node": 2,
        "inter_bandwidth": 2e9,
        "intra_bandwidth": 30e9,
        "device_flops": 1e13,
        "inter_bandwidth_shared": None,
        "efficiency": 1.0,
        "latency": 1e-4,
        "quantization_bandwidth": 5e10,
        "device": None,
        "communicator_bytes": 600e6,
    }
    larger = planned(capsys, *probe, "--nodes", "32", "--latency-us", "5", "--inter-bandwidth", "3")
    assert (larger["cluster"]["nodes"], larger["data_parallel"]["nodes"]) == (32, 32)
    assert larger["cluster"]["latency"] == pytest.approx(5e-6)
    assert larger["cluster"]["inter_bandwidth"] == 3e9


def test_options_reach_the_plan(capsys: Capture) -> None:
    default = planned(capsys)
    assert (default["model"], default["cluster"]["name"], default["strategy"]) == ("1.3B", "a100", "sdp4bit")
    assert planned(capsys, "--strategy", "tlq")["strategy"] == "tlq"
    full = planned(capsys, "--replica", "full", "--pipeline-chunks", "4")["quantized"]
    assert full["collectives"] > default["quantized"]["collectives"]
    assert full["memory"]["weight_replica_bf16"] == 4 * default["quantized"]["memory"]["weight_replica_bf16"]
    once = planned(capsys, "--no-reshard-after-forward")
    assert once["baseline"]["inter_bytes"] < default["baseline"]["inter_bytes"]
    hidden = planned(capsys, "--overlap", "1")
    assert default["overlap"] == [0.0, 1.0] and hidden["overlap"] == [1.0, 1.0]
    assert hidden["speedup"] == hidden["speedup_hidden"] == pytest.approx(default["speedup_hidden"])
    assert planned(capsys, "--overlap", "0")["speedup"] == default["speedup"] != default["speedup_hidden"]
    assert default["quantized"]["step_seconds_at_least"] == hidden["quantized"]["step_seconds"]
    micro = planned(capsys, "--micro-batch-size", "8")
    assert micro["baseline"]["compute_seconds"] == pytest.approx(2 * default["baseline"]["compute_seconds"])


def test_replicas_share_nothing_but_gradients_between_nodes(capsys: Capture) -> None:
    sharded, replicated = planned(capsys), planned(capsys, "--replicas", "16")
    assert replicated["data_parallel"] == {"nodes": 1, "ranks_per_node": 4}
    assert replicated["replicas"] == {"nodes": 16, "ranks_per_node": 1}
    fp32, quantized = (replicated[name]["inter_bytes"] for name in ("baseline", "quantized"))
    assert fp32 / quantized == pytest.approx(7.76, abs=0.01)
    assert replicated["bf16_baseline"]["inter_bytes"] == fp32 / 2
    weights = "main_weights_fp32"
    assert replicated["quantized"]["memory"][weights] == 16 * sharded["quantized"]["memory"][weights]
    assert main(["plan", "--replicas", "16"]) == 0
    assert "data 64 (nodes x ranks: shards 1 x 4, replicas 16 x 1)" in " ".join(
        capsys.readouterr().out.split()
    )


PAGE = (Path(__file__).parents[3] / "docs/planning.md").read_text()
GPUS = ("--device", "h100", "--inter-bandwidth", "50", "--device-tflops", "400", "--preset", "6.7B")


def test_gpus_are_planned_with_by_their_data_sheet(capsys: Capture) -> None:
    shape = ("--nodes", "4", "--devices-per-node", "8")
    text = shown(capsys, *GPUS, *shape)
    assert "h100: 4 nodes of 8 devices, 50 GB/s inter-node" in text
    assert "300 GB/s intra-node (per device)" in text
    assert "quantization time follows from instructions and bytes, perfectly issued: a lower bound" in text
    assert "to all that fits behind computation, where FSDP2 puts it by default" in text
    h100 = planned(capsys, *GPUS, *shape)
    # 6.66e9 values: 6.285 B each for gradients, 1 / 32 + 1 / 8 of 4.5 B for weights, at 3.082 TB/s.
    assert h100["quantized"]["quantization_seconds"] == pytest.approx(15.09e-3, rel=3e-3)
    assert h100["quantized"]["memory"]["communicators"] == 5 * 600e6
    fewer = planned(capsys, *GPUS, *shape, "--communicator-megabytes", "100")
    assert fewer["quantized"]["memory"]["communicators"] == 5 * 100e6
    paper = planned(capsys, "--cluster", "h800", "--device", "h200")
    assert paper["cluster"]["quantization_bandwidth"] is None
    assert paper["cluster"]["device"]["dram_bandwidth"] == 4.8e12
    measured = planned(capsys, *GPUS, *shape, "--quantization-bandwidth", "1000")
    assert measured["quantized"]["quantization_seconds"] > h100["quantized"]["quantization_seconds"]


@pytest.mark.parametrize(
    ("rate", "row", "said"),
    [
        ("400", (3909, 3532, 3890, 3547), "do not enable: gains 0 %"),
        ("50", (6085, 3532, 3973, 3547), "depends on how much of the communication is hidden: 1.00 to 1.53"),
        ("25", (8632, 5100, 4074, 3547), "enable: 1.44 to 2.12 times as fast as with fp32 gradients, 1.29 "),
    ],
)
def test_the_verdict_of_the_documentation_is_what_its_command_says(
    capsys: Capture, rate: str, row: tuple[int, ...], said: str
) -> None:
    command = PAGE.partition("sdp4bit plan --device h100 ")[2]
    arguments = command.partition("\n\n")[0].replace("\\\n", " ").split()
    assert arguments[arguments.index("--inter-bandwidth") + 1] == "50"
    arguments[arguments.index("--inter-bandwidth") + 1] = rate
    found = planned(capsys, "--device", "h100", *arguments)
    times = [
        found[name][key]
        for name in ("baseline", "quantized")
        for key in ("step_seconds", "step_seconds_at_least")
    ]
    assert tuple(round(1000 * seconds) for seconds in times) == row
    assert found["verdict"].startswith(said)
    for least, most in (row[:2], row[2:]):
        assert f" {least:,} to {most:,} |" in PAGE


def test_a_sweep_is_drawn(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "plots" / "sweep.png"
    assert f"Sweep: {path}" in shown(capsys, "--sweep", str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "3"), "cannot be divided by 3"),
        (("--preset", "2.7B", "--pp", "5"), "layers of 2.7B, 32, cannot be divided by 5"),
        (("--overlap", "1.5"), "--overlap 1.5 must be between 0 and 1"),
        (GPUS, "--device h100 names GPUs, not a cluster: give --nodes and --devices-per-node"),
        (
            ("--device", "h100", "--nodes", "2", "--devices-per-node", "8"),
            "--device h100 does not say how fast nodes are connected: give --inter-bandwidth",
        ),
        (("--communicator-megabytes", "-1"), "--communicator-megabytes -1.0 must be at least 0"),
        (("--efficiency", "0"), "--efficiency 0.0 must be above 0"),
        (("--nodes", "0"), "--nodes 0 must be at least 1"),
        (("--inter-bandwidth", "-1"), "--inter-bandwidth -1.0 must be positive"),
        (("--reproduce-table-2", "--tp", "2"), "the only other option that it takes is --json"),
        (("--engine", "megatron", "--least-padding"), "--least-padding has no effect"),
        (("--engine", "megatron", "--no-reshard-after-forward"), "has no effect with --engine megatron"),
        (("--strategy", "tlq", "--replica", "full"), "--replica has no effect"),
        (("--probe", "nowhere.json"), "--probe nowhere.json cannot be read"),
        (("--cluster", "a100", "--probe", "x"), "both name a cluster"),
        (("--nodes", "3", "--pp", "8"), "does not divide the 12 devices"),
        (("--replicas", "3"), "--replicas 3 does not divide the 64 ranks of a data-parallel group"),
        (
            ("--nodes", "6", "--replicas", "4"),
            "shards the model over 6 ranks, which do not fill nodes with 4",
        ),
        (("--engine", "megatron", "--replicas", "2"), "--replicas has no effect with --engine megatron"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    capsys: Capture, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "was not written by `sdp4bit probe` of this version"),
        ({"latency": "left out"}, "lacks latency"),
        ({"inter_bandwidth": None}, "does not say how fast nodes are connected: give --inter-bandwidth"),
        ({}, "does not say how fast its devices compute: give --device-tflops"),
        ({"quantization_bandwidth": -1.0}, "quantization_bandwidth=-1.0 must be positive"),
    ],
)
def test_probes_that_do_not_tell_enough_are_refused(
    capsys: Capture, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arguments = ["--probe", probe_file(tmp_path, **changes)]
    if changes:
        arguments += ["--device-tflops", "1"]
    assert message in refusal(capsys, *arguments)

"""`sdp4bit plan` as people and scripts use it. Layer: no process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.options import parse
from sdp4bit_lab.plan.chart import gains
from sdp4bit_lab.plan.config import PROBE_FORMAT, PlanConfig
from sdp4bit_lab.plan.devices import MEMORY_SHARE
from sdp4bit_lab.plan.host import host_time, measured

Capture = pytest.CaptureFixture[str]
PAGE = (Path(__file__).parents[3] / "docs/planning.md").read_text()
H100 = ("--device", "h100", "--inter-bandwidth", "50", "--device-tflops", "400", "--preset", "6.7B")
SHAPE = ("--nodes", "4", "--devices-per-node", "8")


def planned(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def shown(capsys: Capture, *arguments: str) -> str:
    """Return the printed text with one space in place of several, or of line breaks."""
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
        "host_seconds": 4e-3,
        "added_host_seconds": 1e-3,
        "host_computes": False,
        **changes,
    }
    path = folder / "probe.json"
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "left out"}))
    return str(path)


def test_a_plan_as_text_has_bytes_times_memory_and_a_recommendation(capsys: Capture) -> None:
    text = shown(capsys, "--cluster", "h800", "--preset", "18B", "--tp", "8", "--engine", "megatron")
    for part in (
        "18B: 18.450 billion parameters",
        "h800: 16 nodes of 8 devices, 55.3 GB/s inter-node",
        "tensor 8 x pipeline 1 x data 16 (16 nodes x 1)",
        "inter-node, per node 104 GB 69.5 GB 17.7 GB",
        # 15 / 16 of 6, 4 and 1.0166 bytes.
        "bytes per parameter 5.62 3.75 0.953 ",
        "memory, no activations",
        "all communication that fits is hidden with --overlap-grad-reduce and --overlap-param-gather",
    ):
        assert part in text
    times = r"[\d.]+ to [\d.]+"
    assert re.search(
        f"^recommendation: enable: {times} times as fast as with fp32 gradients, {times} with bf16 gradients "
        r"18B: ",
        text,
    )
    assert text.endswith(" other methods, by seconds and loss: docs/which-method.md")


def test_a_plan_for_a_slow_link_names_local_steps(capsys: Capture) -> None:
    slow, fast = (shown(capsys, *H100, *SHAPE, "--inter-bandwidth", rate) for rate in ("0.12", "0.125"))
    assert "local steps" in slow and "local steps" not in fast
    assert "which-method" in slow and "which-method" in fast
    slowest = shown(capsys, *H100, *SHAPE, "--inter-bandwidth", "0.001")
    assert " s per step" in slowest and " s ms" not in slowest


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cluster", "h800", "--nodes", "512", "--hidden-size", "1024", "--num-layers", "8"),
        (*H100, *SHAPE, "--replicas", "4"),
        ("--device", "b200", "--nodes", "128", "--devices-per-node", "8", "--inter-bandwidth", "400",
         "--device-tflops", "1000", "--preset", "18B", "--accumulation", "64", "--engine", "megatron"),
    ],
)  # fmt: skip
def test_a_plan_fits_80_columns(capsys: Capture, arguments: tuple[str, ...]) -> None:
    assert main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= 80
    # No row of the table is wrapped: time, bytes and memory.
    first = next(number for number, line in enumerate(lines) if line.startswith("gradients:"))
    last = lines.index("", lines.index("", lines.index("", first) + 1) + 1)
    table = lines[first:last]
    assert len({len(line) for line in table if line}) == 1
    assert table.count("") == 2 and any(line.startswith("memory") for line in table)


def test_a_cluster_of_ones_own_is_not_called_the_paper_s(capsys: Capture) -> None:
    assert "a100: 16 nodes of 4 devices" in shown(capsys, "--latency-us", "5")
    faster = planned(capsys, *SHAPE, "--inter-bandwidth", "60", "--tp", "4")["cluster"]
    assert faster["name"] == "your cluster, completed with values of the paper's a100"
    assert (faster["inter_bandwidth"], faster["inter_bandwidth_shared"]) == (60e9, None)


def test_padding_is_named_and_removed(capsys: Capture) -> None:
    wide = ("--cluster", "h800", "--nodes", "512", "--hidden-size", "1024", "--num-layers", "2")
    assert "padding: FSDP2 splits dimension 0 into 4096 equal parts" in shown(capsys, *wide)
    padded, least, flat = (
        planned(capsys, *wide, *more)["padding"]
        for more in ((), ("--least-padding",), ("--engine", "megatron"))
    )
    assert flat < 1.02 < least < 1.2 < 1.4 < padded


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
        "latency": {"message": 1e-4, "nvlink": 1.9e-6, "call": 14e-6, "peer": 2e-6, "gloo_hop": 25e-6},
        "quantization_bandwidth": 5e10,
        "kernels": None,
        "device_memory": None,
        "host": {
            "plain": 4e-3,
            "added": 1e-3,
            "source": f"measured by {tmp_path / 'probe.json'}",
            "computes": False,
        },
    }
    larger = planned(capsys, *probe, "--nodes", "32", "--latency-us", "5", "--inter-bandwidth", "3")
    assert (larger["cluster"]["nodes"], larger["data_parallel"]["nodes"]) == (32, 32)
    assert larger["cluster"]["latency"]["message"] == pytest.approx(5e-6)
    assert larger["cluster"]["inter_bandwidth"] == 3e9


def test_options_reach_the_plan(capsys: Capture) -> None:
    default = planned(capsys)
    assert (default["model"], default["cluster"]["name"], default["strategy"]) == ("1.3B", "a100", "sdp4bit")
    assert default["overlap"] == [0.0, 1.0] and default["speedup"] != default["speedup_hidden"]
    full = planned(capsys, "--replica", "full", "--pipeline-chunks", "4")["quantized"]
    assert full["collectives"] > default["quantized"]["collectives"]
    assert full["memory"]["weight_replica_bf16"] == 4 * default["quantized"]["memory"]["weight_replica_bf16"]
    changed = planned(
        capsys,
        *("--overlap", "1", "--no-reshard-after-forward", "--micro-batch-size", "8", "--strategy", "tlq"),
    )
    assert (changed["strategy"], changed["overlap"]) == ("tlq", [1.0, 1.0])
    assert changed["speedup"] == changed["speedup_hidden"]
    assert changed["baseline"]["inter_bytes"] < default["baseline"]["inter_bytes"]
    assert changed["baseline"]["compute_seconds"] == pytest.approx(2 * default["baseline"]["compute_seconds"])
    other = planned(
        capsys, *("--num-layers", "2", "--hidden-size", "512", "--vocab-size", "1000", "--seq-length", "64")
    )
    assert other["model"] == "2 x 512"
    assert other["parameters"] == 2 * (12 * 512**2 + 13 * 512) + (1024 + 64 + 2) * 512


def test_replicas_share_nothing_but_gradients_between_nodes(capsys: Capture) -> None:
    sharded, replicated = planned(capsys), planned(capsys, "--replicas", "16")
    assert replicated["data_parallel"] == {"nodes": 1, "ranks_per_node": 4, "blocks": 1}
    assert replicated["replicas"] == {"nodes": 16, "ranks_per_node": 1, "blocks": 1}
    fp32, quantized = (replicated[name]["inter_bytes"] for name in ("baseline", "quantized"))
    assert fp32 / quantized == pytest.approx(7.76, abs=0.01)
    assert replicated["bf16_baseline"]["inter_bytes"] == fp32 / 2
    weights = "main_weights_fp32"
    assert replicated["quantized"]["memory"][weights] == 16 * sharded["quantized"]["memory"][weights]
    assert "(nodes x ranks: shards 1 x 4, replicas 16 x 1)" in shown(capsys, "--replicas", "16")


def test_gpus_have_assumed_speeds_and_say_so(capsys: Capture) -> None:
    text = shown(capsys, *H100, *SHAPE)
    assert "h100: 4 nodes of 8 devices, 50 GB/s inter-node" in text
    assert "300 GB/s intra-node (per device)" in text
    assert (
        "assumed, not measured: quantization at 2.09 TB/s, 63 % of the data-sheet memory bandwidth of h100"
        in text
    )
    # 6.66e9 values: 6.285 B each for gradients, 1 / 32 + 1 / 8 of 4.5 B for weights, at 2.095 TB/s.
    kernels = planned(capsys, *H100, *SHAPE)["quantized"]["quantization_seconds"]
    assert kernels == pytest.approx(19.83e-3 * 0.7 / MEMORY_SHARE, rel=3e-3)
    paper = planned(capsys, "--cluster", "h800", "--device", "h200")
    assert paper["cluster"]["quantization_bandwidth"] == pytest.approx(MEMORY_SHARE * 4.8e12)
    assert "quantization at" not in shown(capsys, *H100, *SHAPE, "--quantization-bandwidth", "1000")


BOX = ("--nodes", "1", "--devices-per-node", "8", "--device-tflops", "150", "--preset", "1.3B")


def test_the_gpus_of_a_single_node_are_planned_as_nodes(capsys: Capture) -> None:
    text = shown(capsys, "--device", "l40s", *BOX, "--link", "pcie3")
    for part in (
        "l40s: 1 node of 8 devices, 10.5 GB/s intra-node",
        "data 8 (topology=1: each device as a node)",
        "DDP: 8 replicas of 1 rank; sdp4bit with --replicas 8 takes ",
        "recommendation: perhaps (topology=1): ",
        " as DDP with bf16 gradients",
    ):
        assert part in text
    assert "inter-node" not in text and "intra-node, per rank" not in text
    result = planned(capsys, "--device", "l40s", *BOX, "--link", "pcie3")
    assert (result["topology"], result["data_parallel"]) == (
        1,
        {"nodes": 8, "ranks_per_node": 1, "blocks": 1},
    )
    parameters, rate = result["parameters"], 15.75e9 * 2 / 3
    ours, ddp = result["quantized"], result["hsdp"]["plain"]
    assert ours["transfer_seconds"] == pytest.approx(1.0166 * parameters * 7 / 8 / rate, rel=2e-3)
    # Gradients and sums in bf16, around a ring of eight.
    assert ddp["transfer_seconds"] == pytest.approx(2 * 2 * parameters * 7 / 8 / rate, rel=1e-3)
    assert ours["memory"]["weight_replica_bf16"] == pytest.approx(2 * parameters, rel=1e-3)
    # Settings that quantize inside a node keep it.
    inside = planned(capsys, "--device", "l40s", *BOX, "--replica", "full")
    assert (inside["topology"], inside["data_parallel"]) == (
        None,
        {"nodes": 1, "ranks_per_node": 8, "blocks": 1},
    )
    split = planned(capsys, "--device", "l40s", *BOX, "--tp", "2")
    assert split["data_parallel"] == {"nodes": 4, "ranks_per_node": 1, "blocks": 1}


def test_the_link_between_gpus_decides(capsys: Capture) -> None:
    rates, gains = [], []
    for link in ("pcie3", "pcie4", "pcie5", "nvlink"):
        result = planned(capsys, "--device", "h100", *BOX, "--link", link)
        rates.append(result["cluster"]["intra_bandwidth"])
        gains.append(result["speedup_over_bf16"])
    assert rates == pytest.approx([10.5e9, 21e9, 42e9, 300e9])
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.7 and gains[-1] < 1.05
    own = [planned(capsys, "--device", name, *BOX)["cluster"] for name in ("l40s", "a40", "h100")]
    assert [each["intra_bandwidth"] for each in own] == pytest.approx([21e9, 21e9, 300e9])
    assert own[0]["device_memory"] == 48e9
    measured = planned(capsys, "--device", "h100", *BOX, "--latency-us", "50")["cluster"]["latency"]
    assert measured["nvlink"] == measured["message"] == pytest.approx(50e-6)


def test_the_documented_table_is_the_command_s(capsys: Capture) -> None:
    command = PAGE.partition("sdp4bit plan --device h100 ")[2].partition("\n\n")[0]
    arguments = ["--device", "h100", *command.replace("\\\n", " ").split()]
    assert arguments[arguments.index("--inter-bandwidth") + 1] == "50"
    table = re.findall(r"\| ([\d.]+) \| ([\d,]+) to ([\d,]+) \| ([\d,]+) to ([\d,]+) \|", PAGE)
    assert len(table) == 5
    for rate, *row in table:
        result = planned(capsys, *arguments, "--inter-bandwidth", rate)
        times = [
            result[name][key]
            for name in ("baseline", "quantized")
            for key in ("step_seconds_at_least", "step_seconds")
        ]
        assert [f"{1000 * seconds:,.0f}" for seconds in times] == row


SMALL = (
    *("--device", "h100", "--nodes", "2", "--devices-per-node", "1", "--device-tflops", "400"),
    *("--num-layers", "12", "--hidden-size", "1024", "--num-attention-heads", "16", "--vocab-size", "8192"),
    *("--seq-length", "1024", "--micro-batch-size", "4", "--no-reshard-after-forward"),
)
"""The job that ran over NCCL."""


def test_the_host_limits_a_step_and_says_what_helps(capsys: Capture) -> None:
    groups, host = 13, host_time("measured")
    result = planned(capsys, *SMALL, "--inter-bandwidth", "5")
    plain, ours = result["bf16_baseline"], result["quantized"]
    assert plain["host_seconds"] == pytest.approx(groups * host.plain)
    assert ours["host_seconds"] == pytest.approx(groups * (host.plain + host.added))
    assert ours["step_seconds"] == pytest.approx(ours["host_seconds"] + ours["agreement_seconds"])
    text = shown(capsys, *SMALL, "--inter-bandwidth", "5")
    assert text.startswith("recommendation: do not enable: ")
    launches = 1e3 * groups * (host.plain + host.added)
    assert f"the host is the limit: its launches take {launches:.1f} ms" in text
    assert (
        "More tokens per step help, and fewer, larger groups: fully_shard([block1, block2, block3]) saved "
        f"{100 * (1 - measured()['host']['merged_share']):.0f} % of the host's time in a measurement" in text
    )
    more = f"{1e3 * host.added:.2g} ms more with both directions quantized (measured on"
    assert f"host: 4.8 ms per parameter group, {more}" in text
    # A slow link, or a fast host, is not limited by the host.
    assert "the host is the limit" not in shown(capsys, *SMALL, "--inter-bandwidth", "0.125")
    assert "the host is the limit" not in shown(capsys, *SMALL, "--inter-bandwidth", "5", "--host-ms", "0.1",
                                                "--added-host-ms", "0.1")  # fmt: skip
    # Half of the library's time is that of each direction, and plain FSDP2 has its own per micro-batch.
    one = planned(capsys, *SMALL, "--inter-bandwidth", "5", "--strategy", "qwd")["quantized"]["host_seconds"]
    assert one == pytest.approx(groups * (host.plain + host.added / 2))
    twice = planned(capsys, *SMALL, "--inter-bandwidth", "5", "--accumulation", "2")["quantized"]
    assert twice["host_seconds"] == pytest.approx(groups * (2 * host.plain + host.added))
    bare = planned(capsys, *SMALL, "--inter-bandwidth", "5", "--host", "server")
    assert bare["quantized"]["host_seconds"] == pytest.approx(ours["host_seconds"] / 2)
    assert "assumed, not measured: 50 %" in shown(
        capsys, *SMALL, "--inter-bandwidth", "5", "--host", "server"
    )


def test_a_host_that_computes_adds_its_time(capsys: Capture, tmp_path: Path) -> None:
    options = ("--device-tflops", "10", "--preset", "125M")
    launches = planned(capsys, "--probe", probe_file(tmp_path), *options)["quantized"]
    computes = planned(capsys, "--probe", probe_file(tmp_path, host_computes=True), *options)["quantized"]
    groups = 13
    assert launches["host_seconds"] == pytest.approx(groups * 5e-3)
    # The model's and FSDP2's part is in the measured compute rate.
    assert computes["host_seconds"] == pytest.approx(groups * 1e-3)
    assert computes["step_seconds"] == pytest.approx(launches["step_seconds"] + groups * 1e-3)
    alone = planned(capsys, "--probe", probe_file(tmp_path, added_host_seconds=None), *options)["cluster"][
        "host"
    ]
    host = host_time("measured")
    assert alone["added"] == pytest.approx(4e-3 * host.added / host.plain)
    assert alone["source"].endswith("the added time in proportion")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "3"), "--tp 3 does not divide the hidden size, 2048"),
        (("--preset", "2.7B", "--pp", "5"), "--pp 5 does not divide the number of layers, 32"),
        (("--overlap", "1.5"), "--overlap 1.5 must be between 0 and 1"),
        (H100, "--device h100 does not describe a whole cluster: give --nodes, --devices-per-node\n"),
        (
            ("--device", "h100", *SHAPE),
            ": give --inter-bandwidth (GB/s per node; 100 Gbit/s is 12.5), --device-tflops (per GPU; ",
        ),
        (("--inter-bandwidth", "-1"), "--inter-bandwidth -1.0 must be positive"),
        (("--inter-bandwidth", "2.5GbE"), "per direction; 2.5 Gbit/s is 0.3125)"),
        (
            ("--intra-bandwidth", "100 Gbit/s"),
            "a number is expected (GB/s from one GPU to the others of its ",
        ),
        (("--inter-bandwidth", "1.2.3GbE"), "a number is expected (GB/s from one node to the others, per "),
        (("--nodes", "two"), "--nodes two: an integer is expected (Number of nodes)"),
        (("--host", "laptop"), "--host laptop: use one of measured, server"),
        (
            ("--link", "pcie4", "--intra-bandwidth", "1"),
            "--link pcie4 and --intra-bandwidth 1.0 set the same",
        ),
        (("--device", "l40s", "--link", "nvlink"), "--link nvlink needs a --device with NVLink (a100, "),
        (("--link", "nvlink"), "--link nvlink needs a --device with NVLink"),
        (("--dropout", "0.1"), "--dropout changes neither bytes nor"),
        (("--engine", "megatron", "--least-padding"), "--least-padding has no effect"),
        (("--engine", "megatron", "--replicas", "2"), "--replicas has no effect with --engine megatron"),
        (("--probe", "nowhere.json"), "--probe nowhere.json cannot be read"),
        (("--cluster", "a100", "--probe", "x"), "both name a cluster"),
        (("--nodes", "6", "--replicas", "4"), "over 6 ranks, which do not fill nodes of 4"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(
    capsys: Capture, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "was not written by this version of `sdp4bit probe`"),
        ({"latency": "left out"}, "lacks latency"),
        ({"host_seconds": "left out"}, "lacks host_seconds"),
        ({"added_host_seconds": "fast"}, "added_host_seconds is 'fast', not a number"),
        ({"inter_bandwidth": None}, "probe.json does not describe a whole cluster: give --inter-bandwidth"),
        ({}, "give --device-tflops"),
    ],
)
def test_incomplete_probes_are_refused(
    capsys: Capture, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    arguments = ["--probe", probe_file(tmp_path, **changes)]
    if changes:
        arguments += ["--device-tflops", "1"]
    assert message in refusal(capsys, *arguments)


@pytest.mark.parametrize("shape", [SHAPE, ("--nodes", "1", "--devices-per-node", "8")])
def test_the_drawn_gains_are_those_of_plans(shape: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    plot = tmp_path / "gain.png"
    assert main(["plan", *H100, *shape, "--plot", str(plot), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) and str(plot) in printed.err
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000
    config = parse(PlanConfig, [*H100, *shape], prog="plan")
    rate = "--inter-bandwidth" if shape == SHAPE else "--intra-bandwidth"
    drawn = gains(config, config.cluster.resolve(model="6.7B"), np.array([5e9, 1e11]))
    for place, link in enumerate(("5", "100")):
        planned_there = planned(capsys, *H100, *shape, rate, link)
        ends = [planned_there["speedup_over_bf16"], planned_there["speedup_over_bf16_hidden"]]
        assert drawn["FSDP2"][place].tolist() == ends
        if hybrid := planned_there["hsdp"]:
            name = "DDP" if hybrid["shards"] == {"nodes": 1, "ranks_per_node": 1} else "HSDP"
            assert drawn[name][place].tolist() == hybrid["speedup"]


def test_a_plot_is_a_png(capsys: Capture) -> None:
    assert "--plot gain.jpg: give a file whose name ends in .png" in refusal(
        capsys, *H100, *SHAPE, "--plot", "gain.jpg"
    )

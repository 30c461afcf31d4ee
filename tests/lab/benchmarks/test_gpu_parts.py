"""The parts of a report of a GPU, from invented traces, losses and texts: no GPU is needed.

The rehearsal of all parts over gloo is in test_gpu_report.py.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_predictions, gpu_text, gpu_training
from benchmarks.gpu_tables import losses_section
from benchmarks.step_profile import STEP, WAIT, device_times, hooks_of, read_trace, sentence
from sdp4bit_lab.compare.paired import confidence_interval

MACHINE = {
    **{"cpu": "a CPU", "cores": 8, "gpu": "a GPU", "commit": "unknown", "command": "c"},
    **{"versions": {"torch": "2"}, "date": "2026-11-28"},
}


def event(cat: str, name: str, start: float, end: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": arguments}


def step(begin: float) -> list[dict[str, Any]]:
    """One step of 10 ms, in us: the host issues it for 6 ms, and a matrix product overlaps with NCCL."""
    kernels = {
        "sm90_xmma_gemm_bf16": (1000, 3000),
        "ncclDevKernel_AllGather_RING_LL": (2000, 5000),
        "ncclDevKernel_SendRecv": (4500, 5500),
        "quantize_kernel": (5500, 5750),
        "multi_tensor_apply_kernel<FusedAdamMathFunctor>": (8000, 9000),
    }
    found = [event("user_annotation", STEP, begin, begin + 6000)]
    found.append(event("user_annotation", WAIT, begin + 6000, begin + 10000))
    # The device's copy of a range overlaps with everything, and is no kernel.
    found.append(event("gpu_user_annotation", STEP, begin + 1000, begin + 9000))
    for number, (name, (start, end)) in enumerate(kernels.items()):
        launch = begin + start - 100 * (number + 1)
        found.append(
            event("cuda_runtime", "cudaLaunchKernel", launch, launch + 5, correlation=begin + number)
        )
        found.append(event("kernel", name, begin + start, begin + end, correlation=begin + number))
    for group in range(2):
        place = begin + 100 * group
        found.append(event("user_annotation", f"FSDP::all_gather (blocks.{group})", place, place + 30))
        found.append(
            event("user_annotation", f"FSDP::post_backward_reduce ({group})", place + 30, place + 80)
        )
    return found


def test_a_step_is_divided_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    other = {"ph": "M", "name": "process_name"}
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [other, *step(0.0), *step(20000.0)]}).encode()))
    events = read_trace(path)
    found = device_times(events)
    assert found is not None
    # The matrix product 2 ms, the quantizer 0.25, the optimizer 1; only NCCL from 3 to 5.5 ms.
    assert found["ms"] == pytest.approx(
        {"computing": 3.25, "only_nccl": 2.5, "idle_while_issuing": 1.25, "idle_after": 3.0}
    )
    assert (found["step_ms"], found["issued_ms"], found["kernels"]) == pytest.approx((10, 6, 5))
    assert found["kernels_ms"] == pytest.approx(
        {
            **{"NCCL": 4.0, "quantizers": 0.25, "matrix products and attention": 2.0, "optimizer": 1.0},
            **{"copies": 0.0, "other kernels": 0.0},
        }
    )
    assert found["launch_to_start_us"] == pytest.approx(300)
    assert sentence(found).startswith("of 10.0 ms, 3.2 are kernels other than NCCL's, 2.5 are only NCCL")
    expected = {"FSDP::all_gather": 30.0, "FSDP::post_backward_reduce": 50.0}
    assert hooks_of(events) == {"groups": 2, "host_us_per_group": expected}


def test_a_trace_of_a_cpu_has_no_device() -> None:
    events = [each for each in step(0.0) if each["cat"] != "kernel"]
    assert device_times(events) is None
    assert hooks_of([each for each in events if "FSDP" not in each["name"]])["groups"] == 0


def test_losses_of_a_step_are_relative_to_the_first_strategy() -> None:
    reference = [5.0 - step / 50 for step in range(50)]
    ours = [loss * (1.001 if step >= 40 else 1.0) for step, loss in enumerate(reference)]
    result = {"losses": {"fsdp2": reference, "qwd": ours, "fair": reference}, "machine": MACHINE}
    text = losses_section(result, heading="h100: losses").replace("\N{NO-BREAK SPACE}", " ")
    same = " +0.000 % |" * 4
    assert f"| `qwd` |{same} +0.100 % | +0.100 % | no |" in text
    assert f"| `fair` |{same} +0.000 % | +0.000 % | yes |" in text


def run(folder: Path, losses: dict[int, list[float]], *, steps: int) -> Path:
    """Write the events of a run with these validation losses, of which some have no step yet."""
    folder.mkdir()
    lines = [
        {"event": "train", "step": n, "tokens_per_second": 50.0, "step_seconds": 2.0}
        for n in range(1, steps + 1)
    ]
    for step, batches in losses.items():
        mean = sum(batches) / len(batches)
        lines.append({"event": "validation", "step": step, "loss": mean, "batch_losses": batches})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_are_compared_at_equal_steps_and_batches(tmp_path: Path) -> None:
    runs = {
        "baseline": run(tmp_path / "baseline", {2: [4.0, 2.0, 5.0], 4: [3.0, 1.0, 2.0]}, steps=4),
        "sdp4bit": run(tmp_path / "sdp4bit", {2: [4.04, 2.04, 5.0]}, steps=3),
        "qw": tmp_path / "qw",
    }
    assert gpu_training.summarize(runs)["differences"] == []
    run(tmp_path / "qw", {2: [4.0, 2.0, 5.0]}, steps=2)
    found = gpu_training.summarize(runs)
    ours, theirs = found["differences"]
    assert (ours["strategy"], ours["step"], ours["batches"]) == ("sdp4bit", 2, 3)
    assert ours["percent"] == pytest.approx(1.0)  # 1, 2 and 0 %
    assert ours["interval"] == pytest.approx(confidence_interval([1.0, 2.0, 0.0]))
    assert theirs["percent"] == 0 and {name: of["tokens"] for name, of in found["runs"].items()} == {
        **{"baseline": 400, "sdp4bit": 300, "qw": 200}
    }


def test_training_without_its_text_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "a.json"), "--runs", str(tmp_path / "runs"), "--text", str(tmp_path)]
    assert gpu_training.main(arguments) == gpu_training.SKIPPED
    assert f"make it with `python -m benchmarks.gpu_text {tmp_path}`" in capsys.readouterr().out
    unfinished = gpu_training.main([*arguments[:3], "--seconds", "1"])
    assert unfinished == gpu_training.UNFINISHED and not (tmp_path / "a.json").exists()


def test_a_text_has_each_document_once_prose_first(tmp_path: Path) -> None:
    files = tmp_path / "files"
    for name, text in {
        **{"usr/share/doc/a.txt": "a" * 600, "usr/share/doc/b.txt": "a" * 600},
        **{"usr/share/doc/short.txt": "b", "usr/share/doc/image.png": "c" * 600},
    }.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(text)
    (files / "usr/share/man/man1").mkdir(parents=True)
    (files / "usr/share/man/man1/x.1.gz").write_bytes(gzip.compress(b"d" * 700))
    texts = list(gpu_text.documents(files))
    assert texts == ["a" * 600, "d" * 700]
    out = tmp_path / "text.jsonl"
    assert gpu_text.write_text(out, iter(texts), megabytes=0.001) == (1, 600)
    assert gpu_text.write_text(out, iter(texts), megabytes=1) == (2, 1300)
    read = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert sorted(read) == texts


def test_planned_seconds_join_the_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = gpu_predictions.read()
    assert all(row["source"] for row in [*content["seconds"], *content["statements"]])
    known = gpu_predictions.seconds_of(content, "steps-2x1-620m")
    assert known["fsdp2-bf16", "40gbit"] / known["sdp4bit", "40gbit"] == pytest.approx(2.1, abs=0.1)
    # The planner's seconds replace its earlier ones, and count last.
    file = tmp_path / "predictions.json"
    earlier = gpu_predictions.add_planned(
        content, {"steps-2x1": {"sdp4bit": {"10gbit": 9.0}}}, source=gpu_predictions.MODEL
    )
    file.write_text(json.dumps(earlier))
    row = {"strategy": "sdp4bit", "rate": "10gbit", "lower_quartile": 3.0}
    (tmp_path / "steps-2x1.json").write_text(json.dumps({"rows": [row]}))
    gpu_predictions.main([str(tmp_path), "--file", str(file), "--plan"])
    planned = gpu_predictions.seconds_of(gpu_predictions.read(file), "steps-2x1")["sdp4bit", "10gbit"]
    assert 0.08 < planned < 0.11  # 82 MB take 66 ms, and the arithmetic 29 ms; or the host 13 groups
    printed = capsys.readouterr().out
    assert f"| steps-2x1 | sdp4bit | 10gbit | {planned:.3f} | 3.000 | {3 / planned:.2f} |" in printed
    # Twice: nothing is added again. Strategies that the planner does not know have no seconds of it.
    once = gpu_predictions.read(file)
    gpu_predictions.main([str(tmp_path), "--file", str(file), "--plan"])
    assert gpu_predictions.read(file) == once
    of_model = {each["strategy"] for each in once["seconds"] if each["source"] == gpu_predictions.MODEL}
    assert of_model == {"fsdp2", "fsdp2-bf16", "ddp-bf16", "hsdp-bf16", "sdp4bit", "hsdp-sdp4bit"}

"""Results of ranks that share a GPU, as tables of docs/results/nccl.md; see benchmarks/tables.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import gpu_predictions
from benchmarks.markdown import origin, percent, table
from benchmarks.speed_tables import cluster_section, layout_of, profile_section
from benchmarks.step_profile import table_rows
from sdp4bit_lab.compare.paired import interval_text

_SHOWN_STEPS = (10, 20, 30, 40, 50)


def nccl_page(folder: Path) -> str:
    """Return step times and collectives of ranks that share a GPU, for each machine in results/gpu."""
    predicted: dict[tuple[str, str, str], float] = {}
    found = json.loads((folder / "predictions-nccl.json").read_text(encoding="utf-8"))
    for row in found["rows"]:
        predicted[row["layout"], row["strategy"], row["rate"]] = row["seconds_per_step"]
    text = (
        "[How this is measured](../one-gpu.md). Ranks share one GPU, over NCCL's sockets, on links of a "
        "limited rate. Seconds are medians of the rounds, beside the predicted ones in parentheses.\n\n"
        "From 10 Gbit/s up, sdp4bit's step does not get shorter with the link: the host limits it. "
        "Its medians of a few rounds scatter there. [Planned and measured steps](planned.md) shows the "
        "fastest rounds, and the seconds of today's model of a step.\n\n"
        f"Predictions of {found['date']}. {found['note']}\n"
    )
    second = folder / "predictions-second.json"
    expected = gpu_predictions.read(second) if second.exists() else None
    files = [*sorted(folder.glob("*/nccl-2*.json")), *sorted(folder.glob("*/steps-*.json"))]
    for path in [*files, *sorted(folder.glob("*/nccl-send-limit.json"))]:
        result = json.loads(path.read_text(encoding="utf-8"))
        layout = f"{result['nodes']}x{result['ranks_per_node']}"
        count = result["workload"]["micro_batches"] if "workload" in result else 1
        heading = f"{path.parent.name}: {layout_of(result)}"
        heading += f", {count} micro-batches" if count > 1 else ""
        if not path.stem.startswith("nccl-2"):
            seconds_of = gpu_predictions.seconds_of(expected, path.stem) if expected else {}
            heading = f"{heading}, {path.stem}"
            text += f"\n{cluster_section(result, heading=heading, predicted=seconds_of, quartiles=True)}"
            continue
        of_layout = {(name, rate): seconds for (of, name, rate), seconds in predicted.items() if of == layout}
        text += f"\n{cluster_section(result, heading=heading, predicted=of_layout if count == 1 else {})}"
    for name, section in (("profile", device_section), ("losses*", losses_section)):
        for path in sorted(folder.glob(f"*/{name}.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            if "losses" in result:  # a profile of an earlier program has another form
                text += f"\n{section(result, heading=f'{path.parent.name}: {path.stem}')}"
    for path in sorted(folder.glob("*/training.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        text += f"\n{training_section(result, heading=f'{path.parent.name}: 125 million parameters')}"
    for path in sorted(folder.glob("*/nccl-*.json")):
        checks = json.loads(path.read_text(encoding="utf-8")).get("checks", ())
        for check in checks:
            if check["name"] == "collectives" and check["result"] == "passed":
                text += f"\n{_collectives_section(path, check['findings'])}"
    return text


def device_section(result: dict[str, Any], *, heading: str) -> str:
    """Return the parts of a step's time on the GPU and on the host, a row per strategy."""
    host = profile_section([result]).partition("\n\n")[2]
    return (
        f"## {heading}\n\nMilliseconds of a step on rank 0. The first two columns are without the "
        f"profiler. The next five divide a profiled step without overlap, and times of kernels overlap.\n\n"
        f"{table(*table_rows(result['profiles']))}\nThe host, by parts. {host}"
    )


def losses_section(result: dict[str, Any], *, heading: str) -> str:
    """Return the losses of every tenth step, relative to the first strategy."""
    baseline, *others = result["losses"]
    reference = result["losses"][baseline]
    shown = [step for step in _SHOWN_STEPS if step <= len(reference)] or [len(reference)]
    rows = []
    for name in others:
        losses = result["losses"][name]
        percents = [100 * (ours / theirs - 1) for ours, theirs in zip(losses, reference, strict=True)]
        equal = "yes" if losses == reference else "no"
        last = statistics.fmean(percents[-10:])
        rows.append([f"`{name}`", *(percent(percents[step - 1]) for step in shown), percent(last), equal])
    titles = ["strategy", *(f"step {step}" for step in shown), "mean of the last 10", "equal bit for bit"]
    return (
        f"## {heading}\n\nLoss relative to `{baseline}`, mean of all ranks on the batch of the step, "
        f"{len(reference)} steps.\n\n{table(titles, rows)}\n{origin(result)}\n"
    )


def training_section(result: dict[str, Any], *, heading: str) -> str:
    """Return the losses at equal tokens, relative to the baseline."""
    baseline, *_ = result["runs"]
    of = result["runs"][baseline]
    rows = [
        [
            f"`{row['strategy']}`",
            f"{row['step'] * of['tokens'] / of['steps'] / 1e6:.1f}",
            f"{row['baseline']:.4f}",
            percent(row["percent"]),
            interval_text(row["interval"], digits=3, unit=" %"),
        ]
        for row in result["differences"]
    ]
    titles = ["strategy", "million tokens", f"loss of `{baseline}`", "difference", "95 % interval"]
    return (
        f"## {heading}\n\nValidation losses on simulated ranks, at equal tokens and with one seed. The "
        f"interval is of the mean over validation batches, so another seed may differ by more.\n\n"
        f"{table(titles, rows)}\n{origin(result)}\n"
    )


def _collectives_section(path: Path, found: dict[str, Any]) -> str:
    sizes = found["seconds"]
    rows = [
        [name, *(f"{1e3 * of[name]:.2f}" for of in sizes.values())] for name in next(iter(sizes.values()))
    ]
    titles = ["milliseconds", *(f"{int(size):,} bytes" for size in sizes)]
    return (
        f"## {path.parent.name}: collectives, {path.stem}\n\nBytes are of each rank. Two communicators at "
        f"once beside a matrix product take {1e3 * found['two_communicators_seconds']:.0f} ms.\n\n"
        f"{table(titles, rows)}"
    )

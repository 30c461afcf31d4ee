"""Write the planner's tables of the documentation from results/planning.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.markdown import NOTICE, origin, span, table

GAINS = {
    "over_fp32": "FSDP2's default, fp32 gradients",
    "over_bf16": "FSDP2 with bf16 gradients",
    "over_hsdp": "HSDP with bf16 gradients",
}
SEEN_IN = {
    (1, 4): "README (64 x 8), `sdp4bit demo` (2 x 2)",
    (2, 4): "tutorial (2 x 1), `examples/fsdp2_minimal.py` (2 x 2)",
    (4, 4): "two micro-batches",
    (2, 2): "trainers with `bf16=True` (2 x 1)",
}
"""Places that print a ratio, by the gathers of a step and the bytes of a gradient."""


def planning_page(result: dict[str, Any]) -> str:
    """Return the page of the planner's tables, without memory and ratios."""
    large, accumulated = result["large_batch"], result["accumulated"]
    sections = [_gains(result, name) for name in GAINS]
    batch = f", with {large['tokens']:,} tokens per GPU and step"
    sections.append(_gains(large, "over_hsdp", more=f"{batch} in one micro-batch"))
    sections.append(_gains(accumulated, "over_hsdp", more=f"{batch} in {accumulated['micro_batches']}"))
    sections.append(_break_even(result["break_even"]))
    sections += [_links(result["links"]), _decisions(result["decisions"]), _boxes(result["boxes"])]
    return (
        f"{NOTICE}# Predicted gains\n\n**All tables are calculated, not measured**: "
        f"[planning](../planning.md) states the assumptions. {result['assumptions']}\n\n"
        + "\n".join(sections)
        + f"\n{origin(result)}"
    )


def _gains(result: dict[str, Any], name: str, *, more: str = "") -> str:
    rates = list(dict.fromkeys(row["gbit"] for row in result["rows"]))
    cells: dict[tuple[str, int], list[str]] = {}
    for row in result["rows"]:
        text = "no memory"
        if row["fits"]:
            text = "no HSDP fits" if row[name] is None else span(row[name])
        cells.setdefault((row["model"], row["nodes"]), []).append(text)
    rows = [[model, str(nodes), *texts] for (model, nodes), texts in cells.items()]
    return f"## Over {GAINS[name]}{more}\n\nTimes faster, by the link rate of a node in Gbit/s.\n\n" + table(
        ["model", "nodes", *(f"{rate:g}" for rate in rates)], rows
    )


def _break_even(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [row["job"], f"{row['nodes']} x {row['gpus']}", *(f"{rate:.2g}" for rate in row["gbit_per_gpu"])]
        for row in rows
    ]
    return (
        "## Break-even\n\nLink rates in Gbit/s per GPU above which the better of FSDP2 and HSDP (or DDP), "
        "both with bf16 gradients, is within 5 % of sdp4bit. Tokens are per GPU and step.\n\n"
        + table(["model", "nodes x GPUs", "all hidden that fits", "nothing hidden"], cells)
    )


def _links(links: dict[str, Any]) -> str:
    names = list(links["rows"][0]["gbit"])
    rows = [
        [
            *(row["model"], f"{row['tokens']:,}"),
            *("none" if rate is None else f"{rate:g}" for rate in row["gbit"].values()),
        ]
        for row in links["rows"]
    ]
    return (
        "## Link that a node needs\n\nSlowest standard link, in Gbit/s per node, with which "
        f"{links['nodes']} nodes compute {100 * links['efficiency']:g} % of the time. All communication that "
        "fits is hidden; with less overlap, the link must be faster. FSDP2's traffic is that of ZeRO-3. "
        '"None": the host\'s launches take longer.\n\n'
        + table(["model", "tokens per GPU and step", *names], rows)
    )


def _decisions(decisions: dict[str, Any]) -> str:
    """Merge models, and then their nodes, with equal cells."""
    rows: list[tuple[list[str], list[int], list[str]]] = []
    for row in decisions["rows"]:
        cells = [
            " or ".join(dict.fromkeys(name.removesuffix(", bf16") for name in chosen)) or "no memory"
            for chosen in row["chosen"]
        ]
        if rows and rows[-1][0][-1] == row["model"] and rows[-1][2] == cells:
            rows[-1][1].append(row["nodes"])
        else:
            rows.append(([row["model"]], [row["nodes"]], cells))
    merged: list[tuple[list[str], list[int], list[str]]] = []
    for models, nodes, cells in rows:
        same = next((each for each in merged if each[1:] == (nodes, cells)), None)
        if same is None:
            merged.append((models, nodes, cells))
        else:
            same[0].extend(models)
    return (
        "## Which one to use\n\nThe first of FSDP2, HSDP, sdp4bit and HSDP with sdp4bit whose step is within "
        "5 % of the fastest that fits the memory; plain gradients are bf16. Of two answers, the first hides "
        "no communication, the second all that fits. By the link rate of a node in Gbit/s.\n\n"
        + table(
            ["model", "nodes", *(f"{rate:g}" for rate in decisions["gbit"])],
            [[_ends(models), _ends(nodes), *cells] for models, nodes, cells in merged],
        )
    )


def _ends(values: Sequence[Any]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _boxes(boxes: dict[str, Any]) -> str:
    rows = [
        [
            *(row["model"], row["link"], f"{row['bandwidth'] / 1e9:.3g}", span(row["over_bf16"])),
            f"{span(row['over_hybrid'])} ({row['hybrid']})" if row["hybrid"] else "does not fit",
            "depends on overlap" if row["recommendation"].startswith("depends") else row["recommendation"],
        ]
        for row in boxes["rows"]
    ]
    titles = ["model", "link", "GB/s per GPU", "over FSDP2", "over HSDP or DDP", "recommendation"]
    return (
        "## One node of 8 GPUs\n\nTimes faster with `topology=1`, each GPU as its own node, than with bf16 "
        f"gradients. L40S that sustain {boxes['tflops']:g} TFLOP/s each, 8,192 tokens per GPU and step. "
        "Links carry two thirds of their nominal rate, which a PCIe path that GPUs share does not reach. "
        f"NVLink has the rate of an H100's.\n\n{table(titles, rows, left=2)}"
    )


def memory_table(result: dict[str, Any]) -> str:
    """Return the memory of a GPU by model and nodes, in GB."""

    def gigabytes(count: float) -> str:
        return f"{count / 1e9:.1f}" if count < 99.95e9 else f"{count / 1e9:.0f}"

    rows = []
    for row in result["memory"]:
        ours = row["sdp4bit"]
        hybrid = "-"
        if row["hsdp"] is not None:
            nodes = row["hsdp_nodes"]
            hybrid = gigabytes(sum(row["hsdp"].values())) + (f" ({nodes} nodes)" if nodes > 1 else "")
        total = gigabytes(sum(ours.values()))
        rows.append(
            [
                *(row["model"], str(row["nodes"])),
                *(gigabytes(sum(row["fsdp2"].values())), hybrid),
                total if row["fits"] else f"({total})",
                gigabytes(ours["shards"] + ours["gradients"]),
                *(gigabytes(ours[part]) for part in ("replica", "buffers", "communicators")),
            ]
        )
    titles = ["model", "nodes", "FSDP2", "HSDP", "sdp4bit", "shards", "replica", "buffers", "comm."]
    return table(titles, rows)


def ratio_table(result: dict[str, Any]) -> str:
    """Return the ratios of bytes between nodes, by gathers, gradients, nodes and ranks."""
    ratios = result["ratios"]
    grids = (f"{nodes} x {ranks}" for nodes, ranks in ratios["grids"])
    titles = ["printed by", "gathers", "gradients", *grids]
    rows = [
        [
            SEEN_IN.get((row["gathers"], row["gradient_bytes"]), ""),
            *(str(row["gathers"]), {4: "fp32", 2: "bf16"}[row["gradient_bytes"]]),
            *(f"{ratio:.1f}" for ratio in row["ratios"]),
        ]
        for row in ratios["rows"]
    ]
    return table(titles, rows)


def peak_table(result: dict[str, Any]) -> str:
    """Return the measured memory of a small job beside the planned one, in MB."""

    def megabytes(count: int) -> str:
        return f"{count / 1e6:.1f}"

    rows = [
        [
            row["strategy"],
            megabytes(row["between_steps"]),
            megabytes(row["planned"]["shards"] + row["planned"]["replica"]),
            *(megabytes(count) for count in (row["measured"], sum(row["planned"].values()))),
        ]
        for row in result["rows"]
    ]
    return table(["MB", "between steps", "shards and replica, planned", "peak", "peak, planned"], rows)

"""Means, spreads, paired differences and intervals over seeds, and their tables. No process."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from sdp4bit_lab.compare.finished_run import FinishedRun
from sdp4bit_lab.compare.outcomes import outcomes
from sdp4bit_lab.compare.tables import LONGEST_NAME, Report
from sdp4bit_lab.pretrain.stability import GradientSpike
from sdp4bit_lab.pretrain.trainer import TrainingResult
from tests.lab.compare.synthetic_runs import finished

# Differences of +0.1, +0.2, +0.3: mean 0.2, standard deviation 0.1, and t(0.975, 2) = 4.302653.
BASELINE = [finished("baseline", seed, loss) for seed, loss in ((1, 4.0), (2, 4.0), (3, 5.0))]
HIGHER = [finished("tlq", seed, loss) for seed, loss in ((1, 4.1), (2, 4.2), (3, 5.3))]
HALF = 4.302653 * 0.1 / math.sqrt(3)


def report(runs: list[FinishedRun], baseline: str | None = "baseline") -> Report:
    return Report(runs=runs, baseline=baseline, planned=len(runs))


def test_the_differences_are_paired_by_seed():
    baseline, tlq = outcomes([*HIGHER, *BASELINE], baseline="baseline")[::-1]
    assert baseline.difference is None
    assert baseline.validation_loss == pytest.approx(13 / 3)
    assert baseline.validation_spread == pytest.approx(math.sqrt(1 / 3))
    assert tlq.difference is not None
    assert tlq.difference.by_seed == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert tlq.difference.percent_by_seed == pytest.approx({1: 2.5, 2: 5.0, 3: 6.0})
    assert tlq.difference.mean == pytest.approx(0.2)
    assert tlq.difference.mean_percent == pytest.approx(4.5)
    # Far narrower than the spread over the seeds, which is 0.58 for either strategy.
    assert tlq.difference.interval == pytest.approx((0.2 - HALF, 0.2 + HALF))
    percent = 4.3026527 * math.sqrt(3.25) / math.sqrt(3)  # the variance of 2.5, 5 and 6 is 3.25
    assert tlq.difference.percent_interval == pytest.approx((4.5 - percent, 4.5 + percent), abs=1e-6)


@pytest.mark.parametrize(
    ("losses", "significance"),
    [
        ((4.1, 4.2, 5.3), "not significantly different"),
        ((4.19, 4.2, 5.21), "higher"),
        ((3.8, 3.81, 4.79), "lower"),
        ((4.0, 4.0, 5.0), "not significantly different"),
        ((4.5,), None),
        ((4.5, 4.5), None),
    ],
)
def test_significance_is_the_side_of_0_on_which_the_interval_lies(losses, significance):
    runs = [finished("qw", seed, loss) for seed, loss in enumerate(losses, start=1)]
    outcome = outcomes([*BASELINE[: len(losses)], *runs], baseline="baseline")[1]
    assert outcome.difference is not None
    assert outcome.difference.significance == significance


def test_summary_json():
    summary = json.loads(json.dumps(report([*BASELINE, *HIGHER]).summary()))
    assert [summary[name] for name in ("baseline", "confidence", "complete", "notes")] == [
        *("baseline", 0.95, True, [])
    ]
    member = summary["strategies"]["tlq"]
    assert (member["seeds"], member["significance"]) == ([1, 2, 3], "not significantly different")
    assert member["difference_to_baseline_interval"] == pytest.approx([0.2 - HALF, 0.2 + HALF])
    nothing = summary["strategies"]["baseline"]
    assert nothing.keys() == member.keys()
    assert all(nothing[name] is None for name in nothing if "difference" in name or name == "significance")
    assert summary["runs"][0] == {
        "strategy": "baseline",
        "seed": 1,
        "train_loss": 4.0,
        "val_loss": 4.0,
        "test_loss": None,
        "first_loss": 6.0,
        "diverged_at": None,
        "intra_bytes_per_step": 2000,
        "inter_bytes_per_step": 1000,
        "step_seconds": 1.5,
        "spikes": [],
    }


def test_markdown():
    assert report([*BASELINE, *HIGHER]).markdown() == (
        "| strategy | seeds | validation loss | significance |\n"
        "| --- | --- | --- | --- |\n"
        "| baseline | 3 | 4.3333 ± 0.5774 | – |\n"
        "| tlq | 3 | 4.5333 ± 0.6658 | not significantly different |\n\n"
        "Validation loss minus that of baseline with the same seeds:\n\n"
        "| strategy | nats | 95 % interval | percent | 95 % interval |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| tlq | +0.2000 | -0.0484 to +0.4484 | +4.50 % | +0.02 to +8.98 % |\n\n"
        "Bytes per step of all ranks (docs/telemetry.md#why-your-ratio-differs):\n\n"
        "| strategy | training loss | intra-node | inter-node | fewer | ms/step |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| baseline | 4.3333 | 2 kB | 1 kB | – | 1,500 |\n"
        "| tlq | 4.5333 | 2 kB | 250 B | 4.00x | 1,500 |\n"
    )


def test_printed_tables_fit_80_columns_and_break_no_cell():
    names = ["baseline", "sdp4bit-paper", "tlq-hs:gq-group-size-inter=64:gradient-rounding-inter=nearest"]
    runs = [finished(name, seed, 10 + 0.1 * seed + i) for i, name in enumerate(names) for seed in (1, 2, 3)]
    runs[3] = finished(names[1], 1, 4.0, diverged_at=15, spikes=(GradientSpike(10, 43.6, 1.5),))
    made = report(runs, baseline=names[0])
    lines = made.text().splitlines()
    assert max(map(len, lines)) <= 80
    for _, table in made.tables():
        for name, *cells in table:
            # A long name is alone in the line above its other cells.
            first = name if len(name) <= LONGEST_NAME else ""
            row = re.compile(re.escape(first) + "".join(rf" +{re.escape(cell)}" for cell in cells))
            assert any(map(row.fullmatch, lines)) and (first or name in lines)
    words = " ".join(made.text().split())
    assert all(note in words for note in made.notes())


@pytest.mark.parametrize(
    ("runs", "baseline", "row", "note"),
    [
        (HIGHER, None, "| tlq | 3 | 4.5333 ± 0.6658 |\n", "no differences because baseline is not among the"),
        ([*BASELINE, *HIGHER], "tlq", "| baseline | -0.2000 | -0.4484 to +0.0484 | -4.29 % |", ""),
        (
            [BASELINE[0], HIGHER[0]],
            "baseline",
            "| tlq | +0.1000 | – | +2.50 % | – |",
            "* Differences of 1 seed have no significance: give 3 seeds or more, such as --seeds 1,2,3.\n",
        ),
        (
            [*BASELINE[:2], *HIGHER[:2]],
            "baseline",
            "| tlq | +0.1500 | -0.4853 to +0.7853 | +3.75 % | -12.13 to +19.63 % |",
            "* Differences of 2 seeds have no significance: give 3 seeds or more, such as --seeds 1,2,3.\n",
        ),
        (
            [BASELINE[0], HIGHER[1]],
            "baseline",
            "| tlq | 1 | 4.2000 |\n",
            "no differences because baseline shares no seed with another strategy.",
        ),
        (
            [*BASELINE[:2], finished("baseline", 3, 5.0, diverged_at=4), *HIGHER],
            "baseline",
            "| baseline | 2, 1 diverged |",
            "tlq: baseline has no finished run with seed 3, so the difference covers the other seeds.",
        ),
        (
            [*BASELINE, HIGHER[0], finished("tlq", 2, 4.2, first=math.nextafter(6.0, 7.0)), HIGHER[2]],
            "baseline",
            "| tlq | 3 |",
            "WARNING: with seed 2, baseline and tlq started differently: their losses before the first "
            "update are 6.0 and 6.000000000000001.",
        ),
    ],
)
def test_the_table_names_the_limits_of_its_numbers(runs, baseline, row, note):
    markdown = report(runs, baseline=baseline).markdown()
    assert row in markdown and note in markdown
    assert ("Validation loss minus" in markdown) == ("no differences" not in markdown)
    assert Report(runs=BASELINE, baseline="baseline", planned=4).notes() == ["Not trained yet: 1 of 4 runs."]


def test_an_unstable_baseline_makes_every_difference_mean_little():
    spikes = (GradientSpike(10, 43.6, 1.5), GradientSpike(13, 28.0, 1.5))
    unstable = [*BASELINE[:2], finished("baseline", 3, 5.0, spikes=spikes)]
    both = report([*unstable, *HIGHER])
    assert both.outcomes[1].difference is not None
    assert both.outcomes[1].difference.significance == "unstable baseline"
    assert both.notes() == [
        "baseline, seed 3 was unstable: gradient norm 43.6 at step 10, 29 times the median before (and 1 "
        "more).",
        "WARNING: the baseline is unstable, so differences mean little. Lower --lr or raise "
        "--lr-warmup-iters until it has no spikes.",
    ]
    assert both.summary()["runs"][2]["spikes"][0] == {"step": 10, "norm": 43.6, "median": 1.5}
    # Of a quantized run, the spike may be what quantization did: it is named, and the significance stays.
    other = report([*BASELINE, *HIGHER[:2], finished("tlq", 3, 5.3, spikes=spikes[:1])])
    assert other.outcomes[1].difference is not None
    assert other.outcomes[1].difference.significance == "not significantly different"
    assert other.notes() == [
        "tlq, seed 3 was unstable: gradient norm 43.6 at step 10, 29 times the median before."
    ]


def test_runs_that_diverged_are_listed_and_in_no_mean():
    gone = [finished("qw", 1, 4.0), finished("qw", 2, 4.0, diverged_at=12), finished("qw", 3, 5.2)]
    lost = [finished("ulq", seed, 4.0, diverged_at=2) for seed in (1, 2, 3)]
    both = report([*BASELINE, *gone, *lost])
    qw, ulq = both.outcomes[1:]
    assert (qw.seeds, qw.diverged, qw.validation_loss) == ((1, 3), {2: 12}, pytest.approx(4.6))
    assert (ulq.seeds, ulq.validation_loss, ulq.train_loss, ulq.difference) == ((), None, None, None)
    assert "| ulq | 0, 3 diverged | – | – |" in both.markdown()
    assert "* qw, seed 2 diverged at step 12 and is excluded from the means.\n" in both.markdown()
    summary = json.loads(json.dumps(both.summary(), allow_nan=False))
    assert summary["strategies"]["qw"]["diverged"] == {"2": 12}
    assert [run["val_loss"] for run in summary["runs"][3:6]] == [4.0, None, 5.2]


def test_everything_is_written_and_printed(tmp_path):
    names = ["baseline", *(f"tlq:gradients-quantization-start-iteration={n}" for n in range(1, 9))]
    runs = [
        finished(name, seed, 4 + 0.01 * seed + 0.1 * i) for i, name in enumerate(names) for seed in (1, 2)
    ]
    runs[3] = finished(names[1], 2, 4.0, diverged_at=15)
    made = report(runs)
    made.write(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "table.md").read_text() == made.markdown()
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is True
    for few in (runs[:1], [finished("baseline", 1, 4.0, diverged_at=1)]):
        report(few).write(tmp_path / "few")


def test_a_finished_run_keeps_a_training_result():
    def step(number: int, loss: float) -> Any:
        sent = {"intra_bytes": 10 * number, "inter_bytes": number}
        return SimpleNamespace(
            step=number, loss=loss, grad_norm=0.0, step_seconds=0.5 if number > 1 else 30.0, **sent
        )

    steps = [step(1, 6.0), step(2, 5.0), step(3, 4.0)]
    result = TrainingResult(strategy="qw", seed=4, steps=steps, validation=[(3, 4.5)])
    run = FinishedRun.of(result)
    assert run.spikes == ()
    assert (run.losses, run.validation_loss, run.step_seconds) == ((6.0, 5.0, 4.0), 4.5, 0.5)
    assert (run.train_loss, run.intra_bytes_per_step, run.inter_bytes_per_step) == (5.0, 20, 2)
    # The last update can ruin the weights without a training step that would notice.
    result.validation = [(3, math.nan)]
    assert FinishedRun.of(result).diverged_at == 3

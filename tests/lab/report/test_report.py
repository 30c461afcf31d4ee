"""What `sdp4bit report` reads from the files of runs, and what it makes of it. Layer: no process."""

import json
import math
import re
from html import unescape

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.compare.paired import interval_text, paired_difference
from sdp4bit_lab.report.charts import PLOTS, decimated, smoothed
from sdp4bit_lab.report.command import ReportConfig, write_report
from sdp4bit_lab.report.pairs import pair_rows
from sdp4bit_lab.report.runs import find_runs, read_run
from sdp4bit_lab.report.summary import fact_rows, summary_rows
from tests.lab.report.written_runs import (
    alert_event,
    communication_event,
    long_events,
    settings,
    train_event,
    validation_event,
    write_run,
)


def steps(count, **changes):
    return [train_event(step, **changes) for step in range(1, count + 1)]


def rows(runs):
    return {row.name: list(row.cells) for row in summary_rows(runs)}


def plots(runs):
    return {plot.key: plot for make in PLOTS.values() for plot in make(runs)}


def read(folder, name="run"):
    return read_run(folder, name=name)


def test_the_summary_has_the_numbers_of_the_files(tmp_path):
    first = [
        *steps(30, loss=5.0, inter_bytes=2_000_000),
        validation_event(10, 4.0),
        validation_event(30, 4.5),
    ]
    second = [*steps(20, loss=5.5), validation_event(10, 4.4), alert_event(3, "too much")]
    runs = find_runs(
        [
            write_run(tmp_path / "a", first, config=settings("baseline", steps=30)),
            write_run(tmp_path / "b", second, config=settings(steps=30)),
        ]
    )
    table = rows(runs)
    assert table["Strategy"] == ["baseline", "sdp4bit"]
    assert table["Steps"] == ["30 / 30", "20 / 30"]
    assert table["Training loss"] == ["5.0000", "5.5000"]
    assert table["Validation loss"] == ["4.5000 at step 30", "4.4000 at step 10"]
    assert table["Best validation"] == ["4.0000 at step 10", "4.4000 at step 10"]
    assert table["Difference to baseline"] == ["compared with", "+0.4000 (+10.00 %) at step 10"]
    assert table["Inter-node bytes"] == ["2 MB", "250 kB"]
    assert table["Compression ratio"] == ["8.00", "8.00"]
    assert table["Step time"] == ["250 ms", "250 ms"]
    assert table["Tokens per second"] == ["2,000", "2,000"]
    assert table["Alerts"] == ["0", "1"]
    assert "Test loss" not in table


def test_a_difference_is_taken_at_the_same_steps_only(tmp_path):
    one = [train_event(step, loss=float(step)) for step in (1, 2, 3, 4)]
    other = [train_event(step, loss=10.0 + step) for step in (3, 4, 5)]
    runs = find_runs([write_run(tmp_path / "a", one), write_run(tmp_path / "b", other)])
    raw = next(curve for curve in plots(runs)["difference"].curves if curve["kind"] == "raw")
    assert (raw["run"], raw["x"], raw["y"]) == (1, [3, 4], [10, 10])
    lonely = write_run(tmp_path / "c", [train_event(9)])
    assert plots(find_runs([tmp_path / "a", lonely]))["difference"].missing == ["c: no step in common with a"]


def test_steps_trained_again_count_as_they_were_the_last_time(tmp_path):
    events = [
        *(train_event(step, loss=1.0) for step in range(1, 21)),
        validation_event(10, 1.0),
        validation_event(20, 1.0),
        communication_event(20),
        alert_event(15, "of the lost part"),
        *(train_event(step, loss=2.0) for step in range(11, 16)),
    ]
    run = read(write_run(tmp_path, events))
    assert list(run.train) == list(range(1, 16))
    assert run.column("loss").tolist() == [1.0] * 10 + [2.0] * 5
    assert (run.restarts, list(run.validation), list(run.groups), run.alerts) == ([11], [10], [], [])
    assert rows([run])["Restarts"] == ["1"]
    assert "continued at step 11; what had been written of later steps is left out" in run.notes


def test_a_line_that_the_run_was_killed_in_is_left_out_and_noted(tmp_path):
    run = read(write_run(tmp_path, steps(3), end='\n{"event": "train", "step": 4, "lo'))
    assert list(run.train) == [1, 2, 3]
    assert run.notes == ["the last line (4) is incomplete and left out: the run was killed"]
    whole_but_for_its_end = read(write_run(tmp_path, steps(3), end=""))
    assert list(whole_but_for_its_end.train) == [1, 2, 3] and whole_but_for_its_end.notes == []


def test_runs_of_nothing_or_little_are_shown_with_the_reason(tmp_path):
    empty = write_run(tmp_path / "empty", [], end="")
    one = write_run(tmp_path / "one", steps(1), config=settings("baseline"))
    (one / "config.json").unlink()
    runs = find_runs([empty, one])
    assert runs[0].notes == ["metrics.jsonl is empty: no step was finished"]
    assert runs[1].notes == ["config.json is missing, so what was trained is not known"]
    found = plots(runs)
    assert found["loss"].missing == ["empty: no step has been finished"]
    assert [curve["x"] for curve in found["loss"].curves] == [[1], [1]]
    assert found["validation"].missing == [
        "empty: validation is every 50 steps, and 0 are done",
        "one: no validation is in the file",
    ]
    assert rows(runs)["Training loss"][0] == "–"
    assert rows(runs)["Strategy"][1] == "not recorded"
    write_report(ReportConfig(runs=(empty,), out=tmp_path / "report.html"))


def test_losses_that_are_no_numbers_are_kept_apart(tmp_path):
    events = [train_event(step, loss=None if step > 18 else 3.0) for step in range(1, 21)]
    run = read(write_run(tmp_path, [*events, validation_event(20, None)]))
    table = rows([run])
    assert table["Training loss"] == ["–"] and table["Validation loss"] == ["–"]
    assert table["Steps whose loss is not a number"] == ["2"]
    raw = plots([run])["loss"].curves[0]
    assert raw["y"] == [3] * 18 + [None] * 2
    never = find_runs([tmp_path, write_run(tmp_path / "never", [train_event(1, loss=None)])])
    assert plots(never)["difference"].missing == ["never: at no common step are both losses numbers"]
    assert plots(never)["validation"].missing[0].endswith("no validation loss is a finite number")


def test_python_s_own_spelling_of_numbers_that_are_not_finite_is_understood(tmp_path):
    write_run(tmp_path, [train_event(1, loss=math.nan, grad_norm=math.inf), train_event(2, lr=10**400)])
    run = read(tmp_path)
    assert run.train[1]["loss"] is None and run.train[1]["grad_norm"] is None and run.train[2]["lr"] is None


def test_a_run_without_quantization_says_so_in_each_plot(tmp_path):
    run = read(write_run(tmp_path, steps(5, weight_drift=None, gradient_error=None)), name="plain")
    found = plots([run])
    assert found["weight_drift"].missing == ["plain: weights are not quantized"]
    assert found["gradient_error"].missing == ["plain: gradients are not quantized"]
    assert found["group_gradient_error"].missing == ["plain: it wrote no communication events"]
    old = [{name: value for name, value in event.items() if name != "step_seconds"} for event in steps(5)]
    run = read(write_run(tmp_path, old), name="old")
    assert plots([run])["step_seconds"].missing == ['old: its steps have no "step_seconds"']


def test_groups_make_a_table_of_rows_and_reports(tmp_path):
    events = [communication_event(step, ("a", "b"), gradient_error=step / 100) for step in (10, 20)]
    events.append(communication_event(30, ("b", "c"), weight_error=None, nonfinite_groups=2))
    run = read(write_run(tmp_path, [*steps(30), *events]))
    found = plots([run])
    assert found["group_gradient_error"].maps == [
        {
            "run": 0,
            "groups": ["a", "b", "c"],
            "from": [10, 20, 30],
            "to": [10, 20, 30],
            "values": [[0.1, 0.2, None], [0.1, 0.2, 0.1], [None, None, 0.12]],
        }
    ]
    assert found["group_nonfinite_groups"].maps[0]["values"][1] == [0, 0, 2]
    quiet = read(write_run(tmp_path, [*steps(30), *events[:2]]))
    reason = plots([quiet])["group_nonfinite_groups"].missing
    assert reason == ["run: none in 2 reports of 2 groups"]


def test_merged_columns_keep_the_largest_value(tmp_path):
    events = [
        communication_event(step, (f"g{i}" for i in range(150)), weight_drift=9.0 if step == 77 else 1.0)
        for step in range(1, 121)
    ]
    found = plots([read(write_run(tmp_path, events))])["group_weight_drift"].maps[0]
    assert len(found["from"]) < 120
    column = next(i for i, (a, b) in enumerate(zip(found["from"], found["to"], strict=True)) if a <= 77 <= b)
    assert [row[column] for row in found["values"]] == [9] * 150
    assert sum(map(sum, found["values"])) == 150 * (len(found["from"]) + 8)


def test_decimated_curves_keep_extremes_ends_and_gaps():
    x = np.arange(10_000)
    y = np.sin(x / 500.0)
    y[1234], y[5678], y[7000] = 50, -50, math.nan
    steps_kept, values = decimated(x, y, points=200)
    assert len(steps_kept) < 210
    assert {0, 1234, 5678, 7000, 9999} <= set(steps_kept.tolist())
    assert np.array_equal(values, y[steps_kept], equal_nan=True)
    assert decimated(x[:200], y[:200], points=200)[0].tolist() == list(range(200))


def test_smoothing_is_the_mean_of_a_twentieth_without_nan():
    y = np.arange(200.0)
    assert smoothed(y)[100] == pytest.approx(np.mean(y[95:106]))
    assert smoothed(y)[0] == pytest.approx(np.mean(y[:6]))
    y[98] = math.nan
    assert smoothed(y)[100] == pytest.approx(np.nanmean(y[95:106]))
    assert math.isnan(smoothed(y)[98])
    assert smoothed(np.array([])).tolist() == []


def test_a_comparison_is_taken_in_its_own_order_and_each_run_once(tmp_path):
    for name, strategy, seed in (
        ("qw-seed2", "qw", 2),
        ("baseline-seed2", "baseline", 2),
        ("qw-seed1", "qw", 1),
    ):
        write_run(tmp_path / "c" / name, steps(3), config=settings(strategy, seed=seed))
    unfinished = [run.name for run in find_runs([tmp_path / "c"])]
    assert unfinished == ["baseline-seed2", "qw-seed1", "qw-seed2"]
    order = [{"strategy": "qw", "seed": 2}, {"strategy": "baseline", "seed": 2}]
    (tmp_path / "c" / "summary.json").write_text(json.dumps({"runs": order}))
    runs = find_runs([tmp_path / "c", tmp_path / "c" / "qw-seed1"])
    assert [run.name for run in runs] == ["qw-seed2", "baseline-seed2", "qw-seed1"]
    other = write_run(tmp_path / "d" / "qw-seed2", steps(3))
    assert [run.name for run in find_runs([tmp_path / "c" / "qw-seed2", other])] == [
        "c/qw-seed2",
        "d/qw-seed2",
    ]


def validated(folder, losses: dict[tuple[str, int], float], **changes):
    """Return runs that were validated once, by strategy and seed."""
    return [
        read(
            write_run(
                folder / f"{s}{n}",
                [train_event(9), validation_event(9, loss)],
                config=settings(s, seed=n) | changes,
            ),
            name=f"{s}{n}",
        )
        for (s, n), loss in losses.items()
    ]


def test_pairs_of_equal_seeds_have_a_difference_and_its_interval(tmp_path):
    losses = {("baseline", 1): 4.0, ("qw", 1): 4.1, ("baseline", 2): 4.0, ("qw", 2): 4.2}
    runs = validated(tmp_path, losses)
    assert pair_rows(runs) == [
        ("baseline", "1, 2", "4.0000 ± 0.0000", "compared with", "–", "–"),
        (
            *("qw", "1, 2", "4.1500 ± 0.0707", "+0.1500 (+3.75 %)"),
            *("-0.4853 to +0.7853 (-12.13 to +19.63 %)", "none: 3 seeds are needed"),
        ),
    ]
    three = [*runs, *validated(tmp_path, {("baseline", 3): 5.0, ("qw", 3): 5.3})]
    assert pair_rows(three)[1][3:] == (
        *("+0.2000 (+4.50 %)", "-0.0484 to +0.4484 (+0.02 to +8.98 %)"),
        "not significantly different",
    )
    assert pair_rows(three)[1][4] == interval_text(
        paired_difference({1: (4.1, 4.0), 2: (4.2, 4.0), 3: (5.3, 5.0)})
    )
    assert pair_rows(runs[:2])[1][3:5] == ("+0.1000 (+2.50 %)", "-")


def test_different_seeds_are_never_compared(tmp_path):
    losses = {("baseline", 1): 4.0, ("qw", 1): 4.4, ("qw", 2): 9.0, ("baseline", 3): 5.0}
    runs = validated(tmp_path, losses)
    assert rows(runs)["Difference to baseline"] == [
        *("compared with", "+0.4000 (+10.00 %) at step 9", "– (none has seed 2)", "compared with")
    ]
    assert [row[1] for row in pair_rows(runs)] == ["1", "1"]
    assert pair_rows([runs[0], runs[2]]) == []
    difference = plots(runs)["difference"]
    assert "qw2: no run of baseline has its seed" in difference.missing
    assert {curve["run"] for curve in difference.curves} <= {1}


def test_variants_of_a_strategy_are_rows_of_their_own(tmp_path):
    runs = validated(tmp_path, {("baseline", 1): 4.0, ("qw", 1): 4.4})
    runs += validated(tmp_path / "variant", {("qw", 1): 4.2}, label="qw:wq-group-size=64")
    assert [row[0] for row in pair_rows(runs)] == ["baseline", "qw", "qw:wq-group-size=64"]
    assert pair_rows(runs)[2][3] == "+0.2000 (+5.00 %)"


def test_an_unstable_baseline_is_marked_and_gives_no_verdict(tmp_path):
    def run(name, seed, *, spike):
        events = [train_event(n, grad_norm=43.6 if n == 12 and spike else 1.5) for n in range(1, 16)]
        events.append(validation_event(15, 4.0 + 0.1 * (name == "qw")))
        return read(write_run(tmp_path / f"{name}{seed}", events, config=settings(name, seed=seed)))

    stable = [run(name, seed, spike=False) for seed in (1, 2, 3) for name in ("baseline", "qw")]
    assert pair_rows(stable)[1][-1] == "higher"
    runs = [run("baseline", 1, spike=True), *stable[1:]]
    assert [row[-1] for row in pair_rows(runs)] == ["unstable", "unstable baseline"]
    assert rows(runs)["Gradient-norm spikes"] == [
        "1; largest: gradient norm 43.6 at step 12, 29 times the median before",
        *"00000",
    ]


def test_simulated_ranks_are_named_and_their_times_are_hidden(tmp_path):
    parallel = {"simulated_ranks": 4, "ranks_per_node": 2, "nproc_per_node": None}
    events = [*steps(3), communication_event(3)]
    config = settings() | {"parallel": parallel, "ranks": 1}
    simulated = read(write_run(tmp_path / "s", events, config=config), name="s")
    real = read(write_run(tmp_path / "r", events), name="r")
    summary = rows([simulated, real])
    assert summary["Step time"] == ["– (simulated)", "250 ms"]
    assert summary["Tokens per second"] == ["– (simulated)", "2,000"]
    facts = {row.name: row.cells for row in fact_rows([simulated, real])}
    assert facts["Ranks"] == ["4 simulated in one process, 2 per node", "4, 2 per node"]
    found = plots([simulated, real])
    (missing,) = found["step_seconds"].missing
    assert missing == "s: its simulated ranks took turns in one process, so that times mean nothing"
    assert {drawn["run"] for drawn in found["step_seconds"].curves} == {1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"metrics\.jsonl, line 2: not JSON .*remove the line"),
        ("[1]", r"line 2: not an object with a member \"event\""),
        ('{"event": "train", "loss": 1}', r'line 2: "step" is None, not a number of steps'),
        ('{"event": "train", "step": -1}', r'line 2: "step" is -1'),
        ('{"event": "train", "step": 1%s}' % (20 * "0"), r'line 2: "step" is 10+, not'),
        ('{"event": "train", "step": 2, "loss": "low"}', r"line 2: \"loss\" is 'low', not a number"),
        ('{"event": "communication", "step": 2, "groups": 3}', r'line 2: "groups" is not a list'),
        ('{"event": "communication", "step": 2, "groups": [{}]}', r'line 2: a group has no "name"'),
        ('{"event": "alert", "step": 2}', r'line 2: the alert has no "message"'),
        ("[" * 100_000, r"line 2: not JSON"),
        ("\x00\x00", r"line 2: not JSON"),
    ],
)
def test_damaged_lines_are_named(tmp_path, line, message):
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([json.dumps(train_event(1)), line, json.dumps(train_event(3)), ""])
    )
    with pytest.raises(SettingError, match=message):
        read(tmp_path)


def test_damaged_settings_are_named(tmp_path):
    write_run(tmp_path, steps(2))
    (tmp_path / "config.json").write_text('{\n"strategy": \n}')
    with pytest.raises(SettingError, match=r"config\.json, line 3: not JSON"):
        read(tmp_path)


def test_folders_without_a_run_are_named(tmp_path):
    for path, message in (
        (tmp_path / "none", "is not a folder"),
        (tmp_path, "nor a folder in it has metrics"),
    ):
        with pytest.raises(SettingError, match=message):
            find_runs([path])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingError, match="--no-jsonl"):
        find_runs([tmp_path])


def test_unknown_events_are_counted_in_the_footer(tmp_path):
    extra = [{"event": "weather", "rain": True}, {"event": "weather"}]
    page = tmp_path / "report.html"
    write_report(ReportConfig(runs=(write_run(tmp_path / "a", [*steps(2), *extra]),), out=page))
    assert "Events of a kind that this version does not know: weather (2)." in page.read_text()


def test_the_command_writes_the_page_and_explains_what_is_wrong(tmp_path, capsys):
    run = write_run(tmp_path / "a", steps(3))
    page = tmp_path / "new" / "report.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert "written" in capsys.readouterr().out and page.read_text().startswith("<!DOCTYPE html>")
    assert main(["report", str(tmp_path / "b"), "--out", str(page)]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert "is a folder: give the name of the page" in capsys.readouterr().err
    assert main(["report"]) == 2


def test_the_page_of_a_long_run_stays_small(tmp_path):
    run = write_run(tmp_path / "run", long_events(10_000, seed=1))
    page = write_report(ReportConfig(runs=(run,), out=tmp_path / "report.html"))
    assert page.stat().st_size - len(get_plotlyjs()) < 1_000_000


def test_nothing_in_the_page_points_elsewhere(tmp_path):
    page = write_report(ReportConfig(runs=(write_run(tmp_path / "a", steps(3)),), out=tmp_path / "r.html"))
    text = unescape(page.read_text().replace(get_plotlyjs(), ""))
    assert "default-src 'none'" in text
    assert re.findall(r"https?://[^\"' ]+", text) == []
    assert not re.search(r"<(link|img|iframe|object|embed|base|form)\b|<[^>]*\b(src|href)=|@import", text)
    assert re.findall(r"url\((?!#)", text) == []

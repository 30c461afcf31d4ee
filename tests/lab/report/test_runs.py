"""Files of runs as the report reads them, and its command. Layer: no process."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from sdp4bit_lab.cli import main
from sdp4bit_lab.common.settings import SettingError
from sdp4bit_lab.report.command import ReportConfig, write_report
from sdp4bit_lab.report.page import decimated
from sdp4bit_lab.report.runs import find_runs, read_run
from tests.lab.pretrain.tiny_runs import small, train_here
from tests.lab.report.written_runs import settings, train_event, train_events, validation_event, write_run
from tests.ranks import run_ranks


def test_a_line_that_is_being_written_and_unknown_events_are_left_out(tmp_path):
    events = [
        train_event(1, loss=math.nan, grad_norm=math.inf),
        {"event": "weather"},
        train_event(2, inter_bytes=10**400),
        {**validation_event(2, 4.0), "batch_losses": [4.5, 3.5], "note": {}},
    ]
    folder = write_run(tmp_path, events, end='\n{"event": "train", "step": 3, "lo')
    run = read_run(folder, name="run")
    assert list(run.train) == [1, 2] and np.isnan(run.column("loss")[0])
    assert [run.train[1]["loss"], run.train[1]["grad_norm"], run.train[2]["inter_bytes"]] == [None] * 3
    assert run.validation[2] == {"loss": 4.0, "intra_bytes": 10, "inter_bytes": 5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"metrics\.jsonl, line 2: not JSON .*remove the line"),
        ('{"event": "train", "loss": 1}', r'line 2: "step" is None, not a step'),
        ('{"event": "train", "step": 1%s}' % (20 * "0"), r'line 2: "step" is 10+, not'),
        ('{"event": "train", "step": 2, "loss": "low"}', r"line 2: \"loss\" is 'low', not a number"),
    ],
)
def test_damaged_lines_are_named(tmp_path, line, message):
    lines = [json.dumps(train_event(1)), line, json.dumps(train_event(3)), ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(SettingError, match=message):
        read_run(tmp_path, name="run")


def test_folders_without_a_run_are_named(tmp_path):
    with pytest.raises(SettingError, match="none: no such folder"):
        ReportConfig(runs=(tmp_path / "none",))
    (tmp_path / "file.png").touch()
    with pytest.raises(SettingError, match=r"file\.png: not a folder\. Give an --out folder"):
        ReportConfig(runs=(tmp_path / "file.png",))
    with pytest.raises(SettingError, match="nor its subfolders contain metrics"):
        find_runs([tmp_path])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SettingError, match="--no-jsonl"):
        find_runs([tmp_path])


def test_a_comparison_has_its_own_order_and_each_run_once(tmp_path):
    for strategy, seed in (("qw", 2), ("baseline", 2), ("qw", 1)):
        folder = tmp_path / "c" / f"{strategy}-seed{seed}"
        write_run(folder, train_events(3), config=settings(strategy, seed=seed))
    unfinished = [run.name for run in find_runs([tmp_path / "c"])]
    assert unfinished == ["baseline-seed2", "qw-seed1", "qw-seed2"]
    order = [{"strategy": "qw", "seed": 2}, {"strategy": "baseline", "seed": 2}]
    (tmp_path / "c" / "summary.json").write_text(json.dumps({"runs": order}))
    runs = find_runs([tmp_path / "c", tmp_path / "c" / "qw-seed1"])
    assert [run.name for run in runs] == ["qw-seed2", "baseline-seed2", "qw-seed1"]
    other = write_run(tmp_path / "d" / "qw-seed2", train_events(3))
    names = [run.name for run in find_runs([tmp_path / "c" / "qw-seed2", other])]
    assert names == ["c/qw-seed2", "d/qw-seed2"]


def test_decimated_curves_keep_extremes_ends_and_gaps():
    x = np.arange(10_000)
    y = np.sin(x / 500.0)
    y[1234], y[5678], y[7000] = 50, -50, math.nan
    steps, values = decimated(x, y, most=200)
    assert len(steps) < 210
    assert {0, 1234, 5678, 7000, 9999} <= set(steps.tolist())
    assert np.array_equal(values, y[steps], equal_nan=True)
    assert decimated(x[:200], y[:200], most=200)[0].tolist() == list(range(200))


def test_the_command_writes_a_small_page_that_loads_nothing(tmp_path, capsys):
    run = write_run(tmp_path / "a", train_events(10_000))
    page = tmp_path / "new" / "report.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert ReportConfig(runs=(run, tmp_path)).file == run / "report.html"
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert "is a folder: give a file name" in capsys.readouterr().err
    text = unescape(page.read_text().replace(get_plotlyjs(), ""))
    assert len(text) < 1_500_000 and "default-src 'none'" in text
    assert not re.search(
        r"https?://|<(link|img|iframe|object|embed|base|form)\b|<[^>]*\b(src|href)=|@import", text
    )
    assert not re.search(r"url\((?!#)", text)


def test_a_run_without_steps_has_a_page(tmp_path):
    empty = write_run(tmp_path / "empty", [], end="")
    (empty / "config.json").unlink()
    page = write_report(ReportConfig(runs=(empty,), out=tmp_path / "report.html")).read_text()
    assert "No step has finished." in page


@pytest.mark.gloo
def test_a_real_run_is_shown(text, tmp_path):
    config = small(text, tmp_path / "run")
    config = replace(config, training=replace(config.training, steps=2))
    ((result,), _) = run_ranks(train_here, 2, config)
    page = write_report(ReportConfig(runs=(tmp_path / "run",), out=tmp_path / "report.html")).read_text()
    for cell in (f"{result.validation_loss:.4f}", f"{result.train_loss:.4f}", "2 of 2", "2\n2 per node"):
        assert f"<td>{cell}</td>" in page

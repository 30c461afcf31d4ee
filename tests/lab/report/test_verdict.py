"""The three answers at the top of a report, from runs as their files tell them. Layer: no process."""

import pytest

from sdp4bit_lab.report.command import ReportConfig, write_report
from sdp4bit_lab.report.runs import find_runs
from sdp4bit_lab.report.verdict import verdict
from tests.lab.report.written_runs import alert_event, settings, train_event, validation_event, write_run


def steps(count=20, **changes):
    return [train_event(step, **changes) for step in range(1, count + 1)]


@pytest.fixture
def written(tmp_path):
    """Writes runs of 20 steps, given as label, seed, validation loss and events; returns the answers."""

    def write(*runs, **options):
        folders = []
        for label, seed, loss, events in runs:
            config = {**settings(label, seed=seed, steps=20), **options}
            folder = tmp_path / f"{len(folders)}-{label}"
            folders.append(write_run(folder, [*events, validation_event(20, loss)], config=config))
        return dict(verdict(find_runs(folders)))

    return write


PLAIN = steps(compression_ratio=1.0, inter_bytes=2_000_000, step_seconds=0.5)
QUALITY, SAVINGS, FAULTS = "Did it train as well?", "What did it save?", "Was anything wrong?"


def test_pairs_of_three_seeds_get_an_answer_and_runs_without_fault_nothing(written):
    losses = {1: (4.0, 4.01), 2: (4.2, 4.19), 3: (4.1, 4.1)}
    runs = [("baseline", seed, loss[0], PLAIN) for seed, loss in losses.items()]
    runs += [("sdp4bit", seed, loss[1], steps()) for seed, loss in losses.items()]
    answers = written(*runs)
    (quality,) = answers[QUALITY]
    assert quality.startswith(
        "sdp4bit: yes, no significant difference; validation loss +0.0000 (+0.00 %) to "
    )
    assert "95 % interval -0.60 to +0.61 %, 3 seeds" in quality
    assert answers[SAVINGS] == [
        "sdp4bit: 8.0x fewer bytes than plain FSDP2, 250 kB a step inter-node; a step 2.00x faster than "
        "baseline's here"
    ]
    assert answers[FAULTS] == ["Nothing: no alert, spike, fallback, restart or loss that is no number."]


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([("sdp4bit", 1, 4.0)], "there is one run: name the folder of a run without quantization, too"),
        ([("qw", 1, 4.0), ("qw", 2, 4.0)], "all runs are of one strategy, qw"),
        ([("baseline", 1, 4.0), ("qw", 2, 4.0)], "no other strategy was trained with a seed of baseline"),
        (
            [("baseline", 1, 4.0), ("qw", 1, None)],
            "no two runs of the same seed were validated at the same step",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(written, runs, reason):
    answers = written(*[(*run, steps()) for run in runs])
    assert answers[QUALITY] == [f"Not comparable, because {reason}."]


def test_few_seeds_decide_nothing(written):
    answers = written(("baseline", 1, 4.0, PLAIN), ("qw", 1, 4.2, steps()))
    assert answers[QUALITY] == [
        "qw: cannot be told from so few seeds; validation loss +0.2000 (+5.00 %) to baseline, of one seed"
    ]


def test_times_are_named_where_they_mean_something(written):
    runs = ("baseline", 1, 4.0, PLAIN), ("sdp4bit", 1, 4.0, steps(step_seconds=1.0))
    assert written(*runs)[SAVINGS][0].endswith("a step 2.00x slower than baseline's here")
    (saved,) = written(*runs, parallel={"simulated_ranks": 4, "ranks_per_node": 2})[SAVINGS]
    assert saved.endswith("its time means nothing, as the ranks were simulated")
    assert written(("baseline", 1, 4.0, PLAIN))[SAVINGS] == [
        "Nothing: no run sent fewer bytes than plain FSDP2 would have."
    ]


def test_every_kind_of_fault_is_counted_once(written, tmp_path):
    spike = "gradient norm 30 at step 15, 20 times the median before: training is unstable, lower --lr"
    events = steps(17)
    events[14] |= {"grad_norm": 30.0, "loss": None}
    events += [train_event(17, skipped=True)]  # again, after a restart
    events += [
        alert_event(15, spike),
        alert_event(16, "gradient error 0.5 > 0.3: gradients int4 -> int8", group="norm"),
        alert_event(16, "weight drift 0.5 > 0.3", group="norm"),
    ]
    (found,) = written(("sdp4bit", 1, 4.0, events))[FAULTS]
    assert found == (
        "0-sdp4bit: 17 of 20 steps are done, 1 step whose loss is not a number, 1 spike of the gradient norm "
        "(largest: gradient norm 30 at step 15, 20 times the median before), 1 change of precision by the "
        "fallback, 1 alert, 1 restart, 1 step skipped (fp16 overflow)"
    )
    page = write_report(
        ReportConfig(runs=(tmp_path / "0-sdp4bit",), out=tmp_path / "report.html")
    ).read_text()
    assert page.index(FAULTS) < page.index('<section id="summary">') and "1 restart" in page


def test_many_strategies_are_cut_short(written):
    runs = [("baseline", 1, 4.0, PLAIN), *((f"s{n}", 1, 4.0, steps()) for n in range(9))]
    answers = written(*runs)
    assert len(answers[QUALITY]) == 7 and answers[QUALITY][-1] == "and 3 more, in the tables below"

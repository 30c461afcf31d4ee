"""The three answers of a report, from the files of runs. Layer: no process."""

from __future__ import annotations

import pytest

from sdp4bit_lab.report.answers import answers, median
from sdp4bit_lab.report.runs import find_runs
from tests.lab.report.written_runs import (
    alert_event,
    settings,
    train_event,
    train_events,
    validation_event,
    write_run,
)

PLAIN = train_events(compression_ratio=1.0, inter_bytes=2_000_000, step_seconds=0.5)
UNSTABLE = [train_event(step, grad_norm=40.0 if step == 15 else 1.5) for step in range(1, 21)]


@pytest.fixture
def answered(tmp_path):
    """Write runs, given as label, seed, last validation loss and events, and return the answers."""

    def write(*runs, **options):
        folders = []
        for label, seed, loss, events in runs:
            folder = tmp_path / f"{len(folders)}-{label}"
            config = settings(label, seed=seed) | options
            folders.append(write_run(folder, [*events, validation_event(20, loss)], config=config))
        return [(answer.mood, answer.sentences) for answer in answers(find_runs(folders))]

    return write


def three_seeds(*differences, plain=PLAIN):
    """Return three runs of a baseline, and three of a strategy whose losses differ by these from them."""
    losses = [4.0, 4.2, 4.1]
    runs = [("baseline", seed, loss, plain) for seed, loss in enumerate(losses)]
    pairs = enumerate(zip(losses, differences, strict=True))
    return [*runs, *(("qw", seed, loss + more, train_events()) for seed, (loss, more) in pairs)]


def test_does_the_loss_suffer(answered):
    """Losses are compared seed by seed, and three seeds decide."""
    mood, (sentence,) = answered(*three_seeds(0.01, -0.01, 0.0))[0]
    assert (mood, sentence) == (
        "good",
        "qw: no significant difference. Validation loss +0.0000 (+0.00 %) relative to baseline, "
        "95 % interval -0.60 to +0.61 %; 3 seeds.",
    )
    # Numbers that would round to zero have more digits.
    _, (sentence,) = answered(*three_seeds(1e-5, 2e-5, 3e-5))[0]
    assert "Validation loss +0.000020 (+0.0005 %) relative" in sentence
    assert "95 % interval -0.0001 to +0.0011 %" in sentence
    mood, (sentence,) = answered(*three_seeds(0.01, 0.011, 0.01))[0]
    assert mood == "open" and sentence.startswith("qw: the loss is significantly higher. ")
    assert answered(*three_seeds(0.1, 0.11, 0.1))[0][0] == "bad"
    assert answered(*three_seeds(-0.1, -0.11, -0.1))[0][0] == "good"
    mood, (sentence,) = answered(*three_seeds(0.1, 0.11, 0.1, plain=UNSTABLE))[0]
    assert mood == "open" and "undecided, because the baseline was unstable" in sentence
    plain = [*PLAIN, validation_event(5, 4.0), validation_event(10, 4.2)]
    quantized = [*train_events(), validation_event(5, 5.0), validation_event(10, 4.4)]
    assert answered(("baseline", 1, 4.0, plain), ("qw", 1, None, quantized))[0] == (
        "open",
        [
            "qw: undecided with fewer than 3 seeds. Validation loss +0.2000 (+4.76 %) relative to baseline; "
            "1 seed."
        ],
    )


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([("qw", 1, 4.0)], "there is one run; add the folder of a run without quantization"),
        ([("qw", 1, 4.0), ("qw", 2, 4.0)], "all runs have the strategy qw"),
        ([("baseline", 1, 4.0), ("qw", 2, 4.0)], "no other strategy has a seed in common with baseline"),
        ([("b", 1, 4.0), ("qw", 1, None)], "no two runs of the same seed were validated at the same step"),
        ([("b", None, 4.0), ("qw", 1, 4.0)], "config.json of a run lacks the strategy or seed (0-b, 1-qw)"),
    ],
)
def test_the_reason_is_given_if_nothing_can_be_compared(answered, runs, reason):
    assert answered(*[(*run, PLAIN) for run in runs])[0] == ("open", [f"Not compared: {reason}."])


def test_how_many_bytes_are_saved(answered):
    """Times are compared unless ranks were simulated."""
    runs = ("baseline", 1, 4.0, PLAIN), ("qw", 1, 4.0, train_events())
    saved = "qw: 8.0x fewer inter-node bytes than plain FSDP2 (250 kB per step)."
    faster = " A step was 2.00x faster than with baseline on these machines."
    mood, sentences = answered(*runs)[1]
    assert (mood, sentences[:-1]) == ("good", [saved + faster])
    assert sentences[-1].endswith("(docs/telemetry.md#why-your-ratio-differs).")
    assert answered(*runs, parallel={"simulated_ranks": 4, "ranks_per_node": 2})[1][1][:-1] == [
        f"{saved} Step times are not compared because the ranks are simulated."
    ]
    assert answered(runs[0])[1] == ("open", ["None: no run sent fewer bytes than plain FSDP2."])


def test_is_the_run_healthy(answered):
    """A spike counts once although training writes an alert for it, too."""
    spike = "gradient norm 30 at step 15, 20 times the median before"
    events = train_events(17)
    events[14] |= {"grad_norm": 30.0, "loss": None}
    events += [alert_event(15, f"{spike}: training is unstable"), alert_event(16, "too much", group="norm")]
    mood, (sentence,) = answered(("qw", 1, None, events))[2]
    assert (mood, sentence) == (
        "bad",
        "0-qw: NaN or infinite losses: 2; gradient spikes: 1; alerts: 1; "
        f"largest spike: {spike}; 17 of 20 steps done.",
    )
    warned = [*train_events(), alert_event(3, "too much")]
    assert answered(("qw", 1, 4.0, warned))[2] == ("bad", ["0-qw: alerts: 1."])
    assert answered(("qw", 1, 4.0, train_events(5)))[2] == ("open", ["0-qw: 5 of 20 steps done."])
    assert answered(("qw", 1, 4.0, train_events()))[2][0] == "good"
    sentences = answered(*(("qw", 1, 4.0, train_events(5)) for _ in range(9)))[2][1]
    assert len(sentences) == 7 and sentences[-1] == "3 more: see the table of runs."


def test_the_time_of_a_step_leaves_out_the_first_as_in_a_comparison(tmp_path):
    events = [train_event(step, step_seconds=seconds) for step, seconds in ((1, 9.0), (2, 1.0), (3, 2.0))]
    (run,) = find_runs([write_run(tmp_path, events)])
    assert median(run, "step_seconds") == 1.5
    assert median(run, "loss") == run.train[2]["loss"]

"""Which steps of a run count as spikes of the gradient norm. No process."""

from __future__ import annotations

import math

from sdp4bit_lab.pretrain.stability import SPIKE_RATIO, GradientSpike, gradient_spikes


def spikes(*norms: float) -> list[GradientSpike]:
    return gradient_spikes(enumerate(norms, start=1))


def test_a_spike_is_more_than_four_times_the_median_of_the_steps_before():
    assert spikes(*[2.0] * 12, SPIKE_RATIO * 2.0) == []
    (spike,) = spikes(*[2.0] * 12, 8.5, 2.0)
    assert (spike.step, spike.norm, spike.median, spike.ratio) == (13, 8.5, 2.0, 4.25)
    assert str(spike) == "gradient norm 8.5 at step 13, 4 times the median before"


def test_the_first_steps_are_no_spikes_whatever_they_are():
    assert spikes(1.0, 100.0, *[1.0] * 7, 100.0) == []
    assert [spike.step for spike in spikes(1.0, 100.0, *[1.0] * 8, 100.0)] == [11]


def test_a_level_that_stays_is_no_spike_after_a_while():
    found = spikes(*[1.0] * 60, *[10.0] * 60)
    assert [spike.step for spike in found] == list(range(61, 86))  # then half of the last 50 are 10


def test_a_norm_that_is_no_number_is_left_out():
    assert spikes(*[1.0] * 10, math.inf, math.nan, 5.0)[0].step == 13

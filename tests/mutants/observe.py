"""Mutants of measures, alerts, audits, reports and timings."""

from tests.mutants import M, Source

MEASURES = "tests/engines/test_measures.py"
TOTALS = (
    f"{MEASURES}::test_totals_weigh_groups_by_their_squares_and_leave_out_what_is_not_finite",
    f"{MEASURES}::test_squares_of_a_sample_are_those_of_the_row",
)
REFRESH = f"{MEASURES}::test_what_is_measured_before_a_refresh_is_what_it_does"
ALERTS = "tests/engines/fsdp2/test_alerts.py"
UNIT_ALERTS = (
    f"{ALERTS}::test_a_measure_alerts_again_only_after_it_has_fallen_to_four_fifths",
    f"{ALERTS}::test_an_infinite_measure_alerts_and_nan_neither_alerts_nor_ends_an_alert",
    f"{ALERTS}::test_non_finite_groups_alert_above_their_number",
    f"{ALERTS}::test_measures_alert_independently_of_each_other",
)
AUDIT = "tests/engines/fsdp2/test_audit.py"
VOTES = (f"{AUDIT}::test_the_majority_of_ranks_is_right", f"{AUDIT}::test_no_majority_is_told_as_such")
TIMING = "tests/engines/test_timing.py"
BYTES = "tests/engines/ddp/test_hook.py::test_weights_stay_equal_with_the_bytes_of_the_formula"
SILENCE = "tests/engines/test_silence.py"
ADD_UP = "tests/engines/fsdp2/test_lifecycle.py::test_reports_add_up"

SOURCES = (
    Source(
        "sdp4bit/observe/measures.py",
        TOTALS,
        (
            M("norm * norm * (numel / exact.numel())", "norm * norm"),
            M(
                "error, norm = squares[:, 0:6:2], squares[:, 1:6:2]",
                "norm, error = squares[:, 0:6:2], squares[:, 1:6:2]",
            ),
            M("for column in (0, 2, 4)]", "for column in (0, 2, 2)]"),
            M("self.is_on and step > 0 and step", "self.is_on and step"),
            M("return self._interval > 0", "return self._interval >= 0"),
            M("((error / norm) ** 0.5 if norm else 0.0)", "(error / norm if norm else 0.0)"),
            M("torch.where(norm == 0, torch.zeros_like(norm)", "torch.where(norm == 0, norm + 1"),
            M(
                "is_refreshed = sample_numel is not None or group.awaits_refresh()",
                "is_refreshed = sample_numel is not None",
                tests=(REFRESH,),
            ),
            M(
                "torch.where(now.isnan(), self.squares",
                "torch.where(~now.isnan(), self.squares",
                tests=(REFRESH,),
            ),
            M("held.float() if group.awaits_refresh() else main", "held.float()", tests=(REFRESH,)),
            M("after = before + received if", "after = before - received if", tests=(REFRESH,)),
        ),
    ),
    Source(
        "sdp4bit/observe/alerts.py",
        UNIT_ALERTS,
        (
            M("limit * _RELEASE_RATIO", "limit"),
            M("_RELEASE_RATIO = 0.8 ", "_RELEASE_RATIO = 0.85 "),
            M("posinf=math.inf", "posinf=-1.0"),
            M("nan=-1.0", "nan=0.0"),
            M("if value > limit and", "if value >= limit and"),
            M("elif 0 <= value <= limit", "elif value <= limit"),
            M("self._above.add((at, column))", "pass"),
            M(
                "self._above.discard((at, column))",
                "self._above.clear()",
            ),
            M(
                "gradients=min(hops, key=",
                "gradients=max(hops, key=",
                tests=(
                    "tests/engines/fsdp2/test_exactness.py::"
                    "test_few_bits_train_the_table_and_the_measures_tell_them_and_nobody_is_alarmed",
                ),
            ),
        ),
    ),
    Source(
        "sdp4bit/observe/audit.py",
        VOTES,
        (
            M("sorted(ranks_of.items(), key=lambda item: -len(item[1]))", "list(ranks_of.items())"),
            M("if 2 * len(majority) > len(sums):", "if 2 * len(majority) >= len(sums):"),
            M("if len(ranks_of) <= 1:", "if len(ranks_of) <= 2:"),
            M("value & (1 << 64) - 1:016x", "value & (1 << 63) - 1:016x"),
            M(
                "first.traffic.count_ring(mine.nbytes)",
                "pass",
                tests=(f"{AUDIT}::test_an_audit_is_one_collective_of_eight_bytes_per_group",),
            ),
        ),
    ),
    Source(
        "sdp4bit/observe/explain.py",
        (
            "tests/engines/test_explain.py",
            "tests/collectives/test_levels.py::test_more_than_64_nodes_in_one_hop_get_a_note",
        ),
        (
            M("if nodes <= MOST_NODES_IN_ONE_HOP:", "if nodes < MOST_NODES_IN_ONE_HOP:"),
            M("key=lambda each: each + nodes // each", "key=lambda each: each"),
            M("each of {1 + len(more)}", "each of {len(more)}"),
            M(
                "total = sum((row.sent for row in rows), Traffic())\n    rows = rows if full",
                "total = sum((row.sent for row in rows[1:]), Traffic())\n    rows = rows if full",
            ),
            M(
                "has_fewer = any(fine_bits(each) != each for each in bits)",
                "has_fewer = False",
                tests=("tests/engines/fsdp2/test_sections.py::test_the_table_says_which_bits_norms_have",),
            ),
        ),
    ),
    Source(
        "sdp4bit/observe/timing.py",
        (
            f"{TIMING}::test_medians_the_ratio_and_its_spread",
            f"{TIMING}::test_blocks_take_turns_and_all_ranks_are_told_the_slowest_rank_s_time",
        ),
        (
            M(
                "tuple(max(step) for step",
                "tuple(min(step) for step",
                tests=(f"{TIMING}::test_the_slowest_rank_counts",),
            ),
            M(
                "statistics.median(plain) / statistics.median(ours)",
                "statistics.median(ours) / statistics.median(plain)",
            ),
            M("for is_quantized in (True, False):", "for is_quantized in (False, True):"),
        ),
    ),
    Source(
        "sdp4bit/observe/stats.py",
        (SILENCE, ADD_UP),
        (
            M("self.is_silent, self.silence = 0 < sent ==", "self.is_silent, self.silence = 0 <= sent =="),
            M("step = self.steps + int(self.step_pending)\n", "step = self.steps\n"),
            M(
                "sent = self.retired.collectives",
                "sent = 0",
                tests=(SILENCE, BYTES),
            ),
            M("(self.steps or self.step_pending) and not self.is_silent", "self.steps or self.step_pending"),
            M("c.current_step if self.step_pending else c.last_step", "c.last_step"),
            M("if steps and not self.is_silent else None", "if steps else None"),
            M(
                "for counter in group.counters), self.retired)",
                "for counter in group.counters), Traffic())",
                tests=("tests/engines/test_silence.py::test_the_total_holds_what_dropped_groups_have_sent",),
            ),
        ),
    ),
)

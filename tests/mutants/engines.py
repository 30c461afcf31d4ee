"""Mutants of the engines: decisions, saved state, and the order of steps."""

from tests.mutants import M, Source

DUE = "tests/engines/fsdp2/test_due.py"
CHECKPOINT = "tests/engines/fsdp2/test_checkpoint.py"
RESUME = f"{CHECKPOINT}::test_a_resumed_run_continues_bit_for_bit"
BYPASSED = f"{CHECKPOINT}::test_loads_that_bypass_the_handle_lead_to_a_refresh_in_full_precision"
LOAD = "tests/engines/fsdp2/test_load.py"
EDITS = "tests/engines/fsdp2/test_edits.py"
SIZES = f"{EDITS}::test_edits_are_sent_by_their_size_and_steps_hold_them"
USERS = "tests/engines/fsdp2/test_users.py"
ARRIVAL = "tests/engines/test_arrival.py"
DDP = "tests/engines/ddp/test_hook.py"

SEARCH = "tests/engines/test_search.py::test_"

SOURCES = (
    Source(
        "sdp4bit/engines/auto.py",
        (f"{SEARCH}the_fastest_wins", f"{SEARCH}the_third_to_fifth_of_six_steps_are_timed"),
        (
            M("UNTIMED_STEPS = 2", "UNTIMED_STEPS = 1"),
            M("self._marks[UNTIMED_STEPS : self._auto.block_steps]", "self._marks[UNTIMED_STEPS:]"),
            M("TOLERANCE = 1.02", "TOLERANCE = 1.0"),
            M("limit = TOLERANCE * min(", "limit = TOLERANCE * max("),
            M(
                "limit = DROPPED * max(",
                "limit = DROPPED * min(",
                tests=(f"{SEARCH}a_candidate_within_the_spread_of_the_fastest_stays",),
            ),
            M(
                "if rounds >= 2:",
                "if rounds >= 3:",
                tests=(f"{SEARCH}clearly_slower_candidates_drop_out_after_two_rounds",),
            ),
            M("if some_early:", "if refusal:", tests=(f"{SEARCH}a_rank_that_cannot_switch_delays_all",)),
            M("self._changed == 2", "self._changed == 1", tests=(f"{SEARCH}a_passing_change_does_not",)),
            M(
                "self._clock.has_passed(timed[-1])",
                "True",
                tests=(f"{SEARCH}a_block_goes_on_until_the_device_has_done_its_timed_steps",),
            ),
            M(
                "            self._is_paused = before\n            self._marks.clear()",
                "            self._is_paused = before",
                tests=(f"{SEARCH}steps_inside_a_pause_are_left_out_and_the_block_begins_again",),
            ),
            M(
                "if number == self._fingerprint and",
                "if",
                tests=(f"{SEARCH}a_state_holds_the_choice_for_the_same_candidates",),
            ),
            M(
                "ends_step or not self._own_per_step",
                "ends_step",
                tests=(f"{SEARCH}a_rank_that_sees_no_step_follows_the_others",),
            ),
            M(
                "ends_step or not self._own_per_step",
                "True",
                tests=(f"{SEARCH}a_step_of_several_passes_is_timed_as_a_whole",),
            ),
            M(
                "self._auto.block_steps * self._per_step",
                "self._auto.block_steps",
                tests=(f"{SEARCH}a_step_of_several_passes_is_timed_as_a_whole",),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/edits.py",
        (DUE,),
        (
            M("sums[1], frozen = before[1], []", "pass"),
            M("due=Due.TRAINED if due else Due.NOTHING)", "due=Due.TRAINED)"),
            M(" and self.trained == self._trainable()", ""),
            M("if due in (Due.NOTHING, Due.FULL):", "if due is Due.NOTHING:"),
            M("self.full_in_a_row + 1 if counts else 0", "self.full_in_a_row + 1"),
            M(
                "(self._weights.nodes.nodes << 40)",
                "0",
                tests=(f"{LOAD}::test_rows_that_the_same_ranks_saved_on_other_nodes_are_not_used",),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/state.py",
        (f"{LOAD}::test_a_save_after_a_load_that_no_forward_has_used_continues_bit_for_bit",),
        (
            M("is_unusable.to(marks.dtype) + int(edits.seen.was_loaded)", "is_unusable.to(marks.dtype)"),
            M(
                "row, due = group.view.gathered_shard(), frozenset()",
                "row = group.view.gathered_shard()",
                tests=(RESUME,),
                survives="due_params() is empty if full precision is due",
            ),
            M(
                '"steps": torch.tensor(state.steps + int(state.step_pending))',
                '"steps": torch.tensor(state.steps)',
                tests=(f"{RESUME}[node]",),
            ),
            M(
                "group.load(states[0])",
                "group.weights.load(states[0])",
                tests=("tests/engines/fsdp2/test_hybrid.py::test_accumulation_clipping_and_resume",),
            ),
            M(
                "state.forget_events()",
                "pass",
                tests=(f"{CHECKPOINT}::test_a_run_that_goes_back_in_its_own_process_repeats_itself",),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/view.py",
        (
            "tests/engines/fsdp2/test_optimizers.py::test_a_gradient_that_a_rank_keeps_of_an_empty_shard_sends_nothing",
        ),
        (
            M(
                "* (ranks - 1) < self.fsdp_param._orig_size[dim]",
                "* (ranks - 1) < 1e9",
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/hooks.py",
        (f"{USERS}::test_an_int_reshard_after_forward_trains_as_with_plain_fsdp2",),
        (
            M(
                "members = [group.layout.ranks.index(rank) for rank in ranks] or None",
                "members = None",
            ),
            M(
                "if not (is_backward and replica.rows is not None):",
                "if True:",
                tests=(
                    f"{EDITS}::test_a_backward_has_the_weights_of_its_forward_whatever_is_asked_for_in_between",
                ),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/events.py",
        (SIZES,),
        (
            M("FULL_REFRESHES_IN_A_ROW = 3", "FULL_REFRESHES_IN_A_ROW = 4", tests=(BYPASSED,)),
            M(
                "if changed and reduced:",
                "if changed:",
                tests=(
                    "tests/engines/fsdp2/test_bytes.py::test_a_step_that_changes_nothing_is_a_step_and_an_edit_is_none",
                ),
            ),
            M(
                "return not (self.is_reduced or changes_weights(optimizer))",
                "return not changes_weights(optimizer)",
                tests=(
                    "tests/engines/fsdp2/test_bytes.py::test_a_step_that_changes_nothing_is_a_step_and_an_edit_is_none",
                ),
            ),
            M(
                "self._written >= expected",
                "bool(self._written)",
                tests=(f"{EDITS}::test_a_state_dict_that_is_kept_is_looked_at_once_per_forward", BYPASSED),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/agreement.py",
        (f"{ARRIVAL}::test_ranks_are_connected_through_groups_that_share_some",),
        (
            M("found = {dist.get_rank()}", "found = {0}"),
            M("[*self.shards, *self.replicate, *links]", "[*self.shards, *links]"),
        ),
    ),
    Source(
        "sdp4bit/engines/ddp/hook.py",
        (f"{DDP}::test_gradients_are_averaged_as_by_plain_ddp", "tests/engines/test_rounding_keys.py"),
        (
            M("number=state.steps,", "number=0,"),
            M("bucket=group.index,\n", "bucket=0,\n"),
            M("return self._state.steps + int(self._state.step_pending)", "return self._state.steps"),
            M(
                "values.mul_(1.0 / size) if is_dense",
                "values if is_dense",
                tests=(f"{DDP}::test_full_precision_equals_plain_ddp_and_is_reported",),
            ),
        ),
    ),
)

"""Mutants of the engines: decisions, saved state, and the order of steps."""

from tests.mutants import M, Source

FRESH = "tests/engines/fsdp2/test_freshness.py"
CHECKPOINT = "tests/engines/fsdp2/test_checkpoint.py"
RESUME = f"{CHECKPOINT}::test_a_resumed_run_continues_bit_for_bit"
LOAD = "tests/engines/fsdp2/test_load.py"
EDITS = "tests/engines/fsdp2/test_edits.py"
SIZES = f"{EDITS}::test_edits_are_sent_by_their_size_and_steps_hold_them"
USERS = "tests/engines/fsdp2/test_users.py"
ARRIVAL = "tests/engines/test_arrival.py"
DDP = "tests/engines/ddp/test_hook.py"

SOURCES = (
    Source(
        "sdp4bit/engines/fsdp2/freshness.py",
        (FRESH,),
        (
            M("sums[1], frozen = before[1], []", "pass"),
            M("if flags.nonfinite and self.due and not", "if flags.nonfinite and not"),
            M("if flags.loaded and not self.is_from_checkpoint:", "if flags.loaded:"),
            M("(self.due < due or self.holds_nonfinite)", "self.due < due"),
            M("self.due = max(self.due, due)", "self.due = due"),
            M("Due.TRAINED if due else Due.NOTHING, True", "Due.TRAINED, True"),
            M(
                "is_difference=Due.NOTHING < self.due < Due.FULL",
                "is_difference=Due.TRAINED < self.due < Due.FULL",
            ),
            M("return self.trained == self._trainable() !=", "return self._trainable() !="),
            M("if flags.evaluates and sends_differences and", "if flags.evaluates and"),
            M("if is_large or (flags.edited and not sends_differences):", "if is_large:"),
            M("if due in (Due.NOTHING, Due.FULL):", "if due is Due.NOTHING:"),
            M("is_refused = flags.misfit and self.is_from_checkpoint", "is_refused = flags.misfit"),
            M("self.seen, self.loaded_row = Seen(), None", "self.seen = Seen()"),
            M("self.due, self.is_from_checkpoint = Due.NOTHING, False", "self.due = Due.NOTHING"),
            M("self.full_in_a_row + 1 if counts else 0", "self.full_in_a_row + 1"),
            M(
                "(self._nodes << 40)",
                "0",
                tests=(f"{CHECKPOINT}::test_other_ranks_resume_from_a_refresh_in_full_precision",),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/state.py",
        (f"{LOAD}::test_a_save_after_a_load_that_no_forward_has_used_continues_bit_for_bit",),
        (
            M("is_unusable.to(marks.dtype) + int(fresh.seen.was_loaded)", "is_unusable.to(marks.dtype)"),
            M(
                "row, due = group.view.gathered_shard(), frozenset()",
                "row = group.view.gathered_shard()",
                tests=(RESUME,),
                survives="due_params() is empty if full precision is due",
            ),
            M(
                '"steps": state.steps + int(state.step_pending)',
                '"steps": state.steps',
                tests=(RESUME,),
            ),
            M(
                "group.gradients.all_reduces, _ = values[0]",
                "_, _ = values[0]",
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
                tests=(f"{USERS}::test_groups_of_every_kind_train_as_with_plain_fsdp2",),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/fsdp2/events.py",
        (SIZES,),
        (
            M("FULL_REFRESHES_IN_A_ROW = 3", "FULL_REFRESHES_IN_A_ROW = 4"),
            M(
                "if changed and reduced:",
                "if changed:",
                tests=(
                    "tests/engines/fsdp2/test_bytes.py::test_a_step_is_an_optimizer_step_however_often_gradients_are_reduced",
                ),
            ),
            M(
                "return not (self.is_reduced or changes_weights(optimizer))",
                "return not changes_weights(optimizer)",
                tests=(
                    "tests/engines/fsdp2/test_optimizers.py::test_a_save_with_an_optimizer_without_state_changes_nothing_and_resumes_bit_for_bit",
                ),
            ),
            M(
                "self._written >= expected",
                "bool(self._written)",
                tests=(
                    f"{EDITS}::test_a_state_dict_that_is_kept_is_looked_at_once_per_forward",
                    f"{CHECKPOINT}::test_loads_that_bypass_the_handle_lead_to_a_refresh_in_full_precision",
                ),
            ),
        ),
    ),
    Source(
        "sdp4bit/engines/edits.py",
        ("tests/engines/test_edits.py",),
        (
            M("LARGEST_SMALL_EDIT**2 * size", "LARGEST_SMALL_EDIT * size"),
            M("~((change <= LARGEST_SMALL_EDIT**2 * size)", "((change > LARGEST_SMALL_EDIT**2 * size)"),
            M(" & change.isfinite())", ")"),
            M("change = main.float() - held.float()", "change = main - held"),
        ),
    ),
    Source(
        "sdp4bit/engines/agreement.py",
        (f"{ARRIVAL}::test_ranks_are_connected_through_groups_that_share_some",),
        (
            M("found = {dist.get_rank()}", "found = {0}"),
            M("for ranks in (*self.shards, *self.replicate)", "for ranks in self.shards"),
        ),
    ),
    Source(
        "sdp4bit/engines/ddp/hook.py",
        (f"{DDP}::test_gradients_are_averaged_as_by_plain_ddp", "tests/engines/test_rounding_keys.py"),
        (
            M("number=state.steps,", "number=0,"),
            M("bucket=index,\n", "bucket=0,\n"),
            M("return self._state.steps + int(self._state.step_pending)", "return self._state.steps"),
            M(
                "values.mul_(1.0 / size) if is_dense",
                "values if is_dense",
                tests=(f"{DDP}::test_full_precision_equals_plain_ddp_and_is_reported",),
            ),
        ),
    ),
)

"""Mutants of plans, sections, and collectives."""

from tests.mutants import M, Source

PLAN = "tests/collectives/test_plan.py"
PROPERTIES = "tests/collectives/test_properties.py"
TABLES = "tests/quantization/test_tables.py"
ALL_REDUCE = "tests/collectives/test_all_reduce.py"
APART = f"{ALL_REDUCE}::test_dither_is_taken_off_whatever_numbers_the_ranks_have"
MEASURES = "tests/engines/test_measures.py"
BETWEEN = f"{MEASURES}::test_a_gradient_between_two_measured_steps_that_is_not_finite_is_counted"
EXACT = (
    "tests/engines/fsdp2/test_exactness.py::test_two_ranks_with_the_identity_equal_plain_fsdp2_bit_for_bit"
)
EDITS = "tests/engines/fsdp2/test_edits.py"
DUE = "tests/engines/fsdp2/test_due.py"
TORN = "tests/engines/test_contract.py::test_a_refresh_that_failed_on_one_rank_is_repeated_by_all"
SIZES = f"{EDITS}::test_edits_are_sent_by_their_size_and_steps_hold_them"
DEEPSPEED = "tests/deepspeed/test_deepspeed.py"

SOURCES = (
    Source(
        "sdp4bit/collectives/plan.py",
        (PLAN, PROPERTIES),
        (
            M("return row // self.apart % self.size", "return row // self.apart"),
            M("return 1.0 if section.is_fine else config.effective_clip", "return 1.0"),
            M("rows=grid.size // (grid.apart(level) * size),", "parts=grid.size // size,"),
            M(
                'return config.replica == "full" or grid.ranks_per_node == 1',
                'return config.replica == "full"',
            ),
            M("stride=round_up(lengths[number], BLOCK),", "stride=lengths[number],"),
            M("if len(self._known) >= MOST_PLANS:", "if len(self._known) > MOST_PLANS:"),
            M(
                "return self.message.nbytes * self.copies * self.peers",
                "return self.message.nbytes * self.peers",
            ),
            M("hop.size - 1,\n", "hop.size,\n"),
        ),
    ),
    Source(
        "sdp4bit/collectives/chunks.py",
        (PLAN,),
        (
            M("min(MOST_CHUNKS, max(1", "min(MOST_CHUNKS + 1, max(1"),
            M(
                "if nodes == 1 or ranks_per_node == 1:",
                "if nodes == 1 and ranks_per_node == 1:",
                survives="a level without messages takes no time, so the root below is 0, and 1 the result",
            ),
            M("length = round_up(-(-total // count), unit)", "length = round_up(total // count, unit)"),
            M("end = min(numel, start + round_up(left, unit))", "end = min(numel, start + left)"),
            M("*[config.inter_group_size] * inter)", "*[config.inter_group_size] * intra)"),
        ),
    ),
    Source(
        "sdp4bit/collectives/sections.py",
        ("tests/collectives/test_sections.py", PROPERTIES),
        (
            M("and (new[0] - ranges[-1][0]) % unit == 0", "and new[0] % unit == 0"),
            M("ranges[-1][1] == new[0] and", "ranges[-1][1] <= new[0] and"),
            M("return round_up(length, BLOCK) if self.is_fine else length", "return length"),
            M("if coarse and last_kind == parameter.kind else ()", "if coarse else ()"),
            M("(end - start) - (end - start)", "(end - start)"),
        ),
    ),
    Source(
        "sdp4bit/collectives/scratch.py",
        (TABLES,),
        (
            M("self.generation += 1", "self.generation += 0"),
            M("elif ops.is_checked():", "elif False:"),
            M("while self._generation != self._scratch.generation:", "while False:"),
        ),
    ),
    Source(
        "sdp4bit/collectives/samples.py",
        (f"{MEASURES}::test_a_sample_is_of_whole_groups_and_about_as_long_as_asked_for",),
        (
            M(
                "units = -(-numel // unit)",
                "units = numel // unit",
                survives="the sample is another one, also of complete groups",
            ),
            M("(index * units // count) * unit", "index * units // count * length"),
        ),
    ),
    Source(
        "sdp4bit/collectives/reduce_scatter.py",
        (f"{PROPERTIES}::test_every_rank_gets_the_sum_that_the_definition_gives",),
        (
            M("rank -= own * hop.apart * self._rank_step", "rank -= own * hop.apart", tests=(APART,)),
            M("own_multiplier=1.0 if others else multiplier,", "own_multiplier=1.0,"),
            M("first=part.start, row_stride=part.stride", "first=0, row_stride=part.stride"),
            M("number=section.number,", "number=0,"),
            M("bucket=self.bucket,\n            stage=", "bucket=0,\n            stage="),
            M(
                "return rounding.at_row(row)._replace(sender=0)",
                "return rounding.at_row(row)",
                survives="messages are numbered, and no back end reads the sender of a key of dither",
            ),
            M(
                "multiplier * INVERSE_FACTOR if self.hadamard else multiplier",
                "multiplier * INVERSE_FACTOR",
            ),
            M(
                "for hop in rest:\n",
                "for hop in rest[:0]:\n",
                tests=(MEASURES,),
            ),
            M(
                "return (exponents == _EXPONENT).sum()",
                "return (exponents > _EXPONENT).sum()",
                tests=(f"{MEASURES}::test_what_is_not_finite_is_counted_by_groups_or_by_values",),
            ),
        ),
    ),
    Source(
        "sdp4bit/collectives/all_reduce.py",
        (f"{PROPERTIES}::test_all_ranks_get_the_sum_of_tensors_that_the_definition_gives",),
        (
            M("row % self.count if dither else row", "row"),
            M(
                "nonfinite += count_nonfinite([*map(",
                "nonfinite += 0 * count_nonfinite([*map(",
                tests=(f"{ALL_REDUCE}::test_special_values_and_other_types",),
            ),
            M("rank_step=self._ranks.step)", "rank_step=1)", tests=(APART,)),
            M(
                "if multiplier != 1.0:",
                "if multiplier == 1.0:",
                tests=(f"{ALL_REDUCE}::test_a_world_of_one_multiplies",),
            ),
            M("if self._pieces.count < layout.size:", "if self._pieces.count <= layout.size:"),
        ),
    ),
    Source(
        "sdp4bit/collectives/gradients.py",
        (EXACT,),
        (
            M(
                "return 1.0 / ranks",
                "return 1.0",
                tests=("tests/engines/ddp/test_hook.py::test_gradients_are_averaged_as_by_plain_ddp",),
            ),
            M("self.reductions += 1", "self.reductions += 0", tests=("tests/engines/test_rounding_keys.py",)),
            M(
                "self.all_reduces += 1",
                "self.all_reduces += 0",
                tests=("tests/engines/test_rounding_keys.py",),
            ),
            M("self.sample = self.nonfinite_groups = None", "self.sample = None", tests=(BETWEEN,)),
            M(
                "is_measured = sample_numel is not None or self.counts_nonfinite",
                "is_measured = sample_numel is not None",
                tests=(BETWEEN,),
            ),
            M("range(2 if self.plain_all_reduces else 1)", "range(1)", tests=(DEEPSPEED,)),
            M(
                "row_bytes = 2 * numel * values.element_size()",
                "row_bytes = numel * values.element_size()",
                tests=(
                    "tests/engines/ddp/test_hook.py::test_full_precision_equals_plain_ddp_and_is_reported",
                ),
            ),
        ),
    ),
    Source(
        "sdp4bit/collectives/weights.py",
        (DUE, "tests/engines/test_edits.py", SIZES),
        (
            M("if self._was_refreshed:", "if True:"),
            M("self.full_refreshes += 1", "self.full_refreshes += 2"),
            M("self.full_refresh_reason = self.reason", "self.full_refresh_reason = None"),
            M("torn=self.replica is not None and self.replica.is_torn", "torn=False", tests=(TORN,)),
            M("if events.nonfinite and self.due and not", "if events.nonfinite and not"),
            M("if events.loaded and not self.is_from_checkpoint:", "if events.loaded:"),
            M("(self.due < due or self.reason is FullReason.NONFINITE)", "self.due < due"),
            M("self.due = max(self.due, due)", "self.due = due"),
            M("return Due.NOTHING < self.due < Due.FULL", "return Due.TRAINED < self.due < Due.FULL"),
            M("if events.evaluates and self._sends_differences and", "if events.evaluates and"),
            M("if is_large or (events.edited and not self._sends_differences):", "if is_large:"),
            M("is_refused = events.misfit and self.is_from_checkpoint", "is_refused = events.misfit"),
            M(
                "self.due, self.is_from_checkpoint, self.loaded_row = Due.NOTHING, False, None",
                "self.due, self.is_from_checkpoint = Due.NOTHING, False",
            ),
            M("LARGEST_SMALL_EDIT**2 * size", "LARGEST_SMALL_EDIT * size"),
            M("~((change <= LARGEST_SMALL_EDIT**2 * size)", "((change > LARGEST_SMALL_EDIT**2 * size)"),
            M(" & change.isfinite())", ")"),
            M("change = main.float() - held.float()", "change = main - held"),
        ),
    ),
    Source(
        "sdp4bit/collectives/weight_replica.py",
        (f"{PROPERTIES}::test_every_replica_holds_the_weights_that_the_definition_gives", SIZES),
        (
            M(
                "if self.rows.dtype == torch.float16:",
                "if self.rows.dtype == torch.float64:",
                tests=(f"{EDITS}::test_a_replica_recovers_from_values_that_are_not_finite",),
            ),
            M("nbytes = row.nbytes * topology.nodes * (topology.ranks_per_node - 1)", "nbytes = row.nbytes"),
            M(
                'self._traffic.count(row.nbytes * (topology.nodes - 1), level="inter")',
                'self._traffic.count(row.nbytes * topology.nodes, level="inter")',
            ),
            M(
                "clip=clip_of(section, self.config)",
                "clip=self.config.effective_clip",
                tests=(f"{PLAN}::test_fine_sections_are_not_clipped",),
            ),
        ),
    ),
)

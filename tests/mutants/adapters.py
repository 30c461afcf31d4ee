"""Mutants of the adapters; those of DeepSpeed need an environment with it."""

from tests.mutants import M, Source

DEEPSPEED = "tests/deepspeed/test_deepspeed.py"
TRAINS = f"{DEEPSPEED}::test_without_quantizers_a_run_equals_plain_and_with_them_it_is_close"

SOURCES = (
    Source(
        "sdp4bit_megatron/communication.py",
        ("tests/megatron/test_samples.py",),
        (
            M("main[low:high] = replica[low:high]", "pass"),
            M("low, high = at + max(start, first) - start", "low, high = max(start, first) - start"),
            M("at += end - start\n        return main, replica", "at += 0\n        return main, replica"),
        ),
    ),
    Source(
        "sdp4bit_deepspeed/api.py",
        (f"{TRAINS}[stage 1-2]",),
        (
            M(
                "dist.ReduceOp.AVG if self.zero.gradient_average else dist.ReduceOp.SUM",
                "dist.ReduceOp.AVG",
                tests=(f"{TRAINS}[stage 1, sums-2]",),
            ),
            M(
                "return torch.cat(take_ranges(self.main, ranges)).float()",
                "return 2 * torch.cat(take_ranges(self.main, ranges)).float()",
            ),
            M("(last - first) * dtype.itemsize / group.layout.size", "(last - first) * dtype.itemsize"),
            M(
                "group.weights.note_full_refresh()  # which the engine has sent",
                "pass",
                tests=(f"{DEEPSPEED}::test_refusals",),
            ),
            M(
                "rows.clear_others(values, numbers)\n                place",
                "place",
                tests=(f"{DEEPSPEED}::test_a_parameter_without_a_gradient_gets_no_noise_of_the_others",),
            ),
            M("group.gradients.plain_all_reduces = True", "group.gradients.plain_all_reduces = False"),
        ),
    ),
)

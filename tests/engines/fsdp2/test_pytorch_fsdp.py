"""The program that runs PyTorch's own tests of FSDP2, on tests of our own and on made-up outcomes.

Layer: no process, and one start of pytest with 2 ranks over gloo where `expecttest` is installed.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.engines.fsdp2.pytorch_fsdp import Outcome, report, run_file

FAILED = """\
E           Traceback (most recent call last):
E             File "x.py", line 1, in test
E           ValueError: sdp4bit: (root) gathers parameters of several types
E
E           To execute this test, run the following from the base repo dir:
"""


def test_the_report_counts_what_passes_plain_and_says_why_the_rest_fails_attached() -> None:
    passed, failed, skipped = Outcome("passed"), Outcome("failed", FAILED), Outcome("skipped")
    plain = {"T::a": passed, "T::b": passed, "T::c": failed, "T::d": skipped, "T::e": passed, "T::f": passed}
    attached = {"T::a": Outcome("passed", attached=True), "T::b": failed, "T::c": passed, "T::e": passed}
    reason = "ValueError: sdp4bit: (root) gathers parameters of several types"
    assert list(report(plain, attached)) == [
        "4 pass plain, 2 of them attached (1 of these have nothing to attach to); "
        "1 fail plain, 1 are skipped",
        f"T::b: NOT EXPECTED: {reason}",
        "T::f: NOT EXPECTED: has not run",
        f"not compared, fails plain: T::c: {reason}",
    ]


@pytest.mark.gloo
@pytest.mark.slow
def test_tests_run_on_processes_and_threads_with_the_library_attached_to_every_root(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's own test cases need it")
    file = tmp_path / "test_models.py"
    file.write_text(
        textwrap.dedent("""\
        import torch
        import torch.nn as nn
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
        from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread

        def run(case, hooks):
            case.assertEqual(torch.distributed.get_world_size(), 2)
            model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
            model(torch.ones(2, 4)).sum().backward()
            name = type(model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm).__name__
            case.assertIn(name, hooks)

        class TestProcesses(FSDPTest):
            world_size = property(lambda self: 4)

            @skip_if_lt_x_gpu(2)
            def test_either(self):
                run(self, ["DefaultAllGather", "AllGatherHook"])

            @skip_if_lt_x_gpu(2)
            def test_plain_only(self):
                run(self, ["DefaultAllGather"])

            @skip_if_lt_x_gpu(4)
            def test_large(self):
                raise AssertionError("not on 2 ranks")

        class TestThreads(FSDPTestMultiThread):
            world_size = property(lambda self: 4)

            def test_either(self):
                run(self, ["DefaultAllGather", "AllGatherHook"])
        """)
    )
    plain, attached = (
        run_file(file, attach=attach, ranks=2, select="", timeout=120) for attach in (False, True)
    )
    assert not any(outcome.attached for outcome in plain.values())
    ends = {name: (plain[name].outcome, end.outcome, end.attached) for name, end in attached.items()}
    assert ends == {
        "TestProcesses::test_either": ("passed", "passed", True),
        "TestProcesses::test_plain_only": ("passed", "failed", True),
        "TestProcesses::test_large": ("skipped", "skipped", False),
        "TestThreads::test_either": ("passed", "passed", True),
    }, (plain, attached)

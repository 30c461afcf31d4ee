"""The self-test passes here and fails if something is broken. Layers: functions, one process, gloo."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sdp4bit.collectives import reduce_scatter
from sdp4bit.config import GradientConfig
from sdp4bit.kernels.cpu import backend as numba_backend
from sdp4bit.quantization import ops
from sdp4bit_lab.common.launch.config import RanksConfig
from sdp4bit_lab.common.machine import PASTE
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.selftest import kernels, streams
from sdp4bit_lab.selftest.cases import ALL_BITS, HOPS, SHAPES, dequantize_reduce_quantize
from sdp4bit_lab.selftest.check import (
    CheckFailedError,
    CheckSkippedError,
    Context,
    OtherRankFailedError,
    Outcome,
    run_checks,
)
from sdp4bit_lab.selftest.command import _report, selftest
from sdp4bit_lab.selftest.config import CHECKS, SelftestConfig
from sdp4bit_lab.selftest.exchanges import check_exchanges
from sdp4bit_lab.selftest.facts import warnings_of
from sdp4bit_lab.selftest.recommendation import check_recommendation, recommendation
from sdp4bit_lab.selftest.streams import check_streams
from sdp4bit_lab.selftest.training import check_training
from tests import mutations
from tests.lab.pretrain.tiny_runs import command_line, this_rank
from tests.ranks import run_ranks

TWO_NODES = RanksConfig(ranks_per_node=1, distributed_timeout_minutes=1)


def context(**options: Any) -> Context:
    return Context(config=SelftestConfig(**{"parallel": TWO_NODES, **options}), ranks=this_rank())


def failure_of(check: Any, context: Context) -> str:
    try:
        check(context)
    except (CheckFailedError, OtherRankFailedError) as failed:
        return str(failed)
    return "none"


def alone() -> Context:
    ranks = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))
    return Context(config=SelftestConfig(), ranks=ranks)


# -- the command ---------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
def test_the_command_passes_here_and_writes_a_file_for_a_bug_report(tmp_path):
    path = tmp_path / "new" / "selftest.json"
    done = command_line(
        *("selftest", "--device", "cpu", "--nproc-per-node", "2", "--ranks-per-node", "1"),
        *("--steps", "5", "--delay-rounds", "1", "--json", str(path)),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["passed"] and result["format"] == "sdp4bit-selftest-1" and result["ranks"] == 2
    checks = {check["name"]: check for check in result["checks"]}
    assert {name: check["result"] for name, check in checks.items()} == dict.fromkeys(CHECKS, "passed")
    facts = checks["facts"]["findings"]
    assert (facts["backend"], facts["backend_class"]) == ("gloo", "ProcessGroupGloo")
    # The package's version may lack the build of torch's own.
    assert torch.__version__.startswith(facts["ranks"][1]["versions"]["torch"].partition("+")[0])
    assert checks["kernels"]["findings"]["compared"] > 1000
    assert set(checks["exchanges"]["findings"]["layouts"]) == {"2 x 1", "1 x 2"}
    trained = checks["training"]["findings"]
    assert trained["compression_ratio"] > 5
    assert [len(losses) for losses in trained["losses"].values()] == [5, 5, 5]
    assert trained["losses"]["HSDP, sdp4bit"] != trained["losses"]["sdp4bit"]
    assert checks["recommendation"]["findings"]["exchange_seconds"]["fp32 gradients"] > 0
    text = "Estimated communication of a 1.3B model"
    assert text in done.stdout.replace("\n", " ")


def results_of_one_rank(checks: str) -> dict[str, Any]:
    return selftest(SelftestConfig(only=checks), ranks=this_rank())


@pytest.mark.gloo
def test_one_process_skips_what_needs_several():
    skipped = ("collectives", "exchanges", "streams", "training", "removal", "recommendation")
    (result,) = run_ranks(results_of_one_rank, 1, ",".join(("facts", *skipped)))
    checks = {check["name"]: check["result"] for check in result["checks"]}
    assert checks == {"facts": "passed"} | dict.fromkeys(skipped, "skipped")
    assert f"({', '.join(skipped)} skipped)" in result["result"]


# -- it stops at the first failure ----------------------------------------------------------------------


def fails_on_rank_1(context: Context) -> dict[str, Any]:
    if context.ranks.rank == 1:
        raise CheckFailedError("3 values differ", case="rows of 7")
    return {"fine": True}


def raises_everywhere(context: Context) -> dict[str, Any]:
    raise ZeroDivisionError("of nothing")


def failed_tests(path: str) -> tuple[list[list[dict[str, Any]]], int]:
    """Return the outcomes of two tests that fail, and the exit code of a third, which writes a file."""
    outcomes = [
        [
            outcome.as_dict()
            for outcome in run_checks([(check.__name__, check) for check in checks], context())
        ]
        for checks in ((fails_on_rank_1, raises_everywhere), (raises_everywhere,))
    ]
    config = SelftestConfig(only="streams", parallel=TWO_NODES, json=path)
    with patch.object(streams, "SCENARIOS", {"broken": None}), pytest.raises(SystemExit) as end:
        selftest(config, ranks=this_rank())
    return outcomes, end.value.code


@pytest.mark.gloo
def test_a_failure_ends_the_test_on_all_ranks_with_the_way_to_repeat_it(tmp_path):
    path = tmp_path / "selftest.json"
    for ((outcome,), (unexpected,)), code in run_ranks(failed_tests, 2, path):
        assert (outcome["result"], outcome["failure"]["rank"]) == ("failed", 1)
        assert (outcome["failure"]["message"], outcome["failure"]["case"]) == ("3 values differ", "rows of 7")
        start, options = outcome["reproduce"].split(" --only ")
        assert start == "torchrun --nproc-per-node 2 -m sdp4bit_lab selftest"
        assert options == "fails_on_rank_1 --seed 0 --ranks-per-node 1"
        assert unexpected["failure"]["message"] == "ZeroDivisionError: of nothing"
        assert "raise ZeroDivisionError" in unexpected["failure"]["details"]
        assert code == 1
    result = json.loads(path.read_text())
    assert not result["passed"] and result["result"].startswith("streams failed: do not train")


@pytest.mark.parametrize("fails", [False, True])
def test_lines_to_paste_name_no_machine(fails, capsys):
    facts = {"backend": "nccl", "ranks": [{"host": "secret1"}, {"host": "secret2"}]}
    message = {"rank": 1, "message": "secret2 sends 3 wrong values", "case": "x"} if fails else {}
    outcomes = [
        Outcome(name="facts", findings=facts),
        Outcome(name="kernels", result="failed" if fails else "passed", failure=message),
    ]
    verdict = "kernels failed: report it" if fails else "all checks passed; enable it"
    result = {"result": verdict, "ranks": 2, "software": "H100; torch 2"}
    _report(SelftestConfig(), outcomes, result)
    _, _, pasted = capsys.readouterr().out.partition(PASTE)
    ended = "failed" if fails else "passed"
    assert f"H100; torch 2\n2 ranks on 2 machines, nccl: facts passed, kernels {ended}\n" in pasted
    assert ("all checks passed; enable it" in pasted) != fails
    assert "secret" not in pasted and "first-hour" in pasted


# -- every check can fail -------------------------------------------------------------------------------


def test_hops_read_and_write_every_format_in_every_way():
    """Of the kernels that requantize, two of six ways per hop are compiled; together they cover all pairs."""
    calls = [case.named for shape in SHAPES for case in dequantize_reduce_quantize(shape)]
    ways = [(call["rounding"] and call["rounding"].dither, call["dither"] is None) for call in calls]
    hops = [(call["received"].bits, call["sent"].bits) for call in calls]
    assert len(set(zip(hops, ways, strict=True))) <= 2 * len(HOPS)
    reads = {(hop[0], way[1]) for hop, way in zip(hops, ways, strict=True)}
    writes = {(hop[1], way[0]) for hop, way in zip(hops, ways, strict=True)}
    assert (len(reads), len(writes), len(set(ways))) == (2 * len(ALL_BITS), 3 * len(ALL_BITS), 6)
    default = GradientConfig()
    assert ((default.intra_bits, default.inter_bits), (True, True)) in set(zip(hops, ways, strict=True))


def test_a_wrong_byte_of_a_kernel_is_found(monkeypatch):
    right = numba_backend.subtract_quantize

    def wrong(main: torch.Tensor, **named: Any) -> None:
        right(main, **named)
        if main.numel() == 33 and named["layout"].bits == 8:
            named["out"][3] += 1

    monkeypatch.setattr(numba_backend, "subtract_quantize", wrong)
    with pytest.raises(CheckFailedError, match=r"numba: subtract_quantize differs.*out: 1 of") as failed:
        kernels.check_kernels(alone())
    assert "[33]" in failed.value.case and "bits=8" in failed.value.case


def test_kernels_are_not_compared_with_themselves():
    with (
        ops.use_backend("reference"),
        pytest.raises(CheckSkippedError, match="only the reference back end"),
    ):
        kernels.check_kernels(alone())


def exchange_with_other_random_bits_on_rank_1() -> str:
    right, shift = reduce_scatter.key_source, torch.distributed.get_rank()
    with patch.object(reduce_scatter, "key_source", lambda seed, **stream: right(seed + shift, **stream)):
        return failure_of(check_exchanges, context())


def streams_that_change_a_loss() -> str:
    """Train as if delays changed a loss."""
    right, calls = streams._train, []

    def train(*args: Any) -> list[float]:
        calls.append(args)
        losses = right(*args)
        return [losses[0] + 1e-6 * (len(calls) > 1), *losses[1:]]

    one = {"node replica": streams.SCENARIOS["node replica"]}
    with patch.multiple(streams, _train=train, SCENARIOS=one, _STEPS=1):
        return failure_of(check_streams, context(delays=1))


def trained_with_mutations(names: tuple[str, ...]) -> dict[str, str]:
    """Return the failures of the check by mutation."""
    failures = {}
    for name in names:
        with mutations.broken(name):
            failures[name] = failure_of(check_training, context(steps=3))
    return failures


def failures_of_all_checks() -> tuple[str, str, str]:
    broken = trained_with_mutations(("times 4",))["times 4"]
    return exchange_with_other_random_bits_on_rank_1(), streams_that_change_a_loss(), broken


@pytest.mark.gloo
def test_other_random_bits_an_effect_of_delays_and_a_scaled_gradient_are_found():
    results = run_ranks(failures_of_all_checks, 2)
    assert "values differ from the simulated exchange: gradients, default" in results[0][0]
    for _, stream, training in results:
        assert stream.startswith("node replica: random delays change a step: losses")
        assert training != "none"


@pytest.mark.gloo
@pytest.mark.slow
def test_training_notices_broken_communication():
    failures = run_ranks(trained_with_mutations, 2, mutations.ALL, timeout=500)
    survivors = [name for name in mutations.ALL if {of_rank[name] for of_rank in failures} == {"none"}]
    assert survivors == []


# -- facts and recommendation --------------------------------------------------------------------------

RANK: dict[str, Any] = {
    "host": "a", "local_world_size": 2, "device": "H100", "device_uuid": None, "peer_access": True,
    "kernels": "triton", "versions": {"torch": "2.13"}, "cuda": "13", "nccl": "2.28", "environment": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (
            {"versions": {"torch": "2.9"}},
            "rank 1 on a has versions {'torch': '2.9'}, rank 0 {'torch': '2.13'}",
        ),
        ({"host": "b"}, 'a has 1 ranks, but LOCAL_WORLD_SIZE is 2: topology="auto" groups'),
        (
            {"device_uuid": "GPU-1"},
            "2 ranks share a GPU: they share its time and memory, and NCCL uses sockets",
        ),
        ({"peer_access": False}, "no peer access"),
        ({"kernels": "reference"}, "no fast kernels: install triton"),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}, "device_uuid": "1"}, "disables all overlap"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "device_uuid": "1"}, "unset it for FSDP2"),
    ],
)
def test_settings_that_hurt_are_warned_of(changes, warning):
    assert list(warnings_of([RANK, RANK])) == []
    first = RANK | changes if "GPU-1" in changes.values() else RANK
    warnings = list(warnings_of([first, RANK | changes]))
    assert any(warning in each for each in warnings), warnings


PLAIN = {"fp32 gradients": 1.0, "bf16 gradients": 0.75, "DDP and bf16 gradients": 0.5}


def test_the_recommendation_counts_kernels_and_compares_with_every_baseline():
    text = recommendation(PLAIN, exchange=0.1, kernels=0.05, links="1 GB/s", is_split=False)
    assert text.startswith("measured 1 GB/s. Estimated communication of a 1.3B model")
    assert text.endswith(
        "1.00 s with fp32 gradients, 0.75 s with bf16 gradients, 0.50 s with DDP and bf16 gradients, 0.15 s "
        "with sdp4bit (of which kernels 0.05 s). sdp4bit makes it 6.7, 5.0 and 3.3 times faster: enable it, "
        "unless computation hides the communication"
    )
    less = PLAIN | {"DDP and bf16 gradients": 0.15}
    text = recommendation(less, exchange=0.1, kernels=0.05, links="1 GB/s", is_split=True)
    assert text.endswith("is not worth enabling here, with topology=1 either")


def recommended_on_one_node() -> dict[str, Any]:
    """Return the recommendation's findings for links of 2 GB/s inside the only node."""
    context = Context(config=SelftestConfig(), ranks=this_rank())
    probed = {
        "name": "test", "nodes": 1, "devices_per_node": 8, "inter_bandwidth": None,
        "intra_bandwidth": 2e9, "latency": 0.0, "quantization_bandwidth": 1e12,
    }  # fmt: skip
    with patch("sdp4bit_lab.selftest.recommendation.measure", return_value=probed):
        return check_recommendation(context)


@pytest.mark.gloo
def test_on_one_node_each_rank_is_planned_as_a_node():
    found = run_ranks(recommended_on_one_node, 2)[0]
    assert found["topology"] == 1 and "enable it with topology=1" in found["recommendation"]
    seconds = found["exchange_seconds"]
    # A ring in fp32 of 1.316e9 values: 4 + 2 x 2 bytes to each of 7 peers, the root's gathered once.
    assert seconds["fp32 gradients"] == pytest.approx(9.02 / 2, rel=0.01)
    assert seconds["DDP and bf16 gradients"] == pytest.approx(2 * 2 * 1.316 * 7 / 8 / 2, rel=0.01)
    assert seconds["sdp4bit"] == pytest.approx(1.02 * 1.316 * 7 / 8 / 2, rel=0.02)
    assert "measured 2 GB/s inside the node (per rank)" in found["recommendation"]

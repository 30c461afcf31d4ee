"""The self-test passes here, and fails where something is broken. Layers: functions, one process, gloo."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sdp4bit.collectives import reduce_scatter
from sdp4bit.kernels.cpu import backend as numba_backend
from sdp4bit.quantization import ops
from sdp4bit_lab.cli import main
from sdp4bit_lab.common.launch.config import SimulatedRanksConfig
from sdp4bit_lab.common.ranks import Ranks
from sdp4bit_lab.selftest import kernels, streams, training
from sdp4bit_lab.selftest.check import (
    CheckFailedError,
    CheckSkippedError,
    Context,
    OtherRankFailedError,
    command_to_repeat,
    run_checks,
)
from sdp4bit_lab.selftest.command import selftest
from sdp4bit_lab.selftest.config import CHECKS, SelftestConfig
from sdp4bit_lab.selftest.exchanges import check_exchanges
from sdp4bit_lab.selftest.facts import warnings_of
from sdp4bit_lab.selftest.streams import check_streams
from sdp4bit_lab.selftest.training import check_training
from sdp4bit_lab.selftest.verdict import sentence
from tests import mutations
from tests.lab.pretrain.tiny_runs import command_line, this_rank
from tests.ranks import run_ranks

TWO_NODES = SimulatedRanksConfig(ranks_per_node=1, distributed_timeout_minutes=1)


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


def base_version(version):
    """Return a version without the build that it was made for: torch's own has one, its package's may not."""
    return version.partition("+")[0]


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param((), marks=pytest.mark.slow),
        # What takes longest is tested on its own, with the kernels and the streams.
        ("kernels", "streams"),
    ],
    ids=["all checks", "without kernels and streams"],
)
def test_the_command_passes_here_and_writes_what_a_bug_report_needs(tmp_path, left_out):
    path = tmp_path / "new" / "selftest.json"
    chosen = [name for name in CHECKS if name not in left_out]
    done = command_line(
        *("selftest", "--device", "cpu", "--nproc-per-node", "2", "--ranks-per-node", "1"),
        *("--steps", "5", "--delay-rounds", "1", "--json", str(path), "--only", ",".join(chosen)),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["passed"] and result["format"] == "sdp4bit-selftest-1" and result["ranks"] == 2
    checks = {check["name"]: check for check in result["checks"]}
    assert {name: check["result"] for name, check in checks.items()} == dict.fromkeys(chosen, "passed")
    facts = checks["facts"]["findings"]
    assert facts["backend"] == "gloo"
    assert base_version(facts["ranks"][1]["versions"]["torch"]) == base_version(torch.__version__)
    if "kernels" in chosen:
        assert checks["kernels"]["findings"]["compared"] > 700
    assert set(checks["exchanges"]["findings"]["layouts"]) == {"2 x 1", "1 x 2"}
    trained = checks["training"]["findings"]
    assert trained["compression_ratio"] > 5 and len(trained["losses"]["sdp4bit"]) == 5
    assert len(trained["losses"]["HSDP, sdp4bit"]) == 5
    assert trained["losses"]["HSDP, sdp4bit"] != trained["losses"]["sdp4bit"]
    assert checks["verdict"]["findings"]["exchange_seconds"]["fp32 gradients"] > 0
    assert "Verdict: what was checked works; here, exchanges of a 1.3B model" in done.stdout.replace(
        "\n", " "
    )


@pytest.mark.slow
def test_one_process_does_what_one_gpu_can(tmp_path):
    path = tmp_path / "selftest.json"
    options = ["--simulated-ranks", "4", "--ranks-per-node", "2", "--steps", "3", "--delay-rounds", "1"]
    others = [name for name in CHECKS if name != "kernels"]  # which one process or several compare alike
    options += ["--only", ",".join(others)]
    done = command_line("selftest", "--device", "cpu", "--json", str(path), *options, timeout=400)
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(path.read_text())["checks"]}
    results = {name: check["result"] for name, check in checks.items()}
    assert results == dict.fromkeys(others, "passed") | {"exchanges": "skipped", "verdict": "skipped"}
    assert checks["streams"]["findings"]["ranks"] == 4
    assert "(exchanges, verdict skipped)" in done.stdout


def test_wrong_settings_are_named(capsys):
    assert main(["selftest", "--only", "kernel"]) == 2
    assert "--only 'kernel': use any of facts, kernels" in capsys.readouterr().err


# -- it stops at the first failure ----------------------------------------------------------------------


def fails_on_rank_1(context: Context) -> dict[str, Any]:
    if context.ranks.rank == 1:
        raise CheckFailedError("3 values differ", case="rows of 7")
    return {"fine": True}


def raises_everywhere(context: Context) -> dict[str, Any]:
    raise ZeroDivisionError("of nothing")


def outcomes_of(*checks: Any) -> list[dict[str, Any]]:
    named = [(check.__name__, check) for check in checks]
    return [outcome.as_dict() for outcome in run_checks(named, context())]


def test_a_failure_on_one_rank_ends_the_test_on_all_with_the_way_to_repeat_it():
    for outcomes in run_ranks(outcomes_of, 2, fails_on_rank_1, raises_everywhere):
        (outcome,) = outcomes
        assert (outcome["result"], outcome["failure"]["rank"]) == ("failed", 1)
        assert (outcome["failure"]["message"], outcome["failure"]["case"]) == ("3 values differ", "rows of 7")
        start, options = outcome["reproduce"].split(" --only ")
        assert start == "torchrun --nproc-per-node 2 -m sdp4bit_lab selftest"
        assert options == "fails_on_rank_1 --seed 0 --ranks-per-node 1"


def test_whatever_is_raised_is_a_failure_with_its_traceback():
    (outcome,) = run_ranks(outcomes_of, 1, raises_everywhere)[0]
    assert outcome["failure"]["message"] == "ZeroDivisionError: of nothing"
    assert "raise ZeroDivisionError" in outcome["failure"]["details"]


def exit_code_of_a_failure(path: str) -> int:
    config = SelftestConfig(only="streams", parallel=TWO_NODES, json=path)
    streams.SCENARIOS = {"broken": None}  # type: ignore[dict-item]
    try:
        selftest(config, ranks=this_rank())
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_failed_test_exits_with_1_and_has_written_the_file(tmp_path):
    path = tmp_path / "selftest.json"
    assert run_ranks(exit_code_of_a_failure, 2, path) == [1, 1]
    result = json.loads(path.read_text())
    assert not result["passed"] and result["verdict"].startswith("streams failed: do not train")


# -- every check can fail -------------------------------------------------------------------------------


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
    with ops.use_backend("reference"), pytest.raises(CheckSkippedError, match="no kernels"):
        kernels.check_kernels(alone())


def exchange_with_other_random_bits_on_rank_1() -> str:
    if torch.distributed.get_rank() == 1:
        right = reduce_scatter.derive_keys
        reduce_scatter.derive_keys = lambda seed, stream: right(seed + 1, stream)
    return failure_of(check_exchanges, context())


def test_an_exchange_that_differs_on_a_rank_is_found():
    found = run_ranks(exchange_with_other_random_bits_on_rank_1, 2)
    assert "values differ from the same exchange in one process: gradients, default" in found[0]


def streams_with_a_difference(monkeys: float) -> str:
    """Train as if a delay had changed a loss."""
    right, calls = streams._train, []

    def train(*args: Any) -> list[float]:
        calls.append(args)
        losses = right(*args)
        return [losses[0] + monkeys * (len(calls) > 1), *losses[1:]]

    streams._train = train  # type: ignore[assignment]
    streams.SCENARIOS = {"node replica": streams.SCENARIOS["node replica"]}
    return failure_of(check_streams, context(delays=1))


def test_a_loss_that_depends_on_delays_is_found():
    for message in run_ranks(streams_with_a_difference, 2, 1e-6):
        assert message.startswith("node replica: with random delays a step computes something else")


def trained_with(changes: dict[str, Any]) -> str:
    for name, value in changes.items():
        setattr(training, name, value)
    return failure_of(check_training, context(steps=3))


right_training = training._train


def losses_grow_with_replicas(*args: Any, replicas: int = 1, **options: Any) -> training._Trained:
    trained = right_training(*args, replicas=replicas, **options)
    return replace(trained, losses=[loss * (1 + 0.1 * (replicas > 1)) for loss in trained.losses])


@pytest.mark.slow
def test_training_that_is_not_exact_or_not_close_is_found():
    # A quantizer where there must be none, and one that is far coarser than what may pass.
    assert run_ranks(trained_with, 2, {"_LOSSLESS": training._QUANTIZED})[0].startswith(
        "without a quantizer, losses are not those of plain FSDP2 bit for bit: step 2 has"
    )
    assert "more than 0 %" in run_ranks(trained_with, 2, {"TOLERANCE": 1e-7})[0]
    assert "with HSDP and sdp4bit and" in run_ranks(trained_with, 2, {"_train": losses_grow_with_replicas})[0]


def trained_with_mutations(names: tuple[str, ...]) -> dict[str, str]:
    """Return what the check says with broken communication."""
    found = {}
    for name in names:
        with mutations.broken(name):
            found[name] = failure_of(check_training, context(steps=3))
    return found


@pytest.mark.parametrize(
    "names", [("times 4",), pytest.param(mutations.ALL, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_training_notices_broken_communication(names):
    found = run_ranks(trained_with_mutations, 2, names, timeout=500)
    survivors = [name for name in names if {ranks[name] for ranks in found} == {"none"}]
    assert survivors == []


# -- facts and verdict ----------------------------------------------------------------------------------

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
        ({"host": "b"}, 'a has 1 ranks, but LOCAL_WORLD_SIZE says 2: topology="auto" goes by'),
        ({"peer_access": False}, "no P2P"),
        ({"kernels": "reference"}, "no fast kernels: install triton"),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}, "device_uuid": "1"}, "nothing overlaps"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "device_uuid": "1"}, "unset it with FSDP2"),
    ],
)
def test_what_will_hurt_is_said(changes, warning):
    assert list(warnings_of([RANK, RANK])) == []
    assert any(warning in found for found in warnings_of([RANK, RANK | changes])), list(
        warnings_of([RANK, RANK | changes])
    )


def test_two_ranks_on_one_gpu_are_said():
    shared = RANK | {"device_uuid": "GPU-1"}
    assert list(warnings_of([shared, shared])) == [
        "2 ranks share a GPU: times mean little, and NCCL may refuse"
    ]


def test_the_verdict_counts_kernels_and_compares_with_bf16_gradients():
    assert sentence(plain=1.0, bf16=0.75, exchange=0.1, kernels=0.05).endswith(
        "1.00 s a step with fp32 gradients, 0.75 s with bf16 gradients, 0.15 s with sdp4bit (0.05 s of it "
        "kernels): it pays where they do not hide behind computation (6.7 and 5.0 times less)"
    )
    assert sentence(plain=1.0, bf16=0.15, exchange=0.1, kernels=0.05).endswith("it does not pay")


def test_options_that_matter_are_in_the_command_to_repeat():
    parallel = SimulatedRanksConfig(simulated_ranks=4, ranks_per_node=2)
    config = replace(alone().config, device="cpu", seed=3, parallel=parallel)
    options = "--only streams --seed 3 --device cpu --ranks-per-node 2 --simulated-ranks 4"
    assert command_to_repeat("streams", replace(alone(), config=config)) == (
        f"python -m sdp4bit_lab selftest {options}"
    )

"""Replica audit on FSDP2: a flipped bit is found and named on all ranks, or repaired; nothing else is.

Layer: the checksum in no process; the audit in real processes over gloo, 2 nodes x 2 ranks.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import AuditConfig, ReplicaMismatchError, SDP4BitConfig, WeightConfig
from sdp4bit.config import ReplicaPlacement
from sdp4bit.observe import audit
from sdp4bit.quantization.ops import checksum
from tests.ranks import first_rank_warns, on_ranks, run_ranks
from tests.toy import QUANTIZED, Run, assert_replicas_identical, build

EVERY_STEP = AuditConfig(interval=1)


# -- the checksum ---------------------------------------------------------------------------------------


def test_checksum_changes_with_every_single_bit_sign_and_order() -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(0)).bfloat16()
    pattern = values.view(torch.int16)
    seen = {checksum(each).item() for each in (values, values.flip(0), values.roll(4))}
    for index in range(37):
        for bit in range(16):
            flip = (1 << bit) - (1 << 16 if bit == 15 else 0)
            pattern[index] ^= flip
            seen.add(checksum(values).item())
            pattern[index] ^= flip
    for first in range(37):
        for second in range(first):
            changed = values.clone()
            changed[[first, second]] *= -1
            seen.add(checksum(changed).item())
    assert len(seen) == 3 + 16 * 37 + 37 * 36 // 2


def test_checksum_depends_on_bits_only_not_on_memory() -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = checksum(values)
    assert expected.dtype == torch.int64
    shifted = torch.cat([values[:1], values])[1:]
    assert checksum(shifted) == expected
    assert checksum(values.view(torch.uint8)) == expected
    assert checksum(torch.stack([values, -values], dim=1)[:, 0]) == expected
    assert checksum(torch.zeros(0)) == 0


# -- the vote ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", range(4))
def test_the_majority_of_ranks_is_right(odd: int) -> None:
    """Whichever rank is odd, the first one too."""
    others = ", ".join(str(rank) for rank in range(4) if rank != odd)
    sums = [(rank, 7 if rank == odd else -1) for rank in range(4)]
    expected = f"the replica of rank {odd} differs from that of ranks {others} (checksums, the majority's "
    assert audit._vote(sums) == f"{expected}first: {(1 << 64) - 1:016x}, {7:016x})"


def test_no_majority_is_told_as_such() -> None:
    assert audit._vote([(0, 5), (3, 5)]) == ""
    split = audit._vote([(0, 5), (1, 6), (2, 5), (3, 6)])
    assert split.startswith("the replicas of ranks 0, 2 and of ranks 1, 3 differ, without a majority")
    assert "differs from that of ranks 0, 1 (" in audit._vote([(0, 5), (1, 5), (2, 6)])


# -- a flipped bit --------------------------------------------------------------------------------------


def configured(replica: ReplicaPlacement, audit_config: AuditConfig | None) -> SDP4BitConfig:
    return dataclasses.replace(QUANTIZED, weights=WeightConfig(replica=replica), audit=audit_config)


def flip_bit(run: Run, *, rank: int, group: str) -> None:
    """One bit of what one rank holds of a group's weights is another."""
    comm = next(comm for comm in run.comm.groups if comm.view.name == group)
    comm.weights.replica.wait()
    if dist.get_rank() == rank:
        comm.weights.replica.rows.view(-1).view(torch.int16)[5] ^= 1 << 3


def check_error(replica: ReplicaPlacement) -> list[str]:
    run = Run(build(), configured(replica, AuditConfig(interval=2)))
    run.train(2).evaluate()
    assert run.comm.audit()
    flip_bit(run, rank=2, group="blocks.1")
    run.backward()
    with pytest.raises(ReplicaMismatchError) as on_demand:
        run.comm.audit()
    run.step()
    run.train(1)  # the third step's boundary: not due
    with pytest.raises(ReplicaMismatchError) as at_boundary:
        run.evaluate()
    return [str(on_demand.value), str(at_boundary.value)]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("replica", "ranks", "sentence"),
    [
        ("full", 4, "the replica of rank 2 differs from that of ranks 0, 1, 3 (checksums"),
        ("node", 4, "the replicas of rank 0 and of rank 2 differ, without a majority"),
        pytest.param("node", 6, "rank 2 differs from that of ranks 0, 4 (", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_is_an_error_that_names_group_and_rank_on_all_ranks(
    replica: ReplicaPlacement, ranks: int, sentence: str
) -> None:
    first, *others = run_ranks(check_error, ranks, replica)
    assert all(messages == first for messages in others)
    for message in first:
        assert "group blocks.1: " in message and sentence in message and message.count("group ") == 1


@on_ranks(4)
def test_a_resync_repairs_a_flipped_bit() -> None:
    run = Run(build(), configured("node", AuditConfig(interval=2, on_mismatch="resync")))
    run.train(2).evaluate()
    flip_bit(run, rank=1, group="blocks.0")
    run.train(2)
    if dist.get_rank() in (1, 3):
        with pytest.raises(AssertionError, match=r"blocks\.0"):
            assert_replicas_identical(run.comm)
    else:
        assert_replicas_identical(run.comm)
    with first_rank_warns(r"group blocks\.0: .*ranks? .*1.*refreshed in full precision"):
        run.evaluate()
    assert_replicas_identical(run.comm)
    for comm in run.comm.groups:
        exact = torch.equal(comm.weights.replica.own_shard, comm.view.main_shard(torch.bfloat16))
        assert exact == (comm.view.name == "blocks.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(1).finish()
    assert run.comm.audit()


# -- no false alarms ------------------------------------------------------------------------------------


def eventful(audit_config: AuditConfig | None, replica: ReplicaPlacement = "node") -> list[float]:
    config = configured(replica, audit_config)
    model = build()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    run = Run(model, config)
    run.train(2)
    saved = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "comm": run.comm.state_dict()}, saved)
    run.train(1)
    run.comm.resync()
    run.train(1)
    saved.seek(0)
    state = torch.load(saved, weights_only=False)
    run.model.load_state_dict(state["model"])
    run.comm.load_state_dict(state["comm"])
    run.train(1)
    run.optimizer.step()  # no gradients
    run.train(1)
    run.evaluate(torch.inference_mode)
    return run.train(1).finish()


@pytest.mark.slow
@on_ranks(4)
def test_no_false_alarm_over_freezing_saving_loading_resyncs_and_evaluation() -> None:
    """Audits at every step find nothing and change no loss, whatever happens between them."""
    assert eventful(EVERY_STEP) == eventful(None) == eventful(EVERY_STEP, "full")


# -- what an audit costs --------------------------------------------------------------------------------


@on_ranks(2)
def test_an_audit_is_one_collective_of_eight_bytes_per_group() -> None:
    calls = []
    gather = audit.all_gather_dense

    def counted(received: Any, sent: Any, group: Any, *, what: str) -> None:
        calls.append(sent.nbytes)
        gather(received, sent, group, what=what)

    audit.all_gather_dense = counted  # type: ignore[assignment]
    run = Run(build(), configured("node", AuditConfig(interval=2)), topology=1)
    run.train(3).evaluate()
    groups = len(run.comm.groups)
    assert calls == [8 * groups]
    before = run.comm.stats()["total"]["collectives"]
    assert run.comm.audit()
    assert run.comm.stats()["total"]["collectives"] == before + 1
    assert calls == [8 * groups] * 2

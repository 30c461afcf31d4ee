"""FSDP2 integration, overlap: refreshes that are under way during the forward pass change no bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp4bit import SDP4BitConfig
from sdp4bit.collectives.scratch import Scratch
from tests.ranks import run_ranks
from tests.toy import QUANTIZED, Run, ToyGPT, assert_variants_equal, build


def prefetch_blocks(model: ToyGPT) -> None:
    """The root asks for all blocks, the first block for one that has been asked for already."""
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])


def scenario(
    config: SDP4BitConfig | None,
    topology: int,
    replica: str,
    prefetch: bool,
    reshard: bool,
    part: bool = False,
) -> list[float]:
    model = build(reshard_after_forward=reshard)
    if prefetch:
        prefetch_blocks(model)
    if config is not None:
        config = replace(config, weights=replace(config.weights, replica=replica))
    options: dict[str, Any] = {}
    if part:  # then only ranges of a row are refreshed
        options["params"] = [p for name, p in model.named_parameters() if "bias" not in name]
    run = Run(model, config, topology=topology, **options).train(2)
    run.losses += [run.evaluate(), run.evaluate(torch.inference_mode)]
    if run.comm is not None:
        run.comm.resync()
    losses = run.train(1).finish()
    if run.comm is not None:
        assert not any(group.replica.is_pending for group in run.comm._state.groups)
        run.comm.remove()
    return losses


def compare(topology: int, replica: str) -> None:
    for part in (False, True):
        usual = (topology, replica, False, False, part)
        assert_variants_equal(scenario, usual, (topology, replica, True, False, part))
    usual = (topology, replica, False, True)
    assert_variants_equal(scenario, usual, (topology, replica, True, True))


def test_prefetched_weights_equal_others_bit_for_bit_on_one_rank_per_node() -> None:
    run_ranks(compare, 2, 1, "node")


@pytest.mark.slow
@pytest.mark.parametrize("replica", ["node", "full"])
def test_prefetched_weights_equal_others_bit_for_bit_on_two_levels(replica: str) -> None:
    run_ranks(compare, 4, 2, replica)


def watch_forward() -> tuple[list[list[bool]], int]:
    """Return which replicas were pending when the first block began, in each of three steps."""
    model = build()
    prefetch_blocks(model)
    run = Run(model, QUANTIZED, topology=1)
    groups = {group.group.name: group.replica for group in run.comm._state.groups}
    seen: list[list[bool]] = []
    model.blocks[0].ln1.register_forward_pre_hook(
        lambda *_: seen.append([groups[f"blocks.{index}"].is_pending for index in (0, 1)])
    )
    run.train(3)
    return seen, len(groups)


def test_the_exchange_of_the_next_block_is_under_way_while_this_one_computes() -> None:
    for seen, groups in run_ranks(watch_forward, 2):
        assert groups == 4
        assert seen == [[False, True]] * 3


def give_up_in_the_middle() -> tuple[list[float], list[float]]:
    """A forward that fails on all ranks between two blocks leaves a refresh under way."""
    results = []
    for fails in (False, True):
        model = build()
        prefetch_blocks(model)
        run = Run(model, QUANTIZED, topology=1).train(2)
        if fails:
            handle = model.blocks[0].ln2.register_forward_pre_hook(_raise)
            with pytest.raises(InterruptedError):
                run.evaluate()
            handle.remove()
            assert run.comm._state.groups[2].replica.is_pending
            assert run.comm.measure()["weight_drift"] > 0
            assert not run.comm._state.groups[2].replica.is_pending
        results.append(run.evaluate())
        run.comm.remove()
        dist.barrier()
    return results[0], results[1]


def _raise(*_: Any) -> None:
    raise InterruptedError


def test_a_refresh_left_under_way_is_finished_by_whoever_needs_it() -> None:
    for undisturbed, disturbed in run_ranks(give_up_in_the_middle, 2):
        assert undisturbed == disturbed


def test_slots_are_reused_and_keep_buffers_apart() -> None:
    scratch = Scratch()
    first, second = scratch.take_slot(), scratch.take_slot()
    a = scratch.messages(f"send {first}", 1, 16, device=torch.device("cpu"))
    b = scratch.messages(f"send {second}", 1, 16, device=torch.device("cpu"))
    assert a.data_ptr() != b.data_ptr()
    scratch.free_slot(first)
    assert scratch.take_slot() == first
    assert scratch.take_slot() not in (first, second)

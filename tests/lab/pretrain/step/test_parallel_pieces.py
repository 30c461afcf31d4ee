"""What the layouts are made of: stages, split layers and losses, dropout, recomputation, loss scaling.

Layers: no process, and 2 real processes over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.model.tensor_parallel import random_numbers_of_rank, summed_cross_entropy
from tests.lab.pretrain.step.parallel_runs import Job, laid_out, random_batches
from tests.ranks import run_ranks

SHAPE = ModelShape(layers=4, hidden=32, heads=4, vocabulary=128, positions=16, dropout=0.2)


def tokens() -> torch.Tensor:
    return torch.randint(0, SHAPE.vocabulary, (2, 16), generator=torch.Generator().manual_seed(3))


def test_stages_are_the_model_in_pieces():
    whole, batch = GPT(SHAPE), tokens()
    stages = [GPT(SHAPE, layers=range(start, start + 2)) for start in (0, 2)]
    for part in (whole, *stages):
        part.reset_parameters(seed=1)
        part.eval()
    expected = whole.state_dict()
    found = [stage.state_dict() for stage in stages]
    assert set(found[0]) | set(found[1]) == set(expected)
    assert set(found[0]) & set(found[1]) == {"token_embedding.weight"}
    assert all(torch.equal(value, expected[name]) for part in found for name, value in part.items())
    first, last = stages
    assert torch.equal(last(first(batch), batch), whole(batch, batch))
    assert torch.equal(last(first(batch)), whole(batch))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(recompute):
    """With dropout: the second computation draws the same numbers."""
    results = []
    for granularity in ("none", recompute):
        gpt = GPT(SHAPE, recompute=granularity)
        gpt.reset_parameters(seed=1)
        torch.manual_seed(7)
        loss = gpt(tokens(), tokens().roll(1))
        loss.backward()
        results.append((loss, *(p.grad for p in gpt.parameters()), torch.rand(3)))
    assert all(map(torch.equal, *results))


def test_selective_recomputation_keeps_nothing_of_the_attention_core():
    kept = []
    for granularity in ("none", "selective"):
        gpt = GPT(SHAPE, recompute=granularity)
        gpt.reset_parameters(seed=1)
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            gpt(tokens(), tokens())
        kept.append(sum(size == 2 * SHAPE.heads * 16 * 16 for size in sizes))
    without, selective = kept
    assert without >= SHAPE.layers
    assert selective == 0


def test_masked_targets_have_no_loss():
    gpt, targets = GPT(SHAPE), tokens().roll(1)
    gpt.reset_parameters(seed=1)
    gpt.eval()
    targets[0] = -100
    expected = F.cross_entropy(gpt(tokens()[1:]).flatten(0, 1), targets[1], reduction="sum")
    assert gpt(tokens(), targets).item() == pytest.approx(expected.item(), rel=1e-6)


def check_split_loss() -> None:
    """Check the loss over a split vocabulary, its gradient, and targets that do not count."""
    rank, group = dist.get_rank(), dist.group.WORLD
    generator = torch.Generator().manual_seed(5)
    logits = (50 * torch.randn(40, 12, generator=generator)).requires_grad_()
    targets = torch.randint(0, 12, (40,), generator=generator)
    targets[::7] = -100
    expected = summed_cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(3 * expected, logits)
    part = logits.detach()[:, 6 * rank : 6 * rank + 6].requires_grad_()
    found = summed_cross_entropy(part, targets, start=6 * rank, group=group)
    (found_gradient,) = torch.autograd.grad(3 * found, part)
    assert found.item() == pytest.approx(expected.item(), rel=40 * 2.0**-24)
    # Probabilities are at most 1 and their exponents are off by at most 2^-24 of logits up to 200.
    torch.testing.assert_close(
        found_gradient, gradient[:, 6 * rank : 6 * rank + 6], rtol=0, atol=3 * 400 * 2.0**-24
    )


def check_random_numbers() -> None:
    torch.manual_seed(4)
    with random_numbers_of_rank(dist.get_rank(), device=torch.device("cpu")):
        inside = torch.rand(5)
    draws: list[Any] = [None, None]
    dist.all_gather_object(draws, (inside, torch.rand(5)))
    (first, after), (second, after_second) = draws
    assert not torch.equal(first, second)
    assert torch.equal(after, after_second)


def check_dropout(text: Path) -> None:
    """Check that tensor-parallel ranks see one residual stream; data ranks and stages drop differently."""
    results: dict[str, Any] = {}
    split = {"tensor_model_parallel_size": 2}
    layouts = {name: {**split, "recompute_granularity": name} for name in ("none", "selective", "full")}
    for name, options in {**layouts, "data": {}}.items():
        job = Job(laid_out(text, data=1 if options else 2, dropout=0.3, layers=2, **options))
        (gpt,) = job.model.chunks
        seen: list[torch.Tensor] = []
        hook = gpt.blocks["1"].register_forward_hook(lambda _, __, output, seen=seen: seen.append(output))
        heads: list[torch.Tensor] = []
        projection = gpt.blocks["0"].attention.projection
        projection.register_forward_pre_hook(lambda _, inputs, heads=heads: heads.append(inputs[0]))
        batch = random_batches(job.config)
        same = [(batch[0][0][:2].repeat(2, 1), batch[0][1][:2].repeat(2, 1))] * 2
        losses = [job.train(same)[0] for _ in range(2)]
        hook.remove()
        everybody: list[Any] = [None, None]
        dist.all_gather_object(everybody, (seen[0].detach(), (heads[0] == 0).detach()))
        (stream, dropped), (other_stream, other_dropped) = everybody
        assert torch.equal(stream, other_stream) == bool(options)
        # A first position whose only attention weight is dropped reads nothing at all.
        assert dropped.any() and other_dropped.any() and not torch.equal(dropped, other_dropped)
        values = {n: p.to_local().detach().clone() for n, p in gpt.named_parameters()}
        results[name] = (losses, values)
        job.comm.remove()
    for name in ("selective", "full"):
        assert results[name][0] == results["none"][0]
        values, expected = results[name][1], results["none"][1]
        assert all(torch.equal(values[key], expected[key]) for key in expected)


def check_pairs(text: Path) -> None:
    check_split_loss()
    check_random_numbers()
    check_dropout(text)


@pytest.mark.gloo
def test_split_loss_and_dropout_on_two_ranks(text):
    run_ranks(check_pairs, 2, text, timeout=140)

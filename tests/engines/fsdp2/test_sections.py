"""Parameters of an FSDP2 group are quantized apart from their neighbours, in the messages there were before.

Layer: real processes over gloo.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import sdp4bit
from sdp4bit import SDP4BitConfig
from tests.paper_strategies import PAPER_STRATEGIES
from tests.ranks import on_ranks
from tests.toy import QUANTIZED, Run, build, data_mesh

WHOLE = replace(QUANTIZED, separate_parameters=False)


class Neighbours(nn.Module):
    """A layer with huge gradients in front of an embedding, of which most rows get none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 24)
        self.embed = nn.Embedding(128, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.embed(tokens)).square().mean() + 1e6 * self.first(torch.ones(1, 1)).sum()


def gradients(config: SDP4BitConfig | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Neighbours()
    fully_shard(model, mesh=data_mesh())
    if config is not None:
        sdp4bit.quantize_communication(model, topology=2, config=config)
    model(torch.tensor([[1, 5]])).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@on_ranks(4)
def test_no_value_is_changed_through_a_neighbour() -> None:
    """Rows of the embedding that no token used have no gradient; large neighbours used to give them one."""
    plain, separate, whole = gradients(None), gradients(QUANTIZED), gradients(WHOLE)
    unused = [row for row in range(128) if row not in (1, 5)]
    assert not plain["embed.weight"][unused].any()
    assert not separate["embed.weight"][unused].any()
    assert whole["embed.weight"][unused].any()
    # Rows that were used, and the norm, keep the precision of their own size.
    for name, bound in (("embed.weight", 0.2), ("norm.weight", 0.02), ("norm.bias", 0.02)):
        error = (separate[name] - plain[name]).norm() / plain[name].norm()
        assert error < bound, (name, error)
    assert (whole["norm.weight"] - plain["norm.weight"]).norm() > 0.02 * plain["norm.weight"].norm()


def steps(config: SDP4BitConfig) -> tuple[list[float], int, int]:
    run = Run(build(), config, topology=1).train(2)
    sent = run.comm.stats()["last_step"]
    return run.losses, sent["collectives"], sent["inter_bytes"]


@on_ranks(2)
def test_sections_add_no_collective_and_few_bytes() -> None:
    losses, collectives, nbytes = steps(QUANTIZED)
    whole, collectives_of_whole, nbytes_of_whole = steps(WHOLE)
    assert collectives == collectives_of_whole
    assert nbytes_of_whole < nbytes < 1.25 * nbytes_of_whole  # rows of 1,000 to 6,000 values
    assert losses != whole
    assert losses == pytest.approx(whole, rel=0.003)


@on_ranks(2)
def test_the_table_says_which_bits_norms_have() -> None:
    table = " ".join(Run(build(), QUANTIZED, topology=1).comm.explain(full=True).split())
    assert table.count("1-D in 8 bits") == 8
    for config in (WHOLE, PAPER_STRATEGIES["sdp4bit-paper"], PAPER_STRATEGIES["qwd"]):
        assert "1-D" not in Run(build(), config, topology=1).comm.explain(full=True)

"""FSDP2 integration: a vision transformer, whose parameters have other shapes than those of a language model.

Layer: real processes over gloo, 2 ranks. The images are synthetic: bars of four directions in noise.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from sdp4bit import SDP4BitConfig, quantize_communication
from tests.ranks import on_ranks
from tests.toy import (
    IDENTITY,
    POLICY,
    QUANTIZED,
    Result,
    adamw,
    assert_close,
    assert_close_to_plain,
    assert_equal,
    assert_replicas_identical,
    data_mesh,
    gradient_of,
)

SIZE, PATCH, WIDTH, CLASSES = 16, 4, 32, 4


class ViT(nn.Module):
    """Patches by a convolution; a class token and positions that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH) * 0.02)
        shape = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 2 * WIDTH, "dropout": 0.0}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(**shape, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def images(number: int) -> tuple[Tensor, Tensor]:
    """Return images [8, 3, SIZE, SIZE] of bars, and their directions."""
    random = torch.Generator().manual_seed(2 * number + dist.get_rank())
    labels = torch.randint(CLASSES, (8,), generator=random)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = torch.stack((rows, columns, rows + columns, rows - columns))
    bars = torch.sin(along[labels] * 0.9).unsqueeze(1)
    return bars + 0.3 * torch.randn(8, 3, SIZE, SIZE, generator=random), labels


def training(config: SDP4BitConfig | None) -> list[float]:
    torch.manual_seed(0)
    model = ViT()
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh(), mp_policy=POLICY)
    fully_shard(model, mesh=data_mesh(), mp_policy=POLICY)
    comm = None if config is None else quantize_communication(model, config, topology=1)
    optimizer, losses, gradients = adamw(model), [], []
    for step in range(5):
        given, labels = images(step)
        loss = nn.functional.cross_entropy(model(given).float(), labels)
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradient_of(model))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0]
    if comm is not None:
        assert_replicas_identical(comm)
    return Result(losses, gradients)


@pytest.mark.like_plain
@on_ranks(2)
def test_a_vision_transformer_trains_as_with_plain_fsdp2() -> None:
    # The loss falls to a third in these steps, and differences of the weights grow as fast.
    checks = [(IDENTITY, assert_equal), (QUANTIZED, partial(assert_close, loss=0.02))]
    assert_close_to_plain(training, checks=checks)

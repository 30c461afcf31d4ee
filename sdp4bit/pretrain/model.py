"""The GPT of the paper's experiments: pre-norm, GELU, learned positions, biases, tied embeddings."""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from sdp4bit.pretrain.model_cards import ModelShape

INIT_STD = 0.02
INIT_BLOCK_ROWS = 64


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input, whatever the weights are gathered in."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias."""
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """A layer norm that computes in the dtype of its input, whatever the weights are gathered in."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, scaled and shifted."""
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.query_key_value = Linear(shape.hidden, 3 * shape.hidden)
        self.projection = Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return what every position reads from itself and those before it; [batch, length, hidden]."""
        batch, length, hidden = x.shape
        # Rows are ordered [head, query/key/value, channel]: a part of the rows is a part of the heads.
        packed = self.query_key_value(x).view(batch, length, self.heads, 3, hidden // self.heads)
        query, key, value = packed.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, hidden)
        return F.dropout(self.projection(y), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers, four times as wide in between."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.expand = Linear(shape.hidden, 4 * shape.hidden)
        self.projection = Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed positions; [batch, length, hidden]."""
        y = self.projection(F.gelu(self.expand(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """One transformer block; the unit that FSDP2 gathers and reduces."""

    def __init__(self, shape: ModelShape, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.feed_forward_norm = LayerNorm(shape.hidden)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block; [batch, length, hidden]."""
        if self.recompute and self.training:
            # Inside the FSDP2 unit: the recomputation uses the weights that backward has gathered anyway.
            y: Tensor = checkpoint(self._residual, x, use_reentrant=False)
            return y
        return self._residual(x)

    def _residual(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x))
        transformed: Tensor = self.feed_forward(self.feed_forward_norm(attended))
        return attended + transformed


class GPT(nn.Module):
    """A GPT language model that returns its own loss.

    Build it on any device, also meta, and call :meth:`reset_parameters` once its memory exists.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        arithmetic: torch.dtype = torch.float32,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.arithmetic = arithmetic
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position_embedding = nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(
            Block(shape, recompute=activation_checkpointing) for _ in range(shape.layers)
        )
        self.final_norm = LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in fp32 of predicting `targets`; both [batch, length], int64."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = (self.token_embedding(tokens) + self.position_embedding(positions)).to(self.arithmetic)
        x = F.dropout(x, self.shape.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        logits = F.linear(x, self.token_embedding.weight.to(x.dtype))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def reset_parameters(self, *, seed: int) -> None:
        """Every parameter has its initial value, the same bits however the model is sharded.

        GPT-2's scheme: normal with deviation 0.02, divided by sqrt(2 * layers) for the projections that end
        in the residual stream; biases 0, norms 1.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            local, first_row = _local_rows(parameter)
            if name.endswith(".bias"):
                local.zero_()
            elif "norm" in name:
                local.fill_(1.0)
            else:
                std = residual_std if name.endswith("projection.weight") else INIT_STD
                _fill_normal(
                    local,
                    first_row=first_row,
                    rows=parameter.shape[0],
                    std=std,
                    key=f"{seed}/{name}",
                )


def _local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return the rows that this rank holds and the index of the first."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    if parameter.placements != (Shard(0),):
        raise ValueError(f"a parameter must be sharded by rows over one mesh, not {parameter.placements}")
    mesh = parameter.device_mesh
    rows_per_rank = -(-parameter.shape[0] // mesh.size())
    first_row = min(mesh.get_local_rank() * rows_per_rank, parameter.shape[0])
    return parameter.to_local(), first_row


def _fill_normal(local: Tensor, *, first_row: int, rows: int, std: float, key: str) -> None:
    """Rows first_row.. of a [rows, columns] normal matrix are in `local`.

    Rows come in blocks with a generator of their own, so that a rank computes only blocks it has a part of.
    """
    last_row = first_row + local.shape[0]
    for start in range(first_row // INIT_BLOCK_ROWS * INIT_BLOCK_ROWS, last_row, INIT_BLOCK_ROWS):
        stop = min(start + INIT_BLOCK_ROWS, rows)
        digest = hashlib.blake2b(f"{key}/{start}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        block = torch.randn(stop - start, *local.shape[1:], generator=generator) * std
        begin, end = max(start, first_row), min(stop, last_row)
        local[begin - first_row : end - first_row].copy_(block[begin - start : end - start])

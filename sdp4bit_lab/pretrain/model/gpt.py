"""The GPT of the paper's experiments: pre-norm, GELU, learned positions, biases, tied embeddings."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from sdp4bit_lab.pretrain.model.cards import ModelShape, Recompute
from sdp4bit_lab.pretrain.model.tensor_parallel import (
    enter,
    first_row,
    local_part,
    padded_bias,
    parameter_group,
    random_numbers_of_rank,
    summed_cross_entropy,
)

INIT_STD = 0.02
INIT_BLOCK_ROWS = 64


class Linear(nn.Linear):
    """Linear layer on this rank's part of the weight, in its input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        weight = local_part(self.weight).to(input.dtype)
        bias = padded_bias(self.bias, width=weight.shape[0]).to(input.dtype)
        return F.linear(input, weight, bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm that computes in its input's dtype, whatever dtype the weights are gathered in."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class Embedding(nn.Embedding):
    """Embedding that returns zeros for rows on other tensor-parallel ranks."""

    def forward(self, input: Tensor) -> Tensor:
        weight = local_part(self.weight)
        if not isinstance(self.weight, DTensor):
            return F.embedding(input, weight)
        row = input - first_row(self.weight)
        here = (row >= 0) & (row < weight.shape[0])
        rows = F.embedding(torch.where(here, row, 0), weight)
        return torch.where(here[..., None], rows, torch.zeros_like(rows))


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Recompute the function in backward; torch 2.13 cannot compile that with split parameters."""
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False)
    return result


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: ModelShape, *, recompute: bool) -> None:
        super().__init__()
        self.head_size = shape.hidden // shape.heads
        self.dropout = shape.dropout
        self.recompute = recompute
        self.tensor_rank: int | None = None
        """Index of this rank among those that share the heads, if any."""
        self.query_key_value = Linear(shape.hidden, 3 * shape.hidden)
        self.projection = Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.query_key_value(x)
        if self.recompute and self.training:
            y = _recomputed(self._core, packed)
        else:
            y = self._core(packed)
        return F.dropout(self.projection(y), self.dropout, self.training)

    def _core(self, packed: Tensor) -> Tensor:
        """Compute this rank's heads; returns [batch, length, channels of these heads]."""
        batch, length, _ = packed.shape
        # Channels are [head, query/key/value, channel]: a slice of them is a slice of the heads.
        query, key, value = packed.view(batch, length, -1, 3, self.head_size).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        own_numbers: AbstractContextManager[None] = nullcontext()
        if dropout and self.tensor_rank is not None:
            own_numbers = random_numbers_of_rank(self.tensor_rank, device=packed.device)
        with own_numbers:
            y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, -1)


class FeedForward(nn.Module):
    """Two linear layers with a hidden width of 4 times the model's."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.expand = Linear(shape.hidden, 4 * shape.hidden)
        self.projection = Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.projection(F.gelu(self.expand(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Transformer block, the unit that FSDP2 gathers and reduces."""

    def __init__(self, shape: ModelShape, *, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute == "full"
        self.attention_norm = LayerNorm(shape.hidden)
        self.attention = Attention(shape, recompute=recompute == "selective")
        self.feed_forward_norm = LayerNorm(shape.hidden)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block, [batch, length, hidden]."""
        if self.recompute and self.training:
            # Inside the FSDP2 unit, so that recomputation uses the weights that backward gathers anyway.
            y: Tensor = _recomputed(self._residual, x)
            return y
        return self._residual(x)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the block's computation, inside the recomputation."""
        self._residual = torch.compile(self._residual, *args, **kwargs)  # type: ignore[method-assign]

    def _residual(self, x: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x))
        transformed: Tensor = self.feed_forward(self.feed_forward_norm(attended))
        return attended + transformed


class GPT(nn.Module):
    """GPT language model that returns its own loss, or consecutive blocks of one as a pipeline stage.

    Parameters of a stage have the names of the full model. The first and the last stage both hold the token
    embedding, whose gradients must be summed. Build it on any device, including meta, and call
    :meth:`reset_parameters` after allocation.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        layers: range | None = None,
        compute_dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        layers = range(shape.layers) if layers is None else layers
        self.shape = shape
        self.compute_dtype = compute_dtype
        self.is_first = layers.start == 0
        self.is_last = layers.stop == shape.layers
        self.token_embedding: Embedding | None = None
        if self.is_first or self.is_last:
            self.token_embedding = Embedding(shape.vocabulary, shape.hidden)
        self.position_embedding = nn.Embedding(shape.positions, shape.hidden) if self.is_first else None
        self.blocks = nn.ModuleDict({str(layer): Block(shape, recompute=recompute) for layer in layers})
        self.final_norm = LayerNorm(shape.hidden) if self.is_last else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the summed cross entropy of predicting `targets`, fp32 [1]; -100 is ignored.

        Without targets, return the logits. A stage that is not the last returns the residual stream.

        Args:
            x: tokens [batch, length], int64; after the first stage, the residual stream [.., hidden].
            targets: [batch, length], int64; used by the last stage.
        """
        if self.token_embedding is not None and self.position_embedding is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            x = (self.token_embedding(x) + self.position_embedding(positions)).to(self.compute_dtype)
            x = F.dropout(x, self.shape.dropout, self.training)
        for block in self.blocks.values():
            x = block(x)
        if self.final_norm is None or self.token_embedding is None:
            return x
        x, weight = self.final_norm(x), self.token_embedding.weight
        group = parameter_group(weight)
        if group is not None:
            x = enter(x, group)
        logits = F.linear(x, local_part(weight).to(x.dtype))
        if targets is None:
            return logits
        loss = summed_cross_entropy(
            logits.flatten(0, 1), targets.flatten(), start=first_row(weight), group=group
        )
        # A copy, because FSDP2 warns of outputs that are views.
        return torch.stack([loss])

    @torch.no_grad()
    def reset_parameters(self, *, seed: int) -> None:
        """Initialize the parameters, with the same bits for any layout over ranks.

        GPT-2's scheme: normal with standard deviation 0.02, divided by sqrt(2 * layers) for projections into
        the residual stream; biases 0, norms 1.
        """
        residual_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            local = local_part(parameter)
            if name.endswith(".bias"):
                local.zero_()
            elif "norm" in name:
                local.fill_(1.0)
            else:
                std = residual_std if name.endswith("projection.weight") else INIT_STD
                rows, columns = _local_range(parameter)
                _fill_normal(
                    local, rows=rows, columns=columns, shape=parameter.shape, std=std, key=f"{seed}/{name}"
                )


def _local_range(parameter: Tensor) -> tuple[range, range]:
    """Return this rank's rows and columns of a matrix.

    FSDP2 splits the part that tensor parallelism leaves, although it comes first in the mesh.
    """
    local = [range(size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        split: set[int] = set()
        for mesh_dim in reversed(range(mesh.ndim)):
            placement = parameter.placements[mesh_dim]
            if isinstance(placement, Replicate):
                continue
            dim = getattr(placement, "dim", None)
            # If a dimension is split twice, a strided shard marks the second split.
            if dim is None or (dim in split) != hasattr(placement, "split_factor"):
                raise ValueError(f"unknown placements of a parameter: {parameter.placements}")
            split.add(dim)
            size = -(-len(local[dim]) // mesh.size(mesh_dim))
            start = mesh.get_local_rank(mesh_dim) * size
            local[dim] = local[dim][start : start + size]
    rows, columns = local
    return rows, columns


def _fill_normal(
    local: Tensor, *, rows: range, columns: range, shape: tuple[int, ...], std: float, key: str
) -> None:
    """Fill `local` with these rows and columns of a normal matrix of the given shape.

    Every block of rows has its own generator, so that a rank computes only the blocks it needs.
    """
    for start in range(rows.start // INIT_BLOCK_ROWS * INIT_BLOCK_ROWS, rows.stop, INIT_BLOCK_ROWS):
        stop = min(start + INIT_BLOCK_ROWS, shape[0])
        digest = hashlib.blake2b(f"{key}/{start}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        block = torch.randn(stop - start, shape[1], generator=generator) * std
        begin, end = max(start, rows.start), min(stop, rows.stop)
        part = block[begin - start : end - start, columns.start : columns.stop]
        local[begin - rows.start : end - rows.start].copy_(part)

"""Process reduced gradients: tied embeddings of a pipeline, global norm, clipping."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sdp4bit.collectives.errors import comm_error_context
from sdp4bit_lab.pretrain.model.tensor_parallel import local_part
from sdp4bit_lab.pretrain.step.parallelize import ShardedModel

_EPSILON = 1e-6
"""In the denominator of the clipping factor, as in torch and Megatron."""


class Gradients:
    """Gradients of this rank's shards; create it while no weights are gathered."""

    def __init__(self, model: ShardedModel) -> None:
        layout = model.layout
        self._parameters = model.parameters()
        self._device = layout.ranks.device
        self._pipeline = layout.pipeline.get_group()
        self._tied: nn.Parameter | None = None
        self._tied_peer = 0
        last = layout.pipeline.size() - 1
        stage = layout.pipeline.get_local_rank()
        if last > 0 and stage in (0, last):
            (embedding,) = (c.token_embedding for c in model.chunks if c.token_embedding is not None)
            self._tied, self._tied_peer = embedding.get_parameter("weight"), last - stage
        # The norm counts every shard once: equal parameters of tensor-parallel ranks only on the first.
        self._counted = [
            parameter
            for parameter in self._parameters
            if (_is_split(parameter) or layout.tensor.get_local_rank() == 0)
            and not (parameter is self._tied and stage == last)
        ]

    def add_tied(self) -> None:
        """Sum the gradients of the token embedding of the first and the last stage.

        One full-precision exchange between the two; the sum of two numbers has the same bits on both.
        """
        if self._tied is None:
            return
        own = _gradient(self._tied)
        other = torch.empty_like(own)
        exchange = [
            dist.P2POp(operation, tensor, group=self._pipeline, group_peer=self._tied_peer)
            for operation, tensor in ((dist.isend, own.clone()), (dist.irecv, other))
        ]
        with comm_error_context("gradient of the tied embedding", group=self._pipeline):
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
        own.add_(other)

    def gather(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient norm of the full model in fp64, and the numbers of all ranks [ranks, n].

        Both have the same bits on every rank, because sums of squares are added in rank order. One
        collective, without host synchronization.

        Args:
            numbers: this rank's numbers, fp64 [n] on its device.
        """
        squares = self._squared_norms()
        row = torch.cat([torch.stack(squares), numbers])
        rows = row.new_empty(dist.get_world_size(), row.numel())
        with comm_error_context("gradient norm, loss and bytes"):
            dist.all_gather(list(rows.unbind()), row)
        norms, others = rows.split([len(squares), numbers.numel()], dim=1)
        return norms.flatten().sum().sqrt(), others

    def _squared_norms(self) -> list[Tensor]:
        """Return this rank's squared norm as fp64 scalars to sum over all ranks."""
        own = torch.nn.utils.get_total_norm([_gradient(p) for p in self._counted if p.grad is not None])
        return [own.to(self._device).double().square()]

    def clip(self, norm: Tensor, *, largest: float) -> None:
        """Scale gradients of the given norm to at most `largest`; 0 disables clipping."""
        factor = torch.ones_like(norm) if largest == 0 else (largest / (norm + _EPSILON)).clamp(max=1.0)
        gradients = [_gradient(p) for p in self._parameters if p.grad is not None]
        torch._foreach_mul_(gradients, factor.float())


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)


def _is_split(parameter: nn.Parameter) -> bool:
    """Return whether tensor-parallel ranks hold different parts."""
    return isinstance(parameter, DTensor) and "tensor" in (parameter.device_mesh.mesh_dim_names or ())

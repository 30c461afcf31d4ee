"""Tensor subclasses with an all-gather of their own, as low-precision training uses them, in plain torch."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils._pytree import tree_map_only

FP8, BLOCK = torch.float8_e4m3fn, 32
Gathered = tuple[Tensor, ...]


def block_scaled(values: Tensor) -> Tensor:
    """Return values after a round trip through fp8, with a power of two for each block, as in MXFP8."""
    blocks = F.pad(values.flatten().float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=2.0**-100).log2().floor().sub(8).exp2()
    rounded = (blocks / scale).to(FP8).float() * scale
    return rounded.flatten()[: values.numel()].view(values.shape).to(values.dtype)


class InHighPrecision(torch.Tensor):
    """Gathered in the type that the policy asks for, else in bf16; computes with what was gathered."""

    @staticmethod
    def __new__(cls, held: Tensor) -> InHighPrecision:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_options = tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        result = function(*plain_args, **plain_options)
        if function._schema.is_mutable:
            return result if result is None else args[0]
        return tree_map_only(Tensor, cls, result)

    def padded(self, outer_size: torch.Size, mesh: Any) -> Tensor:
        """Return this shard with the rows that FSDP2 asks for, where shards are uneven."""
        rows = -(-outer_size[0] // mesh.size())
        return F.pad(self.held.flatten(), (0, (rows - len(self.held)) * outer_size[1:].numel())).view(
            rows, *outer_size[1:]
        )

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[Gathered, Any]:
        return self.sent(mesh, outer_size, mp_policy)

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, gathered: Gathered, size: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, Gathered] | None:
        computed = self.computed(*gathered)[: size[0]]
        if out is None:
            return computed, (computed,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(computed)
        return None

    def sent(self, mesh: Any, outer_size: torch.Size, policy: Any) -> tuple[Gathered, Any]:
        """Return what is gathered, and what `fsdp_post_all_gather` needs beside it."""
        return (self.padded(outer_size, mesh).to(policy.param_dtype or torch.bfloat16),), outer_size

    def computed(self, values: Tensor) -> Tensor:
        """Return the weights that are computed with."""
        return values.clone()


class BlockScaled(InHighPrecision):
    """Rounded to fp8, with a scale for each block, after the gather."""

    def computed(self, values: Tensor) -> Tensor:
        return block_scaled(values)


class InFp8(InHighPrecision):
    """Rounded to fp8 before the gather, with a scale for each row, which travels too."""

    def sent(self, mesh: Any, outer_size: torch.Size, policy: Any) -> tuple[Gathered, Any]:
        values = self.padded(outer_size, mesh)
        scale = values.flatten(1).abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        rows = scale.expand(values.shape).contiguous()  # FSDP2 wants all of the shard's size
        return ((values / rows).to(FP8), rows), outer_size

    def computed(self, values: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return (values.float() * scale).to(torch.bfloat16)


class InFp8ByAllReduce(InFp8):
    """One scale for all ranks, as torchao's dynamic scaling has it."""

    def sent(self, mesh: Any, outer_size: torch.Size, policy: Any) -> tuple[Gathered, Any]:
        scale = all_reduce(self.held.abs().amax(), "max", mesh) / 448
        return ((self.held / scale).to(FP8),), (self.held.shape, scale)


class Doubled(InHighPrecision):
    """Gathers other values than it holds."""

    def sent(self, mesh: Any, outer_size: torch.Size, policy: Any) -> tuple[Gathered, Any]:
        (values,), size = super().sent(mesh, outer_size, policy)
        return (values * 2,), size


class Communicates(InHighPrecision):
    """Calls a collective before the gather."""

    def sent(self, mesh: Any, outer_size: torch.Size, policy: Any) -> tuple[Gathered, Any]:
        dist.all_reduce(torch.zeros(1))
        return super().sent(mesh, outer_size, policy)


class Unprepared(InHighPrecision):
    """Cannot be gathered yet."""

    def sent(self, *_: Any) -> NoReturn:
        raise RuntimeError("no scale yet")


torch.serialization.add_safe_globals([InHighPrecision, BlockScaled, InFp8])


def convert(model: nn.Module, kind: type[InHighPrecision]) -> nn.Module:
    """Let the weights of linear layers be of a tensor subclass; biases and norms stay plain."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model

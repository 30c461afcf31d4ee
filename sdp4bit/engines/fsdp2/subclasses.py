"""Tensor subclasses with an all-gather of their own (`fsdp_pre_all_gather`), as fp8 and MX weights have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdp4bit.engines.fsdp2.torch_internals import Param
from sdp4bit.quantization.checks import VALUE_DTYPES


class _WithoutCollectives(TorchDispatchMode):
    """Keeps an all-reduce of functional collectives on this rank, and refuses other collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname.startswith("all_reduce"):
            return args[0]
        if "c10d" in func.namespace and not func._opname.startswith(("wait_tensor", "_wrap_tensor")):
            raise RuntimeError(f"{func} was called by fsdp_pre_all_gather")
        return func(*args, **(kwargs or {}))


def extends_gather(local: Tensor) -> bool:
    """Return whether a shard is a tensor subclass with an all-gather of its own."""
    return hasattr(local, "fsdp_pre_all_gather")


def plain_values(local: Tensor) -> Tensor:
    """Return a shard as a plain tensor; a copy if it is a tensor subclass with an all-gather of its own."""
    if not extends_gather(local):
        return local
    values = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    values.copy_(local)  # what it returns may be the subclass again
    return values


@torch.no_grad()
def _gathered_by_subclass(param: Param) -> Sequence[Tensor]:
    """Return the rows that FSDP2 gathers for a tensor subclass, as this rank alone computes them.

    Raises:
        RuntimeError: the subclass calls a collective. It may raise errors of its own, too.
    """
    with _WithoutCollectives():  # type: ignore[no-untyped-call]
        rows: Sequence[Tensor] = getattr(param, "all_gather_inputs")  # noqa: B009
        return rows


def subclass_gather(param: Param, *, name: str) -> tuple[frozenset[torch.dtype], str]:
    """Return the types that a tensor subclass gathers, and why its gather is left to FSDP2; "" if it is not.

    No types for a plain tensor.
    """
    local, dtypes = cast(DTensor, param.sharded_param)._local_tensor, frozenset[torch.dtype]()
    if not extends_gather(local):
        return dtypes, ""
    try:
        rows, held = _gathered_by_subclass(param), plain_values(param._sharded_param_data)
        dtypes = frozenset(row.dtype for row in rows)
        reason = _subclass_reason(rows, held)
    except Exception as error:  # of the subclass; FSDP2 meets it again, or the other ranks do not have it
        reason = f"{type(error).__name__}: {error}"
    return dtypes, reason and f"{type(local).__name__} of {name}: {reason}"


def _subclass_reason(rows: Sequence[Tensor], held: Tensor) -> str:
    """Return why the rows that a tensor subclass gathers cannot come from a replica; "" if they can."""
    if len(rows) != 1 or rows[0].dtype not in VALUE_DTYPES:
        return f"gathers {' and '.join(str(row.dtype).removeprefix('torch.') for row in rows)} itself"
    (row,), rounded = rows, held.to(rows[0])
    bits = torch.int16 if row.element_size() == 2 else torch.int32
    same = row.is_meta or torch.equal(row.view(bits), rounded.view(bits))
    return "" if row.shape == held.shape and same else "gathers other values than it holds"

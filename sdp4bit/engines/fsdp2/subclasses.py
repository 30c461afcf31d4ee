"""Tensor subclasses that customize their all-gather (`fsdp_pre_all_gather`), such as fp8 and MX weights."""

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
    """Skips functional all-reduces and raises on other collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname.startswith("all_reduce"):
            return args[0]
        if "c10d" in func.namespace and not func._opname.startswith(("wait_tensor", "_wrap_tensor")):
            raise RuntimeError(f"fsdp_pre_all_gather calls {func}")
        return func(*args, **(kwargs or {}))


def extends_gather(local: Tensor) -> bool:
    """Return whether a shard is a tensor subclass that customizes its all-gather."""
    return hasattr(local, "fsdp_pre_all_gather")


def plain_values(local: Tensor) -> Tensor:
    """Return a shard as a plain tensor; a copy if it is a tensor subclass that customizes its all-gather."""
    if not extends_gather(local):
        return local
    values = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    values.copy_(local)  # its result may be the subclass again
    return values


@torch.no_grad()
def subclass_gather(param: Param, *, name: str) -> tuple[frozenset[torch.dtype], str]:
    """Return the dtypes that a tensor subclass gathers, and why its gather is left to FSDP2 ("" if not).

    A plain tensor has no dtypes.
    """
    local, dtypes = cast(DTensor, param.sharded_param)._local_tensor, frozenset[torch.dtype]()
    if not extends_gather(local):
        return dtypes, ""
    try:
        with _WithoutCollectives():  # type: ignore[no-untyped-call]
            rows: Sequence[Tensor] = getattr(param, "all_gather_inputs")  # noqa: B009
        dtypes = frozenset(row.dtype for row in rows)
        reason = _subclass_reason(rows, plain_values(param._sharded_param_data))
    except Exception as error:  # raised by the subclass, perhaps because the other ranks do not take part
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

"""Fast launches of Triton kernels that were launched before.

Before every launch Triton formats the specialization of the arguments as text and compares the global
constants of the kernel, which is most of the host's cost. Here a dictionary maps the few relevant properties
to the compiled kernel. New combinations use Triton's own launch, which compiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

_ALIGNMENT = 16
"""Bytes of pointer alignment for which Triton compiles a variant."""
_NEAR_BYTES = 2**31 - 1
"""Storage size up to which Triton compiles a variant with 32-bit offsets for AMD."""
_INT32 = 2**31
_IS_HIP = torch.version.hip is not None

_known: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by everything their compilation depends on."""


def _variant(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that Triton compiles for."""
    aligned = tensor.data_ptr() % _ALIGNMENT == 0
    if _IS_HIP:
        return tensor.dtype, aligned, tensor.untyped_storage().size() <= _NEAR_BYTES
    return tensor.dtype, aligned


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float | Tensor | None, ...],
    constants: tuple[Any, ...],
    num_warps: int,
    *,
    registers: int,
) -> None:
    """Launch a kernel on the current device and stream.

    Args:
        registers: maximum of a thread, on NVIDIA GPUs.
        kernel: of :mod:`sdp4bit.kernels.triton.kernels`. Its parameters are the tensors, the numbers (all
            listed in `do_not_specialize`, some of them tensors) and the constants, in this order.
    """
    # Kernels fuse the exact products themselves; see `codes.add_product`.
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    if not isinstance(kernel, triton.JITFunction):
        kernel[grid](*tensors, *numbers, *constants, **options)  # interpreted
        return
    if not _IS_HIP:
        # Otherwise ptxas takes up to 128 registers for more loads in flight.
        options["maxnreg"] = registers
    device = tensors[0].get_device()
    # For numbers Triton specializes only on the type: None, float, or an int of 32 or 64 bits.
    kinds = [-_INT32 <= x < _INT32 if x.__class__ is int else x.__class__ for x in numbers]
    key = (kernel.__name__, device, num_warps, registers, constants, *map(_variant, tensors), *kinds)
    compiled = _known.get(key)
    if compiled is None or kernel.pre_run_hooks:
        _known[key] = kernel[grid](*tensors, *numbers, *constants, **options)
    else:
        compiled[grid](*tensors, *numbers, *constants)

"""Inputs and outputs that compare a back end with the reference, bit for bit.

Outputs are poisoned and lie between guard bytes; values are of many magnitudes, with every kind of trouble.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 0xAB
GUARD = 16
"""Bytes around every row that a kernel must leave alone; a multiple of a message's alignment."""


def guarded_messages(count: int, layout: MessageLayout) -> Tensor:
    """Poisoned messages, uint8 [count, nbytes], with poison between, before and after them."""
    buffer = torch.full((count + 1, layout.nbytes + 2 * GUARD), POISON, dtype=torch.uint8)
    return buffer[:count, GUARD : GUARD + layout.nbytes]


def guarded_values(values: Tensor, offset: int = 0) -> Tensor:
    """The same values in rows that begin and end at any alignment of their dtype, with 77 between."""
    buffer = torch.full((*values.shape[:-1], values.shape[-1] + offset + 8), 77.0, dtype=values.dtype)
    view = buffer[..., offset : offset + values.shape[-1]]
    view.copy_(values)
    return view


def whole(tensor: Tensor) -> Tensor:
    """All of the storage that a tensor is a view of."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The same view of a copy of the whole storage."""
    copy = whole(tensor).to(device, copy=True)
    return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bits_of(tensor: Tensor) -> Tensor:
    """Integer bits of floats, with one pattern for every NaN: payloads may differ."""
    if tensor.dtype == torch.uint8:
        return tensor
    integers = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.view(integers).masked_fill(tensor.isnan(), -1)


def difference(
    operator: Callable[..., None],
    first: Tensor,
    *,
    backend: ops.BackendName,
    device: torch.device = CPU,
    **named: Any,
) -> str | None:
    """Return how an operator of a back end differs from the reference on the CPU; None if it does not.

    All storage of its tensors is compared, bit for bit: what it writes, what surrounds that, and its inputs.
    """
    arguments = {"first": first, **named}
    results = []
    backends: tuple[tuple[ops.BackendName, torch.device], ...] = (("reference", CPU), (backend, device))
    for name, place in backends:
        copies = {
            key: copy_to(value, place) if isinstance(value, Tensor) else value
            for key, value in arguments.items()
        }
        values = copies.copy()
        with ops.use_backend(name):
            operator(values.pop("first"), **values)
        results.append(copies)
    written, layout = "out" if "out" in named else "replica", named.get("sent", named.get("layout"))
    for key, before in arguments.items():
        if isinstance(before, Tensor):
            pair = [whole(result[key]).to(CPU) for result in results]
            if key == written and before.dtype == torch.uint8 and layout and layout.bits == 32:
                pair = [x.view(torch.float32) for x in pair]  # of which any NaN is as good as another
            different = bits_of(pair[1]) != bits_of(pair[0])
            if different.any():
                where = different.nonzero()[:8].flatten().tolist()
                return f"{key}: {int(different.sum())} of {different.numel()} differ, first at {where}"
            if key != written and not torch.equal(bits_of(pair[1]), bits_of(whole(before))):
                return f"{key} is an input, and has been changed"
    return None


SPECIALS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": lambda x: x * 0.0,
    "negative zero": lambda x: x.abs() * -0.0,
    "subnormal": lambda x: x * 1e-40,
    "below 2**-100": lambda x: x * 2.0**-104,
    "around 2**-100": lambda x: x.sign() * 2.0**-100,
    "near the largest": lambda x: x.sign() * 3.4e38,
    "NaN": lambda x: x.index_fill(-1, torch.tensor(5), float("nan")),
    "infinity": lambda x: x.index_fill(-1, torch.tensor(7), float("inf")),
    "minus infinity": lambda x: x.index_fill(-1, torch.tensor(9), -float("inf")),
    "ties": lambda x: (torch.arange(x.shape[-1]) % 15 - 7) / 2 + 0.0 * x,
    "one value": lambda x: torch.zeros_like(x).index_fill(-1, torch.tensor(30), -3.0),
    "powers": lambda x: x * 2.0 ** (torch.arange(x.shape[-1]) % 40 - 20),
}


def make_values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values whose magnitude changes from block to block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    blocks = -(-shape[-1] // 32)
    magnitude = torch.exp2(torch.randint(-12, 12, (*shape[:-1], blocks), generator=generator))
    return (values * magnitude.repeat_interleave(32, -1)[..., : shape[-1]]).to(dtype)


def make_special_values(group_size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One group of every kind of trouble, with a normal one after each; 1-D."""
    groups = make_values(2 * len(SPECIALS), group_size, seed=seed)
    for index, change in enumerate(SPECIALS.values()):
        groups[2 * index] = change(groups[2 * index])
    return groups.reshape(-1).to(dtype)


def make_messages(count: int, layout: MessageLayout, seed: int, special: bool = False) -> Tensor:
    """Messages of random codes, those that are never sent included, and scales of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    messages = guarded_messages(count, layout)
    rows = (count, layout.parts, layout.padded_numel)
    if layout.bits == 32:
        values = make_values(*rows, seed=seed)
        codes = values.view(torch.uint8).reshape(count, layout.scales_offset)
    else:
        codes = torch.randint(0, 256, (count, layout.scales_offset), generator=generator, dtype=torch.uint8)
    messages[:, : layout.scales_offset] = codes
    scales = torch.randn(count, layout.parts * layout.groups, generator=generator).exp().bfloat16()
    if special and scales.numel():
        trouble = [0.0, -0.0, float("nan"), float("inf"), 1e-40, 2.0**-110, 2.0**120, -(2.0**125)]
        scales[:, ::2] = (
            torch.tensor(trouble, dtype=torch.bfloat16)
            .repeat(scales.numel())[: scales[:, ::2].numel()]
            .view_as(scales[:, ::2])
        )
    messages[:, layout.scales_offset : layout.payload_bytes] = scales.view(torch.uint8)
    return messages

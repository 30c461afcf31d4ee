"""Programs of Triton's interpreter in random order, and what each of them stores.

A GPU runs the programs of a launch in any order, many at a time; the interpreter runs them one after the
other, by number. What comes out equal in any order, with no address stored to by two programs, does not
depend on the schedule: no kernel reads what it stores, but for the replica, whose values are read by the
program that stores them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import interpreter_builder

from sdp4bit.kernels.triton import backend


@dataclass
class Order:
    """What ran in random order."""

    programs: int = 0
    launches: int = 0
    stored: dict[tuple[int, ...], list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    """Addresses that each program of the last launch stored to."""

    def check(self) -> None:
        """Raise AssertionError if two programs of the last launch stored to one address."""
        owned = [np.unique(np.concatenate(stores)) for stores in self.stored.values()]
        if owned:
            every = np.concatenate(owned)
            shared = len(every) - len(np.unique(every))
            assert not shared, f"{shared} addresses are stored to by more than one program"
        self.stored.clear()


@contextmanager
def random_order(seed: str, *, resident_warps: int) -> Iterator[Order]:
    """Run the programs of every launch in random order, and check at its end what they stored.

    Args:
        resident_warps: warps that the programs of a launch make up; few make each program do many tiles.
    """
    builder, draw, order = interpreter_builder, random.Random(seed), Order()
    set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx
    create_masked_store = builder.create_masked_store
    permuted: dict[tuple[int, ...], tuple[int, ...]] = {}

    def start(x: int, y: int, z: int) -> None:
        order.check()
        order.launches += 1
        order.programs += x * y * z
        places = list(product(range(x), range(y), range(z)))
        permuted.clear()
        permuted.update(zip(places, draw.sample(places, len(places)), strict=True))
        set_grid_dim(x, y, z)

    def run_next(x: int, y: int, z: int) -> None:
        set_grid_idx(*permuted[x, y, z])

    def store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        order.stored.setdefault(builder.grid_idx, []).append(addresses.ravel())
        return create_masked_store(pointers, value, mask, *rest)

    with (
        patch.object(builder, "set_grid_dim", start),
        patch.object(builder, "set_grid_idx", run_next),
        patch.object(builder, "create_masked_store", store),
        patch.object(backend, "_RESIDENT_WARPS", resident_warps),
    ):
        yield order
        order.check()

"""The kernels of every back end against the reference, bit for bit, on the cases of the self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdp4bit.selftest.kernel_buffers import difference
from sdp4bit.selftest.kernel_cases import BY_SHAPE, TROUBLE, KernelCase, Shape


def compare(*args: Any, **named: Any) -> None:
    """Fail with what differs."""
    found = difference(*args, **named)
    assert found is None, found


def _name(make: Callable[..., Any]) -> str:
    return make.__name__


class ByteTests:
    """The operators write the bytes of the reference, and nothing else, on the `backend` of a subclass.

    Its module has a fixture `shape`.
    """

    backend: str
    device = torch.device("cpu")

    def compare(self, *args: Any, **named: Any) -> None:
        compare(*args, backend=self.backend, device=self.device, **named)

    @pytest.mark.parametrize("make", BY_SHAPE, ids=_name)
    def test_operator(self, make: Callable[[Shape], Iterator[KernelCase]], shape: Shape) -> None:
        for case in make(shape):
            self.compare(case.operator, case.first, **case.named)

    @pytest.mark.parametrize("make", TROUBLE, ids=_name)
    def test_trouble(self, make: Callable[[], Iterator[KernelCase]]) -> None:
        for case in make():
            self.compare(case.operator, case.first, **case.named)

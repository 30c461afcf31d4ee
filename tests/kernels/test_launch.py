"""A launch that skips Triton's own way launches what Triton would have launched.

On a driver that launches nothing: kernels are compiled for a real target, and what reaches it is compared.
"""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton

from sdp4bit.kernels.triton import backend
from sdp4bit.kernels.triton import launch as launch_module
from sdp4bit.quantization import ops
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import RoundingKey

if not backend._IS_COMPILED:
    pytest.skip("Triton interprets kernels in this process", allow_module_level=True)

try:  # None of what this needs is public, so it may move in any release.
    from tests.kernels.fake_driver import KERNELS, Forgetful, fake_driver, operator_calls
except ImportError:
    pytest.skip("this Triton has no known way to compile without a GPU", allow_module_level=True)


@pytest.fixture
def driver_calls():
    with fake_driver() as calls:
        yield calls


@pytest.fixture
def own_launches():
    """How often Triton's own launch ran."""
    count = [0]
    run = triton.JITFunction.run

    def counted(self, *args, **named):
        count[0] += 1
        return run(self, *args, **named)

    with patch.object(triton.JITFunction, "run", counted):
        yield count


def identity(argument):
    """What the device gets of an argument; views of one tensor are new objects in each call."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.data_ptr(), argument.dtype, argument.shape, argument.stride()


def test_second_launch_is_the_first_one(driver_calls, own_launches):
    """The same kernel, grid and arguments reach the driver, without Triton's own launch."""
    calls = operator_calls(1 << 14)
    for run in calls.values():
        run()
    assert own_launches == [len(calls)]
    first = driver_calls.copy()
    for run in calls.values():
        run()
    assert own_launches == [len(calls)]
    for own, known in zip(first, driver_calls[len(first) :], strict=True):
        assert own.kernel is known.kernel and own.grid == known.grid
        assert len(own.arguments) == len(known.arguments) > 10
        assert list(map(identity, own.arguments)) == list(map(identity, known.arguments))


def subtract(numel: int, *, offset=0, dtype=torch.bfloat16, bits=4, group_size=128, key=None, replica=True):
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    main = torch.zeros(numel + offset, dtype=dtype)[offset:]
    other = torch.zeros(numel, dtype=torch.bfloat16) if replica else None
    out = torch.zeros(layout.nbytes, dtype=torch.uint8)
    ops.subtract_quantize(main, replica=other, out=out, layout=layout, rounding=key)


VARIANTS = [
    {"numel": numel, "offset": offset, "key": key}
    for numel, offset, key in product(
        (4096, 4095, 16), (0, 1, 8), (None, RoundingKey(0xFFFFFFFF, 1), RoundingKey(0, 0))
    )
]
VARIANTS += [{"numel": 4096, **other} for other in ({"bits": 8}, {"group_size": 64}, {"replica": False})]
VARIANTS += [{"numel": 4096, "dtype": torch.float32, "offset": offset} for offset in (0, 1, 4)]


def test_variants_are_those_of_triton(driver_calls, own_launches):
    """Twice through many calls in one process: each time the kernel that Triton chooses without our help."""
    expected = []
    with patch.object(launch_module, "_known", Forgetful()):
        for variant in VARIANTS:
            subtract(**variant)
    expected = [call.kernel for call in driver_calls]
    assert own_launches == [len(VARIANTS)]
    assert 10 < len({id(kernel) for kernel in expected}) < len(VARIANTS)
    for _ in range(2):
        driver_calls.clear()
        for variant in VARIANTS:
            subtract(**variant)
        for call, kernel, variant in zip(driver_calls, expected, VARIANTS, strict=True):
            assert call.kernel is kernel, variant
    kernels = len({id(kernel) for kernel in expected})
    assert own_launches == [len(VARIANTS) + kernels], "one launch of Triton's own for each variant"


def test_changed_alignment_takes_another_kernel(driver_calls):
    subtract(4096)
    subtract(4096, offset=1)  # 2 bytes from a multiple of 16
    subtract(4096, offset=8)  # 16 bytes
    aligned, ragged, moved = (call.kernel for call in driver_calls)
    assert aligned is moved and aligned is not ragged


@pytest.mark.parametrize(
    "order", [(0, (1 << 31) - 1, 1 << 31, -(1 << 31)), (-(1 << 31), 1 << 31, (1 << 31) - 1, 0)]
)
def test_wide_numbers_take_another_kernel(driver_calls, order):
    """A number that needs 64 bits is not cut to the 32 of a kernel that is known."""
    layout = MessageLayout(numel=64, bits=8, group_size=64)
    values, out = torch.zeros(1, 1, 64), torch.zeros(1, layout.nbytes, dtype=torch.uint8)
    constants = (16, 8, 1.0, 2, 16, 2, False, False, 1, False)
    for first in order:
        numbers = (4, 0, 0, 2, 0, 1, 2, first, 0, None, None)
        tensors = values, values, out
        launch_module.launch(backend.quantize_kernel, (1, 1, 1), tensors, numbers, constants, 1)
    for call, first in zip(driver_calls, order, strict=True):
        assert call.kernel.signature["first_block"] == ("i64" if first == 1 << 31 else "i32")


def test_devices_have_kernels_of_their_own(driver_calls):
    """A compiled kernel is loaded into one device's context."""
    subtract(4096)
    with patch.object(torch.Tensor, "get_device", lambda _: 1):
        subtract(4096)
    assert sorted(key[1] for key in launch_module._known) == [-1, 1]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_numbers_are_never_specialized(kernel):
    """What the choice of a kernel relies on: tensors, numbers of which only the type counts, constants."""
    kinds = []
    for parameter in kernel.params:
        if parameter.is_constexpr:
            kinds.append("constant")
        else:
            kinds.append("number" if parameter.do_not_specialize else "tensor")
    assert kinds == sorted(kinds, key=["tensor", "number", "constant"].index)
    assert kinds.count("tensor") == (3 if kernel is backend.quantize_kernel else 2)


def test_storages_of_amd_count(monkeypatch):
    """For AMD Triton's choice depends on the size of a storage."""
    monkeypatch.setattr(launch_module, "_IS_HIP", True)
    near, far = torch.empty(16, dtype=torch.uint8), torch.empty((1 << 31) + 16, dtype=torch.uint8)
    assert launch_module._variant(near) == launch_module._variant(far[:16][:0].new_empty(16))
    assert launch_module._variant(near) != launch_module._variant(far[:16])

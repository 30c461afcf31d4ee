"""Formats that tests add without a change of the library: a packing, and a pair of functions per back end.

Layer: no process; the collectives run on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdp4bit.config import AlertConfig, GradientConfig, WeightConfig
from sdp4bit.observe.explain import describe_weights
from sdp4bit.quantization import ops, reference
from sdp4bit.quantization.formats import FORMATS, InOrder
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit_lab.selftest import cases
from sdp4bit_lab.selftest.cases import BY_SHAPE, EDGE_VALUES, KernelCase, Shape, dithered_zeros, make_values
from tests.collectives.test_properties import Row, check_gradients, check_weights
from tests.kernels.byte_tests import compare
from tests.oracles import integers as oracle
from tests.oracles.traffic import NAMED_BITS
from tests.quantization.new_formats import NEW_FORMATS


@pytest.fixture(params=NEW_FORMATS, ids=lambda each: each.name)
def added(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> InOrder:
    """A format in the table of the library."""
    new: InOrder = request.param
    monkeypatch.setitem(FORMATS, new.name, new)
    return new


def integer_bytes(codes: list[int], added: InOrder) -> bytes:
    """Return the bytes of codes: of each block the lowest two bits of all, then the next two."""
    unsigned = [code + added.largest + 1 for code in codes]
    blocks = [unsigned[start : start + 32] for start in range(0, len(unsigned), 32)]
    shifts = [2 * plane for plane in range(len(added.widths))]
    return b"".join(oracle.bit_string([n >> s & 3 for n in block], 2) for block in blocks for s in shifts)


def test_the_definition_works_with_it(added: InOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(oracle.QMAX, added.name, added.largest)
    row = oracle.values_of(160)
    codes, scale = oracle.oracle_group(row.tolist(), added.name, [0x8000] * 160)
    message = oracle.encoded(row[None], added.name, 160)
    layout = MessageLayout(numel=160, bits=added.name, group_size=160)
    assert bytes(message[: layout.code_bytes].tolist()) == integer_bytes(codes, added)
    factor = oracle.bits_float(scale << 16)
    decoded = reference.decode(message[None], layout)[0, 0]
    assert decoded.tolist() == [oracle.rounded(code * factor) for code in codes]


def test_settings_name_it(added: InOrder) -> None:
    config = WeightConfig(bits=added.name, group_size=256)
    assert describe_weights(config, where="full replica") == f"{added.name}/256 difference, full replica"
    assert AlertConfig().for_bits(gradients=added.name, weights=2).thresholds[:2] == (0.3, 0.9)
    with pytest.raises(ValueError, match=f"2, 3, 3.5, 4, 8, 16, '{added.name}', or None"):
        WeightConfig(bits="int5")


@pytest.mark.parametrize("make", [*BY_SHAPE, dithered_zeros], ids=lambda make: make.__name__)
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_kernels_write_the_bytes_of_the_reference(
    added: InOrder,
    backend: ops.BackendName,
    make: Callable[..., Iterator[KernelCase]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if backend == "numba":
        pytest.importorskip("numba", reason="needs numba")
        from sdp4bit.kernels.cpu import formats as cpu
        from tests.kernels.new_formats_cpu import FUNCTIONS

        monkeypatch.setitem(cpu.FORMATS, added.name, FUNCTIONS[added.name])
    else:
        formats = pytest.importorskip("sdp4bit.kernels.triton.formats", reason="needs Triton")
        from sdp4bit.kernels.triton.chunks import IS_INTERPRETED
        from tests.kernels.new_formats_triton import CODINGS

        if not IS_INTERPRETED.value:
            pytest.skip("test_triton.py runs this in Triton's interpreter")
        monkeypatch.setitem(formats.FORMATS, added.name, CODINGS[added.name])
    monkeypatch.setattr(cases, "ALL_BITS", (added.name,))
    monkeypatch.setattr(cases, "with_scales", lambda: [added.name])
    monkeypatch.setattr(cases, "HOPS", ((8, added.name), (added.name, 4)))
    shapes: list[tuple[Any, ...]] = [()]
    if make is not dithered_zeros:
        shapes = [(Shape(1, 128, 300, False),), (Shape(4, 96, 96 * 2 * len(EDGE_VALUES), True),)]
    for shape in shapes:
        for case in make(*shape):
            compare(case.operator, case.first, backend=backend, **case.named)


def test_a_back_end_without_it_leaves_it_to_the_reference(added: InOrder) -> None:
    pytest.importorskip("numba", reason="needs numba")
    ops._warn_of_format.cache_clear()
    layout = MessageLayout(numel=64, bits=added.name, group_size=32)

    def quantized(backend: ops.BackendName) -> list[int]:
        out = torch.zeros(layout.nbytes, dtype=torch.uint8)
        with ops.use_backend(backend):
            ops.subtract_quantize(make_values(64, seed=1), replica=None, out=out, layout=layout)
        return list(out)

    with pytest.warns(UserWarning, match=f"has no format {added.name}, using the plain PyTorch reference"):
        chosen = quantized("auto")
    assert chosen == quantized("auto") == quantized("reference") != [0] * layout.nbytes


def test_four_ranks_reduce_and_refresh_with_it(added: InOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the reference: the sums and replicas are those defined, and the bytes those of the planner."""
    monkeypatch.setitem(oracle.QMAX, added.name, added.largest)
    monkeypatch.setitem(NAMED_BITS, added.name, added.bits)
    case = (2, 2), [Row((33,), is_cut=False), Row((300,), is_cut=False)], torch.float32, 3
    gradients = GradientConfig(intra_bits=added.name, inter_bits=added.name, min_numel=0, pipeline_chunks=2)
    check_gradients(case, gradients, 1 / 4)
    check_weights(case, WeightConfig(bits=added.name, group_size=64))

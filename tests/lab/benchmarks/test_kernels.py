"""The price of the transform: `hadamard_quantize` with and without it, paired by rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.kernels import PRICE, TRANSFORMS, check_bytes, measure, ratio_of
from benchmarks.operator_cases import NO_TRANSFORM, make_cases
from benchmarks.speed_tables import kernels_page
from sdp4bit.quantization import ops


@pytest.mark.parametrize("op", TRANSFORMS)
def test_only_the_transform_differs(op: str) -> None:
    with ops.use_backend("reference"):
        cases = make_cases(4096, "cpu")
        for case in cases.values():
            case.run()
        plain, transformed = cases[op + NO_TRANSFORM], cases[op]
        assert plain.nbytes == transformed.nbytes
        assert not torch.equal(plain.output, transformed.output)
        # A shared output would be compared with the reference once instead of twice.
        assert plain.output.data_ptr() != transformed.output.data_ptr()


def test_bytes_without_the_transform_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def cases_of(elements: int, device: str, **named: Any) -> Any:
        cases = make_cases(elements, device, **named)
        if ops.backend_name(device) == "numba":
            cases[TRANSFORMS[1] + NO_TRANSFORM].run = lambda: None  # type: ignore[misc]
        return cases

    check_bytes("numba", 4096, 4)
    monkeypatch.setattr("benchmarks.kernels.make_cases", cases_of)
    monkeypatch.setattr("benchmarks.operator_cases.Case.__setattr__", object.__setattr__)
    with pytest.raises(SystemExit, match="bf16 gradient, no transform differs from the reference"):
        check_bytes("numba", 4096, 4)


def test_ratios_are_of_the_same_round() -> None:
    # The machine is ten times slower in the second round; a ratio of medians would be 1.
    assert ratio_of([2.0, 20.0, 4.0], [1.0, 10.0, 4.0, 4.0]) == {
        **{"ratio": 2.0, "lowest": 1.0, "highest": 2.0},
        "rounds": 3,
    }


def test_rows_with_a_price() -> None:
    rows = measure(["reference"], 4096, 1, rounds=3, budget=1e9, widths=[4, 3])
    assert [row["op"] for row in rows if PRICE in row] == [*TRANSFORMS]
    for row in rows:
        if PRICE in row:
            assert row[PRICE]["lowest"] <= row[PRICE]["ratio"] <= row[PRICE]["highest"]
            assert row[PRICE]["rounds"] == 3


@pytest.mark.parametrize("has_price", [False, True])
def test_pages_of_old_and_new_files(has_price: bool) -> None:
    row = {"op": "hadamard_quantize", "bits": None, "elements": 1024, "seconds": 1e-3, "share_of_copy": 0.8}
    if has_price:
        row[PRICE] = {"ratio": 1.25, "lowest": 1.125, "highest": 1.5, "rounds": 15}
    machine = {
        **{"cpu": "a CPU", "cores": 8, "gpu": "an H100", "commit": "unknown", "command": "c"},
        **{"versions": {"torch": "2"}, "date": "2026-11-25"},
    }
    page = kernels_page([{"machine": machine, "rows": [row]}])
    assert "| `hadamard_quantize` | 8 |" in page
    assert ("without the transform" in page) == has_price
    assert ("takes 1.25 times" in page) == has_price

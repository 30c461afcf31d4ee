"""Tables: packed at their second run, checked where operators are checked, dropped with their buffers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sdp4bit.collectives.plan import Message
from sdp4bit.collectives.scratch import Records, Scratch
from sdp4bit.quantization import ops, reference, tables
from sdp4bit.quantization.layout import message_layout
from sdp4bit.quantization.random import Stage, derive_keys, key_source, pack_stream
from sdp4bit.quantization.tables import Table, record, stand_in
from tests.quantization.table_cases import CALLS, Case, outcomes

CPU = torch.device("cpu")
LAYOUT = message_layout(numel=64, bits=4, group_size=32)


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with ops.use_backend("reference"):
        yield


def table_of(out: torch.Tensor) -> Table:
    values = stand_in(torch.empty(1, 1, 64))
    named: dict[str, Any] = {"out": out, "layout": LAYOUT, "hadamard": True, "rounding": None}
    return Table([record(ops.hadamard_quantize, values, **named)], moving=[values])


@pytest.mark.parametrize("bucket", [0, 4095, 4096, 70_000])
def test_keys_of_a_source_are_those_of_the_calls_of_a_section(bucket: int) -> None:
    names: dict[str, Any] = {"bucket": bucket, "stage": Stage.OUTER, "rank": 9}
    source = key_source(77, count=768, number=767, **names)
    for call in (0, 1, 5_592_404, 5_592_405, 5_592_406, (1 << 40) + 3):
        stream = pack_stream(step=768 * call + 767, **names)
        assert source.keys(call) == derive_keys(77, stream), call


def test_a_back_end_packs_a_table_at_its_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, ran = [], []

    def pack(calls: Any, given: Any) -> Any:
        packed.append(calls)
        return SimpleNamespace(run=lambda call, tensors: ran.append(call), check=lambda call, tensors: None)

    monkeypatch.setattr(reference, "pack", pack, raising=False)
    table = table_of(torch.zeros(1, LAYOUT.nbytes, dtype=torch.uint8))
    for call in (4, 5, 6):
        table.run(call, torch.randn(1, 1, 64))
    assert packed == [table.calls] and ran == [5, 6]
    with pytest.raises(ValueError, match="cast it first"):
        table.run(7, torch.randn(1, 1, 64).double())
    assert ran == [5, 6]


def test_arguments_are_checked_whenever_addresses_move() -> None:
    table = table_of(torch.zeros(1, LAYOUT.nbytes, dtype=torch.uint8))
    table.run(0, torch.randn(1, 1, 64))
    with pytest.raises(ValueError, match="cast it first"):
        table.run(1, torch.randn(1, 1, 64).double())
    with mock.patch.object(ops, "_is_checked", False):
        table.run(1, torch.randn(1, 1, 64).double())
        with ops.checked(), pytest.raises(ValueError, match="cast it first"):
            table.run(1, torch.randn(1, 1, 64).double())
        assert not ops.is_checked()


def test_tensors_of_a_record_have_no_memory() -> None:
    case = Case(CPU, torch.float32)
    assert all(each.is_meta for each in (stand_in(case.values()),))
    table = table_of(torch.zeros(1, LAYOUT.nbytes, dtype=torch.uint8))
    held = [each for each in table.calls[0].arguments.values() if isinstance(each, torch.Tensor)]
    assert [each.dtype for each in held] == [torch.uint8], "the values are a view of what a run passes"


def test_a_record_is_dropped_with_a_buffer_and_found_if_it_is_stale() -> None:
    scratch, message, made = Scratch(), Message((LAYOUT,)), []
    records = Records[tuple[Table]](scratch)

    def make() -> tuple[Table]:
        made.append(1)
        return (table_of(scratch.split("send", 1, message, device=CPU).all),)

    with mock.patch.object(ops, "_is_checked", False):
        first = records.of("key", device=CPU, make=make)  # twice: the first made the buffer
        assert records.of("key", device=CPU, make=make) is first and len(made) == 2
        scratch.messages("send", 4, 1000, device=CPU)  # a larger buffer
        assert records.of("key", device=CPU, make=make) is not first and len(made) == 3
    # Where operators are checked, a record that was missed is found.
    assert records.of("key", device=CPU, make=make) and len(made) == 4
    with mock.patch.object(scratch, "generation", scratch.generation):
        scratch._buffers.clear()
        scratch._views.clear()
        elsewhere = mock.Mock(return_value=torch.zeros(1, LAYOUT.nbytes).byte())
        with mock.patch.object(Scratch, "messages", elsewhere), pytest.raises(AssertionError, match="stale"):
            records.of("key", device=CPU, make=make)


def test_calls_of_a_kind_share_a_launch() -> None:
    run, kinds = Table.run, {}

    def noted(table: Table, call: int, *given: torch.Tensor) -> None:
        kinds[table.calls[0].operator] = [len(each) for each in tables.launches(table.calls)]
        run(table, call, *given)

    with mock.patch.object(Table, "run", noted):
        outcomes(CPU, torch.float32)
    assert len(kinds) == 6 and set(map(tuple, kinds.values())) == {(2, 1)}, kinds
    assert len(CALLS) == 4

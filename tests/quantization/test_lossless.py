"""The lossless coder: every bit pattern, every size, damage of all kinds. Layer: tensors, no process."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import lossless, ops
from sdp4bit.quantization.checksum import checksum
from sdp4bit.quantization.lossless import (
    ESCAPE,
    LARGEST,
    RAW,
    UNCHANGED,
    DamagedMessageError,
    Header,
    coding_tables,
    directory_of,
    read_header,
)
from sdp4bit.quantization.lossless_layout import (
    ALIGNMENT,
    BLOCK,
    HEADER_BYTES,
    largest_message,
    message_parts,
    smallest_message,
)

BACKENDS: list[Any] = ["reference", "numba"]
TYPES = [torch.bfloat16, torch.float16]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def patterns(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.to(torch.int16).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def sent(new: Tensor, held: Tensor, *, capacity: int | None = None) -> tuple[Tensor, Header]:
    """Return the message and its header; what was in the buffer before does not matter."""
    out = torch.full((capacity or largest_message(len(new)),), 7, dtype=torch.uint8)
    ops.encode_change(new, held=held, out=out)
    return out, read_header(out)


def received(message: Tensor, held: Tensor) -> Tensor:
    row = held.clone()
    ops.decode_change(message[None], rows=row[None])
    return row


def moved(held: Tensor, size: float, seed: int = 1) -> Tensor:
    """Return weights that an optimizer has moved by Gaussian amounts."""
    noise = torch.randn(len(held), generator=random(seed))
    return (held.float() + size * noise).to(held.dtype)


def weights(numel: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return (0.02 * torch.randn(numel, generator=random(seed))).to(dtype)


def any_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return patterns(torch.randint(-(1 << 15), 1 << 15, (numel,), generator=random(seed)), dtype)


def one_large(held: Tensor) -> Tensor:
    new = held.clone()
    new[len(held) // 2] = -3e4
    return new


CHANGES: dict[str, Callable[[int, torch.dtype], tuple[Tensor, Tensor]]] = {
    "a step": lambda n, t: (moved(weights(n, t), 1e-4), weights(n, t)),
    "a small step": lambda n, t: (moved(weights(n, t), 1e-7), weights(n, t)),
    "a huge step": lambda n, t: (moved(weights(n, t), 10.0), weights(n, t)),
    "any bits": lambda n, t: (any_bits(n, t, 1), any_bits(n, t, 2)),
    "from zero": lambda n, t: (moved(torch.zeros(n, dtype=t), 1e-3), torch.zeros(n, dtype=t)),
    "signs": lambda n, t: (-weights(n, t), weights(n, t)),
    "one value": lambda n, t: (one_large(weights(n, t)), weights(n, t)),
    "nothing": lambda n, t: (weights(n, t), weights(n, t)),
}
SIZES = {torch.bfloat16: [1, 31, 33, 1000, BLOCK, 2 * BLOCK + 77], torch.float16: [5, BLOCK + 33]}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_what_arrives_is_what_was_sent_and_back_ends_agree(change: str, dtype: torch.dtype) -> None:
    for numel in SIZES[dtype]:
        new, held = CHANGES[change](numel, dtype)
        messages = []
        for backend in BACKENDS:
            with ops.use_backend(backend):
                message, header = sent(new, held)
                assert header.late == 0
                assert header.used == header.needed <= largest_message(numel)
                assert same(received(message, held), new)
                messages.append(message)
        assert torch.equal(*messages), numel


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_pattern_becomes_every_kind_of_other(backend: Any, dtype: torch.dtype) -> None:
    """All 65536 patterns, NaNs with their payloads, infinities, both zeros and subnormals among them."""
    every = patterns(torch.arange(1 << 16), dtype)
    kinds = [every.roll(1), every.roll(1 << 15), torch.zeros_like(every), every.flip(0), every.roll(-3)]
    kinds = kinds[: 2 if backend == "reference" else None]
    with ops.use_backend(backend):
        for held in kinds:
            assert same(received(sent(every, held)[0], held), every)
            assert same(received(sent(held, every)[0], every), held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_row(backend: Any) -> None:
    with ops.use_backend(backend):
        message, header = sent(weights(0), weights(0))
        assert header.used == HEADER_BYTES
        assert received(message, weights(0)).numel() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share", [0, 0.3, 0.6, 0.999])
def test_what_does_not_fit_is_late_counted_and_part_of_the_next_message(backend: Any, share: float) -> None:
    numel = 3 * BLOCK + 200
    held, new = weights(numel), moved(weights(numel), 2e-4)
    with ops.use_backend(backend):
        needed = sent(new, held)[1].needed
        capacity = int(needed * share) // ALIGNMENT * ALIGNMENT
        capacity = max(capacity, smallest_message(numel))
        message, header = sent(new, held, capacity=capacity)
        row = received(message, held)
        late = int((row.view(torch.int16) != new.view(torch.int16)).sum())
        assert header.late == late > 0
        assert header.needed == needed
        assert header.used <= capacity
        # The rest needs what the first message said, and no more.
        room = -(-(message_parts(numel) + header.needed - header.used + 8) // ALIGNMENT) * ALIGNMENT
        rest, header = sent(new, row, capacity=room)
        assert header.late == 0
        assert same(received(rest, row), new)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_messages_change_rows_of_any_stride(backend: Any) -> None:
    numel = BLOCK + 5
    rows = torch.stack([weights(numel, seed=seed) for seed in range(3)])
    wide = torch.zeros(3, numel + 3, dtype=torch.bfloat16)
    wide[:, 1:-2] = rows
    news = [moved(row, 1e-4, seed=seed) for seed, row in enumerate(rows)]
    with ops.use_backend(backend):
        messages = torch.stack([sent(new, row)[0] for new, row in zip(news, rows, strict=True)])
        ops.decode_change(messages, rows=wide[:, 1:-2])
    assert same(wide[:, 1:-2].contiguous(), torch.stack(news))
    assert not wide[:, 0].any() and not wide[:, -2:].any()


def test_threads_write_the_same_bytes() -> None:
    numel = 9 * BLOCK + 123
    held, new = weights(numel), moved(weights(numel), 1e-4)
    threads = torch.get_num_threads()
    try:
        messages = []
        for count in (1, 2):
            torch.set_num_threads(count)
            messages.append(sent(new, held)[0])
            assert same(received(messages[-1], held), new)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*messages)


# -- tables --------------------------------------------------------------------------------------------


def chance(change: int, deviation: float) -> float:
    """Return how likely a uniformly placed number lies so many roundings further after a Gaussian move."""

    def above(x: float) -> float:  # the mean of max(0, x - move)
        z = x / deviation
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return x * 0.5 * (1 + math.erf(z / math.sqrt(2))) + deviation * density

    return above(change + 1) - 2 * above(change) + above(change - 1)


def test_tables_are_what_they_are_said_to_be() -> None:
    encode, decode = coding_tables().encode.long(), coding_tables().decode.long()
    for row, slots in zip(encode, decode, strict=True):
        symbols = slots >> 20
        for symbol in range(ESCAPE + 1):
            where = (symbols == symbol).nonzero().flatten()
            if where.numel():
                start, frequency = int(row[symbol]) & 1023, int(row[symbol]) >> 10 & 1023
                assert where.tolist() == list(range(start, start + frequency))
                assert (slots[where] >> 10 & 1023 == frequency).all()
                assert (slots[where] & 1023).tolist() == list(range(frequency))
            else:
                assert row[symbol] == row[ESCAPE]
        assert row[ESCAPE] < 0
    for index, row in enumerate(encode):
        deviation = 2 ** (index / 2 - 6)
        for change in range(1, LARGEST + 1):
            expected = 1024 * (0.94 * chance(change, deviation) + 0.06 * chance(change, 2 * deviation))
            for symbol in (LARGEST + change, LARGEST - change):
                entry = int(row[symbol])
                frequency = 0 if entry < 0 else entry >> 10
                assert abs(frequency - expected) <= 1, (index, change)


@pytest.mark.parametrize(("size", "more"), [(3e-4, 0.2), (3e-5, 0.09), (3e-6, 0.07)])
def test_a_step_costs_little_more_than_its_entropy(size: float, more: float) -> None:
    """The entropy of the change given the exponent, over values that all moved alike, is a lower bound."""
    numel = 40 * BLOCK
    main = 0.02 * torch.randn(numel, generator=random(0))  # of which the 16-bit weights are the rounded ones
    held, new = main.bfloat16(), moved(main, size).bfloat16()
    _, header = sent(new, held)
    places = [t.view(torch.int16).int() for t in (new, held)]
    ordered = [torch.where(p < 0, -(p & 0x7FFF), p) for p in places]
    change, exponent = ordered[0] - ordered[1], places[1] >> 7 & 0xFF
    bits = 0.0
    for each in exponent.unique():
        _, counts = change[exponent == each].unique(return_counts=True)
        shares = counts / counts.sum()
        bits -= float((counts * shares.log2()).sum())
    # 1/32 bit for the states of the lanes, and as much for the tables. Large changes are of too many kinds to
    # be counted: their entropy comes out too low.
    assert 8 * header.used <= bits + numel * more
    assert 8 * header.used >= bits * 0.98


# -- damage --------------------------------------------------------------------------------------------


def resealed(message: Tensor) -> Tensor:
    """Return the message with the right checksum for what it holds now."""
    header = message[:HEADER_BYTES].view(torch.int64)
    used = int(header[2])
    if 0 <= used <= len(message):
        header[-1] = 0
        header[-1] = checksum(message[:used])
    return message


@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_anywhere_is_found_and_changes_no_weight(backend: Any) -> None:
    numel = BLOCK // 16
    held, new = weights(numel), moved(weights(numel), 1e-4)
    rng = random(3)
    with ops.use_backend(backend):
        message, header = sent(new, held)
        for _ in range(1500):
            damaged = message.clone()
            for _ in range(int(torch.randint(1, 4, (), generator=rng))):
                place = int(torch.randint(0, header.used, (), generator=rng))
                damaged[place] ^= 1 << int(torch.randint(0, 8, (), generator=rng))
            if torch.equal(damaged, message):
                continue
            row = held.clone()
            with pytest.raises(DamagedMessageError):
                ops.decode_change(damaged[None], rows=row[None])
            assert same(row, held)
        for end in range(0, header.used, 8):
            cut = message.clone()
            cut[end:] = 0
            if not torch.equal(cut, message):
                with pytest.raises(DamagedMessageError):
                    received(cut, held)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, 0x1234, "it begins with"),
        (0, lossless.MAGIC | 9, "format 9, this version reads 1"),
        (1, 5, "holds 5 values instead of 2000"),
        (2, -8, "bytes are said to be used"),
        (2, 1 << 40, "bytes are said to be used"),
        (2, HEADER_BYTES, "bytes are said to be used"),
        (5, 0, "the checksum of its"),
    ],
)
def test_a_wrong_header_is_named(place: int, value: int, words: str) -> None:
    held, new = weights(2000), moved(weights(2000), 1e-4)
    message, _ = sent(new, held)
    message[:HEADER_BYTES].view(torch.int64)[place] = value
    with pytest.raises(DamagedMessageError, match=words) as caught:
        ops.decode_change(torch.stack([sent(new, held)[0], message]), rows=held.repeat(2, 1))
    assert caught.value.index == 1


@pytest.mark.parametrize("entry", [(1024, 200), (0, 63), (0, 20000), (-3, 0), (UNCHANGED, 1), (RAW, 5)])
def test_a_directory_that_does_not_fit_is_named(entry: tuple[int, int]) -> None:
    held, new = weights(2000), moved(weights(2000), 1e-4)
    message, _ = sent(new, held)
    directory_of(message, numel=2000)[0] = torch.tensor(entry)
    code, words = entry
    with pytest.raises(DamagedMessageError, match=f"block 0 has the code {code} and {words} words"):
        received(resealed(message), held)


class GuardedMemory:
    """Tensors at the end of pages behind which nothing may be read or written: the process would die."""

    def __init__(self) -> None:
        self._maps: list[Any] = []
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect
        self._protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy whose last byte is the last one before a page without access."""
        nbytes, page = tensor.nbytes, mmap.PAGESIZE
        room = -(-nbytes // page) * page
        memory = mmap.mmap(-1, room + page)
        self._maps.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert self._protect(start + room, page, 0) == 0
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=room)
        placed = whole[room - nbytes :].view(tensor.dtype)
        return placed.copy_(tensor.view(-1)).view(tensor.shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_message_made_to_deceive_reads_and_writes_nothing_else(backend: Any) -> None:
    """With the right checksum, words of any content and sizes that fit: an error, or some weights."""
    numel, rounds = 1000, 1500 if backend == "numba" else 60
    held, new = weights(numel), moved(weights(numel), 3e-4)
    rng = random(5)
    guarded = GuardedMemory()
    with ops.use_backend(backend):
        message, header = sent(new, held)
        message = message[: -(-header.used // ALIGNMENT) * ALIGNMENT]
        buffer = guarded.copy(message)
        row = guarded.copy(held)
        reasons = []
        for _ in range(rounds):
            buffer.copy_(message)
            row.copy_(held)
            for _ in range(int(torch.randint(1, 9, (), generator=rng))):
                place = int(torch.randint(HEADER_BYTES + 8, header.used, (), generator=rng))
                buffer[place] = int(torch.randint(0, 256, (), generator=rng))
            if torch.rand((), generator=rng) < 0.3:
                directory_of(buffer, numel=numel)[0, 0] = int(torch.randint(0, 1024, (), generator=rng))
            try:
                ops.decode_change(resealed(buffer)[None], rows=row[None])
            except DamagedMessageError as error:
                reasons.append(error.reason)
        assert set(reasons) == {lossless.words_left(0)}
        assert len(reasons) > 0.9 * rounds


@pytest.mark.parametrize("backend", BACKENDS)
def test_encoding_reads_and_writes_nothing_else(backend: Any) -> None:
    guarded = GuardedMemory()
    with ops.use_backend(backend):
        for numel in (1, 33, 1000, BLOCK + 1):
            new, held = guarded.copy(moved(weights(numel), 1e-4)), guarded.copy(weights(numel))
            for capacity in (smallest_message(numel), largest_message(numel)):
                out = guarded.copy(torch.zeros(capacity, dtype=torch.uint8))
                ops.encode_change(new, held=held, out=out)
                row = guarded.copy(held)
                ops.decode_change(out[None], rows=row[None])
                assert capacity == smallest_message(numel) or same(row, new)


# -- the operators -------------------------------------------------------------------------------------


def test_operators_are_registered_soundly() -> None:
    held, new = weights(100), moved(weights(100), 1e-3)
    message, _ = sent(new, held)
    torch.library.opcheck(torch.ops.sdp4bit.encode_change.default, (new, held, message.clone()))
    torch.library.opcheck(torch.ops.sdp4bit.decode_change.default, (message[None], held[None].clone()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sent(weights(8).float(), weights(8).float()), "new must be bf16 or fp16, got torch.float32"),
        (lambda: sent(weights(8), weights(9)), "equal length and type"),
        (lambda: sent(weights(8), weights(8).half()), "equal length and type"),
        (lambda: sent(weights(16)[::2], weights(8)), "new must be contiguous"),
        (lambda: sent(weights(8), weights(8), capacity=48), "at least 64"),
        (lambda: sent(weights(8), weights(8), capacity=72), "multiple of 16 bytes"),
        (lambda: sent(weights(8).to("meta"), weights(8).to("meta")), "must be on the host, got meta"),
        (lambda: received(torch.zeros(64, dtype=torch.int8), weights(8)), "must be uint8"),
        (
            lambda: ops.decode_change(torch.zeros(2, 64, dtype=torch.uint8), rows=weights(8)[None]),
            "one message per row",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()

"""Sums of messages, the transform around them, and the weight path, against the independent definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sdp4bit.quantization import reference
from sdp4bit.quantization.formats import with_scales
from sdp4bit.quantization.hadamard import hadamard32
from sdp4bit.quantization.layout import MessageLayout
from sdp4bit.quantization.random import random_bits16
from tests.oracles.integers import KEY, encoded, oracle_message, oracle_values, values_of

# Sums


def test_sum_starts_from_plus_zero_and_adds_in_rank_order() -> None:
    # In fp32, (1e8 + 1) - 1e8 = 0 but (1e8 - 1e8) + 1 = 1.
    rows = torch.tensor([[1e8], [1.0], [-1e8], [-0.0]]).expand(4, 32)
    messages = torch.stack([encoded(row.view(1, 32), 32, 32) for row in rows])

    def total(order: list[int]) -> Tensor:
        out = torch.empty(32)
        layout = MessageLayout(numel=32, bits=32, group_size=32)
        reference.dequantize_reduce_hadamard(
            messages[order],
            out=out,
            layout=layout,
            hadamard=False,
            multiplier=1.0,
            dither=None,
        )
        return out

    assert torch.equal(total([0, 1, 2]), torch.zeros(32))
    assert torch.equal(total([0, 2, 1]), torch.ones(32))
    assert total([3]).view(torch.int32).tolist() == [0] * 32  # +0.0 + -0.0 is +0.0


@pytest.mark.parametrize("hadamard", [True, False])
def test_a_message_of_zeros_that_is_skipped_changes_no_bit(hadamard: bool) -> None:
    layout = MessageLayout(numel=4096 + 33, bits=4, group_size=128)
    dither = KEY._replace(dither=True)
    values = values_of(1, 1, layout.numel)
    values[..., ::7], values[..., 256:512] = 0.0, -0.0
    messages = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
    reference.hadamard_quantize(
        values, out=messages[:1], layout=layout, hadamard=hadamard, rounding=dither._replace(sender=0)
    )
    own, results = values_of(layout.numel), []
    own[::5] = -0.0
    for skip in (None, 1):
        results.append(torch.empty(layout.numel))
        named = {"layout": layout, "hadamard": hadamard, "multiplier": 1 / 96, "dither": dither}
        reference.dequantize_reduce_hadamard(messages, out=results[-1], **named, skip=skip, own=own)
        messages[1] = 0xFF  # anything may be in a skipped message
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))


@pytest.mark.parametrize("bits", with_scales())
@pytest.mark.parametrize("numel", [32, 200, 1000])
def test_reduction_equals_the_oracle(bits: float, numel: int) -> None:
    group_size = 96
    messages = torch.stack([encoded(values_of(1, numel, seed=seed), bits, group_size) for seed in range(5)])
    total = np.zeros(numel, dtype=np.float32)
    for message in messages.tolist():
        row = oracle_values(bytes(message), numel, bits, group_size, 1)[0][:numel]
        total = total + np.array(row, dtype=np.float32)
    multiplier = 1 / 3
    out = torch.empty(numel)
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    reference.dequantize_reduce_hadamard(
        messages,
        out=out,
        layout=layout,
        hadamard=False,
        multiplier=multiplier,
        dither=None,
    )
    assert torch.equal(out, torch.from_numpy(total * np.float32(multiplier)))


def test_requantized_sum_equals_the_oracle_with_other_group_sizes() -> None:
    numel, parts, ranks = 300, 2, 3
    messages = torch.stack([encoded(values_of(parts, numel, seed=seed), 8, 128) for seed in range(ranks)])
    received = MessageLayout(numel=numel, bits=8, group_size=128, parts=parts)
    sent = MessageLayout(numel=numel, bits=4, group_size=96)
    out = torch.full((parts, sent.nbytes), 0xAA, dtype=torch.uint8)
    rounding = KEY._replace(first=64, row_stride=4096)
    reference.dequantize_reduce_quantize(
        messages, received=received, out=out, sent=sent, rounding=rounding, dither=None
    )
    total = np.zeros((parts, 320), dtype=np.float32)
    for message in messages.tolist():
        total = total + np.array(oracle_values(bytes(message), numel, 8, 128, parts), dtype=np.float32)
    for part in range(parts):
        random = random_bits16(part * 4096 + 64, 320, KEY.k0, KEY.k1).tolist()
        expected = oracle_message([total[part].tolist()], 4, 96, [random])
        assert bytes(out[part].tolist()) == expected


def test_transform_happens_once_before_the_first_and_once_after_the_last_sum() -> None:
    numel = 100
    values = values_of(2, 1, numel, heavy=False)
    layout = MessageLayout(numel=numel, bits=32, group_size=32)
    messages = torch.empty(2, layout.nbytes, dtype=torch.uint8)
    reference.hadamard_quantize(values, out=messages, layout=layout, hadamard=True, rounding=None)
    padded = torch.nn.functional.pad(values, (0, 28))
    mixed = hadamard32(padded)
    assert torch.equal(messages.view(torch.float32).view(2, 1, 128), mixed)
    out = torch.empty(numel)
    reference.dequantize_reduce_hadamard(
        messages,
        out=out,
        layout=layout,
        hadamard=True,
        multiplier=1 / 64,
        dither=None,
    )
    assert torch.equal(out, hadamard32(mixed[0, 0] + mixed[1, 0])[:numel] * (1 / 64))


# Weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [96, 2048])
@pytest.mark.parametrize(("bits", "clip"), [(4, 1.0), (3.5, 1.0), (3, 1.0), (2, 0.6)])
def test_weight_difference_is_taken_and_added_in_fp32(
    dtype: torch.dtype, group_size: int, bits: float, clip: float
) -> None:
    numel = 2100
    main = values_of(numel, heavy=False)
    replica = (main + values_of(numel, seed=1, heavy=False) * 1e-2).to(dtype)
    layout = MessageLayout(numel=numel, bits=bits, group_size=group_size)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.subtract_quantize(main, replica=replica, out=out, layout=layout, clip=clip)
    difference = (main.numpy() - replica.float().numpy()).tolist()
    expected = oracle_message([difference], bits, group_size, None, clip)
    assert bytes(out.tolist()) == expected

    received = torch.tensor(oracle_values(expected, numel, bits, group_size, 1)[0][:numel])
    rows = torch.stack([replica, -replica])
    updated, messages = rows.clone(), torch.stack([out, out])
    reference.dequantize_add(messages, replica=updated, layout=layout, accumulate=True)
    assert torch.equal(updated, (rows.float() + received).to(dtype))
    reference.dequantize_add(messages, replica=updated, layout=layout, accumulate=False)
    assert torch.equal(updated, received.to(dtype).expand(2, numel))


def test_bf16_sum_is_rounded_to_nearest_even() -> None:
    # Between 1 and 1 + 2**-7 in bf16 lies the tie 1 + 2**-8; between the next two, 1 + 3 * 2**-8.
    replica = torch.ones(1, 32, dtype=torch.bfloat16)
    replica[0, 1] = 1 + 2**-7
    difference = torch.full((1, 32), 2.0**-8)
    difference[0, 2] = 2.0**-8 + 2.0**-20
    message = encoded(difference, 32, 32).unsqueeze(0)
    layout = MessageLayout(numel=32, bits=32, group_size=32)
    reference.dequantize_add(message, replica=replica, layout=layout, accumulate=True)
    assert replica[0, :3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_a_zero_difference_leaves_the_replica_alone() -> None:
    main = values_of(4096, heavy=False).to(torch.bfloat16)
    layout = MessageLayout(numel=4096, bits=4, group_size=2048)
    out = torch.empty(layout.nbytes, dtype=torch.uint8)
    reference.subtract_quantize(main.float(), replica=main, out=out, layout=layout, clip=1.0)
    replica = main.clone().unsqueeze(0)
    reference.dequantize_add(out.unsqueeze(0), replica=replica, layout=layout, accumulate=True)
    assert torch.equal(replica[0], main)

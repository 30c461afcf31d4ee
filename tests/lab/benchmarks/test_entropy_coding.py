"""The entropy coder of dithered gradients: bits, errors, budgets. Layer: arrays, one short run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import entropy_coding as coding
from benchmarks.entropy_coding import BUDGETS, GROUP, Result, budget_bytes, measure, normal_code, step_for
from tests.lab.pretrain.tiny_runs import this_rank, write_text
from tests.ranks import run_ranks


def normal(groups: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((groups, GROUP)).astype(np.float32)


def measured(groups: np.ndarray, bits: float) -> Result:
    return measure(groups, bits=bits, rounds=1)


@pytest.mark.parametrize("bits", BUDGETS)
def test_codes_are_prefix_codes_and_the_table_reads_them(bits: float) -> None:
    code = normal_code(step_for(bits))
    assert sum(2.0 ** -int(length) for length in code.lengths) == 1.0
    for symbol, (word, length) in enumerate(zip(code.words, code.lengths, strict=True)):
        for rest in (0, (1 << coding.LONGEST) - 1):
            entry = code.decoding[(int(word) | rest << int(length)) & ((1 << coding.LONGEST) - 1)]
            assert (entry >> 4, entry & 15) == (symbol, length)


@pytest.mark.slow
def test_normal_values_come_close_to_the_bound() -> None:
    groups = normal(64)
    found = {bits: measured(groups, bits).squared_error for bits in BUDGETS}
    assert found[3.0] < 0.0277  # int4 with stochastic rounding needs 4.125 bits for that
    assert found[4.1] < 0.0277 / 4.8
    for bits, error in found.items():
        # The shape of a step costs pi e / 6 = 1.42; the rest are the sizes of lanes and the step itself, 0.05
        # bits, codes of whole bits, and at 2 bits that dither widens what has to be coded.
        assert 1.42 * 4**-bits < error < 2.4 * 4**-bits


def test_a_message_never_exceeds_its_budget_whatever_the_values() -> None:
    rough = np.random.default_rng(1).standard_t(2, (16, GROUP)).astype(np.float32)
    rough[3] = 0
    rough[4, 5:] = 0  # one value alone
    rough[5] *= 1e-20
    step, budget = step_for(3.0), budget_bytes(3.0)
    code, random = normal_code(step), coding.draw_random(rough.shape)
    messages = np.full((len(rough), budget + 8), 99, np.uint8)
    steps, received = np.zeros(len(rough), np.float32), np.empty_like(rough)
    coding.encode(rough, random, code.lengths, code.words, code.last, step, 1.01, budget, messages, steps)
    assert (messages[:, budget:] == 99).all()
    coding.decode(messages[:, :budget].copy(), random, steps, code.decoding, code.last, received)
    # Uniform within half a step, whatever the value; fp32 arithmetic beside 1024 errs by 2**-13 of one.
    assert (np.abs(received - rough) <= steps[:, None] * (0.5 + 2**-12)).all()


def taken(path: str, text: str) -> list[tuple[tuple[int, ...], float]]:
    arguments = ["--data-path", text, "--out", path, "--vocab-size", "300", "--num-layers", "1"]
    arguments += [
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "2",
        "--train-iters",
        "3",
        "--seq-length",
        "32",
    ]
    arguments += ["--micro-batch-size", "2", "--simulated-ranks", "4", "--ranks-per-node", "2"]
    training = coding.COMMANDS["pretrain"].parse([*arguments, "--strategy", "tlq-hs"])
    samples = coding.train_and_take(training, at=[2, 3], ranks=this_rank())
    return [(groups.shape, float(np.square(groups).mean())) for groups in samples.values()]


@pytest.mark.slow
def test_gradients_of_a_run_are_taken(tmp_path) -> None:
    (samples,) = run_ranks(taken, 1, str(tmp_path / "run"), str(write_text(tmp_path / "text")))
    (shape, square), (other_shape, other_square) = samples
    assert shape == other_shape and shape[1] == GROUP and shape[0] > 10
    assert square > 0 and other_square > 0 and square != other_square


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--train-iters", "5", "--at", "9"], ["--at 9", "5 steps"]),
        (["--at", "2"], ["--simulated-ranks"]),
    ],
)
def test_errors_name_the_option(arguments, named, tmp_path, capsys) -> None:
    options = ["--data-path", str(write_text(tmp_path / "text")), "--out", str(tmp_path / "run")]
    simulated = ["--simulated-ranks", "2", "--ranks-per-node", "1"] if "--train-iters" in arguments else []
    assert coding.main([*options, *arguments, *simulated]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in named), message


@pytest.mark.slow
def test_packed_codes_err_as_the_law_says() -> None:
    groups = torch.from_numpy(normal(64)).numpy()
    assert coding.packed_error(groups, bits=4, dither=False) == pytest.approx(0.0277, rel=0.02)
    assert coding.packed_error(groups, bits=4, dither=True) == pytest.approx(0.0139, rel=0.02)

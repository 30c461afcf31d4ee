"""The GPT: sizes of the model cards, initial weights that do not depend on sharding, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from sdp4bit_lab.pretrain.config.pretrain import ModelConfig
from sdp4bit_lab.pretrain.model import gpt as model_module
from sdp4bit_lab.pretrain.model.cards import ModelShape
from sdp4bit_lab.pretrain.model.gpt import GPT
from sdp4bit_lab.pretrain.step.parallelize import resolve_compute_dtype

SMALL = ModelShape(layers=2, hidden=32, heads=4, vocabulary=128, positions=16)


def small_gpt(*, seed: int = 1, **options) -> GPT:
    gpt = GPT(SMALL, **options)
    gpt.reset_parameters(seed=seed)
    return gpt


def tokens(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, SMALL.vocabulary, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("card", "vocabulary_multiple", "billions"),
    [
        ("1.3B", 1, 1.3158),
        ("2.7B", 1, 2.6517),
        ("6.7B", 4, 6.6602),
        ("13B", 4, 12.8556),
        ("13B", 8, 12.8582),
        ("18B", 4, 18.4466),
        ("18B", 8, 18.4497),
    ],
)
def test_parameter_counts_are_the_papers(card, vocabulary_multiple, billions):
    """The vocabulary is padded to 128 x tensor parallel size there."""
    padded = math.ceil(50257 / (128 * vocabulary_multiple)) * 128 * vocabulary_multiple
    with torch.device("meta"):
        gpt = GPT(ModelConfig(model_card=card).shape(vocabulary=padded, sequence_length=2048))
    count = sum(p.numel() for p in gpt.parameters())
    # The paper's formula leaves out the 2h values of the last norm.
    assert round((count - 2 * gpt.shape.hidden) / 1e9, 4) == billions


def test_initial_weights_depend_on_the_seed_alone():
    first, again, other = small_gpt(), small_gpt(), small_gpt(seed=2)
    for name, parameter in first.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name])
        if parameter.ndim == 2:
            assert not torch.equal(parameter, other.state_dict()[name])


def test_initial_weights_follow_gpt2():
    shape = ModelShape(layers=8, hidden=64, heads=4, vocabulary=1024, positions=16)
    gpt = GPT(shape)
    gpt.reset_parameters(seed=0)
    state = gpt.state_dict()
    assert state["token_embedding.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["blocks.3.attention.query_key_value.weight"].std() == pytest.approx(0.02, rel=0.05)
    for name in ("attention", "feed_forward"):
        assert state[f"blocks.3.{name}.projection.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert all((value == 0).all() for name, value in state.items() if name.endswith(".bias"))
    assert all((value == 1).all() for name, value in state.items() if name.endswith("norm.weight"))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_shards_of_any_world_hold_the_same_initial_weights(world_size):
    rows, columns = 150, 5
    whole = torch.empty(rows, columns)
    size = {"shape": (rows, columns), "std": 0.02, "key": "k"}
    model_module._fill_normal(whole, rows=range(rows), columns=range(columns), **size)
    chunks = [torch.empty_like(chunk) for chunk in whole.chunk(world_size)]
    first_row = 0
    for chunk in chunks:
        held = range(first_row, first_row + chunk.shape[0])
        model_module._fill_normal(chunk, rows=held, columns=range(columns), **size)
        first_row = held.stop
    assert torch.equal(torch.cat(chunks), whole)


def test_loss_at_the_start_is_that_of_a_uniform_guess():
    batch = tokens()
    loss = small_gpt()(batch, batch.roll(1)).item() / batch.numel()
    assert loss == pytest.approx(math.log(SMALL.vocabulary), rel=0.01)


def test_attention_is_causal():
    gpt, batch = small_gpt(), tokens()
    changed = batch.clone()
    changed[:, -1] = (changed[:, -1] + 1) % SMALL.vocabulary
    targets = batch.roll(-1, dims=1)
    targets[:, -1] = -100
    assert torch.equal(gpt(batch, targets), gpt(changed, targets))


def test_every_parameter_gets_a_gradient_and_the_embeddings_are_tied():
    gpt, batch = small_gpt(), tokens()
    gpt(batch, batch.roll(-1, dims=1)).backward()
    assert all(p.grad is not None for p in gpt.parameters())
    unused = sorted(set(range(SMALL.vocabulary)) - set(batch.flatten().tolist()))
    assert gpt.token_embedding.weight.grad[unused].abs().sum() > 0  # through the output layer


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_bf16_weights_work_in_either_compute_dtype(compute_dtype):
    gpt, batch = small_gpt(compute_dtype=compute_dtype).to(torch.bfloat16), tokens()
    seen = []
    gpt.final_norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    loss = gpt(batch, batch.roll(-1, dims=1))
    loss.backward()
    assert seen == [compute_dtype]
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 for p in gpt.parameters())


def test_dropout_acts_in_training_only():
    gpt = GPT(ModelShape(layers=1, hidden=32, heads=4, vocabulary=128, positions=16, dropout=0.5))
    gpt.reset_parameters(seed=1)
    batch = tokens()
    assert not torch.equal(gpt(batch, batch), gpt(batch, batch))
    gpt.eval()
    assert torch.equal(gpt(batch, batch), gpt(batch, batch))


def test_the_compute_dtype_follows_the_weights_unless_the_cpu_is_slow_at_it():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert resolve_compute_dtype("auto", param_dtype=torch.bfloat16, device=cuda) == torch.bfloat16
    assert resolve_compute_dtype("auto", param_dtype=torch.float32, device=cpu) == torch.float32
    assert resolve_compute_dtype("bf16", param_dtype=torch.bfloat16, device=cpu) == torch.bfloat16
    assert resolve_compute_dtype("fp32", param_dtype=torch.bfloat16, device=cuda) == torch.float32

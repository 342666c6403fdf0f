"""The reference decoder against float64 arithmetic written down a second time, and what its keys promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from perdure.errors import UsageError
from perdure.importing import KeyFaults
from perdure.models.decoder import Decoder

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[1, 5, 3, 9, 0, 10, 2], [4, 4, 8, 1, 7, 2, 6]])


def build(seed: int = 0, **keys: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**{**SMALL, **keys}).eval()


def expected_logits(model: Decoder, ids: np.ndarray[Any, Any], heads: int, kv_heads: int) -> np.ndarray[Any, Any]:
    """The forward pass in float64, token by token, with rotations as complex numbers."""
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}

    def norm(x: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[name]

    def turned(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        half = x.shape[-1] // 2
        positions = np.arange(x.shape[0])[:, None, None]
        turn = np.exp(1j * positions * 10000.0 ** (-2 * np.arange(half) / x.shape[-1]))
        pairs = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    results = []
    for sequence in ids:
        x = weights["embed_tokens.weight"][sequence]
        length, size = x.shape[0], x.shape[1] // heads
        for layer in range(SMALL["num_hidden_layers"]):
            at = f"layers.{layer}."
            seen = norm(x, at + "input_layernorm.weight")
            q = turned((seen @ weights[at + "self_attn.q_proj.weight"].T).reshape(length, heads, size))
            k = turned((seen @ weights[at + "self_attn.k_proj.weight"].T).reshape(length, kv_heads, size))
            v = (seen @ weights[at + "self_attn.v_proj.weight"].T).reshape(length, kv_heads, size)
            mixed = np.zeros_like(q)
            for head in range(heads):
                source = head // (heads // kv_heads)
                for position in range(length):
                    scores = k[: position + 1, source] @ q[position, head] / np.sqrt(size)
                    shares = np.exp(scores - scores.max())
                    mixed[position, head] = shares / shares.sum() @ v[: position + 1, source]
            x = x + mixed.reshape(length, -1) @ weights[at + "self_attn.o_proj.weight"].T
            seen = norm(x, at + "post_attention_layernorm.weight")
            gate = seen @ weights[at + "mlp.gate_proj.weight"].T
            inner = gate / (1 + np.exp(-gate)) * (seen @ weights[at + "mlp.up_proj.weight"].T)
            x = x + inner @ weights[at + "mlp.down_proj.weight"].T
        results.append(norm(x, "norm.weight") @ weights["lm_head.weight"].T)
    return np.stack(results)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_logits_are_those_of_float64_arithmetic(kv_heads: int) -> None:
    model = build(num_key_value_heads=kv_heads)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    logits = model(IDS).detach().double().numpy()
    assert logits.shape == (2, 7, 11)
    np.testing.assert_allclose(logits, expected_logits(model, IDS.numpy(), 6, kv_heads), rtol=2e-4, atol=2e-4)


def test_a_token_is_not_seen_before_its_position() -> None:
    model = build()
    changed = IDS.clone()
    changed[:, 4] = 3
    before, after = model(IDS), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_one_seed_gives_one_model_and_another_another() -> None:
    first, again, other = build(3), build(3), build(4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)  # type: ignore[union-attr]


def test_low_precision_starts_from_the_rounding_of_float32() -> None:
    wide, narrow = build(5).state_dict(), build(5, params_dtype="bfloat16").state_dict()
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)


def test_a_fresh_model_knows_nothing() -> None:
    logits = build()(IDS)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
    assert abs(loss.item() - np.log(11)) < 0.05


def test_tied_embeddings_are_one_tensor_under_two_names() -> None:
    tied, untied = build(tie_word_embeddings=True), build()
    assert tied.embed_tokens.weight is tied.lm_head.weight  # type: ignore[union-attr]
    assert tied.state_dict().keys() == untied.state_dict().keys()
    assert len(list(untied.parameters())) - len(list(tied.parameters())) == 1


def test_state_is_parameters_only_so_that_nothing_is_rebuilt() -> None:
    model = build()
    assert list(model.buffers()) == []
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_names_survive_on_a_pipeline_stage_and_stages_chain() -> None:
    whole, first, last = build(), build(), build()
    del first.layers["1"]
    first.norm = first.lm_head = None
    del last.layers["0"]
    last.embed_tokens = None
    names = set(whole.state_dict())
    assert set(first.state_dict()) | set(last.state_dict()) == names
    assert not set(first.state_dict()) & set(last.state_dict())
    assert torch.equal(last(first(IDS)), whole(IDS))


def test_dropout_draws_in_training_only_and_from_the_default_generator() -> None:
    model = build(dropout=0.5)
    assert torch.equal(model(IDS), model(IDS))
    model.train()
    torch.manual_seed(1)
    one, two = model(IDS), model(IDS)
    torch.manual_seed(1)
    assert torch.equal(one, model(IDS))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("params", "compute", "logits"),
    [
        ("float32", None, torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float16", None, torch.float16),
    ],
)
def test_dtypes_of_parameters_computation_and_gradients(params: str, compute: str | None, logits: torch.dtype) -> None:
    model = build(params_dtype=params, compute_dtype=compute)
    output = model(IDS)
    assert output.dtype == logits
    output.float().square().sum().backward()
    assert {p.dtype for p in model.parameters()} == {getattr(torch, params)}
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    wide = build()
    wide.load_state_dict(model.state_dict())
    torch.testing.assert_close(output.float(), wide(IDS), rtol=0.1, atol=0.02)


def test_the_defaults_make_the_documented_model() -> None:
    model = Decoder(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
    assert model(torch.tensor([[0, 255, 256]])).shape == (1, 3, 257)
    assert model.layers["3"].mlp.gate_proj.out_features == 704  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"hidden_size": 250, "num_attention_heads": 4}, "model.hidden_size", "nearest valid: 248 and 256"),
        ({"hidden_size": 3, "num_attention_heads": 4}, "model.hidden_size", "nearest valid: 8"),
        ({"num_key_value_heads": 4}, "model.num_key_value_heads", "nearest valid: 3 and 6"),
        ({"num_key_value_heads": 12}, "model.num_key_value_heads", "nearest valid: 6"),
        ({"num_hidden_layers": 0}, "model.num_hidden_layers", "not a positive integer"),
        ({"dropout": 1.0}, "model.dropout", "not in"),
        ({"params_dtype": "float8"}, "model.params_dtype", "not one of float32"),
    ],
)
def test_sizes_that_cannot_be_are_told_with_those_that_can(keys: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(KeyFaults) as caught:
        Decoder(**{**SMALL, **keys})
    assert [each for each, _ in caught.value.faults] == [key]
    assert words in str(caught.value)


def test_all_faults_are_told_in_one_go() -> None:
    with pytest.raises(KeyFaults) as caught:
        Decoder(**{**SMALL, "vocab_size": 0, "dropout": -1.0, "compute_dtype": "int8"})
    assert {key for key, _ in caught.value.faults} == {"model.vocab_size", "model.dropout", "model.compute_dtype"}


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(UsageError, match="max_position_embeddings"):
        build(max_position_embeddings=6)(IDS)

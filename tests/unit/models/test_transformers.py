"""Models of the transformers library from configuration keys alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perdure.importing import KeyFaults
from perdure.models import build_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# The reference decoder's names, as this library spells them.
OURS = {"embed_tokens", "layers", "norm"}


def faults_of(**keys: Any) -> dict[str, str]:
    with pytest.raises(KeyFaults) as caught:
        build_model({**LLAMA, **keys})
    return dict(caught.value.faults)


def test_a_llama_is_built_offline_reproducibly_and_trains() -> None:
    torch.manual_seed(0)
    model = build_model(LLAMA, vocab_size=257)
    torch.manual_seed(0)
    again = build_model({"type": "transformers", **LLAMA}, vocab_size=257)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model.training
    output = model(torch.tensor([[1, 2, 256]]))
    assert output.logits.shape == (1, 3, 257)
    output.logits.sum().backward()


def test_the_reference_decoder_is_a_llama() -> None:
    theirs = build_model({**LLAMA, "rms_norm_eps": 1e-6}, vocab_size=64).eval()
    ours = build_model({**{k: v for k, v in LLAMA.items() if k != "model_type"}, "type": "decoder", "vocab_size": 64})
    renamed = {f"model.{n}" if n.split(".")[0] in OURS else n: value for n, value in ours.state_dict().items()}
    theirs.load_state_dict(renamed, strict=True)
    ids = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(ours.eval()(ids), theirs(ids).logits, rtol=1e-5, atol=1e-6)


def test_parameters_are_made_in_params_dtype() -> None:
    model = build_model({**LLAMA, "params_dtype": "bfloat16"}, vocab_size=64)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_the_library_does_not_know_is_refused_in_words() -> None:
    assert "did you mean num_hidden_layers?" in faults_of(num_hiden_layers=1)["model.num_hiden_layers"]
    assert "did you mean llama?" in faults_of(model_type="lama")["model.model_type"]
    assert "LlamaForCausalLM" in faults_of(architectures=["Other"])["model.architectures"]
    assert "computes in params_dtype" in faults_of(compute_dtype="bfloat16")["model.compute_dtype"]
    assert "refuses its configuration" in faults_of(hidden_size=30)["model"]

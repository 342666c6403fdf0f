"""From a `model:` section to a module."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from perdure.config.schema import ModelConfig
from perdure.errors import UsageError
from perdure.importing import KeyFaults
from perdure.models import build_model
from perdure.models.decoder import Decoder

QUICK: dict[str, Any] = {"type": "decoder", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def faults_of(section: Any, **keys: Any) -> dict[str, str]:
    with pytest.raises(KeyFaults) as caught:
        build_model(section, **keys)
    return dict(caught.value.faults)


@pytest.mark.parametrize("section", [QUICK, ModelConfig(**QUICK)], ids=["mapping", "section object"])
def test_the_vocabulary_comes_from_the_data_where_none_is_given(section: Any) -> None:
    model = build_model(section, vocab_size=300)
    assert isinstance(model, Decoder)
    assert model(torch.tensor([[299]])).shape == (1, 1, 300)
    assert build_model(section)(torch.tensor([[1]])).shape == (1, 1, 257)


def test_a_written_vocabulary_may_be_larger_than_the_data_need_but_not_smaller() -> None:
    assert build_model({**QUICK, "vocab_size": 512}, vocab_size=300)(torch.tensor([[1]])).shape[-1] == 512
    assert "smaller than the 300" in faults_of({**QUICK, "vocab_size": 256}, vocab_size=300)["model.vocab_size"]


def test_unknown_keys_and_types_are_told_with_the_nearest() -> None:
    faults = faults_of({**QUICK, "hiden_size": 8, "num_layers": 3})
    assert set(faults) == {"model.hiden_size", "model.num_layers"}
    assert "did you mean hidden_size?" in faults["model.hiden_size"]
    assert "did you mean decoder?" in faults_of({"type": "decodr"})["model.type"]
    assert "has no `Linar`; did you mean Linear?" in faults_of({"type": "torch.nn:Linar"})["model.type"]


def test_any_module_by_import_path_with_its_arguments_checked() -> None:
    model = build_model({"type": "torch.nn:Linear", "in_features": 3, "out_features": 2}, vocab_size=9)
    assert isinstance(model, nn.Linear)
    faults = faults_of({"type": "torch.nn:Linear", "in_features": 3, "out_feature": 2})
    assert set(faults) == {"model.out_feature", "model.out_features"}
    assert "requires it" in faults["model.out_features"]


def test_params_dtype_holds_for_a_module_that_does_not_know_it() -> None:
    section = {"type": "torch.nn:Linear", "in_features": 3, "out_features": 2, "params_dtype": "bfloat16"}
    assert {p.dtype for p in build_model(section).parameters()} == {torch.bfloat16}
    assert "takes no compute_dtype" in faults_of({**section, "compute_dtype": "float32"})["model.compute_dtype"]
    assert "not one of" in faults_of({**section, "params_dtype": "int8"})["model.params_dtype"]


def test_what_is_built_has_to_be_a_module() -> None:
    assert "not a torch.nn.Module" in faults_of({"type": "collections:OrderedDict"})["model.type"]
    with pytest.raises(UsageError, match="cannot be called"):
        build_model({"type": "math:pi"})


def test_a_missing_transformers_package_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'perdure\[transformers\]'"):
        build_model({"type": "transformers", "model_type": "llama"})

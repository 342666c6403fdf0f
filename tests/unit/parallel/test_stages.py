"""Stages share the modules of the whole model under its names, and in a chain they compute what it computes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.errors import UsageError
from perdure.models.decoder import Decoder
from perdure.parallel.shapes import Call, Shapes, meta_copy
from perdure.parallel.stages import cut, layer_names, put_tied, without

IDS = torch.arange(24).reshape(2, 12) * 5 % 61


def decoder(**keys: Any) -> Decoder:
    torch.manual_seed(1)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    return Decoder(**{**sizes, "intermediate_size": 24, **keys})


def chain(model: nn.Module, layers: list[range]) -> list[nn.Module]:
    division = cut(model, layers)
    return [without(model, division.absent({number})) for number in range(len(layers))]


@pytest.mark.parametrize("layers", [[range(2), range(2, 4)], [range(1), range(1, 2), range(2, 4)]])
def test_a_chain_of_stages_computes_what_the_model_computes(layers: list[range]) -> None:
    model = decoder()
    x: Tensor = IDS
    stages = chain(model, layers)
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(IDS))
    names = [set(stage.state_dict()) for stage in stages]
    assert set.union(*names) == set(model.state_dict())
    assert sum(map(len, names)) == len(model.state_dict())
    assert dict(model.named_parameters())["layers.3.mlp.up_proj.weight"] is stages[-1].get_parameter(
        "layers.3.mlp.up_proj.weight"
    )


def test_the_items_of_lists_keep_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 2))
    assert layer_names(model) == ["0", "1", "2", "3"]
    first, last = chain(model, [range(2), range(2, 4)])
    assert list(first.state_dict()) == ["0.weight", "0.bias"]
    assert list(last.state_dict()) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    x = torch.randn(7, 3)
    assert torch.equal(last(first(x)), model(x))
    assert len(model) == 4


def test_tied_parameters_are_found_and_get_all_their_names() -> None:
    model = decoder(tie_word_embeddings=True)
    division = cut(model, [range(2), range(2, 4)])
    assert division.tied == (("embed_tokens.weight", "lm_head.weight"),)
    assert division.stages_of("lm_head.weight") == {1}
    for stage in (0, 1):
        held = without(model, division.absent({stage}))
        own = nn.Parameter(torch.zeros(61, 16))
        put_tied(held, model, division.tied[0], own)
        assert held.get_parameter("embed_tokens.weight") is held.get_parameter("lm_head.weight") is own
        assert [name for name, each in held.named_parameters() if each is own] == ["embed_tokens.weight"]


class Partly(nn.Module):
    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.plan = plan

    def pipeline_plan(self) -> Any:
        return self.plan


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "Linear has no plan for it"),
        (Partly(([], ["a", "b"], [])), "the plan of Partly leaves out c.weight and 1 more parameters"),
        (Partly(([], ["a", "d"], [])), "names 'd', which is none of its modules"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_in_words(model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cut(model, [range(1), range(1, 2)])


def test_shapes_between_stages_are_known_without_running_anything() -> None:
    model = decoder(params_dtype="bfloat16")
    bare = meta_copy(model)
    assert {parameter.device.type for parameter in bare.parameters()} == {"meta"}
    shapes = Shapes(chain(bare, [range(1), range(1, 2), range(2, 4)]), "input_ids")
    assert shapes.between([Call((IDS,), {})] * 3) == [((2, 12, 16), torch.bfloat16)] * 2
    assert shapes.between([Call((), {"input_ids": IDS[:, :5]})]) == [((2, 5, 16), torch.bfloat16)] * 2
    with pytest.raises(UsageError, match="micro-batch 1 differs from the first"):
        shapes.between([Call((IDS,), {}), Call((IDS[:1],), {})])


def test_a_model_that_cannot_be_copied_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"Sequential cannot be copied, .*cannot pickle"):
        meta_copy(model)


def test_a_model_that_does_not_chain_is_refused_in_words() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2), nn.Linear(2, 2))
    shapes = Shapes(chain(meta_copy(model), [range(1), range(1, 2), range(2, 3)]), "input")
    with pytest.raises(UsageError, match="stage 1 of Sequential cannot be run on the meta device"):
        shapes.between([Call((torch.zeros(1, 3),), {})])

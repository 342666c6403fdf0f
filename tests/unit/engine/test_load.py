"""Pairing a checkpoint with a model: by name or alias, all of it or a short error, never a part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from perdure.engine.load import match_model
from perdure.errors import MismatchError
from perdure.format.metadata import TensorRecord
from perdure.state.model import model_tensors
from perdure.state.shards import describe


def records(model: nn.Module) -> dict[str, TensorRecord]:
    return {t.name: TensorRecord(t.dtype, t.shape, [], t.logical, t.aliases) for t in model_tensors(model)}


def layers(count: int, prefix: str = "layer", width: int = 2) -> nn.Module:
    return nn.ModuleDict({f"{prefix}{n}": nn.Linear(width, width) for n in range(count)})


def refused(model: nn.Module, saved: nn.Module) -> str:
    with pytest.raises(MismatchError) as caught:
        match_model(model_tensors(model), records(saved), "iteration_00000005", [])
    text = str(caught.value)
    assert len(text.splitlines()) < 40
    assert len(text) < 4000
    assert "nothing was loaded" in text
    return text


def test_a_renamed_prefix_is_seen_through() -> None:
    text = refused(layers(300, "block"), layers(300, "layer"))
    assert "600 tensors of the model are not in the checkpoint" in text
    assert "600 tensors of the checkpoint are not in the model" in text
    assert "and 595 more" in text
    assert "prefix: 'layer" in text


def test_an_extra_layer_either_way() -> None:
    assert "more layers" in refused(layers(3), layers(2))
    assert "layer2.weight" in refused(layers(3), layers(2))
    assert "fewer layers" in refused(layers(2), layers(3))


def test_a_changed_shape_shows_both() -> None:
    text = refused(layers(300, width=3), layers(300, width=2))
    assert "F32 [2, 2] in the checkpoint, F32 [3, 3] in the model" in text
    assert "larger sizes" in text
    assert "and 595 more" in text


def test_another_dtype_is_not_told_as_another_size() -> None:
    counts = [nn.Module(), nn.Module()]
    for module, dtype in zip(counts, (torch.int32, torch.int64), strict=True):
        module.register_buffer("count", torch.zeros(2, dtype=dtype))
    text = refused(*counts)
    assert "I64 [2] in the checkpoint, I32 [2] in the model" in text
    assert "dtypes that were saved" in text


class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2, bias=False)
        self.b = nn.Linear(2, 2, bias=False)
        if tied:
            self.b.weight = self.a.weight


def test_tied_into_tied_and_into_separate() -> None:
    tied, separate = Pair(True), Pair(False)
    assert [f.name for f in match_model(model_tensors(tied), records(tied), "x", [])] == ["a.weight"]
    fills = match_model(model_tensors(separate), records(tied), "x", [])
    assert [f.name for f in fills] == ["a.weight", "a.weight"]
    assert len({f.pieces[0].tensor.data_ptr() for f in fills}) == 2


def test_separate_into_tied_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"a\.weight, b\.weight"):
        match_model(model_tensors(Pair(True)), records(Pair(False)), "x", [])


def test_a_tie_known_by_either_name_is_found() -> None:
    saved = {"b.weight": TensorRecord("F32", (2, 2), [])}
    (fill,) = match_model(model_tensors(Pair(True)), saved, "x", [])
    assert fill.name == "b.weight"


@pytest.mark.parametrize(
    ("saved", "here", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.float64, True),
        (torch.int64, torch.float32, False),
        (torch.int32, torch.int64, False),
        (torch.bool, torch.uint8, False),
        (torch.complex64, torch.float32, False),
        (torch.complex64, torch.complex128, False),
        (torch.float8_e4m3fn, torch.float32, False),
        (torch.float8_e4m3fnuz, torch.uint8, False),
    ],
)
def test_floats_are_converted_and_said_so_and_nothing_else_is(
    saved: torch.dtype, here: torch.dtype, fits: bool
) -> None:
    def of(dtype: torch.dtype) -> Tensor:
        return torch.zeros(2, 2, dtype=dtype)

    described = describe("model", "x", of(saved))
    known = {"x": TensorRecord(described.dtype, described.shape, [], described.logical)}
    notes: list[str] = []
    if fits:
        match_model([describe("model", "x", of(here))], known, "here", notes)
        assert "1 tensors were converted: x" in notes[0]
    else:
        with pytest.raises(MismatchError, match="x: "):
            match_model([describe("model", "x", of(here))], known, "here", notes)

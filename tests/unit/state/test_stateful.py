"""Registered objects, captured random streams, and tensors as boxed pieces."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import Tensor, nn

from perdure.errors import UnsupportedStateError
from perdure.state.random import RandomState, seed_all, seed_streams, training_key
from perdure.state.shards import describe
from perdure.state.stateful import check_registered, collect, rebuild


def again(name: str, state: Any) -> Any:
    tree, tensors = collect(name, state)
    values: dict[str, Tensor] = {t.name: t.pieces[0].tensor.clone() for t in tensors}
    assert len(values) == len(tensors)
    return rebuild(msgspec.json.decode(msgspec.json.encode(tree)), lambda key: values[key], name)


def test_paths_that_meet_stay_apart() -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "b#2": torch.tensor(3)}, "a.b#2": torch.tensor(4)}
    found = again("ema", state)
    assert (found["a.b"], found["a"]["b"], found["a"]["b#2"], found["a.b#2"]) == (1, 2, 3, 4)


def test_a_state_dict_of_a_module_comes_back() -> None:
    net = nn.Linear(2, 3)
    other = nn.Linear(2, 3)
    other.load_state_dict(again("ema", net.state_dict()))
    assert torch.equal(other.weight, net.weight)


@pytest.mark.parametrize("name", ["", "a@b", "model", "model.x", "ema.deep"])
def test_names_that_could_be_taken_for_others_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedStateError, match="cannot be a registered name"):
        check_registered({"ema": nn.Linear(1, 1), name: nn.Linear(1, 1)})


def test_usual_names_are_welcome() -> None:
    check_registered(
        {"ema": nn.Linear(1, 1), "ema2": nn.Linear(1, 1), "model_ema": nn.Linear(1, 1), "a/b ü": RandomState()}
    )


@pytest.mark.parametrize("value", [object(), 3, {"a": 1}])
def test_objects_without_state_are_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match="counter"):
        check_registered({"counter": value})


def test_what_an_object_holds_is_refused_by_path() -> None:
    with pytest.raises(UnsupportedStateError, match=r"ema\.a\.0"):
        collect("ema", {"a": [object()]})
    with pytest.raises(UnsupportedStateError, match=r"ema\.a\.0"):
        collect("ema", {"a": [torch.eye(2).to_sparse()]})


def test_a_lazy_conjugate_is_saved_as_what_it_means() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    (tensor,) = collect("x", {"z": z.conj()})[1]
    assert torch.equal(torch.view_as_complex(tensor.pieces[0].tensor), z.conj().resolve_conj())


def test_random_streams_come_back_through_json() -> None:
    random.gauss(0, 1)
    numpy.random.randn()
    state = again("random", RandomState().state_dict())

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand(), float(torch.randn(()))]

    expected = draw()
    draw()
    RandomState().load_state_dict(state)
    assert draw() == expected


def test_a_captured_state_does_not_move_with_the_stream() -> None:
    state = RandomState().state_dict()
    before = [t.clone() for t in (state["python"][1], state["numpy"][1], state["torch"])]
    torch.randn(3), numpy.random.rand(1000), [random.random() for _ in range(1000)]
    assert all(
        torch.equal(a, b) for a, b in zip(before, (state["python"][1], state["numpy"][1], state["torch"]), strict=True)
    )


def test_seeds_depend_on_every_part_and_its_place() -> None:
    seeds = {training_key(*parts) for parts in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (1 << 64, 1), (1, 2, 3)]}
    assert len(seeds) >= 8
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    seed_streams(7, 3)
    first = torch.randn(3)
    seed_streams(7, 3)
    assert torch.equal(torch.randn(3), first)
    seed_all(7)
    drawn = (random.random(), numpy.random.rand(), float(torch.rand(())))
    seed_all(7)
    assert drawn == (random.random(), numpy.random.rand(), float(torch.rand(())))


@pytest.mark.parametrize(
    ("dtype", "stored", "shape"),
    [
        (torch.float32, "F32", (2, 3)),
        (torch.complex64, "F32", (2, 3, 2)),
        (torch.complex128, "F64", (2, 3, 2)),
        (torch.float8_e4m3fnuz, "U8", (2, 3)),
        (torch.float8_e4m3fn, "F8_E4M3", (2, 3)),
    ],
)
def test_how_a_tensor_lies_in_a_file(dtype: torch.dtype, stored: str, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    named = describe("model", "x", tensor)
    assert (named.dtype, named.shape) == (stored, shape)
    assert named.pieces[0].tensor.data_ptr() == tensor.data_ptr()
    assert tuple(named.pieces[0].tensor.shape) == named.pieces[0].box.shape == shape

"""Values come back as what they were, of the same kinds, through real JSON bytes; all else is refused by path."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from perdure.errors import DamagedCheckpointError, UnsupportedStateError
from perdure.state.jsonable import from_json, to_json


def round_trip(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}

    def keep(tensor: Tensor, where: str) -> Any:
        tensors[str(len(tensors))] = tensor
        return {"$tensor": str(len(tensors) - 1)}

    text = msgspec.json.encode(to_json(value, "state", keep))
    return from_json(msgspec.json.decode(text), lambda reference: tensors[reference])


def same(a: Any, b: Any) -> bool:
    """Equal in value and kind, at every depth; NaN is NaN, and -0.0 isn't 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):  # a NaN is a member by identity only, so each looks for its like
        return len(a) == len(b) and all(any(same(v, w) for w in b) for v in a)
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["$int", "$tuple", "$dict", "$"]),
    st.binary(max_size=8),
    st.complex_numbers(),
)
hashable = st.one_of(scalars, st.tuples(scalars, scalars))
values = st.recursive(
    st.one_of(scalars, st.frozensets(scalars, max_size=3), st.sets(st.integers(), max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3),
        st.dictionaries(hashable, inner, max_size=3),
        st.dictionaries(st.sampled_from(["$int", "$tensor", "$dict"]), inner, max_size=1),
        st.dictionaries(st.integers(), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(values)
@example(frozenset([math.nan]))
def test_any_nesting_comes_back(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        2**53,
        -(2**53),
        1 << 20_000,
        1e16,
        5e-324,
        {1: {2: ()}},
        {None: 1, True: 2, 1.5: 3, (1, (2,)): 4},
        {"$tensor": "x"},
        {"$int": "1"},
        {},
        [],
        (),
        set(),
        frozenset(),
        b"",
        Counter(a=2, b=-1),
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {3: 4}),
        OrderedDict([("b", 1), ("a", 2)]),
        torch.float32,
        torch.float8_e4m3fn,
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        torch.ones(2, dtype=torch.bfloat16),
        [torch.tensor(3), (torch.tensor([]),)],
    ],
    ids=lambda v: f"{type(v).__name__}",
)
def test_kinds_are_kept(value: Any) -> None:
    assert same(round_trip(value), value)


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "uint64", "float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3)])
def test_numpy_arrays_and_scalars(name: str, shape: tuple[int, ...]) -> None:
    array = numpy.arange(math.prod(shape)).reshape(shape).astype(name)
    assert same(round_trip(array), array)
    assert same(round_trip(array.T), array.T)
    scalar = numpy.ones((), dtype=name)[()]
    assert same(round_trip({"x": scalar}), {"x": scalar})


def test_a_numpy_float_is_not_a_float() -> None:
    assert same(round_trip(numpy.float64(0.1)), numpy.float64(0.1))
    assert type(round_trip(numpy.float32("nan"))) is numpy.float32


class Named(tuple):
    __slots__ = ()


class Text(str):
    __slots__ = ()


class Mine(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        Named((1,)),
        Text("a"),
        Mine(),
        defaultdict(lambda: 1),
        bytearray(b"x"),
        range(3),
        numpy.datetime64("2020-01-01"),
        numpy.array(["a"]),
        numpy.array([None]),
        numpy.ones(2, dtype=">f8"),
        numpy.longdouble(1),
        numpy.ma.masked_array([1.0, 2.0], mask=[True, False]),
        numpy.ones(2).view(numpy.recarray),
        torch.Generator(),
        "\ud800",
        {"\ud800": 1},
    ],
    ids=lambda v: type(v).__name__,
)
def test_everything_else_is_refused_where_it_is(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\.a\.1"):
        round_trip({"a": [0, value]})


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedStateError, match="nested"):
        round_trip(endless)
    mapping: dict[Any, Any] = {}
    mapping[1] = [mapping, mapping]
    with pytest.raises(UnsupportedStateError, match="nested"):
        round_trip(mapping)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"a": v}])
def test_deep_nesting_within_the_limit_comes_back(wrap: Any) -> None:
    value: Any = 1
    for _ in range(100):
        value = wrap(value)
    assert same(round_trip(value), value)


TAGS = [
    *("$int", "$float", "$tuple", "$bytes", "$complex", "$set", "$frozenset", "$dtype", "$size", "$device", "$dict"),
    *("$array", "$scalar", "$tensor", "$ordered", "$counter", "$default", "$x", "a"),
]
hostile = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.floats() | st.just("9" * 5000),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(TAGS),
            inner,
            max_size=1,
        )
    ),
    max_leaves=6,
)


@given(hostile)
def test_hostile_trees_are_values_or_damage(tree: Any) -> None:
    tensors = {"a": torch.ones(2)}
    try:
        from_json(tree, lambda reference: tensors[reference])
    except DamagedCheckpointError:
        return


def test_an_unknown_kind_is_damage() -> None:
    with pytest.raises(DamagedCheckpointError, match="unknown kind"):
        from_json({"$future": 1}, lambda reference: torch.ones(1))
    tree: Any = 1
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(DamagedCheckpointError, match="deep"):
        from_json(tree, lambda reference: torch.ones(1))

"""A weight directory's index and headers, read into our record; and what is refused."""

from __future__ import annotations

import json

import pytest

from perdure.errors import DamagedCheckpointError
from perdure.format.huggingface import from_headers, index_name, weight_files
from perdure.format.safetensors import Entry, Header


def header(*names: str) -> Header:
    return Header(0, {name: Entry("BF16", (2, 3), 0, 12) for name in names}, {})


def index(places: object) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()


def test_tensors_of_many_files_become_one_record() -> None:
    places = weight_files(index({"a": "1.safetensors", "b": "2.safetensors"}), "i")
    record = from_headers({"1.safetensors": header("a"), "2.safetensors": header("b")}, "d", places)
    assert [record.files[t.shards[0].file].name for t in record.model.values()] == ["1.safetensors", "2.safetensors"]
    assert record.training == {}
    assert not record.optimizer


def test_the_plain_index_comes_before_a_prefixed_one() -> None:
    names = ["config.json", "x.model.safetensors.index.json", "model.safetensors.index.json"]
    assert index_name(names) == "model.safetensors.index.json"
    assert index_name(["config.json"]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        index({}),
        index([]),
        index({"a": 3}),
        index({"a": "../1.safetensors"}),
        index({"a": "pytorch_model.bin"}),
    ],
)
def test_a_hostile_index_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        weight_files(data, "i")


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"a": "1.safetensors"}, "does not name it"),
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}, "not there"),
        ({"a": "1.safetensors", "b": "1.safetensors"}, "the index says"),
        (None, None),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_damage(places: dict[str, str] | None, said: str | None) -> None:
    files = {"1.safetensors": header("a"), "2.safetensors": header("b" if places else "a")}
    with pytest.raises(DamagedCheckpointError, match=said or "in two files"):
        from_headers(files, "d", places)

"""Their metadata read into our record: every expected value of every fixture, and what is refused."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from perdure.catalog.foreign import read_foreign
from perdure.catalog.read import ShardFiles
from perdure.errors import DamagedCheckpointError
from perdure.format.box import runs, whole
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata
from perdure.format.mindformers import check_resumable, from_headers, from_metadata, is_theirs
from perdure.format.safetensors import Entry, Header
from perdure.storage.local import LocalStorage

FIXTURES = Path(__file__).parents[2] / "golden" / "mindformers"
_FORMATS = {"F32": "f", "I64": "q", "I32": "i"}


def iterations() -> list[tuple[str, str]]:
    found = []
    for file in sorted(FIXTURES.glob("*.expected.json")):
        folder = file.name.removesuffix(".expected.json")
        found += [(folder, each.name) for each in sorted((FIXTURES / folder).glob("iteration_*"))]
    return found


def expected(folder: str, iteration: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FIXTURES / f"{folder}.expected.json").read_text())
    return record["iterations"][iteration] if "iterations" in record else record


def assembled(files: ShardFiles, metadata: CheckpointMetadata, section: Any, name: str) -> bytes:
    """A tensor's bytes, put together piece by piece without the engine."""
    record = metadata.section(section)[name]
    size = BY_SAFETENSORS[record.dtype].itemsize
    data = bytearray(record.nbytes)
    for shard in record.shards:
        reader, offset = files.locate(section, name, shard)
        piece = bytearray(shard.box.numel * size)
        reader.pread_into(memoryview(piece), offset)
        at = 0
        for start, count in runs(whole(record.shape), shard.box):
            data[start * size : (start + count) * size] = piece[at : at + count * size]
            at += count * size
    return bytes(data)


def numbers(data: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return list(struct.unpack(f"<{len(data) // BY_SAFETENSORS[dtype].itemsize}{_FORMATS[dtype]}", data))


@pytest.mark.parametrize(("folder", "iteration"), iterations())
def test_every_expected_value_is_read(folder: str, iteration: str) -> None:
    truth = expected(folder, iteration)
    with LocalStorage().open_directory(str(FIXTURES / folder / iteration)) as directory:
        metadata, common, _ = read_foreign(directory, "mindformers")
        assert common is not None
        for key, value in truth["common"].items():
            assert getattr(common, key) == (0 if value is None else value)
        with ShardFiles(directory, metadata, None) as files:
            for name, want in truth["tensors"].items():
                section: Any = {"model": "model", "opt": "optimizer"}[want["side"]]
                ours = "adam_step" if name == "global_step" else name
                record = metadata.section(section)[ours]
                data = assembled(files, metadata, section, ours)
                assert (record.dtype, list(record.shape)) == (want["dtype"], want["shape"]), name
                assert hashlib.sha256(data).hexdigest() == want["sha256"], name
                if "values" in want:
                    assert numbers(data, record.dtype) == want["values"], name
    assert len(metadata.model) + len(metadata.optimizer) == len(truth["tensors"])
    check_resumable(metadata, folder)


@pytest.mark.parametrize("folder", ["dist4_fsdp2_tp2", "dist4_fsdp2_tp2_dedup", "dist8_fsdp4_tp2"])
def test_each_file_is_known_with_its_pieces(folder: str) -> None:
    truth = expected(folder, "iteration_00000006")
    data = (FIXTURES / folder / "iteration_00000006" / "metadata.json").read_bytes()
    metadata = from_metadata(data)
    found: dict[str, dict[str, Any]] = {}
    for _, name, record in metadata.tensors():
        for shard in record.shards:
            entry = {"dtype": record.dtype, "shape": list(shard.shape)}
            found.setdefault(metadata.files[shard.file].name, {})[shard.key or name] = entry
    assert found == truth["files"]


def test_a_constant_rate_is_set_aside_and_never_a_setting() -> None:
    data = (FIXTURES / "dist4_fsdp2_tp2" / "iteration_00000006" / "metadata.json").read_bytes()
    described = from_metadata(data).training["optimizer"]
    assert described["set_aside"] == ["learning_rate"]
    assert [group["settings"] for group in described["groups"]] == [{}]
    assert described["type"] == "AdamW"


# ---- what is refused


def table() -> dict[str, Any]:
    slices = [{"global_offset": [n], "local_shape": [2, 3]} for n in (0, 1)]
    return {
        "state_dict_metadata": {
            "w": {
                "properties": {"dtype": "Float32"},
                "global_shape": [4, 3],
                "axis_fragmentations": [2, 1],
                "layout": None,
                "chunk": slices,
            }
        },
        "storage_data": {f"('w', ({n},))": [{"file_name": f"t-model-000000{n}-0000002.safetensors"}] for n in (0, 1)},
    }


def changed(*path: Any, value: Any) -> bytes:
    record = table()
    at = record
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(record).encode()


def test_the_plain_table_is_read() -> None:
    data = json.dumps(table()).encode()
    record = from_metadata(data).model["w"]
    assert is_theirs(data)
    assert [(s.offset, s.shape) for s in record.shards] == [((0, 0), (2, 3)), ((2, 0), (2, 3))]


W = ("state_dict_metadata", "w")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'{"state_dict_metadata": [], "storage_data": {}}',
        changed(*W, value=7),
        changed(*W, "properties", value=[]),
        changed(*W, "properties", "dtype", value="Float99"),
        changed(*W, "properties", "dtype", value=["Float32"]),
        changed(*W, "global_shape", value=[4, -3]),
        changed(*W, "global_shape", value=[4, True]),
        changed(*W, "global_shape", value=[1 << 61, 3]),
        changed(*W, "global_shape", value="43"),
        changed(*W, "axis_fragmentations", value=[2]),
        changed(*W, "axis_fragmentations", value=[0, 1]),
        changed(*W, "axis_fragmentations", value=[4, 1]),
        changed(*W, "chunk", value=[]),
        changed(*W, "chunk", value={"0": 1}),
        changed(*W, "chunk", 1, value={"global_offset": [1]}),
        changed(*W, "chunk", 1, "global_offset", value=[7]),
        changed(*W, "chunk", 1, "global_offset", value=[0, 1]),
        changed(*W, "chunk", 1, "global_offset", value=[1.5]),
        changed(*W, "chunk", 1, "local_shape", value=[3, 3]),
        changed("storage_data", "('w', (1,))", value=None),
        changed("storage_data", "('w', (1,))", value=[]),
        changed("storage_data", "('w', (1,))", value=[{"file_name": 3}]),
        changed("storage_data", "('w', (1,))", value=[{"file_name": "../w.safetensors"}]),
        changed("storage_data", "('w', (1,))", value=[{"file_name": "t-opt-0000000-0000001.safetensors"}]),
        changed("storage_data", "('w', (2,))", value=[{"file_name": "t-model-0000000-0000001.safetensors"}]),
        changed("storage_data", "('v', (0,))", value=[{"file_name": "t-model-0000000-0000001.safetensors"}]),
        changed("storage_data", "__import__('os')", value=[{"file_name": "a"}]),
        changed("storage_data", "('w', (-1,))", value=[{"file_name": "a"}]),
        changed("storage_data", "(" * 3000, value=[{"file_name": "a"}]),
        changed("storage_data", "('w', (0,),)", value=[{"file_name": "t-model-0000000-0000001.safetensors"}]),
    ],
)
def test_a_hostile_table_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        from_metadata(data)


def header(text: dict[str, str] | None = None, **shapes: tuple[int, ...]) -> Header:
    entries, at = {}, 0
    for name, shape in shapes.items():
        entries[name.replace("__", ".")] = Entry("F32", shape, at, at)
    return Header(0, entries, text or {"format": "ms"})


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "no model file"),
        ({"t-opt-0000000-0000001.safetensors": header(adam_m__w=(2,))}, "no model file"),
        ({"t-model-0000000-0000002.safetensors": header(w=(2,))}, "no metadata.json"),
        ({"a.safetensors": header(w=(2,)), "b.safetensors": header(w=(2,))}, "in two files"),
        ({"a.safetensors": header({"format": "pt", "save": "a-1"}, w=(2,))}, "written by perdure"),
    ],
)
def test_files_that_do_not_fit_together_are_damage(headers: dict[str, Header], said: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=said):
        from_headers(headers, "somewhere")


STATE = {"adam_m__w": (2,), "adam_v__w": (2,), "global_step": (1,)}


@pytest.mark.parametrize("lost", STATE)
def test_a_lost_part_of_the_optimizer_is_named(lost: str) -> None:
    kept = {name: shape for name, shape in STATE.items() if name != lost}
    headers = {
        "t-model-0000000-0000001.safetensors": header(w=(2,)),
        "t-opt-0000000-0000001.safetensors": header(**kept),
    }
    with pytest.raises(DamagedCheckpointError, match=lost.replace("__", ".")):
        check_resumable(from_headers(headers, "somewhere"), "somewhere")


def test_another_optimizers_state_is_not_taken_for_adamw() -> None:
    headers = {
        "t-model-0000000-0000001.safetensors": header(w=(2,)),
        "t-opt-0000000-0000001.safetensors": header(**STATE, muon_m__u=(2, 2)),
    }
    assert from_headers(headers, "somewhere").training["optimizer"]["type"] != "AdamW"

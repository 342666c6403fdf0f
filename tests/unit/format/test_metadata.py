"""metadata.json: what makes sense comes back; everything else is damage, whatever it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import DamagedCheckpointError
from perdure.format.digest import BLOCK, digest_bytes, shard_digest
from perdure.format.metadata import CheckpointMetadata, FileRecord, ShardRecord, TensorRecord

BLOCKS = (digest_bytes(b"1"), digest_bytes(b"2"))
DIGEST = digest_bytes(b"x")


def sound() -> CheckpointMetadata:
    return CheckpointMetadata(
        training={"seed": 1, "optimizer": {"type": "AdamW"}},
        files=[
            FileRecord("checkpoint-model-0000000-0000001.safetensors", 1 << 20, DIGEST),
            FileRecord("checkpoint-opt-0000000-0000001.safetensors", 1 << 20, DIGEST),
        ],
        model={
            "a/ü\"'": TensorRecord(
                "F32",
                (4, 3),
                [ShardRecord(0, (0, 0), (4, 2), DIGEST), ShardRecord(0, (0, 2), (4, 1), DIGEST, (), "k#1")],
            ),
            "big": TensorRecord(
                "U8", (BLOCK + 1,), [ShardRecord(0, (0,), (BLOCK + 1,), shard_digest(list(BLOCKS)), BLOCKS)]
            ),
            "scalar": TensorRecord("BF16", (), [ShardRecord(0, (), (), DIGEST)], "", ("tied",)),
            "empty": TensorRecord("I64", (0, 3), []),
            "z": TensorRecord("F32", (2, 2), [ShardRecord(0, (0, 0), (2, 2), DIGEST)], "complex64"),
        },
        optimizer={"adam_m.z": TensorRecord("F32", (2,), [ShardRecord(1, (0,), (2,), DIGEST)])},
    )


RAW: dict[str, Any] = json.loads(sound().encode())


def damage(metadata: CheckpointMetadata) -> str:
    with pytest.raises(DamagedCheckpointError) as caught:
        metadata.check()
    return str(caught.value)


def test_a_sound_record_comes_back() -> None:
    found = CheckpointMetadata.decode(sound().encode())
    found.check()
    assert found == sound()


def first(metadata: CheckpointMetadata) -> TensorRecord:
    return metadata.model["a/ü\"'"]


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ([ShardRecord(0, (0, 0), (4, 2), DIGEST)], "in no shard"),
        ([ShardRecord(0, (0, 0), (4, 2), DIGEST), ShardRecord(0, (0, 1), (4, 2), DIGEST)], "overlap"),
        ([ShardRecord(0, (1, 0), (4, 3), DIGEST)], "outside"),
        ([ShardRecord(7, (0, 0), (4, 3), DIGEST)], "only|file 7"),
        ([ShardRecord(1, (0, 0), (4, 3), DIGEST)], "not a model file"),
        ([ShardRecord(0, (0,), (12,), DIGEST)], "dimensions"),
        ([ShardRecord(0, (0, 0), (0,), DIGEST), ShardRecord(0, (0, 0), (4, 3), DIGEST)], "dimensions"),
        ([ShardRecord(0, (0, 0), (4, 3), "md5:00")], "malformed"),
        ([ShardRecord(0, (0, 0), (4, 3), DIGEST, (DIGEST,))], "block digests"),
    ],
)
def test_shards_that_make_no_tensor(shards: list[ShardRecord], what: str) -> None:
    metadata = sound()
    first(metadata).shards[:] = shards
    with pytest.raises(DamagedCheckpointError, match=what):
        metadata.check()


def test_block_digests_must_give_the_shards_digest() -> None:
    metadata = sound()
    metadata.model["big"].shards[0] = ShardRecord(0, (0,), (BLOCK + 1,), DIGEST, BLOCKS)
    assert "don't give" in damage(metadata)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "a\0b", "checkpoint-opt-0000000-0000001.safetensors"])
def test_file_names_that_lead_elsewhere_or_repeat(name: str) -> None:
    metadata = sound()
    metadata.files[0] = FileRecord(name, 1, DIGEST)
    assert "files" in damage(metadata)


def test_a_file_name_of_any_length_is_no_other_error() -> None:
    metadata = sound()
    metadata.files[0] = FileRecord("a-model-" + "9" * 5000 + "-0000001.safetensors", 1, DIGEST)
    metadata.check()


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (TensorRecord("F99", (2,), []), "unknown dtype"),
        (TensorRecord("F32", (1 << 60, 1 << 60), []), "absurd"),
        (TensorRecord("F32", (0, 1 << 60, 1 << 60), []), "absurd"),
        (TensorRecord("F32", (1,) * 65, [ShardRecord(0, (0,) * 65, (1,) * 65, DIGEST)]), "absurd"),
        (TensorRecord("F32", (2,), [ShardRecord(0, (0,), (2,), DIGEST)], "complex128"), "logical"),
        (TensorRecord("F32", (3,), [ShardRecord(0, (0,), (3,), DIGEST)], "complex64"), "logical"),
        (TensorRecord("F32", (2,), [ShardRecord(0, (0,), (2,), DIGEST)], "nonsense"), "logical"),
        (TensorRecord("F32", (2,), [ShardRecord(0, (0,), (2,), DIGEST)], "", ("big",)), "twice"),
    ],
)
def test_tensors_that_cannot_be(record: TensorRecord, what: str) -> None:
    metadata = sound()
    metadata.model["new"] = record
    assert what in damage(metadata)
    with pytest.raises(DamagedCheckpointError) as caught:
        metadata.check("here")
    assert caught.value.tensor == "new"
    assert "here: model: new" in str(caught.value)


def test_a_replica_of_a_box_counts_once() -> None:
    metadata = sound()
    first(metadata).shards.append(first(metadata).shards[0])
    metadata.check()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, v in inner for p in places(v, (*path, key)))]


PLACES = [p for p in places(RAW) if p]
hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([1 << 60, (1 << 60) + 1, -(1 << 63), 1 << 64, 10**30, 1.5, "F32", "", "complex64", DIGEST, "../x"]),
    st.text(max_size=6),
    st.lists(st.integers(0, 1 << 60), max_size=4),
    st.just({}),
    st.just([[0, [0], [1], "", [], ""]]),
    st.sampled_from(sorted(RAW["model"].values(), key=str)),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(["set", "drop", "double"]), hostile), max_size=3))
def test_any_mutation_is_read_or_damage(changes: list[tuple[tuple[Any, ...], str, Any]]) -> None:
    raw = copy.deepcopy(RAW)
    for path, action, value in changes:
        try:
            holder = raw
            for key in path[:-1]:
                holder = holder[key]
            if action == "set":
                holder[path[-1]] = copy.deepcopy(value)
            elif action == "drop":
                del holder[path[-1]]
            else:
                holder.append(copy.deepcopy(holder[path[-1]]))  # type: ignore[attr-defined]
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    found: DamagedCheckpointError | None = None
    try:
        CheckpointMetadata.decode(json.dumps(raw).encode(), "here").check("here")
    except DamagedCheckpointError as error:
        found = error
    assert found is None or ("here" in str(found) and len(str(found)) < 1000)


@given(st.binary(max_size=40), st.integers(0, 10**6))
def test_any_bytes_inside_are_read_or_damage(data: bytes, at: int) -> None:
    text = sound().encode()
    at %= len(text)
    try:
        CheckpointMetadata.decode(text[:at] + data + text[at + len(data) :]).check()
    except DamagedCheckpointError:
        return


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"model":' * 100_000, b"", b"\xff\xfe", b"null", b'{"files":{}}'])
def test_absurd_texts_are_damage(text: bytes) -> None:
    with pytest.raises(DamagedCheckpointError):
        CheckpointMetadata.decode(text)


@pytest.mark.parametrize(
    ("where", "value", "what"),
    [
        (("groups",), None, "groups"),
        (("groups", 0, "params"), "weight", "params"),
        (("groups", 0, "params", 0), 3, "params"),
        (("groups", 0, "settings"), [], "settings"),
        (("keys", "step"), 1, "keys"),
        (("values", "$shared_step"), {"kind": "host"}, "shared_step"),
        (("values", "$without_step"), "a", "without_step"),
        (("values", "step"), "host", "step"),
        (("values", "step", "kind"), "hosts", "kind"),
        (("values", "step", "kind"), "int", "is no number of the kind 'int'"),
        (("values", "step", "kind"), "json", "no value"),
        (("dormant",), {}, "dormant"),
    ],
)
def test_what_a_file_says_of_an_optimizer_that_no_save_writes(where: tuple[Any, ...], value: Any, what: str) -> None:
    described: dict[str, Any] = {
        "type": "AdamW",
        "keys": {"step": "step"},
        "groups": [{"params": ["weight"], "settings": {"lr": 0.1}}],
        "values": {"$shared_step": "step", "$without_step": [], "step": {"kind": "host"}},
        "dormant": [],
    }
    metadata = CheckpointMetadata(training={"optimizer": described})
    metadata.optimizer["step"] = TensorRecord("F32", (), [])
    held: Any = described
    for key in where[:-1]:
        held = held[key]
    held[where[-1]] = value
    assert what in damage(metadata)

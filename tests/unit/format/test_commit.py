"""commit.json and common.json: no flipped bit is believed, nothing hostile escapes as another error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import DamagedCheckpointError, FormatTooNewError
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.digest import digest_bytes

RECORD = CommitRecord(
    iteration=20,
    sequence=2,
    lineage="ab12",
    parent=1,
    attempt="cd34",
    ranks=1,
    time=1700000000.5,
    writer="perdure ü",
    size=123456,
    consumed_samples=640,
    metadata_digest=digest_bytes(b"m"),
    common_digest=digest_bytes(b"c"),
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def signed(fields: dict[str, Any]) -> bytes:
    """Any fields with a digest that holds."""
    head = json.dumps(fields, separators=(",", ":")).encode()[:-1]
    return head + b',"digest":"' + digest_bytes(head).encode() + b'"}'


def fields() -> dict[str, Any]:
    return {k: v for k, v in json.loads(RECORD.encode()).items() if k != "digest"}


def test_a_record_comes_back() -> None:
    found = CommitRecord.decode(RECORD.encode())
    assert found.encode() == RECORD.encode()
    assert (found.iteration, found.size, found.writer, found.healthy) == (20, 123456, "perdure ü", True)
    assert json.loads(RECORD.encode())["bytes"] == 123456


def test_every_flipped_bit_is_damage() -> None:
    data = bytearray(RECORD.encode())
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(DamagedCheckpointError):
                CommitRecord.decode(bytes(data))
            data[at] ^= 1 << bit


def test_every_cut_and_every_addition_is_damage() -> None:
    data = RECORD.encode()
    for broken in [*(data[:n] for n in range(len(data))), *(data[n:] for n in range(1, len(data))), data + b"\n"]:
        with pytest.raises(DamagedCheckpointError):
            CommitRecord.decode(broken)


def test_a_newer_version_is_believed_only_with_its_digest() -> None:
    newer = signed({**fields(), "version": 2, "news": 1})
    with pytest.raises(FormatTooNewError) as caught:
        CommitRecord.decode(newer)
    assert caught.value.exit_code == 11
    assert "version 2" in str(caught.value)
    with pytest.raises(DamagedCheckpointError):
        CommitRecord.decode(newer.replace(b'"version":2', b'"version":3'))


@given(st.sampled_from(sorted(fields())), json_values)
def test_a_signed_record_of_any_content_is_read_or_damage(key: str, value: Any) -> None:
    try:
        found = CommitRecord.decode(signed({**fields(), key: value}))
    except (DamagedCheckpointError, FormatTooNewError):
        return
    assert 0 <= found.iteration <= 10**18
    assert found.sequence >= 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("iteration", -1), ("iteration", 10**19), ("sequence", 0), ("ranks", 0), ("format", "other"), ("version", 0)],
)
def test_senseless_values_are_damage(key: str, value: Any) -> None:
    with pytest.raises(DamagedCheckpointError):
        CommitRecord.decode(signed({**fields(), key: value}))


@given(
    st.builds(
        CommonInfo,
        epoch_num=st.integers(0, 2**60),
        step_num=st.integers(0, 2**60),
        global_step=st.integers(0, 2**60),
        loss_scale=st.floats(2.0**-60, 2.0**100),
        global_batch_size=st.integers(0, 2**40),
        consumed_samples=st.integers(0, 2**60),
        ckpt_status=st.sampled_from([0, 1]),
    )
)
def test_progress_comes_back_and_has_the_seven_keys(common: CommonInfo) -> None:
    assert CommonInfo.decode(common.encode()) == common
    assert list(json.loads(common.encode())) == (
        ["epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size", "consumed_samples", "ckpt_status"]
    )


def test_a_common_json_of_others() -> None:
    theirs = {"global_step": 7, "global_batch_size": 4, "loss_scale": None, "epoch_num": None, "news": [1]}
    found = CommonInfo.decode(json.dumps(theirs).encode())
    assert (found.global_step, found.consumed_samples, found.loss_scale, found.ckpt_status) == (7, 28, 1.0, 0)
    assert CommonInfo.decode(b'{"global_step":7,"global_batch_size":4,"consumed_samples":null}').consumed_samples == 28
    assert CommonInfo.decode(b'{"global_step":7,"global_batch_size":4,"consumed_samples":5}').consumed_samples == 5
    assert CommonInfo.decode(b'{"global_step":7,"ckpt_status":1}').ckpt_status == 1


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"global_step": -1}', '{"global_step": true}', '{"global_step": 1.0}', "{", "\xff"]
    + ['{"global_step": 1' + "0" * n + "}" for n in (25, 400, 5000)]
    + [f'{{"global_step": 1, "loss_scale": {v}}}' for v in ("0", "-1", "true", '"1"', "1e999", "1" + "0" * 400, "[]")]
    + ['{"global_step": 4611686018427387903, "global_batch_size": 2}', "[" * 100_000, '{"a":' * 100_000],
)
def test_a_senseless_common_json_is_damage(text: str) -> None:
    with pytest.raises(DamagedCheckpointError) as caught:
        CommonInfo.decode(text.encode("latin-1"), "here/common.json")
    assert "here/common.json" in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.dictionaries(st.sampled_from([*CommonInfo.__struct_fields__, "x"]), json_values))
def test_any_object_is_read_or_damage(raw: dict[str, Any]) -> None:
    try:
        found = CommonInfo.decode(json.dumps(raw).encode())
    except DamagedCheckpointError:
        return
    assert min(found.global_step, found.consumed_samples, found.global_batch_size) >= 0
    assert max(found.global_step, found.consumed_samples) < 1 << 62


@given(st.binary())
def test_any_bytes_are_read_or_damage(data: bytes) -> None:
    for kind in (CommonInfo, CommitRecord):
        try:
            kind.decode(data)
        except DamagedCheckpointError:
            continue

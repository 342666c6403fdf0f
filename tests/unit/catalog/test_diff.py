"""Two checkpoints compared across different cuts, and the fingerprint that no cut changes."""

from __future__ import annotations

import itertools
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoints import Tensor, build_checkpoint, floats

from perdure.catalog.diff import diff
from perdure.catalog.fingerprint import fingerprint, total
from perdure.catalog.root import Root
from perdure.format.box import Box

ROWS = (Box((0, 0), (2, 6)), Box((2, 0), (2, 6)))
COLUMNS = (Box((0, 0), (4, 1)), Box((0, 1), (4, 3)), Box((0, 4), (4, 2)))
VALUES = [float(i) / 3 for i in range(24)]


def saved(path: Path, tensors: dict[str, Tensor], iteration: int = 1, section: str = "model") -> str:
    path.mkdir()
    build_checkpoint(Root(path), iteration, state={section: tensors})  # type: ignore[dict-item]
    return str(path)


@pytest.mark.parametrize("cuts", [(), ROWS, COLUMNS])
def test_the_same_values_are_equal_however_they_are_cut(tmp_path: Path, cuts: tuple[Box, ...]) -> None:
    a = saved(tmp_path / "a", {"w": floats(*VALUES, shape=(4, 6), cuts=ROWS)})
    b = saved(tmp_path / "b", {"w": floats(*VALUES, shape=(4, 6), cuts=cuts)})
    assert diff(a, b).equal
    assert diff(a, b, read_data=True).equal
    assert fingerprint(a) == fingerprint(b)


def test_layouts_and_settings_of_layouts_are_told_and_no_difference(tmp_path: Path) -> None:
    cuts: list[dict[str, Any]] = [
        {"ranks": 1, "settings": {"parallelism": {"tensor_parallel": 1}}},
        {"ranks": 4, "settings": {"parallelism": {"tensor_parallel": 2}}, "mesh": {"shard": 2, "tensor": 2}},
    ]
    roots = [Root(tmp_path / name) for name in "ab"]
    for root, training in zip(roots, cuts, strict=True):
        Path(root.path).mkdir()
        build_checkpoint(root, 1, training=training)
    report = diff(roots[0].path, roots[1].path)
    assert report.equal
    assert report.notes == ["cut differently, which counts as no difference: 1 rank, and 4 ranks (shard 2, tensor 2)"]


@pytest.mark.parametrize("cuts", [(), ROWS, COLUMNS])
def test_what_differs_is_counted_and_measured(tmp_path: Path, cuts: tuple[Box, ...]) -> None:
    changed = list(VALUES)
    changed[7] += 2.0
    changed[20] -= 0.5
    a = saved(tmp_path / "a", {"w": floats(*VALUES, shape=(4, 6), cuts=COLUMNS), "same": floats(1.0)})
    b = saved(tmp_path / "b", {"w": floats(*changed, shape=(4, 6), cuts=cuts), "same": floats(1.0)})
    (tensor,) = diff(a, b).tensors
    assert (tensor.name, tensor.what, tensor.differing, tensor.elements) == ("w", "values", 2, 24)
    assert tensor.max_abs == pytest.approx(2.0)
    one, other = fingerprint(a), fingerprint(b)
    assert one["model/w"] != other["model/w"]
    assert one["model/same"] == other["model/same"]
    assert total(one.values()) != total(other.values())
    assert total(one.values()) == total(reversed(one.values()))


def test_signed_zeros_and_nans_are_compared_by_their_bytes(tmp_path: Path) -> None:
    nan = float("nan")
    a = saved(tmp_path / "a", {"zero": floats(0.0), "nan": floats(nan), "gone": floats(nan)})
    b = saved(tmp_path / "b", {"zero": floats(-0.0), "nan": floats(nan), "gone": floats(1.0)})
    found = {t.name: t for t in diff(a, b).tensors}
    assert sorted(found) == ["gone", "zero"]
    assert (found["zero"].differing, found["zero"].max_abs) == (1, 0.0)
    assert found["gone"].max_abs is None


def test_names_dtypes_shapes_and_progress_are_told_apart(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"x": floats(1.0), "only": floats(1.0), "s": floats(1.0, 2.0)}, iteration=5)
    b = saved(
        tmp_path / "b",
        {"x": Tensor(struct.pack("<i", 1), (1,), "I32"), "s": floats(1.0, 2.0, shape=(2, 1))},
        iteration=6,
    )
    report = diff(a, b)
    assert {t.name: t.what for t in report.tensors} == {"x": "dtype", "only": "only in a", "s": "shape"}
    assert report.progress["global_step"] == (5, 6)
    assert not diff(a, b, section="optimizer").tensors
    assert diff(a, b, section="optimizer").equal


def test_bfloat16_magnitudes(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": Tensor(bytes.fromhex("803f"), (1,), "BF16")})
    b = saved(tmp_path / "b", {"w": Tensor(bytes.fromhex("0040"), (1,), "BF16")})
    assert diff(a, b).tensors[0].max_abs == 1.0


def test_zero_sizes_and_scalars(tmp_path: Path) -> None:
    tensors = {"empty": Tensor(b"", (0, 3)), "scalar": Tensor(struct.pack("<q", -3), (), "I64")}
    a, b = saved(tmp_path / "a", tensors), saved(tmp_path / "b", tensors)
    assert diff(a, b, read_data=True).equal
    assert fingerprint(a) == fingerprint(b)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(seed=st.integers(0, 1 << 32), rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_any_cut_has_the_same_fingerprint_and_any_swap_another(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, columns: int
) -> None:
    rng = random.Random(seed)
    values = [float(i) for i in range(rows * columns)]
    edges = sorted({0, rows, *(rng.randint(0, rows) for _ in range(2))})
    cuts = tuple(Box((lo, 0), (hi - lo, columns)) for lo, hi in itertools.pairwise(edges))
    folder = tmp_path_factory.mktemp("cut")
    whole = saved(folder / "whole", {"w": floats(*values, shape=(rows, columns))})
    parts = saved(folder / "parts", {"w": floats(*values, shape=(rows, columns), cuts=cuts)})
    assert fingerprint(whole) == fingerprint(parts)
    assert diff(whole, parts, read_data=True).equal
    if len(values) > 1:
        values[0], values[-1] = values[-1], values[0]
        swapped = saved(folder / "swapped", {"w": floats(*values, shape=(rows, columns))})
        assert fingerprint(swapped) != fingerprint(whole)

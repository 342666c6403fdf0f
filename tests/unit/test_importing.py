"""Import paths, signatures and section keys: what is wrong is told by name."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from perdure.errors import UsageError
from perdure.importing import KeyFaults, accepted_keys, check_keys, import_object, resolve, section_keys


def target(first: Any, *, width: int, depth: int = 2) -> None:
    """A constructor to be checked against."""


def anything(**keys: Any) -> None:
    """Takes all keys."""


def test_an_import_path_names_an_object_or_one_inside_it() -> None:
    assert import_object("collections:OrderedDict") is collections.OrderedDict
    assert import_object("collections:OrderedDict.fromkeys") == collections.OrderedDict.fromkeys


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("collections", "not an import path"),
        (":OrderedDict", "not an import path"),
        ("collections:", "not an import path"),
        ("no_such_package_here.x:Y", "cannot be imported"),
        ("collections:OrderedDic", "did you mean OrderedDict"),
    ],
)
def test_a_path_that_leads_nowhere_is_told(path: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        import_object(path)


def test_an_error_inside_the_imported_module_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_when_imported.py").write_text("raise RuntimeError('wrong inside')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="RuntimeError: wrong inside"):
        import_object("breaks_when_imported:Thing")


def test_unknown_missing_and_foreign_keys_are_all_found() -> None:
    assert check_keys(target, {"width": 1}, supplied=("first",)) == []
    faults = dict(check_keys(target, {"dept": 1, "first": 0}, supplied=("first",)))
    assert set(faults) == {"dept", "first", "width"}
    assert "did you mean depth?" in faults["dept"]
    assert "cannot be set here" in faults["first"]
    assert "requires it" in faults["width"]


def test_a_constructor_with_open_keys_takes_all_but_what_is_supplied() -> None:
    assert accepted_keys(anything) is None
    assert check_keys(anything, {"whatever": 1}) == []
    assert [key for key, _ in check_keys(anything, {"lr": 1}, supplied=("lr",))] == ["lr"]


def test_a_type_is_a_registered_name_or_a_path() -> None:
    assert resolve("target", {"target": target}, key="x.type") is target
    assert resolve("collections:deque", {}, key="x.type") is collections.deque
    for name in ("targe", "collections:dequeue"):
        with pytest.raises(KeyFaults) as caught:
            resolve(name, {"target": target}, key="x.type")
        assert [key for key, _ in caught.value.faults] == ["x.type"]
        assert "did you mean" in str(caught.value)


def test_section_keys_tell_what_was_written_from_defaults() -> None:
    class Section(BaseModel):
        model_config = ConfigDict(extra="allow")
        type: str = "AdamW"
        eps: float = 1e-8

    values, written = section_keys(Section(type="SGD", momentum=0.9))  # type: ignore[call-arg]
    assert values == {"type": "SGD", "eps": 1e-8, "momentum": 0.9}
    assert written == {"type", "momentum"}
    assert section_keys({"eps": 1.0}) == ({"eps": 1.0}, {"eps"})

"""The public names are pinned, and importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import perdure

NAMES = [
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "Checkpointer",
    "CommonInfo",
    "PerdureError",
    "Progress",
    "RandomState",
    "ResumableLoader",
    "Stateful",
    "TrainConfig",
    "Trainer",
    "__version__",
    "verify",
]


def test_the_list_of_names_is_pinned() -> None:
    assert sorted(perdure.__all__) == NAMES
    assert set(NAMES) <= set(dir(perdure))


def test_each_name_is_found_where_it_lives() -> None:
    for name in NAMES:
        found = getattr(perdure, name)
        if name != "__version__":
            assert found.__name__ == name
            assert found.__module__.startswith("perdure.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(perdure, "Nothing")


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, perdure; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "perdure" in loaded
    assert not {"torch", "numpy", "msgspec", "pydantic", "click", "rich", "ruamel"} & set(loaded)


def test_types_are_shipped() -> None:
    spec = find_spec("perdure")
    assert spec is not None
    assert spec.submodule_search_locations
    assert find_spec("perdure.__main__") is not None

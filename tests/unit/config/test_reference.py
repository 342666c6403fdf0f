"""The page of all keys, and the tables that other parts of the program also hold."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from perdure.config.base import section_class
from perdure.config.reference import render_reference
from perdure.config.schedule_keys import KEY_KINDS, REQUIRED, SCHEDULE_KEYS
from perdure.config.schema import TrainConfig
from perdure.config.suggest import known_keys
from perdure.optim.schedules import SCHEDULES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    command = "python -m perdure.config.reference > docs/reference/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == render_reference(), f"run: {command}"


def test_the_page_tells_every_key() -> None:
    page = render_reference()
    for path in known_keys(TrainConfig):
        if path[0] not in ("eval_dataset", "callbacks"):
            name = ".".join(map(str, path))
            assert f"`{name}`" in page or f"## {name}" in page, name


def test_every_key_is_described() -> None:
    def walk(cls: type) -> None:
        for name, field in cls.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, f"{cls.__name__}.{name}"
            nested = section_class(field.annotation)
            if nested is not None:
                walk(nested)

    walk(TrainConfig)


def test_schedules_take_the_keys_that_the_configuration_accepts() -> None:
    assert set(SCHEDULES) == set(SCHEDULE_KEYS)
    for name, keys in SCHEDULE_KEYS.items():
        taken = {field.name for field in dataclasses.fields(SCHEDULES[name])} - {"learning_rate"}  # type: ignore[arg-type]
        assert taken == set(keys), name
        assert set(REQUIRED.get(name, ())) <= set(keys)
    assert {key for keys in SCHEDULE_KEYS.values() for key in keys} == set(KEY_KINDS)


def test_reading_a_configuration_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, perdure.config.load, perdure.config.ranks, perdure.config.reference\n"
        "sys.exit(', '.join({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")})

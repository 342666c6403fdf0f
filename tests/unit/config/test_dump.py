"""The resolved configuration is written whole and read back equal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.config.load import dump_config, load_config, load_config_mapping
from perdure.config.schema import TrainConfig
from perdure.errors import ConfigError

Load = Callable[..., TrainConfig]

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.sampled_from(
    [
        "no",
        "1e5",
        ".5e3",
        "0o7",
        "1_0",
        "~",
        "null",
        "true",
        "",
        " a ",
        "a: b",
        "#x",
        "- x",
        "'",
        '"',
        "2001-01-01",
        "<<",
        "=",
    ]
)
SCALAR = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(0, 99), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text("abcdefgh_", min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    extras=st.dictionaries(NAMES, VALUE, max_size=4),
    steps=st.integers(1, 2**63 - 1),
    rate=st.floats(0, 1e300),
    norm=st.floats(1e-300),
    betas=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
    prefix=st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=50),
    skip=st.lists(st.integers(0, 2**62), unique=True, max_size=6),
)
def test_what_is_written_is_read_back_equal(
    extras: dict[str, object],
    steps: int,
    rate: float,
    norm: float,
    betas: list[float],
    prefix: str,
    skip: list[int],
) -> None:
    edges = sorted(skip)[: len(skip) // 2 * 2]
    config = load_config_mapping(
        {
            "training": {
                "steps": steps,
                "max_norm": norm,
                "skip_ranges": list(zip(edges[::2], edges[1::2], strict=True)),
            },
            "model": {**extras, "type": "decoder"},
            "optimizer": {"betas": betas},
            "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": rate},
            "checkpoint": {"prefix": prefix},
            "callbacks": [{**extras, "type": "pkg.mod:Thing"}],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resolved.yaml"
        path.write_bytes(dump_config(config).encode())
        again = load_config(path)
    assert again == config
    assert again.model.extras() == config.model.extras()
    assert dump_config(again) == dump_config(config)


def test_defaults_are_written_and_null_is_a_word(load: Load) -> None:
    text = dump_config(load("training: {steps: 7}"))
    assert "  steps: 7\n" in text
    assert "  save_interleaved_steps: 1000\n" in text
    assert "eval_dataset: null\n" in text
    assert load(text, complete=True) == load("training: {steps: 7}")


def test_configurations_are_equal_by_what_they_say(load: Load) -> None:
    assert load("training: {steps: 7}") == load("training: {}", "training.steps=7")
    assert load("training: {steps: 7}") != load("training: {steps: 8}")


def test_what_yaml_cannot_hold_is_refused_by_key() -> None:
    config = load_config_mapping({"lr_scheduler": {"type": "a.b:C"}, "model": {"type": "decoder", "norm": object()}})
    with pytest.raises(ConfigError, match=r"^model\.norm: expected .*, a Python object found$"):
        dump_config(config)

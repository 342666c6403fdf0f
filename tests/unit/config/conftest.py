"""A way to load a text as `run.yaml`, and the lines of the error it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.config.load import load_config
from perdure.config.schema import TrainConfig
from perdure.errors import ConfigError

BASE = "lr_scheduler: {type: ConstantWarmUpLR}\n"

Load = Callable[..., TrainConfig]
Lines = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load(text, *overrides)`; a constant schedule is appended unless `complete`."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *overrides: str, complete: bool = False) -> TrainConfig:
        Path("run.yaml").write_text(text if complete else text + "\n" + BASE, encoding="utf-8")
        return load_config("run.yaml", overrides)

    return run


@pytest.fixture
def lines(load: Load) -> Lines:
    """`lines(text, *overrides)`: the lines of the error that loading gives."""

    def run(text: str, *overrides: str, complete: bool = False) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, complete=complete)
        assert caught.value.exit_code == 2
        return caught.value.message.splitlines()

    return run

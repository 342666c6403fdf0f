"""A Checkpointer in hands that use it in unusual ways: exact, or refused in a sentence before anything is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import nn
from torch.optim import AdamW, Optimizer

from perdure import CheckpointConfig, Checkpointer
from perdure.catalog.events import read_events
from perdure.catalog.root import Root


def opened(path: Path, model: nn.Module, optimizer: Any = None, extra: Any = None, **keys: Any) -> Checkpointer:
    """A checkpointer that goes on with what is there."""
    settings: dict[str, Any] = {"save_path": str(path), "auto_resume": True, "save_interleaved_steps": 1, **keys}
    return Checkpointer(CheckpointConfig(**settings), model=model, optimizer=optimizer, extra=extra)


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        loss: Any = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_steps(path: Path, steps: int = 2, **keys: Any) -> tuple[nn.Module, AdamW]:
    """A root with an iteration for each step."""
    model = tiny.Net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with opened(path, model, optimizer, **keys) as checkpointer:
        progress = checkpointer.load()
        for _ in range(steps):
            trained(model, optimizer)
            progress.advance(global_batch_size=2)
            checkpointer.step(progress)
    return model, optimizer


@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError, ValueError])
def test_a_mistake_of_code_that_restores_is_never_told_as_damage(tmp_path: Path, kind: type[Exception]) -> None:
    save_steps(tmp_path)
    model = tiny.Net()
    optimizer = AdamW(model.parameters(), lr=0.1)

    class Failing(dict[Any, Any]):
        def get(self, *_: Any) -> Any:
            raise kind("a mistake of its own")

    optimizer.state = Failing()  # type: ignore[assignment]
    before = tiny.weights(model)
    with opened(tmp_path, model, optimizer, enable_save=False) as reader, pytest.raises(kind, match="of its own"):
        reader.load()
    assert tiny.same(before, tiny.weights(model))
    checkpointer = opened(tmp_path, model, optimizer)
    with pytest.raises(kind, match="of its own"):
        checkpointer.load()
    checkpointer.close()
    assert not [event for event in read_events(Root(str(tmp_path))) if event.get("event") in ("damage", "fallback")]

"""What gives way is one thread alone; what retention gives up is out of sight at once and gone in the end."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.catalog.root import Root
from perdure.engine.priority import lower_priority
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads have no priority of their own there")
def test_only_the_calling_thread_gives_way() -> None:
    own, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def work() -> None:
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] > own or own == 19
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("background", [False, True])
def test_old_iterations_are_out_of_sight_before_they_are_deleted(background: bool, tmp_path: Path) -> None:
    """The deletion is held up: a save returns all the same, and no reader sees what it is about."""
    held = threading.Event()

    def waits(name: str, path: str) -> bool:
        if name == "unlink" and ".removed-" in path:
            assert held.wait(60)
        return False

    storage = FaultStorage(LocalStorage(), only=waits)
    config = CheckpointConfig(save_path=str(tmp_path), save_max=1, async_save=background)
    with Checkpointer(config, model=torch.nn.Linear(2, 2), storage=storage, say=lambda line: None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(Progress(step, step, 1))
        checkpointer.wait()
        assert [i.iteration for i in Root(str(tmp_path)).iterations()] == [2]
        assert any(".removed-" in p.name for p in tmp_path.iterdir())
        held.set()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []

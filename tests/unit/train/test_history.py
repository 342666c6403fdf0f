"""A history that is made durable while the run goes on writing to it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import xxhash

from perdure.train.history import History


def test_no_step_waits_for_the_disk_while_a_save_makes_the_file_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_disk, written = threading.Event(), threading.Event()
    waited: list[bool] = []

    def slow(fd: int) -> None:
        at_the_disk.set()
        waited.append(written.wait(30))

    monkeypatch.setattr(os, "fsync", slow)
    history = History(str(tmp_path / "ledger.jsonl"), {"attempt": "a"}, digest=True)
    history.write({"step": 1})
    told: list[tuple[int, str]] = []
    save = threading.Thread(target=lambda: told.append(history.sync()))
    save.start()
    assert at_the_disk.wait(30)
    history.write({"step": 2})
    history.close()
    written.set()
    save.join()
    assert waited == [True]
    size, digest = told[0]
    content = (tmp_path / "ledger.jsonl").read_bytes()
    assert content[:size].count(b"\n") == 2
    assert digest == f"xxh3-128:{xxhash.xxh3_128(content[:size]).hexdigest()}"
    assert content[size:] == b'{"step":2}\n'

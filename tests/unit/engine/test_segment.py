"""Memory that processes share, and what they say by it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator

import pytest
import torch

from perdure.engine import segment
from perdure.engine.segment import Segment


@pytest.fixture
def own() -> Iterator[Segment]:
    made = Segment.make(3, True)
    if not made.path:
        pytest.skip("no shared memory here")
    yield made
    made.hide()
    made.close()


def test_another_process_sees_what_was_written_before_a_post(own: Segment) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            seen = Segment.open(own.path, own.name, 3)
            assert seen is not None
            assert seen.told(2).wait(30)
            assert bool((seen.slots[1] == 7).all())
            assert seen.failed
            seen.slots[0].fill_(9)
            seen.taken(2).post()
            code = 0
        finally:
            os._exit(code)
    own.slots[1].fill_(7)
    own.fail()
    own.told(2).post()
    assert own.taken(2).wait(30)
    assert bool((own.slots[0] == 9).all())
    # Each post is taken once, and by its own rank.
    assert not own.taken(2).wait(0.0)
    assert not own.told(1).wait(0.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_waiting_ends_in_time(own: Segment) -> None:
    began = time.monotonic()
    assert not own.told(0).wait(0.05)
    assert time.monotonic() - began > 0.04


def test_only_the_memory_meant_is_opened_and_only_until_it_is_hidden(own: Segment) -> None:
    assert Segment.open(own.path, own.name[:-1], 3) is None
    assert Segment.open(own.path.replace("fd", "no"), own.name, 3) is None
    assert Segment.open("", "", 3) is None
    own.hide()
    assert Segment.open(own.path, own.name, 3) is None


@pytest.mark.parametrize("why", ["unwished", "no room"])
def test_memory_of_its_own_where_it_cannot_be_shared(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if why == "no room":
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    alone = Segment.make(2, why != "unwished")
    assert alone.path == ""
    assert len(alone.slots) == segment.SLOTS
    alone.slots[0].fill_(1)
    assert torch.equal(alone.slots[0], torch.ones_like(alone.slots[0]))
    alone.hide()
    alone.close()

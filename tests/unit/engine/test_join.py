"""Joining a job whose store cannot be opened."""

from __future__ import annotations

import socket

import pytest

from perdure.engine.join import join
from perdure.errors import RanksError


def test_a_port_that_is_taken_is_told_by_the_rank_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken.getsockname()[1]}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(RanksError, match=r"rank 0 could not open the store .*address already in use") as caught:
            join(5)
    assert "MASTER_PORT" in str(caught.value.hint)

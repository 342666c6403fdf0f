"""What ranks tell each other arrives whole, however long it is, and an error of one is raised on all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.engine.ranks import Ranks
from perdure.errors import RanksError, SaveError

lengths = st.integers(0, 20) | st.integers(990, 1040) | st.integers(3000, 3010)


def on_all(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives on each of several ranks in threads, which exchange bytes by hand."""
    told, barrier = [b""] * count, threading.Barrier(count)

    def rank(number: int) -> Any:
        ranks = Ranks()
        ranks.rank, ranks.size = number, count

        def all_gather(data: bytes, size: int) -> list[bytes]:
            told[number] = data.ljust(size, b"\0")
            barrier.wait(20)
            heard = list(told)
            barrier.wait(20)
            assert {len(each) for each in heard} == {size}
            return heard

        ranks._all_gather = all_gather  # type: ignore[method-assign]
        try:
            return work(ranks)
        except SaveError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(rank, range(count)))


@settings(deadline=None, max_examples=60)
@given(st.lists(lengths, min_size=2, max_size=3))
def test_every_rank_has_the_words_of_all(sizes: list[int]) -> None:
    words = [chr(65 + number) * size for number, size in enumerate(sizes)]
    assert on_all(len(sizes), lambda ranks: ranks.gather(words[ranks.rank], "telling")) == [words] * len(sizes)


@pytest.mark.parametrize("length", [10, 5000])
def test_an_error_goes_along_with_what_is_told(length: int) -> None:
    def work(ranks: Ranks) -> list[str]:
        def own() -> str:
            if ranks.rank == 1:
                raise SaveError("no room", hint="make some")
            return "x" * length

        return ranks.exchange(own, "trying")

    first, second, third = on_all(3, work)
    assert [type(each) for each in (first, second, third)] == [SaveError] * 3
    assert (first.message, second.message, third.message) == ("rank 1: no room", "no room", "rank 1: no room")
    assert {each.hint for each in (first, second, third)} == {"make some"}


def test_all_have_the_result_of_the_first() -> None:
    assert on_all(3, lambda ranks: ranks.decide(lambda: f"of {ranks.rank}", "deciding", str)) == ["of 0"] * 3


def test_what_never_comes_is_waited_for_until_the_deadline() -> None:
    asked: list[float] = []
    with pytest.raises(RanksError, match=r"waited for the other ranks while passing on.*within 0\.1 s"):
        Ranks(deadline_s=0.1).await_near(lambda seconds: asked.append(seconds) or False, "passing on")
    assert len(asked) > 1
    Ranks(deadline_s=0.1).await_near(lambda seconds: True, "passing on")

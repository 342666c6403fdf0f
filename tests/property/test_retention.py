"""Retention and choice hold for any history of saves, rewinds and scalings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.catalog.choose import decide
from perdure.catalog.lineage import ancestors, links, newest_by_lineage
from perdure.catalog.retention import keep
from perdure.catalog.root import Iteration, RootListing, TrackerReading
from perdure.format.commit import CommitRecord
from perdure.format.names import iteration_dirname


@st.composite
def histories(draw: st.DrawFn) -> list[Iteration]:
    """Saves of up to two runs; each descends from any earlier one; numbers in any order."""
    found: list[Iteration] = []
    numbers = iter(draw(st.lists(st.integers(0, 10**9), min_size=24, max_size=24, unique=True)))
    for lineage in draw(st.sampled_from([("a",), ("a", "b")])):
        for sequence in range(1, draw(st.integers(1, 12)) + 1):
            number = next(numbers)
            commit = CommitRecord(
                iteration=number,
                sequence=sequence,
                lineage=lineage,
                parent=draw(st.integers(0, sequence - 1)),
                attempt="1",
                ranks=1,
                time=float(draw(st.integers(0, 100))),
                writer="w",
                size=1,
                consumed_samples=0,
                healthy=draw(st.booleans()),
                metadata_digest="",
                common_digest="",
                digest=f"{lineage}{sequence}",
            )
            found.append(Iteration(number, iteration_dirname(number), iteration_dirname(number), commit))
    return [i for i in found if draw(st.integers(0, 4)) or i is found[0]]


@given(histories(), st.integers(1, 6), st.sets(st.integers(1, 12), max_size=4))
def test_retention_keeps_the_pinned_and_the_newest_and_no_more(
    iterations: list[Iteration], save_max: int, pinned: set[int]
) -> None:
    verdicts = keep(iterations, save_max, lineage="a", pinned=dict.fromkeys(pinned, "pinned"))
    assert set(verdicts) == set(iterations)
    own = [i for i in iterations if i.commit.lineage == "a"]
    kept = [i for i in own if not verdicts[i].remove]
    held = [i for i in own if i.commit.sequence in pinned]
    assert all(not verdicts[i].remove for i in iterations if i.commit.lineage != "a")
    assert all(not verdicts[i].remove for i in held)
    assert len(kept) == min(len(own), max(save_max, len(held)))
    removed = [i.commit.sequence for i in own if verdicts[i].remove]
    free = [i.commit.sequence for i in kept if i.commit.sequence not in pinned]
    assert not removed or not free or max(removed) < min(free)


@given(histories(), st.booleans(), st.data())
def test_the_choice_descends_from_what_the_tracker_or_the_sequence_says(
    iterations: list[Iteration], use_tracker: bool, data: st.DataObject
) -> None:
    if use_tracker:
        first = data.draw(st.sampled_from(iterations))
        tracker = TrackerReading(str(first.iteration), first.iteration, "ok")
    else:
        tracker = TrackerReading("", None, "missing")
        first = next(iter(newest_by_lineage(iterations).values()))
        last = max(i.commit.time for i in iterations)
        mates = [i for i in iterations if i.commit.lineage == first.commit.lineage]
        assert any(i.commit.time == last for i in mates)
        assert first.commit.sequence == max(i.commit.sequence for i in mates)
    known = links(iterations)
    exclude = {first.commit.digest} if data.draw(st.booleans()) else set()
    older = list(ancestors(iterations, first.commit.lineage, first.commit.parent, known))
    if exclude and not older:
        return
    choice = decide(RootListing(iterations), tracker, known, exclude=exclude)
    assert choice.iteration == (older[0] if exclude else first)
    assert bool(choice.warnings) or not exclude


@given(histories())
def test_ancestors_go_down_in_sequence_within_one_run(iterations: list[Iteration]) -> None:
    for iteration in iterations:
        line = list(ancestors(iterations, iteration.commit.lineage, iteration.commit.parent, links(iterations)))
        sequences = [iteration.commit.sequence, *(i.commit.sequence for i in line)]
        assert sequences == sorted(set(sequences), reverse=True)
        assert {i.commit.lineage for i in line} <= {iteration.commit.lineage}

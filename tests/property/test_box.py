"""Box arithmetic against brute force over every element of small shapes."""

from __future__ import annotations

from math import prod

import numpy
from hypothesis import given
from hypothesis import strategies as st

from perdure.format.box import Box, boxes_of_run, cover_fault, intersect, is_line, runs, whole

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def inside(draw: st.DrawFn, shape: tuple[int, ...], least: int = 0) -> Box:
    offset, extent = [], []
    for size in shape:
        low = draw(st.integers(0, size))
        high = draw(st.integers(low, size))
        if least and size:
            low = min(low, size - 1)
            high = max(high, low + 1)
        offset.append(low)
        extent.append(high - low)
    return Box(tuple(offset), tuple(extent))


def window(box: Box, base: Box) -> tuple[slice, ...]:
    return tuple(slice(o - b, o - b + n) for o, b, n in zip(box.offset, base.offset, box.shape, strict=True))


@st.composite
def shape_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, draw(st.lists(inside(shape), max_size=6))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut in two again and again along any dimension: every kind of ragged cover."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.shape[dim] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(1, box.shape[dim] - 1))
        first, second = list(box.shape), list(box.shape)
        first[dim], second[dim] = at, box.shape[dim] - at
        moved = list(box.offset)
        moved[dim] += at
        boxes += [Box(box.offset, tuple(first)), Box(tuple(moved), tuple(second))]
    return shape, draw(st.permutations(boxes))


@given(shape_and_boxes())
def test_cover_fault_agrees_with_counting_every_element(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    count = numpy.zeros(shape, dtype=int)
    for box in boxes:
        count[window(box, whole(shape))] += 1
    assert (cover_fault(boxes, shape) is None) == bool((count == 1).all())


@given(cuts())
def test_any_cut_covers_and_no_piece_may_be_missing_or_doubled(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert cover_fault(boxes, shape) is None
    assert "in no shard" in str(cover_fault(boxes[1:], shape))
    assert cover_fault([*boxes, boxes[0]], shape) is not None
    if len(boxes) > 1 and boxes[0].numel <= boxes[1].numel:
        # As many elements as before, but two pieces meet.
        moved = Box(boxes[1].offset, tuple(min(a, b) for a, b in zip(boxes[0].shape, boxes[1].shape, strict=True)))
        assert cover_fault([moved, *boxes[1:]], shape) is not None


def test_a_box_of_another_number_of_dimensions_or_outside_is_a_fault() -> None:
    assert "outside" in str(cover_fault([Box((0,), (4,))], (2, 2)))
    assert "outside" in str(cover_fault([Box((1, 0), (2, 2))], (2, 2)))
    assert "outside" in str(cover_fault([Box((-1,), (3,))], (2,)))


def test_a_scalar_is_covered_by_exactly_one_box() -> None:
    scalar = Box((), ())
    assert cover_fault([scalar], ()) is None
    assert cover_fault([], ()) is not None
    assert cover_fault([scalar, scalar], ()) is not None


def test_an_empty_tensor_is_covered_by_nothing() -> None:
    assert cover_fault([], (3, 0)) is None
    assert cover_fault([Box((0, 0), (3, 0))], (3, 0)) is None


def test_many_boxes_are_compared_quickly() -> None:
    """A hundred thousand pieces of a two-way cut: all pairs would be five billion comparisons."""
    shape = (400, 250)
    assert cover_fault((Box((r, c), (1, 1)) for r in range(400) for c in range(250)), shape) is None


@given(st.data())
def test_intersect_agrees_with_sets_of_indices(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(inside(shape)), data.draw(inside(shape))
    count = numpy.zeros(shape, dtype=int)
    count[window(a, whole(shape))] += 1
    count[window(b, whole(shape))] += 1
    both = intersect(a, b)
    assert (0 if both is None else both.numel) == int((count == 2).sum())
    if both is not None:
        assert (count[window(both, whole(shape))] == 2).all()


@given(st.data())
def test_runs_agree_with_numpy_slicing(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    outer = data.draw(inside(shape, least=1))
    part = data.draw(inside(outer.shape))
    inner = Box(tuple(o + p for o, p in zip(outer.offset, part.offset, strict=True)), part.shape)
    memory = numpy.arange(prod(outer.shape)).reshape(outer.shape)
    found = [i for start, count in runs(outer, inner) for i in range(start, start + count)]
    assert found == memory[window(inner, outer)].flatten().tolist()
    starts = [start for start, _ in runs(outer, inner)]
    assert starts == sorted(starts)


@given(st.data())
def test_boxes_of_a_run_are_its_elements_in_order(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    outer = data.draw(inside(shape))
    start = data.draw(st.integers(0, outer.numel))
    count = data.draw(st.integers(0, outer.numel - start))
    places = numpy.arange(prod(shape)).reshape(shape)
    flat = places[window(outer, whole(shape))].reshape(-1)
    found, at = [], start
    for box, first in boxes_of_run(outer, start, count):
        assert first == at
        assert box.numel > 0
        found += places[window(box, whole(shape))].reshape(-1).tolist()
        at += box.numel
    assert found == flat[start : start + count].tolist()
    assert len(list(boxes_of_run(outer, start, count))) <= max(1, 2 * len(shape))


@given(st.data())
def test_a_line_is_a_cover_along_one_dimension(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        marks = sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
        boxes = []
        for low, high in zip([0, *marks], [*marks, shape[dim]], strict=True):
            offset, extent = [0] * len(shape), list(shape)
            offset[dim], extent[dim] = low, high - low
            boxes.append(Box(tuple(offset), tuple(extent)))
        if prod(shape) and all(box.numel for box in boxes):
            assert is_line(data.draw(st.permutations(boxes)), shape)
    # Whatever it is given, it says yes to a cover only.
    given_boxes = data.draw(st.lists(inside(shape), max_size=4))
    if is_line(given_boxes, shape):
        assert cover_fault(given_boxes, shape) is None

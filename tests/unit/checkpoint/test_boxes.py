"""Boxes in tensors."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint.boxes import Box, boxes_of_range, covered_once

_SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(_SHAPES, st.data())
def test_ranges_are_their_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = np.arange(numel).reshape(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    found = [n for box in boxes for n in tensor[box.slices].ravel().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.inside(shape) for box in boxes)


@given(_SHAPES, st.data())
def test_cuts_cover_once_and_anything_less_does_not(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    boxes = [box for a, b in itertools.pairwise(cuts) for box in boxes_of_range(shape, a, b)]
    assert covered_once(shape, boxes)
    if boxes:
        assert not covered_once(shape, boxes[1:])
        assert not covered_once(shape, [*boxes, boxes[0]])
        assert not covered_once(shape, [*boxes[1:], boxes[-1]]) or len(boxes) == 1


@given(_SHAPES, st.data())
def test_what_two_boxes_share(shape: tuple[int, ...], data: st.DataObject) -> None:
    def box() -> Box:
        offset = tuple(data.draw(st.integers(0, n)) for n in shape)
        return Box(
            offset, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True))
        )

    first, second = box(), box()
    marks = np.zeros(shape, int)
    marks[first.slices] += 1
    marks[second.slices] += 1
    common = first.common(second)
    assert int((marks == 2).sum()) == (0 if common is None else common.numel)
    if common is not None:
        assert (marks[common.slices] == 2).all()
        moved = np.zeros(first.shape, int)
        moved[common.relative_to(first).slices] = 1
        assert int(moved.sum()) == common.numel

"""Cuts, as lists of slices: what each rank holds after each change of the tensor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.placement import PARTIAL_SUM, WHOLE, BetweenUnits, Cut, Run

RANKS = 3
runs = st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, 4)), max_size=6)
cuts = runs.map(lambda found: Cut.of(0, found))


def held(cut, rank):
    """The slices of a rank, by their number in the tensor."""
    return [index for a, b in cut.intervals(rank) for index in range(a, b)]


@given(runs)
def test_normal_form(found):
    cut = Cut.of(0, found)
    assert all(run.length for run in cut.runs)
    assert all(a.rank != b.rank for a, b in zip(cut.runs, cut.runs[1:], strict=False))
    assert cut == Cut.of(0, cut.runs)
    owners = [rank for rank, length in found for _ in range(length)]
    assert [rank for rank, length in cut.runs for _ in range(length)] == owners
    assert cut.size == len(owners)
    for rank in range(RANKS):
        assert held(cut, rank) == [index for index, owner in enumerate(owners) if owner == rank]
        assert cut.length(rank) == owners.count(rank)
    assert cut.reaches(RANKS) == (set(owners) == set(range(RANKS)))


@given(cuts, st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
def test_slices(cut, start, more, step):
    start = min(start, cut.size)
    stop = min(start + more, cut.size)
    taken = list(range(cut.size))[start:stop:step]
    part = cut.slice(start, stop, step)
    for rank in range(RANKS):
        own = held(cut, rank)
        assert [taken[index] for index in held(part, rank)] == [index for index in own if index in taken]
        if step == 1 or len(cut.intervals(rank)) <= 1:
            first, last = cut.local_slice(rank, start, stop, step)
            assert own[first:last:step] == [index for index in own if index in taken]
        else:
            with pytest.raises(ValueError, match="uneven"):
                cut.local_slice(rank, start, stop, step)


@given(cuts, st.integers(1, 3))
def test_copies_and_factors(cut, factor):
    size = cut.size
    for rank in range(RANKS):
        own = held(cut, rank)
        copies = [copy * size + index for copy in range(factor) for index in own]
        assert held(cut.repeated(factor), rank) == copies
        assert held(cut.times(factor), rank) == [i * factor + k for i in own for k in range(factor)]
        assert held(cut.reversed(), rank) == sorted(size - 1 - index for index in own)
    assert cut.times(factor).over(factor) == cut


def test_segments():
    cut = Cut.in_segments(1, [4, 4, 2], num_ranks=2)
    assert cut.runs == (Run(0, 2), Run(1, 2), Run(0, 2), Run(1, 2), Run(0, 1), Run(1, 1))
    assert held(cut, 0) == [0, 1, 4, 5, 8]
    assert cut.at(0) == Cut(0, cut.runs)
    assert [str(each) for each in (WHOLE, PARTIAL_SUM)] == ["whole", "partial sum"]


def part_of(array, cut, rank):
    return np.take(array, held(cut, rank), axis=cut.dim)


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(shapes, st.data())
def test_reshape(shape, data):
    from shardwright.torch.tensor_parallel.spec import cut_after_reshape

    dim = data.draw(st.integers(0, len(shape) - 1))
    bounds = sorted(data.draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    lengths = [b - a for a, b in zip([0, *bounds], [*bounds, shape[dim]], strict=True)]
    cut = Cut.of(dim, [(data.draw(st.integers(0, RANKS - 1)), length) for length in lengths])
    factors = [p for size in shape for p in {1: [], 2: [2], 3: [3], 4: [2, 2]}[size]]
    new_shape = []
    while factors:
        count = data.draw(st.integers(0, len(factors)))
        new_shape.append(int(np.prod(factors[:count], dtype=int)))
        factors = factors[count:]
        if len(new_shape) > 6:
            new_shape.append(int(np.prod(factors, dtype=int)))
            break
    new_shape = new_shape or [1]
    array = np.arange(np.prod(shape)).reshape(shape)
    found = cut_after_reshape(shape, new_shape, cut)
    if found is not None:
        assert found.size == new_shape[found.dim]
        for rank in range(RANKS):
            own = list(new_shape)
            own[found.dim] = found.length(rank)
            np.testing.assert_array_equal(
                part_of(array, cut, rank).reshape(own), part_of(array.reshape(new_shape), found, rank)
            )


@pytest.mark.parametrize(
    ("shape", "new_shape", "cut", "expected"),
    [
        # Heads split off, and merged again.
        ((2, 6, 12), (2, 6, 4, 3), Cut.even(2, 12, num_ranks=2), Cut.even(2, 4, num_ranks=2)),
        ((2, 6, 4, 3), (2, 6, 12), Cut.even(2, 4, num_ranks=2), Cut.even(2, 12, num_ranks=2)),
        # Batch and heads merged: the runs repeat.
        ((2, 4, 6), (8, 6), Cut.even(1, 4, num_ranks=2), Cut.of(0, [(0, 2), (1, 2)] * 2)),
        ((8, 6), (2, 4, 6), Cut.of(0, [(0, 2), (1, 2)] * 2), Cut.even(1, 4, num_ranks=2)),
        # Queries, keys and values in one.
        ((5, 12), (5, 3, 4), Cut.in_segments(1, [4] * 3, num_ranks=2), Cut.even(2, 4, num_ranks=2)),
        # Half a head: no part is slices of one dimension.
        ((5, 6), (5, 2, 3), Cut.of(1, [(0, 2), (1, 4)]), None),
        # Sizes of 1 come and go.
        ((4, 1, 6), (4, 6), Cut.even(2, 6, num_ranks=2), Cut.even(1, 6, num_ranks=2)),
        ((4, 6), (1, 4, 1, 6, 1), Cut.even(1, 6, num_ranks=2), Cut.even(3, 6, num_ranks=2)),
    ],
)
def test_reshapes_of_models(shape, new_shape, cut, expected):
    from shardwright.torch.tensor_parallel.spec import cut_after_reshape

    assert cut_after_reshape(shape, new_shape, cut) == expected


def test_parts_are_uneven_where_lengths_do_not_divide():
    samples = [(8, 6), (8,)]
    assert not BetweenUnits.of_batch(samples, 0, num_ranks=2).is_uneven
    assert BetweenUnits.of_batch(samples, 0, num_ranks=3).is_uneven
    assert not BetweenUnits.of_batch(samples, 0, num_ranks=2, inner_ranks=3, inner_dim=1).is_uneven
    assert BetweenUnits.of_batch(samples, 0, num_ranks=2, inner_ranks=4, inner_dim=1).is_uneven

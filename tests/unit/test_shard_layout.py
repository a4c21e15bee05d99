"""Shards cut parameters as torch.chunk does, and put back together they are the whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.placement import ShardLayout

shapes = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


@given(shapes, st.integers(1, 6))
def test_rows_are_those_of_chunk(shapes, num_shards):
    layout = ShardLayout(shapes, num_shards)
    for index, shape in enumerate(shapes):
        rows = [list(layout.rows(index, shard)) for shard in range(num_shards)]
        assert [row for part in rows for row in part] == list(range(shape[0]))
        expected = torch.arange(shape[0]).chunk(num_shards) if shape[0] else ()
        assert [part for part in rows if part] == [part.tolist() for part in expected]


@given(shapes, st.integers(1, 6))
def test_the_shards_of_a_parameter_lie_one_after_the_other_in_the_whole(shapes, num_shards):
    layout = ShardLayout(shapes, num_shards)
    assert layout.whole_size == layout.shard_size * num_shards
    parameters = [torch.randn(shape) for shape in shapes]
    shards = torch.zeros(num_shards, layout.shard_size)
    whole = torch.zeros(layout.whole_size)
    for index, parameter in enumerate(parameters):
        start, size = layout.starts[index], layout.piece_sizes[index]
        for shard in range(num_shards):
            rows = layout.rows(index, shard)
            part = parameter[rows.start : rows.stop]
            assert tuple(part.shape) == layout.piece_shape(index, shard)
            shards[shard, start : start + part.numel()] = part.flatten()
        first = layout.whole_start(index)
        whole[first : first + size * num_shards] = shards[:, start : start + size].flatten()
        assert torch.equal(whole[first : first + parameter.numel()].view(parameter.shape), parameter)

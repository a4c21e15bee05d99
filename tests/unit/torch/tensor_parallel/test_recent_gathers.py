"""What was gathered last serves the next that needs it, and its transpose, until its memory is written."""

import torch

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divided_tensor import divided
from shardwright.torch.tensor_parallel.group import MOST_KEPT, Prices, RecentGathers
from shardwright.torch.tensor_parallel.search.recording import group_without_ranks


def test_a_tensor_is_gathered_once():
    group, gathers, calls = group_without_ranks(0, 2, Prices()), RecentGathers(), []
    x = divided(torch.arange(12.0).view(4, 3), Cut.even(0, 4, num_ranks=2), group)

    def gather():
        calls.append(1)
        return torch.arange(12.0).view(4, 3)

    first = gathers.whole(x._local, x._spec, gather)
    assert gathers.whole(x._local, x._spec, gather).equal(first)
    turned = x.t()
    assert gathers.knows(turned._local, turned._spec)
    assert gathers.whole(turned._local, turned._spec, gather).equal(first.t())
    assert len(calls) == 1
    gathers.written(x._local.untyped_storage()._cdata)
    assert not gathers.knows(x._local, x._spec)


def test_few_are_kept():
    group, gathers = group_without_ranks(0, 2, Prices()), RecentGathers()
    tensors = [divided(torch.ones(4), Cut.even(0, 4, num_ranks=2), group) for _ in range(MOST_KEPT + 1)]
    for each in tensors:
        gathers.whole(each._local, each._spec, lambda: torch.ones(4))
    assert len(gathers) == MOST_KEPT
    assert not gathers.knows(tensors[0]._local, tensors[0]._spec)
    gathers.clear()
    assert len(gathers) == 0

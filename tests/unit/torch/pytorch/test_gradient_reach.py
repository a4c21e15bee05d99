"""Which arguments of a call get a gradient."""

import torch

from shardwright.torch.pytorch import tensors
from shardwright.torch.pytorch.tensors import gradient_nodes, unreached


def test_what_lies_behind_an_argument_counts_where_it_is_asked_for():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    behind = x * 2
    assert unreached(gradient_nodes([behind, x, y]), [behind * 3]) == {2}
    assert unreached(gradient_nodes([behind, x]), [x * 3]) == {0}


def test_what_ran_before_a_call_is_not_walked_through(monkeypatch):
    """Each of 80 layers walked through all before it."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(1000):
        x = x.sin()
    given, result, walked = gradient_nodes([x]), x.cos(), []

    class Counted(set):
        def add(self, node):
            walked.append(node)
            super().add(node)

    monkeypatch.setattr(tensors, "set", Counted, raising=False)
    assert unreached(given, [result]) == set()
    assert len(walked) == 2

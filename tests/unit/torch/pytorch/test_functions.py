"""Names of functions and modules, for errors."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shardwright.torch.pytorch.functions import name_of, name_of_call, unnoticed_changes


class SaysItsRange(nn.Module):
    """Reads a value to describe itself, as I-BERT's layers do; in a trace there are no values."""

    def __repr__(self) -> str:
        raise AssertionError


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (torch.add, "add"),
        (Tensor.__getitem__, "__getitem__"),
        (Tensor.shape.__get__, "shape"),
        (partial(torch.add, alpha=2), "partial"),
        (SaysItsRange(), "SaysItsRange"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_names(func, name):
    assert name_of(func) == name


def test_nothing_asks_a_module_how_it_looks():
    module = SaysItsRange()
    assert name_of_call(module) == "module SaysItsRange"
    assert unnoticed_changes(module, (torch.zeros(1),), {}) == ()

"""What is no loss to train by."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.errors import UsageError
from shardwright.torch.interception.backward_calls import refuse_no_tensor


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0.25, r"gets the float 0\.25, but.*Write model\.backward\(loss\)\. Numbers, as of loss\.item\(\)"),
        (None, r"gets an object of the type NoneType, but.*Write model\.backward\(loss\)\.$"),
        (
            SimpleNamespace(loss=torch.ones(())),
            r"type SimpleNamespace.*Write model\.backward\(output\.loss\)",
        ),
    ],
)
def test_what_is_no_tensor_is_named_with_the_line_to_write(given, message):
    """A number ended in ``'float' object has no attribute 'numel'``."""
    with pytest.raises(UsageError, match=message):
        refuse_no_tensor(given)


def test_a_tensor_passes():
    refuse_no_tensor(torch.ones(()))

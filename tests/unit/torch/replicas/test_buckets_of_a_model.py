"""What is left when the backward has ended is small."""

from types import SimpleNamespace

import pytest
import torch

from shardwright.torch.replicas.gradient_buckets import Reduced
from shardwright.torch.replicas.reducer import GradientReducer

MIB = 2**20


def buckets(sizes: list[float], **settings: int) -> list[float]:
    """MiB of each bucket of parameters of these sizes in MiB, in the order in which they start."""
    group = SimpleNamespace()
    parameters = [torch.nn.Parameter(torch.empty(int(size * MIB) // 4)) for size in sizes]
    members = [Reduced(parameter, frozenset({0}), group) for parameter in parameters]
    reducer = GradientReducer(members, divisor=2, **settings)
    reducer.begin()
    return [sum(member.num_bytes for member in turn.bucket.members) / MIB for turn in reducer._turns]


@pytest.mark.parametrize(("most", "expected"), [(3, 3.0), (25, 8.0)])
def test_a_bucket_has_no_more_than_users_want(most: int, expected: float) -> None:
    assert max(buckets([1.0] * 64, bucket_bytes=most * MIB)) == expected


def test_large_gradients_have_buckets_of_their_own() -> None:
    assert buckets([16.0, 1.0, 1.0, 16.0]) == [16.0, 2.0, 16.0]

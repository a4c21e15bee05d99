"""Whole gradients of shared parameters are there for a moment only."""

import pytest
from sharded import sharded_training
from torch.multiprocessing.reductions import StorageWeakRef

from choices import in_sweep
from shardwright.testing import run_ranks


def whole_gradients_at_once(settings):
    """The most buckets whose whole gradients were there at once, and how many there were."""
    from shardwright.comm.collectives import shardwright_process_group

    held, most = [], 0

    class Watched(shardwright_process_group.TwoHopSum):
        def __init__(self, data, **more):
            nonlocal most
            held.append(StorageWeakRef(data.untyped_storage()))
            most = max(most, sum(not reference.expired() for reference in held))
            super().__init__(data, **more)

    shardwright_process_group.TwoHopSum = Watched
    sharded_training({**settings, "bucket": 500}, steps=1)
    return most, len(held)


@pytest.mark.parametrize(
    "settings",
    [
        in_sweep({"sharded_data_parallel_degree": 4}),
        {"sharded_data_parallel_degree": 2},
        {"sharded_data_parallel_degree": 4, "ddp_dist_backend": "gloo"},
    ],
)
def test_whole_gradients_are_let_go_while_the_backward_runs(settings):
    """They were kept to the end of the step, so that sharing saved no memory of gradients at the peak."""
    for most, buckets in run_ranks(whole_gradients_at_once, 4, settings):
        assert most <= 3 < buckets

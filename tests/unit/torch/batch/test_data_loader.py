"""Samples by position: each once in an epoch, also where the replicas change in its middle."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright.torch as sw
from shardwright.errors import CheckpointError, UsageError
from shardwright.torch.data import order_of_epoch, remaining_batches


@pytest.fixture(autouse=True)
def _run() -> Any:
    sw.init({"run_dir": "off"})
    yield
    sw.shutdown()


@given(
    num=st.integers(1, 60),
    per_replica=st.integers(1, 3),
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
    drop_last=st.booleans(),
)
def test_every_sample_is_seen_once_however_replicas_change(
    num: int, per_replica: int, replicas: list[int], data: st.DataObject, drop_last: bool
) -> None:
    """The global batch is the same for all, as the runs that resume each other have it."""
    batch_size = per_replica * 12
    order = order_of_epoch(num, (3, 1))
    assert sorted(order) == list(range(num))
    position, seen, sizes = 0, [], []
    for index, many in enumerate(replicas):
        of_replicas = [
            list(remaining_batches(order, position, batch_size, replica=(i, many), drop_last=drop_last))
            for i in range(many)
        ]
        steps = len(of_replicas[0])
        assert all(len(each) == steps for each in of_replicas)  # or ranks would wait for each other
        last = index == len(replicas) - 1
        for step in range(steps if last else data.draw(st.integers(0, steps))):
            ends = {each[step][0] for each in of_replicas}
            (position,) = ends
            parts = [each[step][1] for each in of_replicas]
            assert all(parts)
            sizes.append(sum(map(len, parts)))
            seen += [sample for part in parts for sample in part]
    assert seen == list(order[: len(seen)])
    left = num - len(seen)
    if drop_last:
        assert left < batch_size
    elif len(replicas) == 1 and num >= batch_size:
        assert left == 0
    else:  # what is left by others may be too little for one each
        assert left < max(replicas)


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that draw random numbers of all kinds."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        drawn = torch.rand(()).item(), random.random(), float(np.random.rand())
        return torch.tensor([number, *drawn], dtype=torch.float64)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_draw_the_same_for_a_sample_whoever_makes_it(workers: int) -> None:
    """And a loop leaves the generators of the run alone."""
    loader = sw.data_loader(Noisy(), 4, seed=1, num_workers=workers)
    before = torch.random.get_rng_state()
    first = torch.cat(list(loader))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert loader.epoch == 1
    again = sw.data_loader(Noisy(), 2, seed=1, num_workers=3 - workers)
    again.load_state_dict({"epoch": 0, "position": 4, "seed": 1, "shuffle": True, "num_samples": 12})
    assert torch.equal(torch.cat(list(again)), first[4:])
    assert len({row.tolist()[1] for row in first}) == 12
    second = torch.cat(list(loader))
    assert sorted(second[:, 0].tolist()) == list(range(12))
    assert second[:, 0].tolist() != first[:, 0].tolist()


def test_the_position_is_what_the_script_has_got() -> None:
    """Workers fetch ahead; what they have fetched is not yet seen."""
    loader = sw.data_loader(Noisy(), 3, num_workers=2, prefetch_factor=4)
    for index, _ in enumerate(loader):
        assert loader.state_dict()["position"] == 3 * (index + 1)
    assert len(loader) == 4
    assert loader.state_dict() == {
        "epoch": 1,
        "position": 0,
        "seed": 0,
        "shuffle": True,
        "num_samples": 12,
    }


def test_a_last_batch_may_be_smaller() -> None:
    loader = sw.data_loader(Noisy(), 5, drop_last=False, shuffle=False)
    assert [len(batch) for batch in loader] == [5, 5, 2]
    assert len(loader) == 3


def test_the_only_batch_may_be_smaller() -> None:
    """An evaluation of a data set smaller than a batch was refused; a stream of as many samples was not."""
    loader = sw.data_loader(Noisy(), np.int64(64), drop_last=False, shuffle=False)  # type: ignore[arg-type]
    for _ in range(2):
        assert [len(batch) for batch in loader] == [12]
    assert len(loader) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sw.data_loader(Noisy(), 13), "12 samples, fewer than a global batch of 13"),
        (lambda: sw.data_loader([], 4, drop_last=False), "0 samples, fewer than there are replicas, 1"),
        (lambda: sw.data_loader(Noisy(), "4"), "a global batch of '4' samples"),
        (lambda: sw.data_loader(Noisy(), 4.0), "a global batch of 4.0 samples"),
        (lambda: sw.data_loader(Noisy(), 0), "a global batch of 0 samples"),
        (lambda: sw.data_loader(Noisy(), 4, sampler=None), "decides about sampler itself"),
        (lambda: sw.data_loader(7, 4), "takes a data set with a length and numbered samples, or a stream"),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_a_position_in_other_data_is_refused() -> None:
    loader = sw.data_loader(Noisy(), 4, seed=1)
    with pytest.raises(CheckpointError, match="had seed 2 when it was saved, and has 1 here"):
        loader.load_state_dict({"epoch": 0, "position": 4, "seed": 2, "shuffle": True, "num_samples": 12})


def test_two_loops_at_a_time_are_refused() -> None:
    loader = sw.data_loader(Noisy(), 4)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(UsageError, match="in the middle of a loop"):
        next(first)

"""A stream of samples for all replicas: each sample once, in its order, whoever resumes."""

import json
from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import shardwright.torch as sw
from shardwright.errors import CheckpointError, UsageError
from shardwright.torch.checkpoints.encoded import decode, encode
from shardwright.torch.streams import FirstBatch, StreamLoader


@pytest.fixture(autouse=True)
def _run() -> Any:
    sw.init({"run_dir": "off"})
    yield
    sw.shutdown()


class Bare(IterableDataset[int]):
    """Numbers, without a state."""

    def __init__(self, num: int):
        self.num = num

    def __iter__(self) -> Iterator[int]:
        yield from range(self.num)


class Stream(Bare):
    """Goes on where its state says, and only there."""

    def __init__(self, num: int):
        super().__init__(num)
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.num:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loader(
    stream: Any, batch: int, replica: int = 0, replicas: int = 1, *, drop_last: bool = True, **options: Any
) -> StreamLoader:
    options = {"collate_fn": list, **options}
    return StreamLoader(stream, batch, drop_last=drop_last, replica=(replica, replicas), options=options)


def saved(each: StreamLoader) -> Any:
    """The state as a checkpoint has it."""
    tensors: dict[str, torch.Tensor] = {}
    document = json.dumps(encode(each.state_dict(), name="data", tensors=tensors))
    return decode(json.loads(document), name="data", tensor=tensors.__getitem__)


def test_the_same_samples_follow_with_other_replicas() -> None:
    """Steps of 12 samples by 1, 3, 2 and 4 replicas, over the end of an epoch."""
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for replicas, steps in ((1, 1), (3, 2), (2, 1), (4, 2)):
        loaders = [loader(Stream(40), 12, replica, replicas) for replica in range(replicas)]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        done = 0
        while done < steps:
            for parts in zip(*loaders, strict=True):
                seen += [sample for part in parts for sample in part]
                done += 1
                if done == steps:
                    break
        state, *others = [each.state_dict() for each in loaders]
        assert all(other == state for other in others)
    assert seen == [*range(36), *range(36)]


def test_the_rest_of_an_epoch_follows_a_loop_that_was_left() -> None:
    each = loader(Stream(10), 3)
    first = next(iter(each))
    assert [first, *each] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert (each.epoch, each.position) == (1, 0)
    assert list(each) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@pytest.mark.parametrize("kind", [Bare, Stream])
@pytest.mark.parametrize(
    ("num", "batch", "replicas"), [(13, 4, 2), (13, 4, 4), (12, 4, 2), (3, 8, 2), (7, 6, 3)]
)
def test_an_evaluation_counts_each_sample_once(kind: Any, num: int, batch: int, replicas: int) -> None:
    of_replicas = [list(loader(kind(num), batch, r, replicas, drop_last=False)) for r in range(replicas)]
    assert len({len(batches) for batches in of_replicas}) == 1
    assert all(part for batches in of_replicas for part in batches)
    parts = [part for step in zip(*of_replicas, strict=True) for part in step]
    assert [sample for part in parts for sample in part] == list(range(num))


def test_a_position_is_behind_the_batch_that_was_given_out() -> None:
    each = loader(Stream(13), 4, drop_last=False)
    batches = iter(each)
    assert next(batches) == [0, 1, 2, 3]
    again = loader(Stream(13), 4, drop_last=False)
    again.load_state_dict(each.state_dict())
    assert list(again) == list(batches)


class Rewinds(Stream):
    """Begins anew at its end, by itself."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.next = 0


class Alive(Stream):
    """Gives its own dictionary away, and takes another's as its own."""

    def __init__(self, num: int):
        self.own = {"next": 0}
        super().__init__(num)

    @property
    def next(self) -> int:
        return self.own["next"]

    @next.setter
    def next(self, number: int) -> None:
        self.own["next"] = number

    def state_dict(self) -> dict[str, int]:
        return self.own

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.own = state


@pytest.mark.parametrize("kind", [Stream, Rewinds, Alive])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num", "replicas"), [(5, 2), (7, 3), (8, 2), (12, 1)])
def test_each_position_of_an_epoch_goes_on_with_the_rest(
    kind: Any, drop_last: bool, num: int, replicas: int
) -> None:
    """5 samples by 2 replicas were saved as "4 were read", behind a batch that took in the fifth: "the stream
    has 1 samples left". A stream that begins anew at its end was read twice, where all were read ahead."""
    first = loader(kind(num), 4, 0, replicas, drop_last=drop_last)
    whole = list(first)
    assert list(first) == list(first) == whole
    states = []
    for batch in first:
        states.append((batch, saved(first)))
    for place, (batch, state) in enumerate(states):
        assert batch == whole[place]
        again = loader(kind(num), 4, 0, replicas, drop_last=drop_last)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert list(again) == whole[place + 1 :]
        assert (again.epoch, again.position) == (state["epoch"] + 1, 0)
        assert list(again) == whole


@pytest.mark.parametrize("kind", [Stream, Rewinds, Alive])
@pytest.mark.parametrize("drop_last", [False, True])
def test_one_goes_back_in_the_same_process(kind: Any, drop_last: bool) -> None:
    """The state of a loader that had read nothing went on where the stream was."""
    each = loader(kind(12), 4, drop_last=drop_last)
    states = [each.state_dict()]
    for number in range(3):
        assert next(iter(each)) == [*range(4 * number, 4 * number + 4)]
        states.append(each.state_dict())
    for number in (3, 0, 2, 0, 1):
        each.load_state_dict(states[number])
        assert [sample for batch in each for sample in batch] == [*range(4 * number, 12)]
        each.load_state_dict(states[number])
        for _ in each:
            break


def test_batches_are_collated_as_ever() -> None:
    made = sw.data_loader(Stream(8), 4)
    assert isinstance(made, StreamLoader)
    assert torch.equal(next(iter(made)), torch.arange(4))


def test_a_stream_without_a_state_is_read_and_not_saved() -> None:
    made = sw.data_loader(Bare(8), 4)
    assert len(list(made)) == 2
    with pytest.raises(
        CheckpointError, match=r"position in a Bare cannot be saved: it has no state_dict\(\)"
    ):
        made.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sw.data_loader(iter([]), 4),
            "takes a data set, whose samples it puts into batches, not a list",
        ),
        (
            lambda: sw.data_loader(DataLoader(Bare(8)), 4),
            "not a DataLoader. Give it the data set; or go on with",
        ),
        (lambda: sw.data_loader(Bare(8), 4, shuffle=True), "shuffle=True was asked of a stream"),
        (lambda: sw.data_loader(Bare(8), 0), "a global batch of 0 samples"),
        (lambda: list(loader(Bare(1), 2, 0, 2, drop_last=False)), "has 1 samples left, and 2 replicas"),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_a_part_of_a_stream_is_refused() -> None:
    """Each replica took its part of a part: half of all samples were never seen."""
    part = Stream(8)
    part._distributed = SimpleNamespace(rank=1, world_size=2)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"is part 1 of 2 already \(split_dataset_by_node\)"):
        sw.data_loader(part, 4)


@pytest.mark.parametrize(
    ("samples", "others"),
    [
        ([1, 2], [2, 1]),
        ([{"x": "a", "y": 0.5}], [{"x": "a", "y": 0.25}]),
        ([(torch.ones(2, 2), None)], [(torch.eye(2), None)]),
        ([torch.ones(3, dtype=torch.bfloat16)], [torch.zeros(3, dtype=torch.bfloat16)]),
        ([numpy.arange(4)], [numpy.arange(4)[::-1]]),
        ([numpy.float32(1)], [numpy.float32(2)]),
    ],
)
def test_a_first_batch_is_told_from_others(samples: Any, others: Any) -> None:
    def digest(batch: Any) -> float:
        FirstBatch.note(batch)
        return FirstBatch.take()

    assert digest(samples) == digest(deepcopy(samples)) != digest(others)
    assert digest([object()]) == digest([object()])  # of no known content
    assert FirstBatch.take() == 0


def test_other_loaders_are_told_apart() -> None:
    numbered = sw.data_loader(torch.arange(8), 4)
    stream = sw.data_loader(Stream(8), 4)
    with pytest.raises(CheckpointError, match="read samples by number when it was saved, and reads a stream"):
        stream.load_state_dict(numbered.state_dict())
    with pytest.raises(CheckpointError, match="read a stream when it was saved, and samples by number here"):
        numbered.load_state_dict(stream.state_dict())


def test_two_loops_at_a_time_are_refused() -> None:
    each = loader(Stream(12), 3)
    first = iter(each)
    next(first)
    next(iter(each))
    with pytest.raises(UsageError, match="in the middle of a loop"):
        next(first)


class InWorkers(Stream):
    """Each worker has every second number."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        many, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        while self.next * many + own < self.num:
            self.next += 1
            yield (self.next - 1) * many + own


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_workers_resume_where_they_were() -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    whole = list(loader(InWorkers(48), 4, num_workers=2))
    assert whole[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    first = loader(InWorkers(48), 4, num_workers=2)
    for step, _ in enumerate(first):
        if step == 4:
            break
    halves = [loader(InWorkers(48), 4, replica, 2, num_workers=2) for replica in range(2)]
    for each in halves:
        each.load_state_dict(saved(first))
    assert [a + b for a, b in zip(*halves, strict=True)] == whole[5:]
    with pytest.raises(CheckpointError, match="had num_workers 2 when it was saved, and has 0 here"):
        loader(InWorkers(48), 4).load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match="drop_last=False was asked of a stream with workers"):
        loader(InWorkers(48), 4, num_workers=2, drop_last=False)


def test_data_sets_of_hugging_face() -> None:
    """Streamed, in other orders by epoch, resumed in the second."""
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        table = datasets.Dataset.from_dict({"x": list(range(20))})
        return table.to_iterable_dataset(num_shards=10).shuffle(seed=3, buffer_size=1)

    whole = loader(stream(), 4)
    epochs = [[[each["x"] for each in batch] for batch in whole] for _ in range(2)]
    assert sorted(x for batch in epochs[0] for x in batch) == list(range(20))
    assert epochs[0] != epochs[1]
    first = loader(stream(), 4)
    assert len(list(first)) == 5
    batches = iter(first)
    next(batches), next(batches)
    halves = [loader(stream(), 4, replica, 2) for replica in range(2)]
    for each in halves:
        each.load_state_dict(saved(first))
    assert [[each["x"] for each in a + b] for a, b in zip(*halves, strict=True)] == epochs[1][2:]

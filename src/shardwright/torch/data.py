"""Data for replicas: samplers, seeds, and a loader with a position that any number of ranks resumes.

Of numbered samples; a stream of them is for `shardwright.torch.streams`.

::

    order of an epoch     7 2 9 4 | 0 5 8 1 | 3 6 ...        the same on all ranks, from seed and epoch
    global batch          └ step 1┘ └ step 2┘
    replica 0 of 2        7 2       0 5
    replica 1 of 2            9 4       8 1

A run resumed with other replicas cuts the same global batches into other parts: each epoch still sees every
sample once, and steps are the same but for the order of sums. With ``drop_last=False``, some replicas may get
one sample more of the last batch, which takes in the samples that are too few for a batch of their own (not
where a run resumes, with more replicas, at so few samples before the end); all replicas have equal weight.
"""

import logging
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from shardwright.errors import CheckpointError, UsageError
from shardwright.run.context import context, is_initialized
from shardwright.torch.streams import StreamLoader, check_stream, is_stream

log = logging.getLogger(__name__)


def data_loader(
    dataset: Any,
    global_batch_size: int,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = True,
    **options: Any,
) -> "ReplicaLoader | StreamLoader":
    """Gives each replica its part of every global batch; ranks of one replica get the same.

    Each ``for`` goes through the rest of an epoch: `ReplicaLoader.epoch` tells which. Given to
    ``sw.Checkpoints(state={"data": loader})``, a resumed run goes on with the very next batch.

    Args:
        dataset: anything with a length and samples by number. Or a stream, of which each replica reads the
            whole and takes its part: an `IterableDataset`, or a streamed data set of Hugging Face.
        global_batch_size: samples of one step, of all replicas together.
        shuffle: in another order every epoch; by default, unless it is a stream, which shuffles itself.
        seed: of the shuffling, and of what samples draw in workers.
        drop_last: leave out the last samples of an epoch, where they do not fill a global batch; else the
            last batch is smaller, or larger by samples that are fewer than the replicas: an evaluation
            counts each sample once.
        options: further ones of `torch.utils.data.DataLoader`, such as ``num_workers`` and ``collate_fn``.

    Raises:
        UsageError: the batch cannot be divided by the replicas, or an option contradicts this.

    Example:
        >>> import shardwright.torch as sw
        >>> sw.init({"run_dir": "off"})
        >>> [batch.tolist() for batch in sw.data_loader(range(6), 2, shuffle=False)]
        [[0, 1], [2, 3], [4, 5]]
        >>> sw.shutdown()
    """
    if is_stream(dataset):
        current = context()
        check_stream(dataset, shuffle=shuffle)
        _check_batch(global_batch_size, replicas=current.mesh.data, options=options)
        replica = (current.data_rank, current.mesh.data)
        return StreamLoader(dataset, global_batch_size, drop_last=drop_last, replica=replica, options=options)
    return ReplicaLoader(
        dataset,
        global_batch_size,
        shuffle=shuffle is not False,
        seed=seed,
        drop_last=drop_last,
        options=options,
    )


class ReplicaLoader:
    """See `data_loader`.

    Attributes:
        epoch: how many epochs are over.
        position: samples of this epoch that were given out, of all replicas together.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        options: dict[str, Any],
    ):
        current = context()
        _check(dataset, global_batch_size, replicas=current.mesh.data, drop_last=drop_last, options=options)
        self._dataset: Any = dataset
        self._batch_size = global_batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._options = options
        self._replica, self._replicas = current.data_rank, current.mesh.data
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        num, rest = divmod(len(self._dataset), self._batch_size)
        return num + (rest >= self._replicas and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The batches of this replica, for the rest of the epoch."""
        remaining = self._remaining()
        loader: DataLoader[Any] = DataLoader(
            _SeededInWorkers(self._dataset, (self._seed, self.epoch)),
            batch_sampler=_Parts(remaining),
            # PyTorch's loader would draw from the generator of the run at the start of every loop.
            generator=torch.Generator().manual_seed(self._seed),
            worker_init_fn=_outlive_sigterm,
            **self._options,
        )
        here = (self.epoch, self.position)
        for (end, _), batch in zip(remaining(), loader, strict=True):
            if here != (self.epoch, self.position):
                raise UsageError(
                    "the position of the data loader has changed in the middle of a loop over it: another "
                    "loop goes on, or resume() was called inside. Resume before the loop, and run one at a "
                    "time."
                )
            self.position = end
            here = (self.epoch, self.position)
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, to be saved."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_samples": len(self._dataset),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes at the position of another loader.

        Raises:
            CheckpointError: that was of other data, or shuffled otherwise.
        """
        if "stream" in state:
            raise CheckpointError(
                "the data loader read a stream when it was saved, and samples by number here. Give it the "
                "data set that it had."
            )
        mine = {"seed": self._seed, "shuffle": self._shuffle, "num_samples": len(self._dataset)}
        for name, value in mine.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the data loader had {name} {state.get(name)} when it was saved, and has {value} here: "
                    "its position would be that of other samples. Give it the same data set and seed."
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _remaining(self) -> Callable[[], Iterator[tuple[int, list[int]]]]:
        order = order_of_epoch(len(self._dataset), (self._seed, self.epoch) if self._shuffle else None)
        return partial(
            remaining_batches,
            order,
            self.position,
            self._batch_size,
            replica=(self._replica, self._replicas),
            drop_last=self._drop_last,
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of global batches that belong to this replica, made one after another."""

    batches: Callable[[], Iterator[tuple[int, list[int]]]]

    def __iter__(self) -> Iterator[list[int]]:
        return (part for _, part in self.batches())


def order_of_epoch(num_samples: int, seeds: tuple[int, int] | None) -> Sequence[int]:
    """The numbers of all samples, in the order of an epoch; 8 bytes for each, if they are shuffled."""
    if seeds is None:
        return range(num_samples)
    (seed,) = numpy.random.SeedSequence(seeds).generate_state(1)
    generator = torch.Generator().manual_seed(int(seed))
    order: Any = torch.randperm(num_samples, generator=generator).numpy()
    return memoryview(order)  # its items are numbers of Python


def remaining_batches(
    order: Sequence[int], position: int, batch_size: int, *, replica: tuple[int, int], drop_last: bool
) -> Iterator[tuple[int, list[int]]]:
    """The batches of a replica from a position on.

    >>> list(remaining_batches(range(6), 2, 2, replica=(1, 2), drop_last=True))
    [(4, [3]), (6, [5])]
    >>> list(remaining_batches(range(5), 0, 2, replica=(1, 2), drop_last=False))  # 4 is no batch for two
    [(2, [1]), (5, [3, 4])]
    """
    index, replicas = replica
    while True:
        end = position + batch_size
        if not drop_last and len(order) - end < replicas:
            end = len(order)
        batch = order[position:end]
        if len(batch) < (batch_size if drop_last else replicas):
            return
        position += len(batch)
        first, last = (len(batch) * (index + i) // replicas for i in (0, 1))
        yield position, list(batch[first:last])


@dataclass(frozen=True, slots=True)
class _SeededInWorkers(Dataset[Any]):
    """A data set whose samples draw the same random numbers in whichever worker they are made.

    Without workers they draw from the generators of the rank, which are saved with it.
    """

    dataset: Any
    seeds: tuple[int, int]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        self._seed(number)
        return self.dataset[number]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[number] for number in numbers]
        self._seed(numbers[0])
        found: list[Any] = together(numbers)
        return found

    def _seed(self, number: int) -> None:
        if get_worker_info() is not None:
            (seed,) = numpy.random.SeedSequence([*self.seeds, number]).generate_state(1)
            random.seed(int(seed))
            numpy.random.seed(seed)
            torch.manual_seed(int(seed))


def _outlive_sigterm(_: int) -> None:
    """Has a worker end on SIGTERM only where the rank sends it, when it is done with its loader.

    A launcher or a scheduler sends it to all processes, and the rank that saves then still needs its workers.
    They end when the rank has ended, too.
    """
    rank = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid not in (rank, os.getpid()):
            pass
        os._exit(0)

    threading.Thread(target=listen, name="shardwright-sigterm", daemon=True).start()


def _check(dataset: Any, batch_size: int, *, replicas: int, drop_last: bool, options: dict[str, Any]) -> None:
    if not isinstance(dataset, Sized):
        raise UsageError(
            f"sw.data_loader takes a data set with a length and numbered samples, or a stream, not a "
            f"{type(dataset).__name__}."
        )
    _check_batch(batch_size, replicas=replicas, options=options)
    if len(dataset) < (batch_size if drop_last else replicas):
        least, remedy = f"there are replicas, {replicas}", "Give each one, or fewer replicas."
        if drop_last:
            least, remedy = f"a global batch of {batch_size}", "Give smaller batches, or drop_last=False."
        raise UsageError(f"the data set has {len(dataset)} samples, fewer than {least}. {remedy}")


def _check_batch(batch_size: int, *, replicas: int, options: dict[str, Any]) -> None:
    if not isinstance(batch_size, Integral) or batch_size < 1 or batch_size % replicas:
        raise UsageError(
            f"a global batch of {batch_size!r} samples cannot be divided by {replicas} replicas. Use a "
            f"multiple of {replicas}."
        )
    for name in ("batch_size", "sampler", "batch_sampler", "generator", "worker_init_fn", "in_order"):
        if name in options:
            raise UsageError(
                f"sw.data_loader decides about {name} itself, so that its position can be saved. Leave it "
                "out."
            )


def distributed_sampler(
    dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> "DistributedSampler[int]":
    """A sampler that gives each replica its own part of a data set; ranks of one replica get the same part.

    Call ``sampler.set_epoch(epoch)`` before each epoch, so that it shuffles anew.

    Args:
        dataset: anything with a length.
        shuffle: in another order every epoch.
        seed: of the shuffling; the same on every rank.
        drop_last: leave out samples that do not fill all replicas; else some are given twice.
    """
    current = context()
    twice = -len(dataset) % current.mesh.data
    if twice and not shuffle and not drop_last and current.rank == 0:
        log.warning(
            "%d samples over %d replicas: the sampler gives %d of them twice. Cut what you gather at "
            "len(dataset), or have each once, in sums too: "
            "sw.data_loader(dataset, global_batch_size, shuffle=False, drop_last=False).",
            *(len(dataset), current.mesh.data, twice),
        )
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]
        num_replicas=current.mesh.data,
        rank=current.data_rank,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


@contextmanager
def samplers_checked() -> Iterator[None]:
    """Warns of samplers that give every rank its own part, although ranks share the batch of a replica."""
    original = DistributedSampler.__iter__

    def iterate(self: "DistributedSampler[int]") -> Iterator[int]:
        _check_sampler(self)
        return original(self)

    DistributedSampler.__iter__ = iterate  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DistributedSampler.__iter__ = original  # type: ignore[method-assign]


def _check_sampler(sampler: "DistributedSampler[int]") -> None:
    if not is_initialized():
        return
    current = context()
    mesh = current.mesh
    if current.rank == 0 and sampler.num_replicas == mesh.world_size and mesh.data < mesh.world_size:
        warnings.warn(
            f"a DistributedSampler cuts the data set in {sampler.num_replicas} parts, one for each rank, but "
            f"only {mesh.data} of them are trained on: ranks of a pipeline share the batch of their first. "
            "Use sw.distributed_sampler(dataset), which counts replicas.",
            stacklevel=3,
        )


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch: the same in a replica, another in each replica.

    Args:
        seed: any number from 0; replica r uses seed + r.
    """
    own = seed + context().data_rank
    random.seed(own)
    numpy.random.seed(own % 2**32)
    torch.manual_seed(own)

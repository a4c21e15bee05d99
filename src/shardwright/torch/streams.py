"""One stream of samples for all replicas, with a position that any number of ranks resumes.

Every replica reads the whole stream, and takes its part of each global batch, as of numbered samples::

    stream                7 2 9 4 | 0 5 8 1 | 3 6 ...
    replica 0 of 2        7 2       0 5
    replica 1 of 2            9 4       8 1

The position is the stream's own ``state_dict()``: of a data set of Hugging Face, of an `IterableDataset` that
has one, or, where workers read, of torchdata's `StatefulDataLoader` around it.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar

import numpy
from torch import Tensor, strided
from torch.utils.data import DataLoader, IterableDataset, default_collate

from shardwright.errors import CheckpointError, UsageError

_STATE = ("state_dict", "load_state_dict")
_LOOKED_AT = 256  # elements of a tensor


def is_stream(dataset: Any) -> bool:
    numbered = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (isinstance(dataset, Iterable) and not numbered)


def check_stream(stream: Any, *, shuffle: bool | None) -> None:
    if isinstance(stream, Iterator | DataLoader):
        raise UsageError(
            f"sw.data_loader takes a data set, whose samples it puts into batches, not a "
            f"{type(stream).__name__}. Give it the data set; or go on with your own loader, one part for "
            "each replica (sw.rdp_rank(), sw.rdp_size()), and name it in sw.Checkpoints(state={...})."
        )
    if shuffle:
        raise UsageError(
            "shuffle=True was asked of a stream, of which nobody knows all samples. Shuffle in it: "
            "dataset.shuffle(seed=..., buffer_size=...) of Hugging Face."
        )
    split: Any = getattr(stream, "_distributed", None)  # of Hugging Face
    if split is not None and split.world_size > 1:
        raise UsageError(
            f"the stream is part {split.rank} of {split.world_size} already (split_dataset_by_node), and "
            "sw.data_loader gives each replica its part of each batch: samples would be left out. Give it "
            "the whole stream; or read the part by a StatefulDataLoader of your own."
        )


class FirstBatch:
    """The first global batch that this rank has read from a stream, for a comparison with other ranks'."""

    _digest: ClassVar[float] = 0.0

    @classmethod
    def note(cls, samples: list[Any]) -> None:
        content = sha256()
        for part in _content(samples):
            content.update(part)
        cls._digest = float(int.from_bytes(content.digest()[:6], "little"))

    @classmethod
    def take(cls) -> float:
        """Equal for equal samples; 0 where none were read since."""
        digest, cls._digest = cls._digest, 0.0
        return digest


def _content(value: Any) -> Iterator[bytes]:
    """What tells a sample from others, of the values that have a content."""
    if isinstance(value, dict):
        value = [each for item in value.items() for each in item]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _content(each)
    elif isinstance(value, Tensor) and value.layout is strided and not (value.is_meta or value.is_nested):
        yield from _content(_some(value.detach().reshape(-1)))
    elif isinstance(value, numpy.ndarray) and value.dtype != object:
        yield from _content(_some(value.reshape(-1)))
    elif isinstance(value, str | bytes | int | float | numpy.generic):
        yield repr(value).encode()


def _some(numbers: Any) -> list[Any]:
    found: list[Any] = numbers[:: max(1, len(numbers) // _LOOKED_AT)].tolist()
    return found


class StreamLoader:
    """See `shardwright.torch.data_loader`.

    Attributes:
        epoch: how many times the stream has ended.
        position: samples of this epoch that were given out, of all replicas together.
    """

    def __init__(
        self,
        stream: Any,
        batch_size: int,
        *,
        drop_last: bool,
        replica: tuple[int, int],
        options: dict[str, Any],
    ):
        self._stream = stream
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._part = _Part(*replica, options.pop("collate_fn", None) or default_collate)
        self._loader = self._with_workers(options) if options.get("num_workers") else None
        self._stateful = stream if self._loader is None else self._loader
        self._first = None  # the state before any sample, of a stream that goes on where it is
        if self._loader is None and not hasattr(stream, "set_epoch"):
            self._first = self._state()
        self._loaded: Any = None
        self._ahead: Any = None  # the state behind the batch, where another one has been read
        self._compared = False  # a first batch was noted
        self._ended = False  # nothing is behind the batch; the stream may be at its beginning again
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        """The batches of this replica, for the rest of the epoch."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self.epoch)
        ended, self._ended = self._ended, False
        state, self._loaded = self._loaded, None
        if state is None and self.position and _has_state(self._stateful):
            state = None if ended else self._now()  # the rest, after a loop that was left
        elif state is None:
            self.position, state = 0, self._first
        self._ahead = None
        if state is not None:
            self._stateful.load_state_dict(deepcopy(state))
        here = (self.epoch, self.position)
        for num_samples, batch in () if ended else self._global_batches():
            if here != (self.epoch, self.position):
                raise UsageError(
                    "the position of the data loader has changed in the middle of a loop over it: another "
                    "loop goes on, or resume() was called inside. Resume before the loop, and run one at a "
                    "time."
                )
            self.position += num_samples
            here = (self.epoch, self.position)
            yield batch
        self.epoch, self.position, self._ahead, self._ended = self.epoch + 1, 0, None, False

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, to be saved."""
        if not _has_state(self._stateful):
            raise CheckpointError(
                f"the position in a {type(self._stream).__name__} cannot be saved: it has no state_dict() "
                "and load_state_dict(). Give it both (data sets of Hugging Face have them), or leave the "
                "loader out of sw.Checkpoints(state=...): a resumed run then begins the stream anew."
            )
        state = self._loaded
        if state is None and self.position and not self._ended:
            state = self._now()
        workers = 0 if self._loader is None else self._loader.num_workers
        return {"epoch": self.epoch, "position": self.position, "workers": workers, "stream": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes at the position of another loader.

        Raises:
            CheckpointError: that was of numbered samples, or had other workers.
        """
        workers = 0 if self._loader is None else self._loader.num_workers
        if "stream" not in state:
            raise CheckpointError(
                "the data loader read samples by number when it was saved, and reads a stream here. Give it "
                "the data set that it had."
            )
        if state["stream"] is not None and state["workers"] != workers:
            raise CheckpointError(
                f"the data loader had num_workers {state['workers']} when it was saved, and has {workers} "
                "here: workers read a stream in turns, and the samples would be others. Give it as many."
            )
        self.epoch, self.position, self._loaded = state["epoch"], state["position"], state["stream"]
        self._ahead, self._ended = None, self._loaded is None and self.position > 0

    # ---- inside ----

    def _now(self) -> Any:
        """The state of the stream behind the last batch that was given out."""
        return self._state() if self._ahead is None else self._ahead

    def _state(self) -> Any:
        return deepcopy(self._stateful.state_dict()) if _has_state(self._stateful) else None

    def _with_workers(self, options: dict[str, Any]) -> Any:
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError as error:
            raise UsageError(
                f"num_workers is {options['num_workers']}, and only torchdata knows where workers are in a "
                "stream: pip install torchdata; or leave num_workers out."
            ) from error
        if not self._drop_last:
            raise UsageError(
                "drop_last=False was asked of a stream with workers, each of which would end with a smaller "
                "batch. Leave num_workers out where each sample counts, as in an evaluation."
            )
        return StatefulDataLoader(
            self._stream, batch_size=self._batch_size, drop_last=True, collate_fn=self._part, **options
        )

    def _global_batches(self) -> Iterator[tuple[int, Any]]:
        """Sizes of global batches, and this replica's parts of them."""
        if self._loader is not None:
            for batch in self._loader:
                yield self._batch_size, batch
            return
        samples = iter(self._stream)
        batch = list(islice(samples, self._batch_size))
        if not self._compared:
            self._compared = True
            FirstBatch.note(batch)
        while len(batch) == self._batch_size or (batch and not self._drop_last):
            rest: list[Any] = []
            if not self._drop_last:
                self._ahead = self._state()
                if len(batch) == self._batch_size:
                    rest = list(islice(samples, self._batch_size))
                if len(rest) < self._part.replicas:  # too few for a batch of their own
                    batch, rest = batch + rest, []
                self._ended = not rest and _has_state(self._stream)
            yield len(batch), self._part(batch)
            batch = rest if not self._drop_last else list(islice(samples, self._batch_size))


@dataclass(frozen=True, slots=True)
class _Part:
    """Collates the part of a replica."""

    replica: int
    replicas: int
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Any:
        if len(samples) < self.replicas:
            raise UsageError(
                f"the stream has {len(samples)} samples left, and {self.replicas} replicas: each needs one. "
                "Give fewer replicas, or drop_last=True."
            )
        first, last = (len(samples) * (self.replica + i) // self.replicas for i in (0, 1))
        return self.collate(samples[first:last])


def _has_state(stream: Any) -> bool:
    return all(callable(getattr(stream, name, None)) for name in _STATE)

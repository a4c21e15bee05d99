"""A tier of memory below a device's own, and memory that autograd keeps on its way to it and back.

Copies run on a stream of their own, beside the stream that computes. A copy begins when the stream that
computes has come to the call, and that stream goes on behind `wait` when the copy is done::

    computes   [ unit 0 ] r0 [ unit 1 ] r1 [ unit 2 ] w0 ...        r: the copy may begin; w: it has ended
    copies                └▶[ write 0 ]  └▶[ write 1 ]│
                                      └───────────────┘ memory that unit 0 has kept is free behind w0

The Python thread waits for nothing. Memory is given back behind `wait` alone, on the stream that computes, so
that PyTorch's allocator hands it on in the right order.

::

                 write()            left()              load()           last get()
    here ───────────────▶ leaving ────────▶ away ───────────────▶ coming ─────────▶ away
      ▲                       │  load(): it stays, and is not written if that has not begun
      └───────────────────────┘
"""

import contextlib
import time
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.quantities import format_bytes
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.pytorch.tensors import refuse_changed, version_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, specs_of, wrap
from shardwright.torch.tensor_parallel.spec import Spec


class Copy(Protocol):
    """One copy under way, to the tier or back."""

    @property
    def is_done(self) -> bool:
        """Whether the bytes are where they go; it does not wait."""
        ...

    def wait(self) -> None:
        """Has what computes from now on find the copy done."""
        ...

    def skip(self) -> bool:
        """Has it left out, if it has not begun; whether it will be."""
        ...

    def seconds(self) -> tuple[float, float]:
        """When it began and ended, on `time.perf_counter`; it has been waited for."""
        ...


class Tier(Protocol):
    """Takes the bytes of storages and gives them back. Copies are made in the order of the calls."""

    def reserve(self, num_bytes: int) -> None:
        """Takes room for so many bytes at once, where that can be told before anything is written."""
        ...

    def write(self, memory: Tensor) -> tuple[Any, Copy]:
        """Starts to copy bytes (a tensor of ``uint8``) to the tier; gives their place, and the copy.

        Nobody may change them, or let go of them, before the copy is done.
        """
        ...

    def read(self, place: Any, memory: Tensor) -> Copy:
        """Starts to copy the bytes of a place into memory of the device."""
        ...

    def free(self, place: Any) -> None:
        """The bytes of a place are not needed any more; a copy that reads them has been waited for."""
        ...

    def close(self) -> None:
        """Gives everything back; copies under way are waited for."""
        ...


class _StreamCopy:
    """See `Copy`."""

    __slots__ = ("_begin", "_clock", "_cuda", "_end")

    def __init__(self, cuda: Any, begin: Any, end: Any, clock: "_Clock"):
        self._cuda = cuda
        self._begin = begin
        self._end = end
        self._clock = clock

    @property
    def is_done(self) -> bool:
        """Whether the device is through with it."""
        return bool(self._end.query())

    def wait(self) -> None:
        """Has the stream that computes go on when the copy is done."""
        self._cuda.current_stream().wait_event(self._end)

    def skip(self) -> bool:
        """Does nothing: the stream has it."""
        return False

    def seconds(self) -> tuple[float, float]:
        """When it began and ended, on the clock of the host."""
        return self._clock.seconds(self._begin), self._clock.seconds(self._end)


class _Clock:
    """Puts events of a device on the clock of the host."""

    def __init__(self, cuda: Any):
        self._zero = cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.perf_counter()

    def seconds(self, event: Any) -> float:
        """The time of an event; waits for it."""
        event.synchronize()
        return float(self._zero_s + self._zero.elapsed_time(event) / 1000)


class PinnedTier:
    """See `Tier`."""

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda, pins: bool = True):
        self._device = device
        self._cuda = cuda
        self._pins = pins
        self._stream = cuda.Stream(device)
        self._clock = _Clock(cuda)
        self._free: dict[int, list[Tensor]] = {}
        self._taken = self._most = 0  # bytes of places in use: now, and at most since there were none

    def reserve(self, num_bytes: int) -> None:
        """Nothing: places have the sizes of what is written."""

    def write(self, memory: Tensor) -> tuple[Tensor, _StreamCopy]:
        """Starts to copy bytes to the host."""
        place = self._new_place(memory.nbytes)
        return place, self._copy(place, memory)

    def read(self, place: Tensor, memory: Tensor) -> _StreamCopy:
        """Starts to copy bytes to the device."""
        return self._copy(memory, place)

    def free(self, place: Tensor) -> None:
        """Another write may take the place; the stream makes copies in order, so none is disturbed."""
        self._free.setdefault(place.nbytes, []).append(place)
        self._taken -= place.nbytes
        if not self._taken:
            # Batches of other shapes would never find places of their sizes.
            if sum(size * len(places) for size, places in self._free.items()) > 2 * self._most:
                self._stream.synchronize()
                self._free.clear()
            self._most = 0

    def close(self) -> None:
        """Gives the memory of the host back."""
        self._stream.synchronize()
        self._free.clear()

    # ---- inside ----

    def _new_place(self, num_bytes: int) -> Tensor:
        self._taken += num_bytes
        self._most = max(self._most, self._taken)
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)
        except RuntimeError as error:
            raise UsageError(
                "activations are offloaded to the memory of the host, which has no "
                f"{format_bytes(num_bytes)} more to pin: {error}. Take more microbatches, start fewer ranks "
                "on this host, or set offload_activations to false."
            ) from error

    def _copy(self, target: Tensor, source: Tensor) -> _StreamCopy:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        # What is copied was computed, and memory that is copied to was let go of, on the current stream.
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
        return _StreamCopy(self._cuda, begin, end, self._clock)


class _Layout(NamedTuple):
    """How a tensor lies in its storage; of one that ranks share, how this rank's part does.

    Attributes:
        specs: of a tensor that ranks share, and of its part where ranks share that, too; of any other, none.
    """

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    specs: tuple[Spec, ...]


class SavedStorage:
    """One storage.

    Attributes:
        key: tells it from others that exist (`storage_key`).
        views: tensors that autograd keeps in it.
    """

    def __init__(self, tensor: Tensor, first: int):
        self.first = first
        self.key = storage_key(local_of(tensor))
        self.views = 0
        self._memory: Tensor | None = _whole(local_of(tensor))
        self.num_bytes = self._memory.nbytes
        self._device = self._memory.device
        self._ghosts: dict[_Layout, tuple[Tensor, int]] = {}
        self._tier: Tier | None = None
        self._place: Any = None
        self._write: Copy | None = None
        self._read: Copy | None = None
        self._is_wanted = False
        self._gets = 0

    # ---- in the forward ----

    def view(self, tensor: Tensor) -> "SavedView":
        """Keeps one of the tensors that lie in it."""
        layout = _layout_of(tensor)
        known = self._ghosts.get(layout)
        if known is None or known[1] != tensor._version:
            self._ghosts[layout] = known = _ghost(tensor), version_of(tensor)
        self.views += 1
        return SavedView(self, layout, *known)

    def has_same(self, tensor: Tensor) -> bool:
        """Whether a tensor that lies in it is one that it has kept, unchanged since."""
        ghost, version = self._ghosts.get(_layout_of(tensor), (None, -1))
        return ghost is not None and ghost._version == version == tensor._version

    def write(self, tier: Tier) -> None:
        assert self._memory is not None
        self._tier = tier
        self._place, self._write = tier.write(self._memory)

    @property
    def stays(self) -> bool:
        """Whether it has not left, and will not."""
        return self._place is None and self._write is None

    @property
    def may_go(self) -> bool:
        """Whether the copy to the tier is done, or there is none."""
        return self._write is None or self._write.is_done

    def leave(self) -> Copy | None:
        """Waits for the copy to the tier, and lets go of the memory; gives the copy."""
        copy, self._write = self._write, None
        if copy is not None:
            copy.wait()
            if not self._is_wanted:
                self._memory = None
        return copy

    # ---- in the backward ----

    def load(self) -> None:
        """Has it come back, if it is away; has it stay, if it is about to leave."""
        self._is_wanted = True
        if self._memory is not None:
            if self._write is not None and self._write.skip():
                self._write = None
                self._free()
        elif self._read is None:
            assert self._tier is not None
            self._memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            self._read = self._tier.read(self._place, self._memory)

    def arrive(self) -> Copy | None:
        """Waits for the copy from the tier; gives it."""
        copy, self._read = self._read, None
        if copy is not None:
            copy.wait()
        return copy

    def get(self) -> Tensor:
        """Its bytes, for one of its views; the last one takes them along."""
        assert self._memory is not None
        memory = self._memory
        self._gets += 1
        if self._gets >= self.views:
            self.drop()
        return memory

    def drop(self) -> None:
        """Lets go of memory that can be read again, now or when it has left."""
        self._is_wanted = False
        if self._place is not None and self._write is None:
            self.arrive()
            self._memory = None

    # ---- inside ----

    def _free(self) -> None:
        if self._place is not None:
            assert self._tier is not None
            self._tier.free(self._place)
            self._place = None

    def __del__(self) -> None:
        # A copy under way must not find its memory with another owner.
        with contextlib.suppress(UsageError):
            for copy in (self._write, self._read):
                if copy is not None and not copy.skip():
                    copy.wait()
        self._free()


class SavedView:
    """A tensor in a `SavedStorage`, as autograd keeps it."""

    __slots__ = ("_ghost", "_layout", "_version", "storage")

    def __init__(self, storage: SavedStorage, layout: _Layout, ghost: Tensor, version: int):
        self.storage = storage
        self._layout = layout
        self._ghost = ghost
        self._version = version

    def check(self) -> None:
        """Refuses a tensor that was changed in place since."""
        outermost = next(iter(self._layout.specs), self._layout)
        refuse_changed(self._ghost, self._version, shape=outermost.shape)

    def get(self) -> Tensor:
        """The tensor, for the backward; its storage has arrived."""
        memory, layout = self.storage.get(), self._layout
        tensor = torch.empty(0, dtype=layout.dtype, device=memory.device)
        tensor = tensor.set_(memory.untyped_storage(), layout.offset, layout.shape, layout.stride)
        for spec in reversed(layout.specs):
            tensor = wrap(tensor, spec)
        return tensor


def _whole(tensor: Tensor) -> Tensor:
    """The bytes of the storage in which a tensor lies."""
    bytes_of = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return bytes_of.set_(tensor.untyped_storage())


def _layout_of(tensor: Tensor) -> _Layout:
    local = local_of(tensor)
    return _Layout(int(local.storage_offset()), local.shape, local.stride(), local.dtype, specs_of(tensor))


def _ghost(tensor: Tensor) -> Tensor:
    """A tensor without memory whose changes in place are counted together with those of another."""
    ghost = tensor.detach()
    if isinstance(ghost, DividedTensor):
        ghost._local = local_of(ghost).new_empty(0)
    else:
        ghost.data = tensor.new_empty(0)
    return ghost

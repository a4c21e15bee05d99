"""Memory that autograd keeps of a unit: here, on its way to the tier, away, or on its way back.

::

                 write()            left()              load()           last get()
    here ───────────────▶ leaving ────────▶ away ───────────────▶ coming ─────────▶ away
      ▲                       │  load(): it stays, and is not written if that has not begun
      └───────────────────────┘
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch._private import storage_key
from shardwright.torch.offload.tier import Copy, Tier
from shardwright.torch.pytorch.tensors import refuse_changed, version_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, specs_of, wrap
from shardwright.torch.tensor_parallel.spec import Spec


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
        """Whether a tensor that lies in it is one that it has kept, unchanged since.

        Only then are its bytes those that have been copied.
        """
        ghost, version = self._ghosts.get(_layout_of(tensor), (None, -1))
        return ghost is not None and ghost._version == version == tensor._version

    def write(self, tier: Tier) -> None:
        """Starts to copy it to the tier."""
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

"""Offloads what the units of a stage keep for one microbatch, unit by unit.

::

    forward     [ unit 0 ][ unit 1 ][ unit 2 ] OFFLOAD
    copies                [0 ──▶]   [1 ──▶]    [2 ──▶]

    backward                             LOAD  [ unit 2 ][ unit 1 ][ unit 0 ]
    copies                 (horizon 1)   [──▶ 2]  [──▶ 1]   [──▶ 0]

A forward waits where more than `horizon` units of the rank are leaving. A backward that comes to a unit
starts to bring back the one that is `horizon` units further on. So no more than `horizon` + 1 units are here
at once, and as many as `horizon` more where another microbatch is on its way out or back.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.schedule import Kind
from shardwright.torch._private.modules import (
    gradient_transform_active,
    saved_tensor_hooks,
    transforms_beside_hooks,
)
from shardwright.torch._private.tensors import (
    StorageWeakRef,
    has_storage,
    outside_of_functions,
    storage_key,
    weak_storage,
)
from shardwright.torch.offload.saved_storage import Copy, SavedStorage, SavedView, Tier
from shardwright.torch.pytorch.tensors import KeptTensor, version_of
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, local_of, specs_of
from shardwright.torch.tensor_parallel.placing import known_sum


class _Outer:
    """A tensor that the hooks around ours keep in their way."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]):
        self._packed = packed
        self._unpack = unpack

    def get(self) -> Tensor:
        return self._unpack(self._packed)


class _Unsettled:
    """A partial sum of ranks that share layers: most are added up by the operation that saves them.

    So what leaves is known when the forward of the unit is over: the whole tensor, as a rule. Until then the
    tensor itself is held, which is a cycle where an operation saves its own result.
    """

    __slots__ = ("_packed", "_tensor", "_version")

    def __init__(self, tensor: DividedTensor):
        self._tensor: DividedTensor | None = tensor
        self._packed: SavedView | KeptTensor | None = None
        self._version = version_of(tensor)

    def settle(self, pack: Callable[[Tensor], "SavedView | KeptTensor"]) -> None:
        """The forward is over."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None
        if version_of(tensor) == self._version:
            self._packed = pack(known_sum(tensor))
        else:
            # A kept tensor that tells of it when it is used.
            self._packed = KeptTensor(tensor, version=self._version)

    def get(self, unpack: Callable[["SavedView | KeptTensor"], Tensor]) -> Tensor:
        if self._packed is not None:
            return unpack(self._packed)
        assert self._tensor is not None
        return KeptTensor(self._tensor, version=self._version).get()


class Leaving:
    """The units of a rank that are on their way to the tier, in order."""

    def __init__(self, most: int):
        self._most = most
        self._units: deque[_Unit] = deque()

    def add(self, unit: "_Unit") -> None:
        """A unit has begun to leave."""
        self._units.append(unit)
        while len(self._units) > self._most:
            self._units.popleft().leave()

    def let_go(self) -> None:
        """Lets go of the memory of those that have left."""
        while self._units and self._units[0].may_go:
            self._units.popleft().leave()

    def forget(self, units: Collection["_Unit"]) -> None:
        """Some need not leave any more."""
        self._units = deque(unit for unit in self._units if unit not in units)


class StageOffload:
    """One stage of a microbatch.

    Attributes:
        waited_s: seconds for which forwards and backwards have waited for copies.
    """

    def __init__(
        self,
        tier: Tier,
        leaving: Leaving,
        *,
        horizon: int,
        least_bytes: int,
        needed: Callable[[], Collection[int]],
    ):
        self.waited_s = 0.0
        self.moved: list[tuple[Kind, Copy]] = []
        self.least_bytes = least_bytes
        self._tier = tier
        self._leaving = leaving
        self._horizon = horizon
        self._needed = needed
        self._units: list[_Unit] = []
        self._known: dict[StorageWeakRef, SavedStorage] = {}
        self._comes_back = False
        self._at = 0

    # ---- in the forward ----

    @contextmanager
    def keeping(self, module: nn.Module) -> Iterator[None]:
        """Surrounds the forward of a unit."""
        if not torch.is_grad_enabled() or gradient_transform_active():
            yield
            return
        outer = saved_tensor_hooks()
        if outer is not None and not _keeps_as_is(outer):
            yield  # hooks of the script, or of a recomputation around the unit, save tensors in their own way
            return
        self.offload()
        unit = _Unit(module, self, len(self._units), outer)
        self._units.append(unit)
        with torch.autograd.graph.saved_tensors_hooks(unit.pack, unit.unpack), transforms_beside_hooks():
            yield

    def offload(self) -> None:
        """Starts to copy what the last unit has kept; makes room first, if too many are leaving."""
        self._leaving.let_go()
        if self._units and not self._units[-1].is_handed_over:
            self._units[-1].hand_over(self._tier, self._needed())
            self._leaving.add(self._units[-1])

    def storage_of(self, tensor: Tensor, number: int) -> SavedStorage:
        """The storage of a tensor that a unit keeps: one for all units, as long as it does not change."""
        key = weak_storage(local_of(tensor))
        known = self._known.get(key)
        if known is None or not (known.first == number or known.has_same(tensor)):
            self._known[key] = known = SavedStorage(tensor, number)
        self._units[number].storages[known] = None
        return known

    def left(self, storage: SavedStorage) -> None:
        """Waits until a storage has left."""
        begin_s = time.perf_counter()
        copy = storage.leave()
        self.waited_s += time.perf_counter() - begin_s
        self._note(Kind.OFFLOAD, copy)

    # ---- in the backward ----

    def load(self) -> None:
        """Starts to bring back the units whose backwards come first."""
        self._comes_back, self._at = True, len(self._units)
        self._known.clear()
        self._bring(len(self._units) - 1, len(self._units) - self._horizon)
        self._leaving.let_go()

    def come_to(self, number: int) -> None:
        """The backward has come to a unit."""
        if number >= self._at or not self._comes_back:
            return  # a unit may go backward in its own forward
        self._at = number
        self._leaving.let_go()
        for unit in self._units[number + 1 :]:
            unit.leave_to_autograd()
        for unit in self._units[number + 2 :]:
            unit.drop()  # autograd had no use for some of what it has kept
        self._bring(number, number - self._horizon)

    def arrive(self, storage: SavedStorage) -> None:
        """Waits for a storage."""
        storage.load()
        begin_s = time.perf_counter()
        copy = storage.arrive()
        self.waited_s += time.perf_counter() - begin_s
        self._note(Kind.LOAD, copy)

    def end(self) -> None:
        """The backward is over: what comes back has no use for others."""
        self._leaving.forget(self._units)
        self._units.clear()
        self._known.clear()

    def _bring(self, first: int, last: int) -> None:
        for number in range(first, max(last, 0) - 1, -1):
            for storage in self._units[number].storages:
                storage.load()

    def _note(self, kind: Kind, copy: Copy | None) -> None:
        if copy is not None:
            self.moved.append((kind, copy))


class _Unit:
    """One call of a unit."""

    def __init__(self, module: nn.Module, stage: StageOffload, number: int, outer: Any):
        self.storages: dict[SavedStorage, None] = {}
        self.is_handed_over = False
        self._module = module
        self._stage = stage
        self._number = number
        self._outer = outer
        self._unsettled: list[_Unsettled] = []

    @property
    def own(self) -> Sequence[SavedStorage]:
        """Those that no unit before keeps."""
        return [storage for storage in self.storages if storage.first == self._number]

    @property
    def may_go(self) -> bool:
        """Whether the copies of its own are done."""
        return all(storage.may_go for storage in self.own)

    def hand_over(self, tier: Tier, needed: Collection[int]) -> None:
        """Starts to copy its own."""
        self.is_handed_over = True
        with outside_of_functions():
            for each in self._unsettled:
                each.settle(self._packed)
        self._unsettled.clear()
        weights = {storage_key(local_of(t)) for t in (*self._module.parameters(), *self._module.buffers())}
        for storage in self.own:
            if storage.key not in needed and storage.key not in weights:
                storage.write(tier)

    def leave(self) -> None:
        """Waits until its own have left."""
        for storage in self.own:
            self._stage.left(storage)

    def leave_to_autograd(self) -> None:
        """Forgets what has not left: it goes with the node that keeps it."""
        self.storages = {storage: None for storage in self.storages if not storage.stays}

    def drop(self) -> None:
        """Lets go of what it had brought back."""
        for storage in self.own:
            storage.drop()

    # ---- hooks ----

    def pack(self, tensor: Tensor) -> "SavedView | KeptTensor | _Unsettled | _Outer":
        """Called by autograd for what the unit saves."""
        with outside_of_functions():
            if self._outer is not None:
                packed = self._outer[0](tensor)
                if not isinstance(packed, KeptTensor):
                    return _Outer(packed, self._outer[1])
            is_pending = any(spec.is_pending for spec in specs_of(tensor))
            if isinstance(tensor, DividedTensor) and is_pending and not self.is_handed_over:
                self._unsettled.append(_Unsettled(tensor))
                return self._unsettled[-1]
            return self._packed(tensor)

    def _packed(self, tensor: Tensor) -> SavedView | KeptTensor:
        if not self._may_leave(tensor):
            return KeptTensor(tensor)
        return self._stage.storage_of(tensor, self._number).view(tensor)

    def unpack(self, packed: "SavedView | KeptTensor | _Unsettled | _Outer") -> Tensor:
        """Called by autograd for what it needs."""
        if isinstance(packed, _Unsettled):
            return packed.get(self.unpack)
        if not isinstance(packed, SavedView):
            return packed.get()
        with outside_of_functions():
            packed.check()
            self._stage.come_to(self._number)
            self._stage.arrive(packed.storage)
            return packed.get()

    def _may_leave(self, tensor: Tensor) -> bool:
        # A view of a parameter (weight.t()) is as little an activation as the parameter.
        if type(tensor) not in (Tensor, DividedTensor) or isinstance(tensor._base, nn.Parameter):
            return False
        if any(spec.is_pending or spec.copied for spec in specs_of(tensor)):
            return False
        tensor = local_of(tensor)
        if not has_storage(tensor) or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= self._stage.least_bytes


def _keeps_as_is(hooks: tuple[Any, Any]) -> bool:
    """Whether hooks are those of our own that keep most tensors as they are."""
    return bool(getattr(getattr(hooks[0], "__self__", None), "keeps_tensors", False))

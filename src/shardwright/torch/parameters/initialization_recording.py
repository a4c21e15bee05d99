"""What fills large tensors while a model is built, written down to be done again for some of them alone."""

import bisect
import copy
import heapq
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.torch._private.tensors import (
    disabled_torch_function,
    make_wrapper,
    put_in_place,
    storage_key,
)
from shardwright.torch.pytorch.functions import written_arguments
from shardwright.torch.pytorch.tree import leaves, map_tree

# Smaller tensors are made at once: code looks at their values, and they take no memory to speak of.
_SMALL = 2**14


class _Place:
    """A tensor, as a part of some memory."""

    __slots__ = ("dtype", "offset", "size", "storage", "stride")

    def __init__(self, tensor: Tensor):
        self.storage = storage_key(tensor)
        self.dtype = tensor.dtype
        self.size = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.offset = int(tensor.storage_offset())


class DelayedTensor(torch.Tensor):
    """A large tensor while the model is built: it says that it is on the CPU, and has no memory."""

    meta: Tensor

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, meta: Tensor) -> "DelayedTensor":
        made: DelayedTensor = make_wrapper(cls, meta, device=torch.device("cpu"))
        made.meta = meta
        return made

    def __init__(self, meta: Tensor) -> None:
        super().__init__()

    @property
    def data(self) -> Tensor:
        """The tensor without its history, in the same memory."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        is_parameter, trained = isinstance(self, nn.Parameter), self.requires_grad
        if isinstance(value, DelayedTensor):
            self.meta = value.meta
            put_in_place(self, DelayedTensor(value.meta))
        else:
            put_in_place(self, nn.Parameter(value) if is_parameter else value.detach())
        self.requires_grad_(trained)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        others = {key: value for key, value in vars(self).items() if key != "meta"}
        vars(copied).update(copy.deepcopy(others, memo))
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # The recording handles it, which is in force as long as there are such tensors.
        raise NotImplementedError(f"{func} of a tensor whose initialisation is delayed")


@dataclass(frozen=True, slots=True)
class _Operation:
    """Something that was done.

    Attributes:
        arguments: (args, kwargs), with places of recorded tensors.
        results: what it gave that is recorded: (position among the results, its place).
        touched: memories that it reads or writes.
        generator: the state in front of it, where it draws random numbers.
    """

    function: Any
    arguments: Any
    results: tuple[tuple[int, _Place], ...]
    touched: frozenset[int]
    generator: Tensor | None


class InitializationRecording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is done to large tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}  # memory -> numbers of the operations that write to it
        self._memories: dict[int, Any] = {}  # keeps the keys from being used again
        self._delayed: list[weakref.ref[DelayedTensor]] = []

    def end(self) -> None:
        """Leaves the tensors that are still there on the meta device."""
        for reference in self._delayed:
            tensor = reference()
            if tensor is None or type(tensor) is not DelayedTensor:
                continue
            meta = tensor.meta.detach().requires_grad_(tensor.requires_grad)
            is_parameter = isinstance(tensor, nn.Parameter)
            put_in_place(tensor, nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta)
            vars(tensor).pop("meta", None)
            vars(tensor).pop("_is_param", None)
        self._delayed.clear()

    def knows(self, key: int) -> bool:
        """Whether this memory belongs to a recorded tensor."""
        return key in self._memories

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        given = {"dtype": dtype}
        cast: Tensor = self._keep(torch.ops.aten._to_copy.default, (tensor,), given, given)
        return cast

    def copy(self, tensor: Tensor) -> Tensor:
        given = {"memory_format": torch.contiguous_format}
        copied: Tensor = self._keep(torch.ops.aten.clone.default, (tensor,), given, given)
        return copied

    def values(self, tensor: Tensor) -> Tensor:
        """Does again what gave a tensor its values."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return self._redo(_Place(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [item for item in leaves((args, kwargs)) if isinstance(item, Tensor)]
        if any(isinstance(tensor, DelayedTensor) for tensor in tensors):
            wrappers = {id(item.meta): item for item in tensors if isinstance(item, DelayedTensor)}
            plain_args, plain_kwargs = map_tree(_meta_of, (args, kwargs))
            result = self._on_recorded(func, plain_args, plain_kwargs)
        elif tensors or not _makes_a_large_one(func, args, kwargs):
            return func(*args, **kwargs)
        else:
            wrappers = {}
            result = self._keep(func, args, {**kwargs, "device": torch.device("meta")}, kwargs)
        return map_tree(lambda item: self._wrapped(item, wrappers), result)

    def _wrapped(self, item: Any, wrappers: Mapping[int, DelayedTensor]) -> Any:
        if not isinstance(item, Tensor) or not item.is_meta:
            return item
        known = wrappers.get(id(item))
        if known is not None:
            return known
        made = DelayedTensor(item)
        self._delayed.append(weakref.ref(made))
        return made

    def _on_recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [item for item in leaves(written_arguments(func, args, kwargs)) if isinstance(item, Tensor)]
        looks = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        to_real = func._schema.name == "aten::_to_copy" and kwargs.get("device") not in (
            None,
            torch.device("meta"),
        )
        if looks or to_real or any(not self._is_known(tensor) for tensor in written):
            # Python wants to see values, or they leave for a tensor that is not recorded.
            real_args, real_kwargs = map_tree(self._real, (args, kwargs))
            return func(*real_args, **real_kwargs)
        meta_args, meta_kwargs = map_tree(_on_meta, (args, kwargs))
        return self._keep(func, meta_args, meta_kwargs, kwargs, args=args)

    def _keep(self, func: Any, meta_args: Any, meta_kwargs: Any, kwargs: Any, args: Any = None) -> Any:
        """Does something on the meta device, and writes it down unless it only looks at memory otherwise."""
        args = meta_args if args is None else args
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = torch.get_rng_state()
            self._draw(func, args, kwargs)
        result = func(*meta_args, **meta_kwargs)
        given = {storage_key(item) for item in leaves((args, kwargs)) if isinstance(item, Tensor)}
        outputs = [
            (position, item)
            for position, item in enumerate(leaves(result))
            if isinstance(item, Tensor) and item.is_meta
        ]
        fresh = [(p, item) for p, item in outputs if storage_key(item) not in given]
        written = {
            storage_key(t) for t in leaves(written_arguments(func, args, kwargs)) if isinstance(t, Tensor)
        }
        for _, item in fresh:
            self._memories[storage_key(item)] = item.untyped_storage()
            written.add(storage_key(item))
        if not written:
            return result  # a view
        known = {
            storage_key(t) for t in leaves((args, kwargs)) if isinstance(t, Tensor) and self._is_known(t)
        }
        operation = _Operation(
            function=func,
            arguments=map_tree(self._noted, (args, kwargs)),
            results=tuple((position, _Place(item)) for position, item in fresh),
            touched=frozenset(known | written),
            generator=generator,
        )
        for key in written:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Takes the random numbers of an operation from the generator, and throws them away."""
        written = {id(item) for item in leaves(written_arguments(func, args, kwargs))}

        def real(item: Any) -> Any:
            if id(item) in written:
                return torch.empty(item.shape, dtype=item.dtype)
            return self._real(item)

        real_args, real_kwargs = map_tree(real, (args, kwargs))
        if real_kwargs.get("device") == torch.device("meta"):
            real_kwargs = {**real_kwargs, "device": torch.device("cpu")}
        func(*real_args, **real_kwargs)

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.is_meta and self.knows(storage_key(tensor))

    def _real(self, item: Any) -> Any:
        if isinstance(item, Tensor) and self._is_known(item):
            return self.values(item)
        return item

    def _noted(self, item: Any) -> Any:
        """The record of an argument; values of small tensors may change later."""
        if not isinstance(item, Tensor):
            return item
        return _Place(item) if self._is_known(item) else item.detach().clone()

    # ---- doing it again ----

    def _redo(self, wanted: _Place) -> Tensor:
        memories: dict[int, Any] = {}

        def real(place: Any) -> Any:
            if not isinstance(place, _Place):
                return place
            memory = memories.get(place.storage)
            if memory is None:
                num_bytes = self._memories[place.storage].nbytes()
                memory = memories[place.storage] = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=place.dtype).set_(memory, place.offset, place.size, place.stride)

        for number in self._needed_for(wanted.storage):
            operation = self._operations[number]
            if operation.generator is not None:
                torch.set_rng_state(operation.generator)
            args, kwargs = map_tree(real, operation.arguments)
            if kwargs.get("device") == torch.device("meta"):
                kwargs = {**kwargs, "device": torch.device("cpu")}
            results = leaves(operation.function(*args, **kwargs))
            for position, place in operation.results:
                memories[place.storage] = results[position].untyped_storage()
        redone: Tensor = real(wanted)
        return redone

    def _needed_for(self, storage: int) -> list[int]:
        """Numbers of the operations on which a memory rests, in order."""
        found: set[int] = set()
        waiting: list[int] = []

        def before(key: int, number: int) -> None:
            """Looks for the last operation that wrote to a memory before another."""
            writers = self._writers.get(key, [])
            place = bisect.bisect_left(writers, number) - 1
            if place >= 0 and writers[place] not in found:
                found.add(writers[place])
                heapq.heappush(waiting, -writers[place])

        before(storage, len(self._operations))
        while waiting:
            number = -heapq.heappop(waiting)
            for key in self._operations[number].touched:
                before(key, number)
        return sorted(found)


def _meta_of(item: Any) -> Any:
    return item.meta if isinstance(item, DelayedTensor) else item


def _makes_a_large_one(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it makes a tensor from nothing, on the CPU, that is worth to be put off."""
    returns = func._schema.returns
    if len(returns) != 1 or str(returns[0].type) != "Tensor":
        return False
    if not any(argument.name == "device" for argument in func._schema.arguments):
        return False
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return False
    try:
        shape = func(*args, **{**kwargs, "device": torch.device("meta")})
    except (NotImplementedError, RuntimeError):
        return False
    return bool(shape.numel() * shape.element_size() >= _SMALL)


def _on_meta(item: Any) -> Any:
    if isinstance(item, Tensor) and not item.is_meta:
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
    return item

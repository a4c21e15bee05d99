"""Records the calls of a microbatch: what is called, and where each argument comes from."""

import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch._private.modules import num_parametrization_caches, saved_tensor_hooks
from shardwright.torch._private.tensors import attention_kernels_allowed, function_mode_depth
from shardwright.torch.execution.microbatches.microbatch import Microbatch
from shardwright.torch.execution.microbatches.rank_microbatch import SharedByMicrobatches
from shardwright.torch.execution.replay.flat_calls import CodeWatch
from shardwright.torch.execution.replay.held_state import HeldState, ImpureError
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.step_code import reads_values
from shardwright.torch.interception.unit_attributes import COLLECTED
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.program.program import Program
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.tensors import AutocastState, autocast_state
from shardwright.torch.pytorch.tree import Structure, flatten, leaves

Source = tuple[Any, ...]
"""Where a leaf comes from::

    ("batch", place)                a leaf of the batch
    ("call", number, place)         the result of a call
    ("held", module, kind, name)    a parameter or buffer
    ("fixed", value, key)           what every microbatch has
    ("deferred", stand-in)          another stage
    ("object", number)              an object that code has made, or has from somewhere (see `GivenObject`)
"""

_LARGEST_OBJECT = 1 << 14  # bytes
_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, slice, type(Ellipsis)),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """PyTorch's settings for this thread, which code may have others of around some operations."""

    grad_enabled: bool
    autocast: AutocastState
    autocast_cache: bool
    others: tuple[Any, ...]


def settings_now() -> Settings:
    others = (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        *attention_kernels_allowed(),
        num_parametrization_caches(),
        saved_tensor_hooks(),
    )
    return Settings(torch.is_grad_enabled(), autocast_state(), torch.is_autocast_cache_enabled(), others)


@dataclass(slots=True)
class Call:
    """A call that this rank has made.

    Attributes:
        instruction: None for a free operation that the trace does not have.
    """

    position: int
    instruction: Instruction | None
    func: Any
    structure: Structure
    sources: list[Source]
    settings: Settings
    num_results: int
    is_one: bool
    changes: bool

    @property
    def key(self) -> Any:
        """Equal for the same call of another microbatch."""
        sources = tuple(map(_key_of, self.sources))
        return self.position, id(self.func), self.structure.key, sources, self.settings, self.num_results


def _key_of(source: Source) -> Any:
    return source[2] if source[0] == "fixed" else (source[0], *map(_hashable, source[1:]))


def _hashable(item: Any) -> Any:
    return item if isinstance(item, int | str) else id(item)


@dataclass(slots=True)
class GivenObject:
    """An object that units are given: a cache for keys and values, for example.

    Attributes:
        pickled: as it was when a unit got it first; empty where that is not possible.
    """

    find: Callable[[], Any]
    pickled: bytes


class _NoTensors(pickle.Pickler):
    def persistent_id(self, item: Any) -> None:
        if isinstance(item, Tensor | nn.Module):
            raise pickle.PicklingError


def _pickled(item: Any) -> bytes:
    target = io.BytesIO()
    try:
        _NoTensors(target).dump(item)
    except Exception:
        return b""
    return target.getvalue() if target.tell() <= _LARGEST_OBJECT else b""


@dataclass(slots=True)
class Recording:
    """The calls of a microbatch.

    Attributes:
        why: it cannot be replayed; empty where it can.
        behind_backward: number of calls before ``backward``; None without one.
    """

    why: str = ""
    calls: list[Call] = field(default_factory=list)
    result: list[Source] = field(default_factory=list)
    result_structure: Structure | None = None
    behind_backward: int | None = None
    entry: Settings | None = None
    objects: list[GivenObject] = field(default_factory=list)

    def fail(self, why: str) -> None:
        """Notes that it cannot be replayed."""
        self.why = self.why or why
        for kept in (self.calls, self.objects):
            kept.clear()

    @property
    def key(self) -> Any:
        """Equal for recordings that are replayed alike."""
        structure = None if self.result_structure is None else self.result_structure.key
        result = tuple(map(_key_of, self.result))
        return [call.key for call in self.calls], result, structure, self.behind_backward, self.entry


@dataclass(slots=True)
class _Before:
    """What is known of a call before it is made."""

    position: int
    items: list[Any]
    structure: Structure
    sources: list[Source]
    settings: Settings
    versions: list[int | None]


class RecordingMicrobatch(Microbatch):
    """A microbatch that is run as ever, and recorded."""

    def __init__(
        self,
        index: int,
        program: Program,
        part: Any,
        batch: SharedByMicrobatches,
        *,
        recording: Recording,
        watch: CodeWatch,
        state: HeldState | None,
    ):
        super().__init__(index, program, part.arguments, batch)
        self._recording = recording
        self._watch = watch
        self._state = state
        self._sources: dict[int, tuple[weakref.ref[Any], Source]] = {}
        self._objects: dict[int, tuple[Any, int, HeldState | None]] = {}
        self._rest_on_more: set[int] = set()  # numbers of calls
        self._depth = 0
        self._is_inside = False
        for place, leaf in enumerate(part.leaves):
            if isinstance(leaf, Tensor):
                self._found(leaf, ("batch", place))
        for module in batch.model.modules():
            for kind, held in (("_parameters", module._parameters), ("_buffers", module._buffers)):
                for name, tensor in held.items():
                    if tensor is not None:
                        self._found(tensor, ("held", module, kind, name))

    # ---- what the script calls ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Executes a torch function between units as ever, and records it."""
        if self._recording.why or self._is_inside or func is Tensor.backward:
            return super().operation(func, args, kwargs)
        if reads_values(func):
            if any(isinstance(item, Tensor) and self._rests_on_more(item) for item in leaves((args, kwargs))):
                self._recording.fail("a value is read that does not follow from the batch alone")
            return super().operation(func, args, kwargs)
        return self._recorded(func, args, kwargs, super().operation)

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recording.why or self._is_inside:
            return super().unit_call(module, args, kwargs)
        if COLLECTED in kwargs:
            self._recording.fail("hooks collect what modules inside units give")
        if function_mode_depth() != self._depth:
            self._recording.fail("a mode of torch functions is in force around a unit")
        return self._recorded(module, args, kwargs, super().unit_call)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Hands over the loss as ever."""
        if gradient is not None:
            self._recording.fail("backward is given a gradient")
        self._recording.behind_backward = len(self._recording.calls)
        super().backward(loss, gradient)

    # ---- inside ----

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        """Makes a call; whatever happens in recording it only ends the recording."""
        self._is_inside, self._watch.is_open = True, False
        try:
            known = self._known_before(func, args, kwargs)
            result = call(func, args, kwargs)
            if known is not None:
                self._record(func, known, result)
            return result
        finally:
            self._is_inside, self._watch.is_open = False, True

    def _known_before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Before | None":
        try:
            items, structure = flatten((args, kwargs))
            sources = list(map(self._source, items))
            if self._state is not None and isinstance(func, nn.Module):
                changed = self._state.changed()
                if changed is not None:
                    self._recording.fail(f"{changed} changes around a unit")
                    return None
            versions = [item._version if _is_real(item) else None for item in items]
            return _Before(self._cursor.position, items, structure, sources, settings_now(), versions)
        except Exception as error:
            self._recording.fail(f"{name_of_call(func)} is given {error}")
            return None

    def _record(self, func: Any, known: "_Before", result: Any) -> None:
        recording = self._recording
        try:
            for item in known.items:
                if id(item) in self._objects:
                    self._objects[id(item)] = (*self._objects[id(item)][:2], HeldState((), (item,)))
        except Exception as error:
            recording.fail(f"{name_of_call(func)} changes {error}")
        position = self._cursor.position - 1
        instruction = self.program.instructions[position] if position >= known.position else None
        if recording.why or (instruction is not None and instruction.place is Place.ELSEWHERE):
            return
        results = [result] if isinstance(result, Tensor) else leaves(result)
        if any(map(self._rests_on_more, known.items)):
            self._rest_on_more.add(len(recording.calls))
        for place, item in enumerate(results):
            if _is_real(item):
                self._found(item, ("call", len(recording.calls), place))
        pairs = zip(known.items, known.versions, strict=True)
        changes = any(version is not None and item._version != version for item, version in pairs)
        recording.calls.append(
            Call(
                position,
                instruction,
                func,
                known.structure.without_template(),
                known.sources,
                known.settings,
                len(results),
                isinstance(result, Tensor),
                changes,
            )
        )

    def _rests_on_more(self, item: Any) -> bool:
        """Whether a tensor rests on others than those of the batch and of constants."""
        if not isinstance(item, Tensor):
            return False
        source = self._source(item)
        return source[0] in ("fixed", "held", "deferred") or (
            source[0] == "call" and source[1] in self._rest_on_more
        )

    def _found(self, tensor: Tensor, source: Source) -> None:
        self._sources[id(tensor)] = weakref.ref(tensor), source

    def _source(self, item: Any) -> Source:
        if type(item) is DeferredTensor:
            return "deferred", item
        if isinstance(item, Tensor):
            found = self._sources.get(id(item))
            if found is not None and found[0]() is item:
                return found[1]
            return "fixed", item, ("tensor", id(item))
        if isinstance(item, slice) and any(
            isinstance(part, Tensor) for part in (item.start, item.stop, item.step)
        ):
            raise ImpureError("a slice with tensors")
        if isinstance(item, _FIXED):
            return "fixed", item, (type(item), repr(item))
        if isinstance(item, nn.Module | type | torch.Generator) or callable(item):
            return "fixed", item, (type(item), id(item))
        return "object", self._object(item)

    def _object(self, item: Any) -> int:
        """The number of an object that a call is given."""
        known = self._objects.get(id(item))
        if known is not None:
            if known[2] is not None and known[2].changed() is not None:
                raise ImpureError(f"an object of class {type(item).__name__} that changes between units")
            return known[1]
        try:
            found = weakref.ref(item)
        except TypeError:
            raise ImpureError(f"an object of class {type(item).__name__}") from None
        number = len(self._recording.objects)
        self._recording.objects.append(GivenObject(found, _pickled(item)))
        self._objects[id(item)] = item, number, None
        return number

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        with super()._in_turn():
            self._watch.is_open = not self._is_inside
            try:
                yield
            finally:
                self._watch.is_open = False

    def _run(self) -> Any:
        self._recording.entry = settings_now()
        self._depth = function_mode_depth() + 1
        self._watch.begin()
        try:
            result = super()._run()
        finally:
            self._watch.end()
        recording = self._recording
        if self.is_behind_end:
            recording.fail("the step function reads values")
        if not recording.why:
            items, structure = flatten(result)
            try:
                recording.result = list(map(self._source, items))
                recording.result_structure = structure.without_template()
            except Exception as error:
                recording.fail(f"the result has {error}")
            if settings_now() != recording.entry:
                recording.fail("settings of PyTorch are changed")
        return result

    def close(self) -> None:
        self._sources.clear()
        self._objects.clear()
        super().close()


def _is_real(item: Any) -> bool:
    return isinstance(item, Tensor) and type(item) is not DeferredTensor

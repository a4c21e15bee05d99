"""What stands for an object while a file is read, and the object itself in its place afterwards.

A reader that runs nothing of the file makes these from what it finds there. They hold it, check it, and can
do nothing else; when all is read, `without_stand_ins` puts arrays, types, ranges and configurations in their
places, so that what was loaded can be used, and saved again, like what was saved::

    file ── reader ──> {"seeds": SavedArray, ...} ── without_stand_ins ──> {"seeds": numpy.ndarray, ...}
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import numpy


class StandIn:
    """Stands for an object that is made when all is read."""

    def restored(self) -> Any:
        """The object, once for each stand-in."""
        raise NotImplementedError


class SavedType(StandIn):
    """Stands for a ``numpy.dtype``: of numbers, texts and bytes, and of nothing else."""

    def __init__(self, code: str, *flags: Any):
        if not isinstance(code, str) or re.fullmatch(r"[biufcSU]\d{0,4}", code) is None:
            raise ValueError(f"arrays of {code!r} are not restored")
        self.dtype = numpy.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1]
        if order in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(order)
        if self.dtype.kind in "SU" and self.dtype.itemsize == 0 and isinstance(state[5], int):
            self.dtype = numpy.dtype(f"{self.dtype.kind}{state[5] // (4 if self.dtype.kind == 'U' else 1)}")

    def restored(self) -> Any:
        return self.dtype


class SavedArray(numpy.ndarray[Any, Any], StandIn):
    """Stands for an array, whose contents come with its state; classes of the script may get it as one."""

    _is_filled = False

    def __new__(cls) -> "SavedArray":
        return super().__new__(cls, 0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, saved, is_fortran, content = state
        if not isinstance(saved, SavedType) or not isinstance(content, bytes):
            raise ValueError("the array is not restored: it has other contents than numbers and texts")
        if saved.dtype.itemsize == 0:
            raise ValueError("the array is not restored: its elements take no room in the file")
        super().__setstate__((version, shape, saved.dtype, is_fortran, content))
        self._is_filled = True

    def restored(self) -> Any:
        if not self._is_filled:
            raise ValueError("an array has no contents")
        return self.view(numpy.ndarray)


class SavedRange(StandIn):
    """Stands for a `range`, of which a few bytes could fill any memory, were it made a set or a tuple."""

    def __init__(self, *limits: Any):
        self._range = range(*limits)

    def restored(self) -> Any:
        return self._range


class SavedAttributes(StandIn):
    """Stands for an object of which only the attributes are restored, and nothing is called.

    Attributes:
        real: its class; a class is made from this one for each.
        may_be_empty: an object of it may have no attributes.
    """

    real: type = object
    may_be_empty = False
    _attributes: Mapping[str, Any] | None = None
    _slots: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any):
        raise ValueError(f"a file may have the attributes of a {self.real.__name__}, and may not call it")

    def __setstate__(self, state: Any) -> None:
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        self._attributes = {key: value for key, value in (attributes or {}).items() if isinstance(key, str)}
        self._slots = slots or {}

    def restored(self) -> Any:
        """The object."""
        if self._attributes is None and not self.may_be_empty:
            raise ValueError(f"a {self.real.__name__} has no attributes")
        made: Any = object.__new__(self.real)
        if self._attributes:
            made.__dict__.update(self._attributes)
        return made

    def fill_slots(self, made: Any, restored: Callable[[Any], Any]) -> None:
        """Fills the slots of the object."""
        for kind in self.real.__mro__:
            for name, slot in vars(kind).items():
                if type(slot) is MemberDescriptorType and name in self._slots:
                    slot.__set__(made, restored(self._slots[name]))


def without_stand_ins(loaded: Any) -> Any:
    """The same, with what was saved in the places of the stand-ins.

    Args:
        loaded: what a reader has made; containers are changed in place where they can be.
    """
    return _Restoring().all_of(loaded)


class _Restoring:
    """Walks through containers and attributes, each once, and so through those that contain themselves."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._slotted: list[tuple[SavedAttributes, Any]] = []
        self._made: dict[int, Any] = {}
        self._seen: list[Any] = []  # alive, so that no other object gets its id

    def all_of(self, loaded: Any) -> Any:
        found = self._of(loaded)
        while self._waiting or self._slotted:
            if self._waiting:
                self._mend(self._waiting.pop())
            else:
                stand_in, made = self._slotted.pop()
                stand_in.fill_slots(made, self._of)
        return found

    def _of(self, value: Any) -> Any:
        """What takes the place of a value; what can be changed in place waits for that."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, type) and issubclass(value, StandIn):
            real = value.real if issubclass(value, SavedAttributes) else value
            raise ValueError(f"a class itself ({real.__name__}) is not restored, only objects of it")
        if isinstance(value, str | bytes | int | float | complex | type | None):
            return value
        if isinstance(value, StandIn):
            found = value.restored()
        elif type(value) in (tuple, frozenset):
            items = [self._of(item) for item in value]
            same = all(item is before for item, before in zip(items, value, strict=True))
            found = value if same else type(value)(items)
        elif isinstance(value, tuple) and hasattr(value, "_make"):  # a named one, which the script allows
            found = value._make(map(self._of, value))
        elif type(value) is slice:
            found = slice(self._of(value.start), self._of(value.stop), self._of(value.step))
        else:
            found = value
        self._made[id(value)] = found
        self._seen.append(value)
        if isinstance(value, SavedAttributes):
            self._slotted.append((value, found))
        if isinstance(found, list | dict | set):
            self._waiting.append(found)
        attributes = getattr(found, "__dict__", None)
        if isinstance(attributes, dict) and attributes:
            self._waiting.append(attributes)
        return found

    def _mend(self, container: Any) -> None:
        if isinstance(container, list):
            container[:] = [self._of(item) for item in container]
        elif isinstance(container, set):
            items = [self._of(item) for item in container]
            container.clear()
            container.update(items)
        else:
            before = list(container.items())
            after = [(self._of(key), self._of(value)) for key, value in before]
            if any(new is not old for (new, _), (old, _) in zip(after, before, strict=True)):
                for key, _ in before:
                    del container[key]
            for key, value in after:
                container[key] = value

"""Python attributes of modules that a step function changes: who writes and reads them, in a trace.

Stages of one rank take turns with the microbatches, so what one microbatch writes to an attribute is not what
it finds there on its next stage, unless somebody puts it back (`OwnAttributes`). A microbatch that writes
first has no need of others. One that reads first finds what the microbatch before left, which must have
written it by then::

    F(0, 0) reads a, F(0, 1) reads a, F(2, 0) writes a, F(2, 1) writes a      refused: 1 does not see 0's

One that is put back by the end (a flag that switches adapters off for a while) each microbatch finds as the
first one did.

The position arithmetic of Funnel (``seq_len``), and the marks that wav2vec 2.0 and its kin set at their first
forward, are such attributes; ``config.problem_type`` of 19 classifiers is in an object.

So it is with attributes of objects and entries of dictionaries that modules hold: a count in a context that
all blocks share. Who reads an entry is not seen, so that a number that is changed counts as read before. A
tensor does not: features that hooks collect are read by nobody, and one of another microbatch says so itself.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

from torch import nn

from shardwright.torch.interception.glue import active_handler
from shardwright.torch.python_state.class_watch import ClassWatch
from shardwright.torch.python_state.snapshot import DICTIONARIES, Slot, SlotContent, namespace_of
from shardwright.torch.python_state.stored_items import stores_item
from shardwright.torch.python_state.watched_containers import original_of
from shardwright.torch.pytorch.container_content import ABSENT, PLAIN, has_content
from shardwright.torch.pytorch.module_tree import OF_EVERY_MODULE
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import leaves

__all__ = ["Access", "AttributeUse", "AttributeUses"]

# Parameters, buffers, modules, hooks. Flags that a forward sets are of interest, whoever has declared them.
_OWN = OF_EVERY_MODULE - {"training"}


@dataclass(frozen=True, slots=True)
class Access:
    """An attribute is read or written.

    Attributes:
        before: number of steps that have run; a quarter more behind ``backward``, half of one more inside
            the unit that runs.
        writes: it is written, or what is in it has changed since the access before.
        line: where in the user's code.
    """

    before: float
    writes: bool
    line: str


@dataclass(frozen=True, slots=True)
class AttributeUse:
    """A changed attribute that code between units reads or writes.

    Attributes:
        module: whose attribute it is; also an object or a dictionary that a module holds.
        key: its name.
        name: how an error calls it.
        accesses: in order.
        carries_tensor: it holds a tensor of the graph when the microbatch ends.
        read_late: it is used behind ``backward``.
        in_place: it holds tensors whose values change.
        put_back: in the end it is what it was at the start.
    """

    module: Any
    key: Any
    name: str
    accesses: tuple[Access, ...]
    carries_tensor: bool
    read_late: bool
    in_place: bool
    put_back: bool = False

    @property
    def first_read(self) -> Access | None:
        """The access that finds what another microbatch left; None if the microbatch writes first."""
        return None if self.accesses[0].writes else self.accesses[0]

    @property
    def last_write(self) -> Access:
        """The last access by which it has changed."""
        return next((a for a in reversed(self.accesses) if a.writes), self.accesses[-1])


class AttributeUses:
    """Sees how some attributes are used.

    Args:
        places: which.
        position: tells where the trace is.
        rehearses: tells whether a call runs that the step function does not make.
    """

    def __init__(
        self, places: Sequence[Slot], position: Callable[[], float], *, rehearses: Callable[[], bool]
    ):
        self._places = list(places)
        self._position = position
        self._rehearses = rehearses
        self._log: dict[tuple[int, Any], list[Access]] = {(id(m), k): [] for m, k in places}
        self._from_glue: set[tuple[int, Any]] = set()
        self._watched: set[type] = set()  # classes of objects whose attributes tell when they are used
        self._initial = {(id(m), k): _content_of(m, k) for m, k in places}
        self._contents = dict(self._initial)
        self._in_place: set[tuple[int, Any]] = set()
        self._written: dict[tuple[int, str], Slot] = {}
        self._stores: dict[int, str] = {}  # list that is looked up to put an item into -> where
        # At the first other look at a list: where, and the places of items that were those of the start.
        self._kept_at_read: dict[tuple[int, Any], tuple[str, set[int]]] = {}
        self._told: set[tuple[int, Any]] = set()  # writes that were noted and not seen yet

    def look(self, *, inside: bool = False) -> None:
        """Looks what has changed in containers and tensors since the last time; before every step.

        Args:
            inside: a unit has just ended, and may have changed it.
        """
        told, self._told = self._told, set()
        stores, self._stores = self._stores, {}
        for module, key in self._places:
            before = self._contents[id(module), key]
            if type(before.value) in PLAIN and namespace_of(module).get(key) is before.value:
                continue
            now = _content_of(module, key)
            if now.value is before.value and has_content(now.inside, before.inside):
                if now.versions == before.versions:
                    continue
                self._in_place.add((id(module), key))
            self._contents[id(module), key] = now
            tells = isinstance(module, nn.Module) or type(module) in self._watched
            accesses = self._log[id(module), key]
            stored = stores.get(id(now.value), "")
            line = stored or (accesses[-1].line if accesses else user_line())
            position = self._position() - 0.5 * inside
            if now.value is not before.value and tells:
                if (id(module), key) not in told:  # by a unit of which a copy was run
                    accesses.append(Access(position, True, line))
                continue
            if not accesses and not stored:
                accesses.append(Access(position, False, line))
            accesses.append(Access(position, True, line))
            if not tells and not inside:
                self._from_glue.add((id(module), key))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sees what happens inside; which attributes are written it sees of all modules.

        Attributes of plain objects it sees where their classes let themselves be watched.
        """
        watch = ClassWatch(lambda item, key: self._note(item, key, writes=False), self._write)
        kinds = {type(holder) for holder, _ in self._places}
        try:
            watch.watch(nn.Module, reads=bool(self._places))
            for kind in kinds - DICTIONARIES:
                if not issubclass(kind, nn.Module) and watch.watch(kind):
                    self._watched.add(kind)
            yield
        finally:
            watch.forget()

    def _write(self, item: Any, key: str, write: Callable[[], None]) -> None:
        self._note(item, key, writes=True)
        is_module = isinstance(item, nn.Module) and key not in _OWN
        before = vars(item).get(key, ABSENT) if is_module else None
        write()
        if is_module and vars(item).get(key, ABSENT) is not before:
            self._written[id(item), key] = item, key

    def written(self, model: nn.Module) -> list[Slot]:
        """The attributes of a model's modules that were given another value, put back or not."""
        modules = {id(module) for module in model.modules()} if self._written else set()
        return [place for place in self._written.values() if id(place[0]) in modules]

    def _note(self, module: Any, key: str, *, writes: bool) -> None:
        accesses = self._log.get((id(module), key))
        if accesses is None or self._rehearses():
            return
        self.look()
        inside = active_handler() is None
        if not inside:
            self._from_glue.add((id(module), key))
        if writes:
            self._told.add((id(module), key))
        elif self._is_list(module, key):
            if stores_item(sys._getframe(3)):  # behind the watch: the code that looks it up
                self._stores[id(namespace_of(module)[key])] = user_line()
                return
            kept = self._unchanged_items(module, key)
            self._kept_at_read.setdefault((id(module), key), (user_line(), kept))
        accesses.append(Access(self._position() + 0.5 * inside, writes, user_line()))

    def _is_list(self, module: Any, key: Any) -> bool:
        return isinstance(module, nn.Module) and type(namespace_of(module).get(key)) is list

    def _unchanged_items(self, module: Any, key: Any) -> set[int]:
        """Places in a list where there still is what was there at the start."""
        before, now = self._initial[id(module), key].inside, namespace_of(module).get(key)
        if type(before) is not list or type(now) is not list:
            return set()
        return {i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one is other}

    def _reads_old_item(self, module: Any, key: Any) -> Access | None:
        """The first read of a list, if items are written behind it: it may have found those of another."""
        line, kept = self._kept_at_read.get((id(module), key), ("", set()))
        first = next((access for access in self._log[id(module), key] if access.line == line), None)
        return first if kept - self._unchanged_items(module, key) else None

    def uses(self, model: nn.Module, is_value: Callable[[Any], bool]) -> tuple[AttributeUse, ...]:
        """What was seen of attributes that code between units uses; before they are put back.

        Args:
            model: the whole model.
            is_value: tells whether a tensor is a value of the traced graph.
        """
        self.look()
        names = {id(module): name for name, module in model.named_modules()}
        found = []
        for module, key in self._places:
            if (id(module), key) in self._from_glue or self._is_handed_on(module, key):
                where = names.get(id(module)) or "the model"
                if not isinstance(module, nn.Module):
                    where = "what the model holds"
                name = f"{key} of {where} ({type(module).__name__})"
                accesses = tuple(self._log[id(module), key])
                if accesses[0].writes and (old := self._reads_old_item(module, key)) is not None:
                    accesses = (old, *accesses)
                carries = any(is_value(item) for item in leaves(namespace_of(module).get(key)))
                if carries and self._reads_are_presumed(module, key):
                    accesses = tuple(dropwhile(lambda access: not access.writes, accesses))
                late = any(access.before % 1 in (0.25, 0.75) for access in accesses)
                in_place = (id(module), key) in self._in_place
                put_back = not in_place and self._is_put_back(module, key)
                found.append(AttributeUse(module, key, name, accesses, carries, late, in_place, put_back))
        return tuple(found)

    def _reads_are_presumed(self, module: Any, key: Any) -> bool:
        """Whether who looks there first may do so to write: an entry of a dictionary, by its key.

        A list that is not replaced may get longer with every microbatch, and Python may look at its length.
        """
        before, now = self._initial[id(module), key], self._contents[id(module), key]
        if now.inside is not None and before.value is now.value:
            return isinstance(now.value, dict)
        return not isinstance(module, nn.Module) and type(module) not in self._watched

    def _is_handed_on(self, module: Any, key: Any) -> bool:
        """Whether a unit leaves something there for another, which may be on a later stage of its rank."""
        accesses = self._log[id(module), key]
        return len({access.before for access in accesses}) > 1 and accesses[0].writes

    def _is_put_back(self, module: Any, key: Any) -> bool:
        return self._contents[id(module), key].has_same(self._initial[id(module), key])


def _content_of(holder: Any, key: Any) -> SlotContent:
    """What is in a slot; the container itself where one that tells of reads stands in for it."""
    content = SlotContent.of(holder, key)
    original = original_of(content.value)
    return content if original is content.value else replace(content, value=original)

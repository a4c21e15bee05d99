"""Objects, lists and dictionaries that units share, and containers that a unit fills.

::

    feats.append(y)             in a unit that is given `feats`
    info["depth"] += 1

Every rank runs the step function with containers of its own, and only the rank of a unit runs the unit. So a
call that changes containers returns `Filled`: what the unit returned, and what is in the containers now. Its
tensors are values of the graph like any other result, its numbers are those of the trace, and every rank puts
both into its own containers.

Every rank has such objects of its own, and only the rank of a unit sees what the unit does to them::

    notes.depth += 1                        in one unit
    x = x / notes.depth                     in another: must be on the rank of the first

Who can get at a list or a set in which a unit has changed a number is bound to it. Reads of attributes and
entries of dictionaries are seen one by one, because of the caches of Hugging Face, which models use in
training unless a script says otherwise. All layers are given one, and each uses what is its own there::

    cache.layers[3].is_initialized          decoders (GPT-2, Llama, ...): an object for each layer
    cache.layers[3].has_previous_state[0]   Bamba, LFM2, Qwen3-Next: dictionaries in these
    cache.is_updated[3]                     encoder-decoders (T5, M2M-100, SpeechT5): a dictionary for all

Of tensors the use is seen, wherever they are (see `hidden_inputs`), and those in attributes of modules are
values of the graph. What a unit does to its own modules, it alone finds there.
"""

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from shardwright.torch.interception.unit_attributes import call_copy
from shardwright.torch.python_state.snapshot import ALL, ClassWatch, WatchedDict, walk
from shardwright.torch.pytorch.modules import OF_EVERY_MODULE
from shardwright.torch.pytorch.tree import (
    ABSENT,
    PLAIN,
    entries_of,
    flatten,
    is_same,
    leaves,
    put_entries,
    put_entry,
    same_entries,
)


class Filled(NamedTuple):
    """The result of a call that changes containers among its arguments.

    Attributes:
        contents: number of a container (see `Containers`) -> its entries.
    """

    result: Any
    contents: dict[int, dict[Any, Any]]


class _Contained(NamedTuple):
    """In place of an entry that is itself a container among the arguments."""

    number: int


class Containers:
    """The lists, dictionaries and dataclasses among the arguments of a call, numbered from the outermost."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        self._items = [item for given in (*args, *kwargs.values()) for item in _containers_in(given)]
        self._before = [entries_of(item) for item in self._items]

    @property
    def changed(self) -> tuple[int, ...]:
        """Numbers of those that hold something else than at first."""
        return tuple(
            number
            for number, (item, before) in enumerate(zip(self._items, self._before, strict=True))
            if not same_entries(entries_of(item), before)
        )

    def filled(self, result: Any, numbers: Sequence[int]) -> Any:
        """The result of a call, with the contents of these containers; the result alone for none."""
        if not numbers:
            return result
        known = {id(item): _Contained(number) for number, item in enumerate(self._items)}
        entries = {number: entries_of(self._items[number]) for number in numbers}
        return Filled(
            result,
            {
                number: {key: known.get(id(value), value) for key, value in held.items()}
                for number, held in entries.items()
            },
        )

    def put(self, contents: dict[int, dict[Any, Any]]) -> None:
        """Has these containers hold what `filled` found in others at the same places."""
        for number, entries in contents.items():
            own = {
                key: self._items[value.number] if type(value) is _Contained else value
                for key, value in entries.items()
            }
            put_entries(self._items[number], own)


def fill(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Puts what a call has filled into the step function's own containers.

    >>> losses = [1.0]
    >>> fill(Filled("y", {0: {0: 1.0, 1: 0.5}}), (losses,), {})
    'y'
    >>> losses
    [1.0, 0.5]
    """
    if type(result) is not Filled:
        return result
    Containers(args, kwargs).put(result.contents)
    return result.result


def filled_copy(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function or a copy of a unit (see `call_copy`); gives what leaves it, containers included.

    >>> filled_copy(lambda losses: losses.append(0.5), ([1.0],), {})
    Filled(result=None, contents={0: {0: 1.0, 1: 0.5}})
    """
    containers = Containers(args, kwargs)
    result = call_copy(func, args, kwargs)
    return containers.filled(result, containers.changed)


def returning_contents(
    call: Callable[..., Any], numbers: Sequence[int], refuse: Callable[[], NoReturn]
) -> Callable[..., Any]:
    """A call that fills copies of containers and returns their contents; so it can be made again."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if numbers:
            items, structure = flatten((args, kwargs))
            args, kwargs = structure.rebuild(items)
        containers = Containers(args, kwargs)
        result = call(*args, **kwargs)
        if not set(containers.changed).issubset(numbers):
            refuse()
        return containers.filled(result, numbers)

    return called


def _containers_in(tree: Any, around: frozenset[int] = frozenset()) -> Iterator[Any]:
    """The containers in a tree; `around` are those that the tree is in, to which it may refer back."""
    if id(tree) in around:
        return
    is_dataclass = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    if isinstance(tree, UserDict):
        yield from _containers_in(tree.data, around)
    elif isinstance(tree, list | dict) or is_dataclass:
        yield tree
    if isinstance(tree, dict):
        inner = list(tree.values())
    elif isinstance(tree, list | tuple):
        inner = list(tree)
    else:
        inner = list(entries_of(tree).values()) if is_dataclass else []
    around = around | {id(tree)} if inner else around
    for item in inner:
        yield from _containers_in(item, around)


_LONGEST = 1_000  # a longer container is data
_NUMBERS = PLAIN - {type(None)}
_Entries = dict[Any, Any]


class SharedState:
    """Sees which slots a call of a unit changes, and who reads them later."""

    def __init__(
        self,
        on_read: Callable[[int, Any], None],
        on_left: Callable[[Tensor], None],
        is_everywhere: Callable[[Any], bool],
        as_fake: Callable[[Tensor], Tensor],
    ):
        self._on_read = on_read
        self._on_left = on_left
        self._is_everywhere = is_everywhere
        self._as_fake = as_fake
        self._node: int | None = None
        self._units: dict[int, nn.Module] = {}  # node -> the unit
        # Id of a holder -> key -> the node that changed it last.
        self._changes: dict[int, dict[Any, int]] = {}
        self._keep_alive: list[Any] = []
        self._unseen: set[int] = set()  # changed holders of which no read is seen
        self._before: list[tuple[Any, _Entries]] = []
        self._copies: dict[int, tuple[Any, Any, _Entries]] = {}  # id of a copy -> it, the original, before
        self._watched: dict[int, WatchedDict] = {}  # id of a dictionary -> what stands in for it
        self._slots: list[tuple[Any, Any, Any]] = []  # where
        self._watch = ClassWatch(self._reads, self._writes)

    # ---- calls of units ----

    def enter(self, node: int, unit: nn.Module, arguments: Iterable[Any]) -> None:
        self._node, self._units[node] = node, unit
        self._before = list(_holders([unit, *arguments]))
        for holder, entries in self._before:
            if id(holder) in self._unseen:
                self._reads(holder, ALL)
            elif type(holder) is dict and id(holder) in self._changes:
                self._watched[id(holder)] = WatchedDict(holder, self._reads, entries)
        for holder, entries in self._before:
            for key, item in entries.items():
                if id(item) in self._watched and not isinstance(holder, set | deque):
                    stands_in = self._watched.get(id(holder), holder)
                    put_entry(stands_in, key, self._watched[id(item)])
                    self._slots.append((stands_in, key, item))
        for watched in self._watched.values():
            watched.begin()

    def stands_for(self, copy: Any, original: Any) -> None:
        """The call is given a copy, and what it does there is done to the original, too."""
        pairs = zip(_holders([copy]), _holders([original]), strict=False)
        for (own, before), (item, _) in pairs:
            item = item.original if isinstance(item, WatchedDict) else item
            self._copies[id(own)] = own, item, before

    def leave(self) -> None:
        for holder, key, container in self._slots:
            if entries_of(holder).get(key) is self._watched[id(container)]:
                put_entry(holder, key, container)
        for watched in self._watched.values():
            put_entries(watched.original, entries_of(watched))
        for holder, before in self._before:
            for key, old, item in self._changed(holder, before):
                self._note(holder, key, old, item)
        for copy, original, before in self._copies.values():
            changed = list(self._changed(copy, before))
            if changed and isinstance(copy, set | deque):
                put_entries(original, {key: self._own(item) for key, item in _state_of(copy).items()})
            for key, old, item in changed:
                own = self._own(item)
                if not isinstance(copy, set | deque) and (
                    own is not item or type(item) in PLAIN or item is ABSENT
                ):
                    put_entry(original, key, own)
                self._note(original, key, old, item)
        self._node = None
        self._before.clear()
        self._copies.clear()
        self._watched.clear()
        self._slots.clear()

    def forget(self) -> None:
        """Leaves classes and objects as they were."""
        self._watch.forget()
        for noted in (self._changes, self._units, self._unseen, self._keep_alive):
            noted.clear()

    def _own(self, item: Any) -> Any:
        """The item that the original of a copy gets in place of the copy's."""
        return self._as_fake(item) if isinstance(item, Tensor) else item

    def _changed(self, holder: Any, before: _Entries) -> Iterator[tuple[Any, Any, Any]]:
        """The slots that hold something else than before: key, and what was and is there."""
        now = _state_of(holder)
        for key in {**before, **now}:
            old, item = before.get(key, ABSENT), now.get(key, ABSENT)
            is_value = isinstance(holder, nn.Module) and isinstance(item, Tensor)
            if not (is_same(item, old) or is_value or self._is_everywhere(item)):
                yield key, old, item

    def _note(self, holder: Any, key: Any, old: Any, item: Any) -> None:
        """A slot has changed, by which Python may tell ranks apart."""
        assert self._node is not None
        if isinstance(holder, list | set | deque):
            parts = leaves((old, item))
            for part in parts:
                if isinstance(part, Tensor):
                    self._on_left(part)
            if not any(type(part) in _NUMBERS for part in parts):
                return
        elif isinstance(getattr(type(holder), str(key), None), cached_property):
            return
        self._changes.setdefault(id(holder), {})[key] = self._node
        self._keep_alive.append(holder)
        if type(holder) is not dict and (_is_container(holder) or not self._watch.watch(type(holder))):
            self._unseen.add(id(holder))

    # ---- reads and writes ----

    def _reads(self, holder: Any, key: Any) -> None:
        _, original, _ = self._copies.get(id(holder), (None, holder, None))
        changes = self._changes.get(id(original), {})
        found = changes.items() if key is ALL else [(key, changes[key])] if key in changes else []
        for place, writer in list(found):
            is_own = self._node is not None and self._units[writer] is self._units[self._node]
            if writer != self._node and not (is_own and isinstance(original, nn.Module)):
                self._on_read(writer, place)

    def _writes(self, item: Any, key: str, write: Callable[[], None]) -> None:
        write()
        _, original, _ = self._copies.get(id(item), (None, item, None))
        changes = self._changes.get(id(original), {})
        if key in changes:
            if self._node is None:  # code between units, which every rank runs
                del changes[key]
            else:
                changes[key] = self._node


def _holders(roots: Iterable[Any]) -> Iterator[tuple[Any, _Entries]]:
    """The objects and containers that code can get at, with what they hold; of modules, the user's own."""
    registries: set[int] = set()

    def skips(item: Any) -> bool:
        if issubclass(type(item), nn.Module):
            registries.update(id(vars(item).get(key)) for key in OF_EVERY_MODULE - {"_modules"})
        return id(item) in registries

    for item, entries in walk([(root, 1_000) for root in roots], longest=_LONGEST, skips=skips):
        if entries is not None and not isinstance(item, tuple):
            yield item, entries if _is_container(item) else _state_of(item)


def _state_of(holder: Any) -> _Entries:
    """The entries of a holder; of a module without parameters, modules inside it, and hooks."""
    entries = entries_of(holder)
    if isinstance(holder, nn.Module):
        return {key: item for key, item in entries.items() if key not in OF_EVERY_MODULE}
    return entries


def _is_container(holder: Any) -> bool:
    return issubclass(type(holder), dict | list | set | deque)

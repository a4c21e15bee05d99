"""Nested containers of tensors, and slots: the places where tensors lie.

Covers the containers that step functions and forwards pass around: dicts and their subclasses
(``ModelOutput``), named tuples, dataclasses, ``UserDict`` (``BatchEncoding``), lists, tuples and sets.
Anything else is a leaf.

A *slot* is a holder and a key: a module or an object and the name of an attribute, a dictionary and a key, a
list and an index, a class and a name. A holder's *entries* are all its slots, as a dictionary. A subclass of
a container may run code when it is read (a mapping that imports what it names), so it is read as its base.
"""

import copy
import dataclasses
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Sequence
from types import CellType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError


class Structure:
    """The shape of a tree: where its leaves go.

    A container is rebuilt from a shallow copy of the one that was flattened, so subclasses keep their class
    and their other attributes.
    """

    __slots__ = ("_key", "children", "keys", "kind", "template")

    def __init__(self, kind: str, template: Any, keys: Sequence[Any], children: "Sequence[Structure]"):
        self.kind = kind
        self.template = template
        self.keys = keys
        self.children = children
        self._key: Any = None

    @property
    def key(self) -> Any:
        """A hashable value, equal for trees of equal structure."""
        if self._key is None and self.kind != "leaf":
            keys = tuple(key if isinstance(key, str | int | bool) else repr(key) for key in self.keys)
            self._key = (type(self.template).__qualname__, keys, tuple(child.key for child in self.children))
        return self._key

    def paths(self) -> list[tuple[Any, ...]]:
        """The keys, names and positions that lead to each leaf, in the order of `flatten`."""
        if self.kind == "leaf":
            return [()]
        names = self.keys or range(len(self.children))
        return [
            (name, *path) for name, child in zip(names, self.children, strict=True) for path in child.paths()
        ]

    def in_plain_containers(self) -> list[bool]:
        """Of each leaf, whether nothing but tuples, lists and dictionaries is around it."""
        if self.kind == "leaf":
            return [True]
        found = [plain for child in self.children for plain in child.in_plain_containers()]
        return found if type(self.template) in (tuple, list, dict) else [False] * len(found)

    def rebuild(self, items: Sequence[Any]) -> Any:
        """Puts leaves back, in the order of `flatten`."""
        if self.kind == "leaf":
            return items[0]
        return self._build(iter(items))

    def _build(self, items: Iterator[Any]) -> Any:
        if self.kind == "leaf":
            return next(items)
        values = [child._build(items) for child in self.children]
        return _REBUILD[self.kind](self.template, self.keys, values)

    def arguments(self) -> Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Makes (args, kwargs) of leaves, of the structure of such a pair."""
        args, kwargs = self.children
        if not all(child is LEAF for child in (*args.children, *kwargs.children)):
            return self.without_template().rebuild
        count, names = len(args.children), tuple(kwargs.keys)
        if not names:
            return lambda items: (tuple(items), {})
        return lambda items: (tuple(items[:count]), dict(zip(names, items[count:], strict=True)))

    def without_template(self) -> "Structure":
        """The same structure, without holding on to the leaves of the tree it was made from."""
        if self.kind == "leaf":
            return self
        children = [child.without_template() for child in self.children]
        template = _REBUILD[self.kind](self.template, self.keys, [None] * len(children))
        return Structure(self.kind, template, self.keys, children)


LEAF = Structure("leaf", None, (), ())


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Lists the leaves of a tree, depth first, and its structure.

    >>> items, structure = flatten({"a": [1, 2], "b": (3,)})
    >>> items
    [1, 2, 3]
    >>> structure.rebuild([10, 20, 30])
    {'a': [10, 20], 'b': (30,)}
    """
    items: list[Any] = []
    try:
        return items, _flatten(tree, items, is_leaf)
    except RecursionError:
        raise UsageError(
            f"a {type(tree).__name__} of the step function holds itself, or nests thousands of containers, "
            "so the batch cannot be split. Pass its tensors without the references that lead back (from a "
            "node to its parent, say)."
        ) from None


def leaves(tree: Any) -> list[Any]:
    return flatten(tree)[0]


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    items, structure = flatten(tree)
    return structure.rebuild([function(item) for item in items])


def _flatten(tree: Any, items: list[Any], is_leaf: Callable[[Any], bool] | None) -> Structure:
    kind = type(tree)
    if kind in _ATOMS or isinstance(tree, _LEAVES) or (is_leaf is not None and is_leaf(tree)):
        items.append(tree)
        return LEAF
    if kind is tuple or kind is list:
        return Structure("sequence", tree, (), [_flatten(child, items, is_leaf) for child in tree])
    if isinstance(tree, dict):
        children = [_flatten(child, items, is_leaf) for child in tree.values()]
        return Structure("dict", tree, tuple(tree), children)
    if isinstance(tree, tuple):
        name = "namedtuple" if hasattr(tree, "_fields") else "tuple_subclass"
        return Structure(name, tree, (), [_flatten(child, items, is_leaf) for child in tree])
    if isinstance(tree, list):
        return Structure("list_subclass", tree, (), [_flatten(child, items, is_leaf) for child in tree])
    if isinstance(tree, UserDict):
        children = [_flatten(child, items, is_leaf) for child in tree.values()]
        return Structure("userdict", tree, tuple(tree), children)
    if isinstance(tree, set | frozenset):
        return Structure("set", tree, (), [_flatten(child, items, is_leaf) for child in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name))
        children = [_flatten(getattr(tree, name), items, is_leaf) for name in names]
        return Structure("dataclass", tree, names, children)
    items.append(tree)
    return LEAF


def _rebuild_dict(template: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    if type(template) is dict:
        return dict(zip(keys, values, strict=True))
    try:
        result = copy.copy(template)
        for key, value in zip(keys, values, strict=True):
            result[key] = value
    except TypeError:  # it cannot be changed
        return type(template)(zip(keys, values, strict=True))
    return result


def _rebuild_userdict(template: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    result = copy.copy(template)
    result.data = dict(zip(keys, values, strict=True))
    return result


def _rebuild_dataclass(template: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    result = copy.copy(template)
    for key, value in zip(keys, values, strict=True):
        object.__setattr__(result, key, value)
    return result


def _rebuild_list_subclass(template: Any, keys: Sequence[Any], values: Sequence[Any]) -> Any:
    try:
        result = copy.copy(template)
        result[:] = values
    except TypeError:  # it cannot be changed
        return type(template)(values)
    return result


_REBUILD: dict[str, Callable[[Any, Sequence[Any], Sequence[Any]], Any]] = {
    "sequence": lambda template, keys, values: type(template)(values),
    "dict": _rebuild_dict,
    # A constructor of its own may look at what it gets (PackedSequence): here it has been through it.
    "namedtuple": lambda template, keys, values: type(template)._make(values),
    "tuple_subclass": lambda template, keys, values: type(template)(values),
    "list_subclass": _rebuild_list_subclass,
    "userdict": _rebuild_userdict,
    "set": lambda template, keys, values: type(template)(values),
    "dataclass": _rebuild_dataclass,
}

_LEAVES = (Tensor, nn.Module)
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, complex, slice, type(Ellipsis), torch.Size})


Slot = tuple[Any, Any]
"""A holder, and the key of what it holds."""

ABSENT: Any = object()  # in place of an entry that is not there
PLAIN = frozenset({type(None), bool, int, float, str})  # what nothing can change


def entries_of(holder: Any) -> dict[Any, Any]:
    """The slots of a holder, with what they hold.

    >>> entries_of(["a", "b"])
    {0: 'a', 1: 'b'}
    """
    if isinstance(holder, dict):
        return dict(dict.items(holder))
    if isinstance(holder, list):
        return dict(enumerate(list.__iter__(holder)))
    if isinstance(holder, deque | tuple):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return {item: item for item in set.__iter__(holder)}
    if isinstance(holder, CellType):
        try:
            return {"": holder.cell_contents}
        except ValueError:
            return {}
    held = {name: _get(slot, holder) for name, slot in slots_of(type(holder)).items()}
    namespace = vars(holder) if type(holder).__dictoffset__ else {}
    return {**namespace, **{name: item for name, item in held.items() if item is not ABSENT}}


def inside_of(value: Any) -> dict[Any, Any] | None:
    """The entries of a dictionary, list or set; None for anything else."""
    return entries_of(value) if isinstance(value, dict | list | set) else None


def slots_of(kind: type) -> dict[str, Any]:
    """The descriptors of the ``__slots__`` of a Python class, by name."""
    return {
        name: slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if type(slot) is MemberDescriptorType
    }


def _get(slot: Any, holder: Any) -> Any:
    try:
        return slot.__get__(holder)
    except AttributeError:
        return ABSENT


def put_entry(holder: Any, key: Any, value: Any) -> None:
    """Has one slot hold something; `ABSENT` empties it, and takes the end off a list. Not for sets."""
    is_gone = value is ABSENT
    if isinstance(holder, dict):
        dict.pop(holder, key, None) if is_gone else dict.__setitem__(holder, key, value)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(key, None if is_gone else key + 1), () if is_gone else (value,))
    elif isinstance(holder, type):
        delattr(holder, key) if is_gone else setattr(holder, key, value)
    elif (slot := _Cell if isinstance(holder, CellType) else slots_of(type(holder)).get(key)) is not None:
        slot.__delete__(holder) if is_gone else slot.__set__(holder, value)
    else:
        put_entry(vars(holder), key, value)


_Cell: Any = CellType.cell_contents
_BASES = (OrderedDict, dict, list, deque, set)


def put_entries(holder: Any, entries: dict[Any, Any]) -> None:
    """Has a holder hold exactly this, dictionaries in this order; one that does may refuse writes."""
    now = entries_of(holder)
    if same_entries(now, entries):
        return
    base: Any = next((kind for kind in _BASES if isinstance(holder, kind)), None)
    if base is None:
        for key in {**now, **entries}:
            if now.get(key, ABSENT) is not entries.get(key, ABSENT):
                put_entry(holder, key, entries.get(key, ABSENT))
        return
    base.clear(holder)
    if issubclass(base, dict):
        for key, item in entries.items():
            base.__setitem__(holder, key, item)
    elif base is set:
        set.update(holder, entries)
    else:
        base.extend(holder, entries.values())


def is_same(one: Any, other: Any) -> bool:
    """Whether it is the same object, or the same number or text."""
    return one is other or (type(one) is type(other) and type(one) in PLAIN and bool(one == other))


def same_entries(one: dict[Any, Any] | None, other: dict[Any, Any] | None) -> bool:
    """Whether the same objects are held under the same keys, in the same order: hooks run in theirs."""
    if one is None or other is None:
        return one is other
    return list(one) == list(other) and all(one[key] is item for key, item in other.items())


def versions_of(value: Any) -> tuple[int, ...]:
    """How often tensors have been changed in place: a tensor, or those in a container."""
    inside = inside_of(value)
    items = (value,) if inside is None else inside.values()
    return tuple(item._version for item in items if type(item) is Tensor and not item.is_inference())

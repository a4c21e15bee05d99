"""Nested containers of tensors: flatten, rebuild, map.

Covers the containers that step functions and forwards pass around: dicts and their subclasses
(``ModelOutput``), named tuples, dataclasses, ``UserDict`` (``BatchEncoding``), lists, tuples and sets.
Anything else is a leaf.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import UsageError

__all__ = ["LEAF", "Structure", "flatten", "leaves", "map_tree"]


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
        """Of each leaf, whether nothing but tuples, lists and dictionaries is around it.

        Other containers may keep more of a leaf than the leaf itself: what a dataclass has computed of it.
        """
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
    """The leaves of a tree, depth first."""
    return flatten(tree)[0]


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to every leaf."""
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
    result = copy.copy(template)
    for key, value in zip(keys, values, strict=True):
        result[key] = value
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
    result = copy.copy(template)
    result[:] = values
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

"""Broadcasts the arguments of a replica's first rank to its other ranks.

A header goes ahead of the tensors, in `comm.codec`::

    [ leaf, leaf, ... ]     "tensor" with dtype, shape, ...; "value" with it; "local" with its class
    tree                    0 is a leaf, [name, keys, trees] a container of Python's, or of an own class

A custom container (a dataclass, a named tuple, a library's dictionary) is pickled without its leaves,
authenticated with the run's secret. Where the ranks have no secret, or pickle cannot find the class because a
function defines it, no pickle is sent: each rank takes the container at the same place in its own arguments,
which must have the same class and keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shardwright.comm.joining.run_secret import Seal, packed, unpacked
from shardwright.comm.tensor_codec import decode, encode
from shardwright.comm.transport import SmallCollectives
from shardwright.errors import UsageError
from shardwright.run.batch_broadcast import PLACE, Room, TensorBroadcast, header_read
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.batch.splitter import is_batch_tensor, refuse_packed
from shardwright.torch.pytorch.tensors import Order, from_memory_order, in_memory_order, order_of
from shardwright.torch.pytorch.tree import LEAF, Structure, flatten

_PLAIN_KINDS: dict[type, str] = {
    tuple: "tuple",
    list: "list",
    set: "set",
    frozenset: "frozenset",
    dict: "dict",
}
_PLAIN_NAMES = {name: kind for kind, name in _PLAIN_KINDS.items()}
_KINDS = {"tuple": "sequence", "list": "sequence", "set": "set", "frozenset": "set", "dict": "dict"}
_OWN = "own"
# Equal values of these are the same: 0.0 is equal to -0.0, and an array is equal to nothing.
_COMPARABLE = frozenset({type(None), bool, int, str, bytes, torch.dtype, torch.device})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the arguments, as the first rank describes it to the others."""

    kind: str  # "tensor", "value" or "local"
    shape: tuple[int, ...] = ()  # as it is sent
    dtype: torch.dtype | None = None
    requires_grad: bool = False
    order: Order | None = None
    value: Any = None


Outline = tuple[Any, ...]
"""A key that is equal for batches of equal headers, if it can be told without writing them."""


def outline(leaves: Sequence[Leaf], structure: Structure) -> Outline | None:
    """Equal ones have equal headers; None where that is not known without writing it."""
    shape = _outline_of(structure)
    values = [type(leaf.value) for leaf in leaves]
    if shape is None or not _COMPARABLE.issuperset(values):
        return None
    return shape, values, leaves


def _outline_of(structure: Structure) -> Outline | None:
    if structure.kind == "leaf":
        return ()
    kind = type(structure.template)
    children = tuple([_outline_of(child) for child in structure.children])
    if kind not in _PLAIN_KINDS or None in children:
        return None
    return kind, tuple(structure.keys), tuple(map(type, structure.keys)), children


def written_header(leaves: Sequence[Leaf], structure: Structure, seal: Seal | None) -> bytes:
    content = [[_plain_leaf(leaf) for leaf in leaves], _plain_tree(structure, seal)]
    data = encode(content, other=lambda thing: _bytes_of(thing, seal))
    return data if seal is None else seal.sealed(PLACE, data)


def read_header(data: bytes, own: Structure, seal: Seal | None) -> tuple[list[Leaf], Structure]:
    """The leaves and the structure of the first rank's batch."""
    if seal is not None:
        data = seal.opened(PLACE, data)
    with header_read():
        leaves, tree = decode(data, other=lambda piece: unpacked(piece, seal, PLACE))
        return [_leaf(plain) for plain in leaves], _tree(tree, own)


def _plain_leaf(leaf: Leaf) -> list[Any]:
    if leaf.kind != "tensor":
        return [leaf.kind, leaf.value]
    order = None if leaf.order is None else list(leaf.order)
    return ["tensor", list(leaf.shape), leaf.dtype, leaf.requires_grad, order]


def _leaf(plain: Any) -> Leaf:
    kind, *rest = plain
    if kind != "tensor":
        (value,) = rest
        return Leaf(str(kind), value=value)
    shape, dtype, requires_grad, order = rest
    if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("it has a tensor without a shape or a dtype")
    return Leaf("tensor", tuple(shape), dtype, bool(requires_grad), None if order is None else tuple(order))


@dataclass(frozen=True, slots=True)
class _Own:
    """A container of a class that is not Python's own, without its leaves."""

    container: Any


def _bytes_of(thing: Any, seal: Seal | None) -> bytes:
    return packed(thing.container if type(thing) is _Own else thing, seal, PLACE)


def _plain_tree(structure: Structure, seal: Seal | None) -> Any:
    if structure.kind == "leaf":
        return 0
    children = [_plain_tree(child, seal) for child in structure.children]
    name = _PLAIN_KINDS.get(type(structure.template))
    if name is not None:
        return [name, list(structure.keys), children]
    is_found = "<locals>" not in type(structure.template).__qualname__
    container = _Own(structure.without_template().template) if is_found and seal is not None else None
    return [_OWN, list(structure.keys), children, structure.kind, _class_name(structure.template), container]


def _class_name(container: Any) -> str:
    return f"{type(container).__module__}.{type(container).__qualname__}"


def _tree(plain: Any, own: Structure | None) -> Structure:
    """The structure that is described."""
    if plain == 0:
        return LEAF
    name, keys, children, *rest = plain
    is_alike = own is not None and len(own.children) == len(children)
    ours = own.children if own is not None and is_alike else [None] * len(children)
    parts = [_tree(child, mine) for child, mine in zip(children, ours, strict=True)]
    if name != _OWN:
        kind = _PLAIN_NAMES[name]
        if kind is dict and len(keys) != len(parts):
            raise ValueError(f"it has a dictionary of {len(keys)} keys with {len(parts)} values")
        return Structure(_KINDS[name], kind(), tuple(keys), parts)
    own_kind, class_name, container = rest
    if container is None:
        container = _own_container(own, own_kind, class_name, keys if is_alike else None)
    return Structure(own_kind, container, tuple(keys), parts)


def _own_container(own: Structure | None, kind: str, class_name: str, keys: list[Any] | None) -> Any:
    """The container among this rank's arguments, if it is of the same class and has the same keys."""
    is_same = own is not None and own.kind == kind and keys is not None and list(own.keys) == keys
    if own is None or not is_same or _class_name(own.template) != class_name:
        raise UsageError(
            f"the first rank of the replica passes a {class_name[:200]} to the step function, this rank "
            "passes other arguments, and such objects are sent to nobody by ranks without a secret, or if a "
            "function defines their class. Pass the same kinds of objects on every rank; or define the class "
            "in a module, and set SHARDWRIGHT_SECRET, the same on all hosts (openssl rand -hex 32)."
        )
    return own.without_template().template


_PLAIN = (bool, int, float, str, bytes, complex, slice, torch.dtype, torch.device)


class BatchBroadcast:
    """Gives all ranks of a replica the arguments of its first rank.

    Tensors and plain values (numbers, text, None, arrays of NumPy) come from the first rank; anything else
    (the model, an optimizer, a namespace of options) is each rank's own object at the same place.
    """

    def __init__(self, replica: SmallCollectives, *, source: int, device: torch.device):
        self._tensors = TensorBroadcast(replica, source=source, device=device)
        self._outline: Outline | None = None
        self._leaves: list[Leaf] = []
        self._structure = LEAF

    def __call__(self, arguments: Arguments) -> Arguments:
        """Collective over the replica."""
        items, structure = flatten(arguments)
        if self._tensors.is_source:
            self._send(items, structure)
            return arguments
        tensors = iter(self._tensors.receive(partial(self._read, structure)))
        described, common = self._leaves, self._structure
        taken: list[Any] = []
        for position, leaf in enumerate(described):
            if leaf.kind == "tensor":
                tensor = from_memory_order(next(tensors), leaf.order)
                taken.append(tensor.requires_grad_() if leaf.requires_grad else tensor)
            elif leaf.kind == "value":
                taken.append(leaf.value)
            elif len(items) == len(described) and structure.key == common.key:
                taken.append(items[position])
            else:
                raise UsageError(
                    f"the first rank of the replica passes a {leaf.value} to the step function, which "
                    "cannot be sent, and this rank passes other arguments. Pass the same objects on "
                    "every rank; tensors may differ."
                )
        args, kwargs = common.rebuild(taken)
        return args, kwargs

    def _send(self, items: Sequence[Any], structure: Structure) -> None:
        described = [_describe(item) for item in items]
        now = outline(described, structure)
        header = None
        if now is None or now != self._outline:
            refuse_packed(structure)
            header, self._outline = written_header(described, structure, self._tensors.seal), now
        device = self._tensors.device
        tensors = [
            in_memory_order(item.detach().to(device), leaf.order)
            for item, leaf in zip(items, described, strict=True)
            if leaf.kind == "tensor"
        ]
        self._tensors.send(tensors, header)

    def _read(self, own: Structure, header: bytes) -> Room:
        self._leaves, self._structure = read_header(header, own, self._tensors.seal)
        return [
            (leaf.shape, leaf.dtype)
            for leaf in self._leaves
            if leaf.kind == "tensor" and leaf.dtype is not None
        ]


def _describe(item: Any) -> Leaf:
    if is_batch_tensor(item):
        if item.layout is not torch.strided or item.is_nested:
            raise UsageError(
                f"a tensor of shape {tuple(item.shape)} in the batch has the layout {item.layout}; only "
                "dense ones are sent to the other ranks. Pass adj.to_dense(), or its parts, named "
                "in non_split_inputs, and build it in the step function: adj = adj.coalesce(); train_step("
                "model, x, adj.indices(), adj.values()), and in it torch.sparse_coo_tensor(indices, values, "
                "size)."
            )
        order = order_of(item)
        shape = tuple(in_memory_order(item, order).shape)
        return Leaf("tensor", shape, item.dtype, item.requires_grad, order)
    if item is None or type(item) in _PLAIN or isinstance(item, np.generic | np.ndarray):
        return Leaf("value", value=item)
    return Leaf("local", value=type(item).__name__)


def loaded_another(own: Batch, agreed: Batch) -> bool:
    """Whether a batch of the same form has another first or last sample; zeros just fill a place."""
    mine, theirs = own.leaves, agreed.leaves
    if len(mine) != len(theirs):
        return False
    for item, other in zip(mine, theirs, strict=True):
        if not is_batch_tensor(item) or not is_batch_tensor(other):
            continue
        if item is other or not item.dim() or not len(item):
            return False
        if item.shape != other.shape or item.dtype != other.dtype:
            return False
        with torch.no_grad():
            ends, others = item[[0, -1]], other[[0, -1]].to(item.device)
            return bool(ends.any()) and not torch.allclose(ends, others, rtol=0, atol=0, equal_nan=True)
    return False
